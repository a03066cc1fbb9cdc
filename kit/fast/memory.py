"""Recorded graphs that write results to memory of their own, and bitwise the same results.

To find memory for a few kilobytes, and to make views of it, costs as much as to compute them. A
program that keeps this memory makes its views once: a third of the operations of a small network's
gradient step are gone, and with them a seventh of its time.
"""

from __future__ import annotations

import copy
import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from kit.fast.layouts import is_view

aten = torch.ops.aten

SMALL = 2**17
"""Bytes of the largest result of a program that keeps its memory. With larger ones it would save
little, and layers of 256 with minibatches of 256 took 4 % longer."""

_LINE = 64
"""Products of matrices may round otherwise at addresses that are no multiples of it, in bytes."""
_VIEWS = frozenset({operator.getitem, aten._unsafe_view.default})
"""Functions that return a view, or one of several, without saying so."""


def with_own_memory(
    graph: fx.Graph, constants: list[Tensor]
) -> tuple[fx.Graph, list[Tensor]] | None:
    """Return a copy of a graph whose results are in memory that it keeps, and its constants.

    ``None`` if a result is large. Outputs are new in every call. Two calls at a time would disturb
    each other.

    Args:
        graph: operations on the CPU, with ``dtype``, ``shape`` and ``stride`` in ``meta``.
        constants: the tensors of its last placeholders.
    """
    if any(_bytes(node) > SMALL for node in graph.nodes if node.op == "call_function"):
        return None
    own = copy.deepcopy(graph)
    placeholders = [node for node in own.nodes if node.op == "placeholder"]
    known = dict(zip(placeholders[len(placeholders) - len(constants) :], constants))
    planner = _Planner(own)
    planner.plan()
    known |= {node: value for node, value in planner.own.items() if isinstance(value, Tensor)}
    return own, [known[node] for node in own.nodes if node in known]


