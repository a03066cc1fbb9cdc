"""CrossQ, whose actor may have batch normalisation, of prioritised transitions as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl import objectives

from kit.modules.layers import in_training


class CrossQLoss(objectives.CrossQLoss):
    """TorchRL's ``CrossQLoss`` for actors with batch normalisation, as the authors' program has.

    Next actions come from the running statistics of such an actor, and its own loss takes the
    minibatch into them, whether the actor is in training or acts by these statistics; in TorchRL's
    one mode holds for both. The importance weights of priorities, which TorchRL's does not read,
    weigh all losses, as in its ``SACLoss``.
    """

    @dataclass
    class _AcceptedKeys(objectives.CrossQLoss._AcceptedKeys):
        priority_weight: NestedKey = "priority_weight"

    default_keys = _AcceptedKeys

    def qvalue_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the critics, and ``td_error``, the largest of their absolute errors."""
        with in_training(self.actor_network, False):
            return super().qvalue_loss(tensordict)  # type: ignore[no-any-return, unused-ignore]

    def actor_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the actor, and the log-probabilities of its actions."""
        with in_training(self.actor_network, True):
            return super().actor_loss(tensordict)  # type: ignore[no-any-return, unused-ignore]

    def _reduce_loss(
        self, loss: Tensor, tensordict: TensorDictBase | None = None, **how: Any
    ) -> Tensor:
        """The mean over rows, by their weights."""
        if tensordict is not None:
            how["weights"] = self._maybe_get_priority_weight(tensordict)
        return super()._reduce_loss(loss, tensordict, **how)  # type: ignore[no-any-return, unused-ignore]
