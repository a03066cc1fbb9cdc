"""Soft actor-critic variants: dropout Q-functions (DroQ) and discrete SAC with action masks."""

from __future__ import annotations

import math
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl import objectives
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules.distributions.utils import rsample_and_log_prob


class DroQLoss(objectives.SACLoss):
    """Loss of dropout Q-functions, DroQ (Hiraoka et al. 2022, algorithm 2).

    Critics regress on ``r + gamma (min_i Q_i(s', a') - alpha log pi(a' | s'))``, as in TorchRL's
    ``SACLoss``. The actor minimises ``alpha log pi(a | s) - mean_i Q_i(s, a)``, whereas SAC uses
    the smallest Q-value. TorchRL's ``REDQLoss`` also uses the mean, but its target must omit at
    least one critic, so the target would use only one of DroQ's two critics.
    """

    def actor_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Any]]:
        """Return the actor loss and ``log_prob``, the log-probability of the sampled actions."""
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


class DiscreteSACLoss(objectives.DiscreteSACLoss):
    """TorchRL's ``DiscreteSACLoss`` with a target entropy that depends on the action mask.

    TorchRL's target entropy is the same for all states. If only few actions are allowed, no policy
    can reach a target entropy meant for all actions, so the temperature grows without bound.

    Args:
        *networks: Networks for TorchRL's loss.
        action_mask: Key of the mask ``[..., choices]`` that is 0 for forbidden actions, or
            ``None``.
        **settings: Further arguments for TorchRL's loss. ``target_entropy`` applies if all actions
            are allowed. If m of n actions are allowed, the target is multiplied by ``log(m) /
            log(n)``.
    """

    def __init__(self, *networks: Any, action_mask: Any = None, **settings: Any) -> None:
        super().__init__(*networks, **settings)
        self.action_mask = action_mask

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the losses, and write ``td_error`` to the minibatch."""
        losses: TensorDict = super().forward(tensordict)
        if self.action_mask is None:
            return losses
        allowed = tensordict.get(self.action_mask) != 0
        share = allowed.sum(-1).clamp_min(1).log() / math.log(max(allowed.shape[-1], 2))
        excess = self.log_alpha * self.target_entropy * (1 - share)  # added to TorchRL's loss
        weights = self._maybe_get_priority_weight(tensordict)
        excess = self._reduce_loss(excess, tensordict=tensordict, weights=weights)
        return losses.set("loss_alpha", losses.get("loss_alpha") + excess)
