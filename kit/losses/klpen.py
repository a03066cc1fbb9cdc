"""PPO with a penalty on the divergence, whose gradient has the weight that its loss has."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl import objectives


class KLPENPPOLoss(objectives.KLPENPPOLoss):
    """TorchRL's ``KLPENPPOLoss`` (Schulman et al. 2017, eq. 8), which adapts ``beta`` afterwards.

    TorchRL doubles or halves ``beta`` in place before gradients are computed, which then have twice
    or half the penalty of the loss. As TorchRL's, and other than in the paper, ``beta`` is adapted
    in each gradient step, not once for all that are made on a batch.
    """

    beta: Tensor
    increment: float
    decrement: float

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the losses, and replace ``beta`` by that of the next gradient step."""
        factors = self.increment, self.decrement
        self.increment = self.decrement = 1.0
        try:
            losses: TensorDict = super().forward(tensordict)
        finally:
            self.increment, self.decrement = factors
        divergence, beta = losses.get("kl").mean(), self.beta
        beta = torch.where(divergence > 1.5 * self.dtarg, beta * factors[0], beta)
        # Another tensor: the gradient needs the one before.
        self.beta = torch.where(divergence < self.dtarg / 1.5, beta * factors[1], beta)
        return losses
