"""Returns, lengths and infos of finished episodes, computed from batch arrays."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Episode(NamedTuple):
    """One finished episode."""

    env: int
    """Index of the environment."""
    episode_return: float
    """Sum of rewards, before normalisation."""
    length: int
    """Number of policy steps."""
    env_steps: int
    """Number of env steps."""
    terminated: bool
    """Whether the episode terminated; otherwise it was truncated."""
    info: Mapping[str, float] = {}
    """Numeric and boolean entries of the last step's ``info``, such as ``is_success``."""


Infos = Mapping[tuple[int, int], Mapping[str, float]]
"""``Episode.info`` of each ended episode, keyed by (step index, environment index)."""


def info_means(episodes: Iterable[Episode]) -> dict[str, float]:
    """Return the mean of each ``info`` entry over the episodes that have this entry."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.info.items():
            values.setdefault(name, []).append(value)
    return {name: mean(numbers) for name, numbers in values.items()}


def mean(values: Sequence[float]) -> float:
    """Return the mean of values; NaN if the mean is undefined or the sum overflows."""
    try:
        return statistics.fmean(values)
    except (ValueError, OverflowError):
        return math.nan


def _sum(rewards: NDArray[np.float32]) -> float:
    """Sum rewards sequentially, unlike NumPy's pairwise summation."""
    return float(np.add.accumulate(rewards, dtype=np.float64)[-1]) if len(rewards) else 0.0


def _are_exact(sums: NDArray[np.float64], reward: NDArray[np.float32]) -> bool:
    """Return whether all rewards and sums are integers small enough for exact subtraction."""
    first = sums[0]
    whole = (np.rint(first) == first).all() and (np.rint(reward) == reward).all()
    return bool(whole and np.abs(sums).max() < 2**53)  # float64 rounds 2**53 + 1 to 2**53


_SUMS = ("returns", "lengths", "env_steps")


class EpisodeStatistics:
    """Tracks the return and length of each environment's unfinished episode."""

    def __init__(self, num_envs: int) -> None:
        self.returns = np.zeros(num_envs, np.float64)
        self.lengths = np.zeros(num_envs, np.int64)
        self.env_steps = np.zeros(num_envs, np.int64)

    def add(
        self,
        reward: NDArray[np.float32],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        env_steps: NDArray[np.int32],
        infos: Infos,
    ) -> list[Episode]:
        """Add steps and return the episodes that ended during these steps, in order.

        Rewards of an episode are summed sequentially. Returns therefore do not depend on how many
        steps one call adds, or on earlier episodes.

        Args:
            reward: rewards before normalisation, ``[steps, num_envs]``.
            terminated: termination flags, ``[steps, num_envs]``.
            truncated: truncation flags, ``[steps, num_envs]``.
            env_steps: env steps of each policy step, ``[steps, num_envs]``.
            infos: ``Episode.info`` of ended episodes; may omit episodes.
        """
        steps = len(reward)
        returns = np.add.accumulate(np.concatenate([self.returns[None], reward]), dtype=np.float64)
        made = env_steps.cumsum(axis=0, dtype=np.int64)
        self.returns = returns[-1].copy()
        exact = _are_exact(returns, reward)
        finished: list[Episode] = []
        begun: dict[int, int] = {}  # first step of the latest episode that starts in this batch
        steps_ended, envs = (terminated | truncated).nonzero()
        for step, env in zip(steps_ended.tolist(), envs.tolist()):
            if (first := begun.get(env)) is None:
                whole = returns[step + 1, env]
            elif exact:
                whole = returns[step + 1, env] - returns[first, env]
            else:
                whole = _sum(reward[first : step + 1, env])
            finished.append(
                Episode(
                    env=env,
                    episode_return=float(whole),
                    length=int(self.lengths[env]) + step + 1,
                    env_steps=int(self.env_steps[env] + made[step, env]),
                    terminated=bool(terminated[step, env]),
                    info=infos.get((step, env), {}),
                )
            )
            begun[env] = step + 1
            self.lengths[env] = -(step + 1)
            self.env_steps[env] = -made[step, env]
        for env, step in begun.items():
            ended = returns[step, env]
            self.returns[env] = returns[-1, env] - ended if exact else _sum(reward[step:, env])
        self.lengths += steps
        self.env_steps += made[-1]
        return finished

    def cut(self, mask: NDArray[np.bool_]) -> list[Episode]:
        """Return the unfinished episodes of the environments in ``mask`` as truncated episodes."""
        return [
            Episode(
                env=env,
                episode_return=float(self.returns[env]),
                length=int(self.lengths[env]),
                env_steps=int(self.env_steps[env]),
                terminated=False,
            )
            for env in np.flatnonzero(mask & (self.lengths > 0)).tolist()
        ]

    def restart(self, mask: NDArray[np.bool_] | None = None) -> None:
        """Reset the running sums of the environments in ``mask`` (``None``: all)."""
        for name in _SUMS:
            getattr(self, name)[... if mask is None else mask] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the running sums as lists of numbers."""
        return {name: getattr(self, name).tolist() for name in _SUMS}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore running sums returned by :meth:`state_dict`."""
        for name in _SUMS:
            getattr(self, name)[...] = state_dict[name]
