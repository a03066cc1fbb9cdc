"""Reuse the memory of intermediate results that a traced graph no longer needs.

Results stay bitwise equal. For a tensor as large as a CPU cache, allocating memory costs as much as
the computation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

Memories = Callable[[fx.Node], set[int]]

_IN_PLACE: dict[Any, Any] = {
    aten.relu.default: aten.relu_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.exp.default: aten.exp_.default,
    aten.neg.default: aten.neg_.default,
    aten.silu.default: aten.silu_.default,
    aten.clamp.default: aten.clamp_.default,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.div.Scalar: aten.div_.Scalar,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
}
"""Elementwise operations and their in-place versions, which write to the first argument."""

_COMMUTING: dict[Any, Any] = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
}
"""Commutative operations, whose result may be written to either argument.

In half precision, only the first argument is overwritten, because swapping the operands may change
the rounding.
"""
_HALF = {torch.bfloat16, torch.float16}

_GRADIENTS: dict[Any, Any] = {
    aten.threshold_backward.default: aten.threshold_backward.grad_input,
    aten.tanh_backward.default: aten.tanh_backward.grad_input,
}
"""Gradient operations and their ``out=`` versions."""


def work_in_place(graph: fx.Graph, memories: Memories, writes: Memories) -> None:
    """Write results to the memory of tensors that are no longer needed.

    The memory of inputs and outputs is not reused, nor is memory that the traced function modifies.

    Args:
        graph: Graph whose nodes store their traced ``value`` in ``meta``.
        memories: Function that returns the addresses of the memory that a node refers to.
        writes: Function that returns the addresses of the memory that a node's operation modifies.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    calls = [node for node in graph.nodes if node.op == "call_function"]
    *_, output = graph.nodes
    fixed: set[int] = set().union(*map(writes, calls), *map(memories, output.all_input_nodes))
    fixed = fixed.union(*[memories(node) for node in graph.nodes if node.op == "placeholder"])
    last: dict[int, int] = {}
    for node in calls:
        for memory in memories(node):
            last[memory] = max([last.get(memory, 0), *[order[user] for user in node.users]])
    for node in calls:
        for argument in _may_be_overwritten(node):
            found = memories(argument)
            others = [one for one in node.all_input_nodes if one is not argument]
            if (
                not found & fixed
                and not found & set().union(*map(memories, others))
                and all(last[memory] <= order[node] for memory in found)
                and _same_layout(argument.meta["value"], node.meta["value"])
            ):
                _overwrite(graph, node, argument)
                break


def _may_be_overwritten(node: fx.Node) -> list[Any]:
    """Return the arguments whose memory could store the result of a node."""
    arguments: Any = node.args[:1]
    if node.target in _COMMUTING and not node.kwargs:
        arguments = node.args[: 1 if node.meta["value"].dtype in _HALF else 2]
    elif node.target not in {*_IN_PLACE, *_GRADIENTS, *_COMMUTING}:
        return []
    return [one for one in arguments if isinstance(one, fx.Node) and one.op == "call_function"]


def _same_layout(one: Any, other: Any) -> bool:
    return (
        isinstance(one, Tensor)
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def _overwrite(graph: fx.Graph, node: fx.Node, argument: fx.Node) -> None:
    """Replace an operation with one that writes its result to the memory of ``argument``."""
    others = list(node.args)
    others.remove(argument)
    with graph.inserting_before(node):
        if node.target in _GRADIENTS:
            target = _GRADIENTS[node.target]
            written = graph.call_function(target, node.args, {"grad_input": argument})
        else:
            target = {**_IN_PLACE, **_COMMUTING}[node.target]
            written = graph.call_function(target, (argument, *others), node.kwargs)
    written.meta = node.meta
    node.replace_all_uses_with(written)
    graph.erase_node(node)
