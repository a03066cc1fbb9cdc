"""A gradient step as a flat program: what :class:`~kit.update.Update` runs where it can."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from kit.tracing import FlatProgram, NotTraceable, Watch, trace

Metrics = dict[str, Tensor]
Gradients = Sequence[Tensor | None]
Loss = Callable[[TensorDictBase], tuple[Metrics, Gradients]]
Apply = Callable[[Gradients], Metrics]

_FUSED = (Adam, AdamW, SGD, Adagrad)


@dataclass
class _Known:
    """What is known about minibatches of one shape."""

    gradients: FlatProgram
    """losses and gradients."""
    metrics: list[str]
    """names of the first outputs."""
    written: list[Any]
    """keys that the loss writes into the minibatch (priorities), the outputs after those."""
    used: list[bool]
    """which parameters have a gradient; the outputs after those."""
    step: FlatProgram | None = None
    """losses, gradients, clipping and optimisers in one."""
    step_metrics: list[str] | None = None
    """names of the first outputs of ``step``."""


class FlatUpdate:
    """Traces a loss with its gradients, and with fused optimisers the whole gradient step.

    For minibatches of a new shape the loss is traced; the first trace is compared, bitwise, with an
    eager call from the same random numbers. From then on the whole step is traced where the
    optimisers allow it. Results are those of eager execution.

    Args:
        loss_module: whose settings a trace takes for granted.
        loss: returns metrics and gradients for a minibatch.
        apply: clips gradients, lets the optimisers step, returns metrics.
        optimizers: all that ``apply`` uses.
        compile: whether ``torch.compile`` compiles what is traced.

    Attributes:
        plain_reason: why the loss cannot be traced; empty while it can.
    """

    def __init__(
        self,
        loss_module: nn.Module,
        loss: Loss,
        apply: Apply,
        optimizers: Sequence[Optimizer],
        compile: bool,
    ) -> None:
        self.plain_reason = ""
        self._name = type(loss_module).__name__
        self._loss, self._apply = loss, apply
        self._optimizers = list(optimizers)
        self._fused = not compile and all(map(_is_fused, optimizers))
        if self._fused:
            _rates_as_tensors(optimizers)
        self._compile = compile
        self._watch = Watch(loss_module, [g for o in optimizers for g in o.param_groups])
        self._keys: list[Any] = []
        self._known: dict[Any, _Known] = {}
        self._verified = False
        self._owned: list[int] = []

    # ------------------------------------------------------------------ gradient steps
    def step(self, minibatch: TensorDictBase) -> Metrics:
        """Make one gradient step and return metrics."""
        known, inputs = self._find(minibatch)
        if known is not None and known.step is not None and self._owned == self._owned_now():
            with torch.no_grad():
                values = known.step(*[inputs[n] for n in known.step.inputs_read])
            return self._metrics_of_step(known, values, minibatch)
        if known is not None and self._verified and self._fused and self._owned_now():
            return self._trace_step(known, minibatch, inputs)
        metrics, gradients = self._gradients(known, minibatch, inputs)
        with torch.no_grad():
            return metrics | self._apply(gradients)

    def gradients(self, minibatch: TensorDictBase) -> tuple[Metrics, Gradients]:
        """Return metrics and gradients, without a step."""
        known, inputs = self._find(minibatch)
        return self._gradients(known, minibatch, inputs)

    @property
    def keys_read(self) -> list[Any]:
        """Keys that the loss was seen to read; empty until a trace of it is known to be right."""
        return list(self._keys) if self._verified and not self.plain_reason else []

    # ------------------------------------------------------------------ what is known
    def _find(self, minibatch: TensorDictBase) -> tuple[_Known | None, list[Any]]:
        if self._watch.changed():
            # A setting that a trace has taken for granted, such as a coefficient kept as a float.
            self._known.clear()
        inputs = [minibatch.get(key, None) for key in self._keys]
        known = self._known.get(_shapes(inputs))
        if known is not None and not known.gradients.is_valid():
            known = None
        return known, inputs

    def _gradients(
        self, known: _Known | None, minibatch: TensorDictBase, inputs: list[Any]
    ) -> tuple[Metrics, Gradients]:
        if self.plain_reason:
            return self._loss(minibatch)
        if known is None:
            return self._trace_gradients(minibatch)
        if not self._verified:
            return self._verify(known, minibatch, inputs)
        with torch.no_grad():
            values = known.gradients(*inputs)
        return self._unpack(known, values, minibatch)

    def _unpack(
        self, known: _Known, values: Sequence[Tensor], minibatch: TensorDictBase
    ) -> tuple[Metrics, Gradients]:
        place = _write(known, values, len(known.metrics), minibatch)
        gradients = iter(values[place:])
        found = [next(gradients) if used else None for used in known.used]
        return dict(zip(known.metrics, values)), found

    def _owned_now(self) -> list[int]:
        """Identity of what optimisers own: it changes when their state is loaded."""
        owned: list[int] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                owned.append(id(group["lr"]))
                state = optimizer.state.get(group["params"][0], {})
                owned.extend(id(value) for value in state.values())
                if not state and not isinstance(optimizer, SGD):
                    return []
        return owned

    # ------------------------------------------------------------------ tracing
    def _trace_gradients(self, minibatch: TensorDictBase) -> tuple[Metrics, Gradients]:
        given = minibatch.copy()
        keys = [key for key in given.keys(True, True) if isinstance(given.get(key), Tensor)]
        inputs = [given.get(key) for key in keys]
        found: dict[str, Any] = {}

        def loss(*tensors: Tensor) -> list[Tensor]:
            metrics, gradients = self._loss_of(keys, tensors, given, found)
            found["used"] = [gradient is not None for gradient in gradients]
            extra = [given.get(key).detach() for key in found["written"]]
            return [*metrics.values(), *extra, *(g for g in gradients if g is not None)]

        generator = torch.get_rng_state()
        try:
            program, values = trace(loss, inputs, compile=self._compile)
        except NotTraceable as reason:
            self._tell(str(reason))
            torch.set_rng_state(generator)
            return self._loss(minibatch)
        self._keys = [keys[number] for number in program.inputs_read]
        known = _Known(program, found["metrics"], found["written"], found["used"])
        self._known[_shapes([inputs[number] for number in program.inputs_read])] = known
        # A loss that changes its own buffers must not be run twice to compare.
        self._verified = self._verified or program.changes_constants
        return self._unpack(known, values, minibatch)

    def _trace_step(
        self, known: _Known, minibatch: TensorDictBase, inputs: list[Tensor]
    ) -> Metrics:
        given = minibatch.copy()
        found: dict[str, Any] = {}

        def step(*tensors: Tensor) -> list[Tensor]:
            metrics, gradients = self._loss_of(self._keys, tensors, given, found)
            with torch.no_grad():
                metrics |= self._apply(gradients)
            found["metrics"] = list(metrics)
            extra = [given.get(key).detach() for key in found["written"]]
            return [*metrics.values(), *extra]

        known.step, values = trace(step, inputs)
        known.step_metrics = found["metrics"]
        self._owned = self._owned_now()
        return self._metrics_of_step(known, values, minibatch)

    def _loss_of(
        self,
        keys: list[Any],
        tensors: Sequence[Tensor],
        given: TensorDictBase,
        found: dict[str, Any],
    ) -> tuple[Metrics, Gradients]:
        """Call the loss, and note its metrics' names and what it writes into the minibatch."""
        before = dict(zip(keys, tensors))
        for key, tensor in before.items():
            given.set(key, tensor)
        others = {key: given.get(key) for key in given.keys(True, True)} | before
        metrics, gradients = self._loss(given)
        found["metrics"] = list(metrics)
        found["written"] = [
            key for key in given.keys(True, True) if given.get(key) is not others.get(key)
        ]
        return metrics, gradients

    def _metrics_of_step(
        self, known: _Known, values: Sequence[Tensor], minibatch: TensorDictBase
    ) -> Metrics:
        assert known.step_metrics is not None
        _write(known, values, len(known.step_metrics), minibatch)
        return dict(zip(known.step_metrics, values))

    def _verify(
        self, known: _Known, minibatch: TensorDictBase, inputs: list[Tensor]
    ) -> tuple[Metrics, Gradients]:
        """Run both ways once, from the same random numbers, and go on with the trace if they agree.

        Compiled programs round differently, so they are only asked to be close.
        """
        generator = torch.get_rng_state()
        with torch.no_grad():
            values = known.gradients(*inputs)
        fast, fast_gradients = self._unpack(known, values, minibatch.copy())
        torch.set_rng_state(generator)
        plain, gradients = self._loss(minibatch)
        pairs = [(fast[name], plain[name]) for name in plain]
        pairs += [(a, b) for a, b in zip(fast_gradients, gradients) if a is not None]
        same = _close if self._compile else torch.equal
        self._verified = all(b is not None and same(a, b) for a, b in pairs)
        if not self._verified:
            self._tell("it does not repeat itself: something in it changes from call to call")
        return plain, gradients

    def _tell(self, reason: str) -> None:
        self.plain_reason = reason
        warnings.warn(f"{self._name} runs eagerly, not as a flat program: {reason}", stacklevel=2)


def _shapes(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(None if value is None else value.shape for value in inputs)


def _write(known: _Known, values: Sequence[Tensor], place: int, minibatch: TensorDictBase) -> int:
    """Put what the loss writes into the minibatch; return the place after it."""
    for key in known.written:
        minibatch.set(key, values[place])
        place += 1
    return place


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)


def _is_fused(optimizer: Optimizer) -> bool:
    """Whether a step is a fixed list of operations: the fused optimisers' is."""
    return type(optimizer) in _FUSED and all(g.get("fused") for g in optimizer.param_groups)


def _rates_as_tensors(optimizers: Sequence[Optimizer]) -> None:
    """Keep learning rates in tensors, so that a program sees every change of them."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
