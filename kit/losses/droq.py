"""Soft actor-critic whose actor ascends the mean of its critics."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from torchrl import objectives
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules.distributions.utils import rsample_and_log_prob


class DroQLoss(objectives.SACLoss):
    """The loss of dropout Q-functions (Hiraoka et al. 2022, algorithm 2).

    Critics regress on ``r + gamma (min_i Q_i(s', a') - alpha log pi(a' | s'))``, as in TorchRL's
    ``SACLoss``; the actor minimises ``alpha log pi(a | s) - mean_i Q_i(s, a)``, where SAC takes the
    smallest. TorchRL's ``REDQLoss`` has this mean, but takes at most all critics but one into the
    target: with the two of DroQ a single one.
    """

    def actor_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Any]]:
        """Loss of the actor, and ``log_prob`` of its actions."""
        weights = self._maybe_get_priority_weight(tensordict)
        with (
            set_exploration_type(ExplorationType.RANDOM),
            self.actor_network_params.to_module(self.actor_network, preserve_module_state=False),
        ):
            action, log_prob = rsample_and_log_prob(self.actor_network.get_dist(tensordict))
        critic_input = tensordict.select(*self.qvalue_network.in_keys, strict=False)
        critic_input.set(self.tensor_keys.action, action)
        values = self._vmap_qnetworkN0(critic_input, self._cached_detached_qvalue_params)
        value = values.get(self.tensor_keys.state_action_value).mean(0).squeeze(-1)
        loss = self._reduce_loss(
            self._alpha * log_prob - value, tensordict=tensordict, weights=weights
        )
        return loss, {"log_prob": log_prob.detach()}
