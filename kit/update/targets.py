"""Updates of target networks."""

from __future__ import annotations

from torchrl.objectives import HardUpdate, LossModule, SoftUpdate
from torchrl.objectives.utils import TargetNetUpdater


def make_target_updater(loss: LossModule, tau: float | None, every: int = 1) -> TargetNetUpdater:
    """Return TorchRL's soft update of a loss's target networks, or its copy of them.

    Args:
        loss: with target networks.
        tau: Polyak coefficient, the share of the online network in a target network after an
            update (Lillicrap et al. 2016, algorithm 1); 1 copies it. ``None``: 0.005, or 1 if
            updates are rarer than gradient steps.
        every: gradient steps between two updates, which :class:`~kit.update.Update` counts.
    """
    tau = (0.005 if every == 1 else 1.0) if tau is None else float(tau)
    if tau == 1.0:  # its own count is left out: it copies whenever it is called
        return HardUpdate(loss, value_network_update_interval=0)
    return SoftUpdate(loss, tau=tau)
