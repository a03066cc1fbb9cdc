"""Random actions, drawn in advance for several steps if this does not change the actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kit.envs.spaces import Arrays, Key, Leaf

Tensors = dict[Key, Tensor]

_AHEAD = 128
"""Maximum number of time steps drawn in advance, unless a batch needs more."""


class HasActionSpec(Protocol):
    """Environment attributes that random actions depend on."""

    num_envs: int
    observation_leaves: list[Leaf]
    action_leaves: list[Leaf]
    full_action_spec: Any


def draw_alike(*ways: Callable[[], Sequence[Tensor]]) -> bool:
    """Return whether all functions draw the same numbers. PyTorch's RNG state is restored."""
    with torch.random.fork_rng(devices=[]):
        before, found = torch.get_rng_state(), []
        for draw in ways:
            torch.set_rng_state(before)
            found.append([*draw(), torch.get_rng_state()])
    return all(torch.equal(*both) for both in zip(*found))


class RandomActions:
    """Draws random actions from the action spec, for many time steps at once if possible.

    Args:
        env: the environment; if it has an ``action_mask``, only allowed actions are drawn.
    """

    def __init__(self, env: HasActionSpec) -> None:
        self._env = env
        self._keys = [leaf.key for leaf in env.action_leaves]
        masks = (leaf.key for leaf in env.observation_leaves if leaf.is_action_mask)
        self._mask = next(masks, None)
        self._ahead: list[Tensors] = []  # in reverse order
        self._alike: bool | None = None

    def begin(self, steps: int, left: int) -> None:
        """Draw actions in advance for ``steps`` steps or, if possible, for up to ``left`` steps."""
        missing = steps - len(self._ahead)
        if self._mask is not None or missing <= 0:
            return
        if self._alike is None:
            self._alike = draw_alike(lambda: self._drawn(3), lambda: self._drawn(1, 1, 1))
        if self._alike:  # one long draw is faster than one draw per short batch
            missing = max(missing, min(left - len(self._ahead), _AHEAD))
        self._ahead = self._draw(missing)[::-1] + self._ahead

    def _draw(self, steps: int) -> list[Tensors]:
        drawn = self._env.full_action_spec.rand([steps])
        rows = zip(*[drawn.get(key).unbind(0) for key in self._keys])
        return [dict(zip(self._keys, row)) for row in rows]

    def _drawn(self, *parts: int) -> list[Tensor]:
        rows = [row for steps in parts for row in self._draw(steps)]
        return [row[key] for row in rows for key in self._keys]

    def __call__(self, observation: Arrays) -> Tensors:
        """Return the actions of the next time step, ``[num_envs, ...]``."""
        if self._ahead:
            return self._ahead.pop()
        spec = self._env.full_action_spec
        if self._mask is not None:
            spec = spec.clone()
            for key in self._keys:
                spec[key].update_mask(torch.from_numpy(observation[self._mask]).bool())
        try:
            drawn = spec.rand()
        except RuntimeError:  # the mask allows no action, which the collector reports later
            drawn = self._env.full_action_spec.rand()
        return {key: drawn.get(key) for key in self._keys}

    def clear(self) -> None:
        """Discard the actions drawn in advance."""
        self._ahead = []

    def state_dict(self) -> list[Any]:
        """Return the actions drawn in advance, as one list per time step."""
        return [[row[key].clone() for key in self._keys] for row in self._ahead]

    def load_state_dict(self, state_dict: list[Any]) -> None:
        """Restore the actions returned by :meth:`state_dict`."""
        self._ahead = [dict(zip(self._keys, row)) for row in state_dict]
