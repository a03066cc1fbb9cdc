"""Target network updates."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torchrl.objectives import HardUpdate, LossModule, SoftUpdate
from torchrl.objectives.utils import TargetNetUpdater

from kit.fast.traced import Traced
from kit.steps import SettingError
from kit.steps.errors import whole_number
from kit.steps.every import Every


def make_target_updater(loss: LossModule, tau: float | None, every: int = 1) -> TargetNetUpdater:
    """Create TorchRL's soft or hard updater for a loss's target networks.

    Args:
        loss: Loss with target networks.
        tau: Polyak coefficient, the weight of the online network in an update (Lillicrap et al.
            2016, algorithm 1); 1 copies the online network. ``None``: 0.005, or 1 if ``every`` is
            above 1.
        every: Number of gradient steps per target update, counted by :class:`~kit.update.Update`.
    """
    tau = (0.005 if every == 1 else 1.0) if tau is None else float(tau)
    if tau == 1.0:  # With interval 0, every call copies the weights.
        return HardUpdate(loss, value_network_update_interval=0)
    return SoftUpdate(loss, tau=tau)


class TargetUpdates:
    """Updates target networks at a fixed interval of gradient or policy steps.

    Args:
        updater: TorchRL's updater; ``None``: there are no target networks.
        every: Number of gradient steps, or a string such as ``"1_000 policy steps"``.
        traces: Whether soft updates are traced.

    Attributes:
        counts: Unit of the interval: ``"gradient"`` or ``"policy"`` steps.
    """

    def __init__(self, updater: TargetNetUpdater | None, every: int | str, traces: bool) -> None:
        self.period, self.counts = _period(every)
        interval = getattr(updater, "value_network_update_interval", 0)
        whole_number("value_network_update_interval", interval)
        if every != 1 and interval:
            name = type(updater).__name__
            reason = f"{name} itself copies the weights only once every {interval + 1} calls"
            hint = f"Use {name}(..., value_network_update_interval=0)"
            raise SettingError("target_update_every", every, reason, hint)
        self._traces = traces
        self.replace(updater)

    def replace(self, updater: TargetNetUpdater | None) -> None:
        """Replace the updater."""
        self.updater = updater
        self._update: Callable[[], Any] | None = None if updater is None else updater.step
        if self._traces and isinstance(updater, SoftUpdate):
            self._update = _traced(updater)

    def move_with(self, periods: list[int]) -> bool:
        """Return whether a soft update is due whenever optimisers with these periods all step."""
        if type(self.updater) is not SoftUpdate or self.counts != "gradient":
            return False
        return self.period.period in (1, *periods)

    def count(self, kind: str, steps: int, updated: bool = False) -> None:
        """Update the targets if due, unless the traced gradient step has already updated them.

        Args:
            kind: ``"gradient"`` or ``"policy"``.
            steps: Number of steps of this kind so far.
            updated: Whether the traced gradient step has updated the targets.
        """
        if kind != self.counts:
            return
        due = self.period(steps)
        if self._update is None or updated:
            return
        with torch.no_grad():
            for _ in range(due):
                self._update()

    def state_dict(self) -> dict[str, Any]:
        """Return the updater's state and the last step count that was checked for updates."""
        targets = {} if self.updater is None else self.updater.state_dict()
        return {"targets": targets, "target_period": self.period.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        if self.updater is not None:
            self.updater.load_state_dict(state_dict["targets"])
        self.period.load_state_dict(state_dict["target_period"])


def _traced(updater: SoftUpdate) -> Callable[[], None]:
    traced = Traced(lambda _: updater.step() or {}, updater, name=type(updater).__name__)

    def update() -> None:
        traced.refresh()
        traced({})

    return update


def _period(every: int | str) -> tuple[Every, str]:
    """Return the interval of target updates and its unit, ``"gradient"`` or ``"policy"``."""
    if not isinstance(every, str):
        return Every(whole_number("target_update_every", every, 1)), "gradient"
    found = re.fullmatch(r"([\d_,]+) (gradient|policy) steps?", every.strip())
    if found is None:
        hint = ["100 gradient steps", "1_000 policy steps"]
        reason = "The interval must be a number of gradient or policy steps"
        raise SettingError("target_update_every", every, reason, hint)
    count = int(found[1].replace("_", "").replace(",", "") or 0)
    return Every(whole_number("target_update_every", count, 1)), found[2]
