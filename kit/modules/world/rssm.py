"""The state-space model of DreamerV3: discrete latents around a block-diagonal GRU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kit.modules.networks import one_hot
from kit.modules.world.actions import bounded
from kit.modules.world.layers import Blocks, Dense, Norm, Perceptron, init_weight, sample_one_hot
from kit.modules.world.sizes import Size
from kit.modules.world.state_space import Latent, StateSpace


class RSSM(StateSpace):
    """Predicts the next latent from the latent and the action, and corrects it by the observation.

    The recurrence is a GRU whose weights are block-diagonal; latents are categorical, with 1 % of
    uniform probability mixed in and gradients passed straight through samples (Hafner et al. 2025,
    eqs. 1, 4 and appendix).

    Args:
        size: widths.
        action_features: width of an encoded action.
        embedding: width of an encoded observation.
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
        """As for any state-space model, with the numbers of the classes."""
        codes = latent.stoch.view(*latent.stoch.shape[:-1], self.size.stoch, self.size.classes)
        return {**super().packed(latent), "stoch": codes.argmax(-1).short()}

    def unpacked(self, packed: Mapping[str, Tensor]) -> Latent:
        """The latents of :meth:`packed`."""
        codes = one_hot(packed["stoch"], self.size.classes)
        return Latent(packed["deter"].float(), codes.flatten(-2))

    def noise(self, *rows: int, device: torch.device) -> Tensor:
        """Uniform random numbers in [0, 1), ``[*rows, latents]``."""
        return torch.rand(*rows, self.size.stoch, device=device)

    def action(self, action: Tensor) -> Tensor:
        """Project encoded actions ``[..., action_features]``, scaled into [-1, 1] if beyond."""
        return self.from_action(bounded(action))  # type: ignore[no-any-return]

    def recur(self, latent: Latent, action: Tensor) -> Tensor:
        """The next deterministic state; arguments as for any state-space model."""
        deter, blocks = latent.deter, self.size.blocks
        rows = len(deter)
        joined = torch.cat([self.from_deter(deter), self.from_stoch(latent.stoch), action], -1)
        own, shared = (
            part.view(rows, blocks, -1).transpose(0, 1) for part in (deter, self.mix_joined(joined))
        )
        mixed = torch.baddbmm(shared, own, self.mix)
        mixed = self.mix_norm(mixed.transpose(0, 1).reshape(rows, -1))
        gates = self.gates(mixed.view(rows, blocks, -1).transpose(0, 1))
        reset, candidate, update = gates.float().chunk(3, -1)
        # PyTorch's sigmoid is slow on strided numbers, and three times as fast as its tanh:
        # tanh(x) = 2 sigmoid(2 x) - 1.
        kept = torch.sigmoid(reset.contiguous()) * candidate
        candidate = 2 * torch.sigmoid(2 * kept) - 1
        following = torch.lerp(own, candidate, torch.sigmoid(update - 1))
        return following.transpose(0, 1).reshape(rows, -1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Class probabilities ``[..., stoch, classes]`` with uniform ones mixed in."""
        size = self.size
        # Classes lie first in memory: PyTorch is slow at a softmax over few neighbours.
        classes = logits.float().reshape(-1, size.classes).t().softmax(0)
        mixed = (1 - self.UNIFORM) * classes + self.UNIFORM / size.classes
        return mixed.t().view(*logits.shape[:-1], size.stoch, size.classes)

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """One-hot samples side by side, with gradients straight through to the probabilities.

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
        """Logits of the posterior, from the deterministic state and a projected observation."""
        hidden = self.posterior_norm(self.posterior_deter(deter) + embedding)
        return self.posterior_out(hidden)  # type: ignore[no-any-return]

    def divergence(self, posterior: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """As for any state-space model, of logits ``[..., stoch]``."""
        p, q = self.probabilities(posterior), self.probabilities(prior)
        return _kl(p.detach(), q), _kl(p, q.detach())


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum((-1, -2))
