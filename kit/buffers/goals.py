"""Recompute rewards for substituted goals with the environment's reward function."""

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
_HINT = "Omit hindsight, or use a goal-conditioned environment, as preset=goals does"
_CHECKED_STEPS = 8
"""Number of random steps for which recomputed and original rewards are compared."""


class GoalReward:
    """Computes rewards with an environment's ``compute_reward(achieved_goal, desired_goal, info)``.

    The method belongs to Gymnasium-Robotics' ``GoalEnv`` (Plappert et al. 2018) and is called with
    an empty ``info``. All rows are passed in one call if this returns the same rewards as one call
    per row.

    Args:
        env: Environments whose observations have ``achieved_goal`` and ``desired_goal``.
        strategy: Value of the setting ``hindsight``, for error messages.

    Raises:
        SettingError: If the observations have no goals, or the method does not return the
            environment's rewards, for example because a wrapper changes them.
        AttributeError: If the environments have no such method.
    """

    def __init__(self, env: VectorEnv | None, strategy: str) -> None:
        name = "this recipe" if env is None else env.name
        seen = {leaf.key for leaf in env.observation_leaves} if env is not None else set()
        if env is None or env.make_again is None or not {*_GOALS} <= seen:
            reason = f"The observations of {name} lack achieved_goal or desired_goal"
            raise SettingError("hindsight", strategy, reason, _HINT)
        sync: dict[str, Any] = {"vectorization": "sync", "num_workers": None, "step_timeout": None}
        single: Any = env.make_again(num_envs=1, **sync)
        layer: gym.Env[Any, Any] = single.backend.envs[0]
        self.compute: Any = layer.get_wrapper_attr("compute_reward")
        self._is_batched = False
        achieved, desired, rewards = self._play(layer)
        computed = self._rewards(achieved, desired)
        together = np.asarray(self.compute(achieved, desired, {}))
        if not np.allclose(computed, rewards, atol=1e-6):
            reason = f"The compute_reward method does not reproduce the rewards of {name}"
            hint = "Use env.action_repeat=1 and no wrapper that changes rewards"
            raise SettingError("hindsight", strategy, reason, hint)
        has_all_rows = together.size == _CHECKED_STEPS
        self._is_batched = has_all_rows and np.allclose(together.ravel(), computed)

    @staticmethod
    def _play(env: gym.Env[Any, Any]) -> tuple[NDArray[Any], NDArray[Any], list[Any]]:
        """Play random actions; return the achieved goals, desired goals and rewards."""
        seed_spaces(env, 0)
        env.reset(seed=0)
        goals: list[list[Any]] = []
        rewards = []
        for _ in range(_CHECKED_STEPS):
            seen, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            goals.append([np.copy(seen[goal]) for goal in _GOALS])
            rewards.append(reward)
            if terminated or truncated:
                env.reset()
        achieved, desired = (np.stack(goal) for goal in zip(*goals))
        return achieved, desired, rewards

    def _rewards(self, achieved: NDArray[Any], desired: NDArray[Any]) -> NDArray[Any]:
        if self._is_batched:
            return np.ravel(self.compute(achieved, desired, {}))
        each = [np.ravel(self.compute(*goals, {}))[0] for goals in zip(achieved, desired)]
        return np.array(each)

    def __call__(self, rows: TensorDictBase) -> Tensor:
        """Return the rewards ``[rows, 1]`` of relabelled transitions ``[rows]``."""
        achieved, desired = (rows.get(("next", goal)) for goal in _GOALS)
        rewards = self._rewards(achieved.numpy(force=True), desired.numpy(force=True))
        return torch.from_numpy(rewards.astype(np.float32)).unsqueeze(-1).to(achieved.device)
