"""Settings without effect, folders, and memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from kit.config.memory import (
    buffer_need,
    check_memory,
    memory_of_machine,
    rollout_need,
    room_of_disk,
)
from kit.config.settings import ActorCriticConfig, RunConfig
from kit.steps import SettingError, StepPlan
from kit.steps.errors import place_of


def memory(plan: StepPlan, cfg: RunConfig, env: Any, latent: int = 0) -> None:
    """Refuse a replay buffer or a rollout that the machine, its device or a disk has no room for.

    Of each record a replay buffer keeps ``latent`` bytes more for a world model.
    """
    seen, acted = (
        sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        for leaves in (env.observation_leaves, env.action_leaves)
    )
    rest = acted + 4 + 3 + 16  # reward, three flags, number of the episode, place in the buffer
    needs = [rollout_need(plan, 2 * seen + rest)]
    if hasattr(cfg, "buffer_size"):
        frames = getattr(cfg, "stacked_frames", 1)
        both = getattr(cfg, "store_next_observation", True) and frames == 1
        buffer = buffer_need(cfg, rest + latent + (2 * seen if both else seen // frames))
        if (folder := getattr(cfg, "buffer_folder", None)) is not None:
            check_memory([buffer], *room_of_disk(folder))
        elif both and str(cfg.device).startswith("cuda"):
            import torch  # here, because kit.config works without torch

            available = torch.cuda.mem_get_info(cfg.device)[1]
            check_memory([buffer], available, f"memory of {cfg.device}")
        else:
            needs.append(buffer)
    check_memory(needs, *memory_of_machine())


@contextlib.contextmanager
def reported_as(
    field: str, value: Any, why: str, works: Any = (), *, unless: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Report exceptions of a class or function that a setting names as errors of the setting.

    Args:
        field: name of the setting.
        value: its value.
        why: what is wrong; type and message of the exception follow.
        works: values that work, or an advice.
        unless: exceptions that pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (SettingError, *unless)):
            raise
        first_line = next(iter(str(error).splitlines()), "")
        reason = f"{type(error).__name__}: {first_line}{place_of(error)}"
        raise SettingError(field, value, f"{why}: {reason}", works) from error


def reject_unused(cfg: RunConfig, names: Sequence[str], why: str) -> None:
    """Refuse settings that have no effect beside others, if they are not at their defaults."""
    for name in names:
        value, default = getattr(cfg, name), getattr(type(cfg)(), name)
        if value != default:
            raise SettingError(name, value, f"has no effect: {why}", [default])


def rows_of_normalization(cfg: RunConfig) -> None:
    """Refuse rows over which advantages are normalised where they are not."""
    if isinstance(cfg, ActorCriticConfig) and not cfg.normalize_advantage:
        reject_unused(cfg, ("advantage_norm",), "normalize_advantage=false")
