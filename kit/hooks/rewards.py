"""Hooks that transform the rewards used for training."""

from __future__ import annotations

from typing import ClassVar

import torch
from tensordict import TensorDictBase

from kit.hooks.base import Kind, KitHook

_REWARD = ("next", "reward")
_MIN_STD = 1e-8
"""Lower bound of the standard deviation that rewards are divided by."""


class ScaleReward(KitHook):
    """Standardises and scales the rewards of every minibatch. Logged returns are unchanged.

    Args:
        scale: factor of the rewards (Haarnoja et al. 2018, section 5.2). Larger values reduce the
            weight of the entropy bonus.
        standardize: whether to first standardise rewards to mean 0 and standard deviation 1 over
            the minibatch, with the sample standard deviation (n - 1), as in PyTorch and pyrado.
    """

    kind: Kind = "step"
    reads_minibatches = True
    operations: ClassVar = {"process_optim_batch": "scaled"}

    def __init__(self, scale: float = 1.0, standardize: bool = False) -> None:
        self.scale, self.standardize = scale, standardize

    def scaled(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Standardise and scale the rewards of a minibatch in place."""
        reward = minibatch.get(_REWARD)
        if self.standardize:
            correction = min(reward.numel() - 1, 1)  # a single reward has no sample std
            std, mean = torch.std_mean(reward, correction=correction)
            reward = (reward - mean) / std.clamp_min(_MIN_STD)
        return minibatch.set(_REWARD, reward * self.scale)


class SignReward(KitHook):
    """Replaces the rewards of every minibatch by their signs (Mnih et al. 2015)."""

    kind: Kind = "step"
    reads_minibatches = True
    operations: ClassVar = {"process_optim_batch": "signs"}

    def signs(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Replace the rewards of a minibatch in place by their signs."""
        return minibatch.set(_REWARD, minibatch.get(_REWARD).sign())
