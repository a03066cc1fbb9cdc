"""Gradient steps that are traced once and then replayed without Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from kit.fast.optimizers import FusedOptimizers, step_is_fixed
from kit.fast.program import Outputs
from kit.fast.traced import Traced
from kit.update.groups import Due, ever_due

Kind = Literal["loss", "step"]
Function = Callable[[Due, Any], Outputs]

TRACES_STEPS = ("auto", "exact")
"""Values of ``compile`` for which the whole gradient step is traced."""


class TracedStep:
    """The traced functions of an update: two for each set of optimisers that step together.

    ``"step"`` is the whole gradient step. It is used if the optimisers' steps are fixed lists of
    operations and nothing is called between gradients and optimisers. Otherwise ``"loss"`` is used:
    loss and gradients, after which the optimisers step eagerly.

    Args:
        update: whose settings and parts the functions depend on.
        loss: computes losses and gradients.
        step: makes the whole gradient step.

    Attributes:
        traced: functions by due optimisers and kind.
        looked: steps found unchanged in an undisturbed phase; ``None`` outside of one.
    """

    def __init__(self, update: Any, loss: Function, step: Function) -> None:
        self.traced: dict[tuple[Due, Kind], Traced] = {}
        self._update = update
        self._functions: dict[Kind, Function] = {"loss": loss, "step": step}
        self._ever_due = ever_due(update.groups)
        fused = update.compile in TRACES_STEPS
        self._fused = FusedOptimizers([g.optimizer for g in update.groups] if fused else [])
        self._owned: list[list[int]] = []  # parameters of each group when losses were traced
        self.looked: set[Due] | None = None
        self._keys_read: list[Any] = []

    @property
    def reason(self) -> str:
        """Why the loss runs eagerly; empty while it does not."""
        stale = [traced.reason for traced in self.traced.values() if traced.is_stale]
        reasons = [traced.reason for (_, kind), traced in self.traced.items() if kind == "loss"]
        return next(filter(None, [*stale, *reasons]), "")

    @property
    def keys_read(self) -> list[Any]:
        """Keys of a minibatch that are read; empty if unknown, or if a verification is due."""
        if any(traced.policy.check_is_due for traced in self.traced.values()):
            return []
        read = [self._keys_of(due) for due in self._ever_due]
        if not all(read):
            return []
        keys = sorted({key for keys in read for key in keys}, key=str)
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
        """Return whether a step can be replayed, and all that it depends on is unchanged."""
        if not step.replays:
            return False
        if self.looked is not None and due in self.looked:
            return True
        self._fused.take_rates()
        if step.refresh():
            return False
        if self.looked is not None:
            self.looked.add(due)
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
