"""Recurrent state-space models for filtering and imagination, including DreamerV3's RSSM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kit.modules.networks import one_hot
from kit.modules.world.actions import bounded
from kit.modules.world.layers import Blocks, Dense, Norm, Perceptron, init_weight, sample_one_hot
from kit.modules.world.sizes import Size


class Latent(NamedTuple):
    """The latent state of a world model."""

    deter: Tensor
    """Deterministic state, ``[..., deter]``."""
    stoch: Tensor
    """Stochastic state, ``[..., stoch]``: concatenated one-hot samples, or Gaussian samples."""

    @property
    def features(self) -> Tensor:
        """Input features for the heads, actor and critic, ``[..., stoch + deter]``."""
        return torch.cat([self.stoch, self.deter], -1)

    def newest(self, time_steps: int) -> Latent:
        """Flatten the last ``time_steps`` (0: all) of ``[time, sequences, ...]`` into rows."""
        return Latent(*(part[-time_steps:].flatten(0, 1) for part in self))


class StateSpace(nn.Module):
    """Base class for recurrent state-space models, used for filtering and imagination.

    Values that do not depend on the previous step are computed for all time steps at once.

    Attributes:
        deter: size of the deterministic state.
        stoch: size of the stochastic state.
        action_features: size of an encoded action.
        features: size of a latent's features.
        posterior_embedding: linear projection of encoded observations.
        prior: network that maps the deterministic state to the prior's parameters.
    """

    deter: int
    stoch: int
    action_features: int
    posterior_embedding: nn.Linear
    prior: nn.Module

    @property
    def features(self) -> int:
        """Size of a latent's features."""
        return self.deter + self.stoch

    def initial(self, *rows: int, device: torch.device | None = None) -> Latent:
        """Return latents filled with zeros, ``[*rows, ...]``."""
        widths = (self.deter, self.stoch)
        return Latent(*(torch.zeros(*rows, width, device=device) for width in widths))

    def packed(self, latent: Latent) -> dict[str, Tensor]:
        """Return a dict of replay-buffer entries for latents, including a validity flag."""
        known = torch.ones_like(latent.deter[..., :1], dtype=torch.bool)
        return {
            "deter": latent.deter.detach().half(),
            "stoch": latent.stoch.detach(),
            "known": known,
        }

    def unpacked(self, packed: Mapping[str, Tensor]) -> Latent:
        """Convert entries from :meth:`packed` back to latents."""
        return Latent(packed["deter"].float(), packed["stoch"])

    def noise(self, *rows: int, device: torch.device) -> Tensor:
        """Draw the random numbers for sampling stochastic states, ``[*rows, ...]``."""
        raise NotImplementedError

    def action(self, action: Tensor) -> Tensor:
        """Return the projection of encoded actions ``[..., action_features]``."""
        return action

    def recur(self, latent: Latent, action: Tensor) -> Tensor:
        """Return the next deterministic state.

        Args:
            latent: current latent, ``[rows, ...]``.
            action: projected action, ``[rows, ...]``.
        """
        raise NotImplementedError

    def correct(self, deter: Tensor, embedding: Tensor) -> Tensor:
        """Return the posterior's parameters for a deterministic state and projected observation."""
        raise NotImplementedError

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Return differentiable samples of the stochastic state, ``[..., stoch]``."""
        raise NotImplementedError

    def divergence(self, posterior: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Return the dynamics and representation KL divergences in nats, summed over latents.

        The first divergence only trains the prior and the second one only the posterior (Hafner et
        al. 2025, eq. 5, without free nats). Both have shape ``[...]``.

        Args:
            posterior: parameters of the posterior, ``[..., *]``.
            prior: parameters of the prior, of the same shape.
        """
        raise NotImplementedError

    def imagine(self, latent: Latent, action: Tensor, noise: Tensor) -> Latent:
        """Return the next latent, sampled from the prior; see :meth:`recur` and :meth:`sample`."""
        deter = self.recur(latent, action)
        return Latent(deter, self.sample(self.prior(deter), noise))

    def observe(
        self, start: Latent, previous_action: Tensor, embedding: Tensor, is_init: Tensor
    ) -> tuple[Latent, Tensor]:
        """Filter sequences, resetting the latent and action to zero at the start of each episode.

        Args:
            start: latent before the first time step, ``[rows, ...]``.
            previous_action: encoded previous actions, ``[time, rows, action_features]``.
            embedding: encoded observations, ``[time, rows, embedding]``.
            is_init: whether a time step starts an episode, ``[time, rows]``.

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


class RSSM(StateSpace):
    """DreamerV3's state-space model, with categorical latents and a block-diagonal GRU.

    Class probabilities are mixed with 1 % of a uniform distribution, and samples have
    straight-through gradients (Hafner et al. 2025, eqs. 1, 4 and appendix).
    """

    UNIFORM = 0.01

    def __init__(self, size: Size, action_features: int, embedding: int) -> None:
        super().__init__()
        self.size, self.action_features = size, action_features
        width, hidden, blocks = size.deter, size.hidden, size.blocks
        codes = size.stoch * size.classes
        self.deter, self.stoch = width, codes
        self.from_deter = Perceptron(width, hidden, 1)
        self.from_stoch = Perceptron(codes, hidden, 1)
        self.from_action = Perceptron(action_features, hidden, 1)
        part, joined = width // blocks, 3 * hidden
        self.mix = nn.Parameter(torch.empty(blocks, part, part))
        self.mix_joined = nn.Linear(joined, width)
        for weight in (self.mix, self.mix_joined.weight):
            init_weight(weight, width + joined * blocks)
        nn.init.zeros_(self.mix_joined.bias)
        self.mix_norm = Norm(width)
        self.gates = Blocks(blocks, part, 3 * part, fan_in=width)
        self.prior = Perceptron(width, hidden, 2, codes)
        self.posterior_deter = nn.Linear(width, hidden, bias=False)
        self.posterior_embedding = nn.Linear(embedding, hidden)
        for layer in (self.posterior_deter, self.posterior_embedding):
            init_weight(layer.weight, width + embedding)
        nn.init.zeros_(self.posterior_embedding.bias)
        self.posterior_norm = Norm(hidden)
        self.posterior_out = Dense(hidden, codes)

    def packed(self, latent: Latent) -> dict[str, Tensor]:
        """Return replay-buffer entries, with class indices instead of one-hot samples."""
        codes = latent.stoch.view(*latent.stoch.shape[:-1], self.size.stoch, self.size.classes)
        return {**super().packed(latent), "stoch": codes.argmax(-1).short()}

    def unpacked(self, packed: Mapping[str, Tensor]) -> Latent:
        """Convert entries from :meth:`packed` back to latents."""
        codes = one_hot(packed["stoch"], self.size.classes)
        return Latent(packed["deter"].float(), codes.flatten(-2))

    def noise(self, *rows: int, device: torch.device) -> Tensor:
        """Draw uniform random numbers in [0, 1), ``[*rows, latents]``."""
        return torch.rand(*rows, self.size.stoch, device=device)

    def action(self, action: Tensor) -> Tensor:
        """Return the projection of encoded actions, which are first scaled down to [-1, 1]."""
        return self.from_action(bounded(action))  # type: ignore[no-any-return]

    def recur(self, latent: Latent, action: Tensor) -> Tensor:
        """Return the next deterministic state; see :meth:`StateSpace.recur`."""
        deter, blocks = latent.deter, self.size.blocks
        rows = len(deter)
        joined = torch.cat([self.from_deter(deter), self.from_stoch(latent.stoch), action], -1)
        state, shared = (
            part.view(rows, blocks, -1).transpose(0, 1) for part in (deter, self.mix_joined(joined))
        )
        mixed = torch.baddbmm(shared, state, self.mix)
        mixed = self.mix_norm(mixed.transpose(0, 1).reshape(rows, -1))
        gates = self.gates(mixed.view(rows, blocks, -1).transpose(0, 1))
        reset, candidate, update = gates.float().chunk(3, -1)
        # PyTorch's sigmoid is slow on strided tensors, and three times faster than its tanh.
        # The code therefore uses contiguous tensors and tanh(x) = 2 sigmoid(2 x) - 1.
        kept = torch.sigmoid(reset.contiguous()) * candidate
        candidate = 2 * torch.sigmoid(2 * kept) - 1
        following = torch.lerp(state, candidate, torch.sigmoid(update - 1))
        return following.transpose(0, 1).reshape(rows, -1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return class probabilities, mixed with uniform ones, ``[..., stoch, classes]``."""
        size = self.size
        # Classes are moved to the first dimension, as softmax over few adjacent values is slow.
        classes = logits.float().reshape(-1, size.classes).t().softmax(0)
        mixed = (1 - self.UNIFORM) * classes + self.UNIFORM / size.classes
        return mixed.t().view(*logits.shape[:-1], size.stoch, size.classes)

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Return concatenated one-hot samples with straight-through gradients.

        Args:
            parameters: logits, ``[..., stoch]``.
            noise: uniform random numbers in [0, 1), ``[..., latents]``.
        """
        probabilities = self.probabilities(parameters)
        sampled = sample_one_hot(probabilities.detach(), noise)
        if probabilities.requires_grad:
            sampled = sampled + probabilities - probabilities.detach()
        return sampled.flatten(-2)

    def correct(self, deter: Tensor, embedding: Tensor) -> Tensor:
        """Return the posterior's logits for a deterministic state and a projected observation."""
        hidden = self.posterior_norm(self.posterior_deter(deter) + embedding)
        return self.posterior_out(hidden)  # type: ignore[no-any-return]

    def divergence(self, posterior: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Return KL divergences for logits ``[..., stoch]``; see :meth:`StateSpace.divergence`."""
        p, q = self.probabilities(posterior), self.probabilities(prior)
        return _kl(p.detach(), q), _kl(p, q.detach())


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum((-1, -2))
