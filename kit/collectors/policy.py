"""How a policy is called: its inputs, outputs and hidden state, eagerly or as a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules.utils import get_primers_from_module

from kit.envs.backends.base import Mask
from kit.envs.spaces import Key, key_from_list, key_to_list, path_of
from kit.fast.traced import Traced
from kit.steps import SettingError
from kit.steps.errors import one_of

Tensors = dict[Key, Tensor]
Policy = Callable[[TensorDictBase], TensorDictBase]
FastPolicy = Literal["auto", "exact", "module"]

IS_INIT = "is_init"
"""Key under which a policy finds whether an observation is the first of its episode."""


class PolicyPath(NamedTuple):
    """How a collector calls its policy."""

    name: Literal["numpy", "program", "module"]
    """``numpy``: a small network computed by NumPy; ``program``: its recorded tensor operations;
    ``module``: the TensorDict module."""
    reason: str
    """why it is not one of those before; empty where it is ``numpy``."""


def fast_policy_of(fast_policy: FastPolicy | bool) -> FastPolicy:
    """Return how a policy is called, from the arguments of a collector.

    Args:
        fast_policy: ``"auto"``, ``"exact"`` or ``"module"``; false is ``"module"``.

    Raises:
        SettingError: if it is none of the three.
    """
    if isinstance(fast_policy, bool):
        fast_policy = "auto" if fast_policy else "module"
    one_of("fast_policy", fast_policy, ("auto", "exact", "module"))
    return fast_policy


class PolicyRunner:
    """Calls a policy with the tensors it reads and returns the tensors it writes.

    The policy is :class:`~kit.fast.traced.Traced`: calls replay its tensor operations, with the
    same results and the same random numbers, reading the parameters where they live: the learner's
    updates are seen at once and nothing is synchronised. A policy that cannot be traced (it decides
    something on the host) runs as a TensorDict module; the reason is warned about once.

    A policy may be recurrent: its outputs of one step are inputs of the next, ``("next", key)``
    under ``key``, as in TorchRL. The hidden state of an environment is reset to its first value
    (that of the policy's primers, else zero) when its episode ends (:meth:`end_episodes`), and
    ``is_init`` is true then.

    Args:
        policy: module (or function) from TensorDict to TensorDict.
        reads: keys of the environment's observation; others that the policy reads are an error.
        num_envs: rows of every tensor.
        exploration_type: whether actions are sampled.
        fast: whether to trace at all.
        device: of the hidden state.
        check: is given the keys of all that the policy writes, once they are known.

    Attributes:
        out_keys: of the outputs, in this order; known after the first call. Hidden state that the
            policy was given is an output, too, where it is not under the key it is written to.
        is_recurrent: whether it has hidden state or reads ``is_init``; true until known.

    Raises:
        SettingError: if the policy reads a key that is never written.
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
        check: Callable[[Sequence[Key]], None] | None = None,
    ) -> None:
        self.policy = policy
        self.num_envs = num_envs
        self.exploration_type = ExplorationType(exploration_type)
        self.out_keys: list[Key] = []
        self.is_recurrent = True
        self._was_recurrent = True  # in the checkpoint
        self._given = list(reads)
        self._first = first_values(policy, num_envs, device)
        self._hidden: Tensors = dict(self._first)
        self._starts = torch.ones(num_envs, 1, dtype=torch.bool, device=device)
        self._ongoing = torch.zeros_like(self._starts)
        self._written: list[Key] = []  # keys of what the module returns
        self._fed: list[Key] = []  # hidden state that is returned as it was given
        self._fast, self._known = fast, False
        self._restored = False  # hidden state is that of a checkpoint
        self._check = check
        self._traced = Traced(self._call, policy, name="the policy", verify_again=False)

    @property
    def plain_reason(self) -> str:
        """Why the policy runs as a TensorDict module; empty while it does not."""
        return self._traced.reason if self._fast else "fast_policy='module'"

    def prepare(self) -> bool:
        """Forget the recorded operations if the policy has changed; return whether they were."""
        dropped = self._fast and self._traced.refresh()
        if dropped:
            self._known, self.is_recurrent, self._was_recurrent = False, True, True
            self._restored = False
        return dropped

    @property
    def replays(self) -> bool:
        """Whether calls replay recorded operations, so that they may run in inference mode."""
        return self._fast and self._traced.replays

    def __call__(self, tensors: Mapping[Key, Tensor]) -> Sequence[Tensor]:
        """Return the policy's outputs, in the order of ``out_keys``.

        To be called without gradients.

        Args:
            tensors: the environment's observation, each with ``num_envs`` rows.
        """
        if self._known and not self.is_recurrent:
            outputs = self._traced(tensors)
            return [outputs[key] for key in self.out_keys]
        pool = {IS_INIT: self._starts, **tensors, **self._hidden}
        if not self._fast or not self._written:  # hidden state has no keys before the first call
            outputs = self._call(pool)
        else:
            outputs = self._traced(pool)
            if self._traced.replays and not self._known:
                self._learn_what_is_read()
        return self._keep_hidden(outputs, pool)

    def _learn_what_is_read(self) -> None:
        """Note which outputs are read again in the next step, or belong to the next step's row."""
        read = set(self._traced.keys_read)
        kept = {_read_as(key) for key in self._written} & {*read, *self._fed}
        self._hidden = {key: value for key, value in self._hidden.items() if key in kept}
        own_starts = IS_INIT in read and IS_INIT not in self._given
        self.is_recurrent = bool(kept or self._fed or own_starts)
        self._known = True

    def call_module(self, tensors: Mapping[Key, Tensor]) -> Sequence[Tensor]:
        """Call the policy through the TensorDict module: to trace it with more around it."""
        pool = {IS_INIT: self._starts, **tensors, **self._hidden}
        return self._keep_hidden(self._call(pool), pool)

    @property
    def hidden(self) -> Tensors:
        """Hidden state that the next call reads."""
        return self._hidden if self.is_recurrent else {}

    @hidden.setter
    def hidden(self, hidden: Tensors) -> None:
        self._hidden = hidden

    def peek(self, tensors: Mapping[Key, Tensor]) -> Sequence[Tensor]:
        """Return the outputs of a call that changes no hidden state, buffer or random number."""
        hidden, starts = self._hidden, self._starts
        buffers = list(self.policy.buffers()) if isinstance(self.policy, nn.Module) else []
        saved = [buffer.clone() for buffer in buffers]
        settings = self._traced.watch.settings()
        devices = [self._starts.device] if self._starts.is_cuda else []
        try:
            with torch.random.fork_rng(devices):
                return self.call_module(tensors)
        finally:
            self._hidden, self._starts = hidden, starts
            for buffer, value in zip(buffers, saved):
                buffer.copy_(value)
            for attributes, name, value in settings:
                attributes[name] = value

    def skip_step(self) -> Tensor:
        """Advance ``is_init`` by a step in which another source acts; return that of the step."""
        starts, self._starts = self._starts, self._ongoing
        return starts

    def _call(self, pool: Mapping[Key, Tensor]) -> Tensors:
        """Call the TensorDict module; return what it writes."""
        given = dict(pool)
        before = {} if self._written else _versions({key: given[key] for key in self._given})
        with set_exploration_type(self.exploration_type):
            result = self.policy(TensorDict(dict(given), [self.num_envs]))
        if not self._written:
            written = _written(self.policy, given, result, self._given)
            if self._check is not None:
                changed = [k for k, one in _versions(given).items() if before.get(k, one) != one]
                self._check([*written, *(key for key in changed if key not in written)])
            self._written = written
            public = [key for key in self._written if not _is_private(key)]
            self._fed = [key[1:] if len(key) > 2 else key[1] for key in public if _is_next(key)]
            starts = [IS_INIT] if self._fed and IS_INIT not in self._given else []
            self.out_keys = [*public, *self._fed, *starts]
        return {key: result.get(key) for key in self._written}

    # ------------------------------------------------------------------ hidden state
    def _keep_hidden(self, outputs: Mapping[Key, Tensor], pool: Tensors) -> Sequence[Tensor]:
        """Keep what the next call reads, and return what belongs to the batch."""
        returned = [value for key, value in outputs.items() if not _is_private(key)]
        fed = [pool.get(key) for key in self._fed]
        followed = {_read_as(key): value for key, value in outputs.items()}
        returned += [
            torch.zeros_like(followed[key]) if value is None else value
            for key, value in zip(self._fed, fed)
        ]
        if len(self.out_keys) > len(returned):
            returned.append(pool[IS_INIT])
        wanted = self._hidden if self._known or self._restored else followed
        others = _BY_ENVIRONMENT.union(self._given)
        self._hidden = {key: followed[key] for key in wanted if key not in others}
        self._starts = self._ongoing
        return returned

    def end_episodes(self, ended: Mask | Tensor) -> None:
        """Reset the hidden state of environments whose episode ended with the last step.

        Needed where ``is_recurrent`` is true.

        Args:
            ended: ``[num_envs]``. A tensor is not read on the host.
        """
        if not isinstance(ended, Tensor):
            if not ended.any():
                return
            ended = torch.from_numpy(ended).to(self._starts.device)
        self._starts = ended.unsqueeze(-1).clone()
        for key, value in self._hidden.items():
            first = self._first.get(key, torch.zeros((), dtype=value.dtype, device=value.device))
            self._hidden[key] = where_rows(ended, first.expand_as(value), value)

    def restart(self) -> None:
        """Reset all hidden state: every environment begins a new episode."""
        self._starts = torch.ones_like(self._starts)
        zero = {key: torch.zeros_like(value) for key, value in self._hidden.items()}
        self._hidden = {**zero, **self._first}

    def state_dict(self) -> dict[str, Any]:
        """Return the hidden state: tensors and plain values.

        Where nothing reads it, it is left out: it would be that of the first calls alone, after
        which this is known, and a resumed run has such calls anew.
        """
        if not self.is_recurrent or not (self._known or self._was_recurrent):
            return {"hidden": [], "starts": None}
        hidden = [[key_to_list(key), value.clone()] for key, value in self._hidden.items()]
        return {"hidden": hidden, "starts": self._starts.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._was_recurrent = state_dict["starts"] is not None
        if not self._was_recurrent:
            self._hidden = dict(self._first)
            self.restart()
            return
        self._restored = True
        device = self._starts.device
        self._starts = state_dict["starts"].to(device, copy=True)
        hidden = state_dict["hidden"]
        self._hidden = {key_from_list(key): value.to(device, copy=True) for key, value in hidden}


_BY_ENVIRONMENT = frozenset({"action", "reward", "done", "terminated", "truncated", IS_INIT})


def is_recurrent(policy: Any) -> bool:
    """Whether a policy declares hidden state, or reads ``is_init``."""
    if IS_INIT in (getattr(policy, "in_keys", None) or ()):
        return True
    return any(_is_next(key) for key in getattr(policy, "out_keys", None) or ())


def check_writes(
    policy: Any, written: Sequence[Key], actions: Sequence[Key], observations: Sequence[Key] = ()
) -> None:
    """Refuse a policy that writes no action, or in the place of what the environment gives.

    Args:
        policy: for the error.
        written: keys that it writes.
        actions: keys of the environment's actions.
        observations: those of its observations, where outputs are kept in batches.

    Raises:
        SettingError: if an action is missing, or an output would take the place of an entry of the
            environment or of the collector.
    """
    seen = {path_of(key) for key in observations}
    taken = {*seen, *(("next", *path) for path in seen), *_OF_STEPS} if seen else set()
    both = [key for key in written if path_of(key) in taken]
    if both:
        why = f"writes {both}, in place of what the environment gave: batches would hold that"
        name = getattr(policy, "__name__", type(policy).__name__)
        raise SettingError("policy", name, why, "rename the output, or the observation")


_OF_STEPS = {("next", name) for name in ("reward", "done", "terminated", "truncated")}
_OF_STEPS |= {("collector", name) for name in ("traj_ids", "mask")}
"""Entries of every batch that are no policy's."""


def first_values(policy: Any, num_envs: int, device: torch.device | str) -> Tensors:
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


def _written(
    policy: Any, given: Tensors, result: TensorDictBase, observed: Sequence[Key]
) -> list[Key]:
    """Return the keys under which the policy has written tensors.

    Observations that it declares not to write may be returned as copies.
    """
    declared = getattr(policy, "out_keys", None)
    found = []
    for key in result.keys(include_nested=True, leaves_only=True):
        value = result.get(key)
        compared = declared is None or key not in observed
        changed = key not in given or (compared and not _shows(value, given[key]))
        if isinstance(value, Tensor) and (changed or (declared and key in declared)):
            found.append(key)
    return found


def _versions(tensors: Tensors) -> dict[Key, int]:
    """How often each tensor was changed in place, where PyTorch counts it."""
    return {key: one._version for key, one in tensors.items() if not one.is_inference()}


def _shows(value: Any, given: Tensor) -> bool:
    """Whether a value is a given tensor, or another view of all of it."""
    same = value is given or (isinstance(value, Tensor) and value.data_ptr() == given.data_ptr())
    return same and value.shape == given.shape


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


def where_rows(rows: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """``one`` in these rows, ``other`` elsewhere; ``rows`` are truth values, ``[rows]``."""
    return torch.where(rows.reshape(-1, *[1] * (one.ndim - 1)), one, other)
