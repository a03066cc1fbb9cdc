"""Record a function of tensors as a ``torch.fx.Graph``, its backward pass included.

A TensorDict module or loss spends most of a small network's time on Python: keys, modules,
distributions. :func:`record` calls the function once under a dispatch mode that sees every tensor
operation below autograd, and writes these operations into a graph. Parameters and buffers are
inputs of the graph, so that executing it sees every in-place change of them.

What cannot be replayed is refused with :class:`TraceError`: Python that reads a tensor on the
host and may decide otherwise the next time, shapes that depend on values (``x[x > 0]``), and random
numbers of a generator of its own. Two reads are harmless: checks of libraries that values
are finite, which are left out, and reads of settings that depend on nothing that varies (the bounds
of an action); :meth:`Recording.is_valid` notices when these change.
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
"""Arguments (running statistics) that operations write to without saying so."""

_SEEN_BY_PYTHON = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""Tags of operations whose result, or its shape, Python sees: it depends on values."""
_PAST_OPERATIONS = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__})
"""Methods that read the memory of a tensor."""
_READS = "reads a tensor on the host"
_version = operator.attrgetter("_version")


class TraceError(Exception):
    """The function decides something on the host, so it is not a fixed list of operations.

    No ``RuntimeError``: those of PyTorch are handled in many places.
    """


@dataclass
class Recording:
    """A function of tensors as a graph.

    The graph's placeholders are the inputs that are read, then the constants.
    """

    graph: fx.Graph
    inputs: list[Tensor]
    """inputs that are read, as they were when recording; cleared once a program is built."""
    inputs_read: list[int]
    """positions of these inputs among the function's."""
    inputs_changed: list[int]
    """positions of the inputs that the function writes to in place."""
    constants: list[Tensor]
    """tensors that are read but neither given nor made: parameters and buffers."""
    changed: list[Tensor]
    """tensors other than inputs that the function writes to in place, views included."""
    before: list[tuple[Tensor, Tensor]]
    """tensors that were written to in place, with their values before; cleared as ``inputs``."""
    _settings: list[Tensor]
    """tensors whose values Python has read."""
    _asked: list[Tensor]
    """those of the host of which it has only asked whether they are zero."""
    _pinned: list[Tensor]
    """tensors that the graph knows by a view made while recording."""

    def __post_init__(self) -> None:
        self._note()

    def _note(self) -> None:
        """Note what settings and addresses are."""
        self._versions = [*map(_version, self._settings)]
        self._shown = [tensor.detach().numpy() for tensor in self._settings if _is_array(tensor)]
        self._values = [array.tobytes() for array in self._shown]
        self._asked_of = [tensor.detach().numpy() for tensor in self._asked]
        self._truths = [*map(bool, self._asked_of)]
        self._pinned += self._settings + self._asked
        self._addresses = [*map(Tensor.data_ptr, self._pinned)]

    @property
    def operations(self) -> list[str]:
        """Names of the operations, in order."""
        return [
            str(n.target) for n in self.graph.nodes if isinstance(n.target, torch._ops.OpOverload)
        ]

    def is_valid(self) -> bool:
        """Return whether settings that Python has read, and addresses of views, are unchanged.

        Of settings on a device only the versions are compared, which miss changes of ``data``:
        reading them would wait for the device.
        """
        return (
            [*map(_version, self._settings)] == self._versions
            and [array.tobytes() for array in self._shown] == self._values
            and [*map(bool, self._asked_of)] == self._truths
            and [*map(Tensor.data_ptr, self._pinned)] == self._addresses
        )

    def restore(self) -> None:
        """Give the tensors that were changed in place the values that they had before."""
        _restore(self.before)

    def pin_constants(self) -> None:
        """Require what a CUDA graph does: constants to stay where they are, and as on the host."""
        self._pinned += self.constants
        self._settings += [tensor for tensor in self.constants if tensor.is_cpu]
        self._note()


