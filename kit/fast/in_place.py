"""Recorded graphs that write to memory they are done with, and bitwise the same results.

A result as large as a processor's cache costs as much to put into new memory as to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

Memories = Callable[[fx.Node], set[int]]

_OF_ONE: dict[Any, Any] = {
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
"""Operations, element by element, and those that write to their first argument."""

_COMMUTING: dict[Any, Any] = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
}
"""The same of operations whose first two arguments may change places.

But not in half precision: PyTorch rounds a number that comes first, and not one that comes second.
"""
_HALF = {torch.bfloat16, torch.float16}

_OF_GRADIENTS: dict[Any, Any] = {
    aten.threshold_backward.default: aten.threshold_backward.grad_input,
    aten.tanh_backward.default: aten.tanh_backward.grad_input,
}
"""The same of gradients, which are told where to write."""


def work_in_place(graph: fx.Graph, memories: Memories, writes: Memories) -> None:
    """Let operations overwrite what nothing reads afterwards.

    Memory that is given, returned, or written to by what was recorded, is left alone.

    Args:
        graph: whose nodes hold the ``value`` that they had when they were recorded.
        memories: what a node's tensors show.
        writes: memory that a node's operation writes to.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    calls = [node for node in graph.nodes if node.op == "call_function"]
    *_, output = graph.nodes
    kept: set[int] = set().union(*map(writes, calls), *map(memories, output.all_input_nodes))
    kept = kept.union(*[memories(node) for node in graph.nodes if node.op == "placeholder"])
    last: dict[int, int] = {}
    for node in calls:
        for memory in memories(node):
            last[memory] = max([last.get(memory, 0), *[order[user] for user in node.users]])
    for node in calls:
        for argument in _may_be_overwritten(node):
            found = memories(argument)
            others = [one for one in node.all_input_nodes if one is not argument]
            if (
                not found & kept
                and not found & set().union(*map(memories, others))
                and all(last[memory] <= order[node] for memory in found)
                and _same_layout(argument.meta["value"], node.meta["value"])
            ):
                _overwrite(graph, node, argument)
                break


def _may_be_overwritten(node: fx.Node) -> list[Any]:
    """Arguments of which one may hold the result."""
    arguments: Any = node.args[:1]
    if node.target in _COMMUTING and not node.kwargs:
        arguments = node.args[: 1 if node.meta["value"].dtype in _HALF else 2]
    elif node.target not in {*_OF_ONE, *_OF_GRADIENTS, *_COMMUTING}:
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
    """Let an operation write its result to one of its arguments."""
    others = list(node.args)
    others.remove(argument)
    with graph.inserting_before(node):
        if node.target in _OF_GRADIENTS:
            target = _OF_GRADIENTS[node.target]
            written = graph.call_function(target, node.args, {"grad_input": argument})
        else:
            target = {**_OF_ONE, **_COMMUTING}[node.target]
            written = graph.call_function(target, (argument, *others), node.kwargs)
    written.meta = node.meta
    node.replace_all_uses_with(written)
    graph.erase_node(node)
