"""Gymnasium spaces as arrays. Imports no torch, so that a process of envs stays small."""

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
"""Arrays by key; the leading dimension counts envs."""


def path_of(key: Key) -> tuple[str, ...]:
    """A key as a path from the root of a TensorDict."""
    return key if isinstance(key, tuple) else (key,)


def key_to_list(key: Key) -> Any:
    """Return a key as a checkpoint holds it."""
    return list(key) if isinstance(key, tuple) else key


def key_from_list(key: Any) -> Key:
    """Inverse of :func:`key_to_list`."""
    return tuple(key) if isinstance(key, list) else key


def some(flags: NDArray[np.bool_]) -> bool:
    """Whether a flag is set; a quarter of the time of NumPy's ``any`` where there are few."""
    return b"\x01" in flags.tobytes()


@dataclass(frozen=True)
class Leaf:
    """One array of a space."""

    key: Key
    """where it is found in a TensorDict."""
    path: tuple[str, ...]
    """where it is found in the space: keys of nested ``Dict`` spaces, empty for a plain one."""
    space: gym.Space[Any] | None
    """the space of this array alone; ``None`` where the array is described by a TorchRL spec."""
    shape: tuple[int, ...]
    """shape of one env's value."""
    dtype: np.dtype[Any]
    """type in which it is stored."""

    @property
    def is_action_mask(self) -> bool:
        """Whether it says which actions are allowed, by its name."""
        return path_of(self.key)[-1] == "action_mask"

    @cached_property
    def start(self) -> NDArray[Any] | None:
        """Smallest value of a Discrete or MultiDiscrete space, stored as 0; ``None``: it is 0."""
        start = np.asarray(getattr(self.space, "start", 0))
        return start if start.any() else None

    def of(self, tree: Any) -> Any:
        """Return this array of a nested observation, counted from 0."""
        for name in self.path:
            tree = tree[name]
        return tree if self.start is None else tree - self.start

    @cached_property
    def _highest(self) -> Any:
        """Largest choice, counted from 0; ``None`` where there are no choices."""
        return None if isinstance(self.space, gym.spaces.Box) else _whole_numbers(self.space)[1]

    def misfit(self, value: Any) -> str | None:
        """Say which whole number cannot be stored as it is, or is a choice that there is not.

        NumPy stores 0.7 as 0, and 300 as 44 in a byte; a choice that there is not is no input of a
        network. Bounds of a Box are not looked at.

        Args:
            value: of this array, counted from 0, with or without a dimension of envs in front.

        Returns:
            What is wrong; ``None``: nothing is.
        """
        if self.dtype.kind == "f" or (type(value) is int and 0 <= value <= (self._highest or 0)):
            return None
        given, wrong = np.asarray(value), np.False_
        if given.dtype != self.dtype:
            with np.errstate(invalid="ignore"):  # of NaN
                wrong = given.astype(self.dtype) != given
        if self._highest is not None:
            wrong = wrong | (given < 0) | (given > self._highest)
        if wrong is np.False_ or not wrong.any():
            return None
        shown = given if self.start is None else given + self.start
        return f"{shown[wrong][0]} as {self.key}, which is not in {self.space or self.dtype}"


def leaves(space: gym.Space[Any], root: str, field: str) -> list[Leaf]:
    """Return the arrays of ``space``: one, or one for each entry of a ``Dict`` space.

    A plain space is found under ``root``. Entries of a ``Dict`` space are found under their own
    names, as in TorchRL; for actions they are nested under ``root``.

    Args:
        space: Box, Discrete, MultiDiscrete, MultiBinary, or Dict of these.
        root: ``"observation"`` or ``"action"``.
        field: what the space is, for the error.

    Raises:
        SettingError: if the space is of another kind, or an entry has a name that is taken.
    """
    found = []
    for path, inner in _walk(space, ()):
        if not isinstance(inner, _KINDS):
            works = "use Box, Discrete, MultiDiscrete, MultiBinary or a Dict of them"
            if root == "observation":
                works += " (gymnasium.wrappers.FlattenObservation makes a Box of most spaces)"
            raise SettingError(field, inner, "is a space this kit has no array for", works)
        full = (root, *path) if root == "action" or not path else path
        if root == "observation" and full[0] in _OTHERS:
            works = f"rename it, to last_{full[0]} for example"
            raise SettingError(field, full[0], "is an entry of every batch already", works)
        if taken := _OF_SPECS & {*full}:
            name = min(taken)
            why = "is an attribute of TorchRL's specs, in which no entry can have this name"
            raise SettingError(field, name, why, f"rename it, to own_{name} for example")
        key: Key = full[0] if len(full) == 1 else full
        shape = tuple(int(size) for size in inner.shape or ())
        found.append(Leaf(key, path, inner, shape, _stored_type(inner)))
    return found


