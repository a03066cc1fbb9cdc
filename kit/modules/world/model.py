"""The world model of DreamerV3 and its critic."""

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
    """Encoder, recurrent state-space model, decoder and heads of reward and continuation.

    Vectors are read and predicted in symlog space, images are scaled to [0, 1] (Hafner et al. 2025,
    eqs. 3 and 9). Choices are read one-hot and predicted by their probabilities, as in the authors'
    code.

    Args:
        env: says what observations and actions are.
        size: widths of all networks.

    Attributes:
        features: width of a latent's features.
        embedding: width of an encoded observation.

    Raises:
        SettingError: if an observation is neither a vector nor an image.
    """

    def __init__(self, env: Any, size: Size) -> None:
        super().__init__()
        for leaf in env.observation_leaves:
            if len(leaf.shape) not in (0, 1) and not _is_image(leaf):
                works = "give vectors, or images [height, width, channels] of uint8"
                why = f"is neither a vector nor an image: {leaf.dtype} {list(leaf.shape)}"
                raise SettingError("observation", leaf.key, why, works)
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
        """A network between vectors."""
        return Perceptron(in_features, self.size.units, layers, out_features)

    def _state_space(self, embedding: int) -> StateSpace:
        """The state-space model, on encoded observations of this width."""
        return RSSM(self.size, self.code.features, embedding)

    def _make_heads(self) -> None:
        self.two_hot = TwoHot()
        units = self.size.units
        self.reward_head = self.two_hot.head(self.features, units, 1)
        self.continuation_head: nn.Module = Perceptron(self.features, units, 1, 1)

    def _scaled(self, vector: Tensor) -> Tensor:
        """Vectors as they are read and predicted."""
        return symlog(vector)

    @property
    def observation_keys(self) -> list[Any]:
        """Keys of the observations that it reads."""
        return [*self.vectors, *self.images]

    def targets(self, tensordict: TensorDictBase) -> list[Tensor]:
        """Observations as they are encoded and predicted: one vector, then images, ``[..., *]``."""
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
        """Encoders of the entries of :meth:`targets`."""
        return [*([self.encoder] if self.vectors else []), *self.image_encoders]

    def encode(self, targets: list[Tensor], encoders: Iterable[nn.Module] | None = None) -> Tensor:
        """Embeddings ``[..., embedding]`` of :meth:`targets`.

        Args:
            targets: observations.
            encoders: used in place of :attr:`encoders`.
        """
        parts = [encoder(one) for encoder, one in zip(encoders or self.encoders, targets)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def reconstruction_error(self, features: Tensor, targets: list[Tensor]) -> Tensor:
        """Errors of the predicted observations, summed over their entries, ``[...]``."""
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
        """Squared errors of numbers and cross entropies of choices, ``[...]``."""
        widths = [width for width, _ in self.flatten.parts]
        columns = zip(torch.split(predicted, widths, -1), torch.split(target, widths, -1))
        errors = [
            -(seen * made.log_softmax(-1)).sum(-1) if choice else (made - seen).square().sum(-1)
            for (made, seen), (_, choice) in zip(columns, self.flatten.parts)
        ]
        total: Tensor = sum(errors[1:], errors[0])
        return total

    # ------------------------------------------------------------------ heads
    def reward(self, features: Tensor) -> Tensor:
        """Expected reward that arrives with a latent, ``[...]``."""
        return self.two_hot.mean(self.reward_head(features))

    def continuation(self, features: Tensor) -> Tensor:
        """Probability of continuing times the discount, ``[...]``."""
        return self.continuation_head(features).float().squeeze(-1).sigmoid()  # type: ignore[no-any-return]

    def reward_error(self, features: Tensor, reward: Tensor) -> Tensor:
        """Cross entropy with the two-hot reward, ``[...]``."""
        return self.two_hot.loss(self.reward_head(features), reward)

    def continuation_error(self, features: Tensor, continuation: Tensor) -> Tensor:
        """Binary cross entropy with the discounted continuation, ``[...]``."""
        logits = self.continuation_head(features).squeeze(-1)
        return functional.binary_cross_entropy_with_logits(logits, continuation, reduction="none")


class LatentCritic(nn.Module):
    """A distribution of returns for each latent, as two-hot logits."""

    def __init__(self, features: int, size: Size) -> None:
        super().__init__()
        self.two_hot = TwoHot()
        self.network = self.two_hot.head(features, size.units, 3)

    def forward(self, features: Tensor) -> Tensor:
        """Logits, ``[..., bins + 1]``; the last is -inf."""
        return self.network(features)  # type: ignore[no-any-return]


def make_world_model(env: Any, size: str | Size = "tiny", latents: int | None = None) -> WorldModel:
    """Make a world model of an environment.

    Args:
        env: one that :func:`~kit.envs.make_env` made.
        size: name of :data:`~kit.modules.world.SIZES`, or widths of your own.
        latents: discrete latents; ``None``: as many as the size has.

    Raises:
        SettingError: if observations or actions are of a kind it cannot predict.
    """
    return WorldModel(env, size_of(size, latents=latents))


def make_latent_critic(world_model: WorldModel) -> LatentCritic:
    """Make a critic on the features of a world model."""
    return LatentCritic(world_model.features, world_model.size)


def _is_image(leaf: Any) -> bool:
    return len(leaf.shape) == 3 and leaf.dtype == np.uint8
