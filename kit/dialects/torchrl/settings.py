"""The vocabulary of TorchRL's own ``Trainer``, its collectors and its replay buffers.

Its unit is the frame: a policy step in a collector, an env step (policy steps times ``frame_skip``)
in the trainer. An iteration is one batch of the collector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kit.dialects.base import OFF_POLICY, ON_POLICY, Dialect
from kit.dialects.fields import acts, counts, fact
from kit.steps.errors import Count, Natural

RANDOM, WITHOUT = "random", "without_replacement"


@dataclass
class TorchRLSettings(Dialect):
    """Settings of TorchRL's collector, replay buffer and ``Trainer``."""

    NAME = "torchrl"
    LIBRARY = "TorchRL"
    VERSIONS: ClassVar = {
        "0.14.1": "the code of 0.14.1",
        "documented": "the docstrings as they read: optim_steps_per_batch=None is the number of "
        "environments, and init_random_frames counts env steps everywhere",
    }
    ALGORITHMS: ClassVar = {
        **dict.fromkeys(("ppo", "a2c", "reinforce"), ON_POLICY),
        **dict.fromkeys(("sac", "dqn", "td3", "ddpg", "redq", "iql", "cql"), OFF_POLICY),
    }
    CANNOT: ClassVar = {
        "world_size": (1, "a trainer is one process"),
        "collects_episodes": (False, "a collector counts frames"),
        "offline": (False, "an iteration collects"),
    }
    SECTIONS = frozenset({"", "trainer", "collector", "replay_buffer"})
    PATHS: ClassVar = {"collector.total_frames": "collector_total_frames"}

    frames_per_batch: Count = 1000
    """policy steps of one batch, over all environments, rounded up to equally many of each."""
    total_frames: Natural = 1_000_000
    """env steps of the run (policy steps times ``frame_skip``), rounded up to whole batches."""
    collector_total_frames: int | None = None
    """policy steps after which the collector ends; ``None`` or -1: never."""
    frame_skip: Count = counts("action_repeat", 1)
    """env steps of one policy step, as the trainer counts it."""
    init_random_frames: int | None = None
    """frames with random actions, rounded up to whole batches: the collector counts policy steps,
    and the trainer begins to train after as many env steps."""
    optim_steps_per_batch: Natural | None = None
    """minibatches of one epoch, at most; ``None``: until the sampler has none left."""
    num_epochs: Natural = 1
    """epochs of one batch."""
    batch_size: Count = counts()
    """transitions in a minibatch of the replay buffer; ``None``: ``frames_per_batch``."""
    buffer_size: Count = acts("buffer_size", family=OFF_POLICY)
    """transitions that the replay buffer holds; ``None``: a batch, or a million if sampled at
    random."""
    sampler: str = counts()
    """``random``, or ``without_replacement``; ``None``: as the algorithm needs it."""
    iterate: bool = counts()
    """whether an epoch iterates over the buffer, and so ends with it; ``None``: on-policy where
    neither the sampler nor ``optim_steps_per_batch`` says how an epoch ends."""
    drop_last: bool = False
    """whether a last, smaller minibatch is dropped."""
    num_envs: Count = fact("num_envs", 1)
    """environments of the collector."""
    max_episode_steps: Count | None = fact("max_episode_steps")
    """policy steps after which an episode is truncated; a transform's business."""

    def implied_algorithm(self) -> str:
        """The family that the given settings imply: an epoch that ends is on-policy."""
        return ON_POLICY if self.sampler == WITHOUT or self.iterate is True else OFF_POLICY

    def _defaults(self) -> Mapping[str, Any]:
        on_policy = self.family == ON_POLICY
        frames = self.frames_per_batch
        return {
            "iterate": on_policy and self.sampler is None and self.optim_steps_per_batch is None,
            "sampler": WITHOUT if on_policy else RANDOM,
            "batch_size": frames,
            "buffer_size": frames if on_policy else 1_000_000,
        }

    @property
    def collected(self) -> int:
        """Policy steps of one batch."""
        return -(-self.frames_per_batch // self.num_envs) * self.num_envs
