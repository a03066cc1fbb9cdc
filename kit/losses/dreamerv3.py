"""DreamerV3 loss for the world model, actor and critic."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from torch import Tensor, nn
from torchrl.objectives import LossModule

from kit.losses.imagination import Imagined, imagine, lambda_returns
from kit.losses.records import Records
from kit.modules.world.actions import LatentActor
from kit.modules.world.model import LatentCritic, WorldModel
from kit.modules.world.rssm import Latent
from kit.steps.errors import whole_number


class ReturnScale(nn.Module):
    """Range between the running 5th and 95th percentiles of returns, at least 1.

    See Hafner et al. (2025), eq. 11.
    """

    averaged_over_ranks: ClassVar = ("low", "high")
    """Buffers that several ranks replace by their mean once per iteration."""
    low: Tensor
    high: Tensor
    ends: Tensor

    def __init__(self, rate: float = 0.01) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("ends", torch.tensor([0.05, 0.95]), persistent=False)
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    @torch.no_grad()
    def forward(self, returns: Tensor) -> Tensor:
        """Update the percentiles with ``returns`` and return the scale."""
        low, high = torch.quantile(returns.flatten(), self.ends).unbind(0)
        self.low.lerp_(low, self.rate)
        self.high.lerp_(high, self.rate)
        return (self.high - self.low).clamp(min=1.0)


class Evaluation(NamedTuple):
    """A critic's evaluation of imagined trajectories."""

    returns: Tensor
    """Lambda-returns for all latents except the last, ``[horizon, rows]``."""
    advantage: Tensor
    """Returns minus the values of the latents, ``[horizon, rows]``."""
    spread: Tensor
    """Running scale of the returns, at least 1."""


