"""Rewards of transitions with other goals, computed by the environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from kit.envs.single_env import seed_spaces
from kit.envs.vector_env import VectorEnv
from kit.steps import SettingError

_GOALS = ("achieved_goal", "desired_goal")
_WORKS = "leave it out, or use an environment as those of Gymnasium-Robotics"
_TRIED = 8
"""Steps in which the computed rewards are compared to those of the environment."""


class GoalReward:
    """Computes rewards by ``compute_reward(achieved_goal, desired_goal, info)`` of an environment.

    This is the method of Gymnasium's ``GoalEnv`` (Plappert et al. 2018). It is called with an empty
    ``info``. All rows are passed in one call if that gives the same rewards as one call per row.

    Args:
        env: environments whose observations have ``achieved_goal`` and ``desired_goal``.
        strategy: value of the setting ``hindsight``, for errors.

    Raises:
        SettingError: if the environments have no goals, or if the method does not return the
            environment's rewards, for example because a wrapper changes them.
        AttributeError: if the environments have no such method.
    """

    def __init__(self, env: VectorEnv | None, strategy: str) -> None:
        name = "this recipe" if env is None else env.name
        seen = {leaf.key for leaf in env.observation_leaves} if env is not None else set()
        if env is None or env.make_again is None or not {*_GOALS} <= seen:
            why = f"needs observations achieved_goal and desired_goal. {name} has none"
            raise SettingError("hindsight", strategy, why, _WORKS)
        here: dict[str, Any] = {"vectorization": "sync", "num_workers": None, "step_timeout": None}
        one: Any = env.make_again(num_envs=1, **here)
        layer: gym.Env[Any, Any] = one.backend.envs[0]
        self.compute: Any = layer.get_wrapper_attr("compute_reward")
        self._at_once = False
        achieved, desired, rewards = self._played(layer)
        computed = self._rewards(achieved, desired)
        together = np.asarray(self.compute(achieved, desired, {}))
        if not np.allclose(computed, rewards, atol=1e-6):
            why = f"needs a compute_reward that returns the rewards of {name}, and they differ"
            works = "use env.action_repeat=1 and no wrapper that changes rewards"
            raise SettingError("hindsight", strategy, why, works)
        self._at_once = together.size == _TRIED and np.allclose(together.ravel(), computed)

    @staticmethod
    def _played(env: gym.Env[Any, Any]) -> tuple[NDArray[Any], NDArray[Any], list[Any]]:
        """Play random actions; return the achieved goals, desired goals and rewards."""
        seed_spaces(env, 0)
        env.reset(seed=0)
        goals: list[list[Any]] = []
        rewards = []
        for _ in range(_TRIED):
            seen, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            goals.append([np.copy(seen[goal]) for goal in _GOALS])
            rewards.append(reward)
            if terminated or truncated:
                env.reset()
        achieved, desired = (np.stack(goal) for goal in zip(*goals))
        return achieved, desired, rewards

    def _rewards(self, achieved: NDArray[Any], desired: NDArray[Any]) -> NDArray[Any]:
        if self._at_once:
            return np.ravel(self.compute(achieved, desired, {}))
        each = [np.ravel(self.compute(*goals, {}))[0] for goals in zip(achieved, desired)]
        return np.array(each)

    def __call__(self, rows: TensorDictBase) -> Tensor:
        """Return rewards ``[rows, 1]`` of relabelled transitions ``[rows]``."""
        achieved, desired = (rows.get(("next", goal)) for goal in _GOALS)
        rewards = self._rewards(achieved.numpy(force=True), desired.numpy(force=True))
        return torch.from_numpy(rewards.astype(np.float32)).unsqueeze(-1).to(achieved.device)
