"""Weights of a policy in memory that processes share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SharedWeights:
    """Several versions of a policy's parameters and buffers, each overwriting the oldest.

    Args:
        policy: whose weights they are; ``None`` has none.
        versions: kept at the same time.
    """

    def __init__(self, policy: nn.Module | None, versions: int) -> None:
        self.versions = versions
        self._own = _tensors(policy)
        sizes = [-(-tensor.nbytes // 64) * 64 for tensor in self._own]
        memory = torch.empty((versions, sum(sizes)), dtype=torch.uint8)
        self._memory: Tensor = memory.share_memory_()  # type: ignore[no-untyped-call]
        self._starts = [sum(sizes[:number]) for number in range(len(sizes))]

    def __getstate__(self) -> dict[str, object]:
        """Send the memory, not the weights."""
        return {**self.__dict__, "_own": []}

    def belong_to(self, policy: nn.Module | None) -> None:
        """Have :meth:`read` write to this policy, in the other process."""
        self._own = _tensors(policy)

    def write(self, version: int) -> None:
        """Store the weights as they are now."""
        with torch.no_grad():
            for place, own in zip(self._places(version), self._own):
                place.copy_(own)

    def read(self, version: int) -> None:
        """Set the weights to those of a version."""
        with torch.no_grad():
            for place, own in zip(self._places(version), self._own):
                own.copy_(place)

    def _places(self, version: int) -> list[Tensor]:
        memory = self._memory[version % self.versions]
        return [
            memory[start : start + own.nbytes].view(own.dtype).view(own.shape)
            for start, own in zip(self._starts, self._own)
        ]


def _tensors(policy: nn.Module | None) -> list[Tensor]:
    if policy is None:
        return []
    return [*policy.parameters(), *policy.buffers()]
