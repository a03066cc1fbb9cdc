"""EnvPool: many copies of one environment in threads, written in C++."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.envs.copies import Copies, StepArrays
from kit.envs.errors import EnvironmentFault
from kit.envs.spaces import Arrays, value_at
from kit.envs.state import CannotCapture
from kit.steps import SettingError


class PoolCopies(Copies):
    """Copies stepped by EnvPool, in synchronous mode.

    EnvPool resets a finished copy in the step after the last; here it is reset at once, by asking
    for just those copies, so that no policy step is spent.

    Args:
        id: EnvPool's id, most often Gymnasium's.
        num_envs: number of copies.
        seed: of the first copy; EnvPool is seeded once, when it is made.
        max_episode_steps: policy steps after which an episode is truncated; ``None``: its own.
        **kwargs: for ``envpool.make_gymnasium``.

    Raises:
        SettingError: if EnvPool is not installed or does not have ``id``.
    """

    resumable = False

    def __init__(
        self,
        id: str,
        num_envs: int,
        seed: int = 0,
        max_episode_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        try:
            import envpool
        except ImportError:
            raise SettingError(
                "vectorization",
                "envpool",
                "needs the package envpool",
                "pip install 'torchrl-kit[envpool]'",
            ) from None
        if id not in envpool.list_all_envs():
            raise SettingError("env.id", id, "is not an environment of EnvPool", _similar(id))
        if max_episode_steps is not None:
            kwargs["max_episode_steps"] = max_episode_steps
        self.pool = envpool.make_gymnasium(id, num_envs=num_envs, seed=seed % 2**31, **kwargs)
        self._describe(id, num_envs, self.pool.observation_space, self.pool.action_space)

    def reset(
        self,
        observation: Arrays,
        seeds: Sequence[int] | None = None,
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Reset all copies, or those of ``mask``; seeds were given when the pool was made."""
        if mask is None:
            first = self.pool.reset()[0]
            for leaf in self.observation_leaves:
                observation[leaf.key][...] = value_at(first, leaf.path)
            return
        chosen = np.flatnonzero(mask).astype(np.int32)
        first = self.pool.reset(chosen)[0]
        for leaf in self.observation_leaves:
            observation[leaf.key][chosen] = value_at(first, leaf.path)

    def step(self, actions: Arrays, result: StepArrays) -> None:
        """Step all copies, then reset those that finished."""
        try:
            seen, reward, terminated, truncated, _ = self.pool.step(self.convert(actions))
        except Exception as error:
            raise EnvironmentFault(
                self.name, None, f"step() raised {type(error).__name__}: {error}"
            ) from error
        result.reward[...] = reward
        result.terminated[...] = terminated
        result.truncated[...] = truncated
        for leaf in self.observation_leaves:
            value = value_at(seen, leaf.path)
            result.next_observation[leaf.key][...] = value
            result.observation[leaf.key][...] = value
        ended = result.terminated | result.truncated
        if ended.any():
            self.reset(result.observation, mask=ended)

    def full_states(self) -> list[Any]:
        """EnvPool has no way to give the state of a copy."""
        raise CannotCapture("EnvPool does not give the state of its environments")

    def set_full_states(self, states: list[Any]) -> None:
        """EnvPool has no way to take the state of a copy."""
        raise CannotCapture("EnvPool does not take the state of its environments")

    def close(self) -> None:
        """Stop EnvPool's threads."""
        with contextlib.suppress(Exception):
            self.pool.close()


def _similar(id: str) -> list[str]:
    import difflib

    import envpool

    return difflib.get_close_matches(id, envpool.list_all_envs(), n=3, cutoff=0.3)
