"""Compute large matrix products in traced graphs with oneDNN where it is faster than MKL.

PyTorch multiplies float32 matrices with MKL, which uses only half of the 512-bit throughput of
recent AMD CPUs. oneDNN, also part of PyTorch, is 2.1 times as fast for 256 x 256 matrices, but each
call has an overhead of about 10 us. oneDNN sums in a different order, so results round differently.
"""

from __future__ import annotations

import copy
import functools
import platform
from pathlib import Path
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

LARGE = 1_400_000
"""Minimum number of multiplications for oneDNN. With 1,000,000, MKL is equally fast."""

_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default})
_ZEN_5 = 26
"""CPU family number of Zen 5, AMD's first CPUs with full 512-bit throughput."""


@functools.cache
def are_faster() -> bool:
    """Return whether this CPU multiplies large matrices faster with oneDNN than with MKL.

    The result depends only on the CPU, so that a resumed run rounds in the same way.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:  # not Linux
        return False
    info = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    return (
        platform.machine() == "x86_64"
        and info.get("vendor_id") == "AuthenticAMD"
        and int(info.get("cpu family", 0)) >= _ZEN_5
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


def with_fast_products(graph: fx.Graph) -> fx.Graph | None:
    """Return a copy of a graph that computes large matrix products with oneDNN.

    Return ``None`` if the graph has no large products. The graph must consist of CPU operations
    with ``dtype``, ``shape`` and ``stride`` in ``meta``.
    """
    if not any(map(_is_large, graph.nodes)):
        return None
    faster = copy.deepcopy(graph)
    for node in [node for node in faster.nodes if _is_large(node)]:
        with faster.inserting_before(node):
            node.replace_all_uses_with(_product(faster, node))
        faster.erase_node(node)
    return faster


def _is_large(node: fx.Node) -> bool:
    if node.target not in _PRODUCTS or node.kwargs:
        return False
    *bias, left, right = node.args
    if node.meta["dtype"] is not torch.float32 or (bias and len(_shape(bias[0])) != 1):
        return False
    rows, inner = _shape(left)[-2:]
    return rows * inner * _shape(right)[-1] >= LARGE


def _product(graph: fx.Graph, node: fx.Node) -> fx.Node:
    *bias, left, right = node.args
    if node.target is not aten.bmm.default:
        return _linear(graph, left, right, *bias)
    members = []
    for member in range(_shape(left)[0]):
        parts = []
        for one in (left, right):
            part = graph.call_function(aten.select.int, (one, 0, member))
            part.meta = {"shape": _shape(one)[1:], "stride": one.meta["stride"][1:]}  # type: ignore
            parts.append(part)
        members.append(_linear(graph, *parts))
    return graph.call_function(aten.stack.default, (members,))


def _linear(graph: fx.Graph, left: Any, right: Any, bias: Any = None) -> fx.Node:
    """Multiply two matrices, or their transposes if oneDNN then copies less data."""
    (rows, inner), columns = _shape(left), _shape(right)[1]
    copied = 0 if left.meta["stride"] == (inner, 1) else rows * inner
    transposed_copied = 0 if right.meta["stride"] == (1, inner) else columns * inner
    transposed_copied += rows * columns  # the transposed result is copied too
    if bias is not None or copied <= transposed_copied:
        return _pointwise(graph, left, _transposed(graph, right), bias)
    result = _transposed(graph, _pointwise(graph, _transposed(graph, right), left, None))
    contiguous: dict[str, Any] = {"memory_format": torch.contiguous_format}
    return graph.call_function(aten.clone.default, (result,), contiguous)


def _pointwise(graph: fx.Graph, rows: Any, weight: Any, bias: Any) -> fx.Node:
    target = torch.ops.mkldnn._linear_pointwise.default
    return graph.call_function(target, (rows, weight, bias, "none", [], ""))


def _transposed(graph: fx.Graph, node: Any) -> fx.Node:
    return graph.call_function(aten.t.default, (node,))


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["shape"])
