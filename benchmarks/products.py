"""The matrix products of a computation, which are the least that it can take."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Products(TorchDispatchMode):
    """Notes the matrix products that are computed; tensors of the same shape are one, if shared."""

    NAMES = ("mm", "addmm", "bmm", "baddbmm")

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.found: list[tuple[Any, tuple[Any, ...]]] = []
        self.shared = shared
        self.known: dict[Any, Any] = {}

    def like(self, one: Any) -> Any:
        """Return a tensor of the same shape and layout."""
        shape = tuple(one.shape), one.stride()
        if not self.shared or shape not in self.known:
            last = sum((size - 1) * stride for size, stride in zip(*shape, strict=True))
            self.known[shape] = torch.randn(last + 1).as_strided(*shape)
        return self.known[shape]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.NAMES:
            self.found.append((func, tuple(map(self.like, args))))
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def alone(self) -> None:
        """Compute the products again, and nothing else."""
        for function, arguments in self.found:
            function(*arguments)

    def operations(self) -> int:
        """Additions and multiplications of all products."""
        pairs = [
            [one for one in arguments if isinstance(one, torch.Tensor)][-2:]
            for _, arguments in self.found
        ]
        return sum(2 * left.numel() * right.shape[-1] for left, right in pairs)
