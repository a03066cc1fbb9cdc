"""Means of metrics between two log points, accumulated on the device of the metrics."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

K = TypeVar("K")

Metrics = Mapping[str, Tensor]
"""Scalar tensors on any device, keyed by name."""


def scalar(value: Tensor) -> Tensor:
    """Return the mean of ``value`` as a scalar without gradients."""
    if not value.ndim and not value.requires_grad:  # fast path for the most common case
        return value
    value = value.detach()
    return _to_add(value).mean() if value.numel() > 1 else value.reshape(())


def _to_add(value: Tensor) -> Tensor:
    """Convert a value to float32 for summation, or to float64 if it is float64 or an integer."""
    exact = value.dtype == torch.float64 or not value.is_floating_point()
    return value.double() if exact else value.float()


def weighted_mean(parts: Sequence[Mapping[K, Tensor]], weights: Sequence[float]) -> dict[K, Tensor]:
    """Return each entry's weighted mean over the dicts in ``parts``."""
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
    """Convert scalars, which may be on the device or the host, to floats in one transfer."""
    values = [value.reshape(()) for value in scalars]
    device = next((value.device for value in values if not value.is_cpu), None)
    if device is not None:
        values = [value.to(device) for value in values]
    return torch.stack(values).tolist() if values else []  # type: ignore[no-any-return]


_WAITING = 128
"""Maximum number of queued values per metric; a full queue is added to the sums."""


class MetricMeans:
    """Running means of scalar tensors that stay on their device until they are read.

    Inference tensors cannot change, so they are queued and added in batches, in their original
    order. This is several times faster than adding each value right after its gradient step.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], list[Tensor]] = {}
        self._counts: dict[tuple[str, ...], int] = {}
        self._waiting: list[Metrics] = []

    def add(self, metrics: Metrics) -> None:
        """Add one value for each metric. Tensors with several entries are averaged."""
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
        """Return the means since the last :meth:`take` as tensors on their device."""
        sums, counts = self._totals()
        return {name: value / counts[name] for name, value in sums.items()}

    def counts(self) -> dict[str, int]:
        """Return the number of values added for each metric since the last :meth:`take`."""
        return self._totals()[1]

    def take(self) -> dict[str, float]:
        """Return the means since the last call as floats, using a single device transfer."""
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
        """Return the running sums and counts."""
        self._add_waiting()
        groups = [
            {"names": list(names), "sums": list(values), "count": self._counts[names]}
            for names, values in self._sums.items()
        ]
        return {"groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._sums, self._counts, self._waiting = {}, {}, []
        for group in state_dict["groups"]:
            names = tuple(group["names"])
            self._sums[names] = [value.clone() for value in group["sums"]]
            self._counts[names] = int(group["count"])
