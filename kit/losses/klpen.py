"""PPO with a KL penalty whose gradient matches its loss."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl import objectives


class _Unreachable:
    """KL target that makes all tensor comparisons false, so TorchRL leaves ``beta`` unchanged."""

    def _itself(self, _: Any) -> _Unreachable:
        return self

    __mul__ = __truediv__ = _itself

    @classmethod
    def __torch_function__(cls, *_: Any) -> bool:
        return False


class KLPENPPOLoss(objectives.KLPENPPOLoss):
    """Corrected version of TorchRL's ``KLPENPPOLoss`` (Schulman et al. 2017, eq. 8).

    TorchRL's loss doubles or halves ``beta`` in place before gradients are computed, so the
    penalty's gradient is twice or half as large as the loss implies. This class adapts ``beta``
    after computing the loss, and does not read the KL divergence on the host. As in TorchRL, and
    unlike in the paper, ``beta`` is adapted in each gradient step instead of once per batch.
    """

    beta: Tensor
    dtarg: Any

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the losses, and update ``beta`` for the next gradient step."""
        target, beta = self.dtarg, self.beta
        self.dtarg, self.beta = _Unreachable(), beta.clone()  # the backward pass needs the old beta
        try:
            losses: TensorDict = super().forward(tensordict)
        finally:
            self.dtarg, self.beta = target, beta
        with torch.no_grad():
            divergence = losses.get("kl").mean()
            beta.copy_(torch.where(divergence > 1.5 * target, beta * self.increment, beta))
            beta.copy_(torch.where(divergence < target / 1.5, beta * self.decrement, beta))
        return losses
