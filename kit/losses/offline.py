"""Losses for offline RL: behaviour cloning, implicit and conservative Q-learning."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn.distributions import Delta
from torch import Tensor
from torchrl import objectives
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules.distributions.utils import rsample_and_log_prob

from kit.steps import SettingError


class LikelihoodBCLoss(objectives.BCLoss):
    """Behaviour cloning by maximum likelihood, ``-log pi(a | s)`` (Pomerleau 1988).

    For categorical actors, TorchRL's ``BCLoss`` compares stored actions with sampled actions
    instead.
    """

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return ``loss_bc``."""
        with self.actor_network_params.to_module(self.actor_network, preserve_module_state=False):
            policy = self.actor_network.get_dist(tensordict.copy())
        if isinstance(policy, Delta):
            reason = "The loss requires action probabilities, but the actor is deterministic"
            raise SettingError("loss", type(self).__name__, reason, ["BCLoss"])
        loss = -policy.log_prob(tensordict.get(self.tensor_keys.action))
        return TensorDict({"loss_bc": self._reduce_loss(loss, tensordict=tensordict)})


class IQLLoss(objectives.IQLLoss):
    """TorchRL's ``IQLLoss`` with a corrected metric name and absolute TD errors.

    The metric ``entropy`` is renamed to ``negative_log_likelihood``, because it is the mean
    negative log-likelihood of stored actions. ``td_error`` is the absolute instead of the squared
    TD error.
    """

    writes_squared_errors = False

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the losses, and write ``td_error`` to the minibatch."""
        losses: TensorDict = super().forward(tensordict)
        key = self.tensor_keys.priority
        tensordict.set(key, tensordict.get(key).sqrt())
        return losses.rename_key_("entropy", "negative_log_likelihood")


class CQLLoss(objectives.CQLLoss):
    """TorchRL's ``CQLLoss`` with the penalty of CQL(H) (Kumar et al. 2020, eq. 4, appendix F).

    The penalty for a state is ``log sum_a exp(Q(s, a)) - Q(s, a_data)``. The sum is estimated by
    importance sampling, with ``num_random`` uniform actions and as many policy actions for each of
    s and s'. TorchRL's loss differs in three ways: each sum has only one action of each kind,
    actions for s' are evaluated at s', and uniform actions are drawn from [-1, 1] regardless of the
    bounds. The output ``loss_actor_bc`` is omitted, and ``td_error`` is the absolute TD error.

    Args:
        *networks: Networks for TorchRL's loss.
        action_spec: Bounded spec of the action.
        **settings: Further arguments for TorchRL's loss.
    """

    writes_squared_errors = False

    low: Tensor
    high: Tensor

    def __init__(self, *networks: Any, action_spec: Any, **settings: Any) -> None:
        super().__init__(*networks, action_spec=action_spec, **settings)
        self.register_buffer("low", action_spec.space.low.clone())
        self.register_buffer("high", action_spec.space.high.clone())
        self._out_keys = [name for name in self.out_keys if name != "loss_actor_bc"]

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the losses, and write ``td_error`` to the minibatch."""
        losses: TensorDict = super().forward(tensordict)
        key = self.tensor_keys.priority
        tensordict.set(key, tensordict.get(key).sqrt())
        return losses.exclude("loss_actor_bc")

    def cql_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Any]]:
        """Return the penalty summed over both critics, using Q-values written by ``q_loss``."""
        keys, action_key = self.actor_network.in_keys, self.tensor_keys.action
        states = tensordict.select(*keys)
        uniform = torch.rand(self.num_random, *tensordict[action_key].shape, device=self.low.device)
        actions = [self.low + (self.high - self.low) * uniform]
        density = -(self.high - self.low).log().sum()
        densities = [density.expand(self.num_random, *tensordict.batch_size)]
        with (
            torch.no_grad(),
            set_exploration_type(ExplorationType.RANDOM),
            self.actor_network_params.to_module(self.actor_network, preserve_module_state=False),
        ):
            for rows in (states, tensordict["next"].select(*keys)):
                policy = self.actor_network.get_dist(rows.copy())
                # For actions at a bound, the log-probability cannot be recomputed later.
                action, log_prob = rsample_and_log_prob(policy, (self.num_random,))
                actions.append(action)
                densities.append(log_prob)
        candidates = torch.cat(actions)
        rows = states.expand(len(candidates), *states.batch_size).clone()
        rows.set(action_key, candidates)
        values = self._vmap_qvalue_networkN0(rows, self.qvalue_network_params)
        values = values.get(self.tensor_keys.state_action_value).squeeze(-1)
        exponents = (values - torch.cat(densities)) / self.temperature
        highest = self.temperature * exponents.logsumexp(1)
        stored = [
            tensordict.get(getattr(self.tensor_keys, name)) for name in ("pred_q1", "pred_q2")
        ]
        gaps = self.min_q_weight * (highest - torch.stack(stored).squeeze(-1))
        tensordict.set(self.tensor_keys.cql_q1_loss, gaps[0])
        tensordict.set(self.tensor_keys.cql_q2_loss, gaps[1])
        return self._reduce_loss(gaps.sum(0), tensordict=tensordict), {}