class _Planner:
    """Replaces results by constants of a graph, and operations by those that write there."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        # Memory by its placeholder; views of it by the operation that returns several.
        self.own: dict[fx.Node, Any] = {}
        self._shown: dict[fx.Node, set[fx.Node]] = {}
        for node in graph.nodes:
            self._shown[node] = self._memories(node)
        *_, output = graph.nodes
        changes_shape = torch.Tag.inplace_view
        reshaped = [n for n in graph.nodes if changes_shape in getattr(n.target, "tags", ())]
        left = [self._shown[node] for node in (*output.all_input_nodes, *reshaped)]
        self._left_alone = set().union(*left)
        order = {node: number for number, node in enumerate(graph.nodes)}
        self._order, self._last = order, dict.fromkeys(order, -1)
        for node, shown in self._shown.items():
            for one in shown:
                self._last[one] = max([self._last[one], *map(order.__getitem__, node.users)])
        self._used: list[tuple[int, Tensor]] = []  # with what reads it last
        self._free: list[Tensor] = []

    def _memories(self, node: fx.Node) -> set[fx.Node]:
        """The nodes whose memory a node may show."""
        aliases = [one for one in _aliases(node) if isinstance(one, fx.Node)]
        return set().union(*[self._shown[one] for one in aliases]) if aliases else {node}

    def plan(self) -> None:
        """Give results memory of the graph's own, in the order in which they are computed."""
        calls = [node for node in self.graph.nodes if node.op == "call_function"]
        for node in calls:
            shown = [one for one in _aliases(node) if one in self.own]
            if shown and (node.target in _VIEWS or is_view(node.target)):
                self._view_once(node)
            elif shown:  # it writes there, and returns what it was given
                node.replace_all_uses_with(shown[0])
            else:
                self._write_to_own(node)
        for node in [one for one in self.own if one.op == "call_function" and not one.users]:
            self.graph.erase_node(node)  # its views have all been made

    # ------------------------------------------------------------------ results
    def _write_to_own(self, node: fx.Node) -> None:
        """Let an operation write its result to memory of the graph's own."""
        told = _told_where(node.target)
        if told is None:
            return
        memory = self._new(node)
        if memory is None:
            return
        target, name = told
        with self.graph.inserting_before(node):
            place = self._constant(memory, node)
            call = self.graph.call_function(target, node.args, {**node.kwargs, name: place})
        call.meta = node.meta
        node.replace_all_uses_with(place)
        self.graph.erase_node(node)

    def _new(self, node: fx.Node) -> Tensor | None:
        """Memory for a result; ``None`` where it is returned, or has gaps."""
        if self._shown[node] & self._left_alone or not _bytes(node):
            return None
        shape, strides, kind = (node.meta[name] for name in ("shape", "stride", "dtype"))
        size = _bytes(node)
        extent = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides))
        if extent != _size(node):
            return None
        memory = self._block(-(-size // _LINE) * _LINE, self._order[node])
        self._used.append((self._last[node], memory))
        return memory[:size].view(kind).as_strided(shape, strides)

    def _block(self, size: int, now: int) -> Tensor:
        """So many bytes that nothing reads any more, the last used first; or new ones."""
        self._free += [memory for last, memory in self._used if last < now]
        self._used = [(last, memory) for last, memory in self._used if last >= now]
        for place in reversed(range(len(self._free))):
            if len(self._free[place]) == size:
                return self._free.pop(place)
        return torch.empty(size, dtype=torch.uint8)

    def _constant(self, memory: Tensor, like: fx.Node) -> fx.Node:
        """A placeholder for memory of the graph's own, where the graph inserts."""
        place = self.graph.placeholder(f"own_{len(self.own)}")
        place.meta = {**like.meta, "shape": memory.shape, "stride": memory.stride()}
        self.own[place] = memory
        return place

    def _view_once(self, node: fx.Node) -> None:
        """Make a view of memory of the graph's own now, not in every call."""
        if not all(one in self.own for one in node.all_input_nodes):
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: self.own[one])
        value = node.target(*args, **kwargs)  # type: ignore[operator]
        if not isinstance(value, Tensor):
            self.own[node] = value
            return
        with self.graph.inserting_before(node):
            place = self._constant(value, node)
        node.replace_all_uses_with(place)
        self.graph.erase_node(node)


def _aliases(node: fx.Node) -> list[Any]:
    """The arguments that an operation returns, or views of them."""
    if node.target in _VIEWS:
        return [node.args[0]]
    if node.op != "call_function":
        return []
    schema = node.target._schema  # type: ignore[union-attr]
    if all(one.alias_info is None for one in schema.returns):
        return []
    declared = [(n, a.name) for n, a in enumerate(schema.arguments) if a.alias_info is not None]
    return [node.args[n] if n < len(node.args) else node.kwargs.get(name) for n, name in declared]


def _size(node: Any) -> int:
    """Elements of a tensor."""
    return math.prod(node.meta["shape"]) if "shape" in node.meta else 0


def _bytes(node: fx.Node) -> int:
    """Of a tensor; 0 where it is not known to be one."""
    kind = node.meta.get("dtype")
    return _size(node) * kind.itemsize if isinstance(kind, torch.dtype) else 0


def _told_where(target: Any) -> tuple[Any, str] | None:
    """The operation that writes the same result where it is told, and the argument that tells.

    Those that PyTorch generates compute elsewhere and copy; random numbers are left alone.
    """
    schema = target._schema if isinstance(target, torch._ops.OpOverload) else None
    if schema is None or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if len(schema.returns) != 1 or schema.returns[0].alias_info or target.namespace != "aten":
        return None
    packet = getattr(aten, schema.name.removeprefix("aten::"))
    wanted = [(one.name, str(one.type)) for one in schema.arguments]
    for name in packet.overloads():
        other = getattr(packet, name)
        outs = [one.name for one in other._schema.arguments if one.is_out]
        given = [(one.name, str(one.type)) for one in other._schema.arguments if not one.is_out]
        if len(outs) == 1 and given == wanted and torch.Tag.generated not in other.tags:
            return other, outs[0]
    return None
