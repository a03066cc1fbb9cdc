"""The base of recurrent state-space models: filtering and imagination."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Latent(NamedTuple):
    """The state of a world model."""

    deter: Tensor
    """deterministic, ``[..., deter]``."""
    stoch: Tensor
    """stochastic, ``[..., stoch]``: one-hot samples side by side, or numbers."""

    @property
    def features(self) -> Tensor:
        """Input of heads, actor and critic, ``[..., stoch + deter]``."""
        return torch.cat([self.stoch, self.deter], -1)

    def newest(self, time_steps: int) -> Latent:
        """The last time steps of ``[time, sequences, ...]`` as rows, ``[rows, ...]``; 0: all."""
        return Latent(*(part[-time_steps:].flatten(0, 1) for part in self))


class StateSpace(nn.Module):
    """A recurrent state-space model, for filtering and imagination.

    Whatever does not depend on the step before is computed for all time steps at once.

    Attributes:
        deter: width of the deterministic state.
        stoch: width of the stochastic state.
        action_features: width of an encoded action.
        features: width of a latent's features.
        posterior_embedding: projects encoded observations.
        prior: parameters of the next stochastic state, from the deterministic one.
    """

    deter: int
    stoch: int
    action_features: int
    posterior_embedding: nn.Linear
    prior: nn.Module

    @property
    def features(self) -> int:
        """Width of a latent's features."""
        return self.deter + self.stoch

    def initial(self, *rows: int, device: torch.device | None = None) -> Latent:
        """Latents of zeros, ``[*rows, ...]``."""
        widths = (self.deter, self.stoch)
        return Latent(*(torch.zeros(*rows, width, device=device) for width in widths))

    def packed(self, latent: Latent) -> dict[str, Tensor]:
        """Latents as a replay keeps them, by name, with the flag that they are known."""
        known = torch.ones_like(latent.deter[..., :1], dtype=torch.bool)
        return {
            "deter": latent.deter.detach().half(),
            "stoch": latent.stoch.detach(),
            "known": known,
        }

    def unpacked(self, packed: Mapping[str, Tensor]) -> Latent:
        """The latents of :meth:`packed`."""
        return Latent(packed["deter"].float(), packed["stoch"])

    def noise(self, *rows: int, device: torch.device) -> Tensor:
        """Random numbers that samples of ``rows`` states need, ``[*rows, ...]``."""
        raise NotImplementedError

    def action(self, action: Tensor) -> Tensor:
        """Project encoded actions, ``[..., action_features]``."""
        return action

    def recur(self, latent: Latent, action: Tensor) -> Tensor:
        """The next deterministic state.

        Args:
            latent: ``[rows, ...]``.
            action: projected, ``[rows, ...]``.
        """
        raise NotImplementedError

    def correct(self, deter: Tensor, embedding: Tensor) -> Tensor:
        """Parameters of the posterior, from the deterministic state and projected observations."""
        raise NotImplementedError

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Stochastic states ``[..., stoch]``, through which gradients flow."""
        raise NotImplementedError

    def divergence(self, posterior: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """KL divergences of dynamics and representation in nats, summed over latents, ``[...]``.

        The first moves the prior towards the posterior, the second the posterior towards the prior
        (Hafner et al. 2025, eq. 5, before free nats).

        Args:
            posterior: parameters, ``[..., *]``.
            prior: parameters of the same shape.
        """
        raise NotImplementedError

    def imagine(self, latent: Latent, action: Tensor, noise: Tensor) -> Latent:
        """The next latent by the prior; arguments as in :meth:`recur` and :meth:`sample`."""
        deter = self.recur(latent, action)
        return Latent(deter, self.sample(self.prior(deter), noise))

    def observe(
        self, start: Latent, previous_action: Tensor, embedding: Tensor, is_init: Tensor
    ) -> tuple[Latent, Tensor]:
        """Filter sequences; where an episode begins, latent and action are zero before it.

        Args:
            start: latent before the first time step, ``[rows, ...]``.
            previous_action: encoded, ``[time, rows, action_features]``.
            embedding: encoded observations, ``[time, rows, embedding]``.
            is_init: whether a time step begins an episode, ``[time, rows]``.

        Returns:
            Latents ``[time, rows, ...]`` and the parameters of their posteriors.
        """
        time, rows = is_init.shape
        keep = (~is_init).unsqueeze(-1).to(embedding.dtype)
        actions = self.action(previous_action * keep)
        embedded = self.posterior_embedding(embedding)
        noise = self.noise(time, rows, device=embedding.device)
        latent, found = start, []
        for step in zip(*(part.unbind(0) for part in (actions, embedded, keep, noise))):
            action, seen, kept, random = step
            deter = self.recur(Latent(latent.deter * kept, latent.stoch * kept), action)
            parameters = self.correct(deter, seen)
            latent = Latent(deter, self.sample(parameters, random))
            found.append((*latent, parameters))
        deter, stoch, parameters = (torch.stack(parts) for parts in zip(*found))
        return Latent(deter, stoch), parameters
