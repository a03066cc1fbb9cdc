"""Run a function of tensors once, and from then on as a flat list of tensor operations.

A TensorDict module or loss spends most of a small network's time on Python: keys, modules,
distributions. :func:`trace` calls the function once, notes every tensor operation it makes (with
the backward pass, if the function computes gradients) and returns a :class:`FlatProgram` that makes
the same operations on new inputs: same kernels, same order, same random numbers, bitwise the same
results. Parameters and buffers are read where they live, so a program sees every in-place change.

What a program cannot follow is refused with :class:`NotTraceable`: Python that reads a tensor on
the host and may decide something else the next time. Two reads are harmless: checks that values are
finite, which are left out, and reads of settings that depend on nothing that varies (the bounds of
an action); a program notices when these change.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kit.fast.old_executors import flat_function

aten = torch.ops.aten


class NotTraceable(RuntimeError):
    """The function decides something on the host, so it is not a fixed list of operations."""


@dataclass
class Operation:
    """One tensor operation: its function, its arguments and what it returned while tracing."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    result: Any


@dataclass(frozen=True)
class Recorded:
    """What a flat program was made of."""

    operations: list[Operation]
    inputs: list[Tensor]
    """those that are read."""
    outputs: list[Tensor]
    constants: list[Tensor]
    """read, but neither given nor made: parameters and buffers."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation below autograd, and refuses reads of tensors that vary on the host.

    Args:
        inputs: of the function.
        split: whether to make :data:`_PARTS` of an operation in place of it.
    """

    def __init__(self, inputs: Sequence[Tensor], split: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._split = split
        self.operations: list[Operation] = []
        self.read: dict[int, Tensor] = {}
        self._made_by: dict[int, Operation] = {}
        self._varying = {id(tensor) for tensor in inputs}
        self._settings: dict[int, dict[int, Tensor]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if self._split and not kwargs and function in _PARTS:
            result = _PARTS[function](self._note, *args)
            if result is not None:
                return result
        return self._note(function, *args, **(kwargs or {}))

    def _note(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        operation = Operation(function, args, kwargs, result)
        if function is aten._local_scalar_dense.default:
            if id(args[0]) not in self._varying:
                self.read |= self._settings.get(id(args[0]), {id(args[0]): args[0]})
            elif not self._asks_whether_finite(args[0]):
                raise NotTraceable(_host_read())
            return result
        self.operations.append(operation)
        self._follow(operation)
        return result

    def _follow(self, operation: Operation) -> None:
        """Note what the results of an operation depend on: what varies, or settings alone."""
        reads = tensors_read(operation)
        varies = torch.Tag.nondeterministic_seeded in operation.function.tags
        settings: dict[int, Tensor] = {}
        for tensor in reads:
            made = id(tensor) in self._made_by
            varies |= id(tensor) in self._varying or (not made and tensor.requires_grad)
            settings |= self._settings.get(id(tensor), {} if made else {id(tensor): tensor})
        for tensor in tensors_in(operation.result):
            self._made_by[id(tensor)] = operation
            self._settings[id(tensor)] = settings
            if varies:
                self._varying.add(id(tensor))

    def _asks_whether_finite(self, value: Tensor) -> bool:
        """Whether ``value`` is ``x.isfinite().all()`` or ``x.isnan().any()``, which only check."""
        made = self._made_by.get(id(value))
        if made is None or made.function not in (aten.all.default, aten.any.default):
            return False
        inner = self._made_by.get(id(made.arguments[0]))
        if inner is None:
            return False
        if made.function is aten.any.default:
            return inner.function is aten.ne.Tensor and inner.arguments[0] is inner.arguments[1]
        if inner.function is not aten.mul.Tensor:
            return False
        parts = [self._made_by.get(id(tensor)) for tensor in inner.arguments]
        names = {str(part.function) for part in parts if part is not None}
        return names == {"aten.eq.Tensor", "aten.ne.Scalar"}


def _multinomial(
    note: Callable[..., Any], weights: Tensor, count: int, replacement: bool = False
) -> Tensor | None:
    """Draw one choice as PyTorch does: the winner of an exponential race.

    Bitwise the same, but the random numbers are drawn by an operation of their own, and the weights
    are not checked.
    """
    del replacement
    if count != 1 or weights.is_cuda:
        return None
    waiting = note(aten.exponential_.default, note(aten.empty_like.default, weights))
    winner: Tensor = note(aten.argmax.default, note(aten.div.Tensor, weights, waiting), -1, True)
    return winner


_PARTS: dict[Any, Callable[..., Any]] = {aten.multinomial.default: _multinomial}
"""Operations that draw random numbers and do something else with them, in parts."""


def _host_read() -> str:
    frames = [f for f in traceback.extract_stack() if "torch/" not in f.filename.replace("\\", "/")]
    frames = [f for f in frames if "/kit/fast/" not in f.filename]
    where = frames[-1] if frames else None
    place = f"{where.filename.split('site-packages/')[-1]}:{where.lineno}" if where else "unknown"
    return f"it reads a tensor on the host at {place}: {where.line if where else ''}"


class FlatProgram:
    """A traced function: call it with tensors like those it was traced with.

    Attributes:
        inputs_read: numbers of the traced inputs that the function reads; a call gives only these.
        constants: tensors that the function reads from outside: parameters and buffers.
        operations: names of the operations that are executed, in order.
        interpreter: ``"graph"`` (C++) or ``"python"``.
        changes_constants: whether a call changes tensors that the function did not make.
        settings: tensors whose values Python has read while tracing.
        recorded: what the program was made of, where that was to be kept.
    """

    settings: Sequence[Tensor] = ()
    recorded: Recorded | None = None
    _versions: Sequence[int] = ()

    def __init__(
        self,
        operations: list[Operation],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        compile: bool = False,
        keep: bool = False,
    ) -> None:
        operations, outputs = _without_repeated_views(operations, inputs, outputs)
        operations, shown = _without_fixed_views(operations, inputs)
        self._shown = [(tensor, tensor.data_ptr()) for tensor in shown]
        operations = _needed(operations, outputs)
        read = {id(tensor) for operation in operations for tensor in tensors_read(operation)}
        read.update(id(tensor) for tensor in outputs)
        self.inputs_read = [n for n, tensor in enumerate(inputs) if id(tensor) in read]
        inputs = [inputs[number] for number in self.inputs_read]
        self.operations = [str(operation.function) for operation in operations]
        self.constants = _constants(operations, inputs, outputs)
        self.changes_constants = _changes_given(operations)
        if keep:
            self.recorded = Recorded(operations, inputs, list(outputs), self.constants)
        self._run, self.interpreter = flat_function(
            operations, [*inputs, *self.constants], outputs, compile
        )

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the function's tensors for new ``inputs`` of the traced shapes and types.

        Only the inputs that the function reads are given (``inputs_read``). To be called without
        gradients (``torch.no_grad``): those of the function are part of it.
        """
        return self._run(*inputs, *self.constants)

    def assume(self, settings: Sequence[Tensor]) -> None:
        """Take the present values of ``settings`` for granted."""
        self.settings = settings
        self._versions = [tensor._version for tensor in settings]

    def is_valid(self) -> bool:
        """Whether what was taken for granted still holds.

        That no setting that Python has read while tracing was changed in place since, and that
        parameters and buffers are where they were.
        """
        unchanged = all(t._version == version for t, version in zip(self.settings, self._versions))
        return unchanged and all(tensor.data_ptr() == place for tensor, place in self._shown)


def trace(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    compile: bool = False,
    keep: bool = False,
) -> tuple[FlatProgram, Sequence[Tensor]]:
    """Call ``function`` once and return it as a flat program, with what the call returned.

    The call is a real one: random numbers are drawn and buffers change, once.

    Args:
        function: takes the inputs, returns a sequence of tensors; gradients it computes with
            ``torch.autograd.grad`` are part of the program.
        inputs: tensors of the shapes and types that the program will be called with.
        compile: whether ``torch.compile`` compiles the program, which then rounds differently.
        keep: whether the program keeps what it was made of, with every tensor of the call, and
            random numbers are drawn by operations of their own.

    Raises:
        NotTraceable: if the function reads a tensor on the host, other than to check that values
            are finite.
    """
    inputs = _apart(inputs)
    recorder = _Recorder(inputs, split=keep)
    # Checks of distribution arguments read the host and only raise; they are no part of a program.
    checked = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        with recorder:
            outputs = function(*inputs)
    finally:
        torch.distributions.Distribution.set_default_validate_args(checked)
    program = FlatProgram(recorder.operations, inputs, outputs, compile, keep)
    program.assume(list(recorder.read.values()))
    return program, outputs


def _apart(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return inputs of which no two show the same memory: in another call they may not."""
    seen: set[Any] = set()
    apart = []
    for tensor in inputs:
        apart.append(tensor.clone() if _place(tensor) in seen else tensor)
        seen.add(_place(tensor))
    return apart


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, a list or a tuple."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def tensors_read(operation: Operation) -> list[Tensor]:
    """Return the tensors among the arguments of an operation."""
    return tensors_in(operation.arguments) + tensors_in(tuple(operation.keywords.values()))


def _is_view(operation: Operation) -> bool:
    returns = operation.function._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _without_repeated_views(
    operations: list[Operation], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> tuple[list[Operation], list[Tensor]]:
    """Let one tensor stand for all that show the same memory in the same way.

    Autograd makes many of these: ``detach``, a transpose of a transpose, a reshape to the same
    shape. All tensors of a trace are alive, so the same address means the same memory.
    """
    first: dict[Any, Tensor] = {_place(tensor): tensor for tensor in inputs}
    stands_for: dict[int, Tensor] = {}

    def canonical(value: Any) -> Any:
        if isinstance(value, Tensor):
            return stands_for.get(id(value), value)
        if isinstance(value, (list, tuple)):
            return type(value)(canonical(item) for item in value)
        return value

    kept = []
    for operation in operations:
        result = operation.result
        if isinstance(result, Tensor) and _is_view(operation) and _place(result) in first:
            stands_for[id(result)] = first[_place(result)]
            continue
        for tensor in (*tensors_read(operation), *tensors_in(result)):
            if id(tensor) not in stands_for:
                first.setdefault(_place(tensor), tensor)
        arguments = canonical(operation.arguments)
        keywords = {name: canonical(value) for name, value in operation.keywords.items()}
        kept.append(Operation(operation.function, arguments, keywords, canonical(result)))
    return kept, [canonical(tensor) for tensor in outputs]


def _place(tensor: Tensor) -> Any:
    """What a tensor shows: memory, offset, shape, strides, type."""
    if tensor.numel() == 0 or tensor.is_sparse:
        return id(tensor)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _without_fixed_views(
    operations: list[Operation], inputs: Sequence[Tensor]
) -> tuple[list[Operation], list[Tensor]]:
    """Drop views of parameters and buffers: one made while tracing shows every later change.

    Returns:
        The other operations, and the tensors that the dropped ones show.
    """
    varying = {id(tensor) for tensor in inputs}
    kept: list[Operation] = []
    shown: dict[int, Tensor] = {}
    views: set[int] = set()
    for operation in operations:
        reads = tensors_read(operation)
        if _is_view(operation) and reads and not any(id(tensor) in varying for tensor in reads):
            shown |= {id(tensor): tensor for tensor in reads if id(tensor) not in views}
            views.update(id(tensor) for tensor in tensors_in(operation.result))
            continue
        kept.append(operation)
        varying.update(id(tensor) for tensor in tensors_in(operation.result))
    return kept, list(shown.values())


def _needed(operations: list[Operation], outputs: Sequence[Tensor]) -> list[Operation]:
    """Drop operations whose results nobody uses; those that change a tensor in place stay."""
    used = {id(tensor) for tensor in outputs}
    kept = []
    for operation in reversed(operations):
        changes = operation.function._schema.is_mutable
        if changes or any(id(tensor) in used for tensor in tensors_in(operation.result)):
            kept.append(operation)
            used.update(id(tensor) for tensor in tensors_read(operation))
    return kept[::-1]


def _changes_given(operations: list[Operation]) -> bool:
    """Whether an operation changes a tensor in place that none of the operations made."""
    made: set[int] = set()
    for operation in operations:
        if operation.function._schema.is_mutable:
            for argument, value in zip(operation.function._schema.arguments, operation.arguments):
                writes = argument.alias_info is not None and argument.alias_info.is_write
                if writes and any(id(tensor) not in made for tensor in tensors_in(value)):
                    return True
        made.update(id(tensor) for tensor in tensors_in(operation.result))
    return False


def _constants(
    operations: list[Operation], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> list[Tensor]:
    """Tensors that are read but neither given nor made."""
    known = {id(tensor) for tensor in inputs}
    constants = []
    for operation in operations:
        for tensor in tensors_read(operation):
            if id(tensor) not in known:
                known.add(id(tensor))
                constants.append(tensor)
        known.update(id(tensor) for tensor in tensors_in(operation.result))
    constants += [tensor for tensor in outputs if id(tensor) not in known]
    return constants
