"""CrossQ loss for batch-normalised actors and prioritized replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl import objectives

from kit.modules.layers import in_training


class CrossQLoss(objectives.CrossQLoss):
    """TorchRL's ``CrossQLoss`` for actors with batch normalisation, as in the authors' code.

    Next actions are computed with the running statistics of the actor's batch normalisation, and
    only the actor loss updates these statistics. In TorchRL's loss, the actor is in the same mode
    for critic and actor losses. All losses are weighted by importance weights, as in TorchRL's
    ``SACLoss``.
    """

    @dataclass
    class _AcceptedKeys(objectives.CrossQLoss._AcceptedKeys):
        priority_weight: NestedKey = "priority_weight"

    default_keys = _AcceptedKeys

    def qvalue_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the critic loss and ``td_error``, the largest absolute TD error of any critic."""
        with in_training(self.actor_network, False):
            return super().qvalue_loss(tensordict)  # type: ignore[no-any-return, unused-ignore]

    def actor_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the actor loss and the log-probabilities of the sampled actions."""
        with in_training(self.actor_network, True):
            return super().actor_loss(tensordict)  # type: ignore[no-any-return, unused-ignore]

    def _reduce_loss(
        self, loss: Tensor, tensordict: TensorDictBase | None = None, **kwargs: Any
    ) -> Tensor:
        if tensordict is not None:
            kwargs["weights"] = self._maybe_get_priority_weight(tensordict)
        return super()._reduce_loss(loss, tensordict, **kwargs)  # type: ignore[no-any-return, unused-ignore]
