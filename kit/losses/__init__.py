"""Losses that TorchRL lacks, and corrected versions of TorchRL's losses."""

from kit.losses.crossq import CrossQLoss
from kit.losses.distributional import CategoricalDQNLoss, DQNLoss, QuantileDQNLoss
from kit.losses.dreamerv1 import DreamerV1Loss
from kit.losses.dreamerv3 import DreamerV3Loss
from kit.losses.due import losses_due
from kit.losses.klpen import KLPENPPOLoss
from kit.losses.offline import CQLLoss, IQLLoss, LikelihoodBCLoss
from kit.losses.plan2explore import Plan2ExploreLoss
from kit.losses.redq import REDQLoss
from kit.losses.sac import DiscreteSACLoss, DroQLoss
from kit.losses.svpg import SteinGradients
from kit.losses.td3 import TD3Loss

__all__ = [
    "CQLLoss", "CategoricalDQNLoss", "CrossQLoss", "DQNLoss", "DiscreteSACLoss", "DreamerV1Loss",
    "DreamerV3Loss", "DroQLoss", "IQLLoss", "KLPENPPOLoss", "LikelihoodBCLoss", "Plan2ExploreLoss",
    "QuantileDQNLoss", "REDQLoss", "SteinGradients", "TD3Loss", "losses_due",
]  # fmt: skip
