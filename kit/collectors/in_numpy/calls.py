"""Two ways of making operations with NumPy: in every step, and for all steps at once."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kit.fast.old_trace import Operation, tensors_in, tensors_read

Array = NDArray[Any]
Function = Callable[..., Any]

ONE_THREAD = 64**3
"""Rows times columns times depth of the largest product that OpenBLAS surely makes on one thread;
from there on PyTorch is no slower, either."""


class NotInNumpy(RuntimeError):
    """NumPy cannot make an operation, or not the same way."""


class Prepared:
    """An operation with what has to be known of it to make it.

    Args:
        operation: as it was recorded.
        make: makes it: takes what it is made on, and all arguments.

    Raises:
        NotInNumpy: if it is too large.
    """

    def __init__(self, operation: Operation, make: Callable[..., Any]) -> None:
        name = str(operation.function).removeprefix("aten.")
        self.make = make
        self.reads = [(id(tensor), tensor.ndim) for tensor in tensors_read(operation)]
        self.results = [id(tensor) for tensor in tensors_in(operation.result)]
        self.shape = tuple(tensors_in(operation.result)[0].shape)
        pointwise = torch.Tag.pointwise in operation.function.tags
        self.broadcasts = pointwise or name == "expand.default"
        arguments = list(operation.arguments)
        for argument in operation.function._schema.arguments[len(arguments) :]:
            default = argument.default_value if argument.has_default_value() else None
            arguments.append(operation.keywords.get(argument.name, default))
        self._arguments = arguments
        if name in ("addmm.default", "mm.default"):
            _check_size(*tensors_read(operation)[-2:])

    def arguments(self, arrays: Mapping[int, Array]) -> list[Any]:
        """Return all arguments in the order of the schema, with arrays for tensors."""
        return [_with_arrays(argument, arrays) for argument in self._arguments]

    def note(self, made: Any, arrays: dict[int, Array]) -> None:
        """Put what was made among the arrays."""
        arrays.update(zip(self.results, made if isinstance(made, list) else [made], strict=True))


def _check_size(left: Tensor, right: Tensor) -> None:
    (rows, depth), columns = left.shape, right.shape[1]
    if rows * depth * columns > ONE_THREAD:
        sizes = f"{rows} x {depth} x {columns}"
        raise NotInNumpy(f"a product of {sizes} is so large that PyTorch is no slower")


def _with_arrays(value: Any, arrays: Mapping[int, Array]) -> Any:
    if isinstance(value, Tensor):
        return arrays[id(value)]
    if isinstance(value, (list, tuple)):
        return [_with_arrays(item, arrays) for item in value]
    return value


class On(ABC):
    """What an operation is made on.

    Attributes:
        leading: dimensions that the first argument has before those it was recorded with.
        dimensions: that the first argument was recorded with.
        shape: of the result, as it was recorded.
    """

    leading: tuple[int, ...] = ()
    dimensions = 0
    shape: tuple[int, ...] = ()

    @abstractmethod
    def call(self, function: Function, *arguments: Any) -> Array:
        """Call a function that takes ``out``, and return its result."""

    @abstractmethod
    def view(self, value: Array, shown: Array) -> Array:
        """Return ``shown``, which has to show the memory of ``value``."""

    def axis(self, dimension: int) -> int:
        """Return a dimension counted from the last one, where more may be before the first."""
        return dimension - self.dimensions if dimension >= 0 else dimension

    def reshaped(self, value: Array) -> Array:
        """Return ``value`` in the shape of the recorded result."""
        return self.view(value, value.reshape(self.leading + self.shape))

    def _turn_to(self, prepared: Prepared) -> None:
        self.dimensions = prepared.reads[0][1] if prepared.reads else 0
        self.shape = prepared.shape


class StepByStep(On):
    """One step: results are written to buffers that exist already.

    NumPy needs twice as long for operands of different shapes as for equal ones, so numbers and
    arrays that stay the same within a batch are spread to the shape of the result beforehand.

    Args:
        fixed: arrays that stay the same within a batch, by the identity of the tensor.

    Attributes:
        arrays: of the tensors, by identity; results are added.
        calls: function and arguments of each call that a step makes, its buffer among them.
        spread: buffers, each with the fixed array that it holds.
    """

    def __init__(self, fixed: Mapping[int, Array]) -> None:
        self.arrays = dict(fixed)
        self.calls: list[tuple[Function, tuple[Any, ...]]] = []
        self.spread: list[tuple[Array, Array]] = []
        self._fixed = {id(array) for array in fixed.values()}

    def make(self, prepared: Prepared) -> None:
        """Make an operation once, and note what has to be called to make it again."""
        self._turn_to(prepared)
        made = prepared.make(self, *prepared.arguments(self.arrays))
        prepared.note(made, self.arrays)

    def call(self, function: Function, *arguments: Any) -> Array:
        """Call it, and again in each step, with the result in the same memory."""
        result = np.asarray(function(*arguments))
        if isinstance(function, np.ufunc):
            arguments = self._spread_out(arguments, result.shape)
        last = isinstance(function, np.ufunc) or function in _TAKE_OUT_LAST
        if last and function not in _TAKE_OUT_BY_NAME:
            self.calls.append((function, (*arguments, result)))
            return result
        self.calls.append((functools.partial(function, out=result), arguments))
        return result

    def _spread_out(self, arguments: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
        arrays = [argument for argument in arguments if isinstance(argument, np.ndarray)]
        spread = []
        for argument in arguments:
            if not isinstance(argument, np.ndarray):
                argument = np.full(shape, argument, arrays[0].dtype)
            elif argument.shape != shape and id(argument) in self._fixed:
                buffer = np.broadcast_to(argument, shape).copy()
                self.spread.append((buffer, argument))
                argument = buffer
            spread.append(argument)
        return tuple(spread)

    def view(self, value: Array, shown: Array) -> Array:
        """Check that it is one."""
        if shown.size and not np.may_share_memory(value, shown):
            raise NotInNumpy("a view of a tensor is none of its array")
        return shown


_TAKE_OUT_LAST: tuple[Any, ...] = (np.dot, np.ndarray.argmax)
"""Functions besides NumPy's universal ones that take where the result goes as last argument: a
name costs a third of the call."""
_TAKE_OUT_BY_NAME: tuple[Any, ...] = (np.maximum, np.minimum)
"""Universal functions where NumPy advises against that."""


class AtOnce(On):
    """All steps of a batch at once: arrays have one dimension more, in front.

    Args:
        steps: of the batch.
        fixed: arrays that are the same in every step, by the identity of the tensor.
        arrays: ``[steps, ...]``; results are added.
    """

    def __init__(self, steps: int, fixed: dict[int, Array], arrays: dict[int, Array]) -> None:
        self.steps, self._fixed, self._arrays = steps, fixed, arrays

    def cut(self, steps: int) -> None:
        """Leave the first steps only."""
        if steps < self.steps:
            self.steps = steps
            self._arrays.update({key: array[:steps] for key, array in self._arrays.items()})

    def make(self, operations: Sequence[Prepared]) -> None:
        """Make operations, one after the other."""
        with np.errstate(all="ignore"):
            for prepared in operations:
                self._turn_to(prepared)
                reads = prepared.reads
                self.leading = (self.steps,) if reads and reads[0][0] in self._arrays else ()
                rank = len(self.shape) if prepared.broadcasts else 0
                arrays = {place: self._with_rank(place, known, rank) for place, known in reads}
                prepared.note(prepared.make(self, *prepared.arguments(arrays)), self._arrays)

    def _with_rank(self, place: int, known: int, rank: int) -> Array:
        """Return an array, with dimensions of size one between steps and others if need be."""
        array = self._arrays.get(place)
        if array is None:
            return self._fixed[place]
        missing = (1,) * (rank - known)
        return array.reshape(array.shape[0], *missing, *array.shape[1:]) if missing else array

    def array(self, tensor: Tensor) -> Array:
        """Return what was made for a tensor, ``[steps, ...]``."""
        if id(tensor) in self._arrays:
            return self._arrays[id(tensor)]
        one = self._fixed[id(tensor)]
        whole = np.empty((self.steps, *one.shape), one.dtype)
        whole[...] = one
        return whole

    def call(self, function: Function, *arguments: Any) -> Array:
        """Call it."""
        made: Array = function(*arguments)
        return made

    def view(self, value: Array, shown: Array) -> Array:
        """Return it, view or not."""
        del value
        return shown
