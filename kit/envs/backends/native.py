"""Environments that step all their copies themselves."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from kit.envs.backends.gymnasium import GymnasiumBackend
from kit.envs.state import capture, restore
from kit.steps.errors import SettingError


class _SameStepCartPole(gym.vector.VectorWrapper):  # type: ignore[misc, unused-ignore]
    """Gymnasium's vector CartPole, which resets one step late, made to reset when asked."""

    def __init__(self, env: gym.vector.VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self.metadata = {
            **env.metadata,
            "autoreset_mode": gym.vector.AutoresetMode.DISABLED,
        }

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset all copies, or those of ``options["reset_mask"]``."""
        mask = (options or {}).get("reset_mask")
        if mask is None:
            # One generator serves all copies, so the first seed seeds them all.
            first: tuple[NDArray[Any], dict[str, Any]] = self.env.reset(
                seed=seed[0] if isinstance(seed, list) else seed
            )
            return first
        core = self.env.unwrapped
        count = int(mask.sum())
        core.state[:, mask] = core.np_random.uniform(core.low, core.high, (4, count))
        core.steps[mask] = 0
        core.prev_done[mask] = False
        return core.state.T.astype(np.float32), {}


_SAME_STEP = {"CartPoleVectorEnv": _SameStepCartPole}


def make_native(
    spec: EnvSpec, num_envs: int, max_episode_steps: int | None, **kwargs: Any
) -> NativeCopies:
    """Make the environment's own vector environment.

    Args:
        spec: Gymnasium's entry.
        num_envs: number of copies.
        max_episode_steps: policy steps after which an episode is truncated; ``None``: as
            registered.
        **kwargs: for the environment.

    Raises:
        SettingError: if it has none, or one that spends a policy step on each reset.
    """
    if spec.vector_entry_point is None:
        raise SettingError(
            "env.vectorization", "native", f"is not offered by {spec.id}", ["sync", "async"]
        )
    if max_episode_steps is not None:
        kwargs["max_episode_steps"] = max_episode_steps
    elif spec.max_episode_steps is not None:
        kwargs["max_episode_steps"] = spec.max_episode_steps
    vector = gym.make_vec(spec, num_envs, vectorization_mode="vector_entry_point", **kwargs)
    same_step = _SAME_STEP.get(type(vector.unwrapped).__name__)
    if same_step is not None:
        vector = same_step(vector)
    return NativeCopies(vector, spec.id)


class NativeCopies(GymnasiumBackend):
    """An environment's own vector environment, whose state is captured as a whole."""

    def full_states(self) -> list[Any]:
        """Capture the vector environment; one state stands for all copies."""
        return [capture(self.vector.unwrapped)]

    def set_full_states(self, states: list[Any]) -> None:
        """Put back the one state."""
        restore(self.vector.unwrapped, states[0])
