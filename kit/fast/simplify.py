"""Recorded graphs with fewer operations and bitwise the same results."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx

from kit.fast.layouts import Replace, use_better_layouts
from kit.fast.vectors import joined

aten = torch.ops.aten

_READ_SHAPES = frozenset(
    {
        aten.ones_like.default,
        aten.zeros_like.default,
        aten.full_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
    }
)
"""Operations to which the values of a tensor make no difference."""


def simplify(
    graph: fx.Graph,
    constant: Callable[[Tensor], fx.Node],
    memories: Callable[[fx.Node], set[int]],
    writes: Callable[[fx.Node], set[int]],
    replace: Replace,
) -> None:
    """Leave out what is computed twice, and what is the same in every call.

    Operations on memory that any of them writes to stay as they are, and so does what is returned:
    no two outputs become one, and none is the same tensor in the next call.

    Args:
        graph: whose nodes hold the ``value`` that they had when they were recorded.
        constant: makes a placeholder for a tensor, where the graph inserts.
        memories: what a node's tensors show.
        writes: memory that a node's operation writes to.
        replace: uses the second node in place of the first.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    *_, output = graph.nodes
    touched = {memory for node in calls for memory in writes(node)}
    touched |= {memory for node in output.all_input_nodes for memory in memories(node)}
    known: dict[str, fx.Node] = {}
    constants: set[fx.Node] = set()
    for node in calls:
        _add_at_once(graph, node, constant)
        shapes_alone = node.target in _READ_SHAPES
        read = [] if shapes_alone else node.all_input_nodes
        if memories(node).union(*map(memories, read)) & touched or not _repeats_itself(node):
            continue
        if shapes_alone or constants.issuperset(node.all_input_nodes):
            if isinstance(node.meta["value"], Tensor):
                with graph.inserting_before(node):
                    same = constant(node.meta["value"])
                constants.add(same)
                replace(node, same)
            continue
        first = known.setdefault(f"{node.target}{node.args}{node.kwargs}", node)
        if first is not node:
            replace(node, first)
    use_better_layouts(graph, lambda node: bool(memories(node) & touched), replace)


def _repeats_itself(node: fx.Node) -> bool:
    """Whether an operation has the same results in every call with the same inputs."""
    tags = getattr(node.target, "tags", ())
    random = torch.Tag.nondeterministic_seeded in tags
    return node.target is operator.getitem or not (random or node.is_impure())


def _add_at_once(graph: fx.Graph, node: fx.Node, constant: Callable[[Tensor], fx.Node]) -> None:
    """Add a number to all elements of a tensor, rather than to each of them."""
    if node.target is not aten._foreach_add_.Scalar:
        return
    elements, number = node.args
    whole = joined([element.meta["value"] for element in elements])  # type: ignore[union-attr]
    if whole is not None:
        with graph.inserting_before(node):
            added = graph.call_function(aten.add_.Scalar, (constant(whole), number))
        added.meta = {**node.meta, "value": whole}
        graph.erase_node(node)
