"""Conversion between Gymnasium spaces and arrays. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from kit.steps.errors import SettingError

if TYPE_CHECKING:
    import torch

Key = str | tuple[str, ...]
Arrays = dict[Key, NDArray[Any]]
"""Arrays keyed by TensorDict key. The first dimension indexes environments."""


def path_of(key: Key) -> tuple[str, ...]:
    """Return a TensorDict key as a tuple of nested keys."""
    return key if isinstance(key, tuple) else (key,)


def key_to_list(key: Key) -> Any:
    """Convert a key to a form that checkpoints can store."""
    return list(key) if isinstance(key, tuple) else key


def key_from_list(key: Any) -> Key:
    """Convert the result of :func:`key_to_list` back to a key."""
    return tuple(key) if isinstance(key, list) else key


def some(flags: NDArray[np.bool_]) -> bool:
    """Return whether any flag is set; four times faster than ``np.any`` for small arrays."""
    return b"\x01" in flags.tobytes()


@dataclass(frozen=True)
class Leaf:
    """One array of an observation or action space."""

    key: Key
    """Key in a TensorDict."""
    path: tuple[str, ...]
    """Keys of nested ``Dict`` spaces that lead to the array; empty for a plain space."""
    space: gym.Space[Any] | None
    """Space of this array alone; ``None`` if a TorchRL spec describes the array."""
    shape: tuple[int, ...]
    """Shape of the array for one environment."""
    dtype: np.dtype[Any]
    """Data type in which values are stored."""

    @property
    def is_action_mask(self) -> bool:
        """Whether the array is an action mask, according to its key."""
        return path_of(self.key)[-1] == "action_mask"

    @cached_property
    def start(self) -> NDArray[Any] | None:
        """Smallest value of a Discrete or MultiDiscrete space; ``None`` if it is 0."""
        start = np.asarray(getattr(self.space, "start", 0))
        return start if start.any() else None

    def of(self, tree: Any) -> Any:
        """Extract this array from a nested observation and subtract ``start``."""
        for name in self.path:
            tree = tree[name]
        return tree if self.start is None else tree - self.start

    @cached_property
    def _highest(self) -> Any:
        """Largest discrete value when values start at 0; ``None`` for Box spaces."""
        return None if isinstance(self.space, gym.spaces.Box) else _whole_numbers(self.space)[1]

    def misfit(self, value: Any) -> str | None:
        """Return a description of the first invalid value for an integer array, or ``None``.

        NumPy would silently store 0.7 as the integer 0, and 300 as the byte 44. Networks cannot
        embed out-of-range categories. Bounds of Box spaces are not checked.

        Args:
            value: array shifted to start at 0, optionally with a leading environment dimension.

        Returns:
            The invalid value, the key and the space; ``None`` if all values are valid.
        """
        if self.dtype.kind == "f" or (type(value) is int and 0 <= value <= (self._highest or 0)):
            return None
        array, wrong = np.asarray(value), np.False_
        if array.dtype != self.dtype:
            with np.errstate(invalid="ignore"):  # the cast of NaN warns
                wrong = array.astype(self.dtype) != array
        if self._highest is not None:
            wrong = wrong | (array < 0) | (array > self._highest)
        if wrong is np.False_ or not wrong.any():
            return None
        shown = array if self.start is None else array + self.start
        return f"{shown[wrong][0]} as {self.key}, which is not in {self.space or self.dtype}"


def leaves(space: gym.Space[Any], root: str, field: str) -> list[Leaf]:
    """Return the arrays of ``space``. A ``Dict`` space has one array per entry.

    A plain space has the key ``root``. Entries of a ``Dict`` observation space keep their keys, as
    in TorchRL. Entries of a ``Dict`` action space are nested under ``root``.

    Args:
        space: Box, Discrete, MultiDiscrete, MultiBinary, or Dict of these.
        root: ``"observation"`` or ``"action"``.
        field: name of the space in error messages.

    Raises:
        SettingError: if the kind of space is not supported, or a key is reserved.
    """
    found = []
    for path, inner in _walk(space, ()):
        if not isinstance(inner, _KINDS):
            hint = "Use Box, Discrete, MultiDiscrete, MultiBinary or a Dict of these spaces"
            if root == "observation":
                hint += ". gymnasium.wrappers.FlattenObservation converts most spaces to a Box"
            raise SettingError(field, inner, "This kind of space is not supported", hint)
        full = (root, *path) if root == "action" or not path else path
        if root == "observation" and full[0] in _OTHERS:
            hint = f"Rename the observation, for example to last_{full[0]}"
            reason = "Every batch already has an entry with this name"
            raise SettingError(field, full[0], reason, hint)
        if reserved := _OF_SPECS & {*full}:
            name = min(reserved)
            reason = "TorchRL's specs already have an attribute with this name"
            raise SettingError(field, name, reason, f"Rename the entry, for example to env_{name}")
        key: Key = full[0] if len(full) == 1 else full
        shape = tuple(int(size) for size in inner.shape or ())
        found.append(Leaf(key, path, inner, shape, _stored_type(inner)))
    return found


_OTHERS = {
    "action", "reward", "done", "terminated", "truncated", "next", "collector", "_reset",
    "index", "state_value", "advantage", "value_target", "is_init", "td_error", "steps_to_next_obs",
    "latent", "before", "priority_weight",
}  # fmt: skip
"""Reserved keys of batches and minibatches, which observations cannot use."""
_OF_SPECS = {"device", "dtype", "shape", "space"}

_CHOICES = (gym.spaces.Discrete, gym.spaces.MultiDiscrete)
_KINDS = (gym.spaces.Box, *_CHOICES, gym.spaces.MultiBinary)


def _walk(
    space: gym.Space[Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], gym.Space[Any]]]:
    if isinstance(space, gym.spaces.Dict):
        for name, inner in space.spaces.items():
            yield from _walk(inner, (*path, str(name)))
    else:
        yield path, space


def _stored_type(space: gym.Space[Any]) -> np.dtype[Any]:
    """Return the storage dtype: float32 for floating-point spaces, otherwise the space's dtype."""
    dtype = np.dtype(space.dtype if space.dtype is not None else np.int64)
    return np.dtype(np.float32) if dtype.kind == "f" else dtype


