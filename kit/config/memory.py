"""The memory of replay buffer and rollout, estimated before any of it is allocated."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kit.steps import SettingError, StepPlan

BYTES_PER_STEP = 1_500
"""Python objects of one time step of a rollout buffer: views of a row of each of its arrays."""


class MemoryEstimate(NamedTuple):
    """Bytes that follow from a setting."""

    field: str
    value: int
    each: int
    """Bytes for each unit of the value."""

    @property
    def size(self) -> int:
        """Bytes that its value needs."""
        return self.value * self.each


def check_memory(needs: Sequence[MemoryEstimate], available: int, where: str) -> None:
    """Refuse settings that need more bytes than are ``available``; ``where`` says whose they are.

    Raises:
        SettingError: that names the setting that needs most, and its largest value that works.
    """
    total = sum(need.size for need in needs)
    if total <= available:
        return
    largest = max(needs, key=lambda need: need.size)
    most = (available - total + largest.size) // largest.each
    works = f"what works: {most} at most" if most > 0 else "use smaller settings"
    why = f"needs {_gigabytes(largest.size)} of the {_gigabytes(available)} of {where}"
    raise SettingError(largest.field, largest.value, why, works)


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def rollout_need(plan: StepPlan, row: int) -> MemoryEstimate:
    """A batch of the rollout, with ``row`` bytes for each transition."""
    steps = plan.frames_per_batch if plan.is_exact else plan.min_steps or 0
    envs, length = plan.num_envs, -(-steps // plan.num_envs)
    if plan.collects_episodes:
        return MemoryEstimate("steps.min_steps", steps, row + BYTES_PER_STEP // envs)
    if length >= envs:
        return MemoryEstimate("steps.steps_per_env", length, envs * row + BYTES_PER_STEP)
    return MemoryEstimate("env.num_envs", envs, length * (row + BYTES_PER_STEP // envs))


def buffer_need(cfg: Any, stored: int) -> MemoryEstimate:
    """The replay buffer, in memory or on a disk, with so many bytes for each transition."""
    return MemoryEstimate("buffer_size", cfg.buffer_size, stored)


def memory_of_machine() -> tuple[int, str]:
    """Bytes that this process may use at most, and their owner in words."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [int(text) for text in _control_groups() if text.isdigit()]
    if limits and min(limits) < machine:
        return min(limits), "memory that this process may use"
    return machine, "memory of this machine"


def room_of_disk(folder: str) -> tuple[int, str]:
    """Bytes that are free on the disk of a folder, and the disk in words."""
    return shutil.disk_usage(folder).free, f"free space in {folder}"


def _control_groups() -> Iterator[str]:
    """Limits of the control groups of this process: those of containers and of batch systems."""
    root, own = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
    places = [(root, "memory.max"), (root / "memory", "memory.limit_in_bytes")]
    try:
        for line in own.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            base, name = places["memory" in controllers]
            inner = base / group.lstrip("/")
            folders = [inner, *inner.parents]
            for folder in folders[: folders.index(base) + 1]:
                if (folder / name).is_file():
                    yield (folder / name).read_text().strip()
    except (OSError, ValueError):  # another system, or one that does not let itself be looked at
        return
