"""Updates of target networks."""

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
    """Return TorchRL's soft or hard update of a loss's target networks.

    Args:
        loss: loss with target networks.
        tau: Polyak coefficient, the share of the online network in a target network after an
            update (Lillicrap et al. 2016, algorithm 1); 1 copies it. ``None``: 0.005, or 1 if
            updates are rarer than gradient steps.
        every: gradient steps between two updates, which :class:`~kit.update.Update` counts.
    """
    tau = (0.005 if every == 1 else 1.0) if tau is None else float(tau)
    if tau == 1.0:  # its own count is left out: it copies whenever it is called
        return HardUpdate(loss, value_network_update_interval=0)
    return SoftUpdate(loss, tau=tau)


class TargetUpdates:
    """Updates target networks every so many gradient or policy steps.

    Args:
        updater: TorchRL's; ``None``: there are no target networks.
        every: a number of gradient steps, or text such as ``"1_000 policy steps"``.
        traces: whether a soft update is traced.

    Attributes:
        counts: ``"gradient"`` or ``"policy"``: the steps that are counted.
    """

    def __init__(self, updater: TargetNetUpdater | None, every: int | str, traces: bool) -> None:
        self.period, self.counts = _period(every)
        interval = getattr(updater, "value_network_update_interval", 0)
        whole_number("value_network_update_interval", interval)
        if every != 1 and interval:
            name = type(updater).__name__
            why = f"would call {name}, which copies only once in {interval + 1} calls"
            works = f"give {name}(..., value_network_update_interval=0)"
            raise SettingError("target_update_every", every, why, works)
        self._traces = traces
        self.replace(updater)

    def replace(self, updater: TargetNetUpdater | None) -> None:
        """Use another updater from now on."""
        self.updater = updater
        self._update: Callable[[], Any] | None = None if updater is None else updater.step
        if self._traces and isinstance(updater, SoftUpdate):
            self._update = _traced(updater)

    def move_with(self, periods: list[int]) -> bool:
        """Return whether each joint step of optimisers with these periods has a soft update."""
        if type(self.updater) is not SoftUpdate or self.counts != "gradient":
            return False
        return self.period.period in (1, *periods)

    def count(self, kind: str, steps: int, updated: bool = False) -> None:
        """Update the targets if they are due, unless the optimisers' step has updated them.

        Args:
            kind: ``"gradient"`` or ``"policy"``.
            steps: number of these steps so far.
            updated: whether the optimisers' step has updated them.
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
        """Return the updater's own state and the last step counted."""
        own = {} if self.updater is None else self.updater.state_dict()
        return {"targets": own, "target_period": self.period.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
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
    """Return the period of target updates and what it counts: gradient or policy steps."""
    if not isinstance(every, str):
        return Every(whole_number("target_update_every", every, 1)), "gradient"
    found = re.fullmatch(r"([\d_,]+) (gradient|policy) steps?", every.strip())
    if found is None:
        works = ["100 gradient steps", "1_000 policy steps"]
        raise SettingError("target_update_every", every, "is not a number of steps", works)
    count = int(found[1].replace("_", "").replace(",", "") or 0)
    return Every(whole_number("target_update_every", count, 1)), found[2]
