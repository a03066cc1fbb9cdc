"""Trace a function of tensors as a ``torch.fx.Graph``, including its backward pass.

With small networks, TensorDict modules and losses spend most of their time in Python code for keys,
modules and distributions. :func:`record` calls the function once under a dispatch mode that
intercepts every tensor operation below autograd, and writes these operations to a graph. Parameters
and buffers are inputs of the graph, so every execution uses their current values.

Tracing raises :class:`TraceError` if the function cannot be replayed, for example because of
control flow that depends on tensor values, shapes that depend on values (``x[x > 0]``), random
numbers from a custom generator, or collective operations. Two kinds of host reads are supported.
Library checks that values are finite are omitted from the graph. Constant settings, such as action
bounds, may be read; :meth:`Recording.is_valid` detects changes to these settings.
"""

from __future__ import annotations

import operator
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Reversible, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kit.fast.in_place import work_in_place
from kit.fast.layouts import is_view
from kit.fast.simplify import simplify

aten = torch.ops.aten

_UNDECLARED = {aten.native_batch_norm.default: (3, 4), aten.cudnn_batch_norm.default: (3, 4)}
"""Argument indices of running statistics, which these operations modify without declaring it."""

_SEEN_BY_PYTHON = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""Tags of operations that expose tensor values, or shapes that depend on them, to Python."""
_MEMORY_READS = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__})
"""Methods that read the memory of a tensor."""
_COLLECTIVES = frozenset({"c10d", "_c10d_functional"})
"""Namespaces of collective operations. Tracing and verification would repeat them on one rank."""
_READS = "reads a tensor on the host"
_version = operator.attrgetter("_version")


class TraceError(Exception):
    """Raised if a function is not a fixed sequence of tensor operations.

    It is not a ``RuntimeError``, because many callers catch PyTorch's RuntimeErrors.
    """


@dataclass
class Recording:
    """A traced function of tensors.

    The graph's placeholders are the inputs that are read, followed by the constants.
    """

    graph: fx.Graph
    inputs: list[Tensor]
    """Inputs of the traced call that the graph reads; cleared once an executor is built."""
    inputs_read: list[int]
    """Positions of these inputs among the function's inputs."""
    inputs_changed: list[int]
    """Positions of the inputs that the function modifies in place."""
    constants: list[Tensor]
    """Tensors that are neither inputs nor results, such as parameters and buffers."""
    changed: list[Tensor]
    """Tensors other than inputs that the function modifies in place, including views."""
    before: list[tuple[Tensor, Tensor]]
    """Tensors modified in place, paired with their previous values; cleared like ``inputs``."""
    _settings: list[Tensor]
    """Tensors whose values Python code has read."""
    _truth_tested: list[Tensor]
    """Host tensors that Python code has only tested for truth."""
    _pinned: list[Tensor]
    """Tensors whose addresses must not change, such as the bases of views in the graph."""

    def __post_init__(self) -> None:
        self._store_state()

    def _store_state(self) -> None:
        """Store the current values of settings and the current addresses of pinned tensors."""
        self._versions = [*map(_version, self._settings)]
        self._shown = [tensor.detach().numpy() for tensor in self._settings if _is_array(tensor)]
        self._values = [array.tobytes() for array in self._shown]
        self._truth_arrays = [tensor.detach().numpy() for tensor in self._truth_tested]
        self._truths = [*map(bool, self._truth_arrays)]
        self._pinned += self._settings + self._truth_tested
        self._addresses = [*map(Tensor.data_ptr, self._pinned)]

    @property
    def operations(self) -> list[str]:
        """Names of the operations, in order."""
        return [
            str(n.target) for n in self.graph.nodes if isinstance(n.target, torch._ops.OpOverload)
        ]

    def is_valid(self) -> bool:
        """Return whether settings read by Python code and all pinned addresses are unchanged.

        For settings on a GPU, only tensor versions are compared, because reading values would
        synchronise. Changes through ``Tensor.data`` are therefore missed.
        """
        return (
            [*map(_version, self._settings)] == self._versions
            and [array.tobytes() for array in self._shown] == self._values
            and [*map(bool, self._truth_arrays)] == self._truths
            and [*map(Tensor.data_ptr, self._pinned)] == self._addresses
        )

    def restore(self) -> None:
        """Restore the previous values of the tensors that were modified in place."""
        _restore(self.before)

    def pin_constants(self) -> None:
        """Make ``is_valid`` also check all constants' addresses and the values of CPU constants."""
        self._pinned += self.constants
        self._settings += [tensor for tensor in self.constants if tensor.is_cpu]
        self._store_state()


