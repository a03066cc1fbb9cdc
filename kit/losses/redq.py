"""Randomised ensembled double Q-learning for n-step and prioritized transitions."""

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

    TorchRL's loss drops ``steps_to_next_obs`` and discounts the bootstrap value by gamma instead of
    gamma^n. All losses are weighted by importance weights, as in TorchRL's ``SACLoss``.
    ``td_error`` is the absolute TD error (Schaul et al. 2016, section 3.3) instead of the squared
    TD error. The temperature is practically unbounded, whereas TorchRL limits it to [0.1, 10].

    As in TorchRL, and unlike in the authors' code, critic losses are averaged over the critics
    instead of summed. The temperature is trained on actions for both current and next observations,
    and its loss uses ``exp(log_alpha)`` instead of ``log_alpha``.
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
        """Create a value estimator that also reads the number of steps of each transition."""
        result = super().make_value_estimator(*arguments, **settings)
        self.value_estimator.set_keys(steps_to_next_obs=("next", _STEPS))
        return result

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the losses, and write ``td_error`` to the minibatch."""
        rows, steps = tensordict, tensordict.get(_STEPS, None)
        if steps is not None:
            rows = tensordict.copy().set(("next", _STEPS), steps)
        device = next(self.parameters()).device
        # TorchRL samples the critics for a target on PyTorch's default device.
        with contextlib.nullcontext() if device.type == "cpu" else device:
            losses: TensorDict = super().forward(rows)
        key = self.tensor_keys.priority
        tensordict.set(key, rows.get(key).sqrt())
        return losses

    def _reduce_loss(
        self, loss: Tensor, tensordict: TensorDictBase | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the mean of losses ``[critics, *batch]``, with rows weighted by importance."""
        weights = None if tensordict is None else self._maybe_get_priority_weight(tensordict)
        if weights is not None:
            kwargs["weights"] = weights.expand_as(loss)
        return super()._reduce_loss(loss, tensordict, **kwargs)  # type: ignore[no-any-return, unused-ignore]
