"""Gradient steps that are traced once and then replayed without Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from kit.fast.optimizers import FusedOptimizers, step_is_fixed
from kit.fast.program import Outputs
from kit.fast.traced import Traced
from kit.update.gradient_vectors import Layout
from kit.update.groups import Due, ever_due

Kind = Literal["loss", "step"] | Layout
"""Part of a gradient step. A layout is the part after averaging gradients with this layout."""
Function = Callable[[Due, Any], Outputs]

TRACES_STEPS = ("auto", "exact")
"""Values of ``compile`` for which the whole gradient step is traced."""


class TracedStep:
    """Traced functions for an update, for each set of optimisers that step together.

    ``"step"`` is the whole gradient step. It is used if the optimisers' steps are fixed lists of
    operations and no hook runs between gradients and optimisers. Otherwise, ``"loss"`` computes
    loss and gradients, and the optimisers step eagerly.

    With several ranks, ``"loss"`` returns the gradients as one vector. After the vector has been
    averaged, another traced function clips it and steps the optimisers.

    Args:
        update: Update whose settings and parts the functions depend on.
        loss: Computes losses and gradients.
        step: Computes the whole gradient step.
        step_along: Computes the gradient step from averaged gradients.

    Attributes:
        traced: Traced functions, keyed by due optimisers and kind.
        looked: Keys of traced functions that were already checked for changes; ``None`` unless
            ``update.undisturbed`` is true.
    """

    def __init__(
        self,
        update: Any,
        loss: Function,
        step: Function,
        step_along: Callable[[Layout, Due, Any], Outputs],
    ) -> None:
        self.traced: dict[tuple[Due, Kind], Traced] = {}
        self._update = update
        self._functions: dict[Kind, Function] = {"loss": loss, "step": step}
        self._step_along = step_along
        self._ever_due = ever_due(update.groups)
        fused = update.compile in TRACES_STEPS
        self._fused = FusedOptimizers([g.optimizer for g in update.groups] if fused else [])
        self._owned: list[list[int]] = []  # parameter ids of each group at tracing time
        self.looked: set[tuple[Due, Kind]] | None = None
        self._keys_read: list[Any] = []

    @property
    def reason(self) -> str:
        """Reason why the loss runs eagerly; empty if it is traced."""
        stale = [traced.reason for traced in self.traced.values() if traced.is_stale]
        reasons = [traced.reason for (_, kind), traced in self.traced.items() if kind == "loss"]
        return next(filter(None, [*stale, *reasons]), "")

    @property
    def keys_read(self) -> list[Any]:
        """Minibatch keys that the loss reads; empty if unknown or if the trace must be verified."""
        if any(traced.policy.check_is_due for traced in self.traced.values()):
            return []
        read = [self._keys_of(due) for due in self._ever_due]
        if not all(read):
            return []
        keys = sorted({key for keys in read for key in keys}, key=str)
        if keys != self._keys_read:  # Callers compare this list by identity.
            self._keys_read = keys
        return self._keys_read

    def _keys_of(self, due: Due) -> list[Any]:
        """Return the keys that the traced function reads; empty if there is no valid trace."""
        step = self.traced.get((due, "step"))
        if step is not None and self._is_valid(due, "step"):
            return step.keys_read
        loss = self.traced.get((due, "loss"))
        if loss is None or loss.refresh():
            return []
        return loss.keys_read

    def clear(self) -> None:
        """Drop all traced graphs."""
        for traced in self.traced.values():
            traced.clear()

    def step(self, due: Due, layout: Layout | None = None) -> Traced | None:
        """Return the traced gradient step, or ``None`` if the step cannot be traced.

        Args:
            due: Optimisers that step together.
            layout: Layout of averaged gradients, from which the step is computed; ``None``: the
                step also computes the loss and the gradients.
        """
        kind: Kind = "step" if layout is None else layout
        update, step = self._update, self.traced.get((due, kind))
        has_hook = update.post_backward is not None
        if step is not None and not has_hook and self._is_valid(due, kind):
            return step
        self._fused.update()
        if has_hook or update.compile not in TRACES_STEPS or not self._is_fixed(due, kind):
            return None
        step = self._trace(due, kind)
        if step.reason:
            return None
        step.refresh()
        return step

    def _is_fixed(self, due: Due, kind: Kind) -> bool:
        """Return whether the optimisers' steps, and the loss if included, can be traced."""
        loss = self.traced.get((due, "loss")) if kind == "step" else None
        optimizers = [self._update.groups[number].optimizer for number in due]
        return (loss is None or not loss.reason) and step_is_fixed(optimizers)

    def _is_valid(self, due: Due, kind: Kind) -> bool:
        """Return whether a traced step can be replayed and its dependencies are unchanged."""
        step = self.traced[due, kind]
        if not step.replays:
            return False
        if self.looked is not None and (due, kind) in self.looked:
            return True
        self._fused.take_rates()
        if step.refresh():
            return False
        if self.looked is not None:
            self.looked.add((due, kind))
        return True

    def loss(self, due: Due) -> Traced:
        """Return the traced function that computes loss and gradients."""
        if self.looked is not None and (due, "loss") in self.looked:
            return self.traced[due, "loss"]
        owned = [[*map(id, group.parameters)] for group in self._update.groups]
        if owned != self._owned:  # Gradients are identified by parameter index.
            self._owned = owned
            self.clear()
        loss = self._trace(due, "loss")
        loss.refresh()
        # An optimiser that steps eagerly may move the weights in memory.
        averages = self._update.averages_gradients
        if self.looked is not None and averages and self._is_fixed(due, "loss"):
            self.looked.add((due, "loss"))
        return loss

    def _trace(self, due: Due, kind: Kind) -> Traced:
        if (due, kind) not in self.traced:
            update = self._update
            watched: list[Any] = [] if kind == "loss" else self._parts(due)
            has_loss = isinstance(kind, str)
            if isinstance(kind, str):
                function = functools.partial(self._functions[kind], due)
                watched.insert(0, update.loss_module)
            else:
                function = functools.partial(self._step_along, kind, due)
            self.traced[due, kind] = Traced(
                function,
                *watched,
                name=type(update.loss_module).__name__,
                executor="inductor" if update.compile is True else "auto",
                read_only=kind != "loss" or update.averages_gradients,
                # Fast products depend on the processor, but all ranks must compute equal weights.
                fast_products=has_loss and update.compile == "auto" and not update.shapes_vary,
            )
        return self.traced[due, kind]

    def _parts(self, due: Due) -> list[Any]:
        """Return the dependencies of a gradient step other than the loss module."""
        update = self._update
        changes = [] if update.change_gradients is None else [update.change_gradients]
        targets = [update.target_updater] if update.targets_move_with(due) else []
        return [*changes, *[update.groups[number].optimizer for number in due], *targets]
