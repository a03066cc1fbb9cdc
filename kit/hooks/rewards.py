"""Rewards as they are learned from."""

from __future__ import annotations

from typing import ClassVar

import torch
from tensordict import TensorDictBase

from kit.hooks.base import Kind, KitHook

_REWARD = ("next", "reward")
_LEAST = 1e-8
"""Standard deviation that rewards are divided by, at least."""


class ScaleReward(KitHook):
    """Standardises and scales the rewards of every minibatch; returns are logged as they are.

    Args:
        scale: factor of the rewards (Haarnoja et al. 2018, section 5.2): the larger, the less the
            entropy counts beside them.
        standardize: whether they get mean 0 and standard deviation 1 over the minibatch before
            that; the deviation is that of a sample (n - 1), as PyTorch's and pyrado's.
    """

    kind: Kind = "step"
    reads_minibatches = True
    operations: ClassVar = {"process_optim_batch": "scaled"}

    def __init__(self, scale: float = 1.0, standardize: bool = False) -> None:
        self.scale, self.standardize = scale, standardize

    def scaled(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Replace the rewards of a minibatch, which belongs to the gradient step alone."""
        reward = minibatch.get(_REWARD)
        if self.standardize:
            correction = min(reward.numel() - 1, 1)  # a single reward has no sample deviation
            deviation, mean = torch.std_mean(reward, correction=correction)
            reward = (reward - mean) / deviation.clamp_min(_LEAST)
        return minibatch.set(_REWARD, reward * self.scale)


class SignReward(KitHook):
    """Replaces the rewards of every minibatch by their signs (Mnih et al. 2015, methods)."""

    kind: Kind = "step"
    reads_minibatches = True
    operations: ClassVar = {"process_optim_batch": "signs"}

    def signs(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Replace the rewards of a minibatch, which belongs to the gradient step alone."""
        return minibatch.set(_REWARD, minibatch.get(_REWARD).sign())
