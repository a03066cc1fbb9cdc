"""Backend that steps torch environments through NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kit.envs.backends.base import EnvBackend, Mask, StepArrays
from kit.envs.spaces import Arrays
from kit.envs.tensor.base import TensorEnv


class TensorBackend(EnvBackend):
    """Backend that lets all collectors use torch environments through a NumPy interface.

    :class:`~kit.collectors.TensorCollector` bypasses this backend and uses tensors directly.
    """

    uses_torch = True

    def __init__(self, env: TensorEnv, name: str) -> None:
        self.env = env
        self._describe(name, env.num_envs, *env.gymnasium_spaces())

    def reset(
        self, observation: Arrays, seeds: Sequence[int] | None = None, mask: Mask | None = None
    ) -> None:
        """Reset the environments in ``mask`` (``None``: all). Only the first seed is used."""
        seed = None if seeds is None else int(seeds[0])
        first = self.env.reset_tensors(seed, None if mask is None else torch.from_numpy(mask))
        observation["observation"][...] = _array(first)

    def step(self, actions: Arrays, result: StepArrays, active: Mask | None = None) -> Mask | None:
        """Step all environments."""
        assert active is None
        action = torch.from_numpy(np.ascontiguousarray(self.convert(actions)))
        step = self.env.step_tensors(action.to(self.env.device))
        result.next_observation["observation"][...] = _array(step.next_observation)
        result.observation["observation"][...] = _array(step.observation)
        for name in ("reward", "terminated", "truncated", "env_steps"):
            getattr(result, name)[...] = _array(getattr(step, name))
        return None

    def full_states(self) -> list[Any]:
        """Return a list with the state of the whole torch environment."""
        return [dict(self.env.state_dict())]

    def set_full_states(self, states: list[Any]) -> None:
        """Restore the state of the whole torch environment."""
        self.env.load_state_dict(states[0])

    def close(self) -> None:
        """Do nothing, because torch environments hold no external resources."""


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.cpu().numpy()
