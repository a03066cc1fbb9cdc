"""Ensemble of one-step models whose disagreement measures the novelty of a state and action."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from kit.modules.world.actions import bounded
from kit.modules.world.layers import NORM_EPS, Blocks
from kit.modules.world.sizes import Size
from kit.steps.errors import whole_number


class Ensemble(nn.Module):
    """Models that predict the embedding of the next observation from a latent and an action.

    The models differ only in their initial weights (Sekar et al. 2020, section 3) and run in one
    batched pass.

    Args:
        members: number of models, at least 2.
        features: size of a latent's features.
        action_features: size of an encoded action.
        outputs: size of an embedding.
        size: network sizes.

    Raises:
        SettingError: if ``members`` is less than 2.
    """

    def __init__(
        self, members: int, features: int, action_features: int, outputs: int, size: Size
    ) -> None:
        super().__init__()
        self.members = whole_number("ensemble", members, at_least=2)
        widths = [features + action_features, size.units, size.units]  # two hidden layers
        self.hidden = nn.ModuleList(
            Blocks(members, before, after, fan_in=before) for before, after in pairwise(widths)
        )
        self.scales = nn.ParameterList(torch.ones(members, 1, size.units) for _ in self.hidden)
        self.out = Blocks(members, size.units, outputs, fan_in=size.units)

    def forward(self, features: Tensor, action: Tensor) -> Tensor:
        """Return the predictions of all models, ``[members, rows, outputs]``.

        Args:
            features: features of latents, ``[rows, features]``.
            action: encoded actions, ``[rows, action_features]``. They are scaled to [-1, 1] as in
                the world model, because the models are not trained outside this range.
        """
        value = torch.cat([features, bounded(action)], -1).expand(self.members, -1, -1)
        for layer, scale in zip(self.hidden, self.scales):
            value = layer(value)
            size = (value.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
            value = functional.silu(value * size * scale)
        return self.out(value).float()  # type: ignore[no-any-return]

    def disagreement(self, features: Tensor, action: Tensor) -> Tensor:
        """Return the sample variance of the predictions, averaged over outputs, ``[rows]``.

        The variance uses Bessel's correction (section 3).
        """
        return self(features, action).var(0, correction=1).mean(-1)  # type: ignore[no-any-return]
