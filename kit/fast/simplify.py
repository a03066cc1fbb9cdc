"""Remove redundant operations from traced graphs without changing the results."""

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
"""Operations that depend only on the shape of a tensor."""


def simplify(
    graph: fx.Graph,
    constant: Callable[[Tensor], fx.Node],
    memories: Callable[[fx.Node], set[int]],
    writes: Callable[[fx.Node], set[int]],
    replace: Replace,
) -> None:
    """Eliminate common subexpressions and fold constants.

    Operations on memory that is modified in place are left unchanged. Outputs are never merged, and
    every call returns new tensors.

    Args:
        graph: Graph whose nodes store their traced ``value`` in ``meta``.
        constant: Function that inserts a placeholder for a constant tensor.
        memories: Function that returns the addresses of the memory that a node refers to.
        writes: Function that returns the addresses of the memory that a node's operation modifies.
        replace: Function that replaces all uses of the first node with the second node.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    *_, output = graph.nodes
    touched = {memory for node in calls for memory in writes(node)}
    touched |= {memory for node in output.all_input_nodes for memory in memories(node)}
    computed: dict[str, fx.Node] = {}
    constants: set[fx.Node] = set()
    for node in calls:
        _fuse_additions(graph, node, constant)
        reads_shapes = node.target in _READ_SHAPES
        read = [] if reads_shapes else node.all_input_nodes
        if memories(node).union(*map(memories, read)) & touched or not _is_deterministic(node):
            continue
        if reads_shapes or constants.issuperset(node.all_input_nodes):
            if isinstance(node.meta["value"], Tensor):
                with graph.inserting_before(node):
                    folded = constant(node.meta["value"])
                constants.add(folded)
                replace(node, folded)
            continue
        first = computed.setdefault(f"{node.target}{node.args}{node.kwargs}", node)
        if first is not node:
            replace(node, first)
    use_better_layouts(graph, lambda node: bool(memories(node) & touched), replace)


def _is_deterministic(node: fx.Node) -> bool:
    """Return whether equal inputs yield equal results in every call."""
    tags = getattr(node.target, "tags", ())
    random = torch.Tag.nondeterministic_seeded in tags
    return node.target is operator.getitem or not (random or node.is_impure())


def _fuse_additions(graph: fx.Graph, node: fx.Node, constant: Callable[[Tensor], fx.Node]) -> None:
    """Merge additions to scalars that are adjacent in memory into one vector addition."""
    if node.target is not aten._foreach_add_.Scalar:
        return
    elements, number = node.args
    vector = joined([element.meta["value"] for element in elements])  # type: ignore[union-attr]
    if vector is not None:
        with graph.inserting_before(node):
            added = graph.call_function(aten.add_.Scalar, (constant(vector), number))
        added.meta = {**node.meta, "value": vector}
        graph.erase_node(node)
