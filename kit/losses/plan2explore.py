"""Plan2Explore loss: DreamerV3 plus an actor that maximises the disagreement of an ensemble."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from kit.losses.dreamerv3 import DreamerV3Loss, ReturnScale
from kit.losses.imagination import imagine
from kit.losses.records import Records
from kit.modules.world.actions import LatentActor
from kit.modules.world.ensemble import Ensemble
from kit.modules.world.model import LatentCritic, WorldModel, make_latent_critic
from kit.modules.world.rssm import Latent


class RunningStd(nn.Module):
    """Standard deviation from exponential moving averages.

    Args:
        rate: Weight of the newest values, in (0, 1].
    """

    averaged_over_ranks: ClassVar = ("mean", "square")
    """Buffers that several ranks replace by their mean once per iteration."""
    mean: Tensor
    square: Tensor
    weight: Tensor

    def __init__(self, rate: float = 0.01) -> None:
        super().__init__()
        self.rate = rate
        for name in ("mean", "square", "weight"):
            self.register_buffer(name, torch.zeros(()))

    @torch.no_grad()
    def forward(self, values: Tensor) -> Tensor:
        """Update the averages with ``values`` and return the standard deviation."""
        self.mean.lerp_(values.mean(), self.rate)
        self.square.lerp_(values.square().mean(), self.rate)
        self.weight.lerp_(torch.ones_like(self.weight), self.rate)  # for bias correction
        variance = self.square / self.weight - (self.mean / self.weight).square()
        return variance.clamp(min=1e-16).sqrt()


class Plan2ExploreLoss(DreamerV3Loss):
    """Losses for Plan2Explore (Sekar et al. 2020), built on DreamerV3.

    While ``exploring`` is true, an ensemble learns to predict the embedding of the next
    observation. A second actor, the explorer, is rewarded in imagination by the variance of the
    predictions, divided by its running standard deviation. Embeddings are computed by a frozen copy
    of the initial encoder. With the trained encoder, the embeddings would drift and the ensemble
    would never agree.

    During exploration, the world model learns only from observations and episode ends, because no
    gradients flow from reward and return predictions to the latent features. The task actor learns
    in imagination throughout, so it can be evaluated without having collected data (zero-shot).

    As in sheeprl, the explorer's advantage is the weighted mean of its critics' advantages, each
    divided by the scale of its returns. An explorer with discrete actions learns by REINFORCE. An
    explorer with continuous actions learns by gradients through the dynamics;
    ``loss_explorer_actor`` then needs a separate optimiser, because this loss also depends on the
    world model.

    Args:
        world_model: World model.
        actor: Task actor.
        critic: Task critic.
        explorer: Actor that maximises novelty.
        explorer_critic: Predicts the explorer's intrinsic returns.
        ensemble: One-step prediction models.
        intrinsic_weight: Weight of the intrinsic critic; must be positive.
        extrinsic_weight: Weight of a critic for the explorer's task returns; 0: no such critic.
        intrinsic_reward_multiplier: Factor that multiplies the normalised disagreement.
        **settings: Further arguments for :class:`~kit.losses.DreamerV3Loss`.
    """

    EXPLORATION = ("loss_ensemble", "loss_explorer_actor", "loss_explorer_critic")
    out_keys: tuple[str, ...] = (*DreamerV3Loss.out_keys, *EXPLORATION)

    explorer_critic_network: LatentCritic
    explorer_critic_network_params: Any
    target_explorer_critic_network_params: Any
    explorer_extrinsic_critic_network: LatentCritic
    explorer_extrinsic_critic_network_params: Any
    target_explorer_extrinsic_critic_network_params: Any

    def __init__(
        self,
        world_model: WorldModel,
        actor: LatentActor,
        critic: LatentCritic,
        explorer: LatentActor,
        explorer_critic: LatentCritic,
        ensemble: Ensemble,
        *,
        intrinsic_weight: float = 1.0,
        extrinsic_weight: float = 0.0,
        intrinsic_reward_multiplier: float = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(world_model, actor, critic, **settings)
        self.explorer, self.ensemble = explorer, ensemble
        fixed = copy.deepcopy(world_model.encoders)
        self.fixed_encoders = nn.ModuleList(fixed).requires_grad_(False)
        self.intrinsic_reward_multiplier = intrinsic_reward_multiplier
        self.novelty_std = RunningStd()
        self.explorer_weights = {"explorer_": intrinsic_weight}
        critics = [explorer_critic]
        if extrinsic_weight:
            self.explorer_weights["explorer_extrinsic_"] = extrinsic_weight
            critics.append(make_latent_critic(world_model))
        for name, network in zip(self.explorer_weights, critics):
            self.convert_to_functional(network, f"{name}critic_network", create_target_params=True)
            setattr(self, f"{name}return_scale", ReturnScale())
        self._exploring = True

    @property
    def exploring(self) -> bool:
        """Whether ensemble and explorer are trained; otherwise their weights are frozen."""
        return self._exploring

    @exploring.setter
    def exploring(self, exploring: bool) -> None:
        if exploring == self._exploring:
            return
        self._exploring = exploring
        for name, parameter in self.named_parameters():
            if name.startswith(("explorer", "ensemble")):
                parameter.requires_grad_(exploring)

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return all losses as scalars; explorer and ensemble losses are 0 after exploration."""
        outputs, starts = self._outputs(tensordict)
        if self.exploring:
            outputs |= self._exploration_losses(starts)
        else:
            outputs |= {name: starts.deter.new_zeros(()) for name in self.EXPLORATION}
        return TensorDict(outputs, [])

    def _reward_input(self, features: Tensor) -> Tensor:
        return features.detach() if self.exploring else features

    def _model_losses(self, records: Records) -> tuple[Latent, dict[str, Tensor]]:
        latents, losses = super()._model_losses(records)
        if self.exploring:
            losses["loss_ensemble"] = self._ensemble_loss(latents, records)
        return latents, losses

    def _ensemble_loss(self, latents: Latent, records: Records) -> Tensor:
        """Return the squared error of predicted embeddings, ignoring steps across episode ends."""
        features = latents.features.detach()[:-1].flatten(0, 1)
        predicted = self.ensemble(features, records.action[:-1].flatten(0, 1))
        targets = self.world_model.targets(records.observations)
        embedding = self.world_model.encode(targets, self.fixed_encoders)
        error = (predicted - embedding[1:].flatten(0, 1)).square().mean(-1)
        loss: Tensor = (error * (~records.is_init[1:]).flatten()).mean(-1).sum()
        return loss

    def _exploration_losses(self, starts: Latent) -> dict[str, Tensor]:
        gradients = not self.explorer.code.discrete
        imagined = imagine(
            self.world_model, self.explorer, starts, self.imagination_horizon, gradients=gradients
        )
        with torch.set_grad_enabled(gradients):
            features, action = torch.cat(imagined.features[:-1]), imagined.action.flatten(0, 1)
            disagreement = self.ensemble.disagreement(features, action)
        novelty = disagreement.view(imagined.reward.shape)  # reward for reaching the next latent
        intrinsic = self.intrinsic_reward_multiplier * novelty / self.novelty_std(novelty)
        rewards = {"explorer_": intrinsic, "explorer_extrinsic_": imagined.reward}
        outputs = {"disagreement": novelty.detach().mean()}
        total = sum(self.explorer_weights.values())
        critic_losses, advantages = list[Tensor](), list[Tensor]()
        for name, weight in self.explorer_weights.items():
            rewarded = imagined._replace(reward=rewards[name])
            scale = getattr(self, f"{name}return_scale")
            losses, evaluation = self._critic_losses(name, rewarded, scale, gradients=gradients)
            critic_losses.append(losses.pop(f"loss_{name}critic"))
            advantages.append(weight / total * evaluation.advantage / evaluation.spread)
            outputs |= losses
        outputs["loss_explorer_critic"] = torch.stack(critic_losses).sum()
        advantage = torch.stack(advantages).sum(0)
        return outputs | self._actor_losses(
            "explorer_", imagined, self.explorer, advantage, gradients=gradients
        )