def empty(found: list[Leaf], *leading: int) -> Arrays:
    """Return zero-filled arrays for the given leaves, with extra ``leading`` dimensions."""
    return {leaf.key: np.zeros((*leading, *leaf.shape), leaf.dtype) for leaf in found}


class ActionConverter:
    """Converts a policy's action arrays to the actions of environments.

    Values of bounded Box spaces are clipped to the bounds, so that unbounded noise cannot exceed
    them. Batches keep the unclipped action, because the log-probability refers to that action.
    Values of Discrete and MultiDiscrete spaces are shifted by ``start``. All values are converted
    to the dtype of the space.

    Args:
        space: action space of one environment; ``None`` if a TorchRL spec describes actions.
        found: arrays of the action space.
        num_envs: number of environments.
    """

    def __init__(self, space: gym.Space[Any] | None, found: list[Leaf], num_envs: int) -> None:
        self.space, self.leaves, self.num_envs = space, found, num_envs
        self._plain = len(found) == 1 and not found[0].path
        self._integers = isinstance(space, gym.spaces.Discrete)
        self._entries = [_Entry(leaf, num_envs) for leaf in found]

    def __call__(self, actions: Mapping[Key, NDArray[Any]]) -> Any:
        """Return the actions of all environments, as an array or a nested dict of arrays.

        Raises:
            SettingError: if an action does not have the shape of its space, or if an integer
                action is fractional or out of range.
        """
        if self._plain:
            return self._entries[0](actions)
        tree: dict[str, Any] = {}
        for leaf, entry in zip(self.leaves, self._entries):
            node = tree
            for name in leaf.path[:-1]:
                node = node.setdefault(name, {})
            node[leaf.path[-1]] = entry(actions)
        return tree

    def rows(self, actions: Mapping[Key, NDArray[Any]]) -> Sequence[Any]:
        """Return a sequence with one action per environment."""
        if self._plain:
            entry = self._entries[0]
            if not self._integers:
                return entry(actions)  # type: ignore[return-value]
            values = actions[entry.key]
            fits = values.ndim == 1 and values.dtype.kind == "i" and entry.start is None
            if not fits:
                return entry(actions).tolist()  # type: ignore[no-any-return]
            chosen: list[int] = values.tolist()
            if min(chosen) < 0 or max(chosen) > entry.highest:
                entry.refuse_outside(values)
            return chosen
        converted = self(actions)
        return [_row(converted, number) for number in range(self.num_envs)]


