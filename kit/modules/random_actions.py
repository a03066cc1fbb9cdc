"""Random actions, drawn ahead where that changes none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kit.envs.spaces import Arrays, Key, Leaf

Tensors = dict[Key, Tensor]

_AHEAD = 128
"""Random actions that are drawn at once, at most."""


class HasActionSpec(Protocol):
    """What has to be known of an environment to act in it."""

    num_envs: int
    observation_leaves: list[Leaf]
    action_leaves: list[Leaf]
    full_action_spec: Any


def draw_alike(*ways: Callable[[], Sequence[Tensor]]) -> bool:
    """Whether ways of drawing use PyTorch's random numbers alike; these stay as they are."""
    with torch.random.fork_rng(devices=[]):
        before, found = torch.get_rng_state(), []
        for draw in ways:
            torch.set_rng_state(before)
            found.append([*draw(), torch.get_rng_state()])
    return all(torch.equal(*both) for both in zip(*found))


class RandomActions:
    """Actions drawn from the action spec, many time steps at once where that is the same.

    Args:
        env: whose actions they are; where it has an ``action_mask``, allowed ones are drawn.
    """

    def __init__(self, env: HasActionSpec) -> None:
        self._env = env
        self._keys = [leaf.key for leaf in env.action_leaves]
        masks = (leaf.key for leaf in env.observation_leaves if leaf.is_action_mask)
        self._mask = next(masks, None)
        self._ahead: list[Tensors] = []  # the next one last
        self._alike: bool | None = None

    def begin(self, steps: int, left: int) -> None:
        """Draw actions for the next ``steps`` time steps, of ``left`` that will be random."""
        missing = steps - len(self._ahead)
        if self._mask is not None or missing <= 0:
            return
        if self._alike is None:
            self._alike = draw_alike(lambda: self._drawn(3), lambda: self._drawn(1, 1, 1))
        if self._alike:  # so that one-step batches do not pay for a spec each
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
        """Return the actions of one time step, ``[num_envs, ...]``."""
        if self._ahead:
            return self._ahead.pop()
        spec = self._env.full_action_spec
        if self._mask is not None:
            spec = spec.clone()
            for key in self._keys:
                spec[key].update_mask(torch.from_numpy(observation[self._mask]).bool())
        try:
            drawn = spec.rand()
        except RuntimeError:  # a state allows none, which is a fault once the batch is looked at
            drawn = self._env.full_action_spec.rand()
        return {key: drawn.get(key) for key in self._keys}

    def clear(self) -> None:
        """Forget what was drawn ahead."""
        self._ahead = []

    def state_dict(self) -> list[Any]:
        """Return random numbers drawn ahead, step by step."""
        return [[row[key].clone() for key in self._keys] for row in self._ahead]

    def load_state_dict(self, state_dict: list[Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._ahead = [dict(zip(self._keys, row)) for row in state_dict]
