"""Randomised ensembled double Q-learning, of n-step transitions as well."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, TensorDictBase
from torchrl import objectives

_STEPS = "steps_to_next_obs"


class REDQLoss(objectives.REDQLoss):
    """TorchRL's ``REDQLoss`` with targets ``r + gamma^n Q(s_n, a_n)`` for n-step transitions.

    TorchRL's leaves the number of steps out of what it computes targets from, and discounts what
    follows n rewards by gamma. Here that number travels with the next observation.
    """

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
        losses: TensorDict = super().forward(rows)
        key = self.tensor_keys.priority
        tensordict.set(key, rows.get(key))
        return losses
