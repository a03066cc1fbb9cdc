"""Cases, suite environments and runs for collector conformance checks."""

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
    """Sizes and seed with which a collector is tested."""

    num_envs: int = 3
    """Number of environments."""
    steps_per_env: int = 5
    """Policy steps per environment and batch. Batches of complete episodes may be larger."""
    batches: int = 4
    """Number of batches."""
    seed: int = 0
    """Seed for environments, policy and random actions."""
    fast: bool = True
    """Whether the collector may use a fast path."""
    random_steps: int = 0
    """Number of initial policy steps with random actions."""

    @property
    def frames_per_batch(self) -> int:
        """Policy steps per batch."""
        return self.num_envs * self.steps_per_env

    @property
    def total_frames(self) -> int:
        """Total policy steps."""
        return self.frames_per_batch * self.batches


class Expected(NamedTuple):
    """Expected results of steps."""

    observation: Tensor
    """Next observation, ``[..., observation]``."""
    reward: Tensor
    """Reward, ``[..., 1]``."""
    terminated: Tensor
    """Termination flag, ``[..., 1]``, bool."""
    truncated: Tensor | None = None
    """Truncation flag, ``[..., 1]``, bool; ``None`` if observations contain no step count."""
    undecided: Tensor | None = None
    """Whether termination depends on rounding, ``[..., 1]``, bool. If ``None``, it never does."""
    env_steps: Tensor | None = None
    """Number of env steps per policy step, ``[...]``, integers. If ``None``, it is always 1."""


@dataclass(frozen=True)
class SuiteEnv:
    """Environment with known transitions, for conformance checks."""

    id: str
    """Gymnasium id."""
    limit: int
    """Policy steps after which an episode is truncated."""
    expected: Callable[[Tensor, Tensor], Expected]
    """Function that maps observations ``[..., observation]`` and actions ``[...]`` to results."""
    begins: Callable[[Tensor], Tensor]
    """Function that returns whether each observation can start an episode, ``[...]``, bool."""
    cases: tuple[CollectorCase, ...]
    """Default cases."""
    episode: Callable[[Tensor], Tensor] | None = None
    """Function that returns each observation's episode id, ``[...]``; ``None`` if unknown."""
    action_repeat: int = 1
    """Env steps per action."""
    tolerance: float = 0.0
    """Rounding tolerance for next observations. All other values must be exact."""
    policies: deque[Any] = field(default_factory=lambda: deque(maxlen=1), repr=False, compare=False)
    """The policy created last. The suite changes this policy's weights, as a learner would."""

    def env(self, case: CollectorCase, vectorization: Any = "sync", **kwargs: Any) -> VectorEnv:
        """Create a case's environment. Extra arguments are passed to :func:`~kit.envs.make_env`."""
        settings = {"max_episode_steps": self.limit, "action_repeat": self.action_repeat}
        kwargs = {**settings, "seed": case.seed, **kwargs}
        return make_env(self.id, case.num_envs, vectorization=vectorization, **kwargs)

    def policy(self, env: Any, seed: int = 0) -> Any:
        """Create a policy that samples actions; equal seeds give equal weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            policy = make_actor(env, hidden_sizes=(8,))
        self.policies.append(policy)
        return policy


_ENDS = ("observation", "reward", "done", "terminated", "truncated")
_ENTRIES: tuple[Key, ...] = ("observation", "action", *[("next", name) for name in _ENDS])
"""Entries that every batch must have."""
Make = Callable[[CollectorCase], BaseCollector]


class ConformanceError(AssertionError):
    """Raised when a collector fails a conformance check."""

    def __init__(self, promise: str, case: CollectorCase, what: str) -> None:
        self.promise, self.case, self.what = promise, case, what
        super().__init__(f"{promise}: {what} ({case})")


@dataclass
class Run:
    """Batches, episodes and step counts from a collector's complete run."""

    batches: list[TensorDictBase]
    episodes: list[Episode]
    """Episodes that the collector reported, if it reports episodes."""
    collector: BaseCollector
    """The run's collector, already shut down."""
    restarted: int = 0
    """Index of the batch in which all environments start new episodes: 0, or a later batch after a
    resume without environment state."""
    counted: Sequence[int] = ()
    """Number of policy steps that the collector had counted after each batch."""


class CollectorUnderTest:
    """Creates and runs collectors for a case. Checks that need one run share the same run.

    Args:
        make: function that creates the collector for a case.
        case: sizes and seed of the collector.
        world: suite environment.
        exact_resume: whether a resumed run must continue bit by bit.

    Attributes:
        promise: name of the current check.
        first: whether the case is the first one.
    """

    promise = ""
    first = True

    def __init__(
        self, make: Make, case: CollectorCase, world: SuiteEnv, exact_resume: bool = True
    ) -> None:
        self.make, self.case, self.world, self.exact_resume = make, case, world, exact_resume

    @cached_property
    def whole(self) -> Run:
        """A complete run, whose batches have all required entries."""
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
        """Run a new collector for the case until it ends.

        Args:
            after: called with each batch after the batch was copied.
            before: called with the collector before the first batch.
            **changes: fields of the case to change.
        """
        batches, counted = [], []
        with self.create(**changes) as collector:
            if before is not None:
                before(collector)
            for batch in collector:
                batches.append(batch.clone())
                counted.append(getattr(collector, "policy_steps", 0))
                if after is not None:
                    after(batch)
            return Run(batches, take_episodes(collector), collector, counted=counted)

    @contextlib.contextmanager
    def create(self, **changes: Any) -> Iterator[Any]:
        """Create a collector for the case with some fields changed, and shut it down at the end."""
        collector = self.make(replace(self.case, **changes))
        try:
            yield collector
        finally:
            collector.shutdown()

    def demand_entry(self, run: Run, entry: Key) -> None:
        """Raise ``ConformanceError`` unless all batches have an entry."""
        present = all(entry in batch.keys(True) for batch in run.batches)
        self.demand(present, f"batches have no {entry}")

    def demand(self, condition: bool, what: str) -> None:
        """Raise ``ConformanceError`` for the current check unless a condition is true."""
        if not condition:
            raise ConformanceError(self.promise, self.case, what)


def take_episodes(collector: BaseCollector) -> list[Episode]:
    """Return the episodes that a collector reports. TorchRL's collectors report none."""
    return collector.take_episodes() if isinstance(collector, KitCollector) else []
