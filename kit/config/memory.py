"""The memory of a run, estimated before any of it is allocated."""

from __future__ import annotations

import bisect
import functools
import operator
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kit.config.limits import HiddenSizes, Networks
from kit.steps import SettingError, StepPlan
from kit.steps.errors import show
from kit.steps.schema import type_hints

BYTES_PER_STEP = 1_500
"""Python objects of one time step of a rollout buffer: views of a row of each of its arrays."""
BYTES_PER_WEIGHT = 16
"""A number in float32, its gradient, and two averages of the optimiser."""
BYTES_PER_PAIR = {"quantile": 64, "c51": 24}
"""Of a distributional loss: what autograd keeps for each pair (70 and 25 were measured)."""
BYTES_PER_RECORD = 16_000
"""Of the smallest world model: what autograd keeps for each transition (19,000 of Dreamer's and
36,000 of DreamerV3's were measured)."""


class Need(NamedTuple):
    """Bytes that follow from a setting."""

    field: str
    value: Any
    bytes_of: Callable[[Any], int]
    """Bytes that a value of the setting needs; more for more."""

    @property
    def size(self) -> int:
        """Bytes that its value needs."""
        return self.bytes_of(self.value)

    def largest_below(self, size: int) -> Any:
        """The largest value, below the present one, that needs no more; ``None``: there is none."""
        smaller = range(1, max(self.value) if isinstance(self.value, list) else self.value)
        fitting = bisect.bisect(smaller, size, key=lambda most: self.bytes_of(self._cut(most)))
        return self._cut(fitting) if fitting else None

    def _cut(self, most: int) -> Any:
        is_list = isinstance(self.value, list)
        return [min(width, most) for width in self.value] if is_list else most


def check_memory(needs: Sequence[Need], available: int, where: str) -> None:
    """Refuse settings that need more bytes than are ``available``; ``where`` says whose they are.

    Raises:
        SettingError: that names the setting that needs most, and its largest value that works.
    """
    total = sum(need.size for need in needs)
    if total <= available:
        return
    largest = max(needs, key=lambda need: need.size)
    value = largest.largest_below(available - total + largest.size)
    works = "use smaller settings" if value is None else f"what works: {show(value)} at most"
    why = f"needs {_gigabytes(largest.size)} of the {_gigabytes(available)} of {where}"
    raise SettingError(largest.field, largest.value, why, works)


