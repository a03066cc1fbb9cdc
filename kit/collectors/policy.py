"""Eager or traced execution of policies, including recurrent ones."""

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
"""Key of the flag that marks the first observation of an episode."""


class PolicyPath(NamedTuple):
    """How a collector executes its policy, and why it cannot use a faster method."""

    name: Literal["numpy", "program", "module"]
    """``numpy``: NumPy computes a small network; ``program``: a traced graph is replayed;
    ``module``: the TensorDict module is called."""
    reason: str
    """Why the policy cannot be executed faster; empty for ``numpy``."""


def fast_policy_of(fast_policy: FastPolicy | bool) -> FastPolicy:
    """Return the execution mode for the ``fast_policy`` argument of a collector.

    Args:
        fast_policy: ``"auto"``, ``"exact"`` or ``"module"``; true means ``"auto"`` and false means
            ``"module"``.

    Raises:
        SettingError: if the argument is invalid.
    """
    if isinstance(fast_policy, bool):
        fast_policy = "auto" if fast_policy else "module"
    one_of("fast_policy", fast_policy, ("auto", "exact", "module"))
    return fast_policy


class PolicyRunner:
    """Runs a policy on plain tensors and stores its hidden state between calls.

    The policy is traced by :class:`~kit.fast.traced.Traced`. Calls replay its tensor operations
    with the same results and random numbers. Parameters are read in place, so updates by the
    learner take effect immediately. A policy that cannot be traced, for example because it branches
    on tensor values, runs as a TensorDict module after one warning.

    A policy may be recurrent. As in TorchRL, its output ``("next", key)`` is its input ``key`` at
    the next step. :meth:`end_episodes` resets an environment's hidden state to its initial value
    (from the policy's primers, or zero) and sets ``is_init``.

    Args:
        policy: module or function that takes and returns a TensorDict.
        reads: keys of the environment's observation.
        num_envs: number of environments, which is the number of rows of every tensor.
        exploration_type: TorchRL's exploration type, which determines whether actions are sampled.
        fast: whether to trace the policy.
        device: device of the hidden state.
        check: called with the keys that the policy writes, during the first call.

    Attributes:
        out_keys: keys of the outputs, in order; set by the first call. The hidden state that a
            recurrent policy reads is also an output.
        is_recurrent: whether the policy has hidden state or reads ``is_init``; true until
            this is known.
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
        self._was_recurrent = True  # whether the checkpoint's policy was recurrent
        self._reads = list(reads)
        self._first = first_values(policy, num_envs, device)
        self._hidden: Tensors = dict(self._first)
        self._starts = torch.ones(num_envs, 1, dtype=torch.bool, device=device)
        self._ongoing = torch.zeros_like(self._starts)
        self._written: list[Key] = []  # keys that the module writes
        self._fed: list[Key] = []  # inputs that are hidden state, also returned as outputs
        self._fast, self._known = fast, False
        self._restored = False  # whether hidden state was loaded from a checkpoint
        self._check = check
        self._traced = Traced(self._call, policy, name="the policy", verify_again=False)

    @property
    def plain_reason(self) -> str:
        """Why the policy is not traced; empty if it is traced."""
        return self._traced.reason if self._fast else "fast_policy='module'"

    def prepare(self) -> bool:
        """Discard the traced graph if the policy has changed. Return whether it was discarded."""
        dropped = self._fast and self._traced.refresh()
        if dropped:
            self._known, self.is_recurrent, self._was_recurrent = False, True, True
            self._restored = False
        return dropped

    @property
    def replays(self) -> bool:
        """Whether calls replay a traced graph, which allows inference mode."""
        return self._fast and self._traced.replays

    def __call__(self, tensors: Mapping[Key, Tensor]) -> Sequence[Tensor]:
        """Return the policy's outputs, in the order of ``out_keys``.

        Gradients must be disabled.

        Args:
            tensors: dict of observation tensors, each with ``num_envs`` rows.
        """
        if self._known and not self.is_recurrent:
            outputs = self._traced(tensors)
            return [outputs[key] for key in self.out_keys]
        pool = {IS_INIT: self._starts, **tensors, **self._hidden}
        if not self._fast or not self._written:  # the first call determines the output keys
            outputs = self._call(pool)
        else:
            outputs = self._traced(pool)
            if self._traced.replays and not self._known:
                self._find_hidden()
        return self._keep_hidden(outputs, pool)

    def _find_hidden(self) -> None:
        """Determine from the traced graph which outputs are hidden state."""
        read = set(self._traced.keys_read)
        kept = {_read_as(key) for key in self._written} & {*read, *self._fed}
        self._hidden = {key: value for key, value in self._hidden.items() if key in kept}
        own_starts = IS_INIT in read and IS_INIT not in self._reads
        self.is_recurrent = bool(kept or self._fed or own_starts)
        self._known = True

    def call_module(self, tensors: Mapping[Key, Tensor]) -> Sequence[Tensor]:
        """Call the TensorDict module directly. For callers that trace this call themselves."""
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
        """Return a call's outputs, but leave hidden state, buffers and RNG state unchanged."""
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
        """Advance ``is_init`` by one step without calling the policy; return its previous value."""
        starts, self._starts = self._starts, self._ongoing
        return starts

    def _call(self, pool: Mapping[Key, Tensor]) -> Tensors:
        """Call the TensorDict module and return the tensors that it writes."""
        inputs = dict(pool)
        before = {} if self._written else _versions({key: inputs[key] for key in self._reads})
        with set_exploration_type(self.exploration_type):
            result = self.policy(TensorDict(dict(inputs), [self.num_envs]))
        if not self._written:
            written = _written(self.policy, inputs, result, self._reads)
            if self._check is not None:
                changed = [k for k, v in _versions(inputs).items() if before.get(k, v) != v]
                self._check([*written, *(key for key in changed if key not in written)])
            self._written = written
            public = [key for key in self._written if not _is_private(key)]
            self._fed = [key[1:] if len(key) > 2 else key[1] for key in public if _is_next(key)]
            starts = [IS_INIT] if self._fed and IS_INIT not in self._reads else []
            self.out_keys = [*public, *self._fed, *starts]
        return {key: result.get(key) for key in self._written}

    # ------------------------------------------------------------------ hidden state
    def _keep_hidden(self, outputs: Mapping[Key, Tensor], pool: Tensors) -> Sequence[Tensor]:
        """Store the hidden state for the next call, and return the outputs for the batch."""
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
        others = _BY_ENVIRONMENT.union(self._reads)
        self._hidden = {key: followed[key] for key in wanted if key not in others}
        self._starts = self._ongoing
        return returned

    def end_episodes(self, ended: Mask | Tensor) -> None:
        """Reset the hidden state for environments whose episode ended with the last step.

        Only needed if ``is_recurrent`` is true.

        Args:
            ended: mask ``[num_envs]``. A tensor mask is not copied to the host.
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
        """Reset all hidden state. Called when every environment starts a new episode."""
        self._starts = torch.ones_like(self._starts)
        zero = {key: torch.zeros_like(value) for key, value in self._hidden.items()}
        self._hidden = {**zero, **self._first}

    def state_dict(self) -> dict[str, Any]:
        """Return the hidden state as tensors and plain values.

        Hidden state is omitted if the policy does not read it.
        """
        if not self.is_recurrent or not (self._known or self._was_recurrent):
            return {"hidden": [], "starts": None}
        hidden = [[key_to_list(key), value.clone()] for key, value in self._hidden.items()]
        return {"hidden": hidden, "starts": self._starts.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
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
    """Return whether a policy declares hidden state or reads ``is_init``."""
    if IS_INIT in (getattr(policy, "in_keys", None) or ()):
        return True
    return any(_is_next(key) for key in getattr(policy, "out_keys", None) or ())


def check_writes(
    policy: Any, written: Sequence[Key], actions: Sequence[Key], observations: Sequence[Key] = ()
) -> None:
    """Raise an error if a policy overwrites entries of the environment or the collector.

    Args:
        policy: policy to name in the error.
        written: keys that the policy writes.
        actions: keys of the environment's actions.
        observations: keys of the environment's observations; empty if outputs are not stored.

    Raises:
        SettingError: if a written key belongs to the environment or the collector.
    """
    seen = {path_of(key) for key in observations}
    reserved = {*seen, *(("next", *path) for path in seen), *_STEP_ENTRIES} if seen else set()
    both = [key for key in written if path_of(key) in reserved]
    if both:
        reason = f"writes {both}, which would overwrite existing entries in batches"
        name = getattr(policy, "__name__", type(policy).__name__)
        raise SettingError("policy", name, reason, "rename the output, or the observation")


_STEP_ENTRIES = {("next", name) for name in ("reward", "done", "terminated", "truncated")}
_STEP_ENTRIES |= {("collector", name) for name in ("traj_ids", "mask")}
"""Batch entries that a policy must not write."""


def first_values(policy: Any, num_envs: int, device: torch.device | str) -> Tensors:
    """Return the initial hidden state defined by the policy's TorchRL primers."""
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
    policy: Any, inputs: Tensors, result: TensorDictBase, observed: Sequence[Key]
) -> list[Key]:
    """Return the keys of the tensors that the policy has written.

    Copies of observations do not count unless the policy declares them as outputs.
    """
    declared = getattr(policy, "out_keys", None)
    found = []
    for key in result.keys(include_nested=True, leaves_only=True):
        value = result.get(key)
        compared = declared is None or key not in observed
        changed = key not in inputs or (compared and not _shows(value, inputs[key]))
        if isinstance(value, Tensor) and (changed or (declared and key in declared)):
            found.append(key)
    return found


def _versions(tensors: Tensors) -> dict[Key, int]:
    """Return the tensors' version counters, omitting inference tensors, which have none."""
    return {key: value._version for key, value in tensors.items() if not value.is_inference()}


def _shows(value: Any, tensor: Tensor) -> bool:
    """Return whether ``value`` is ``tensor`` itself or a view of all of its elements."""
    same = value is tensor or (isinstance(value, Tensor) and value.data_ptr() == tensor.data_ptr())
    return same and value.shape == tensor.shape


def _is_next(key: Key) -> bool:
    return isinstance(key, tuple) and key[0] == "next"


def _read_as(key: Key) -> Key:
    """Return the key under which the policy reads this output at the next step."""
    if not _is_next(key):
        return key
    return key[1] if len(key) == 2 else key[1:]


def _is_private(key: Key) -> bool:
    """Return whether TorchRL omits a key from batches because of a leading underscore."""
    return (key if isinstance(key, str) else key[-1]).startswith("_")


def where_rows(rows: Tensor, selected: Tensor, other: Tensor) -> Tensor:
    """Return ``selected`` in rows where the mask ``rows`` is true, and ``other`` elsewhere."""
    return torch.where(rows.reshape(-1, *[1] * (selected.ndim - 1)), selected, other)
