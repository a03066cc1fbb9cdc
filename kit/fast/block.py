"""Several steps of policy and environment as one flat program, or one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kit.fast.old_trace import FlatProgram, NotTraceable, trace

Function = Callable[..., Sequence[Tensor]]


class Block:
    """A function of tensors that is called again and again with tensors of the same shapes.

    The first call runs it as it is; from the second one on it is a flat program (CPU) or a CUDA
    graph, with the same results and the same random numbers. A function that cannot be traced runs
    as it is, always.

    Args:
        function: takes tensors, writes to some of them in place, and returns tensors.
        writes: how many of the last tensors it writes to.
    """

    def __init__(self, function: Function, writes: int) -> None:
        self.function, self.writes = function, writes
        self.plain_reason = ""
        self._program: FlatProgram | None = None
        self._graph: _Graph | None = None
        self._warm = False

    def is_valid(self) -> bool:
        """Whether no setting that was read while tracing was changed since."""
        return self._program is None or self._program.is_valid()

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Call it."""
        if self._program is not None:
            return self._program(*[tensors[number] for number in self._program.inputs_read])
        if self._graph is not None:
            return self._graph(tensors)
        if not self._warm or self.plain_reason:
            self._warm = True
            return self.function(*tensors)
        if tensors[0].is_cuda:
            self._graph = _Graph(self.function, tensors, self.writes)
            return self._graph(tensors)
        return self._trace(tensors)

    def _trace(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        generator = torch.get_rng_state()
        try:
            self._program, outputs = trace(self.function, tensors)
        except NotTraceable as reason:
            self.plain_reason = str(reason)
            torch.set_rng_state(generator)
            return self.function(*tensors)
        return outputs


class _Graph:
    """A function captured as a CUDA graph, which works on memory of its own."""

    def __init__(self, function: Function, tensors: Sequence[Tensor], writes: int) -> None:
        self.writes = writes
        self.inputs = [tensor.clone() for tensor in tensors]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = list(function(*self.inputs))

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        read = len(tensors) - self.writes
        for own, given in zip(self.inputs[:read], tensors[:read]):
            own.copy_(given)
        self.graph.replay()
        for own, given in zip(self.inputs[read:], tensors[read:]):
            given.copy_(own)
        return [output.clone() for output in self.outputs]
