"""Running a TensorDict policy on plain tensors, at the cost of its tensor operations."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules.utils import get_primers_from_module

from kit.collectors.in_numpy import NotInNumpy, NumpyProgram
from kit.envs.spaces import Key
from kit.fast.old_trace import FlatProgram, NotTraceable, trace
from kit.fast.watch import Watch
from kit.steps import SettingError

Tensors = dict[Key, Tensor]
Policy = Callable[[TensorDictBase], TensorDictBase]

IS_INIT = "is_init"
"""Key under which a policy finds whether an observation is the first of its episode."""


class PolicyRunner:
    """Calls a policy with the tensors it reads and returns the tensors it writes.

    The policy is traced once; later calls replay its tensor operations, with the same results and
    the same random numbers, reading the parameters where they live: the learner's updates are seen
    at once and nothing is synchronised. A policy that cannot be traced (it decides something on
    the host) runs as a TensorDict module; the reason is told once.

    A policy may remember: what it writes in one step it finds in the next, ``("next", key)`` under
    ``key``, as in TorchRL. The memory of a copy is set to its first value (that of the policy's
    primers, else zero) when its episode ends (:meth:`ended`), and ``is_init`` is true then.

    Args:
        policy: module (or function) from TensorDict to TensorDict.
        reads: keys that the environment gives it; others that it asks for are an error.
        num_envs: rows of every tensor.
        exploration_type: whether actions are sampled.
        fast: whether to trace at all.
        device: where the policy's memory is.
        in_numpy: keys of the actions, where NumPy may make a policy's operations; none: it may not.

    Attributes:
        out_keys: what a call returns, in this order; known after the first call. The memory that
            the policy was given is returned too, where it is not under the key it was written to.
        plain_reason: why the policy runs as a TensorDict module; empty while it does not.
        in_numpy: the policy's operations made by NumPy; ``None`` where it cannot make them.
        numpy_reason: why it cannot; empty while it can.

    Raises:
        SettingError: if the policy reads a key that nobody gives.
    """

    def __init__(
        self,
        policy: Policy,
        reads: Sequence[Key],
        num_envs: int,
        *,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        fast: bool = True,
        device: torch.device | str = "cpu",
        in_numpy: Sequence[Key] = (),
    ) -> None:
        self.policy = policy
        self.num_envs = num_envs
        self.exploration_type = exploration_type
        self.out_keys: list[Key] = []
        self.plain_reason = "" if fast else "asked for"
        self._given = list(reads)
        self._first = _first_values(policy, num_envs, device)
        self._memory: Tensors = dict(self._first)
        self._starts = torch.ones(num_envs, 1, dtype=torch.bool, device=device)
        self._ongoing = torch.zeros_like(self._starts)
        _check_reads(policy, self._given, self._first)
        self._written: list[Key] = []  # by the policy, in the order of the program's outputs
        self._fed: list[Key] = []  # memory that is returned as it was given
        self._program: FlatProgram | None = None
        self._keys_read: list[Key] = []
        self._watch = Watch(policy)
        self._verified = False
        self.remembers = True
        self.in_numpy: NumpyProgram | None = None
        self.numpy_reason = "" if in_numpy else "not asked for"
        self._action_keys = in_numpy

    def prepare(self, observation: Mapping[Key, NDArray[Any]] | None = None) -> None:
        """Forget the trace if the policy is no longer what was traced; call once per batch.

        Args:
            observation: to be acted on first; needed where NumPy is to make the operations, as the
                policy is then traced before the first step.
        """
        programs = [one for one in (self._program, self.in_numpy) if one is not None]
        if self._watch.look_closely() or not all(program.is_valid() for program in programs):
            self._program = self.in_numpy = None
        if self._program is None and self._action_keys and observation is not None:
            self._trace_ahead({key: torch.from_numpy(a) for key, a in observation.items()})

    @property
    def replays(self) -> bool:
        """Whether calls replay a trace, so that they may run in inference mode."""
        return self._program is not None and self._verified

    def __call__(self, tensors: Mapping[Key, Tensor]) -> Sequence[Tensor]:
        """Return what the policy writes, in the order of ``out_keys``.

        To be called without gradients.

        Args:
            tensors: what the environment gives, each with ``num_envs`` rows.
        """
        if self._program is not None and self._verified and not self.remembers:
            return self._program(*[tensors[key] for key in self._keys_read])
        pool = {IS_INIT: self._starts, **tensors, **self._memory}
        if self._program is not None:
            outputs = self._replay(pool) if self._verified else self._verify(pool)
        elif self.plain_reason or not self._written:
            outputs = self._plain(pool)
        else:
            outputs = self._trace(pool)
        return self._remember(outputs, pool) if self.remembers else outputs

    def plainly(self, tensors: Mapping[Key, Tensor]) -> Sequence[Tensor]:
        """Do what a call does, through the TensorDict module: to trace it with more around it."""
        pool = {IS_INIT: self._starts, **tensors, **self._memory}
        outputs = self._plain(pool)
        return self._remember(outputs, pool) if self.remembers else outputs

    @property
    def memory(self) -> Tensors:
        """What the next call remembers."""
        return self._memory if self.remembers else {}

    @memory.setter
    def memory(self, memory: Tensors) -> None:
        self._memory = memory

    def peek(self, tensors: Mapping[Key, Tensor]) -> Sequence[Tensor]:
        """Return what a call would, and leave everything as it was: memory, buffers, numbers."""
        with self._without_traces():
            pool = {IS_INIT: self._starts, **tensors, **self._memory}
            return self._remember(self._plain(pool), pool)

    @contextlib.contextmanager
    def _without_traces(self) -> Iterator[None]:
        """Put back memory, buffers, random numbers and plain attributes afterwards."""
        generator, memory, starts = torch.get_rng_state(), self._memory, self._starts
        buffers = list(self.policy.buffers()) if isinstance(self.policy, nn.Module) else []
        saved = [buffer.clone() for buffer in buffers]
        settings = self._watch.settings()
        try:
            yield
        finally:
            torch.set_rng_state(generator)
            self._memory, self._starts = memory, starts
            for buffer, value in zip(buffers, saved):
                buffer.copy_(value)
            for attributes, name, value in settings:
                attributes[name] = value

    def stand_by(self) -> Tensor:
        """Let a step pass in which somebody else acts; return ``is_init`` of this step."""
        starts, self._starts = self._starts, self._ongoing
        return starts

    # ------------------------------------------------------------------ three ways to call it
    def _plain(self, pool: Tensors) -> Sequence[Tensor]:
        given = TensorDict(dict(pool), [self.num_envs])
        with set_exploration_type(self.exploration_type):
            result = self.policy(given)
        if not self._written:
            self._written = _written(self.policy, pool, result)
            public = [key for key in self._written if not _is_private(key)]
            self._fed = [key[1:] if len(key) > 2 else key[1] for key in public if _is_next(key)]
            starts = [IS_INIT] if self._fed and IS_INIT not in self._given else []
            self.out_keys = [*public, *self._fed, *starts]
        return [result.get(key) for key in self._written]

    def _trace(self, pool: Tensors) -> Sequence[Tensor]:
        keys, generator = list(pool), torch.get_rng_state()
        # What is remembered may show one memory. Observations stay where they are: MKL rounds as
        # an array happens to be aligned.
        apart = [value.clone() if key in self._memory else value for key, value in pool.items()]
        try:
            self._program, outputs = trace(
                lambda *tensors: self._plain(dict(zip(keys, tensors))),
                apart,
                keep=bool(self._action_keys),
            )
        except NotTraceable as reason:
            self._program = None
            self._tell(str(reason))
            torch.set_rng_state(generator)
            return self._plain(pool)
        self._keys_read = [keys[number] for number in self._program.inputs_read]
        kept = {_read_as(key) for key in self._written} & set(self._keys_read)
        self._memory = {key: value for key, value in self._memory.items() if key in kept}
        own_starts = IS_INIT in self._keys_read and IS_INIT not in self._given
        self.remembers = bool(kept or self._fed or own_starts)
        # A policy that changes its own buffers must not be run twice to compare.
        self._verified = self._program.changes_constants
        return outputs

    def _trace_ahead(self, tensors: Tensors) -> None:
        """Trace the policy before it is called, and have NumPy make its operations if it can.

        Otherwise a run that goes on from a checkpoint would round its first batch differently.
        """
        if self.plain_reason or not isinstance(self.policy, nn.Module):
            self.numpy_reason = self.plain_reason or "it is no module"
            return
        with self._without_traces(), torch.no_grad():
            for _ in range(3):  # to know its keys, to trace it, to compare
                if not self.replays and not self.plain_reason:
                    self(tensors)
            try:
                self.in_numpy, self.numpy_reason = self._made_by_numpy(), ""
            except NotInNumpy as reason:
                self.numpy_reason = str(reason)
        if self.remembers:  # what it remembers is not there yet: trace it when it is
            self._program, self._verified, self._written = None, False, []

    def _made_by_numpy(self) -> NumpyProgram:
        if self._program is None or self._program.recorded is None:
            raise NotInNumpy(self.plain_reason)
        if self.remembers or self._program.changes_constants:
            raise NotInNumpy("it remembers something from step to step")
        written = [key for key in self._written if not _is_private(key)]
        if written != self._written:
            raise NotInNumpy("it writes private entries")
        actions = {key: written.index(key) for key in self._action_keys}
        return NumpyProgram(self._program.recorded, self._keys_read, actions)

    def _replay(self, pool: Tensors) -> Sequence[Tensor]:
        assert self._program is not None
        return self._program(*[pool[key] for key in self._keys_read])

    def _verify(self, pool: Tensors) -> Sequence[Tensor]:
        """Run both ways once, from the same random numbers, and keep the fast one if they agree."""
        generator = torch.get_rng_state()
        fast = self._replay(pool)
        torch.set_rng_state(generator)
        plain = self._plain(pool)
        self._verified = all(_same(a, b) for a, b in zip(fast, plain, strict=True))
        if not self._verified:
            self._program = None
            self._tell("it does not repeat itself: something in it changes from call to call")
        return plain

    def _tell(self, reason: str) -> None:
        self.plain_reason = reason
        self.remembers = True
        warnings.warn(
            f"the policy runs as a TensorDict module, not on the fast path: {reason}", stacklevel=2
        )

    # ------------------------------------------------------------------ memory
    def _remember(self, outputs: Sequence[Tensor], pool: Tensors) -> Sequence[Tensor]:
        """Keep what the next call finds, and return what belongs to the batch."""
        returned = [v for k, v in zip(self._written, outputs) if not _is_private(k)]
        fed = [pool.get(key) for key in self._fed]
        followed = dict(zip(map(_read_as, self._written), outputs))
        returned += [
            torch.zeros_like(followed[key]) if value is None else value
            for key, value in zip(self._fed, fed)
        ]
        if len(self.out_keys) > len(returned):
            returned.append(pool[IS_INIT])
        wanted = self._memory if self._program is not None else followed
        self._memory = {key: followed[key] for key in wanted if key not in _BY_ENVIRONMENT}
        self._starts = self._ongoing
        return returned

    def ended(self, mask: NDArray[np.bool_] | Tensor) -> None:
        """Forget what belongs to episodes that ended with the last step.

        Needed where ``remembers`` is true.

        Args:
            mask: ``[num_envs]``. A tensor is not read on the host.
        """
        if not isinstance(mask, Tensor):
            if not mask.any():
                return
            mask = torch.from_numpy(mask).to(self._starts.device)
        self._starts = mask.unsqueeze(-1).clone()
        for key, value in self._memory.items():
            rows = mask.reshape(-1, *[1] * (value.ndim - 1))
            first = self._first.get(key, torch.zeros((), dtype=value.dtype, device=value.device))
            self._memory[key] = torch.where(rows, first, value)

    def restart(self) -> None:
        """Forget everything: all copies begin new episodes."""
        self._starts = torch.ones_like(self._starts)
        self._memory = dict(self._first)

    def state_dict(self) -> dict[str, Any]:
        """Return what the policy remembers: tensors and plain values."""
        memory = [
            [list(key) if isinstance(key, tuple) else key, value.clone()]
            for key, value in self._memory.items()
        ]
        return {"memory": memory, "starts": self._starts.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._starts = state_dict["starts"].clone()
        self._memory = {
            tuple(key) if isinstance(key, list) else key: value.clone()
            for key, value in state_dict["memory"]
        }


_BY_ENVIRONMENT = frozenset({"action", "reward", "done", "terminated", "truncated", IS_INIT})


def remembers(policy: Any) -> bool:
    """Whether a policy says that it finds in one step what it wrote in the last, or ``is_init``."""
    if IS_INIT in (getattr(policy, "in_keys", None) or ()):
        return True
    return any(_is_next(key) for key in getattr(policy, "out_keys", None) or ())


def _check_reads(policy: Any, given: Sequence[Key], first: Tensors) -> None:
    wanted = getattr(policy, "in_keys", None) or []
    written = getattr(policy, "out_keys", None) or []
    remembered = {_read_as(key) for key in written if _is_next(key)}
    groups = {key[0] for key in written if isinstance(key, tuple)}  # ("params", "force", "loc")
    known = {*given, *first, *remembered, *groups, IS_INIT}
    missing = [key for key in wanted if key not in known]
    if missing:
        raise SettingError(
            "policy",
            type(policy).__name__,
            f"reads {missing}, which neither the environment nor the collector has",
            f"keys there are: {list(given)}",
        )


def _first_values(policy: Any, num_envs: int, device: torch.device | str) -> Tensors:
    """Return the first memory that the policy's modules ask for (TorchRL's primers)."""
    if not isinstance(policy, nn.Module):
        return {}
    primers = get_primers_from_module(policy, warn=False, strict=False)
    values: Tensors = {}
    for primer in getattr(primers, "transforms", [primers] if primers is not None else []):
        for key, spec in primer.primers.items(True, True):
            default = primer.default_value
            default = default.get(key, 0.0) if isinstance(default, Mapping) else default
            first = spec.zero() + (0.0 if callable(default) else default)
            values[key] = first.to(device).expand(num_envs, *first.shape).clone()
    return values


def _written(policy: Any, given: Tensors, result: TensorDictBase) -> list[Key]:
    """Return the keys under which the policy has written tensors."""
    declared = getattr(policy, "out_keys", None)
    found = []
    for key in result.keys(include_nested=True, leaves_only=True):
        value = result.get(key)
        changed = key not in given or (declared is None and value is not given[key])
        if isinstance(value, Tensor) and (changed or (declared and key in declared)):
            found.append(key)
    return found


def _is_next(key: Key) -> bool:
    return isinstance(key, tuple) and key[0] == "next"


def _read_as(key: Key) -> Key:
    """Return where the next step finds what is written under ``key``."""
    if not _is_next(key):
        return key
    return key[1] if len(key) == 2 else key[1:]


def _is_private(key: Key) -> bool:
    """Whether a key is of the kind that TorchRL keeps out of batches."""
    return (key if isinstance(key, str) else key[-1]).startswith("_")


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
