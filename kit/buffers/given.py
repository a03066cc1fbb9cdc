"""Functions for recipes that are given a replay buffer as an argument."""

from __future__ import annotations

from typing import Any

import torch

from kit.buffers.batches import ReplayMinibatches, as_minibatches
from kit.buffers.priorities import PrioritizedSampler
from kit.config import OfflineConfig, OffPolicyConfig, RunConfig, checks
from kit.steps import SettingError, StepPlan

_UNCHANGED = "a replay buffer passed as an argument keeps its own settings"


def buffer_settings(cfg: OffPolicyConfig, plan: StepPlan) -> dict[str, Any]:
    """Return these settings as arguments for :func:`~kit.buffers.make_replay_buffer`."""
    return {
        "size": cfg.buffer_size,
        "minibatch_size": plan.minibatch_size,
        "sequence_length": plan.sequence_length,
        "n_step": cfg.n_step,
        "gamma": cfg.gamma,
        "device": cfg.device,
        "folder": cfg.buffer_folder,
        **cfg.observation_storage,
    }


def check_given(cfg: RunConfig, buffer: Any, exponent_per_alpha: int) -> None:
    """Raise an error if settings contradict the replay buffer passed as an argument.

    Args:
        cfg: Settings of the recipe.
        buffer: Replay buffer passed by the caller.
        exponent_per_alpha: Power of the absolute TD errors that alpha=1 corresponds to.
    """
    if isinstance(cfg, OfflineConfig) and cfg.normalize_data:
        raise SettingError(
            "normalize_data", True, f"It has no effect because {_UNCHANGED}", [False]
        )
    if not isinstance(cfg, OffPolicyConfig) or not isinstance(buffer, ReplayMinibatches):
        return
    exponent = cfg.per_alpha if buffer.reads_loss_outputs else 0.0
    if isinstance(sampler := buffer.buffer.sampler, PrioritizedSampler):
        exponent = sampler.alpha * exponent_per_alpha
    actual = {
        "n_step": buffer.summed.steps if buffer.summed else 1,
        "buffer_size": buffer.buffer.storage.max_size,
        "per_alpha": exponent,
    }
    ignored = (
        "hindsight", "store_next_observation", "stacked_frames", "buffer_folder",
        "per_beta",
    )  # fmt: skip
    different = [name for name, value in actual.items() if getattr(cfg, name) != value]
    checks.reject_unused(cfg, [*different, *ignored], _UNCHANGED)


def delivering_to(device: torch.device | str, buffer: Any) -> Any:
    """Return the buffer, wrapped to move minibatches to ``device`` if stored elsewhere."""
    batches = as_minibatches(buffer)
    if not isinstance(batches, ReplayMinibatches) or batches.device is not None:
        return buffer
    stored_on = getattr(batches.buffer.storage, "device", None)
    if isinstance(stored_on, torch.device) and stored_on.type != torch.device(device).type:
        batches.device = torch.device(device)
    return batches


def takes_from_host(plan: StepPlan, buffer: Any, *, collects_on_host: bool) -> bool:
    """Return whether collected transitions stay on the host until they are stored.

    This is true if the buffer stores them on the host, or copies whole batches to the GPU.
    On-policy batches are moved to the device first, because advantages are computed there.
    """
    if plan.on_policy or not isinstance(buffer, ReplayMinibatches):
        return False
    return buffer.device is not None or (collects_on_host and buffer.gpu is not None)
