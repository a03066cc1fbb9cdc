"""Compute matrix products of ensembles in the memory layout that later operations need.

If ``vmap`` is applied to a linear layer, the results or operands of its matrix products are
copied to transpose them in memory. The copy takes a third as long as the product, and is avoided by
computing the same sums in the same order but in the other layout. Each product is computed both
ways on random values of the same shapes. It is replaced only if the results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
_PRODUCTS = frozenset({aten.bmm.default, aten.mm.default, aten.clone.default})
_SWAPPED = ((1, 2), (-2, -1), (2, 1), (-1, -2))


Replace = Callable[[fx.Node, fx.Node], None]
"""Function that replaces all uses of the first node with the second node."""


def use_better_layouts(
    graph: fx.Graph, touched: Callable[[fx.Node], bool], replace: Replace
) -> None:
    """Compute matrix products in the memory layout that later operations need.

    ``touched`` returns whether a node's memory is modified in place or returned by the graph.
    """
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        if node.target not in _PRODUCTS or touched(node) or not node.users:
            continue
        if not node.meta["value"].is_floating_point():
            continue
        if node.target is aten.bmm.default:
            _gradient_of_weights(graph, node, touched, replace)
        elif node.target is aten.clone.default:
            _outputs(graph, node, touched, replace)
        elif node.target is aten.mm.default:
            _gradient_of_inputs(graph, node, touched, replace)


def _gradient_of_weights(
    graph: fx.Graph, node: fx.Node, touched: Callable[[fx.Node], bool], replace: Replace
) -> None:
    """Replace ``(x.T @ g).T`` with ``g.T @ x`` for each ensemble member."""
    left, right = node.args
    if not _is_swapped(left) or not all(map(_is_swapped, node.users)):
        return
    inner: Any = left.args[0]  # type: ignore[union-attr]
    if touched(inner) or touched(right):  # type: ignore[arg-type]
        return
    x, g = _random_like(inner), _random_like(right)
    result = torch.bmm(g.mT, x)
    if not torch.equal(torch.bmm(x.mT, g).mT, result):
        return
    if not all(_has_views(user, result) for user in node.users):
        return
    with graph.inserting_before(node):
        transposed = _call(graph, aten.transpose.int, (right, 1, 2))
        product = _call(graph, aten.bmm.default, (transposed, inner))
    for user in list(node.users):
        replace(user, product)
    for user in list(product.users):
        if user.target is aten.clone.default and not touched(user):
            _replace_if_same_layout(user, product, replace)


def _outputs(
    graph: fx.Graph, node: fx.Node, touched: Callable[[fx.Node], bool], replace: Replace
) -> None:
    """Compute ``(W @ x.T).T`` separately for each member, whose weights are stacked in ``W``."""
    found = _chain(node.args[0], ({aten.transpose.int}, _VIEWS, {aten.mm.default}))
    if found is None or found[2].args[1].target is not aten.t.default:
        return
    swap, view, product = found
    if not _is_swapped(swap) or touched(swap):
        return
    weights, source = product.args[0], product.args[1].args[0]
    members, columns, rows = view.meta["value"].shape
    count, inputs = source.meta["value"].shape
    if rows != count or not weights.meta["value"].is_contiguous():  # another kind of product
        return
    x, w = _random_like(source), _random_like(weights)
    each = torch.bmm(x.expand(members, -1, -1), w.view(members, columns, inputs).mT)
    if not torch.equal(torch.mm(w, x.t()).view(members, columns, rows).mT, each):
        return
    with graph.inserting_before(product):  # the weights may be modified later
        shaped = _call(graph, aten.view.default, (weights, [members, columns, inputs]))
        transposed = _call(graph, aten.transpose.int, (shaped, 1, 2))
        expanded = _call(graph, aten.expand.default, (source, [members, rows, inputs]))
        outputs = _call(graph, aten.bmm.default, (expanded, transposed))
    _replace_if_same_layout(node, outputs, replace)


def _gradient_of_inputs(
    graph: fx.Graph, node: fx.Node, touched: Callable[[fx.Node], bool], replace: Replace
) -> None:
    """Concatenate the rows of all members' output gradients before computing input gradients."""
    left, weights = node.args
    targets = {aten.t.default}, _VIEWS, {aten.clone.default}, {aten.transpose.int}
    found = _chain(left, targets)
    if found is None or not _is_swapped(found[3]) or any(map(touched, found)):
        return
    gradient = found[3].args[0]
    members, rows, columns = gradient.meta["value"].shape
    if list(found[1].args[1]) != [members * columns, rows]:
        return
    g, w = _random_like(gradient), _random_like(weights)
    side_by_side = g.permute(1, 0, 2).reshape(rows, -1)
    if not torch.equal(torch.mm(g.mT.reshape(-1, rows).t(), w), torch.mm(side_by_side, w)):
        return
    with graph.inserting_before(node):
        permuted = _call(graph, aten.permute.default, (gradient, [1, 0, 2]))
        contiguous = {"memory_format": torch.contiguous_format}
        copied = _call(graph, aten.clone.default, (permuted,), contiguous)
        joined = _call(graph, aten.view.default, (copied, [rows, members * columns]))
        product = _call(graph, aten.mm.default, (joined, weights))
    _replace_if_same_layout(node, product, replace)


def _has_views(node: fx.Node, value: Tensor) -> bool:
    """Return whether every view of a node can also be created from ``value``."""
    for user in node.users:
        if user.op == "output" or not (user.target in _VIEWS or is_view(user.target)):
            continue
        try:
            view = user.target(value, *user.args[1:], **user.kwargs)  # type: ignore[operator]
        except RuntimeError:
            return False
        if not isinstance(view, Tensor) or not _has_views(user, view):
            return False
    return True


def is_view(function: Any) -> bool:
    """Return whether an operation returns views of its arguments."""
    returns = function._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _is_swapped(node: Any) -> bool:
    swaps = node.target is aten.transpose.int and tuple(node.args[1:]) in _SWAPPED
    return swaps and node.meta["value"].ndim == 3


def _chain(node: Any, targets: Any) -> list[Any] | None:
    """Follow first arguments and return the nodes, or ``None`` if they do not match ``targets``."""
    found: list[Any] = []
    for allowed in targets:
        if not isinstance(node, fx.Node) or node.target not in allowed:
            return None
        found.append(node)
        node = node.args[0]
    return found


def _call(graph: fx.Graph, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
    """Insert an operation and compute its traced value."""
    node = graph.call_function(target, args, kwargs)
    inputs, values = node.all_input_nodes, fx.map_arg(args, lambda one: one.meta["value"])
    node.meta = {
        "value": target(*values, **(kwargs or {})),
        "varies": any(one.meta["varies"] for one in inputs),
        "settings": {k: t for one in inputs for k, t in one.meta["settings"].items()},
    }
    return node


def _random_like(node: Any) -> Tensor:
    """Return random values with a node's shape and dtype, drawn from a separate generator."""
    like = node.meta["value"]
    generator = torch.Generator(like.device).manual_seed(like.numel())
    return torch.empty_like(like, requires_grad=False).normal_(generator=generator)


def _replace_if_same_layout(node: fx.Node, other: fx.Node, replace: Replace) -> None:
    if other.meta["value"].stride() == node.meta["value"].stride():
        replace(node, other)
