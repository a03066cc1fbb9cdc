"""Functions of tensors that are traced once and then replayed without Python overhead."""

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
"""Dictionary or TensorDict of tensors."""
Function = Callable[[Inputs], Outputs]

_NO_NAMES = Names(set(), {})
_NOT_REPEATED = "it is not repeatable, because its state changes between calls"
_STALE = (
    "it reads a value whose change was not detected, so up to {} results since the last check used "
    "the old value; store the value in a buffer or an attribute of the module"
)


class Traced:
    """A function of tensors that is traced, verified once, and then replayed without Python.

    A graph is traced for each input signature, which consists of the shapes, dtypes and strides of
    the inputs that are read. The tracing call runs the function as usual. The next call runs both
    the graph and the function from the same RNG states and values, and compares all outputs and
    in-place changes bitwise. Later calls replay only the graph, with the same kernels, order and
    random numbers. :class:`~kit.fast.policy.TracingPolicy` decides when to trace and when to repeat
    the comparison. A repeated comparison detects unnoticed changes to values that the function
    reads. Results since the previous comparison may then have used old values.

    A function permanently runs eagerly if it cannot be traced, has hooks, or disagrees with its
    graph. It cannot be traced if its control flow depends on tensor values, if it uses random
    numbers from Python or NumPy, or if it changes its own attributes. ``reason`` and one warning
    explain why it runs eagerly.

    Call it with gradients disabled. Gradients that the function computes are part of the graph.

    Args:
        function: Maps a dictionary or TensorDict of tensors to a dictionary of tensors. It may
            modify its inputs, parameters and buffers in place. Entries that it adds to its argument
            are lost unless it returns them. Other side effects, such as printing, only happen in
            eager calls.
        watched: Modules, optimisers and other objects that the function depends on; see
            :class:`~kit.fast.watch.Watch`.
        name: Name of the function in the warning. If empty, there is no warning.
        executor: Name from :data:`~kit.fast.executors.EXECUTORS`, or ``"auto"``. ``"inductor"``
            rounds and samples differently, so the uncompiled graph is verified instead.
        read_only: Whether the caller only reads the outputs. They are then not copied and may be
            inference tensors, which cannot be modified or used by autograd.
        fast_products: Whether to use :mod:`kit.fast.products`, which rounds differently, where it
            is faster. Verification and eager calls use PyTorch's matrix products. Each signature is
            then traced at its first call, so that a resumed run rounds in the same way.
        verify_again: Whether the comparison is repeated. Set it to false for a function that is
            only called with the inputs that its graph reads.

    Attributes:
        reason: Reason why the function runs eagerly; empty if it does not.
        is_stale: Whether a repeated comparison found a difference.

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
        self._requested_executor = executor
        self._fast_products = fast_products and are_faster()
        self.policy = TracingPolicy(trace_always=self._fast_products, verify_again=verify_again)
        self._keys: list[Key] = []
        self._names = _NO_NAMES  # names of all inputs in traced calls
        self._programs: dict[Any, Program] = {}

    # ------------------------------------------------------------------ state
    @property
    def replays(self) -> bool:
        """Whether at least one graph has been verified and can be replayed."""
        return any(program.verified for program in self._programs.values())

    @property
    def keys_read(self) -> list[Key]:
        """Keys of the inputs that the graphs read; empty until a graph has been verified."""
        return self._keys if self.replays else []

    @property
    def programs(self) -> int:
        """Number of input signatures with a traced graph."""
        return len(self._programs)

    @property
    def executor(self) -> str:
        """Name of the latest graph's executor; empty if there is no graph."""
        return next((p.executor for p in reversed(self._programs.values())), "")

    def refresh(self) -> bool:
        """Drop the graphs if their dependencies have changed. Return whether any were dropped.

        Call this before each call of the function that may follow a change.
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
        """Drop all graphs."""
        self.policy.count_dropped([program.replays for program in self._programs.values()])
        self._programs.clear()
        self._keys = []

    # ------------------------------------------------------------------ a call
    def __call__(self, inputs: Inputs) -> Outputs:
        """Return the function's outputs. Inputs that the function does not read may be omitted."""
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
        """Run the function, and trace it or verify its graph if due."""
        if program is not None:
            return self._verify(program, inputs, values)
        if not self.reason:
            self._drop_unverified()
        if self.reason or not self.policy.traces(signature, len(self._programs)):
            return self.function(inputs.copy())
        return self._trace(inputs)

    def _drop_unverified(self) -> None:
        """Drop graphs whose signatures never recurred. Run eagerly from now on if none is left."""
        verified = {k: p for k, p in self._programs.items() if p.verified}
        if len(self._programs) - len(verified) < PATIENCE:
            return
        self._programs = verified
        if not (verified or self.policy.never_stop):
            self._keys, self.reason = [], "almost every call has new input shapes"

    def _eagerly(self, reason: str, inputs: Inputs) -> Outputs:
        self._stop(reason)
        return self.function(inputs.copy())

    def _stop(self, reason: str) -> None:
        self.reason = reason
        self._programs.clear()
        self._keys = []
        if self.name:
            warnings.warn(f"{self.name} runs eagerly: {reason}", stacklevel=2)

    # ------------------------------------------------------------------ tracing
    def _trace(self, inputs: Inputs) -> Outputs:
        self._names = names_of(inputs, self._names)
        self.refresh()
        if reason := self._obstacle():
            return self._eagerly(reason, inputs)
        rng = RNGState(self.watch.values())
        keys = sorted(_tensor_keys(inputs), key=str)
        try:
            recording, outputs = self._record(inputs, keys)
        except TraceError as error:
            rng.restore()
            return self._eagerly(str(error), inputs)
        if rng.drawn_on_the_host():
            self._stop("it uses random numbers from Python or NumPy")
            return outputs
        program = self._add_program(recording, keys, [*outputs], inputs)
        if program.rounds_otherwise:
            self.policy.never_stop = program.executor != "inductor"
            recording.restore()
            rng.restore()
            try:
                found = program([inputs.get(key) for key in self._keys])
            except RuntimeError as error:
                recording.restore()
                rng.restore()
                return self._eagerly(_failure_reason(error), inputs)
            outputs = {key: writable(value) for key, value in found.items()}
        recording.inputs, recording.before = [], []
        self._check_own_changes()
        return outputs

    def _obstacle(self) -> str:
        """Return the reason why the function cannot be traced, or an empty string if it can."""
        if self.watch.has_hooks():
            return "it has hooks, which a traced graph would not call"
        if self.policy.wastes_traces:
            return self._with_name("its dependencies keep changing")
        return ""

    def _record(self, inputs: Inputs, keys: list[Key]) -> tuple[Recording, dict[Key, Tensor]]:
        arguments = inputs.copy()
        names: list[Key] = []

        def function(*tensors: Tensor) -> list[Tensor]:
            for key, tensor in zip(keys, tensors):
                arguments[key] = tensor
            outputs = self.function(arguments)
            names.extend(outputs)
            return list(outputs.values())

        recording, outputs = record(function, share_no_memory([inputs.get(k) for k in keys]))
        return recording, dict(zip(names, outputs))

    def _check_own_changes(self) -> None:
        """Drop the graphs if the function changed its own attributes during tracing."""
        changed = self.watch.changed()
        if changed:
            self.clear()
        if self.policy.count_trace(changed_itself=changed):
            self._stop(self._with_name("it changes its own attributes"))

    def _with_name(self, reason: str) -> str:
        """Append the name of the changed attribute to a reason, if the name is known."""
        return f"{reason}: {self.watch.changed_name}" if self.watch.changed_name else reason

    def _add_program(
        self, recording: Recording, keys: list[Key], outputs: list[Key], inputs: Inputs
    ) -> Program:
        """Add a graph. From now on, signatures cover the combined inputs of all graphs."""
        read = [keys[number] for number in recording.inputs_read]
        if not set(read) <= set(self._keys):
            self._programs.clear()
            self._keys = sorted({*self._keys, *read}, key=str)
        places = [self._keys.index(key) for key in read]
        program = Program(
            recording,
            places,
            outputs,
            self._requested_executor,
            self._fast_products,
            self.read_only,
        )
        program.inputs_changed = [keys[number] for number in recording.inputs_changed]
        self._programs[_signature([inputs.get(key) for key in self._keys])] = program
        if len(self._programs) > MOST_GRAPHS:
            del self._programs[next(iter(self._programs))]
        return program

    # ------------------------------------------------------------------ verification
    def _verify(self, program: Program, inputs: Inputs, values: Sequence[Tensor]) -> Outputs:
        """Run the graph and function from the same state. Accept the graph if the results agree."""
        if self.refresh():
            return self._trace(inputs)
        changed = [*program.recording.changed, *map(inputs.get, program.inputs_changed)]
        rng, before = RNGState(self.watch.values()), [tensor.clone() for tensor in changed]

        def restore() -> None:
            rng.restore()
            for tensor, value in zip(changed, before):
                tensor.copy_(value)

        def outcome(run: Run) -> tuple[Sequence[Tensor], list[Tensor]]:
            try:
                return run(*program.select_inputs(values)), [tensor.clone() for tensor in changed]
            finally:
                restore()

        try:
            found = program.as_recorded(values)
        except RuntimeError as error:
            restore()
            return self._eagerly(_failure_reason(error), inputs)
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
            and not rng.drawn_on_the_host()
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


def _failure_reason(error: RuntimeError) -> str:
    """Return why an executor failed, for example because an LSTM's weights are packed."""
    cause = getattr(error, "inner_exception", None)  # set by torch.compile
    lines = str(cause or error).strip().splitlines()
    message = lines[0 if cause else -1].removeprefix("RuntimeError: ")
    reason = "torch.compile fails" if cause else "PyTorch cannot execute its traced graph"
    return f"{reason} ({message})"


def writable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a clone if it is an inference tensor."""
    return tensor.clone() if tensor.is_inference() else tensor


def _tensor_keys(inputs: Inputs) -> list[Key]:
    if isinstance(inputs, TensorDictBase):
        return [k for k in inputs.keys(True, True) if isinstance(inputs.get(k), Tensor)]
    return list(inputs)


def _signature(values: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple([v if v is None else (v.shape, v.dtype, v.stride()) for v in values])