class DreamerV3Loss(LossModule):  # type: ignore[misc, unused-ignore]
    """Losses for DreamerV3 (Hafner et al. 2025), minimised jointly by one optimiser.

    Minibatches are sequences of records ``[sequences, time]`` from
    :class:`~kit.buffers.SequenceReplay`. A record contains an observation, the reward and flags
    that arrived with it, and the action that followed.

    Args:
        world_model: World model.
        actor: Selects actions in imagination.
        critic: Predicts returns. It is regularised towards its target network.
        imagination_horizon: Number of imagined policy steps.
        imagination_starts: Number of time steps at the end of each sequence from which imagination
            starts; ``None``: all time steps, as in the paper.
        gamma: Discount factor; the paper uses 1 - 1/333.
        lmbda: Weight of longer returns in the lambda-return (eq. 7).
        entropy_coeff: Weight of the actor's entropy (eq. 11).
        free_nats: Threshold below which the KL divergence between posterior and prior is ignored
            (eq. 5).
        dynamics_coeff: Weight of the KL divergence that trains the prior (eq. 4).
        representation_coeff: Weight of the KL divergence that trains the posterior (eq. 4).
        replay_critic_coeff: Weight of the critic loss on replayed sequences.
        stored_latents: Whether sequences start with the latent stored with the preceding record. If
            so, new latents are written to the minibatch under ``"latent"``, so that the buffer can
            store them. ``False``: sequences start with zero latents.
    """

    out_keys: tuple[str, ...] = (
        "loss_reconstruction", "loss_reward", "loss_continuation", "loss_dynamics",
        "loss_representation", "loss_actor", "loss_critic", "loss_replay_critic",
    )  # fmt: skip

    critic_network: LatentCritic
    critic_network_params: Any
    target_critic_network_params: Any

    def __init__(
        self,
        world_model: WorldModel,
        actor: LatentActor,
        critic: LatentCritic,
        *,
        imagination_horizon: int = 15,
        imagination_starts: int | None = None,
        gamma: float = 1 - 1 / 333,
        lmbda: float = 0.95,
        entropy_coeff: float = 3e-4,
        free_nats: float = 1.0,
        dynamics_coeff: float = 1.0,
        representation_coeff: float = 0.1,
        replay_critic_coeff: float = 0.3,
        stored_latents: bool = False,
    ) -> None:
        super().__init__()
        self.world_model, self.actor = world_model, actor
        self.convert_to_functional(critic, "critic_network", create_target_params=True)
        self.return_scale = ReturnScale()
        self.imagination_horizon = imagination_horizon
        self.imagination_starts = whole_number("imagination_starts", imagination_starts or 0)
        self.gamma, self.lmbda = gamma, lmbda
        self.entropy_coeff, self.free_nats = entropy_coeff, free_nats
        self.dynamics_coeff = dynamics_coeff
        self.representation_coeff = representation_coeff
        self.replay_critic_coeff = replay_critic_coeff
        self.stored_latents = stored_latents

    @property
    def in_keys(self) -> list[Any]:
        """Minibatch keys that the loss reads."""
        before = [self.world_model.code.key, *(("latent", name) for name in Latent._fields)]
        stored = [unravel_key(("before", key)) for key in before if self.stored_latents]
        return Records.keys(self.world_model) + stored

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return scalar losses and metrics for a ``[sequences, time]`` minibatch."""
        outputs, _ = self._outputs(tensordict)
        return TensorDict(outputs, [])

    def _outputs(self, tensordict: TensorDictBase) -> tuple[dict[str, Tensor], Latent]:
        """Return a dict of losses, and the initial latents for imagination, ``[rows, ...]``."""
        records = Records.of(tensordict, self.world_model, self.gamma, self.stored_latents)
        latents, losses = self._model_losses(records)
        if self.stored_latents:
            for name, value in self.world_model.rssm.packed(latents).items():
                tensordict.set(("latent", name), value.transpose(0, 1))
        starts = latents.newest(self.imagination_starts)
        imagined = imagine(self.world_model, self.actor, starts, self.imagination_horizon)
        behaviour_losses, returns = self._behaviour_losses(imagined)
        newest = records.newest(self.imagination_starts)
        features = self._reward_input(latents.features[-self.imagination_starts :])
        replayed = self._replay_critic_loss(newest, features, returns[0])
        losses["loss_replay_critic"] = self.replay_critic_coeff * replayed
        return losses | behaviour_losses, starts

    # ------------------------------------------------------------------ the world model
    def _model_losses(self, records: Records) -> tuple[Latent, dict[str, Tensor]]:
        """Return the latents, ``[time, sequences, ...]``, and the world-model losses."""
        model = self.world_model
        targets, latents, posterior = records.filtered(model)
        divergences = model.rssm.divergence(posterior, model.rssm.prior(latents.deter))
        dynamics, representation = (kl.clamp(min=self.free_nats).mean() for kl in divergences)
        features = latents.features
        continuation = model.continuation_error(features, records.continuation)
        return latents, {
            "loss_reconstruction": model.reconstruction_error(features, targets).mean(),
            "loss_reward": model.reward_error(self._reward_input(features), records.reward).mean(),
            "loss_continuation": continuation.mean(),
            "loss_dynamics": self.dynamics_coeff * dynamics,
            "loss_representation": self.representation_coeff * representation,
        }

    def _reward_input(self, features: Tensor) -> Tensor:
        """Return features for the reward head and the critic; subclasses may detach them."""
        return features

    # ------------------------------------------------------------------ actor and critic
    def _behaviour_losses(self, imagined: Imagined) -> tuple[dict[str, Tensor], Tensor]:
        """Return the actor and critic losses on imagined trajectories, and the imagined returns."""
        losses, evaluation = self._critic_losses("", imagined, self.return_scale)
        advantage, spread = evaluation.advantage, evaluation.spread
        actor_losses = self._actor_losses("", imagined, self.actor, advantage, spread)
        return actor_losses | losses, evaluation.returns

    def _critic_losses(
        self, name: str, imagined: Imagined, scale: ReturnScale, *, gradients: bool = False
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """Return a critic's loss on imagined trajectories, and its evaluation of the trajectories.

        Args:
            name: Prefix for the names of the critic and its metrics.
            imagined: Trajectories with the rewards that the critic predicts.
            scale: Running scale of the critic's returns.
            gradients: Whether gradients flow from returns and values to the trajectories.
        """
        critic = f"{name}critic_network"
        network, parameters = getattr(self, critic), getattr(self, f"{critic}_params")
        # Running one time step per call keeps the wide activations in the CPU cache.
        slow = [self._slow_value(step, critic) for step in imagined.features[:-1]]
        with parameters.to_module(network):
            logits = [network(step.detach()) for step in imagined.features]
            outputs = [
                network(step) if gradients else step_logits.detach()
                for step, step_logits in zip(imagined.features, logits)
            ]
        value = torch.stack([network.two_hot.mean(output) for output in outputs])
        continuation = imagined.continuation[1:].detach()
        returns = lambda_returns(imagined.reward, continuation, value[1:], self.lmbda)
        spread, target = scale(returns), returns.detach()
        error = torch.stack([network.two_hot.loss(*step) for step in zip(logits, target, slow)])
        return (
            {
                f"loss_{name}critic": (imagined.weight.detach() * error).mean(),  # eq. 10
                f"{name}imagined_return": target.mean(),
                f"{name}return_scale": spread,
            },
            Evaluation(returns, returns - value[:-1], spread),
        )

    def _actor_losses(
        self,
        name: str,
        imagined: Imagined,
        actor: LatentActor,
        advantage: Tensor,
        spread: Tensor | float = 1.0,
        *,
        gradients: bool = False,
    ) -> dict[str, Tensor]:
        """Return an actor's loss and its entropy (eq. 11).

        Args:
            name: Prefix for the names of the loss and metrics.
            imagined: Trajectories in which the actor selected the actions.
            actor: The actor.
            advantage: Advantages of the actions, ``[horizon, rows]``.
            spread: Value by which the advantages are divided.
            gradients: Whether the actor is trained by gradients through the dynamics instead of by
                REINFORCE.
        """
        entropy = actor.entropy(imagined.columns)
        if not gradients:
            advantage = actor.log_prob(imagined.columns, imagined.action) * advantage
        gain = advantage / spread + self.entropy_coeff * entropy
        return {
            f"loss_{name}actor": -(imagined.weight.detach() * gain).mean(),
            f"{name}entropy": entropy.detach().mean(),
        }

    @torch.no_grad()
    def _slow_value(self, features: Tensor, critic: str = "critic_network") -> Tensor:
        network = getattr(self, critic)
        with getattr(self, f"target_{critic}_params").to_module(network):
            return network.two_hot.mean(network(features))  # type: ignore[no-any-return]

    def _replay_critic_loss(self, records: Records, features: Tensor, bootstrap: Tensor) -> Tensor:
        """Return the critic loss on replayed latents; gradients flow to the latents' features.

        The returns bootstrap from imagined returns and stop at the end of an episode.
        """
        if len(features) < 2:
            return features.sum() * 0
        last = records.last.float()
        value = bootstrap.view_as(records.reward)
        following = records.reward, records.continuation, value, self.lmbda * (1 - last)
        returns = lambda_returns(*(part[1:] for part in following))
        slow, network = self._slow_value(features[:-1]), self.critic_network
        with self.critic_network_params.to_module(network):
            error = network.two_hot.loss(network(features[:-1]), returns, slow)
        return ((1 - last[:-1]) * error).mean()
