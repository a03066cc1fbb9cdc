"""Finished episodes: returns, lengths and infos, from the arrays of a batch."""

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
    """number of the environment it ran in, from 0."""
    episode_return: float
    """sum of its rewards, before any normalisation."""
    length: int
    """its policy steps."""
    env_steps: int
    """its env steps."""
    terminated: bool
    """whether it ended by itself; otherwise it was truncated."""
    info: Mapping[str, float] = {}
    """numbers and truth values in the ``info`` of its last step: ``is_success``, ..."""


Infos = Mapping[tuple[int, int], Mapping[str, float]]
"""``Episode.info`` by the step that ended the episode, from 0, and the environment's number."""


def info_means(episodes: Iterable[Episode]) -> dict[str, float]:
    """Means of the numbers in ``info`` over the episodes that have them."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.info.items():
            values.setdefault(name, []).append(value)
    return {name: mean(known) for name, known in values.items()}


def mean(values: Sequence[float]) -> float:
    """Their mean; NaN where both infinities are among them, or their sum is beyond all floats."""
    try:
        return statistics.fmean(values)
    except (ValueError, OverflowError):
        return math.nan


def _sum(rewards: NDArray[np.float32]) -> float:
    """Their sum, one after the other; NumPy's own sums some of them first."""
    return float(np.add.accumulate(rewards, dtype=np.float64)[-1]) if len(rewards) else 0.0


def _are_exact(sums: NDArray[np.float64], reward: NDArray[np.float32]) -> bool:
    """Whether differences of sums are exact: rewards and sums are whole numbers, not too large."""
    first = sums[0]
    whole = (np.rint(first) == first).all() and (np.rint(reward) == reward).all()
    return bool(whole and np.abs(sums).max() < 2**53)  # which 2**53 + 1 is rounded to


_SUMS = ("returns", "lengths", "env_steps")


class EpisodeStatistics:
    """Running sums of the open episode of each environment."""

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
        """Take in time steps and return the episodes that ended in them, in the order they ended.

        Rewards of an episode are added one after the other, so that it makes no difference how many
        are taken in at a time, or what came before.

        Args:
            reward: ``[steps, num_envs]``, before normalisation.
            terminated: ``[steps, num_envs]``.
            truncated: ``[steps, num_envs]``.
            env_steps: ``[steps, num_envs]``.
            infos: of the episodes that ended, where they have any.
        """
        steps = len(reward)
        returns = np.add.accumulate(np.concatenate([self.returns[None], reward]), dtype=np.float64)
        made = env_steps.cumsum(axis=0, dtype=np.int64)
        self.returns = returns[-1].copy()
        exact = _are_exact(returns, reward)
        finished: list[Episode] = []
        begun: dict[int, int] = {}  # where episodes begin that have begun in these steps
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
        """The open episodes of the environments of ``mask``, truncated here from outside."""
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
        """Begin new episodes, in all environments or those of ``mask``."""
        for name in _SUMS:
            getattr(self, name)[... if mask is None else mask] = 0

    def state_dict(self) -> dict[str, Any]:
        """The running sums: lists of numbers."""
        return {name: getattr(self, name).tolist() for name in _SUMS}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        for name in _SUMS:
            getattr(self, name)[...] = state_dict[name]
