"""Randomised ensembled double Q-learning, of n-step and prioritised transitions as well."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl import objectives

_STEPS = "steps_to_next_obs"


class REDQLoss(objectives.REDQLoss):
    """TorchRL's ``REDQLoss`` with targets ``r + gamma^n Q(s_n, a_n)`` for n-step transitions.

    TorchRL's leaves the number of steps out of what it computes targets from, and discounts what
    follows n rewards by gamma. Here that number travels with the next observation. The importance
    weights of priorities, which TorchRL's does not read, weigh all losses, as in its ``SACLoss``;
    ``td_error`` is the absolute error (Schaul et al. 2016, section 3.3), not its square. The
    temperature has no bounds that are felt: TorchRL's stays from 0.1 to 10.

    As TorchRL's, and other than the authors' code, it takes the mean over the critics of their
    losses, not the sum, and the temperature learns from the actions at both observations, by a loss
    of its value ``exp(log_alpha)`` where theirs has ``log_alpha``.
    """

    writes_squared_errors = False

    @dataclass
    class _AcceptedKeys(objectives.REDQLoss._AcceptedKeys):
        priority_weight: NestedKey = "priority_weight"

    default_keys = _AcceptedKeys

    def __init__(
        self, *networks: Any, min_alpha: float = 1e-12, max_alpha: float = 1e12, **settings: Any
    ) -> None:
        super().__init__(*networks, min_alpha=min_alpha, max_alpha=max_alpha, **settings)

    def make_value_estimator(self, *arguments: Any, **settings: Any) -> Any:
        """Make the estimator of targets, which reads the number of steps beside the reward."""
        made = super().make_value_estimator(*arguments, **settings)
        self.value_estimator.set_keys(steps_to_next_obs=("next", _STEPS))
        return made

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the losses; write ``td_error`` into the minibatch."""
        rows, steps = tensordict, tensordict.get(_STEPS, None)
        if steps is not None:
            rows = tensordict.copy().set(("next", _STEPS), steps)
        device = next(self.parameters()).device
        # TorchRL's draws the critics of a target where PyTorch makes tensors.
        with contextlib.nullcontext() if device.type == "cpu" else device:
            losses: TensorDict = super().forward(rows)
        key = self.tensor_keys.priority
        tensordict.set(key, rows.get(key).sqrt())
        return losses

    def _reduce_loss(
        self, loss: Tensor, tensordict: TensorDictBase | None = None, **how: Any
    ) -> Tensor:
        """The mean over critics and rows of ``[critics, *batch]``, by the weights of the rows."""
        weights = None if tensordict is None else self._maybe_get_priority_weight(tensordict)
        if weights is not None:
            how["weights"] = weights.expand_as(loss)
        return super()._reduce_loss(loss, tensordict, **how)  # type: ignore[no-any-return, unused-ignore]
