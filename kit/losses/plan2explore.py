"""The loss of Plan2Explore: DreamerV3's, an ensemble, and an actor that seeks its disagreement."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from kit.losses.dreamerv3 import DreamerV3Loss, ReturnScale
from kit.losses.imagination import imagine
from kit.losses.records import Records
from kit.modules.world.actions import LatentActor
from kit.modules.world.ensemble import Ensemble
from kit.modules.world.model import LatentCritic, WorldModel
from kit.modules.world.rssm import Latent


class Plan2ExploreLoss(DreamerV3Loss):
    """Losses of Plan2Explore (Sekar et al. 2020) on DreamerV3.

    While it is ``exploring``, an ensemble learns to predict the next latent, and a second actor
    with a critic of its own is rewarded by the variance of the predictions in imagination. The
    world model then learns from observations and the ends of episodes alone: rewards and returns
    are predicted from its features without changing them. The actor of the task learns in
    imagination all the time, so that it can be evaluated without ever having acted (zero-shot).

    Args:
        world_model: as in DreamerV3.
        actor: of the task.
        critic: of the task.
        explorer: acts to find novelty.
        explorer_critic: predicts the explorer's returns.
        ensemble: one-step models.
        intrinsic_reward_multiplier: factor of the disagreement as the explorer's reward.
        **settings: as in DreamerV3.

    Attributes:
        exploring: whether ensemble and explorer are trained.
    """

    out_keys: tuple[str, ...] = (
        *DreamerV3Loss.out_keys, "loss_ensemble", "loss_explorer_actor", "loss_explorer_critic",
    )  # fmt: skip

    explorer_critic_network: LatentCritic
    explorer_critic_network_params: Any
    target_explorer_critic_network_params: Any

    def __init__(
        self,
        world_model: WorldModel,
        actor: LatentActor,
        critic: LatentCritic,
        explorer: LatentActor,
        explorer_critic: LatentCritic,
        ensemble: Ensemble,
        *,
        intrinsic_reward_multiplier: float = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(world_model, actor, critic, **settings)
        self.explorer, self.ensemble = explorer, ensemble
        own = "explorer_critic_network"
        self.convert_to_functional(explorer_critic, own, create_target_params=True)
        self.explorer_return_scale = ReturnScale()
        self.intrinsic_reward_multiplier = intrinsic_reward_multiplier
        self.exploring = True

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """All losses, each one number; those of exploration while it is under way."""
        outputs, starts = self._outputs(tensordict)
        if self.exploring:
            outputs |= self._exploration_losses(starts)
        return TensorDict(outputs, [])

    def _rewarded(self, features: Tensor) -> Tensor:
        return features.detach() if self.exploring else features

    def _model_losses(self, records: Records) -> tuple[Latent, dict[str, Tensor]]:
        latents, losses = super()._model_losses(records)
        if self.exploring:
            losses["loss_ensemble"] = self._ensemble_loss(latents, records)
        return latents, losses

    def _ensemble_loss(self, latents: Latent, records: Records) -> Tensor:
        """Squared errors of the predicted latents, except across the ends of episodes."""
        features = latents.features.detach()[:-1].flatten(0, 1)
        predicted = self.ensemble(features, records.action[:-1].flatten(0, 1))
        error = (predicted - latents.stoch.detach()[1:].flatten(0, 1)).square().mean(-1)
        loss: Tensor = (error * (~records.is_init[1:]).flatten()).mean(-1).sum()
        return loss

    def _exploration_losses(self, starts: Latent) -> dict[str, Tensor]:
        """Losses of the explorer and its critic, rewarded by the ensemble's disagreement."""
        imagined = imagine(self.world_model, self.explorer, starts, self.imagination_horizon)
        with torch.no_grad():
            found = self.ensemble.disagreement(
                torch.cat(imagined.features[:-1]), imagined.action.flatten(0, 1)
            )
        novelty = found.view(imagined.reward.shape)  # arrives with the next latent
        losses, _ = self._behaviour_losses(
            "explorer_",
            imagined._replace(reward=self.intrinsic_reward_multiplier * novelty),
            self.explorer,
            self.explorer_return_scale,
        )
        return losses | {"disagreement": novelty.mean()}
