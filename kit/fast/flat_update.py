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

from kit.fast.old_trace import FlatProgram, NotTraceable, trace
from kit.fast.watch import Watch

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
    keys: list[Any]
    """what it reads, in this order."""
    metrics: list[str]
    """names of the first outputs."""
    written: list[Any]
    """keys that the loss writes into the minibatch (priorities), the outputs after those."""
    used: list[bool]
    """which parameters have a gradient; the outputs after those."""
    step: FlatProgram | None = None
    """losses, gradients, clipping and optimisers in one."""
    step_keys: list[Any] | None = None
    """what ``step`` reads, in this order."""
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
        self._watch = Watch(loss_module, *(_Group(g) for o in optimizers for g in o.param_groups))
        self._keys: list[Any] = []
        self._known: dict[Any, _Known] = {}
        self._verified = False
        self._owned: list[float] = []

    # ------------------------------------------------------------------ gradient steps
    def step(self, minibatch: TensorDictBase) -> Metrics:
        """Make one gradient step and return metrics."""
        known = self._find(minibatch)
        if known is not None and self._verified and self._fused:
            owned = self._owned_now()
            if known.step is not None and known.step_keys is not None and owned == self._owned:
                with torch.no_grad():
                    values = known.step(*map(minibatch.get, known.step_keys))
                return self._metrics_of_step(known, values, minibatch)
            if owned:
                return self._trace_step(known, minibatch)
        metrics, gradients = self._gradients(known, minibatch)
        with torch.no_grad():
            return metrics | self._apply(gradients)

    def gradients(self, minibatch: TensorDictBase) -> tuple[Metrics, Gradients]:
        """Return metrics and gradients, without a step."""
        return self._gradients(self._find(minibatch), minibatch)

    @property
    def keys_read(self) -> list[Any]:
        """Keys that the loss was seen to read; empty as long as that is not known for certain."""
        self._look()
        return list(self._keys) if self._known and self._verified else []

    # ------------------------------------------------------------------ what is known
    def _look(self) -> None:
        """Forget all traces if a setting that they have taken for granted has changed."""
        if self._watch.changed():
            self._known.clear()
            self._keys = []

    def _find(self, minibatch: TensorDictBase) -> _Known | None:
        if self.plain_reason:
            return None
        self._look()
        known = self._known.get(_signature(self._keys, minibatch))
        return known if known is not None and known.gradients.is_valid() else None

    def _gradients(
        self, known: _Known | None, minibatch: TensorDictBase
    ) -> tuple[Metrics, Gradients]:
        if self.plain_reason:
            return self._loss(minibatch)
        if known is None:
            return self._trace_gradients(minibatch)
        if not self._verified:
            return self._verify(known, minibatch)
        with torch.no_grad():
            values = known.gradients(*map(minibatch.get, known.keys))
        return self._unpack(known, values, minibatch)

    def _unpack(
        self, known: _Known, values: Sequence[Tensor], minibatch: TensorDictBase
    ) -> tuple[Metrics, Gradients]:
        place = _write(known, values, len(known.metrics), minibatch)
        gradients = iter(values[place:])
        found = [next(gradients) if used else None for used in known.used]
        return dict(zip(known.metrics, values)), found

    def _owned_now(self) -> list[float]:
        """Identity of what optimisers own: it changes when their state is loaded.

        Empty where a step is not a fixed list of operations: before the first one, and with hooks.
        """
        owned: list[float] = []
        for optimizer in self._optimizers:
            if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
                return []
            for group in optimizer.param_groups:
                rate = group["lr"]
                owned.append(id(rate) if isinstance(rate, Tensor) else rate)
                states = (optimizer.state.get(parameter) for parameter in group["params"])
                state = next((state for state in states if state), None)
                if state is not None:
                    owned.extend(map(id, state.values()))
                elif not isinstance(optimizer, SGD) or group["momentum"]:
                    return []
        return owned

    # ------------------------------------------------------------------ tracing
    def _trace_gradients(self, minibatch: TensorDictBase) -> tuple[Metrics, Gradients]:
        given = minibatch.copy()
        keys = sorted((k for k in given.keys(True, True) if _is_tensor(given, k)), key=str)
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
        read = [keys[number] for number in program.inputs_read]
        known = _Known(program, read, found["metrics"], found["written"], found["used"])
        if not set(read) <= set(self._keys):
            self._known.clear()  # minibatches are told apart by what is read of them
            self._keys = sorted({*self._keys, *read}, key=str)
        self._known[_signature(self._keys, minibatch)] = known
        # A loss that changes its own buffers must not be run twice to compare.
        self._verified = self._verified or program.changes_constants
        return self._unpack(known, values, minibatch)

    def _trace_step(self, known: _Known, minibatch: TensorDictBase) -> Metrics:
        given = minibatch.copy()
        found: dict[str, Any] = {}

        def step(*tensors: Tensor) -> list[Tensor]:
            metrics, gradients = self._loss_of(known.keys, tensors, given, found)
            with torch.no_grad():
                metrics |= self._apply(gradients)
            found["metrics"] = list(metrics)
            extra = [given.get(key).detach() for key in found["written"]]
            return [*metrics.values(), *extra]

        known.step, values = trace(step, [given.get(key) for key in known.keys])
        known.step_keys = [known.keys[number] for number in known.step.inputs_read]
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

    def _verify(self, known: _Known, minibatch: TensorDictBase) -> tuple[Metrics, Gradients]:
        """Run both ways once, from the same random numbers, and go on with the trace if they agree.

        Compiled programs round differently, so they are only asked to be close.
        """
        generator = torch.get_rng_state()
        with torch.no_grad():
            values = known.gradients(*map(minibatch.get, known.keys))
        fast, fast_gradients = self._unpack(known, values, minibatch.copy())
        torch.set_rng_state(generator)
        plain, gradients = self._loss(minibatch)
        pairs: list[tuple[Any, Any]] = [(fast[name], plain[name]) for name in plain]
        pairs += [(a, b) for a, b in zip(fast_gradients, gradients) if a is not None]
        same = _close if self._compile else _equal
        self._verified = all(b is not None and same(a, b) for a, b in pairs)
        if not self._verified:
            self._tell("it does not repeat itself: something in it changes from call to call")
        return plain, gradients

    def _tell(self, reason: str) -> None:
        self.plain_reason = reason
        warnings.warn(f"{self._name} runs eagerly, not as a flat program: {reason}", stacklevel=2)


class _Group:
    def __init__(self, group: dict[str, Any]) -> None:
        self.__dict__ = group


def _signature(keys: Sequence[Any], minibatch: TensorDictBase) -> tuple[Any, ...]:
    """Shapes and types of what is read: a program is for one of these only."""
    values = (minibatch.get(key, None) for key in keys)
    return tuple(None if value is None else (value.shape, value.dtype) for value in values)


def _is_tensor(given: TensorDictBase, key: Any) -> bool:
    return isinstance(given.get(key), Tensor)


def _write(known: _Known, values: Sequence[Tensor], place: int, minibatch: TensorDictBase) -> int:
    """Put what the loss writes into the minibatch; return the place after it."""
    for key in known.written:
        minibatch.set(key, values[place])
        place += 1
    return place


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


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
