"""Losses that TorchRL lacks, or that need a correction."""

from kit.losses.distributional import DistributionalDQNLoss

__all__ = ["DistributionalDQNLoss"]
