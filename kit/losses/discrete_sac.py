"""Discrete soft actor-critic of environments that forbid choices."""

from __future__ import annotations

import math
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torchrl import objectives


class DiscreteSACLoss(objectives.DiscreteSACLoss):
    """TorchRL's ``DiscreteSACLoss``, with a target entropy that counts the choices allowed.

    TorchRL's is one number for all states. No policy reaches a share of the entropy of all choices
    where few are allowed, and the temperature then grows without bound.

    Args:
        *networks: as TorchRL's.
        action_mask: key of the observation ``[..., choices]`` that is 0 where a choice is
            forbidden; ``None``: none is.
        **settings: as TorchRL's. ``target_entropy`` is that where all choices are allowed; where m
            of n are, it counts ``log(m) / log(n)`` times.
    """

    def __init__(self, *networks: Any, action_mask: Any = None, **settings: Any) -> None:
        super().__init__(*networks, **settings)
        self.action_mask = action_mask

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the losses; write ``td_error`` into the minibatch."""
        losses: TensorDict = super().forward(tensordict)
        if self.action_mask is None:
            return losses
        allowed = tensordict.get(self.action_mask) != 0
        share = allowed.sum(-1).clamp_min(1).log() / math.log(max(allowed.shape[-1], 2))
        excess = self.log_alpha * self.target_entropy * (1 - share)  # of TorchRL's target
        weights = self._maybe_get_priority_weight(tensordict)
        excess = self._reduce_loss(excess, tensordict=tensordict, weights=weights)
        return losses.set("loss_alpha", losses.get("loss_alpha") + excess)
