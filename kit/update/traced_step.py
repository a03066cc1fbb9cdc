"""Gradient steps that are traced once and then replayed without Python."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from torch import nn

from kit.fast.optimizers import FusedOptimizers, step_is_fixed
from kit.fast.program import Outputs
from kit.fast.traced import Traced
from kit.update.groups import Due, Group, ever_due

Kind = Literal["loss", "step"]
Function = Callable[[Due, Any], Outputs]

TRACES_STEPS = ("auto", "exact")
"""Values of ``compile`` for which the whole gradient step is traced."""


class Traceable(Protocol):
    """Settings and parts of an update that its traced functions depend on."""

    compile: Any
    change_gradients: Any
    post_backward: Callable[[], None] | None
    shapes_vary: bool
    target_updater: Any

    @property
    def loss_module(self) -> nn.Module:
        """The loss."""

    @property
    def groups(self) -> Sequence[Group]:
        """Optimisers with their losses."""

    def targets_move_with(self, due: Due) -> bool:
        """Return whether target networks are updated within the step."""


class TracedStep:
    """The traced functions of an update: two for each set of optimisers that step together.

    ``"step"`` is the whole gradient step. It is used if the optimisers' steps are fixed lists of
    operations and nothing is called between gradients and optimisers. Otherwise ``"loss"`` is used:
    loss and gradients, after which the optimisers step eagerly. Each
    :class:`~kit.fast.traced.Traced` keeps the state of its input signatures, and its
    :class:`~kit.fast.policy.TracingPolicy` decides when tracing is worth it.

    Args:
        update: whose settings and parts the functions depend on.
        loss: computes losses and gradients.
        step: makes the whole gradient step.

    Attributes:
        traced: functions by due optimisers and kind.
    """

    def __init__(self, update: Traceable, loss: Function, step: Function) -> None:
        self.traced: dict[tuple[Due, Kind], Traced] = {}
        self._update = update
        self._functions: dict[Kind, Function] = {"loss": loss, "step": step}
        self._ever_due = ever_due(update.groups)
        fused = update.compile in TRACES_STEPS
        self._fused = FusedOptimizers([g.optimizer for g in update.groups] if fused else [])
        self._owned: list[list[int]] = []  # parameters of each group when losses were traced
        self._looked: set[Due] | None = None  # in an undisturbed phase: steps found unchanged
        self._keys_read: list[Any] = []

    @property
    def reason(self) -> str:
        """Why the loss runs eagerly; empty while it does not."""
        stale = [traced.reason for traced in self.traced.values() if traced.is_stale]
        reasons = [traced.reason for (_, kind), traced in self.traced.items() if kind == "loss"]
        return next(filter(None, [*stale, *reasons]), "")

    @property
    def undisturbed(self) -> bool:
        """Whether nothing but gradient steps changes what these depend on, from now on."""
        return self._looked is not None

    @undisturbed.setter
    def undisturbed(self, value: bool) -> None:
        self._looked = set() if value else None

    @property
    def keys_read(self) -> list[Any]:
        """Keys of a minibatch that are read; empty if unknown, or if a verification is due."""
        if any(traced.check_is_due for traced in self.traced.values()):
            return []
        read = []
        for due in self._ever_due:
            if not (keys := self._keys_of(due)):
                return []
            read.append(keys)
        keys = read[0] if len(read) == 1 else sorted({k for keys in read for k in keys}, key=str)
        if keys != self._keys_read:  # readers recognise the list
            self._keys_read = keys
        return self._keys_read

    def _keys_of(self, due: Due) -> list[Any]:
        """Keys that the replayed function reads; empty if there is none."""
        step = self.traced.get((due, "step"))
        if step is not None and self._is_known(due, step):
            return step.keys_read
        loss = self.traced.get((due, "loss"))
        if loss is None or loss.refresh():
            return []
        return loss.keys_read

    def clear(self) -> None:
        """Drop all traced graphs."""
        for traced in self.traced.values():
            traced.clear()

    def step(self, due: Due) -> Traced | None:
        """Return the whole gradient step, or ``None`` if it is not one list of operations."""
        update, step = self._update, self.traced.get((due, "step"))
        open_to_hooks = update.post_backward is not None
        if step is not None and not open_to_hooks and self._is_known(due, step):
            return step
        self._fused.update()
        if open_to_hooks or update.compile not in TRACES_STEPS or not self._is_fixed(due):
            return None
        step = self._trace(due, "step")
        if step.reason:
            return None
        step.refresh()
        return step

    def _is_fixed(self, due: Due) -> bool:
        """Return whether the loss can be traced and the optimisers' steps are always the same."""
        loss = self.traced.get((due, "loss"))
        optimizers = [self._update.groups[number].optimizer for number in due]
        return (loss is None or not loss.reason) and step_is_fixed(optimizers)

    def _is_known(self, due: Due, step: Traced) -> bool:
        """Return whether a step can be replayed, and all that it depends on is unchanged.

        In an undisturbed phase, changes are looked for once.
        """
        if not step.replays:
            return False
        if self._looked is not None and due in self._looked:
            return True
        self._fused.take_rates()
        if step.refresh():
            return False
        if self._looked is not None:
            self._looked.add(due)
        return True

    def loss(self, due: Due) -> Traced:
        """Return the function of loss and gradients."""
        owned = [[*map(id, group.parameters)] for group in self._update.groups]
        if owned != self._owned:  # gradients are numbered by their parameters
            self._owned = owned
            self.clear()
        loss = self._trace(due, "loss")
        loss.refresh()
        return loss

    def _trace(self, due: Due, kind: Kind) -> Traced:
        if (due, kind) not in self.traced:
            update = self._update
            self.traced[due, kind] = Traced(
                functools.partial(self._functions[kind], due),
                update.loss_module,
                *(self._parts(due) if kind == "step" else ()),
                name=type(update.loss_module).__name__,
                executor="inductor" if update.compile is True else "auto",
                read_only=kind == "step",
                fast_products=update.compile == "auto" and not update.shapes_vary,
            )
        return self.traced[due, kind]

    def _parts(self, due: Due) -> list[Any]:
        """What a whole gradient step depends on, besides the loss module."""
        update = self._update
        changes = [] if update.change_gradients is None else [update.change_gradients]
        targets = [update.target_updater] if update.targets_move_with(due) else []
        return [*changes, *[update.groups[number].optimizer for number in due], *targets]