def check_networks(field: str, networks: int, weights: int) -> None:
    """Refuse more equal networks of so many ``weights`` each than the machine has memory for.

    Raises:
        SettingError: that names the setting ``field``, and its largest value that works.
    """
    need = Need(field, networks, lambda networks: BYTES_PER_WEIGHT * networks * weights)
    check_memory([need], *memory_of_machine())


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def needs_of(cfg: Any, plan: StepPlan, row: int, inputs: int, stored: int) -> Iterator[Need]:
    """The least memory of a run: its batch, its replay buffer, its networks with their optimiser.

    Args:
        cfg: settings of the recipe. Networks are those of settings of the types
            :data:`~kit.config.HiddenSizes` and :data:`~kit.config.Networks`.
        plan: of the run.
        row: bytes of a transition.
        inputs: numbers in an observation.
        stored: bytes of a transition in the replay buffer.
    """
    if hasattr(cfg, "buffer_size") and getattr(cfg, "buffer_folder", None) is None:
        yield buffer_need(cfg, stored)
    steps = plan.frames_per_batch if plan.is_exact else plan.min_steps or 0
    envs, length = plan.num_envs, -(-steps // plan.num_envs)
    if plan.collects_episodes:
        yield Need("steps.min_steps", steps, lambda steps: steps * (row + BYTES_PER_STEP // envs))
    elif length >= envs:
        at_each = envs * row + BYTES_PER_STEP
        yield Need("steps.steps_per_env", length, lambda length: length * at_each)
    else:
        yield Need("env.num_envs", envs, lambda envs: length * (envs * row + BYTES_PER_STEP))
    count, sequence = plan.minibatch_size or steps, plan.sequence_length or 1
    yield from _of_minibatches(cfg, count, sequence, row, inputs)
    yield from _pairs(cfg, count * sequence)
    if hasattr(cfg, "recurrent_size"):  # at least three gates of each of its weights
        layers = 1 if getattr(cfg, "shared_body", False) else 2
        each = 3 * BYTES_PER_WEIGHT * layers
        yield Need("recurrent_size", cfg.recurrent_size, lambda size: each * size * size)


def buffer_need(cfg: Any, stored: int) -> Need:
    """The replay buffer, in memory or on a disk, with so many bytes for each transition."""
    return Need("buffer_size", cfg.buffer_size, lambda size: size * stored)


def _of_minibatches(cfg: Any, count: int, sequence: int, row: int, inputs: int) -> Iterator[Need]:
    """Memory of networks, and of a minibatch of ``count`` sequences with what they make of it."""
    field, found = "steps.minibatch_size", list(_networks(cfg, inputs))
    if not found:
        model = BYTES_PER_RECORD if hasattr(cfg, "imagination_horizon") else 0
        yield Need(field, count, functools.partial(operator.mul, (row + model) * sequence))
    for sizes, networks in found:
        each = row * sequence
        made = 8 * sequence * sum(sizes)
        if networks.value is sizes and networks.size > count * made:  # narrower, both need less
            alone, times = networks.bytes_of, 8 * count * sequence
            of_both = functools.partial(_of_widths, alone=alone, times=times)
            networks = networks._replace(bytes_of=of_both)
        else:
            each += made
        yield networks
        yield Need(field, count, functools.partial(operator.mul, each))


def _of_widths(sizes: list[int], alone: Callable[[Any], int], times: int) -> int:
    return alone(sizes) + times * sum(sizes)


def _networks(cfg: Any, inputs: int) -> Iterator[tuple[list[int], Need]]:
    """Widths of hidden layers, and the memory of an actor and its critics of these."""
    kind: type = type(cfg)
    hints = type_hints(kind)
    ensembles = {name: getattr(cfg, name) for name, hint in hints.items() if hint == Networks}
    name, critics = max(ensembles.items(), key=lambda item: item[1], default=("", 1))

    def size(sizes: list[int], critics: int) -> int:
        weights = sum(a * b for a, b in pairwise([inputs, *sizes, 1]))
        return BYTES_PER_WEIGHT * (1 + critics) * weights

    for field, sizes in ((n, getattr(cfg, n)) for n, hint in hints.items() if hint == HiddenSizes):
        if critics > max(sizes, default=0):
            yield sizes, Need(name, critics, functools.partial(size, sizes))
        else:
            yield sizes, Need(field, sizes, lambda sizes: size(sizes, critics))


def _pairs(cfg: Any, rows: int) -> Iterator[Need]:
    """The memory of a distributional loss, which compares each number with each of its target."""
    field = next((name for name in ("num_quantiles", "atoms") if hasattr(cfg, name)), None)
    each = BYTES_PER_PAIR.get(getattr(cfg, "head", "quantile"))
    if field is None or each is None:
        return
    critics, dropped = getattr(cfg, "num_critics", 1), getattr(cfg, "dropped_quantiles", 0)

    def size(numbers: int, critics: int) -> int:
        return each * rows * critics * numbers * critics * max(numbers - dropped, 1)

    numbers = getattr(cfg, field)
    if critics > numbers:
        yield Need("num_critics", critics, functools.partial(size, numbers))
    else:
        yield Need(field, numbers, lambda numbers: size(numbers, critics))


def memory_of_machine() -> tuple[int, str]:
    """Bytes that this process may use at most, and their owner in words."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [int(text) for text in _control_groups() if text.isdigit()]
    if limits and min(limits) < machine:
        return min(limits), "memory that this process may use"
    return machine, "memory of this machine"


def room_of_disk(folder: str) -> tuple[int, str]:
    """Bytes that are free on the disk of a folder, and the disk in words.

    Raises:
        SettingError: if nothing can be written there.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            return shutil.disk_usage(folder).free, f"free space in {folder}"
    except (OSError, ValueError) as error:  # ValueError: no name of a file at all
        why = f"cannot be written to: {getattr(error, 'strerror', None) or error}"
        raise SettingError("buffer_folder", folder, why, "name a folder that exists") from None


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
