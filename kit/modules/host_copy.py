"""A copy of a policy on the host, whose weights follow those on a GPU."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from kit.fast.watch import Watch


class HostCopy:
    """A policy's copy on the host, to which all weights are copied at once.

    Args:
        policy: on a GPU.

    Attributes:
        module: the copy. Its parameters and buffers stay where they are in memory.

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
                here = part.view(one.shape)
                learnt = isinstance(one, nn.Parameter)
                copies[id(one)] = nn.Parameter(here, requires_grad=False) if learnt else here
        self.module: nn.Module = copy.deepcopy(policy, copies)
        self.module.to("cpu")  # bounds and specs, which are neither
        self._addresses = [tensor.data_ptr for tensor in tensors]
        self._places = [address() for address in self._addresses]
        self.follow()

    def follow(self) -> bool:
        """Copy the weights as they are now.

        Returns:
            Whether the policy is otherwise what it was; if not, nothing is copied.
        """
        if self._watch.changed() or [address() for address in self._addresses] != self._places:
            return False
        for memory, there in self._groups:
            memory.copy_(torch.cat(there))
        return True
