"""Recorded graphs with fewer operations and bitwise the same results."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

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
) -> None:
    """Leave out what is computed twice, and what is the same in every call.

    Operations on memory that any of them writes to stay as they are, and so does what is returned:
    no two outputs become one, and none is the same tensor in the next call.

    Args:
        graph: whose nodes hold the ``value`` that they had when they were recorded.
        constant: makes a placeholder for a tensor, where the graph inserts.
        memories: what a node's tensors show.
        writes: memory that a node's operation writes to.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    *_, output = graph.nodes
    touched = {memory for node in calls for memory in writes(node)}
    touched |= {memory for node in output.all_input_nodes for memory in memories(node)}
    known: dict[str, fx.Node] = {}
    constants: set[fx.Node] = set()
    for node in calls:
        _add_at_once(graph, node, constant)
        seen = memories(node).union(*map(memories, node.all_input_nodes))
        if seen & touched or not _repeats_itself(node):
            continue
        shapes_alone = node.target in _READ_SHAPES
        if shapes_alone or constants.issuperset(node.all_input_nodes):
            if isinstance(node.meta["value"], Tensor):
                with graph.inserting_before(node):
                    same = constant(node.meta["value"])
                constants.add(same)
                node.replace_all_uses_with(same)
            continue
        if node.target is aten.bmm.default:
            _transpose_product(graph, node)
            continue
        first = known.setdefault(f"{node.target}{node.args}{node.kwargs}", node)
        if first is not node:
            node.replace_all_uses_with(first)


def _transpose_product(graph: fx.Graph, node: fx.Node) -> None:
    """Compute a product that is only used transposed in the layout in which it is used.

    So are gradients of the weights of an ensemble, under ``vmap``: transposing them costs a third
    of computing them. Only where the product is bitwise the same.
    """
    left, right = node.args
    swapped = (1, 2)
    if left.target is not aten.transpose.int or left.args[1:] != swapped:  # type: ignore[union-attr]
        return
    if any(
        user.target is not aten.transpose.int or user.args[1:] != swapped for user in node.users
    ):
        return
    inner: Any = left.args[0]  # type: ignore[union-attr]
    flipped = right.meta["value"].transpose(1, 2)  # type: ignore[union-attr]
    value = torch.bmm(flipped, inner.meta["value"])
    if not torch.equal(value, node.meta["value"].transpose(1, 2)):
        return
    with graph.inserting_before(node):
        turned = graph.call_function(aten.transpose.int, (right, *swapped))
        product = graph.call_function(aten.bmm.default, (turned, inner))
    turned.meta = {**right.meta, "value": flipped}  # type: ignore[union-attr]
    product.meta = {**node.meta, "value": value}
    for user in list(node.users):
        user.replace_all_uses_with(product)
    for user in [user for user in product.users if user.target is aten.clone.default]:
        _leave_out_copy(user, product)


def _leave_out_copy(copy: fx.Node, of: fx.Node) -> None:
    """Use a tensor in place of its copy, where only its shape is changed."""
    views = {aten.view.default, aten._unsafe_view.default}
    if all(user.target in views for user in copy.users):
        for user in copy.users:
            user.meta["value"] = of.meta["value"].view(user.args[1])
        copy.replace_all_uses_with(of)


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
