"""Losses that TorchRL lacks, or that need a correction."""

from kit.losses.distributional import DistributionalDQNLoss
from kit.losses.dreamerv3 import DreamerV3Loss

__all__ = ["DistributionalDQNLoss", "DreamerV3Loss"]
