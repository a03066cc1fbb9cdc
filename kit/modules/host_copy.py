"""Host copy of a GPU policy that can be synchronised with the policy's weights."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from kit.fast.watch import Watch


class HostCopy:
    """A CPU copy of a GPU policy. All weights are copied in one transfer per device and dtype.

    Args:
        policy: a policy on a GPU.

    Attributes:
        module: the copy. The memory addresses of its parameters and buffers never change.

    Raises:
        RuntimeError: if the policy cannot be copied.
    """

    def __init__(self, policy: nn.Module) -> None:
        self._watch = Watch(policy)
        tensors = [*policy.parameters(), *policy.buffers()]
        kinds: dict[Any, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            kinds[tensor.device, tensor.dtype].append(tensor)
        self._groups: list[tuple[Tensor, list[Tensor]]] = []
        copies: dict[int, Any] = {}
        for (_, dtype), group in kinds.items():
            sizes = [one.numel() for one in group]
            memory = torch.empty(sum(sizes), dtype=dtype)
            self._groups.append((memory, [one.detach().view(-1) for one in group]))
            for one, part in zip(group, torch.split(memory, sizes)):
                view = part.view(one.shape)
                is_parameter = isinstance(one, nn.Parameter)
                copies[id(one)] = nn.Parameter(view, requires_grad=False) if is_parameter else view
        self.module: nn.Module = copy.deepcopy(policy, copies)
        self.module.to("cpu")  # bounds and specs are not buffers, so they are still on the GPU
        self._addresses = [tensor.data_ptr for tensor in tensors]
        self._places = [address() for address in self._addresses]
        self.follow()

    def follow(self) -> bool:
        """Copy the current weights from the GPU policy.

        Returns:
            ``True`` if the weights were copied; ``False`` if other parts of the policy changed.
        """
        if self._watch.changed() or [address() for address in self._addresses] != self._places:
            return False
        for memory, sources in self._groups:
            memory.copy_(torch.cat(sources))
        return True
