"""The test bed of collectors: an environment of known transitions, and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kit.envs import VectorEnv, make_env
from kit.modules import make_actor


@dataclass(frozen=True)
class CollectorCase:
    """What a collector is made for."""

    num_envs: int = 3
    """environments."""
    steps_per_env: int = 5
    """policy steps of each env in a batch; whole episodes: their product at least."""
    batches: int = 4
    """in all."""
    seed: int = 0
    """of environments, policy and random actions."""
    fast: bool = True
    """whether a fast path may be taken, where there is one."""

    @property
    def frames_per_batch(self) -> int:
        """Policy steps of a batch."""
        return self.num_envs * self.steps_per_env

    @property
    def total_frames(self) -> int:
        """Policy steps in all."""
        return self.frames_per_batch * self.batches


class Outcome(NamedTuple):
    """What steps lead to."""

    observation: Tensor
    """``[..., observation]``."""
    reward: Tensor
    """``[..., 1]``."""
    terminated: Tensor
    """``[..., 1]``, bool."""
    truncated: Tensor | None = None
    """``[..., 1]``, bool; ``None`` where observations do not say how old an episode is."""
    undecided: Tensor | None = None
    """where rounding decides whether an episode terminates, ``[..., 1]``, bool; nowhere if left
    out."""


@dataclass(frozen=True)
class World:
    """An environment, and its properties for the suite."""

    id: str
    """of Gymnasium."""
    limit: int
    """policy steps after which an episode is truncated."""
    expected: Callable[[Tensor, Tensor], Outcome]
    """outcomes of steps, from observations ``[..., observation]`` and actions ``[...]``."""
    begins: Callable[[Tensor], Tensor]
    """whether observations can be the first ones of episodes, ``[...]``, bool."""
    cases: tuple[CollectorCase, ...]
    """sizes to put collectors on trial with, unless given."""
    episode: Callable[[Tensor], Tensor] | None = None
    """number of the episode of observations, ``[...]``; ``None`` where they do not contain it."""
    tolerance: float = 0.0
    """by which next observations may differ, for rounding; all else is exact."""

    def env(self, case: CollectorCase, vectorization: Any = "sync", **kwargs: Any) -> VectorEnv:
        """The environment of a case, by :func:`~kit.envs.make_env` and further arguments of it."""
        kwargs = {"max_episode_steps": self.limit, "seed": case.seed, **kwargs}
        return make_env(self.id, case.num_envs, vectorization=vectorization, **kwargs)

    def policy(self, env: Any, seed: int = 0) -> Any:
        """A policy that samples, with the same weights for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make_actor(env, hidden_sizes=(8,))
