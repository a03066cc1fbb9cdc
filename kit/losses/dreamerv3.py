"""The loss of DreamerV3: world model, actor and critic in one gradient step."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.objectives import LossModule

from kit.losses.imagination import Imagined, imagine, lambda_returns
from kit.modules.world.actor import LatentActor
from kit.modules.world.model import LatentCritic, WorldModel
from kit.modules.world.rssm import Latent
from kit.steps import SettingError


class DreamerV3Loss(LossModule):  # type: ignore[misc, unused-ignore]
    """Losses of DreamerV3 (Hafner et al. 2025), to be minimised together by one optimiser.

    Minibatches are sequences of records ``[sequences, time]`` as
    :class:`~kit.buffers.SequenceReplay` samples them: an observation with the reward and the flags
    that arrived with it, and the action that followed.

    Args:
        world_model: encodes, predicts and is trained.
        actor: acts in imagination.
        critic: predicts returns; a slow copy of it, moved by a target updater, regularises it.
        imagination_horizon: imagined policy steps.
        imagination_starts: time steps at the end of each sequence from which imagination begins;
            ``None``: all of them, as published.
        discount_horizon: policy steps after which a reward counts 1/e: the discount is
            ``1 - 1 / discount_horizon``.
        lmbda: weight of longer returns (eq. 7).
        entropy_coeff: weight of the actor's entropy (eq. 11).
        free_nats: divergence of posterior and prior that costs nothing (eq. 5).
        dynamics_coeff: weight of the divergence that trains the prior (eq. 4).
        representation_coeff: weight of the divergence that trains the posterior (eq. 4).
        replay_critic_coeff: weight of the critic's loss on the replayed sequence.
        return_rate: rate of the running 5th and 95th percentile of returns (eq. 11).
    """

    LOSSES = (
        "reconstruction", "reward", "continuation", "dynamics", "representation", "actor",
        "critic", "replay_critic",
    )  # fmt: skip
    out_keys = tuple(f"loss_{name}" for name in LOSSES)

    critic_network: LatentCritic
    critic_network_params: Any
    target_critic_network_params: Any
    low: Tensor
    high: Tensor

    def __init__(
        self,
        world_model: WorldModel,
        actor: LatentActor,
        critic: LatentCritic,
        *,
        imagination_horizon: int = 15,
        imagination_starts: int | None = None,
        discount_horizon: float = 333.0,
        lmbda: float = 0.95,
        entropy_coeff: float = 3e-4,
        free_nats: float = 1.0,
        dynamics_coeff: float = 1.0,
        representation_coeff: float = 0.1,
        replay_critic_coeff: float = 0.3,
        return_rate: float = 0.01,
    ) -> None:
        super().__init__()
        if imagination_starts is not None and imagination_starts < 1:
            raise SettingError("imagination_starts", imagination_starts, "is less than 1", [1])
        self.world_model, self.actor = world_model, actor
        self.convert_to_functional(critic, "critic_network", create_target_params=True)
        self.imagination_horizon = imagination_horizon
        self.imagination_starts = imagination_starts
        self.discount = 1 - 1 / discount_horizon
        self.lmbda, self.entropy_coeff, self.free_nats = lmbda, entropy_coeff, free_nats
        self.dynamics_coeff = dynamics_coeff
        self.representation_coeff = representation_coeff
        self.replay_critic_coeff = replay_critic_coeff
        self.return_rate = return_rate
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    @property
    def in_keys(self) -> list[Any]:
        """Keys of a minibatch that are read."""
        code = self.world_model.code
        own = [code.key, "reward", "is_init", "terminated", "done"]
        return [*self.world_model.observation_keys, *own]

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """All losses, each one number, and what describes them.

        Args:
            tensordict: ``[sequences, time]``.
        """
        records = tensordict.select(*self.in_keys).transpose(0, 1)
        reward, is_init, terminated, last = (
            records.get(key).squeeze(-1) for key in ("reward", "is_init", "terminated", "done")
        )
        continuation = (~terminated).float() * self.discount
        latents, losses = self._model_losses(records, reward, is_init, continuation)

        first = -(self.imagination_starts or 0)
        starts = Latent(*(part[first:].flatten(0, 1) for part in latents))
        imagined = imagine(self.world_model, self.actor, starts, self.imagination_horizon)
        with self.target_critic_network_params.to_module(self.critic_network):
            slow = self._value(imagined.features[:-1])
            slow_replayed = self._value(latents.features[first:][:-1].detach())
        with self.critic_network_params.to_module(self.critic_network):
            logits = self.critic_network(imagined.features)
            value = self.critic_network.two_hot.mean(logits.detach())
            returns = lambda_returns(imagined.reward, imagined.continuation, value, self.lmbda)
            losses["critic"] = (
                imagined.weight * self._critic_error(logits[:-1], returns, slow)
            ).mean()
            arrived = (reward[first:], continuation[first:], returns[0], last[first:].float())
            losses["replay_critic"] = self.replay_critic_coeff * self._replayed(
                latents.features[first:], slow_replayed, *arrived
            )
        scale = self._return_scale(returns)
        advantage = (returns - value[:-1]) / scale
        losses["actor"], entropy = self._actor_loss(imagined, advantage)
        measured = {
            "entropy": entropy,
            "imagined_return": returns.mean(),
            "return_scale": scale,
        }
        named = {f"loss_{name}": losses[name] for name in self.LOSSES}
        return TensorDict({**named, **{key: x.detach() for key, x in measured.items()}}, [])

    def _model_losses(
        self, records: TensorDictBase, reward: Tensor, is_init: Tensor, continuation: Tensor
    ) -> tuple[Latent, dict[str, Tensor]]:
        """Latents of the sequences, ``[time, sequences, ...]``, and the world model's losses."""
        model = self.world_model
        targets = model.targets(records)
        action = model.code.encode(records.get(model.code.key))
        previous = torch.cat([torch.zeros_like(action[:1]), action[:-1]])
        start = model.rssm.initial(is_init.shape[1])
        latents, posterior = model.rssm.observe(start, previous, model.encode(targets), is_init)
        dynamics, representation = model.rssm.divergence(posterior, model.rssm.prior(latents.deter))
        features = latents.features
        return latents, {
            "reconstruction": model.reconstruction_error(features, targets).mean(),
            "reward": model.reward_error(features, reward).mean(),
            "continuation": model.continuation_error(features, continuation).mean(),
            "dynamics": self.dynamics_coeff * dynamics.clamp(min=self.free_nats).mean(),
            "representation": self.representation_coeff
            * representation.clamp(min=self.free_nats).mean(),
        }

    def _actor_loss(self, imagined: Imagined, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Policy gradient with an entropy bonus (eq. 11), and the mean entropy."""
        columns = self.actor(imagined.features[:-1])
        entropy = self.actor.entropy(columns)
        log_prob = self.actor.log_prob(columns, imagined.action[:-1])
        gain = log_prob * advantage + self.entropy_coeff * entropy
        return -(imagined.weight * gain).mean(), entropy.mean()

    def _critic_error(self, logits: Tensor, returns: Tensor, slow: Tensor) -> Tensor:
        """Cross entropies with returns and with the slow critic (eq. 10), ``[...]``."""
        return self.critic_network.two_hot.loss(logits, returns, slow)  # type: ignore[no-any-return]

    def _replayed(
        self,
        features: Tensor,
        slow: Tensor,
        reward: Tensor,
        continuation: Tensor,
        bootstrap: Tensor,
        last: Tensor,
    ) -> Tensor:
        """The critic's loss on replayed latents, whose gradient reaches the world model.

        Returns bootstrap from the imagined ones, and do not reach beyond the end of an episode.
        """
        if len(reward) < 2:
            return features.sum() * 0
        lmbda = self.lmbda * (1 - last)
        returns = lambda_returns(reward, continuation, bootstrap.view_as(reward), lmbda)
        error = self._critic_error(self.critic_network(features[:-1]), returns, slow)
        return ((1 - last[:-1]) * error).mean()

    @torch.no_grad()
    def _value(self, features: Tensor) -> Tensor:
        return self.critic_network.two_hot.mean(self.critic_network(features))  # type: ignore[no-any-return]

    @torch.no_grad()
    def _return_scale(self, returns: Tensor) -> Tensor:
        """Spread of returns between running percentiles, at least 1 (eq. 11)."""
        ends = torch.tensor([0.05, 0.95], device=returns.device)
        low, high = torch.quantile(returns.flatten(), ends).unbind(0)
        self.low.lerp_(low, self.return_rate)
        self.high.lerp_(high, self.return_rate)
        return (self.high - self.low).clamp(min=1.0)
