"""Soft actor-critic whose actor ascends the mean of its critics, or may not choose everything."""

from __future__ import annotations

import math
from typing import Any

from tensordict import TensorDict, TensorDictBase
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