def record(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
) -> tuple[Recording, Sequence[Tensor]]:
    """Call ``function`` once and return its recording and its outputs.

    The call has its usual effects: it draws random numbers and modifies buffers once.

    Args:
        function: Maps the inputs to a sequence of tensors. Gradients that it computes with
            ``torch.autograd.grad`` are traced too.
        inputs: Tensors that do not share memory.

    Raises:
        TraceError: If the function reads a tensor on the host that may differ in the next call.
            Checks for finite values by libraries are allowed. Tensors that the function had
            modified in place are restored.
    """
    recorder = _Recorder(inputs)
    # Validation of distribution arguments reads tensors on the host, so it is disabled.
    validates = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        with recorder, _MemoryReads(recorder):
            outputs = function(*inputs)
        return recorder.finish(outputs), outputs
    except TraceError:
        _restore(recorder.saved.values())
        raise
    finally:
        torch.distributions.Distribution.set_default_validate_args(validates)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes every operation below autograd to a graph.

    During tracing, the ``meta`` of a node contains ``value``, ``varies`` and ``settings``.
    ``value`` keeps the tensor alive, so that its address and id stay unique. ``varies`` states
    whether the tensor may differ in the next call. If not, ``settings`` contains the tensors that
    the value depends on.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.read: dict[int, Tensor] = {}
        self.truth_tested: dict[int, Tensor] = {}
        self.tests_truth = False  # whether the tensor being read is only tested for truth
        self._nodes: dict[int, fx.Node] = {}
        self._places: dict[Any, fx.Node] = {}
        self._constants: dict[fx.Node, None] = {}  # in order of appearance
        self._viewed: dict[int, Tensor] = {}
        self._alive: list[Any] = []
        self._made: set[int] = set()
        self.saved: dict[Any, tuple[Tensor, Tensor]] = {}
        self._replaced: dict[int, int] = {}  # maps addresses of replaced memory to new addresses
        self._inputs = [self._placeholder(tensor, varies=True) for tensor in inputs]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if function.namespace == "profiler":  # profiler events from optimisers are not traced
            return function(*args, **kwargs)
        if function.namespace in _COLLECTIVES:
            raise TraceError(f"it exchanges tensors with other processes ({function})")
        dynamic = torch.Tag.dynamic_output_shape in function.tags
        for tensor in _seen_by_python(function, args):
            self.allow_read(tensor, "creates a shape that depends on values" if dynamic else _READS)
        if torch.Tag.data_dependent_output in function.tags:
            return function(*args, **kwargs)
        if any(isinstance(value, torch.Generator) for value in kwargs.values()):
            raise TraceError("it draws random numbers from a custom generator")
        self._save_changed(function, args, kwargs)
        result = function(*args, **kwargs)
        self._write(function, args, kwargs, result)
        return result

    # ------------------------------------------------------------------ writing the graph
    def _write(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        reads = [self._node(tensor) for tensor in tensors_in((args, tuple(kwargs.values())))]
        if isinstance(result, Tensor) and is_view(function):
            if reads and all(node in self._constants for node in reads):
                self._constant_view(result, reads)
                return
            # Autograd creates many equal views, for example with `detach`. They share one node.
            first = self._places.get(_place(result))
            if first is not None:
                self._nodes[id(result)] = first
                self._alive.append(result)
                return
        memory = {_memory(tensor) for node in reads for tensor in tensors_in(node.meta["value"])}
        node = self.graph.call_function(function, self._argument(args), self._argument(kwargs))
        meta = {
            "varies": torch.Tag.nondeterministic_seeded in function.tags
            or any(read.meta["varies"] for read in reads),
            "settings": {k: t for read in reads for k, t in read.meta["settings"].items()},
        }
        self._result(node, result, meta)
        self._made.update({_memory(tensor) for tensor in tensors_in(result)} - memory)

    def _result(self, node: fx.Node, result: Any, meta: dict[str, Any]) -> None:
        """Map a result to ``node``. The tensors in a list result get their own nodes."""
        node.meta = {"value": result, **meta}
        if isinstance(result, (list, tuple)):
            for number, item in enumerate(result):
                self._result(self.graph.call_function(operator.getitem, (node, number)), item, meta)
        elif isinstance(result, Tensor):
            self._nodes[id(result)] = node
            self._places.setdefault(_place(result), node)

    def _placeholder(self, tensor: Tensor, varies: bool) -> fx.Node:
        node = self.graph.placeholder(f"tensor_{len(self.graph.nodes)}")
        self._result(node, tensor, {"varies": varies, "settings": {id(tensor): tensor}})
        return node

    def _node(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor. A tensor without a node becomes a constant."""
        if id(tensor) not in self._nodes:
            self._constant(tensor, varies=tensor.requires_grad)
        return self._nodes[id(tensor)]

    def _constant(self, tensor: Tensor, varies: bool = False) -> fx.Node:
        node = self._placeholder(tensor, varies)
        self._constants[node] = None
        return node

    def _constant_view(self, view: Tensor, reads: Sequence[fx.Node]) -> None:
        """Add a view of a constant as another constant, because the view reflects later changes."""
        node = self._node(view)
        node.meta["varies"] |= any(read.meta["varies"] for read in reads)
        node.meta["settings"] = {k: t for r in reads for k, t in r.meta["settings"].items()}
        for read in reads:
            self._viewed[id(read.meta["value"])] = read.meta["value"]

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._argument(item) for item in value)
        if isinstance(value, dict):
            return {name: self._argument(item) for name, item in value.items()}
        return value

    # ------------------------------------------------------------------ in-place changes
    def _save_changed(self, function: Any, args: Any, kwargs: Any) -> None:
        """Save tensors from outside the function before an operation modifies them."""
        for tensor in tensors_in(_written(function, args, kwargs)):
            if _memory(tensor) not in self._made and _place(tensor) not in self.saved:
                self.saved[_place(tensor)] = (tensor, tensor.clone())

    # ------------------------------------------------------------------ reads on the host
    def allow_read(self, tensor: Tensor, action: str = _READS) -> None:
        """Record that Python code reads a tensor. ``action`` describes the read in errors.

        Raises:
            TraceError: If the tensor may differ in the next call.
        """
        node = self._node(tensor)
        if not node.meta["varies"]:
            is_setting = id(tensor) in node.meta["settings"] and _is_array(tensor)
            reads = self.truth_tested if self.tests_truth and is_setting else self.read
            reads |= node.meta["settings"]
        elif not (_is_finite_check(node) and _is_read_by_library()):
            raise TraceError(f"it {action} at {_caller_location()}")

    def _check_reads(self) -> None:
        """Raise an error if the function modifies a tensor that it read on the host."""
        written = {_memory(tensor) for tensor, _ in self.saved.values()}
        if written & {
            _memory(tensor) for tensor in (*self.read.values(), *self.truth_tested.values())
        }:
            raise TraceError("it reads a tensor on the host that it modifies")

    # ------------------------------------------------------------------ finish
    def _replace(self, node: fx.Node, other: fx.Node) -> None:
        """Replace ``node`` with ``other``. Views of ``node`` become views of ``other``."""
        pairs = zip(tensors_in(node.meta["value"]), tensors_in(other.meta["value"]))
        for old, new in pairs:
            before, after = self._current(_memory(old)), self._current(_memory(new))
            if before != after:  # mapping an address to itself would be a cycle
                self._replaced[before] = after
        node.replace_all_uses_with(other)

    def _current(self, memory: int) -> int:
        while memory in self._replaced:
            memory = self._replaced[memory]
        return memory

    def _shown(self, memories: Callable[[fx.Node], set[int]]) -> Callable[[fx.Node], set[int]]:
        """Return a version of ``memories`` that accounts for replaced nodes."""
        return lambda node: set(map(self._current, memories(node)))

    def finish(self, outputs: Sequence[Tensor]) -> Recording:
        """Return the recording without redundant or unused operations."""
        self._check_reads()
        self.graph.output(tuple(self._node(tensor) for tensor in outputs))
        simplify(self.graph, self._constant, _memories, _memories_written, self._replace)
        self.graph.eliminate_dead_code(lambda n: n.is_impure() or n.target in _UNDECLARED)
        work_in_place(self.graph, self._shown(_memories), self._shown(_memories_written))
        read = [number for number, node in enumerate(self._inputs) if node.users]
        constants = [node for node in self.graph.nodes if node in self._constants and node.users]
        given = {_memory(node.meta["value"]): n for n, node in enumerate(self._inputs)}
        changed = [tensor for tensor, _ in self.saved.values()]
        recording = Recording(
            self.graph,
            inputs=[self._inputs[number].meta["value"] for number in read],
            inputs_read=read,
            inputs_changed=sorted({given[_memory(t)] for t in changed if _memory(t) in given}),
            constants=[node.meta["value"] for node in constants],
            changed=[tensor for tensor in changed if _memory(tensor) not in given],
            before=[*self.saved.values()],
            _settings=[*self.read.values()],
            _truth_tested=[*self.truth_tested.values()],
            _pinned=list(self._viewed.values()),
        )
        for node in {*self._inputs, *self._constants} & {*self.graph.nodes}:
            if not node.users:
                self.graph.erase_node(node)
        for node in self.graph.nodes:  # releases the tensors
            node.meta = _metadata(node.meta.get("value"))
        return recording


class _MemoryReads(TorchFunctionMode):
    """Notifies a recorder when a tensor is converted to a NumPy array or a list."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if function in _MEMORY_READS:
            self._recorder.allow_read(args[0])
        self._recorder.tests_truth = function is Tensor.__bool__
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self._recorder.tests_truth = False


def _restore(saved: Reversible[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for tensor, value in reversed(saved):
            tensor.copy_(value)


def _metadata(value: Any) -> dict[str, Any]:
    """Return the metadata that executors need about a traced value."""
    if isinstance(value, (list, tuple)):
        return {"length": len(value)}
    strided = isinstance(value, Tensor) and value.layout is torch.strided
    place = {"shape": value.shape, "stride": value.stride()} if strided else {}
    kind = {name: getattr(value, name, None) for name in ("dtype", "device")}
    return {**kind, **place}


def tensors_in(value: Any) -> list[Tensor]:
    """Return a list of all tensors in a value, which may be a nested list or tuple."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _seen_by_python(function: Any, args: Sequence[Any]) -> list[Tensor]:
    """Return the arguments whose values an operation exposes to Python, directly or as a shape."""
    if _SEEN_BY_PYTHON.isdisjoint(function.tags):
        return []
    if function is aten.index.Tensor:  # only masks make the shape depend on values
        return [index for index in tensors_in(args[1]) if not index.dtype.is_signed]
    return tensors_in(args)


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    found = []
    for number, argument in enumerate(function._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or number in _UNDECLARED.get(function, ()):
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return found


def _memories(node: fx.Node) -> set[int]:
    """Return the addresses of the memory that a traced value refers to."""
    return {_memory(tensor) for tensor in tensors_in(node.meta["value"])}


def _memories_written(node: fx.Node) -> set[int]:
    """Return the addresses of the memory that a traced operation writes to."""
    if node.target is operator.getitem:
        return set()
    found: set[int] = set()
    written = _written(node.target, node.args, node.kwargs)
    fx.map_arg(written, lambda argument: found.update(_memories(argument)))
    return found


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, or the tensor's id if it has no storage."""
    if tensor.numel() == 0 or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _place(tensor: Tensor) -> Any:
    """Return a key that consists of a tensor's address, shape, strides, dtype and device."""
    if tensor.numel() == 0 or tensor.layout is not torch.strided:
        return id(tensor)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def share_no_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors. Duplicates are cloned, because they may differ in later calls."""
    seen: set[Any] = set()
    separate = []
    for tensor in tensors:
        separate.append(tensor.clone() if _place(tensor) in seen else tensor)
        seen.add(_place(tensor))
    return separate


def _is_array(tensor: Tensor) -> bool:
    """Return whether a tensor can be viewed as a NumPy array."""
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.dtype is not torch.bfloat16


def _is_finite_check(node: fx.Node) -> bool:
    """Return whether a node computes ``x.isfinite().all()`` or ``x.isnan().any()``."""
    if node.target not in (aten.all.default, aten.any.default):
        return False
    inner: Any = node.args[0]
    if node.target is aten.any.default:
        is_nan = inner.target is aten.ne.Tensor and inner.args[0] is inner.args[1]
        return is_nan or inner.target is aten.isnan.default
    if inner.target is not aten.mul.Tensor:
        return False
    return {str(part.target) for part in inner.args} == {"aten.eq.Tensor", "aten.ne.Scalar"}


def _is_read_by_library() -> bool:
    """Return whether library code reads the tensor. Checks in user code cannot be omitted."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"].startswith(("kit.fast.", "torch._")):
        frame = frame.f_back
    return frame.f_globals["__name__"].split(".")[0] in ("torch", "torchrl", "kit")


def _caller_location() -> str:
    """Return the file, line and source of the innermost frame outside PyTorch and kit.fast."""
    internal = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith(internal)]
    frame = frames[-1] if frames else None
    place = f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno}" if frame else "unknown"
    return f"{place}: {frame.line if frame else ''}"
