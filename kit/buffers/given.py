"""The replay buffer of a recipe's settings, or one that the caller of the recipe gives."""

from __future__ import annotations

from typing import Any

import torch

from kit.buffers.batches import ReplayMinibatches, as_minibatches
from kit.buffers.priorities import PrioritizedSampler
from kit.config import OfflineConfig, OffPolicyConfig, RunConfig, checks
from kit.steps import SettingError, StepPlan

_UNCHANGED = "the given replay buffer stays as it was made"


def buffer_settings(cfg: OffPolicyConfig, plan: StepPlan) -> dict[str, Any]:
    """Return the arguments of :func:`~kit.buffers.make_replay_buffer` that follow from settings."""
    return {
        "size": cfg.buffer_size,
        "minibatch_size": plan.minibatch_size,
        "sequence_length": plan.sequence_length,
        "n_step": cfg.n_step,
        "gamma": cfg.gamma,
        "device": cfg.device,
        "store_next_observation": cfg.store_next_observation,
        "stacked_frames": cfg.stacked_frames,
        "folder": cfg.buffer_folder,
    }


def check_given(cfg: RunConfig, buffer: Any, exponent_per_alpha: int) -> None:
    """Refuse settings that a given replay buffer does not have.

    Args:
        cfg: settings of the recipe.
        buffer: the given one.
        exponent_per_alpha: exponent of absolute errors for a sampler with alpha = 1.
    """
    if isinstance(cfg, OfflineConfig) and cfg.normalize_data:
        raise SettingError("normalize_data", True, f"has no effect: {_UNCHANGED}", [False])
    if not isinstance(cfg, OffPolicyConfig) or not isinstance(buffer, ReplayMinibatches):
        return
    exponent = cfg.per_alpha if buffer.reads_loss_outputs else 0.0
    if isinstance(sampler := buffer.buffer.sampler, PrioritizedSampler):
        exponent = sampler.alpha * exponent_per_alpha
    own = {
        "n_step": buffer.summed.steps if buffer.summed else 1,
        "buffer_size": buffer.buffer.storage.max_size,
        "per_alpha": exponent,
    }
    others = (
        "hindsight", "store_next_observation", "stacked_frames", "buffer_folder",
        "per_beta",
    )  # fmt: skip
    different = [name for name, value in own.items() if getattr(cfg, name) != value]
    checks.reject_unused(cfg, [*different, *others], _UNCHANGED)


def delivering_to(device: torch.device | str, buffer: Any) -> Any:
    """Return a given buffer, with minibatches on a device if it stores transitions elsewhere."""
    batches = as_minibatches(buffer)
    if not isinstance(batches, ReplayMinibatches) or batches.device is not None:
        return buffer
    kept = getattr(batches.buffer.storage, "device", None)
    if isinstance(kept, torch.device) and kept.type != torch.device(device).type:
        batches.device = torch.device(device)
    return batches


def takes_from_host(plan: StepPlan, buffer: Any, *, collects_on_host: bool) -> bool:
    """Return whether transitions stay on the host until they are stored.

    These are transitions that a buffer keeps there, or copies with all entries at once. Other
    batches are read on the device, for their advantages.
    """
    if plan.on_policy or not isinstance(buffer, ReplayMinibatches):
        return False
    return buffer.device is not None or (collects_on_host and buffer.gpu is not None)
