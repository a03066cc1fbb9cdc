"""Hooks that transform the rewards used for training."""

from __future__ import annotations

from typing import ClassVar

import torch
from tensordict import TensorDictBase

from kit.hooks.base import Kind, KitHook

_REWARD = ("next", "reward")
_MIN_STD = 1e-8
"""Lower bound for the standard deviation by which rewards are divided."""


class ScaleReward(KitHook):
    """Standardises and scales the rewards in every minibatch. Logged returns are unchanged.

    Args:
        scale: reward scale (Haarnoja et al. 2018, section 5.2). Larger values reduce the relative
            weight of the entropy bonus.
        standardize: whether to first standardise each minibatch's rewards to zero mean and unit
            variance. As in PyTorch and pyrado, this uses the sample standard deviation (n - 1).
    """

    kind: Kind = "step"
    reads_minibatches = True
    operations: ClassVar = {"process_optim_batch": "scaled"}

    def __init__(self, scale: float = 1.0, standardize: bool = False) -> None:
        self.scale, self.standardize = scale, standardize

    def scaled(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Standardise and scale the rewards in a minibatch, in place."""
        reward = minibatch.get(_REWARD)
        if self.standardize:
            correction = min(reward.numel() - 1, 1)  # a single reward has no sample std
            std, mean = torch.std_mean(reward, correction=correction)
            reward = (reward - mean) / std.clamp_min(_MIN_STD)
        return minibatch.set(_REWARD, reward * self.scale)


class SignReward(KitHook):
    """Replaces the rewards in every minibatch with their signs (Mnih et al. 2015)."""

    kind: Kind = "step"
    reads_minibatches = True
    operations: ClassVar = {"process_optim_batch": "signs"}

    def signs(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Replace the rewards in a minibatch with their signs, in place."""
        return minibatch.set(_REWARD, minibatch.get(_REWARD).sign())
