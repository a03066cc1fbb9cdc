"""DreamerV3's world model and critic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from kit.modules.networks import Flatten
from kit.modules.world.actions import ActionCode
from kit.modules.world.images import ImageDecoder, ImageEncoder
from kit.modules.world.layers import Perceptron, TwoHot, symlog
from kit.modules.world.rssm import RSSM, StateSpace
from kit.modules.world.sizes import Size, size_of
from kit.steps import SettingError


class WorldModel(nn.Module):
    """Encoder, recurrent state-space model, decoder, and heads for reward and continuation.

    Vectors are encoded and predicted in symlog space, and images are scaled to [0, 1] (Hafner et
    al. 2025, eqs. 3 and 9). Discrete observations are one-hot encoded and predicted by categorical
    distributions, as in the authors' code.

    Args:
        env: environment that defines observations and actions.
        size: network sizes.

    Attributes:
        features: size of a latent's features.
        embedding: size of an encoded observation.

    Raises:
        SettingError: if an observation is neither a vector nor an image.
    """

    def __init__(self, env: Any, size: Size) -> None:
        super().__init__()
        for leaf in env.observation_leaves:
            if len(leaf.shape) not in (0, 1) and not _is_image(leaf):
                hint = "Use vectors, or images [height, width, channels] of uint8"
                reason = f"World models do not support {leaf.dtype} of shape {list(leaf.shape)}"
                raise SettingError("observation", leaf.key, reason, hint)
        self.size = size
        self.code = ActionCode(env)
        self.vectors = [leaf.key for leaf in env.observation_leaves if not _is_image(leaf)]
        self.images = [leaf.key for leaf in env.observation_leaves if _is_image(leaf)]
        shapes = [leaf.shape for leaf in env.observation_leaves if _is_image(leaf)]
        embedding, width = 0, 0
        if self.vectors:
            self.flatten = Flatten([env.observation_spec[key] for key in self.vectors])
            width = self.flatten.out_features
            self.encoder = self._network(width, 3)
            embedding += size.units
        self.image_encoders = nn.ModuleList(ImageEncoder(shape, size) for shape in shapes)
        embedding += sum(encoder.out_features for encoder in self.image_encoders)  # type: ignore[misc]
        self.embedding = embedding
        self.rssm = self._state_space(embedding)
        self.features = self.rssm.features
        if self.vectors:
            self.decoder = self._network(self.features, 3, width)
        self.image_decoders = nn.ModuleList(ImageDecoder(shape, size) for shape in shapes)
        self._make_heads()

    def _network(self, in_features: int, layers: int, out_features: int | None = None) -> nn.Module:
        """Create a multilayer perceptron with an optional output layer."""
        return Perceptron(in_features, self.size.units, layers, out_features)

    def _state_space(self, embedding: int) -> StateSpace:
        """Create the state-space model for observation embeddings of size ``embedding``."""
        return RSSM(self.size, self.code.features, embedding)

    def _make_heads(self) -> None:
        self.two_hot = TwoHot()
        units = self.size.units
        self.reward_head = self.two_hot.head(self.features, units, 1)
        self.continuation_head: nn.Module = Perceptron(self.features, units, 1, 1)

    def _scaled(self, vector: Tensor) -> Tensor:
        """Transform vector observations to the space in which they are encoded and predicted."""
        return symlog(vector)

    @property
    def observation_keys(self) -> list[Any]:
        """Keys of the observations that the model reads."""
        return [*self.vectors, *self.images]

    def targets(self, tensordict: TensorDictBase) -> list[Tensor]:
        """Return the encoder inputs: all vectors concatenated, then each image, ``[..., *]``."""
        found = []
        if self.vectors:
            vectors = [
                value if choices else self._scaled(value.float())
                for value, choices in zip(map(tensordict.get, self.vectors), self.flatten.choices)
            ]
            found.append(self.flatten(*vectors))
        return found + [tensordict.get(key).float() / 255 for key in self.images]

    @property
    def encoders(self) -> list[nn.Module]:
        """Encoders, in the order of the inputs from :meth:`targets`."""
        return [*([self.encoder] if self.vectors else []), *self.image_encoders]

    def encode(self, targets: list[Tensor], encoders: Iterable[nn.Module] | None = None) -> Tensor:
        """Return the embeddings of observations, ``[..., embedding]``.

        Args:
            targets: encoder inputs from :meth:`targets`.
            encoders: encoders to use instead of :attr:`encoders`.
        """
        parts = [encoder(one) for encoder, one in zip(encoders or self.encoders, targets)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def reconstruction_error(self, features: Tensor, targets: list[Tensor]) -> Tensor:
        """Return the observation prediction errors, summed over entries, ``[...]``."""
        images = zip(self.image_decoders, targets[1:] if self.vectors else targets)
        errors = [
            (decoder(features) - image).square().flatten(features.ndim - 1).sum(-1)
            for decoder, image in images
        ]
        if self.vectors:
            errors.insert(0, self._vector_error(self.decoder(features).float(), targets[0]))
        total: Tensor = sum(errors[1:], errors[0])
        return total

    def _vector_error(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Return squared errors of numeric plus cross-entropies of discrete inputs, ``[...]``."""
        widths = [width for width, _ in self.flatten.parts]
        columns = zip(torch.split(predicted, widths, -1), torch.split(target, widths, -1))
        errors = [
            -(seen * out.log_softmax(-1)).sum(-1) if choice else (out - seen).square().sum(-1)
            for (out, seen), (_, choice) in zip(columns, self.flatten.parts)
        ]
        total: Tensor = sum(errors[1:], errors[0])
        return total

    # ------------------------------------------------------------------ heads
    def reward(self, features: Tensor) -> Tensor:
        """Return the expected reward for the step that led to each latent, ``[...]``."""
        return self.two_hot.mean(self.reward_head(features))

    def continuation(self, features: Tensor) -> Tensor:
        """Return the discounted probability that the episode continues, ``[...]``."""
        return self.continuation_head(features).float().squeeze(-1).sigmoid()  # type: ignore[no-any-return]

    def reward_error(self, features: Tensor, reward: Tensor) -> Tensor:
        """Return the cross-entropy of the predicted reward with its two-hot target, ``[...]``."""
        return self.two_hot.loss(self.reward_head(features), reward)

    def continuation_error(self, features: Tensor, continuation: Tensor) -> Tensor:
        """Return the binary cross-entropy for predicting the discounted continuation, ``[...]``."""
        logits = self.continuation_head(features).squeeze(-1)
        return functional.binary_cross_entropy_with_logits(logits, continuation, reduction="none")


class LatentCritic(nn.Module):
    """Critic that predicts a distribution of returns for each latent, as two-hot logits."""

    def __init__(self, features: int, size: Size) -> None:
        super().__init__()
        self.two_hot = TwoHot()
        self.network = self.two_hot.head(features, size.units, 3)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits, ``[..., bins + 1]``; the last logit is -inf."""
        return self.network(features)  # type: ignore[no-any-return]


def make_world_model(env: Any, size: str | Size = "tiny", latents: int | None = None) -> WorldModel:
    """Create a world model for an environment.

    Args:
        env: environment from :func:`~kit.envs.make_env`.
        size: key of :data:`~kit.modules.world.SIZES`, or custom sizes.
        latents: number of discrete latents; ``None``: the size's default.

    Raises:
        SettingError: if the observation or action space is not supported.
    """
    return WorldModel(env, size_of(size, latents=latents))


def make_latent_critic(world_model: WorldModel) -> LatentCritic:
    """Create a critic that reads a world model's features."""
    return LatentCritic(world_model.features, world_model.size)


def _is_image(leaf: Any) -> bool:
    return len(leaf.shape) == 3 and leaf.dtype == np.uint8
