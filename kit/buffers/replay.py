"""Create a replay buffer with one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler

from kit.buffers.batches import ReplayMinibatches
from kit.buffers.disk import TransitionStorage
from kit.buffers.hindsight import HindsightReplayBuffer
from kit.buffers.n_step import NStep
from kit.buffers.observations import ObservationStorage
from kit.buffers.sequences import SequenceSampler
from kit.buffers.writer import SliceWriter
from kit.config.devices import usable_device
from kit.steps import SettingError
from kit.steps.errors import whole_number


def make_replay_buffer(
    size: int,
    minibatch_size: int | None = None,
    *,
    sampler: Sampler | None = None,
    sequence_length: int | None = None,
    n_step: int = 1,
    gamma: float = 0.99,
    device: torch.device | str = "cpu",
    store_next_observation: bool = True,
    stacked_frames: int = 1,
    folder: Path | str | None = None,
    strategy: Literal["future", "final", "episode"] | None = None,
    reward_fn: Callable[[TensorDictBase], Tensor] | None = None,
) -> ReplayMinibatches:
    """Create a TorchRL replay buffer; its memory is allocated at the first write.

    Args:
        size: Maximum number of transitions; the oldest are overwritten.
        minibatch_size: Transitions per minibatch, or sequences per minibatch if ``sequence_length``
            is set. ``None``: use the plan's minibatch size.
        sampler: Sampler of minibatches; default: uniform with replacement.
        sequence_length: Time steps per sampled sequence (see
            :class:`~kit.buffers.SequenceSampler`); minibatches are ``[sequences, time]`` with
            ``is_init``. ``None``: single transitions, ``[transitions]``.
        n_step: Number of rewards summed before bootstrapping (Sutton and Barto 2018, eq. 7.1).
        gamma: Discount factor for the n-step sum. TorchRL's losses discount the bootstrapped value
            by ``gamma ** steps_to_next_obs``.
        device: Device of the minibatches and the stored transitions. Transitions are stored on the
            host if ``folder`` is set or each observation is stored only once.
        store_next_observation: Whether to store both observations of a transition. False: store
            each observation only once (see :class:`~kit.buffers.ObservationStorage`).
        stacked_frames: Frames per stacked observation. Only the newest frame is stored. A value
            above 1 implies ``store_next_observation=False``. 1: store whole observations.
        folder: Folder for memory-mapped files, for large buffers; ``None``: use memory.
        strategy: Strategy for choosing hindsight goals, which replace the goals of 80 % of the
            transitions (see :class:`~kit.buffers.HindsightReplayBuffer`); ``None``: no hindsight.
        reward_fn: Function from relabelled transitions to rewards; used with ``strategy``.

    Raises:
        SettingError: If ``sequence_length`` is combined with a sampler, hindsight or n-step
            returns. Also if storing each observation only once is combined with sequences or
            n-step returns.
    """
    size = whole_number("buffer_size", size, at_least=1)
    n_step = whole_number("n_step", n_step, at_least=1)
    length = 1
    stacked_frames = whole_number("stacked_frames", stacked_frames, at_least=1)
    once = stacked_frames > 1 or not store_next_observation
    if sequence_length is not None:
        name = None if sampler is None else type(sampler).__name__
        single = {"sampler": name, "hindsight": strategy, "n_step": n_step if n_step > 1 else None}
        _check_without("sequence_length", sequence_length, single)
        sampler = SequenceSampler(sequence_length)
        length = sampler.sequence_length
    delivered = usable_device(device=device)
    stored_on = torch.device("cpu") if once or folder is not None else delivered
    storage: TransitionStorage
    if once:
        both = {"n_step": n_step if n_step > 1 else None, "sequence_length": sequence_length}
        field = "stacked_frames" if stacked_frames > 1 else "store_next_observation"
        _check_without(field, stacked_frames if stacked_frames > 1 else False, both)
        storage = ObservationStorage(size, stacked_frames=stacked_frames, folder=folder)
    else:  # compilable=True avoids counters in locked shared memory
        storage = TransitionStorage(size, folder, device=stored_on, compilable=True)
    parts: dict[str, Any] = {
        "storage": storage,
        "writer": SliceWriter(compilable=True),
        "sampler": sampler or RandomSampler(),
        "batch_size": None if minibatch_size is None else minibatch_size * length,
    }
    buffer = (
        TensorDictReplayBuffer(**parts)
        if strategy is None
        else HindsightReplayBuffer(reward_fn, strategy=strategy, **parts)
    )
    target = None if stored_on == delivered else delivered
    return ReplayMinibatches(buffer, None if n_step == 1 else NStep(n_step, gamma), device=target)


def _check_without(name: str, value: Any, others: Mapping[str, Any]) -> None:
    for other, other_value in others.items():
        if other_value is not None:
            reason = f"This setting cannot be combined with {name}={value}"
            raise SettingError(other, other_value, reason, f"Remove {name} or {other}")