class _Entry:
    """Converts one array of actions to valid values of its space."""

    def __init__(self, leaf: Leaf, num_envs: int) -> None:
        space = leaf.space
        self.key, self.shape = leaf.key, leaf.shape
        self.dtype = None if space is None else space.dtype
        self.start = leaf.start
        self.lowest, self.highest = _whole_numbers(space)
        self.bounds: tuple[Any, Any] | None = None
        if isinstance(space, gym.spaces.Box) and np.dtype(space.dtype).kind == "f":
            bounded = np.isfinite(space.low).any() or np.isfinite(space.high).any()
            # NumPy is twice as fast if both operands have the same shape.
            whole = [np.stack([bound] * num_envs) for bound in (space.low, space.high)]
            self.bounds = (whole[0], whole[1]) if bounded else None

    def __call__(self, actions: Mapping[Key, NDArray[Any]]) -> NDArray[Any]:
        values = actions[self.key]
        if values.shape[1:] != self.shape:
            reason = f"The environment's actions have the shape {self.shape}"
            raise SettingError(str(self.key), values.shape[1:], reason, [self.shape])
        if self.highest is not None:
            self.refuse_outside(values)
        original = values
        if self.start is not None:
            values = values + self.start
        if self.dtype is not None and values.dtype != self.dtype:
            values = self._cast(values)
        if self.bounds is None:  # copied because environments may keep or modify their actions
            return values.copy() if values is original else values
        low, high = self.bounds  # two ufunc calls are several times faster than np.clip
        return np.minimum(np.maximum(values, low), high)  # type: ignore[no-any-return]

    def _cast(self, values: NDArray[Any]) -> NDArray[Any]:
        """Convert to the space's dtype; raise SettingError if an integer dtype changes a value."""
        converted = values.astype(self.dtype)
        if converted.dtype.kind != "f" and (lost := converted != values).any():
            reason = f"The environment's actions are integers ({converted.dtype})"
            hint = "Sample integer actions, or use the argmax of the action scores"
            raise SettingError(str(self.key), values[lost][0].item(), reason, hint)
        return converted

    def refuse_outside(self, values: NDArray[Any]) -> None:
        """Raise SettingError for out-of-range integers, because few environments check actions."""
        outside = (values < self.lowest) | (values > self.highest)
        if some(outside):
            every = (np.broadcast_to(n, values.shape) for n in (self.lowest, self.highest))
            low, high = (bound[outside][0] for bound in every)
            reason = f"The environment's actions range from {low} to {high}"
            raise SettingError(str(self.key), values[outside][0].item(), reason)


def _whole_numbers(space: gym.Space[Any] | None) -> tuple[Any, Any]:
    """Return the integer bounds of a space whose values start at 0; ``None`` if continuous."""
    if isinstance(space, gym.spaces.Discrete):
        return 0, int(space.n) - 1
    if isinstance(space, gym.spaces.MultiDiscrete):
        return 0, space.nvec - 1
    if isinstance(space, gym.spaces.MultiBinary):
        return 0, 1
    if isinstance(space, gym.spaces.Box) and np.dtype(space.dtype).kind in "iu":
        return space.low, space.high
    return None, None


def _row(tree: Any, number: int) -> Any:
    if isinstance(tree, dict):
        return {name: _row(value, number) for name, value in tree.items()}
    return tree[number]


def to_spec(leaf: Leaf, num_envs: int, device: torch.device | None) -> Any:
    """Return a TorchRL spec for one array, with the leading dimension ``num_envs``."""
    import torch
    from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, Unbounded

    space = leaf.space
    assert space is not None
    dtype = torch.from_numpy(np.zeros(0, leaf.dtype)).dtype
    shape = (num_envs, *leaf.shape)
    if isinstance(space, gym.spaces.Discrete):
        return Categorical(int(space.n), shape=(num_envs,), dtype=dtype, device=device)
    if isinstance(space, gym.spaces.MultiDiscrete):
        choices = torch.as_tensor(np.asarray(space.nvec))
        return MultiCategorical(choices, dtype=dtype, device=device).expand(shape)
    if isinstance(space, gym.spaces.MultiBinary):
        return Binary(n=leaf.shape[-1], shape=shape, dtype=dtype, device=device)
    low = torch.as_tensor(np.asarray(space.low, leaf.dtype)).expand(shape).clone()
    high = torch.as_tensor(np.asarray(space.high, leaf.dtype)).expand(shape).clone()
    if leaf.dtype.kind == "f" and not (np.isfinite(space.low) & np.isfinite(space.high)).all():
        return Unbounded(shape, dtype=dtype, device=device)
    return Bounded(low, high, shape, dtype=dtype, device=device)


def to_composite(found: list[Leaf], num_envs: int, device: torch.device | None) -> Any:
    """Return a composite spec for several arrays, with batch size ``[num_envs]``."""
    from torchrl.data import Composite

    composite = Composite(shape=(num_envs,), device=device)
    for leaf in found:
        composite[leaf.key] = to_spec(leaf, num_envs, device)
    return composite