_OTHERS = {
    "action", "reward", "done", "terminated", "truncated", "next", "collector", "_reset",
    "index", "state_value", "advantage", "value_target", "is_init", "td_error", "steps_to_next_obs",
    "latent", "before", "priority_weight",
}  # fmt: skip
"""Entries of batches and minibatches that are no observations."""
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
    """Floating types are stored as float32, the type of a network; others as they are."""
    dtype = np.dtype(space.dtype if space.dtype is not None else np.int64)
    return np.dtype(np.float32) if dtype.kind == "f" else dtype


def empty(found: list[Leaf], *leading: int) -> Arrays:
    """Return zeroed arrays for ``found``, with ``leading`` dimensions in front."""
    return {leaf.key: np.zeros((*leading, *leaf.shape), leaf.dtype) for leaf in found}


class ActionConverter:
    """Turns a policy's arrays of actions into those of environments.

    Values of bounded Box spaces are clipped to the bounds, so that a policy with unbounded noise
    cannot leave them (the batch keeps the unclipped action, to which the log-probability belongs);
    values of Discrete and MultiDiscrete spaces are shifted by ``start``. All have the space's type.

    Args:
        space: action space of one env; ``None`` where a TorchRL spec describes actions.
        found: its arrays.
        num_envs: number of envs.
    """

    def __init__(self, space: gym.Space[Any] | None, found: list[Leaf], num_envs: int) -> None:
        self.space, self.leaves, self.num_envs = space, found, num_envs
        self._plain = len(found) == 1 and not found[0].path
        self._integers = isinstance(space, gym.spaces.Discrete)
        self._entries = [_Entry(leaf, num_envs) for leaf in found]

    def __call__(self, actions: Mapping[Key, NDArray[Any]]) -> Any:
        """Return actions of all envs: an array, or nested dictionaries of arrays.

        Raises:
            SettingError: if an action has another shape than its space, or is a fraction or out of
                range where the space has whole numbers.
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
        """Return one action for each env."""
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
    """Makes the values of one array members of its space."""

    def __init__(self, leaf: Leaf, num_envs: int) -> None:
        space = leaf.space
        self.key, self.shape = leaf.key, leaf.shape
        self.dtype = None if space is None else space.dtype
        self.start = leaf.start
        self.lowest, self.highest = _whole_numbers(space)
        self.bounds: tuple[Any, Any] | None = None
        if isinstance(space, gym.spaces.Box) and np.dtype(space.dtype).kind == "f":
            bounded = np.isfinite(space.low).any() or np.isfinite(space.high).any()
            # NumPy needs half the time for arrays of one shape.
            whole = [np.stack([bound] * num_envs) for bound in (space.low, space.high)]
            self.bounds = (whole[0], whole[1]) if bounded else None

    def __call__(self, actions: Mapping[Key, NDArray[Any]]) -> NDArray[Any]:
        values = actions[self.key]
        if values.shape[1:] != self.shape:
            why = "is not the shape of the environment's action"
            raise SettingError(str(self.key), values.shape[1:], why, [self.shape])
        if self.highest is not None:
            self.refuse_outside(values)
        given = values
        if self.start is not None:
            values = values + self.start
        if self.dtype is not None and values.dtype != self.dtype:
            values = self._of_its_type(values)
        if self.bounds is None:  # the environment may keep or change it, and the batch has it, too
            return values.copy() if values is given else values
        low, high = self.bounds  # two plain calls take a fraction of the time of np.clip
        return np.minimum(np.maximum(values, low), high)  # type: ignore[no-any-return]

    def _of_its_type(self, values: NDArray[Any]) -> NDArray[Any]:
        """The same numbers in the type of the space."""
        converted = values.astype(self.dtype)
        if converted.dtype.kind != "f" and (lost := converted != values).any():
            why = f"is no {converted.dtype}, which the environment's actions are"
            works = "choose whole numbers: sample them, or take the argmax"
            raise SettingError(str(self.key), values[lost][0].item(), why, works)
        return converted

    def refuse_outside(self, values: NDArray[Any]) -> None:
        """Refuse whole numbers that are no actions of the environment: few say so themselves."""
        outside = (values < self.lowest) | (values > self.highest)
        if some(outside):
            every = (np.broadcast_to(n, values.shape) for n in (self.lowest, self.highest))
            low, high = (bound[outside][0] for bound in every)
            why = f"is no action of the environment, which has {low} to {high}"
            raise SettingError(str(self.key), values[outside][0].item(), why)


def _whole_numbers(space: gym.Space[Any] | None) -> tuple[Any, Any]:
    """The lowest and the highest choices, before ``start``; ``None`` where they are not whole."""
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
    """Return TorchRL's spec of one array, with ``num_envs`` in front."""
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
    """Return the specs of several arrays as one composite of batch size ``[num_envs]``."""
    from torchrl.data import Composite

    composite = Composite(shape=(num_envs,), device=device)
    for leaf in found:
        composite[leaf.key] = to_spec(leaf, num_envs, device)
    return composite