def record(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
) -> tuple[Recording, Sequence[Tensor]]:
    """Call ``function`` once and return what it did, and its outputs.

    The call is a real one: random numbers are drawn and buffers change, once.

    Args:
        function: takes the inputs, returns a sequence of tensors; gradients it computes with
            ``torch.autograd.grad`` are recorded with it.
        inputs: tensors, no two of which may share memory.

    Raises:
        TraceError: if the function reads a tensor on the host that may differ in the next call,
            other than in a library's check that values are finite. Tensors that it had changed in
            place have their values back.
    """
    recorder = _Recorder(inputs)
    # Checks of distribution arguments read the host and only raise; they are no part of a program.
    checked = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        with recorder, _PastOperations(recorder):
            outputs = function(*inputs)
        return recorder.finish(outputs), outputs
    except TraceError:
        _restore(recorder.saved.values())
        raise
    finally:
        torch.distributions.Distribution.set_default_validate_args(checked)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes every operation below autograd into a graph.

    The nodes' ``meta`` hold, while recording: ``value``, which keeps the tensor alive so that its
    address and identity stay its own; ``varies``, whether it may differ in the next call; and
    ``settings``, the tensors it depends on if it does not.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.read: dict[int, Tensor] = {}
        self.asked: dict[int, Tensor] = {}
        self.asks_truth = False  # whether all that Python reads now is whether something is zero
        self._nodes: dict[int, fx.Node] = {}
        self._places: dict[Any, fx.Node] = {}
        self._constants: dict[fx.Node, None] = {}  # in the order in which they were found
        self._viewed: dict[int, Tensor] = {}
        self._alive: list[Any] = []
        self._made: set[int] = set()
        self.saved: dict[Any, tuple[Tensor, Tensor]] = {}
        self._became: dict[int, int] = {}  # memory of nodes that were replaced
        self._inputs = [self._placeholder(tensor, varies=True) for tensor in inputs]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if function.namespace == "profiler":  # optimisers mark their steps for PyTorch's profiler
            return function(*args, **kwargs)
        dynamic = torch.Tag.dynamic_output_shape in function.tags
        for tensor in _seen_by_python(function, args):
            self.allow_read(tensor, "makes a shape that depends on values" if dynamic else _READS)
        if torch.Tag.data_dependent_output in function.tags:
            return function(*args, **kwargs)
        if any(isinstance(value, torch.Generator) for value in kwargs.values()):
            raise TraceError("it draws random numbers from a generator of its own")
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
            # Autograd makes many views of the same memory in the same way: `detach`, a transpose
            # of a transpose. One stands for all.
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
        """Let ``node`` stand for a result, with further nodes for the tensors of a list."""
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
        """Return the node of a tensor; one that is neither given nor made is a constant."""
        if id(tensor) not in self._nodes:
            self._constant(tensor, varies=tensor.requires_grad)
        return self._nodes[id(tensor)]

    def _constant(self, tensor: Tensor, varies: bool = False) -> fx.Node:
        node = self._placeholder(tensor, varies)
        self._constants[node] = None
        return node

    def _constant_view(self, view: Tensor, reads: Sequence[fx.Node]) -> None:
        """Take a view of a parameter as a constant of its own: it shows every later change."""
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

    # ------------------------------------------------------------------ tensors changed in place
    def _save_changed(self, function: Any, args: Any, kwargs: Any) -> None:
        """Save, before an operation writes to them, tensors that the function has not made."""
        for tensor in tensors_in(_written(function, args, kwargs)):
            if _memory(tensor) not in self._made and _place(tensor) not in self.saved:
                self.saved[_place(tensor)] = (tensor, tensor.clone())

    # ------------------------------------------------------------------ reads on the host
    def allow_read(self, tensor: Tensor, what: str = _READS) -> None:
        """Record that Python reads a tensor; ``what`` describes the read in the error.

        Raises:
            TraceError: if it may differ in the next call.
        """
        node = self._node(tensor)
        if not node.meta["varies"]:
            itself = id(tensor) in node.meta["settings"] and _is_array(tensor)
            known = self.asked if self.asks_truth and itself else self.read
            known |= node.meta["settings"]
        elif not (_asks_whether_finite(node) and _is_read_by_a_library()):
            raise TraceError(f"it {what} at {_place_in_python()}")

    def _refuse_what_decides_otherwise_next_time(self) -> None:
        """Refuse a function that writes to what it has read on the host: a counter of its calls."""
        written = {_memory(tensor) for tensor, _ in self.saved.values()}
        if written & {_memory(tensor) for tensor in (*self.read.values(), *self.asked.values())}:
            raise TraceError("it reads a tensor on the host that it writes to")

    # ------------------------------------------------------------------ the end
    def _replace(self, node: fx.Node, other: fx.Node) -> None:
        """Use ``other`` in place of ``node``; views of the one are views of the other then."""
        pairs = zip(tensors_in(node.meta["value"]), tensors_in(other.meta["value"]))
        for one, another in pairs:
            before, after = self._present(_memory(one)), self._present(_memory(another))
            if before != after:  # or views of both would stand for each other for ever
                self._became[before] = after
        node.replace_all_uses_with(other)

    def _present(self, memory: int) -> int:
        """What memory became when its node was replaced."""
        while memory in self._became:
            memory = self._became[memory]
        return memory

    def _shown(self, memories: Callable[[fx.Node], set[int]]) -> Callable[[fx.Node], set[int]]:
        """Memory that nodes show now that others have taken the place of some."""
        return lambda node: set(map(self._present, memories(node)))

    def finish(self, outputs: Sequence[Tensor]) -> Recording:
        """Return the recording, without operations whose results are unused or known already."""
        self._refuse_what_decides_otherwise_next_time()
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
            _asked=[*self.asked.values()],
            _pinned=list(self._viewed.values()),
        )
        for node in {*self._inputs, *self._constants} & {*self.graph.nodes}:
            if not node.users:
                self.graph.erase_node(node)
        for node in self.graph.nodes:  # lets go of the tensors
            node.meta = _facts(node.meta.get("value"))
        return recording


