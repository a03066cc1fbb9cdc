"""Functions of tensors that run without Python once they are known."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from kit.fast.executors import Run
from kit.fast.nested import Names, entry, has_only, names_of
from kit.fast.policy import MOST_GRAPHS, PATIENCE, TracingPolicy
from kit.fast.products import are_faster
from kit.fast.program import Key, Outputs, Program, RNGState, equal
from kit.fast.trace import Recording, TraceError, record, share_no_memory
from kit.fast.watch import Watch

Inputs = Any
"""A dictionary or a TensorDict of tensors."""
Function = Callable[[Inputs], Outputs]

_NO_NAMES = Names(set(), {})
_NOT_REPEATED = "it does not repeat itself: something in it changes between calls"
_STALE = (
    "it reads a value whose change was not noticed, and up to {} results since the last check are "
    "those of the old value; keep the value in a buffer or an attribute of the module"
)


class Traced:
    """A function of tensors that is recorded, verified once, and then replayed without Python.

    There is one program for each signature: shapes, types and strides of the inputs that are read.
    One call records the function while it runs. The next one runs both the program and the
    function from the same random states and values, and compares bitwise all outputs and all that
    they change in place. From then on the program alone is replayed: same kernels, same order, same
    random numbers. :class:`~kit.fast.policy.TracingPolicy` decides when to record and when to
    repeat the comparison, which finds a value that the function reads and whose change was not
    noticed; results since the last comparison may have used the old value.

    A function that cannot be recorded (it decides something on the host, draws random numbers of
    Python or NumPy, changes its own attributes), that has hooks, or whose program does not agree
    runs eagerly from then on. ``reason`` says why, and so does one warning.

    It is called without gradients: those that the function itself computes are part of the program.

    Args:
        function: takes a dictionary or a TensorDict of tensors and returns a dictionary of tensors.
            It may write in place to its inputs, to parameters and to buffers. Entries that it sets
            in its argument are lost unless it returns them, and other side effects (print, say)
            happen in eager calls only.
        watched: modules, optimisers and other objects whose settings, parts and parameter objects
            the function depends on; see :class:`~kit.fast.watch.Watch`.
        name: the function's name in the warning; empty: no warning.
        executor: one of :data:`~kit.fast.executors.EXECUTORS`, or ``"auto"``. Programs of
            ``"inductor"`` round and draw differently; they are verified as they were recorded.
        read_only: whether outputs are only read. They are not copied then, but may be tensors of
            inference mode, which can neither be written to nor take part in gradients.
        fast_products: whether large matrix products may round differently where
            :mod:`kit.fast.products` has faster ones. Verification and eager calls use PyTorch's.
            Each signature is then recorded in its first call, so that a resumed run rounds alike.
        verify_again: whether the comparison is repeated; not for a function that is only called
            with the inputs that its program reads.

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
        self.is_stale = False
        self.watch = Watch(*watched)
        self._asked = executor
        self._fast_products = fast_products and are_faster()
        self.policy = TracingPolicy(trace_always=self._fast_products, verify_again=verify_again)
        self._keys: list[Key] = []
        self._names = _NO_NAMES  # of all inputs in traced calls
        self._programs: dict[Any, Program] = {}

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
    def programs(self) -> int:
        """Number of signatures for which there is a program."""
        return len(self._programs)

    @property
    def executor(self) -> str:
        """Name of what executes the latest program; empty as long as there is none."""
        return next((p.executor for p in reversed(self._programs.values())), "")

    def refresh(self) -> bool:
        """Drop the programs if anything that they depend on has changed; return whether it has.

        To be called before every call that such a change may precede.
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
        self.policy.count_dropped([program.replays for program in self._programs.values()])
        self._programs.clear()
        self._keys = []

    # ------------------------------------------------------------------ a call
    def __call__(self, inputs: Inputs) -> Outputs:
        """Return the function's outputs; inputs that it does not read may be left out or added."""
        if not (self.reason or has_only(inputs, self._names)):
            self.clear()
        values = [entry(inputs, key) for key in self._keys]
        signature = _signature(values)
        program = self._programs.get(signature)
        again = self.policy.check_is_due and names_of(inputs, _NO_NAMES) == self._names
        self.policy.unchecked += 1
        if program is None or not program.verified or again:
            with torch.no_grad():
                return self._not_replayed(program, inputs, values, signature)
        outputs = program(values)
        if self.read_only or torch.is_inference_mode_enabled():
            return outputs
        return {key: writable(value) for key, value in outputs.items()}

    def _not_replayed(
        self, program: Program | None, inputs: Inputs, values: Sequence[Tensor], signature: Any
    ) -> Outputs:
        """Run the function, and do the next step towards replaying it."""
        if program is not None:
            return self._verify(program, inputs, values)
        if not self.reason:
            self._forget_what_never_recurred()
        if self.reason or not self.policy.traces(signature, len(self._programs)):
            return self.function(inputs.copy())
        return self._trace(inputs)

    def _forget_what_never_recurred(self) -> None:
        """Drop programs of shapes that were seen once; run eagerly if there are no others."""
        verified = {k: p for k, p in self._programs.items() if p.verified}
        if len(self._programs) - len(verified) < PATIENCE:
            return
        self._programs = verified
        if not (verified or self.policy.never_stop):
            self._keys, self.reason = [], "almost every call has inputs of another shape"

    def _eagerly(self, reason: str, inputs: Inputs) -> Outputs:
        """Run eagerly, now and from now on."""
        self._stop(reason)
        return self.function(inputs.copy())

    def _stop(self, reason: str) -> None:
        """Run eagerly from now on."""
        self.reason = reason
        self._programs.clear()
        self._keys = []
        if self.name:
            warnings.warn(f"{self.name} runs eagerly: {reason}", stacklevel=2)

    # ------------------------------------------------------------------ tracing
    def _trace(self, inputs: Inputs) -> Outputs:
        """Run the function while it is recorded."""
        self._names = names_of(inputs, self._names)
        self.refresh()
        if reason := self._obstacle():
            return self._eagerly(reason, inputs)
        numbers = RNGState(self.watch.values())
        keys = sorted(_tensor_keys(inputs), key=str)
        try:
            recording, outputs = self._recorded(inputs, keys)
        except TraceError as error:
            numbers.restore()
            return self._eagerly(str(error), inputs)
        if numbers.drawn_on_the_host():
            self._stop("it draws random numbers of Python or NumPy")
            return outputs
        program = self._keep(recording, keys, [*outputs], inputs)
        if program.rounds_otherwise:
            self.policy.never_stop = program.executor != "inductor"
            recording.restore()
            numbers.restore()
            try:
                found = program([inputs.get(key) for key in self._keys])
            except RuntimeError as error:
                recording.restore()
                numbers.restore()
                return self._eagerly(_why_not_run(error), inputs)
            outputs = {key: writable(value) for key, value in found.items()}
        recording.inputs, recording.before = [], []
        self._note_own_changes()
        return outputs

    def _obstacle(self) -> str:
        """Why the function is not recorded; empty if it is."""
        if self.watch.has_hooks():
            return "it has hooks, which no program would call"
        if self.policy.wastes_traces:
            return self._with_what("what it depends on changes again and again")
        return ""

    def _recorded(self, inputs: Inputs, keys: list[Key]) -> tuple[Recording, dict[Key, Tensor]]:
        """Call the function once; return its recording and its outputs."""
        given = inputs.copy()
        names: list[Key] = []

        def function(*tensors: Tensor) -> list[Tensor]:
            for key, tensor in zip(keys, tensors):
                given[key] = tensor
            outputs = self.function(given)
            names.extend(outputs)
            return list(outputs.values())

        recording, outputs = record(function, share_no_memory([inputs.get(k) for k in keys]))
        return recording, dict(zip(names, outputs))

    def _note_own_changes(self) -> None:
        """Drop the programs of a function that has changed its attributes while it was traced."""
        changed = self.watch.changed()
        if changed:
            self.clear()
        if self.policy.count_trace(changed_itself=changed):
            self._stop(self._with_what("it changes its own attributes"))

    def _with_what(self, reason: str) -> str:
        """A reason with the name of what has changed, where it has one."""
        return f"{reason}: {self.watch.what}" if self.watch.what else reason

    def _keep(
        self, recording: Recording, keys: list[Key], outputs: list[Key], inputs: Inputs
    ) -> Program:
        """Add a program; signatures are those of everything that any of the programs reads."""
        read = [keys[number] for number in recording.inputs_read]
        if not set(read) <= set(self._keys):
            self._programs.clear()
            self._keys = sorted({*self._keys, *read}, key=str)
        places = [self._keys.index(key) for key in read]
        program = Program(
            recording, places, outputs, self._asked, self._fast_products, self.read_only
        )
        program.inputs_changed = [keys[number] for number in recording.inputs_changed]
        self._programs[_signature([inputs.get(key) for key in self._keys])] = program
        if len(self._programs) > MOST_GRAPHS:
            del self._programs[next(iter(self._programs))]
        return program

    # ------------------------------------------------------------------ verification
    def _verify(self, program: Program, inputs: Inputs, values: Sequence[Tensor]) -> Outputs:
        """Run program and function from the same state, and trust the program if they agree."""
        if self.refresh():
            return self._trace(inputs)
        changed = [*program.recording.changed, *map(inputs.get, program.inputs_changed)]
        numbers, before = RNGState(self.watch.values()), [one.clone() for one in changed]

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
            return self._eagerly(_why_not_run(error), inputs)
        after = [tensor.clone() for tensor in changed]
        restore()
        again, unchecked = program.verified, self.policy.unchecked - 1
        if again:
            self.policy.count_check()
        else:
            program.verify_memory(outcome)
        expected = self.function(inputs.copy())
        agrees = (
            list(found) == list(expected)
            and all(equal(found[key], expected[key]) for key in expected)
            and all(map(equal, after, changed))
            and not self.watch.changed()
            and program.recording.is_valid()
            and not numbers.drawn_on_the_host()
        )
        if not agrees:
            self.is_stale = again
            self._stop(_STALE.format(unchecked) if again else _NOT_REPEATED)
            return expected
        program.verified = True
        if not program.rounds_otherwise:
            return expected
        restore()
        return {key: writable(value) for key, value in program(values).items()}


def _why_not_run(error: RuntimeError) -> str:
    """Why PyTorch does not run a program, as of an LSTM, whose memory is no operation."""
    cause = getattr(error, "inner_exception", None)  # of torch.compile; advice follows it
    lines = str(cause or error).strip().splitlines()
    what = lines[0 if cause else -1].removeprefix("RuntimeError: ")
    why = "torch.compile fails" if cause else "PyTorch does not run its operations alone"
    return f"{why} ({what})"


def writable(tensor: Tensor) -> Tensor:
    """A tensor that can be written to, also outside of inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def _tensor_keys(inputs: Inputs) -> list[Key]:
    if isinstance(inputs, TensorDictBase):
        return [k for k in inputs.keys(True, True) if isinstance(inputs.get(k), Tensor)]
    return list(inputs)


def _signature(values: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple([v if v is None else (v.shape, v.dtype, v.stride()) for v in values])
