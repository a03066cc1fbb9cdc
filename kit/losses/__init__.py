"""Losses that TorchRL lacks, or that need a correction."""

from kit.losses.distributional import CategoricalDQNLoss, DQNLoss, QuantileDQNLoss
from kit.losses.dreamerv3 import DreamerV3Loss
from kit.losses.droq import DroQLoss

__all__ = ["CategoricalDQNLoss", "DQNLoss", "DreamerV3Loss", "DroQLoss", "QuantileDQNLoss"]
