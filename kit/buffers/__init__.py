"""Sources of minibatches: shuffled passes over the last batch, or samples from a replay buffer."""

from __future__ import annotations

from kit.buffers.batches import ReplayMinibatches, as_minibatches
from kit.buffers.datasets import dataset_loading_disabled
from kit.buffers.hindsight import HindsightReplayBuffer
from kit.buffers.n_step import NStep
from kit.buffers.observations import ObservationStorage
from kit.buffers.priorities import PrioritizedSampler
from kit.buffers.records import SequenceReplay
from kit.buffers.replay import make_replay_buffer
from kit.buffers.rollout_batches import (
    GroupedMinibatches,
    Minibatches,
    MinibatchGroup,
    RolloutMinibatches,
    valid_rows,
)
from kit.buffers.sequences import SequenceSampler
from kit.buffers.writer import SliceWriter

__all__ = [
    "GroupedMinibatches", "HindsightReplayBuffer", "MinibatchGroup", "Minibatches", "NStep",
    "ObservationStorage", "PrioritizedSampler", "ReplayMinibatches", "RolloutMinibatches",
    "SequenceReplay",
    "SequenceSampler", "SliceWriter", "as_minibatches", "dataset_loading_disabled",
    "make_replay_buffer", "valid_rows",
]  # fmt: skip
