"""The loss of the first Dreamer: gradients of imagined returns through the dynamics."""

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
    """Losses of Dreamer (Hafner et al. 2020), each with an optimiser of its own.

    ``loss_model`` trains the world model (eq. 10), ``loss_actor`` the actor (eq. 7) and
    ``loss_critic`` the critic (eq. 8), all on the same weights. Minibatches are sequences of
    records, as for :class:`~kit.losses.DreamerV3Loss`. Imagination that would begin where an
    episode terminated counts for nothing. The value of a state is that of the rewards that follow
    it, as in DreamerV3; the paper's has the reward that arrived with the state in it, too, which
    makes the same returns one time step later.

    Args:
        world_model: encodes, predicts and is trained.
        actor: acts in imagination.
        critic: from features to a value, ``[..., 1]``.
        imagination_horizon: imagined policy steps.
        imagination_starts: last time steps of each sequence from which imagination begins;
            ``None``: all of them, as published.
        gamma: discount.
        lmbda: weight of longer returns (eq. 6).
        free_nats: divergence of posterior and prior that costs nothing.
        divergence_coeff: weight of the divergence; 1 as published, for images. Errors of
            observations count as with unit variance, which is little where there are few numbers.
        continuation_coeff: weight of the loss of predicted continuations; 0 predicts none, and
            imagined episodes never end.
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
        """Keys of a minibatch that are read."""
        return Records.keys(self.world_model)

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """The three losses of ``[sequences, time]``, each a number, and the parts of the first."""
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
        # What the records say of the starts; the model, of what follows them.
        going = ~records.newest(self.imagination_starts).terminated.reshape(1, -1)
        weight = torch.cat([going.float(), continuation.detach()[1:-1]]).cumprod(0)
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
        """Latents ``[time, sequences, ...]`` and the parts of the world model's loss (eq. 10)."""
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
