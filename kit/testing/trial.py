"""A collector on trial: its case, its batches, and its promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector

from kit.collectors.base import KitCollector
from kit.envs.episodes import Episode
from kit.testing.world import CollectorCase, World

Make = Callable[[CollectorCase], BaseCollector]


class BrokenPromise(AssertionError):
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


class Trial:
    """A collector on trial: promises that only look at a run look at the same one.

    Args:
        make: makes the collector for a case.
        case: what it is made for.
        world: where.
        exact_resume: whether a saved run has to continue bit for bit.

    Attributes:
        promise: name of the one under trial.
    """

    promise = ""

    def __init__(
        self, make: Make, case: CollectorCase, world: World, exact_resume: bool = True
    ) -> None:
        self.make, self.case, self.world, self.exact_resume = make, case, world, exact_resume

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

    def demand(self, kept: bool, what: str) -> None:
        """Raise ``BrokenPromise`` of the promise under trial, unless it is kept."""
        if not kept:
            raise BrokenPromise(self.promise, self.case, what)


def take_episodes(collector: BaseCollector) -> list[Episode]:
    """The episodes that a collector reports; TorchRL's report none."""
    return collector.take_episodes() if isinstance(collector, KitCollector) else []
