"""Distributional Q-learning with n-step transitions and without host synchronisation."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl import objectives
from torchrl.envs.utils import ExplorationType

from kit.steps import SettingError


class DQNLoss(objectives.DQNLoss):
    """TorchRL's ``DQNLoss`` for noisy networks, with the priorities of Schaul et al. (2016).

    Noisy layers draw noise in the loss. ``td_error``, which determines priorities, is the absolute
    TD error (section 3.3) instead of the squared TD error.
    """

    writes_squared_errors = False

    deterministic_sampling_mode = ExplorationType.RANDOM

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return ``loss``, and write ``td_error`` ``[batch, 1]`` to the minibatch."""
        losses: TensorDict = super().forward(tensordict)
        key = self.tensor_keys.priority
        tensordict.set(key, tensordict.get(key).sqrt())
        return losses


class _DistributionalLoss(objectives.DQNLoss):
    """Base class for losses of networks that write ``return_distribution``.

    Args:
        value_network: Network from :func:`~kit.modules.make_q_network` with more than one atom,
            which writes ``return_distribution`` ``[..., choices, atoms]``.
        **settings: Arguments for TorchRL's ``DQNLoss``, such as ``double_dqn`` and ``delay_value``.

    Raises:
        SettingError: If the loss needs a fixed support and the network has none, or vice versa.
    """

    writes_squared_errors = False

    deterministic_sampling_mode = ExplorationType.RANDOM
    has_support: bool

    def __init__(self, value_network: Any, **settings: Any) -> None:
        super().__init__(value_network, action_space="categorical", **settings)
        if (self._support() is not None) != self.has_support:
            other = "QuantileDQNLoss" if self.has_support else "CategoricalDQNLoss"
            reason = "The loss and the network must both use a fixed support, or neither"
            raise SettingError("loss", type(self).__name__, reason, [other])

    def _support(self) -> Tensor | None:
        """Return the network's fixed support, or ``None`` for a quantile network."""
        return self.value_network_params.get(("module", "0", "module", "support"), None)  # type: ignore[no-any-return]

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return ``loss``, and write the loss of each transition as ``td_error`` ``[*batch]``."""
        if tensordict.ndim > 1:  # flatten sequences
            rows = tensordict.reshape(-1)
            losses = self(rows)
            errors = rows.get(self.tensor_keys.priority)
            tensordict.set(self.tensor_keys.priority, errors.reshape(tensordict.shape))
            return losses
        action = tensordict.get(self.tensor_keys.action)
        now, _ = self._returns(tensordict, self.value_network_params, action)
        with torch.no_grad():
            following, choice = tensordict.get("next"), None
            if self.double_dqn:
                _, choice = self._returns(following, self.value_network_params)
            later, _ = self._returns(following, self.target_value_network_params, choice)
        loss = self.distance(now, later, *self._reward_and_discount(tensordict))
        tensordict.set(self.tensor_keys.priority, loss.detach())
        weights = self._maybe_get_priority_weight(tensordict)
        return TensorDict({"loss": self._reduce_loss(loss, tensordict, weights=weights)})

    def _returns(
        self, rows: TensorDictBase, params: Any, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the atoms ``[batch, atoms]`` of an action (default: greedy), and the action."""
        rows = rows.select(*self.value_network.in_keys)
        with params.to_module(self.value_network, preserve_module_state=False):
            self.value_network(rows)
        if action is None:
            action = rows.get(self.tensor_keys.action)
        atoms = rows.get("return_distribution")
        index = action.reshape(-1, 1, 1).expand(-1, 1, atoms.shape[-1])
        return atoms.gather(1, index).squeeze(1), action

    def _reward_and_discount(self, rows: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return rewards and discounts ``[batch, 1]``; the discount is 0 after a terminal state."""
        discount, steps = self.value_estimator.gamma, rows.get("steps_to_next_obs", None)
        reward = rows.get(("next", self.tensor_keys.reward))
        if steps is not None:
            discount = discount ** steps.view_as(reward)
        terminated = rows.get(("next", self.tensor_keys.terminated))
        return reward, discount * (~terminated).to(reward.dtype)

    def distance(self, now: Tensor, later: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Return the distance ``[batch]`` between the distribution ``now`` and its target."""
        raise NotImplementedError


class CategoricalDQNLoss(_DistributionalLoss):
    """Categorical DQN, C51 (Bellemare et al. 2017, algorithm 1).

    Atoms are logits over fixed returns, the network's ``support``. The loss is the cross-entropy
    with the target distribution ``r + gamma^n z``, projected onto the support (eq. 7): the
    probability of a target return is split between its two nearest atoms. TorchRL's
    ``DistributionalDQNLoss`` synchronises with the host and does not support n-step transitions.
    """

    has_support = True

    def distance(self, now: Tensor, later: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Return the cross-entropy ``[batch]``."""
        support = self._support()
        assert support is not None
        support = support.detach()
        spacing = support[1] - support[0]
        target = torch.clamp(reward + discount * support, support[0], support[-1])
        share = 1 - ((target.unsqueeze(-1) - support) / spacing).abs()
        projected = (later.softmax(-1).unsqueeze(-1) * share.clamp(0, 1)).sum(1)
        return torch.sum(-projected * now.log_softmax(-1), -1)


class QuantileDQNLoss(_DistributionalLoss):
    """Quantile regression DQN, QR-DQN (Dabney et al. 2018, eq. 10 with kappa = 1).

    Atoms are the returns at the quantiles (2 i + 1) / (2 N) of the distribution.
    """

    has_support = False

    def distance(self, now: Tensor, later: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Return the quantile Huber loss ``[batch]``: mean over targets, sum over quantiles."""
        count = now.shape[-1]
        share = (torch.arange(count, device=now.device) + 0.5) / count
        error = (reward + discount * later).unsqueeze(1) - now.unsqueeze(2)
        huber = torch.where(error.abs() <= 1, error.square() / 2, error.abs() - 0.5)
        weight = (share.unsqueeze(-1) - (error.detach() < 0).to(now.dtype)).abs()
        return torch.sum((weight * huber).mean(2), 1)
