"""Checks for recipe settings that have no effect or need too much memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from kit.config.memory import (
    buffer_memory,
    check_memory,
    free_disk_space,
    memory_of_machine,
    rollout_memory,
)
from kit.config.settings import ActorCriticConfig, RunConfig
from kit.steps import SettingError, StepPlan
from kit.steps.errors import place_of


def check_run_memory(plan: StepPlan, cfg: RunConfig, env: Any, latent: int = 0) -> None:
    """Check that the replay buffer and the rollouts fit in memory, on the device or on disk.

    Args:
        plan: step plan of the run.
        cfg: run settings.
        env: training environments.
        latent: additional bytes per record for world-model latents.

    Raises:
        SettingError: if the replay buffer or the rollouts do not fit.
    """
    observation, action = (
        sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        for leaves in (env.observation_leaves, env.action_leaves)
    )
    rest = action + 4 + 3 + 16  # bytes for reward, flags, episode number and index
    estimates = [rollout_memory(plan, 2 * observation + rest)]
    if hasattr(cfg, "buffer_size"):
        storage = getattr(cfg, "observation_storage", {})
        frames = storage.get("stacked_frames", 1)
        both = storage.get("store_next_observation", True) and frames == 1
        observations = 2 * observation if both else observation // frames
        buffer = buffer_memory(cfg, rest + latent + observations)
        if (folder := getattr(cfg, "buffer_folder", None)) is not None:
            check_memory([buffer], *free_disk_space(folder))
        elif both and str(cfg.device).startswith("cuda"):
            import torch  # imported here so that kit.config works without torch

            available = torch.cuda.mem_get_info(cfg.device)[1]
            check_memory([buffer], available, f"memory of {cfg.device}")
        else:
            estimates.append(buffer)
    check_memory(estimates, *memory_of_machine())


@contextlib.contextmanager
def reraise_as_setting_error(
    field: str,
    value: Any,
    reason: str,
    advice: Any = (),
    *,
    exclude: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Convert exceptions raised inside this context to a SettingError for ``field``.

    Args:
        field: name of the setting.
        value: value of the setting.
        reason: what is wrong. The type and message of the exception are appended.
        advice: valid values, or advice as a string.
        exclude: exception types that are not converted.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (SettingError, *exclude)):
            raise
        first_line = next(iter(str(error).splitlines()), "")
        cause = f"{type(error).__name__}: {first_line}{place_of(error)}"
        raise SettingError(field, value, f"{reason}: {cause}", advice) from error


def reject_unused(cfg: RunConfig, names: Sequence[str], reason: str) -> None:
    """Reject settings that have no effect but differ from their default.

    Args:
        cfg: recipe settings.
        names: names of the settings.
        reason: why the settings have no effect, as a clause that follows "because".
    """
    for name in names:
        value, default = getattr(cfg, name), getattr(type(cfg)(), name)
        if value != default:
            raise SettingError(name, value, f"It has no effect because {reason}", [default])


def check_advantage_norm(cfg: RunConfig) -> None:
    """Reject ``advantage_norm`` if advantages are not normalised."""
    if isinstance(cfg, ActorCriticConfig) and not cfg.normalize_advantage:
        reject_unused(cfg, ("advantage_norm",), "normalize_advantage=false disables it")
