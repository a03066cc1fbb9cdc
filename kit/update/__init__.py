"""Gradient steps: minibatch, loss, gradients, clipping, optimisers, target networks."""

from __future__ import annotations

from kit.update.targets import make_target_updater
from kit.update.trust_region import TrustRegion
from kit.update.update import Compile, Update, in_precision

__all__ = ["Compile", "TrustRegion", "Update", "in_precision", "make_target_updater"]
