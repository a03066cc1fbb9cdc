"""Functions of tensors that run without Python once they are known."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from kit.fast.executors import Run, executed
from kit.fast.memory import with_own_memory
from kit.fast.nested import Names, entry, has_only, names_of
from kit.fast.products import are_faster, with_fast_products
from kit.fast.trace import NotTraceable, Recording, record, share_no_memory
from kit.fast.watch import Watch

Key = Any
Inputs = Any
"""A dictionary or a TensorDict of tensors."""
Outputs = Mapping[Key, Tensor]
Function = Callable[[Inputs], Outputs]

_PATIENCE = 20
"""After so many recordings in a row that are dropped before as many replays, which they cost, or
never called again with inputs of their shape (whole episodes), a function runs eagerly."""

_REMEMBERED = 1_000
"""Signatures that are remembered."""

_MOST = 32
"""Programs that are kept, each with memory of its own: the latest."""

_FIRST_CALLS = 3
"""After so many recordings in a row that changed what it depends on, a function runs eagerly."""

_NOT_REPEATED = "it does not repeat itself: something in it changes between calls"
_STALE = (
    "it reads a value whose change was not noticed, and up to {} results since the last check are "
    "those of the old value; keep the value in a buffer or an attribute of the module"
)

_FIRST_CHECK, _LAST_CHECK = 64, 2_048
"""Calls after which a program is verified again, at first and at most. A verification takes as
long as about 10 replays of a small network, so that all of them cost about half a percent."""


class Traced:
    """A function of tensors that is recorded, verified once, and then replayed without Python.

    There is one program for each signature: shapes, types and strides of the inputs that are read.
    The first call records the function while it runs, and so does the first with an input of
    another name, which may be optional; other signatures are recorded when they come again, and the
    later the more programs there are: of which 32 are kept. The next call runs both the program and
    the function, from the same random numbers (of the CPU and of all devices) and the same values
    of everything that they change in place, and compares all outputs and all changed tensors
    bitwise; the function's results stay. From then on the program is replayed alone: same kernels,
    same order, same random numbers, bitwise the same results.

    The comparison is repeated after 64, 256, 1,024 and then every 2,048 calls, in a call that has
    all inputs of the recording. It finds a value that the function reads and whose change was not
    noticed. The results since the last comparison may have used the old value.

    A function that cannot be recorded (it decides something on the host, draws random numbers of
    Python or NumPy, changes its own attributes), or that has hooks, or whose program does not
    agree, runs eagerly from then on, as if it had never been recorded; ``reason`` says why, and a
    warning says it once.

    It is called without gradients: those that the function itself computes are part of the program.

    Args:
        function: takes a dictionary or a TensorDict of tensors and returns a dictionary of tensors.
            It may write in place to its inputs, to parameters and to buffers. Entries that it sets
            in what it was given are lost unless it returns them, and whatever else it does in
            Python (print, say) happens in eager calls alone.
        watched: modules, optimisers and other objects whose settings, parts and parameter objects
            the function depends on; see :class:`~kit.fast.watch.Watch`.
        name: the function's name in the warning; empty: there is none.
        executor: one of :data:`~kit.fast.executors.EXECUTORS`, or ``"auto"``. Programs of
            ``"inductor"`` round and draw differently; they are verified as they were recorded.
        read_only: whether outputs are only read. They are not copied then, but may be tensors of
            inference mode, which can neither be written to nor take part in gradients.
        fast_products: whether large matrix products may be rounded otherwise, from the first call
            on, where :mod:`kit.fast.products` has faster ones. The program that is verified has
            PyTorch's own, and so has what runs eagerly. What has had faster ones is recorded as
            often as need be, so that a resumed run rounds alike.
        verify_again: whether the comparison is repeated; not for a function that is called with
            the inputs alone that its program reads.

    Attributes:
        reason: why the function runs eagerly; empty while it does not.
        is_stale: whether the reason is a difference that a repeated comparison found.

    Examples:
        >>> network = torch.nn.Linear(3, 2)
        >>> act = Traced(lambda seen: {"action": network(seen["x"])}, network, name="the policy")
        >>> with torch.no_grad():
        ...     actions = [act({"x": torch.ones(4, 3)})["action"] for _ in range(3)]
        >>> act.replays, act.keys_read, act.executor
        (True, ['x'], 'interpreter')
    """

    def __init__(
        self,
        function: Function,
        *watched: Any,
        name: str,
        executor: str = "auto",
        read_only: bool = False,
        fast_products: bool = False,
        verify_again: bool = True,
    ) -> None:
        self.function = function
        self.name = name
        self.read_only = read_only
        self.reason = ""
        self.watch = Watch(*watched)
        self._asked = executor
        self._fast_products = fast_products and are_faster()
        self._rounds_otherwise = False  # since a program with faster products
        self._keys: list[Key] = []
        self._programs: dict[Any, _Program] = {}
        self._came: Counter[Any] = Counter()  # calls of signatures without a program
        self._seen = _NO_NAMES
        self._wasted = self._own_changes = 0
        self._unchecked, self._check_after = 0, _FIRST_CHECK if verify_again else math.inf
        self.is_stale = False

    # ------------------------------------------------------------------ what is known
    @property
    def replays(self) -> bool:
        """Whether a program has been verified, so that calls replay it."""
        return any(program.verified for program in self._programs.values())

    @property
    def keys_read(self) -> list[Key]:
        """Keys of the inputs that are read; empty as long as no program has been verified."""
        return self._keys if self.replays else []

    @property
    def check_is_due(self) -> bool:
        """Whether the next call with all inputs is compared with the function again."""
        return self._unchecked >= self._check_after

    @property
    def programs(self) -> int:
        """Number of signatures for which there is a program."""
        return len(self._programs)

    @property
    def executor(self) -> str:
        """Name of what executes the latest program; empty as long as there is none."""
        return next((p.executor for p in reversed(self._programs.values())), "")

    @property
    def operations(self) -> list[str]:
        """Names of the operations of the latest program; empty as long as there is none."""
        return next((p.recording.operations for p in reversed(self._programs.values())), [])

    def refresh(self) -> bool:
        """Drop the programs if anything that they take for granted has changed.

        To be called before a call wherever that may have happened: at every gradient step, with
        every batch.

        Returns:
            Whether programs were dropped.
        """
        if not self.watch.changed():
            for program in self._programs.values():
                if not program.recording.is_valid():
                    break
            else:
                return False
        dropped = bool(self._programs)
        self.clear()
        return dropped

    def clear(self) -> None:
        """Drop all programs."""
        if self._programs:
            replays = max(program.replays for program in self._programs.values())
            self._wasted = self._wasted + 1 if replays < _PATIENCE else 0
        self._programs.clear()
        self._came.clear()
        self._keys = []

    # ------------------------------------------------------------------ a call
    def __call__(self, inputs: Inputs) -> Outputs:
        """Return the function's outputs; inputs that it does not read may be left out or added."""
        if not (self.reason or has_only(inputs, self._seen)):
            self.clear()
        values = [entry(inputs, key) for key in self._keys]
        signature = _signature(values)
        program = self._programs.get(signature)
        self._unchecked += 1
        again = self._unchecked > self._check_after and names_of(inputs, _NO_NAMES) == self._seen
        if program is None or not program.verified or again:
            with torch.no_grad():
                return self._not_replayed(inputs, values, signature)
        outputs = program(values)
        if self.read_only or torch.is_inference_mode_enabled():
            return outputs
        return {key: writable(value) for key, value in outputs.items()}

    def _not_replayed(self, inputs: Inputs, values: Sequence[Tensor], signature: Any) -> Outputs:
        """Run the function, as far as it takes to know a program of it."""
        program = self._programs.get(signature)
        if program is not None:
            return self._verify(program, inputs, values)
        if not self.reason:
            self._forget_what_never_came_again()
        if self.reason or self._is_seldom(signature):
            return self.function(inputs.copy())
        return self._record(inputs)

    def _forget_what_never_came_again(self) -> None:
        """Drop programs of shapes that were seen once; run eagerly if there are no others."""
        seen_again = {k: program for k, program in self._programs.items() if program.verified}
        if len(self._programs) - len(seen_again) < _PATIENCE:
            return
        self._programs = seen_again
        if not (seen_again or self._rounds_otherwise):
            self._keys, self.reason = [], "almost every call has inputs of another shape"

    def _is_seldom(self, signature: Any) -> bool:
        """Whether a signature besides others has come too seldom: recording costs ten calls.

        Where products may round otherwise all are recorded, so that a resumed run rounds alike.
        """
        if self._fast_products or not self._programs:
            return False
        if len(self._came) >= _REMEMBERED:
            self._came.clear()
        self._came[signature] += 1
        if self._came[signature] < max(2, len(self._programs) // 2):
            return True
        del self._came[signature]
        return False

    def _record(self, inputs: Inputs) -> Outputs:
        given = inputs.copy()
        names: list[Key] = []
        keys = sorted(_tensor_keys(inputs), key=str)
        self._seen = names_of(inputs, self._seen)

        def function(*tensors: Tensor) -> list[Tensor]:
            for key, tensor in zip(keys, tensors):
                given[key] = tensor
            outputs = self.function(given)
            names.extend(outputs)
            return list(outputs.values())

        self.refresh()
        if self.watch.has_hooks():
            self._run_eagerly("it has hooks, which no program would call")
            return self.function(inputs.copy())
        if self.watch.has_scripts():
            self._run_eagerly("it has a module of TorchScript, which optimises itself")
            return self.function(inputs.copy())
        numbers = _RandomNumbers(self.watch.values())
        try:
            if self._wasted >= _PATIENCE and not self._rounds_otherwise:
                changes = "what it depends on changes again and again"
                raise NotTraceable(self._with_what(changes))
            recording, outputs = record(function, share_no_memory([inputs.get(k) for k in keys]))
        except NotTraceable as reason:
            numbers.restore()
            self._run_eagerly(str(reason))
            return self.function(inputs.copy())
        if numbers.drawn_on_the_host():
            self._run_eagerly("it draws random numbers of Python or NumPy")
            return dict(zip(names, outputs))
        program = self._keep(recording, keys, names, inputs)
        if program.rounds_otherwise:
            self._rounds_otherwise = program.executor != "inductor"
            recording.restore()
            numbers.restore()
            try:
                found = program([inputs.get(key) for key in self._keys])
            except RuntimeError as error:
                recording.restore()
                numbers.restore()
                return self._cannot_be_run(error, inputs)
            outputs = [writable(value) for value in found.values()]
        recording.inputs, recording.before = [], []
        if self.watch.changed():
            self._forget_what_it_has_changed()
        else:
            self._own_changes = 0
        return dict(zip(names, outputs))

    def _forget_what_it_has_changed(self) -> None:
        """Drop the programs of a function that changes its attributes: in its first calls, or ever.

        A first call may make what later ones use.
        """
        self.clear()
        self._own_changes += 1
        if self._own_changes >= _FIRST_CALLS and not self._rounds_otherwise:
            self._run_eagerly(self._with_what("it changes its own attributes"))

    def _with_what(self, reason: str) -> str:
        """A reason with the name of what has changed, where it has one."""
        return f"{reason}: {self.watch.what}" if self.watch.what else reason

    def _keep(
        self, recording: Recording, keys: list[Key], outputs: list[Key], inputs: Inputs
    ) -> _Program:
        """Add a program; signatures are those of everything that any of the programs reads."""
        read = [keys[number] for number in recording.inputs_read]
        if not set(read) <= set(self._keys):
            self._programs.clear()
            self._keys = sorted({*self._keys, *read}, key=str)
        places = [self._keys.index(key) for key in read]
        program = _Program(
            recording, places, outputs, self._asked, self._fast_products, self.read_only
        )
        program.inputs_changed = [keys[number] for number in recording.inputs_changed]
        self._programs[_signature([inputs.get(key) for key in self._keys])] = program
        if len(self._programs) > _MOST:
            del self._programs[next(iter(self._programs))]
        return program

    def _verify(self, program: _Program, inputs: Inputs, values: Sequence[Tensor]) -> Outputs:
        """Run program and function from the same state, and trust the program if they agree."""
        if self.refresh():
            return self._record(inputs)
        changed = [*program.recording.changed, *map(inputs.get, program.inputs_changed)]
        numbers, before = _RandomNumbers(self.watch.values()), [one.clone() for one in changed]

        def restore() -> None:
            numbers.restore()
            for tensor, value in zip(changed, before):
                tensor.copy_(value)

        def outcome(run: Run) -> tuple[Sequence[Tensor], list[Tensor]]:
            try:
                return run(*program.given(values)), [tensor.clone() for tensor in changed]
            finally:
                restore()

        try:
            found = program.as_recorded(values)
        except RuntimeError as error:
            restore()
            return self._cannot_be_run(error, inputs)
        after = [tensor.clone() for tensor in changed]
        restore()
        again, unchecked = program.verified, self._unchecked
        if again:
            self._unchecked, self._check_after = 0, min(4 * self._check_after, _LAST_CHECK)
        else:
            program.verify_memory(outcome)
        expected = self.function(inputs.copy())
        program.verified = (
            list(found) == list(expected)
            and all(_equal(found[key], expected[key]) for key in expected)
            and all(map(_equal, after, changed))
            and not self.watch.changed()
            and program.recording.is_valid()
            and not numbers.drawn_on_the_host()
        )
        if not program.verified:
            self.is_stale = again
            self._run_eagerly(_STALE.format(unchecked - 1) if again else _NOT_REPEATED)
            return expected
        if not program.rounds_otherwise:
            return expected
        restore()
        return {key: writable(value) for key, value in program(values).items()}

    def _cannot_be_run(self, error: RuntimeError, inputs: Inputs) -> Outputs:
        """Run eagerly what PyTorch computes in more than operations, as the memory of an LSTM."""
        cause = getattr(error, "inner_exception", None)  # of torch.compile; advice follows it
        lines = str(cause or error).strip().splitlines()
        what = lines[0 if cause else -1].removeprefix("RuntimeError: ")
        why = "torch.compile fails" if cause else "PyTorch does not run its operations alone"
        self._run_eagerly(f"{why} ({what})")
        return self.function(inputs.copy())

    def _run_eagerly(self, reason: str) -> None:
        self.reason = reason
        self._programs.clear()
        self._keys = []
        if self.name:
            warnings.warn(f"{self.name} runs eagerly: {reason}", stacklevel=2)


_NO_NAMES = Names(set(), {})


class _Program:
    """A recording with what executes it."""

    def __init__(
        self,
        recording: Recording,
        places: list[int],
        outputs: list[Key],
        executor: str,
        fast_products: bool,
        keeps_memory: bool,
    ) -> None:
        self.recording = recording
        self.verified = self.rounds_otherwise = False
        self.replays = 0
        self.inputs_changed: list[Key] = []
        self._places, self._outputs = places, outputs
        self._as_recorded: Run
        compiles = executor == "inductor"
        self._as_recorded, self.executor = executed(recording, "python" if compiles else executor)
        self._run = self._as_recorded
        if compiles:  # verified as it was recorded: what is compiled rounds and draws otherwise
            self._run, self.executor = executed(recording, executor)
            self.rounds_otherwise = True
        self._in_own_memory: Run | None = None
        on_host = all(tensor.is_cpu for tensor in (*recording.inputs, *recording.constants))
        if on_host and self.executor in ("interpreter", "python"):
            self._make_faster(fast_products, keeps_memory)

    def _make_faster(self, fast_products: bool, keeps_memory: bool) -> None:
        """Use faster products; prepare a program that keeps its memory."""
        faster = copy.copy(self.recording)
        graph = with_fast_products(faster.graph) if fast_products else None
        if graph is not None:
            faster.graph, self.rounds_otherwise = graph, True
            self._run, _ = executed(faster, self.executor)
        found = None
        if keeps_memory:
            with contextlib.suppress(RuntimeError):  # a view that no memory of its own has
                found = with_own_memory(faster.graph, faster.constants)
        if found is not None:
            faster.graph, faster.constants = found
            run, executor = executed(faster)
            self._in_own_memory = run if executor == self.executor else None

    def verify_memory(self, outcome: Callable[[Run], Any]) -> None:
        """Keep the memory of results if that makes no difference to them.

        Args:
            outcome: what a program returns, and the values of what it changes.
        """
        if self._in_own_memory is None:
            return
        results, changed = outcome(self._run)
        with contextlib.suppress(RuntimeError):  # an operation that does not take this memory
            others, also_changed = outcome(self._in_own_memory)
            if all(map(_equal, [*results, *changed], [*others, *also_changed])):
                self._run = self._in_own_memory

    def given(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The inputs that are read, of those that any program reads."""
        return [values[place] for place in self._places]

    def __call__(self, values: Sequence[Tensor]) -> Outputs:
        self.replays += 1
        return dict(zip(self._outputs, self._run(*self.given(values))))

    def as_recorded(self, values: Sequence[Tensor]) -> Outputs:
        """The outputs, products as they were recorded."""
        return dict(zip(self._outputs, self._as_recorded(*self.given(values))))


class _RandomNumbers:
    """Where random number generators are: PyTorch's on all devices, Python's and NumPy's.

    Args:
        others: of which those that are generators of Python or NumPy are included.
    """

    def __init__(self, others: Sequence[Any]) -> None:
        self._cpu = torch.get_rng_state()
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if used else []
        found = [getattr(one, "bit_generator", one) for one in others if isinstance(one, _RANDOM)]
        self._on_the_host = [*_OF_MODULES, *found]
        self._states = self._host_states()

    def _host_states(self) -> list[Any]:
        return [one.__getstate__() for one in self._on_the_host]

    def drawn_on_the_host(self) -> bool:
        """Whether Python or NumPy has drawn a random number since."""
        return not _alike(self._host_states(), self._states)

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for one, state in zip(self._on_the_host, self._states):
            one.__setstate__(state)


def _alike(one: Any, other: Any) -> bool:
    """Whether two states of random number generators are equal."""
    try:
        return bool(one == other)
    except ValueError:  # arrays have no truth value
        if isinstance(one, np.ndarray):
            return np.array_equal(one, other)
        pairs = zip(one.values(), other.values()) if isinstance(one, dict) else zip(one, other)
        return all(_alike(*pair) for pair in pairs)


_RANDOM = (random.Random, np.random.Generator, np.random.RandomState)
_OF_MODULES: list[Any] = [random._inst, np.random.mtrand._rand]  # type: ignore[attr-defined]
"""Those behind the functions of the modules."""


def writable(tensor: Tensor) -> Tensor:
    """A tensor that can be written to, also outside of inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def _tensor_keys(inputs: Inputs) -> list[Key]:
    if isinstance(inputs, TensorDictBase):
        return [k for k in inputs.keys(True, True) if isinstance(inputs.get(k), Tensor)]
    return list(inputs)


def _signature(values: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple([v if v is None else (v.shape, v.dtype, v.stride()) for v in values])


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
