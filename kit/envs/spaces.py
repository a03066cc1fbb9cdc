"""Gymnasium spaces as arrays and as TorchRL specs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, Unbounded

from kit.steps import SettingError

Key = str | tuple[str, ...]
Arrays = dict[Key, NDArray[Any]]
"""Arrays by key; the leading dimension counts copies."""


@dataclass(frozen=True)
class Leaf:
    """One array of a space."""

    key: Key
    """where it is found in a TensorDict."""
    path: tuple[str, ...]
    """where it is found in the space: keys of nested ``Dict`` spaces, empty for a plain one."""
    space: gym.Space[Any]
    """the space of this array alone."""
    shape: tuple[int, ...]
    """shape of one copy's value."""
    dtype: np.dtype[Any]
    """type in which it is stored."""


def leaves(space: gym.Space[Any], root: str, field: str) -> list[Leaf]:
    """Return the arrays of ``space``: one, or one for each entry of a ``Dict`` space.

    A plain space is found under ``root``. Entries of a ``Dict`` space are found under their own
    names, as in TorchRL; for actions they are nested under ``root``.

    Args:
        space: Box, Discrete, MultiDiscrete, MultiBinary, or Dict of these.
        root: ``"observation"`` or ``"action"``.
        field: what the space is, for the error.

    Raises:
        SettingError: if the space is of another kind.
    """
    found = []
    for path, inner in _walk(space, ()):
        if not isinstance(inner, _KINDS):
            raise SettingError(
                field,
                inner,
                "is a space this kit has no array for",
                "use Box, Discrete, MultiDiscrete, MultiBinary or a Dict of them "
                "(gymnasium.wrappers.FlattenObservation makes a Box of most spaces)",
            )
        key: Key = path if root == "action" and path else (path[0] if len(path) == 1 else path)
        if root == "action" and path:
            key = (root, *path)
        shape = tuple(int(size) for size in inner.shape or ())
        found.append(Leaf(key or root, path, inner, shape, _stored_type(inner)))
    return found


_KINDS = (
    gym.spaces.Box,
    gym.spaces.Discrete,
    gym.spaces.MultiDiscrete,
    gym.spaces.MultiBinary,
)


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


def value_at(tree: Any, path: tuple[str, ...]) -> Any:
    """Return the entry of a nested observation at ``path``."""
    for name in path:
        tree = tree[name]
    return tree


def empty(found: list[Leaf], *leading: int) -> Arrays:
    """Return zeroed arrays for ``found``, with ``leading`` dimensions in front."""
    return {leaf.key: np.zeros((*leading, *leaf.shape), leaf.dtype) for leaf in found}


def to_spec(leaf: Leaf, num_envs: int, device: torch.device | None) -> Any:
    """Return TorchRL's spec of one array, with ``num_envs`` in front."""
    space = leaf.space
    dtype = torch.from_numpy(np.zeros(0, leaf.dtype)).dtype
    shape = (num_envs, *leaf.shape)
    if isinstance(space, gym.spaces.Discrete):
        return Categorical(int(space.n), shape=(num_envs,), dtype=dtype, device=device)
    if isinstance(space, gym.spaces.MultiDiscrete):
        choices = torch.as_tensor(np.asarray(space.nvec).reshape(-1))
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
    composite = Composite(shape=(num_envs,), device=device)
    for leaf in found:
        composite[leaf.key] = to_spec(leaf, num_envs, device)
    return composite


class ActionConverter:
    """Turns arrays of actions, as a policy gives them, into what environments take.

    Values of bounded Box spaces are clipped to the bounds, so that a policy with unbounded noise
    cannot leave them (the batch keeps the unclipped action, to which the log-probability belongs);
    values of Discrete spaces are shifted by ``start``.

    Args:
        space: action space of one copy.
        found: its arrays.
    """

    def __init__(self, space: gym.Space[Any], found: list[Leaf]) -> None:
        self.space, self.leaves = space, found
        self._plain = len(found) == 1 and not found[0].path

    def __call__(self, actions: Mapping[Key, NDArray[Any]]) -> Any:
        """Return actions of all copies: an array, or nested dictionaries of arrays."""
        if self._plain:
            leaf = self.leaves[0]
            return convert(leaf.space, actions[leaf.key])
        tree: dict[str, Any] = {}
        for leaf in self.leaves:
            node = tree
            for name in leaf.path[:-1]:
                node = node.setdefault(name, {})
            node[leaf.path[-1]] = convert(leaf.space, actions[leaf.key])
        return tree

    def rows(self, actions: Mapping[Key, NDArray[Any]], num_envs: int) -> list[Any]:
        """Return one action for each copy."""
        converted = self(actions)
        if not self._plain:
            return [_row(converted, number) for number in range(num_envs)]
        if isinstance(self.space, gym.spaces.Discrete):
            return converted.tolist()  # type: ignore[no-any-return]
        return list(converted)


def convert(space: gym.Space[Any], values: NDArray[Any]) -> NDArray[Any]:
    """Clip or shift values so that they are members of ``space``."""
    if isinstance(space, gym.spaces.Box):
        if values.dtype.kind == "f":
            return np.clip(values, space.low, space.high, dtype=space.dtype)
        return values
    if isinstance(space, gym.spaces.Discrete) and space.start != 0:
        return values + space.start
    return values


def _row(tree: Any, number: int) -> Any:
    if isinstance(tree, dict):
        return {name: _row(value, number) for name, value in tree.items()}
    return tree[number]
