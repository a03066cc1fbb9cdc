"""Collectors on trial: environments of known transitions, sizes, runs and their promises."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.collectors import BaseCollector

from kit.collectors.base import KitCollector
from kit.envs import VectorEnv, make_env
from kit.envs.episodes import Episode
from kit.envs.spaces import Key
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
    random_steps: int = 0
    """policy steps with random actions, at the beginning."""

    @property
    def frames_per_batch(self) -> int:
        """Policy steps of a batch."""
        return self.num_envs * self.steps_per_env

    @property
    def total_frames(self) -> int:
        """Policy steps in all."""
        return self.frames_per_batch * self.batches


class Expected(NamedTuple):
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
    env_steps: Tensor | None = None
    """that each of them takes, ``[...]``, whole numbers; one if left out."""


@dataclass(frozen=True)
class SuiteEnv:
    """An environment, and its properties for the suite."""

    id: str
    """of Gymnasium."""
    limit: int
    """policy steps after which an episode is truncated."""
    expected: Callable[[Tensor, Tensor], Expected]
    """outcomes of steps, from observations ``[..., observation]`` and actions ``[...]``."""
    begins: Callable[[Tensor], Tensor]
    """whether observations can be the first ones of episodes, ``[...]``, bool."""
    cases: tuple[CollectorCase, ...]
    """sizes to put collectors on trial with, unless given."""
    episode: Callable[[Tensor], Tensor] | None = None
    """number of the episode of observations, ``[...]``; ``None`` where they do not contain it."""
    action_repeat: int = 1
    """env steps that an action is held for."""
    tolerance: float = 0.0
    """by which next observations may differ, for rounding; all else is exact."""
    policies: deque[Any] = field(default_factory=lambda: deque(maxlen=1), repr=False, compare=False)
    """the last one that was made, which the suite changes as a learner does."""

    def env(self, case: CollectorCase, vectorization: Any = "sync", **kwargs: Any) -> VectorEnv:
        """The environment of a case, by :func:`~kit.envs.make_env` and further arguments of it."""
        settings = {"max_episode_steps": self.limit, "action_repeat": self.action_repeat}
        kwargs = {**settings, "seed": case.seed, **kwargs}
        return make_env(self.id, case.num_envs, vectorization=vectorization, **kwargs)

    def policy(self, env: Any, seed: int = 0) -> Any:
        """A policy that samples, with the same weights for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            policy = make_actor(env, hidden_sizes=(8,))
        self.policies.append(policy)
        return policy


_ENDS = ("observation", "reward", "done", "terminated", "truncated")
_ENTRIES: tuple[Key, ...] = ("observation", "action", *[("next", name) for name in _ENDS])
"""What every batch has."""
Make = Callable[[CollectorCase], BaseCollector]


class ConformanceError(AssertionError):
    """A collector does not keep a promise."""

    def __init__(self, promise: str, case: CollectorCase, what: str) -> None:
        self.promise, self.case, self.what = promise, case, what
        super().__init__(f"{promise}: {what} ({case})")


@dataclass
class Run:
    """What a collector gave from its beginning to its end."""

    batches: list[TensorDictBase]
    episodes: list[Episode]
    """that it reported; none where it reports none."""
    collector: BaseCollector
    """shut down."""
    restarted: int = 0
    """number of the batch with which all envs begin new episodes: the first, or a later one where
    a saved run continues without the state of its environments."""
    counted: Sequence[int] = ()
    """policy steps that the collector had counted with each batch."""


class CollectorUnderTest:
    """A collector on trial: promises that only look at a run look at the same one.

    Args:
        make: makes the collector for a case.
        case: what it is made for.
        world: where.
        exact_resume: whether a saved run has to continue bit for bit.

    Attributes:
        promise: name of the one under trial.
        first: whether it is that of the first case.
    """

    promise = ""
    first = True

    def __init__(
        self, make: Make, case: CollectorCase, world: SuiteEnv, exact_resume: bool = True
    ) -> None:
        self.make, self.case, self.world, self.exact_resume = make, case, world, exact_resume

    @cached_property
    def whole(self) -> Run:
        """A run from beginning to end, whose batches have what there is to check."""
        run = self.run()
        for entry in _ENTRIES:
            self.demand_entry(run, entry)
        return run

    def run(
        self,
        after: Callable[[TensorDictBase], Any] | None = None,
        before: Callable[[Any], Any] | None = None,
        **changes: Any,
    ) -> Run:
        """Run a new collector of the case, with some fields changed.

        Args:
            after: called with each batch, of which a copy is in the run.
            before: called with the collector before the first.
            changes: of fields of the case.
        """
        batches, counted = [], []
        with self.made(**changes) as collector:
            if before is not None:
                before(collector)
            for batch in collector:
                batches.append(batch.clone())
                counted.append(getattr(collector, "policy_steps", 0))
                if after is not None:
                    after(batch)
            return Run(batches, take_episodes(collector), collector, counted=counted)

    @contextlib.contextmanager
    def made(self, **changes: Any) -> Iterator[Any]:
        """A new collector, of the case with some fields changed, which is shut down at the end."""
        collector = self.make(replace(self.case, **changes))
        try:
            yield collector
        finally:
            collector.shutdown()

    def demand_entry(self, run: Run, entry: Key) -> None:
        """Raise ``ConformanceError`` unless all batches have an entry."""
        there = all(entry in batch.keys(True) for batch in run.batches)
        self.demand(there, f"batches have no {entry}")

    def demand(self, kept: bool, what: str) -> None:
        """Raise ``ConformanceError`` of the promise under trial, unless it is kept."""
        if not kept:
            raise ConformanceError(self.promise, self.case, what)


def take_episodes(collector: BaseCollector) -> list[Episode]:
    """The episodes that a collector reports; TorchRL's report none."""
    return collector.take_episodes() if isinstance(collector, KitCollector) else []
