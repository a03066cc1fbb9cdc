"""The operations of PyTorch that NumPy makes for a policy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kit.collectors.in_numpy.calls import Array, Function, NotInNumpy, On, Prepared
from kit.fast.old_trace import Operation


def prepared(operation: Operation) -> Prepared:
    """Return an operation ready to be made.

    Raises:
        NotInNumpy: if NumPy does not make it.
    """
    make = OPERATIONS.get(str(operation.function).removeprefix("aten."))
    if make is None:
        raise NotInNumpy(f"{operation.function} is not among the operations that it makes")
    return Prepared(operation, make)


def _same(function: Function) -> Callable[..., Array]:
    """An operation whose arguments are those of a function of NumPy."""
    return lambda on, *arguments: on.call(function, *arguments)


def _shown(on: On, value: Array, *_: Any) -> Array:
    """A view that is known by its shape."""
    return on.reshaped(value)


def _product(on: On, left: Array, right: Array) -> Array:
    return on.call(np.dot if right.ndim == 2 else np.matmul, left, right)


def _addmm(on: On, bias: Array, left: Array, right: Array, beta: Any = 1, alpha: Any = 1) -> Array:
    if beta != 1 or alpha != 1:
        raise NotInNumpy("addmm with factors")
    return on.call(np.add, _product(on, left, right), bias)


def _scaled(on: On, value: Any, factor: Any) -> Any:
    return value if factor == 1 else on.call(np.multiply, value, factor)


def _add(on: On, one: Array, other: Any, alpha: Any = 1) -> Array:
    return on.call(np.add, one, _scaled(on, other, alpha))


def _subtract(on: On, one: Array, other: Any, alpha: Any = 1) -> Array:
    return on.call(np.subtract, one, _scaled(on, other, alpha))


def _subtract_from(on: On, one: Array, other: Any, alpha: Any = 1) -> Array:
    return on.call(np.subtract, other, _scaled(on, one, alpha))


def _addcmul(on: On, value: Array, one: Array, other: Array, factor: Any = 1) -> Array:
    return on.call(np.add, value, _scaled(on, on.call(np.multiply, one, other), factor))


def _power(on: On, value: Array, exponent: Any) -> Array:
    if exponent == 2:
        return on.call(np.multiply, value, value)
    return on.call(np.power, value, exponent)


def _relu(on: On, value: Array) -> Array:
    return on.call(np.maximum, value, 0)


def _clamp(on: On, value: Array, least: Any = None, most: Any = None) -> Array:
    if least is not None:
        value = on.call(np.maximum, value, least)
    return value if most is None else on.call(np.minimum, value, most)


def _clamp_max(on: On, value: Array, most: Any) -> Array:
    return on.call(np.minimum, value, most)


def _softplus(on: On, value: Array, beta: Any = 1, threshold: Any = 20) -> Array:
    del threshold  # from there on PyTorch returns the value, which softplus equals in float32
    if beta != 1:
        raise NotInNumpy("softplus with a factor")
    return on.call(np.logaddexp, value, 0)


def _sigmoid(on: On, value: Array) -> Array:
    minus = on.call(np.negative, on.call(np.logaddexp, on.call(np.negative, value), 0))
    return on.call(np.exp, minus)


def _silu(on: On, value: Array) -> Array:
    return on.call(np.multiply, value, _sigmoid(on, value))


def _elu(on: On, value: Array, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Array:
    if scale != 1 or input_scale != 1:
        raise NotInNumpy("elu with factors")
    below = on.call(np.expm1, on.call(np.minimum, value, 0))
    return on.call(np.add, on.call(np.maximum, value, 0), _scaled(on, below, alpha))


def _reduced(on: On, function: Any, value: Array, dims: Sequence[int] | int | None) -> Array:
    """Reduce dimensions to size one."""
    if isinstance(dims, int):
        dims = [dims]
    dims = dims or range(-on.dimensions, 0)
    axes: Any = tuple(on.axis(dimension) for dimension in dims)
    axes = axes[0] if len(axes) == 1 else axes  # NumPy needs half the time for a number
    return on.call(functools.partial(function.reduce, axis=axes, keepdims=True), value)


def _sum(on: On, value: Array, dims: Any = None, keep: bool = False, dtype: Any = None) -> Array:
    del keep
    if dtype is not None or value.dtype.kind != "f":
        raise NotInNumpy("a sum in another type")
    return on.reshaped(_reduced(on, np.add, value, dims))


def _mean(on: On, value: Array, dims: Any = None, keep: bool = False, dtype: Any = None) -> Array:
    del keep
    if dtype is not None:
        raise NotInNumpy("a mean in another type")
    total = _reduced(on, np.add, value, dims)
    count = math.prod(value.shape) // max(math.prod(total.shape), 1)
    return on.reshaped(on.call(np.true_divide, total, count))


def _shifted(on: On, value: Array, dimension: int) -> tuple[Array, Array]:
    """Return values less the greatest one, and the sum of their exponentials."""
    less = on.call(np.subtract, value, _reduced(on, np.maximum, value, dimension))
    return less, _reduced(on, np.add, on.call(np.exp, less), dimension)


def _log_softmax(on: On, value: Array, dimension: int, half: bool = False) -> Array:
    del half
    less, total = _shifted(on, value, dimension)
    return on.call(np.subtract, less, on.call(np.log, total))


def _softmax(on: On, value: Array, dimension: int, half: bool = False) -> Array:
    return on.call(np.exp, _log_softmax(on, value, dimension, half))


def _logsumexp(on: On, value: Array, dims: Sequence[int], keep: bool = False) -> Array:
    del keep
    (dimension,) = dims
    _, total = _shifted(on, value, dimension)
    greatest = _reduced(on, np.maximum, value, dimension)
    return on.reshaped(on.call(np.add, on.call(np.log, total), greatest))


def _argmax(on: On, value: Array, dimension: int | None = None, keep: bool = False) -> Array:
    del keep
    if dimension is None:
        raise NotInNumpy("argmax over everything")
    return on.reshaped(on.call(np.ndarray.argmax, value, on.axis(dimension)))


def _gather(on: On, value: Array, dimension: int, index: Array, sparse: bool = False) -> Array:
    del sparse
    axis = on.axis(dimension)

    def chosen(array: Array, places: Array, out: Array | None = None) -> Array:
        found = np.take_along_axis(array, places, axis)
        return found if out is None else _copied(found, out)

    return on.call(chosen, value, index)


def _to(on: On, value: Array, dtype: Any = None, *_: Any) -> Array:
    kind = value.dtype if dtype is None else _TYPES.get(dtype)
    if kind is None:
        raise NotInNumpy(f"the type {dtype}")

    def converted(array: Array, out: Array | None = None) -> Array:
        return array.astype(kind) if out is None else _copied(array, out)

    return on.call(converted, value)


def _copied(value: Array, out: Array) -> Array:
    np.copyto(out, value, casting="unsafe")
    return out


def _where(on: On, condition: Array, one: Any, other: Any) -> Array:
    def chosen(where: Array, yes: Any, no: Any, out: Array | None = None) -> Array:
        found = np.where(where, yes, no)
        return found if out is None else _copied(found, out)

    return on.call(chosen, condition, one, other)


def _masked_fill(on: On, value: Array, mask: Array, filling: Any) -> Array:
    return _where(on, mask, np.asarray(filling, value.dtype), value)


def _cat(on: On, parts: list[Array], dimension: int = 0) -> Array:
    axis = on.axis(dimension)
    return on.call(functools.partial(np.concatenate, axis=axis), parts)


def _stack(on: On, parts: list[Array], dimension: int = 0) -> Array:
    axis = dimension - on.dimensions - 1 if dimension >= 0 else dimension
    return on.call(functools.partial(np.stack, axis=axis), parts)


def _expand(on: On, value: Array, *_: Any) -> Array:
    return on.view(value, np.broadcast_to(value, on.leading + on.shape))


def _transposed(on: On, value: Array) -> Array:
    return on.view(value, value.swapaxes(-1, -2))


def _swapped(on: On, value: Array, one: int, other: int) -> Array:
    return on.view(value, value.swapaxes(on.axis(one), on.axis(other)))


def _permuted(on: On, value: Array, dims: Sequence[int]) -> Array:
    leading = value.ndim - len(dims)
    axes = [leading + dimension % len(dims) for dimension in dims]
    return on.view(value, value.transpose(*range(leading), *axes))


def _part(on: On, value: Array, dimension: int, places: Any) -> Array:
    index = (..., places, *[slice(None)] * (-on.axis(dimension) - 1))
    return on.view(value, value[index])


def _select(on: On, value: Array, dimension: int, index: int) -> Array:
    return _part(on, value, dimension, index)


def _slice(
    on: On, value: Array, dimension: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Array:
    return _part(on, value, dimension, slice(start, end, step))


def _split_sizes(on: On, value: Array, sizes: Sequence[int], dimension: int = 0) -> list[Array]:
    ends = np.cumsum(sizes).tolist()
    return [_part(on, value, dimension, slice(end - n, end)) for n, end in zip(sizes, ends)]


def _split(on: On, value: Array, size: int, dimension: int = 0) -> list[Array]:
    whole = value.shape[on.axis(dimension)]
    sizes = [min(size, whole - start) for start in range(0, whole, size)]
    return _split_sizes(on, value, sizes, dimension)


def _unbind(on: On, value: Array, dimension: int = 0) -> list[Array]:
    whole = value.shape[on.axis(dimension)]
    return [_part(on, value, dimension, index) for index in range(whole)]


def _layer_norm(
    on: On, value: Array, shape: Sequence[int], weight: Any, bias: Any, epsilon: float
) -> list[Array]:
    dims, count = range(-len(shape), 0), math.prod(shape)
    mean = on.call(np.true_divide, _reduced(on, np.add, value, dims), count)
    apart = on.call(np.subtract, value, mean)
    squares = _reduced(on, np.add, on.call(np.multiply, apart, apart), dims)
    variance = on.call(np.true_divide, squares, count)
    deviation = on.call(np.sqrt, on.call(np.add, variance, epsilon))
    normal = on.call(np.true_divide, apart, deviation)
    normal = normal if weight is None else on.call(np.multiply, normal, weight)
    normal = normal if bias is None else on.call(np.add, normal, bias)
    return [normal, mean, on.call(np.reciprocal, deviation)]


_TYPES: dict[Any, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.bool: np.bool_,
}

_POINTWISE: dict[str, Function] = {
    "tanh": np.tanh, "exp": np.exp, "log": np.log, "neg": np.negative, "abs": np.abs,
    "sqrt": np.sqrt, "reciprocal": np.reciprocal, "sin": np.sin,
    "cos": np.cos, "expm1": np.expm1, "log1p": np.log1p, "floor": np.floor, "sign": np.sign,
    "minimum": np.minimum, "maximum": np.maximum, "logical_not": np.logical_not,
    "logical_and": np.logical_and, "logical_or": np.logical_or, "bitwise_not": np.invert,
}  # fmt: skip
_OF_TWO: dict[str, Function] = {
    "mul": np.multiply, "div": np.true_divide, "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
}  # fmt: skip
_COMPARISONS: dict[str, Function] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "ne": np.not_equal,
}  # fmt: skip

OPERATIONS: dict[str, Callable[..., Any]] = {
    **{f"{name}.default": _same(function) for name, function in _POINTWISE.items()},
    **{f"{name}.Tensor": _same(function) for name, function in _OF_TWO.items()},
    **{f"{name}.Tensor": _same(function) for name, function in _COMPARISONS.items()},
    **{f"{name}.Scalar": _same(function) for name, function in _COMPARISONS.items()},
    "view.default": _shown,
    "_unsafe_view.default": _shown,
    "unsqueeze.default": _shown,
    "squeeze.default": _shown,
    "squeeze.dim": _shown,
    "squeeze.dims": _shown,
    "mm.default": _product,
    "addmm.default": _addmm,
    "add.Tensor": _add,
    "sub.Tensor": _subtract,
    "rsub.Scalar": _subtract_from,
    "rsub.Tensor": _subtract_from,
    "addcmul.default": _addcmul,
    "pow.Tensor_Scalar": _power,
    "relu.default": _relu,
    "clamp.default": _clamp,
    "clamp.Tensor": _clamp,
    "hardtanh.default": _clamp,
    "clamp_min.default": _clamp,
    "clamp_max.default": _clamp_max,
    "softplus.default": _softplus,
    "sigmoid.default": _sigmoid,
    "silu.default": _silu,
    "elu.default": _elu,
    "sum.dim_IntList": _sum,
    "sum.default": _sum,
    "mean.dim": _mean,
    "_log_softmax.default": _log_softmax,
    "_softmax.default": _softmax,
    "logsumexp.default": _logsumexp,
    "argmax.default": _argmax,
    "gather.default": _gather,
    "_to_copy.default": _to,
    "clone.default": _to,
    "where.self": _where,
    "masked_fill.Scalar": _masked_fill,
    "cat.default": _cat,
    "stack.default": _stack,
    "expand.default": _expand,
    "t.default": _transposed,
    "transpose.int": _swapped,
    "permute.default": _permuted,
    "select.int": _select,
    "slice.Tensor": _slice,
    "split.Tensor": _split,
    "split_with_sizes.default": _split_sizes,
    "unbind.int": _unbind,
    "native_layer_norm.default": _layer_norm,
}
"""How each operation is made, by its name in PyTorch."""
