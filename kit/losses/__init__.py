"""Losses that TorchRL lacks, or that need a correction."""

from kit.losses.distributional import DistributionalDQNLoss
from kit.losses.dreamerv3 import DreamerV3Loss
from kit.losses.droq import DroQLoss

__all__ = ["DistributionalDQNLoss", "DreamerV3Loss", "DroQLoss"]
