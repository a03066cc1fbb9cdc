"""A replay buffer in one call."""

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
    """Make TorchRL's replay buffer of transitions, whose memory is allocated when first used.

    Args:
        size: transitions it holds; the oldest are overwritten.
        minibatch_size: transitions in a minibatch; with ``sequence_length``, sequences. ``None``:
            as many as the plan of a trainer says.
        sampler: how minibatches are drawn; uniformly with replacement by default.
        sequence_length: time steps of each sampled sequence (see
            :class:`~kit.buffers.SequenceSampler`): minibatches are ``[sequences, time]``, with
            ``is_init``. ``None``: single transitions, ``[transitions]``.
        n_step: rewards summed into one before bootstrapping (Sutton and Barto 2018, eq. 7.1).
        gamma: discount of this sum; TorchRL's losses discount the value after it by
            ``gamma ** steps_to_next_obs``.
        device: where minibatches are. Transitions are kept there, too, but in a folder, or with
            observations stored once: these are kept on the host.
        store_next_observation: whether both observations of a transition are stored; otherwise each
            observation once (see :class:`~kit.buffers.ObservationStorage`).
        stacked_frames: frames in an observation of which the newest alone is stored; 1: all that an
            observation has. With more, next observations are not stored either.
        folder: on whose disk transitions are kept, for more than memory holds, in files that are
            mapped to memory; ``None``: they are in memory.
        strategy: which goals replace those of four fifths of the transitions (see
            :class:`~kit.buffers.HindsightReplayBuffer`); ``None``: their own stay.
        reward_fn: from transitions with other goals to their rewards; with ``strategy``.

    Raises:
        SettingError: if sequences are combined with another sampler, hindsight or several steps,
            or observations stored once with sequences or several steps.
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
    kept = torch.device("cpu") if once or folder is not None else delivered
    storage: TransitionStorage
    if once:
        both = {"n_step": n_step if n_step > 1 else None, "sequence_length": sequence_length}
        given = "stacked_frames" if stacked_frames > 1 else "store_next_observation"
        _check_without(given, stacked_frames if stacked_frames > 1 else False, both)
        storage = ObservationStorage(size, stacked_frames=stacked_frames, folder=folder)
    else:  # "compilable" counters are numbers; the others lock memory that processes share
        storage = TransitionStorage(size, folder, device=kept, compilable=True)
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
    of_several = None if n_step == 1 else NStep(n_step, gamma)
    return ReplayMinibatches(buffer, of_several, device=None if kept == delivered else delivered)


def _check_without(name: str, value: Any, others: Mapping[str, Any]) -> None:
    """Raise an error if a setting is combined with one that needs other rows."""
    for other, given in others.items():
        if given is not None:
            why = f"is not possible with {name}={value}"
            raise SettingError(other, given, why, f"leave out {name} or {other}")
