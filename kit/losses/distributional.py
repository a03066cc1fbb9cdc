"""Distributional Q-learning (Bellemare et al. 2017) with n-step returns."""

from __future__ import annotations

from tensordict import TensorDict, TensorDictBase
from torchrl import objectives


class DistributionalDQNLoss(objectives.DistributionalDQNLoss):
    """TorchRL's ``DistributionalDQNLoss``, which also takes n-step transitions.

    ``MultiStepTransform`` writes ``steps_to_next_obs`` of shape ``[batch]``. All of TorchRL's value
    estimators view it as the reward, ``[batch, 1]``; this loss alone multiplies it as it is and
    raises that ``Tz`` has a wrong shape.

    The loss reads tensors on the host (bounds of the support, ``.to("cpu")``), so gradient steps
    run eagerly, and on a GPU they wait for it.
    """

    def forward(self, input_tensordict: TensorDictBase) -> TensorDict:
        """Return the loss, and write the priorities into the minibatch ``[batch]``."""
        steps = input_tensordict.get(self.tensor_keys.steps_to_next_obs, None)
        if steps is None or steps.ndim > input_tensordict.ndim:
            return super().forward(input_tensordict)
        transitions = input_tensordict.copy()
        transitions.set(self.tensor_keys.steps_to_next_obs, steps.unsqueeze(-1))
        losses = super().forward(transitions)
        priority = self.tensor_keys.priority
        input_tensordict.set(priority, transitions.get(priority))
        return losses
