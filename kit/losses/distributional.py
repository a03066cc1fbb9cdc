"""Q-learning by the distribution of the return, of n-step transitions, without host reads."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl import objectives
from torchrl.envs.utils import ExplorationType

from kit.steps import SettingError


class DQNLoss(objectives.DQNLoss):
    """TorchRL's ``DQNLoss`` with noisy networks, and with the priorities of the paper.

    Noisy layers have noise in it, in TorchRL's only where the caller says so. ``td_error``, from
    which priorities come, is the absolute error (Schaul et al. 2016, section 3.3), not its square.
    """

    writes_squared_errors = False

    deterministic_sampling_mode = ExplorationType.RANDOM

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return ``loss``, and write ``td_error`` into the minibatch, ``[batch, 1]``."""
        losses: TensorDict = super().forward(tensordict)
        key = self.tensor_keys.priority
        tensordict.set(key, tensordict.get(key).sqrt())
        return losses


class _DistributionalLoss(objectives.DQNLoss):
    """Base of losses of a network that writes ``return_distribution`` ``[..., choices, atoms]``.

    Args:
        value_network: network of :func:`~kit.modules.make_q_network` with ``atoms``.
        **settings: ``double_dqn``, ``delay_value`` of TorchRL's ``DQNLoss``.

    Raises:
        SettingError: if the network's atoms are not those of the loss: quantiles of returns, or
            logits of the probabilities of a support.
    """

    writes_squared_errors = False

    deterministic_sampling_mode = ExplorationType.RANDOM
    of_support: bool

    def __init__(self, value_network: Any, **settings: Any) -> None:
        super().__init__(value_network, action_space="categorical", **settings)
        if (self._support() is not None) != self.of_support:
            works = "QuantileDQNLoss" if self.of_support else "CategoricalDQNLoss"
            raise SettingError("loss", type(self).__name__, "is for other atoms", [works])

    def _support(self) -> Tensor | None:
        """Returns that the atoms stand for, of a network that has them."""
        return self.value_network_params.get(("module", "0", "module", "support"), None)  # type: ignore[no-any-return]

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return ``loss``, and write it for each transition as ``td_error``, ``[*batch]``."""
        if tensordict.ndim > 1:  # sequences: their rows
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
        """Atoms of an action, ``[batch, atoms]``, and the action: for ``None`` the greedy one."""
        rows = rows.select(*self.value_network.in_keys)
        with params.to_module(self.value_network, preserve_module_state=False):
            self.value_network(rows)
        if action is None:
            action = rows.get(self.tensor_keys.action)
        atoms = rows.get("return_distribution")
        place = action.reshape(-1, 1, 1).expand(-1, 1, atoms.shape[-1])
        return atoms.gather(1, place).squeeze(1), action

    def _reward_and_discount(self, rows: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Rewards, and discounts of what follows: 0 after a terminal state; ``[batch, 1]`` each."""
        discount, steps = self.value_estimator.gamma, rows.get("steps_to_next_obs", None)
        reward = rows.get(("next", self.tensor_keys.reward))
        if steps is not None:
            discount = discount ** steps.view_as(reward)
        terminated = rows.get(("next", self.tensor_keys.terminated))
        return reward, discount * (~terminated).to(reward.dtype)

    def distance(self, now: Tensor, later: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Distance between the present distribution and its target, ``[batch]``."""
        raise NotImplementedError


class CategoricalDQNLoss(_DistributionalLoss):
    """Categorical Q-learning, C51 (Bellemare et al. 2017, algorithm 1).

    The atoms are logits of probabilities of returns that are fixed, ``support`` of the network. The
    loss is the cross-entropy with the target distribution ``r + gamma^n z``, projected onto the
    support (eq. 7): a target return gives each of the two nearest atoms a share of its probability.
    TorchRL's ``DistributionalDQNLoss`` reads tensors on the host, and takes no n-step transitions.
    """

    of_support = True

    def distance(self, now: Tensor, later: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Cross-entropy, ``[batch]``."""
        support = self._support()
        assert support is not None
        support = support.detach()
        width = support[1] - support[0]
        target = torch.clamp(reward + discount * support, support[0], support[-1])
        share = 1 - ((target.unsqueeze(-1) - support) / width).abs()
        projected = (later.softmax(-1).unsqueeze(-1) * share.clamp(0, 1)).sum(1)
        return torch.sum(-projected * now.log_softmax(-1), -1)


class QuantileDQNLoss(_DistributionalLoss):
    """Quantile regression Q-learning, QR-DQN (Dabney et al. 2018, eq. 10 with kappa = 1).

    The atoms are returns, at the quantiles (2 i + 1) / (2 N) of their distribution.
    """

    of_support = False

    def distance(self, now: Tensor, later: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Sum over quantiles of the mean quantile Huber loss over targets, ``[batch]``."""
        count = now.shape[-1]
        share = (torch.arange(count, device=now.device) + 0.5) / count
        error = (reward + discount * later).unsqueeze(1) - now.unsqueeze(2)
        huber = torch.where(error.abs() <= 1, error.square() / 2, error.abs() - 0.5)
        weight = (share.unsqueeze(-1) - (error.detach() < 0).to(now.dtype)).abs()
        return torch.sum((weight * huber).mean(2), 1)
