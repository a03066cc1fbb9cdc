"""PPO with a penalty on the divergence, whose gradient has the weight that its loss has."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl import objectives


class _Unreachable:
    """A target that no divergence is above or below: nothing is read on the host to find out."""

    def _itself(self, _: Any) -> _Unreachable:
        return self

    __mul__ = __truediv__ = _itself

    @classmethod
    def __torch_function__(cls, *_: Any) -> bool:
        return False


class KLPENPPOLoss(objectives.KLPENPPOLoss):
    """TorchRL's ``KLPENPPOLoss`` (Schulman et al. 2017, eq. 8), which adapts ``beta`` afterwards.

    TorchRL doubles or halves ``beta`` in place before gradients are computed, which then have twice
    or half the penalty of the loss; and it reads the divergence on the host to decide. As
    TorchRL's, and other than in the paper, ``beta`` is adapted in each gradient step, not once for
    all that are made on a batch.
    """

    beta: Tensor
    dtarg: Any

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the losses, and give ``beta`` the value of the next gradient step."""
        target, beta = self.dtarg, self.beta
        self.dtarg, self.beta = _Unreachable(), beta.clone()  # the gradient needs this value
        try:
            losses: TensorDict = super().forward(tensordict)
        finally:
            self.dtarg, self.beta = target, beta
        with torch.no_grad():
            divergence = losses.get("kl").mean()
            beta.copy_(torch.where(divergence > 1.5 * target, beta * self.increment, beta))
            beta.copy_(torch.where(divergence < target / 1.5, beta * self.decrement, beta))
        return losses
