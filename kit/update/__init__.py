"""Gradient steps, including clipping, optimisers and target networks."""

from __future__ import annotations

from kit.update.targets import make_target_updater
from kit.update.trust_region import TrustRegion
from kit.update.update import Compile, Update, autocast_loss

__all__ = ["Compile", "TrustRegion", "Update", "autocast_loss", "make_target_updater"]
