"""DreamerV1 loss, which differentiates imagined returns through the dynamics."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import LossModule

from kit.losses.imagination import imagine, lambda_returns
from kit.losses.records import Records
from kit.modules.world.gaussian import GaussianWorldModel, TanhActor
from kit.modules.world.rssm import Latent
from kit.steps.errors import whole_number


class DreamerV1Loss(LossModule):  # type: ignore[misc, unused-ignore]
    """Losses for Dreamer (Hafner et al. 2020); each loss needs a separate optimiser.

    ``loss_model`` trains the world model (eq. 10), ``loss_actor`` the actor (eq. 7) and
    ``loss_critic`` the critic (eq. 8). All losses are computed with the same weights. Minibatches
    are sequences of records, as for :class:`~kit.losses.DreamerV3Loss`. Trajectories that start at
    a terminal state have weight 0. As in DreamerV3, the value of a state includes only later
    rewards. In the paper, the value also includes the reward that arrives with the state.

    Args:
        world_model: World model.
        actor: Selects actions in imagination.
        critic: Maps features to values ``[..., 1]``.
        imagination_horizon: Number of imagined policy steps.
        imagination_starts: Number of time steps at the end of each sequence from which imagination
            starts; ``None``: all time steps, as in the paper.
        gamma: Discount factor.
        lmbda: Weight of longer returns in the lambda-return (eq. 6).
        free_nats: Threshold below which the KL divergence between posterior and prior is ignored.
        divergence_coeff: Weight of the KL divergence. The paper uses 1 for images. Observation
            errors assume unit variance, so low-dimensional observations need a smaller weight.
        continuation_coeff: Weight of the continuation loss. With 0, continuations are not predicted
            and imagined episodes never end.
    """

    out_keys = ("loss_model", "loss_actor", "loss_critic")

    def __init__(
        self,
        world_model: GaussianWorldModel,
        actor: TanhActor,
        critic: nn.Module,
        *,
        imagination_horizon: int = 15,
        imagination_starts: int | None = None,
        gamma: float = 0.99,
        lmbda: float = 0.95,
        free_nats: float = 3.0,
        divergence_coeff: float = 1.0,
        continuation_coeff: float = 10.0,
    ) -> None:
        super().__init__()
        self.world_model, self.actor, self.critic = world_model, actor, critic
        self.imagination_horizon, self.gamma, self.lmbda = imagination_horizon, gamma, lmbda
        self.imagination_starts = whole_number("imagination_starts", imagination_starts or 0)
        self.free_nats, self.divergence_coeff = free_nats, divergence_coeff
        self.continuation_coeff = continuation_coeff

    @property
    def in_keys(self) -> list[Any]:
        """Minibatch keys that the loss reads."""
        return Records.keys(self.world_model)

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return scalar losses and the terms of ``loss_model`` from ``[sequences, time]`` data."""
        records = Records.of(tensordict, self.world_model, self.gamma)
        latents, parts = self._model_losses(records)
        starts, horizon = latents.newest(self.imagination_starts), self.imagination_horizon
        imagined = imagine(self.world_model, self.actor, starts, horizon, gradients=True)
        continuation = imagined.continuation
        if not self.continuation_coeff:
            continuation = torch.full_like(continuation, self.gamma)
        features = torch.stack(imagined.features)
        value = self.critic(features).float().squeeze(-1)
        returns = lambda_returns(imagined.reward, continuation[1:], value[1:], self.lmbda)
        # Use recorded flags for start states and predicted continuations for later states.
        is_alive = ~records.newest(self.imagination_starts).terminated.reshape(1, -1)
        weight = torch.cat([is_alive.float(), continuation.detach()[1:-1]]).cumprod(0)
        predicted = self.critic(features[:-1].detach()).float().squeeze(-1)
        error = (predicted - returns.detach()).square() / 2
        losses = {
            "loss_model": sum(parts.values()),
            "loss_actor": -(weight * returns).mean(),
            "loss_critic": (weight * error).mean(),
            "imagined_return": returns.detach().mean(),
        }
        return TensorDict(losses | {name: part.detach() for name, part in parts.items()}, [])

    def _model_losses(self, records: Records) -> tuple[Latent, dict[str, Tensor]]:
        """Return latents ``[time, sequences, ...]`` and the terms of the model loss (eq. 10)."""
        model = self.world_model
        targets, latents, posterior = records.filtered(model)
        divergence, _ = model.rssm.divergence(posterior, model.rssm.prior(latents.deter))
        features = latents.features
        parts = {
            "reconstruction": model.reconstruction_error(features, targets).mean() / 2,
            "reward": model.reward_error(features, records.reward).mean(),
            "divergence": self.divergence_coeff * divergence.mean().clamp(min=self.free_nats),
        }
        if self.continuation_coeff:
            error = model.continuation_error(features, records.continuation).mean()
            parts["continuation"] = self.continuation_coeff * error
        return latents, parts
