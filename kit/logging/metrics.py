"""Metrics between two log points: summed where they are made, read once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

K = TypeVar("K")

Metrics = Mapping[str, Tensor]
"""Scalars by name, on their device."""


def scalar(value: Tensor) -> Tensor:
    """One number, without its graph: the mean of ``value``."""
    if not value.ndim and not value.requires_grad:  # as most are, many times a second
        return value
    value = value.detach()
    return _to_add(value).mean() if value.numel() > 1 else value.reshape(())


def _to_add(value: Tensor) -> Tensor:
    """A value in a type whose sums keep it: float32 has no whole numbers above 2^24 one by one."""
    exact = value.dtype == torch.float64 or not value.is_floating_point()
    return value.double() if exact else value.float()


def weighted_mean(parts: Sequence[Mapping[K, Tensor]], weights: Sequence[float]) -> dict[K, Tensor]:
    """The mean of each entry over ``parts``."""
    if len(parts) == 1:
        return dict(parts[0].items())
    mean: dict[K, Tensor] = {}
    for part, weight in zip(parts, weights):
        for name, value in part.items():
            exact = value if value.is_floating_point() else value.double()
            share = exact * (weight / sum(weights))
            mean[name] = mean[name] + share if name in mean else share
    return mean


def numbers(scalars: Iterable[Tensor]) -> list[float]:
    """Scalars read in one go, from the device; a loss may make some of them on the host."""
    values = [value.reshape(()) for value in scalars]
    device = next((value.device for value in values if not value.is_cpu), None)
    if device is not None:
        values = [value.to(device) for value in values]
    return torch.stack(values).tolist() if values else []  # type: ignore[no-any-return]


_WAITING = 128
"""Values of each metric that are kept until they are added, at most."""


class MetricMeans:
    """Running means of scalars that stay on their device until they are read.

    Values that nobody changes any more, those of inference mode, are kept and added many at once,
    in the order in which they came: right after a gradient step an addition takes several times as
    long as in a row.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], list[Tensor]] = {}
        self._counts: dict[tuple[str, ...], int] = {}
        self._waiting: list[Metrics] = []

    def add(self, metrics: Metrics) -> None:
        """Add one value of each metric; of several numbers, their mean."""
        self._waiting.append(dict(metrics.items()))
        kept = all(type(value) is Tensor and value.is_inference() for value in metrics.values())
        if not kept or len(self._waiting) >= _WAITING:
            self._add_waiting()

    def _add_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for names, alike in itertools.groupby(waiting, tuple):
            rows = [[scalar(value) for value in metrics.values()] for metrics in alike]
            if names not in self._sums:
                self._sums[names] = [_to_add(value.clone()) for value in rows.pop(0)]
                self._counts[names] = 1
            self._counts[names] += len(rows)
            for row in rows:
                torch._foreach_add_(self._sums[names], row)

    def peek(self) -> dict[str, Tensor]:
        """The means since the last :meth:`take`, on their device."""
        sums, counts = self._totals()
        return {name: value / counts[name] for name, value in sums.items()}

    def counts(self) -> dict[str, int]:
        """How many values of each metric were added since the last :meth:`take`."""
        return self._totals()[1]

    def take(self) -> dict[str, float]:
        """The means since the last call, moved to the host in one go."""
        sums, counts = self._totals()
        self._sums, self._counts = {}, {}
        totals = numbers(sums.values())
        return {name: total / counts[name] for name, total in zip(sums, totals)}

    def _totals(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        self._add_waiting()
        sums: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        for names, values in self._sums.items():
            for name, value in zip(names, values):
                sums[name] = sums[name] + value if name in sums else value
                counts[name] = counts.get(name, 0) + self._counts[names]
        return sums, counts

    def state_dict(self) -> dict[str, Any]:
        """The running sums."""
        self._add_waiting()
        groups = [
            {"names": list(names), "sums": list(values), "count": self._counts[names]}
            for names, values in self._sums.items()
        ]
        return {"groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        self._sums, self._counts, self._waiting = {}, {}, []
        for group in state_dict["groups"]:
            names = tuple(group["names"])
            self._sums[names] = [value.clone() for value in group["sums"]]
            self._counts[names] = int(group["count"])
