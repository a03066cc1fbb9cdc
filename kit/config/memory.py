"""Memory estimates for replay buffers and rollouts, checked before allocation."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kit.steps import SettingError, StepPlan

BYTES_PER_STEP = 1_500
"""Bytes that Python objects (mostly array views) use per time step of a rollout buffer."""


class MemoryEstimate(NamedTuple):
    """Memory estimate for data whose size is proportional to a setting."""

    field: str
    """Name of the setting."""
    value: int
    """Value of the setting."""
    each: int
    """Bytes per unit of ``value``."""

    @property
    def size(self) -> int:
        """Total number of bytes."""
        return self.value * self.each


def check_memory(estimates: Sequence[MemoryEstimate], available: int, where: str) -> None:
    """Check that the estimates do not exceed the available memory in total.

    Args:
        estimates: estimates to add up.
        available: number of available bytes.
        where: description of the available memory.

    Raises:
        SettingError: for the setting that needs most memory, with the largest value that fits.
    """
    total = sum(estimate.size for estimate in estimates)
    if total <= available:
        return
    largest = max(estimates, key=lambda estimate: estimate.size)
    fitting = (available - total + largest.size) // largest.each
    advice = f"Use at most {fitting}" if fitting > 0 else "Use smaller settings"
    reason = (
        f"It needs {_gigabytes(largest.size)}, and the run may use at most "
        f"{_gigabytes(available)}, the {where}"
    )
    raise SettingError(largest.field, largest.value, reason, advice)


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def rollout_memory(plan: StepPlan, row: int) -> MemoryEstimate:
    """Estimate the memory for one rollout batch with ``row`` bytes per transition."""
    steps = plan.frames_per_batch if plan.is_exact else plan.min_steps or 0
    envs, length = plan.num_envs, -(-steps // plan.num_envs)
    if plan.collects_episodes:
        return MemoryEstimate("steps.min_steps", steps, row + BYTES_PER_STEP // envs)
    if length >= envs:
        return MemoryEstimate("steps.steps_per_env", length, envs * row + BYTES_PER_STEP)
    return MemoryEstimate("env.num_envs", envs, length * (row + BYTES_PER_STEP // envs))


def buffer_memory(cfg: Any, row: int) -> MemoryEstimate:
    """Estimate the memory for the replay buffer with ``row`` bytes per transition."""
    return MemoryEstimate("buffer_size", cfg.buffer_size, row)


def memory_of_machine() -> tuple[int, str]:
    """Return this process's memory limit in bytes, and a description for error messages."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [int(text) for text in _control_groups() if text.isdigit()]
    if limits and min(limits) < machine:
        return min(limits), "memory that this process may use"
    return machine, "whole memory of this machine"


def free_disk_space(folder: str) -> tuple[int, str]:
    """Return the free disk space in bytes for a folder, and a description for error messages."""
    return shutil.disk_usage(folder).free, f"free space in {folder}"


def _control_groups() -> Iterator[str]:
    """Yield the cgroup memory limits for this process (set by containers or Slurm), as strings."""
    root, groups = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
    hierarchies = [(root, "memory.max"), (root / "memory", "memory.limit_in_bytes")]
    try:
        for line in groups.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            base, name = hierarchies["memory" in controllers]
            inner = base / group.lstrip("/")
            folders = [inner, *inner.parents]
            for folder in folders[: folders.index(base) + 1]:
                if (folder / name).is_file():
                    yield (folder / name).read_text().strip()
    except (OSError, ValueError):  # not Linux, or the files are not readable
        return