class _PastOperations(TorchFunctionMode):
    """Reports reads of tensors by NumPy and lists, which are no operations, to a recorder."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if function in _PAST_OPERATIONS:
            self._recorder.allow_read(args[0])
        self._recorder.asks_truth = function is Tensor.__bool__
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self._recorder.asks_truth = False


def _restore(saved: Reversible[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for tensor, value in reversed(saved):
            tensor.copy_(value)


def _facts(value: Any) -> dict[str, Any]:
    """What executors ask of a value that was recorded."""
    if isinstance(value, (list, tuple)):
        return {"length": len(value)}
    strided = isinstance(value, Tensor) and value.layout is torch.strided
    place = {"shape": value.shape, "stride": value.stride()} if strided else {}
    known = {name: getattr(value, name, None) for name in ("dtype", "device")}
    return {**known, **place}


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, a list or a tuple."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _seen_by_python(function: Any, args: Sequence[Any]) -> list[Tensor]:
    """Arguments whose values Python sees: as the result, or as its shape."""
    if _SEEN_BY_PYTHON.isdisjoint(function.tags):
        return []
    if function is aten.index.Tensor:  # by numbers, shapes are known
        return [one for one in tensors_in(args[1]) if not one.dtype.is_signed]
    return tensors_in(args)


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments that an operation writes to."""
    found = []
    for number, argument in enumerate(function._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or number in _UNDECLARED.get(function, ()):
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return found


def _memories(node: fx.Node) -> set[int]:
    """Addresses of the memory that a recorded value shows."""
    return {_memory(tensor) for tensor in tensors_in(node.meta["value"])}


def _memories_written(node: fx.Node) -> set[int]:
    """Addresses of the memory that a recorded operation writes to."""
    if node.target is operator.getitem:
        return set()
    found: set[int] = set()
    written = _written(node.target, node.args, node.kwargs)
    fx.map_arg(written, lambda argument: found.update(_memories(argument)))
    return found


def _memory(tensor: Tensor) -> int:
    """Address of the storage that a tensor shows; its identity where there is none."""
    if tensor.numel() == 0 or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _place(tensor: Tensor) -> Any:
    """What a tensor shows: memory, offset, shape, strides, type."""
    if tensor.numel() == 0 or tensor.layout is not torch.strided:
        return id(tensor)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def share_no_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, cloned where one shows what another one does: later they may differ."""
    seen: set[Any] = set()
    separate = []
    for tensor in tensors:
        separate.append(tensor.clone() if _place(tensor) in seen else tensor)
        seen.add(_place(tensor))
    return separate


def _is_array(tensor: Tensor) -> bool:
    """Whether NumPy shows the values of a tensor."""
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.dtype is not torch.bfloat16


def _asks_whether_finite(node: fx.Node) -> bool:
    """Whether a value is ``x.isfinite().all()`` or ``x.isnan().any()``."""
    if node.target not in (aten.all.default, aten.any.default):
        return False
    inner: Any = node.args[0]
    if node.target is aten.any.default:
        is_nan = inner.target is aten.ne.Tensor and inner.args[0] is inner.args[1]
        return is_nan or inner.target is aten.isnan.default
    if inner.target is not aten.mul.Tensor:
        return False
    return {str(part.target) for part in inner.args} == {"aten.eq.Tensor", "aten.ne.Scalar"}


def _is_read_by_a_library() -> bool:
    """Return whether a library reads a tensor now. Custom code may repair values not finite."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"].startswith(("kit.fast.", "torch._")):
        frame = frame.f_back
    return frame.f_globals["__name__"].split(".")[0] in ("torch", "torchrl", "kit")


def _place_in_python() -> str:
    """The file, the line and its text, of what is neither PyTorch's nor of this package."""
    own = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith(own)]
    where = frames[-1] if frames else None
    place = f"{where.filename.split('site-packages/')[-1]}:{where.lineno}" if where else "unknown"
    return f"{place}: {where.line if where else ''}"
