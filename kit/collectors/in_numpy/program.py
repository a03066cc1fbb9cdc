"""A policy's recorded operations, made by NumPy.

An operation of PyTorch takes a microsecond where nothing else runs, but ten right after a step of a
physics engine, which has used up the processor's caches: the way to the kernel is long. NumPy's is
short, and what a step does not need for its action is made once for a whole batch.

Sums are rounded in another order than PyTorch's, so results agree to about seven digits. Random
numbers are PyTorch's, drawn in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kit.collectors.in_numpy.calls import AtOnce, NotInNumpy, StepByStep
from kit.collectors.in_numpy.operations import prepared
from kit.envs.spaces import Arrays, Key
from kit.fast.old_trace import FlatProgram, Operation, Recorded, tensors_in, tensors_read

Array = NDArray[Any]
When = Literal["fixed", "drawn", "ahead", "step", "after"]

_ONLY_SHAPE = {
    "new_empty", "new_zeros", "new_ones", "empty_like", "zeros_like", "ones_like", "rand_like",
    "randn_like",
}  # fmt: skip
"""Operations that read nothing of a tensor but its shape and type."""


class NumpyProgram:
    """Makes a policy's operations for a batch of time steps, whose observations come one by one.

    Each operation has its time. ``fixed``: once in a batch, as it reads parameters alone (PyTorch
    makes it). ``drawn``: random numbers (PyTorch's), for all steps at once. ``ahead``: for all
    steps at once, before them, as it reads random numbers and no observation. ``step``: in its
    step, as it leads from the observation to an action. ``after``: for all steps at once.

    Args:
        recorded: the operations, with the tensors they were recorded with.
        keys: of the inputs, in their order.
        actions: which outputs a step has to give, by their keys.

    Raises:
        NotInNumpy: if an operation is not among those that NumPy can make, or is so large that
            PyTorch is no slower, or draws random numbers that depend on an observation.
    """

    def __init__(self, recorded: Recorded, keys: Sequence[Key], actions: Mapping[Key, int]) -> None:
        self.keys, self._inputs, self._outputs = keys, recorded.inputs, recorded.outputs
        self._actions = {key: recorded.outputs[number] for key, number in actions.items()}
        self._operations = [part for one in recorded.operations for part in _parts(one)]
        self._when, self._drawn = _times(self._operations, recorded, list(self._actions.values()))
        self._constants = [(tensor, tensor.data_ptr()) for tensor in recorded.constants]
        self._make_fixed(recorded.constants)
        self._fill = _fill(self._of("drawn"))
        self._draw = _torch_program(self._leading_to(self._drawn), self._drawn)
        self._make_steps()
        self._ahead = [prepared(operation) for operation in self._of("ahead")]
        self._after = [prepared(operation) for operation in self._of("after")]
        self._check()

    def is_valid(self) -> bool:
        """Whether parameters and buffers are where they were."""
        return all(tensor.data_ptr() == place for tensor, place in self._constants)

    # ------------------------------------------------------------------ building
    def _of(self, *when: When) -> list[Operation]:
        return [one for one, time in zip(self._operations, self._when) if time in when]

    def _made(self, *when: When) -> list[Tensor]:
        return [tensor for one in self._of(*when) for tensor in tensors_in(one.result)]

    def _read(self, *when: When) -> set[int]:
        return {id(tensor) for one in self._of(*when) for tensor in tensors_read(one)}

    def _make_fixed(self, constants: Sequence[Tensor]) -> None:
        """Make the arrays that stay the same within a batch."""
        wanted = self._read("ahead", "step", "after") | {id(tensor) for tensor in self._outputs}
        wanted -= {id(tensor) for tensor in self._drawn}  # one that is filled in place is made here
        fixed = [tensor for tensor in self._made("fixed") if id(tensor) in wanted]
        self._once = _torch_program(self._of("fixed"), fixed)
        self._fixed = {id(tensor): as_array(tensor) for tensor in constants}
        self._refreshed = [as_array(tensor).copy() for tensor in fixed]
        self._fixed |= {id(tensor): array for tensor, array in zip(fixed, self._refreshed)}

    def _leading_to(self, wanted: Sequence[Tensor]) -> list[Operation]:
        """Return the operations that lead to ``wanted``."""
        needed = {id(tensor) for tensor in wanted}
        found = []
        for operation in reversed(self._operations):
            if any(id(tensor) in needed for tensor in tensors_in(operation.result)):
                needed.update(id(tensor) for tensor in _values_read(operation))
                found.append(operation)
        return found[::-1]

    def _make_steps(self) -> None:
        """Make the buffers of a step, and the list of what is called with them."""
        on = StepByStep(self._fixed)
        self._fed: list[tuple[Tensor, Array]] = []
        for operation in self._of("step"):
            for tensor in tensors_read(operation):
                if id(tensor) not in on.arrays:
                    on.arrays[id(tensor)] = as_array(tensor).copy()
                    self._fed.append((tensor, on.arrays[id(tensor)]))
            on.make(prepared(operation))
        self._calls, self._spread = on.calls, on.spread
        wanted = self._read("after") | {id(tensor) for tensor in self._outputs}
        kept = {id(tensor): tensor for tensor in self._made("step") if id(tensor) in wanted}
        self._kept = [(tensor, on.arrays[place]) for place, tensor in kept.items()]

    def _check(self) -> None:
        """Make again what was recorded, for two steps, and compare.

        Raises:
            NotInNumpy: if there is a difference of more than rounding.
        """
        twice = {key: _repeated(as_array(t), 2) for key, t in zip(self.keys, self._inputs)}
        self.begin(twice, 2, [_repeated(as_array(tensor), 2) for tensor in self._drawn])
        for _ in self.steps():
            pass
        for made, tensor in zip(self.finish(), self._outputs):
            wanted = _repeated(as_array(tensor), 2)
            same = made.dtype == wanted.dtype and made.shape == wanted.shape
            if not same or not np.allclose(made, wanted, 1e-4, 1e-5, equal_nan=True):
                raise NotInNumpy("NumPy gives other results")

    # ------------------------------------------------------------------ a batch
    def begin(
        self, inputs: Mapping[Key, Array], steps: int, drawn: Sequence[Array] | None = None
    ) -> None:
        """Make what does not depend on observations.

        Args:
            inputs: by key, ``[steps, ...]``; the row of each step is filled when it begins.
            steps: of the batch.
            drawn: random numbers in place of new ones, ``[steps, ...]`` each.
        """
        for array, value in zip(self._refreshed, self._once()):
            array[...] = value.numpy()
        for buffer, array in self._spread:
            buffer[...] = array
        arrays = {id(tensor): inputs[key] for key, tensor in zip(self.keys, self._inputs)}
        drawn = self.draw(steps) if drawn is None else drawn
        arrays |= {id(tensor): array for tensor, array in zip(self._drawn, drawn)}
        self._at_once = AtOnce(steps, self._fixed, arrays)
        self._at_once.make(self._ahead)
        keeps = [np.empty((steps, *buffer.shape), buffer.dtype) for _, buffer in self._kept]
        arrays |= {id(tensor): keep for (tensor, _), keep in zip(self._kept, keeps)}
        self._keeps = [(keep, buffer) for keep, (_, buffer) in zip(keeps, self._kept)]
        self._feeds = [(buffer, arrays[id(tensor)]) for tensor, buffer in self._fed]
        self._chosen = [(key, arrays[id(tensor)]) for key, tensor in self._actions.items()]

    def draw(self, steps: int) -> list[Array]:
        """Draw random numbers for steps, in the order in which steps would draw them."""
        if self._fill is not None:
            return [self._fill(steps).numpy()]
        rows = [self._draw() for _ in range(steps)]
        return [torch.stack(tensors).numpy() for tensors in zip(*rows)]

    def steps(self) -> Iterator[Arrays]:
        """Make in each step what leads from its observations to its actions, and yield these.

        They stay as they are until the batch ends, and belong to it then.
        """
        feeds, calls, keeps, chosen = self._feeds, self._calls, self._keeps, self._chosen
        for step in range(self._at_once.steps):
            for buffer, array in feeds:
                buffer[...] = array[step]
            for function, arguments in calls:
                function(*arguments)
            for array, buffer in keeps:
                array[step] = buffer
            actions = {}
            for key, array in chosen:  # a comprehension is a call of its own
                actions[key] = array[step]
            yield actions

    def finish(self, steps: int | None = None) -> list[Array]:
        """Make the rest and return all outputs, ``[steps, ...]`` each.

        Args:
            steps: that were taken, the first ones of the batch; ``None``: all.
        """
        if steps is not None:
            self._at_once.cut(steps)
        self._at_once.make(self._after)
        found: list[Array] = []
        for tensor in self._outputs:
            array = self._at_once.array(tensor)
            shared = any(np.may_share_memory(array, other) for other in found)
            given = any(tensor is one for one in self._inputs)
            found.append(array.copy() if shared or given else array)
        return found


def _parts(operation: Operation) -> list[Operation]:
    """Return a product that is added to something as two operations, which may have two times.

    Noise times a deviation is known before the step in which it is added to a mean.
    """
    aten = torch.ops.aten
    if operation.function is not aten.addcmul.default or operation.keywords:
        return [operation]
    value, one, other = operation.arguments
    product = one * other
    return [
        Operation(aten.mul.Tensor, (one, other), {}, product),
        Operation(aten.add.Tensor, (value, product), {}, operation.result),
    ]


def _times(
    operations: Sequence[Operation], recorded: Recorded, actions: Sequence[Tensor]
) -> tuple[list[When], list[Tensor]]:
    """Return when each operation is made, and the random numbers among the tensors.

    Raises:
        NotInNumpy: if random numbers depend on an input, or something is changed in place.
    """
    depends: dict[int, When] = {id(tensor): "fixed" for tensor in recorded.constants}
    depends |= {id(tensor): "step" for tensor in recorded.inputs}
    times: list[When] = []
    drawn: list[Tensor] = []
    for operation in operations:
        read = {depends[id(tensor)] for tensor in _values_read(operation)}
        when: When = "step" if "step" in read else "ahead" if "ahead" in read else "fixed"
        if torch.Tag.nondeterministic_seeded in operation.function.tags:
            if when != "fixed":
                raise NotInNumpy(f"{operation.function} draws what depends on an observation")
            when = "drawn"
            drawn += tensors_in(operation.result)
        elif operation.function._schema.is_mutable:
            raise NotInNumpy(f"{operation.function} changes a tensor in place")
        times.append(when)
        now: When = "ahead" if when == "drawn" else when
        depends |= {id(tensor): now for tensor in tensors_in(operation.result)}
    if any(depends[id(tensor)] == "fixed" for tensor in actions):
        raise NotInNumpy("the action depends on nothing")
    _put_off(operations, times, {id(tensor) for tensor in actions})
    return times, drawn


def _put_off(operations: Sequence[Operation], times: list[When], needed: set[int]) -> None:
    """Let operations that no action needs wait until the steps are over."""
    for number in reversed(range(len(operations))):
        if any(id(tensor) in needed for tensor in tensors_in(operations[number].result)):
            needed.update(id(tensor) for tensor in _values_read(operations[number]))
        elif times[number] == "step":
            times[number] = "after"


def _fill(drawing: list[Operation]) -> Callable[[int], Tensor] | None:
    """Return what draws the random numbers of many steps, where one operation draws all of a step.

    Where that gives the same numbers in the same order, it is one call for all steps: with other
    memory in between, so that PyTorch does not draw many at once in another order.
    """
    if len(drawing) != 1 or drawing[0].keywords:
        return None
    name = drawing[0].function._schema.name.removeprefix("aten::")
    if name not in ("normal_", "uniform_", "exponential_"):
        return None
    fill, arguments = getattr(Tensor, name), drawing[0].arguments[1:]
    shape, dtype = drawing[0].result.shape, drawing[0].result.dtype

    def one_by_one(steps: int) -> Tensor:
        whole = torch.empty(steps, *shape, dtype=dtype)
        for row in whole.unbind():
            fill(row, *arguments)
        return whole

    def all_at_once(steps: int) -> Tensor:
        apart = torch.empty(steps, *shape, 2, dtype=dtype)[..., 0]
        return fill(apart, *arguments).contiguous()  # type: ignore[no-any-return]

    found = []
    outside = torch.get_rng_state()
    for draw in (one_by_one, all_at_once):
        generator = torch.get_rng_state()
        found.append((draw(64), torch.get_rng_state()))
        torch.set_rng_state(generator)
    torch.set_rng_state(outside)
    same = all(torch.equal(one, other) for one, other in zip(*found))
    return all_at_once if same else one_by_one


def _torch_program(
    operations: list[Operation], outputs: list[Tensor]
) -> Callable[[], Sequence[Tensor]]:
    """Return a function that makes operations by PyTorch; they read no input."""
    return FlatProgram(operations, [], outputs) if outputs else lambda: ()


def _values_read(operation: Operation) -> list[Tensor]:
    """Return the tensors whose values an operation reads."""
    name = operation.function._schema.name.removeprefix("aten::")
    return [] if name in _ONLY_SHAPE else tensors_read(operation)


def as_array(tensor: Tensor) -> Array:
    """Return an array that shows the tensor.

    Raises:
        NotInNumpy: if NumPy does not have its type, or it is not on the host.
    """
    try:
        return tensor.detach().numpy()
    except (TypeError, RuntimeError) as error:
        raise NotInNumpy(f"a tensor of {tensor.dtype} on {tensor.device}: {error}") from None


def _repeated(array: Array, times: int) -> Array:
    return np.stack([array] * times)
