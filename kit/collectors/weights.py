"""Weights of a policy in memory that processes share."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from kit.steps import SettingError


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


def copy_weights(source: Any, policy: Any) -> None:
    """Copy parameters and buffers into a policy, in place.

    Args:
        source: a module, its ``state_dict``, or a TensorDict of its parameters.
        policy: a module with the same ones.

    Raises:
        SettingError: if the policy has none, or others.
    """
    if not isinstance(policy, nn.Module):
        raise SettingError("weights", source, f"cannot be copied into {policy!r}, no module")
    own = TensorDict.from_module(policy).data.flatten_keys(".")
    given = TensorDict.from_module(source) if isinstance(source, nn.Module) else source
    given = given.flatten_keys(".") if isinstance(given, TensorDictBase) else dict(given)
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    others = {name: tuple(tensor.shape) for name, tensor in given.items()}
    different = sorted(n for n in {*shapes, *others} if shapes.get(n) != others.get(n))
    if different:
        name = different[0]
        raise SettingError(
            "weights",
            name,
            f"has shape {others.get(name)}, {shapes.get(name)} in the policy",
            "send the weights of a policy that is built in the same way",
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(given[name])
