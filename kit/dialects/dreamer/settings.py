"""Dreamer: the official DreamerV3, and Algorithm 1 of the first paper.

``Dreamer`` has the settings of https://github.com/danijar/dreamerv3, whose unit is the transition,
including the observation after a reset. Its ``train_ratio`` is in replayed time steps per
transition: a batch of 16 sequences of 64 steps makes it 1,024 times the replay ratio.

``DreamerPaper`` is Algorithm 1 of "Dream to Control" (Hafner et al. 2020): collect a whole episode,
then make ``collect_interval`` update steps. Its method ``interleaved`` returns the same experiment
in the manner of the third version: one policy step, then the gradient steps that are due.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kit.dialects.base import OFF_POLICY, Dialect
from kit.dialects.fields import acts, counts, fact
from kit.steps.errors import Count, Natural

_DRIVER_STEPS = 10
"""Transitions that the driver collects at least before the run asks whether it has ended."""


@dataclass
class DreamerSettings(Dialect):
    """Settings of the official DreamerV3: those of ``run``, and of its replay."""

    NAME = "dreamer"
    LIBRARY = "DreamerV3"
    VERSIONS: ClassVar = {
        "e3f0224": "the code of e3f0224; its ratio answers 1 at first, and is asked per transition",
        "documented": "train_ratio as it is described: replayed steps per step, in exact fractions",
    }
    ALGORITHMS: ClassVar = {"dreamer_v3": OFF_POLICY}
    TOTAL = "steps"
    CANNOT: ClassVar = {
        "on_policy": (False, "it trains from a replay"),
        "world_size": (1, "one process trains"),
    }
    SECTIONS = frozenset({"", "run", "defaults", "defaults.run"})
    PATHS: ClassVar = {"replay.size": "replay_size"}

    steps: Natural = 10**10
    """transitions of the run, rounded up to chunks of at least ten (``run.steps``)."""
    train_ratio: float = 32.0
    """replayed time steps per transition (``run.train_ratio``): ``batch_size * batch_length`` times
    the replay ratio; 0: never train, negative: one gradient step per transition."""
    batch_size: Count = counts("minibatch_size", 16)
    """sequences in a minibatch."""
    batch_length: Count = counts("sequence_length", 64)
    """time steps of a sequence."""
    envs: Count = counts("num_envs", 16)
    """environments (``run.envs``)."""
    replay_context: Natural = 1
    """time steps before each sequence that give it its first state."""
    consec_train: Count = 1
    """consecutive sequences that are read one after the other."""
    repeat: Count = counts("action_repeat", 1)
    """env steps one action is held for (``env.*.repeat``): 4 for Atari."""
    replay_size: Count = acts("buffer_size", 5_000_000)
    """transitions in the replay (``replay.size``)."""
    max_episode_steps: Count | None = fact("max_episode_steps")
    """policy steps after which an episode is truncated; the environment's business."""

    @property
    def stored_length(self) -> int:
        """Time steps of one item of the replay."""
        return self.consec_train * self.batch_length + self.replay_context

    @property
    def first_transition(self) -> int:
        """Number of the transition that puts enough items into the replay to train."""
        return self.batch_size * self.batch_length + self.envs * (self.stored_length - 1)

    @property
    def transitions(self) -> int:
        """Transitions of the run: whole chunks of the driver."""
        vector_steps = 1 if self.version == "documented" else -(-_DRIVER_STEPS // self.envs)
        chunk = vector_steps * self.envs
        return -(-self.steps // chunk) * chunk


@dataclass
class DreamerPaperSettings(Dialect):
    """Algorithm 1 of the first paper: a whole episode, then ``collect_interval`` updates."""

    NAME = "dreamer-paper"
    LIBRARY = "the first Dreamer paper"
    VERSIONS: ClassVar = {"2020": "Algorithm 1 of Hafner et al. 2020"}
    ALGORITHMS: ClassVar = {"dreamer_v1": OFF_POLICY}
    CANNOT: ClassVar = {"collects_episodes": (True, "the loop collects episodes")}

    steps: Count = 5_000_000
    """env steps of the run, rounded up to whole episodes."""
    seed_episodes: Count = 5
    """episodes with random actions before the loop (S)."""
    collect_interval: Natural = counts("gradient_steps_per_iteration", 100)
    """gradient steps between two episodes (C)."""
    batch_size: Count = counts("minibatch_size", 50)
    """sequences in a minibatch (B)."""
    sequence_length: Count = counts("sequence_length", 50)
    """time steps of a sequence (L)."""
    imagination_horizon: Count = acts("imagination_horizon", 15)
    """time steps of an imagined trajectory (H)."""
    action_repeat: Count = counts("action_repeat", 2)
    """env steps one action is held for (R)."""
    episode_length: Count = 1000
    """env steps of an episode (T)."""

    @property
    def policy_steps_per_episode(self) -> int:
        """Actions of one episode."""
        return -(-self.episode_length // self.action_repeat)
