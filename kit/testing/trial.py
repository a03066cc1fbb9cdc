"""A collector on trial: what it is made for, what it gave, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector

from kit.collectors.base import KitCollector
from kit.envs.episodes import Episode


@dataclass(frozen=True)
class CollectorCase:
    """What a collector is made for."""

    num_envs: int = 3
    """environment copies."""
    steps_per_env: int = 5
    """policy steps of each copy in a batch; whole episodes: their product at least."""
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


Make = Callable[[CollectorCase], BaseCollector]


class BrokenPromise(AssertionError):
    """A collector does not do what it has to.

    Args:
        promise: name of the check.
        case: what the collector was made for.
        what: what is wrong.
    """

    def __init__(self, promise: str, case: CollectorCase, what: str) -> None:
        self.promise, self.case = promise, case
        super().__init__(f"{promise}: {what} ({case})")


@dataclass
class Run:
    """What a collector gave from its beginning to its end."""

    batches: list[TensorDictBase]
    episodes: list[Episode]
    """that it reported; none where it reports none."""
    collector: BaseCollector
    """shut down."""


class Trial:
    """A collector on trial: promises that only look at a run look at the same one.

    Args:
        make: makes the collector for a case.
        case: what it is made for.
    """

    def __init__(self, make: Make, case: CollectorCase) -> None:
        self.make, self.case = make, case

    @cached_property
    def whole(self) -> Run:
        """A run from beginning to end."""
        return self.run()

    def run(self, **changes: Any) -> Run:
        """Run a new collector of the case, or one that differs in some fields."""
        collector = self.make(replace(self.case, **changes))
        try:
            batches = [batch.clone() for batch in collector]
            return Run(batches, take_episodes(collector), collector)
        finally:
            collector.shutdown()

    def demand(self, promise: str, kept: bool, what: str) -> None:
        """Say that a promise is broken, unless it is kept.

        Raises:
            BrokenPromise: if it is not.
        """
        if not kept:
            raise BrokenPromise(promise, self.case, what)


def take_episodes(collector: BaseCollector) -> list[Episode]:
    """Return what a collector reports; nothing where it reports nothing."""
    return collector.take_episodes() if isinstance(collector, KitCollector) else []
