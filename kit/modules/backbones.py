"""Networks that read all observations of an environment, and backbones for actor and critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict.nn import TensorDictModule

from kit.modules.images import Kernels, Mixed, is_image
from kit.modules.networks import FlattenMLP
from kit.modules.recurrent import Recurrent, RecurrentKind
from kit.steps import SettingError


def make_backbone(
    env: Any,
    hidden_sizes: Sequence[int] = (64, 64),
    activation: str = "tanh",
    *,
    orthogonal: bool = True,
    convolutions: Kernels = (),
    recurrent: RecurrentKind | None = None,
    recurrent_size: int = 64,
    burn_in: int = 0,
) -> TensorDictModule | Recurrent:
    """Create a backbone for actor and critic that maps all observations to ``features``.

    Args:
        env: the environment.
        hidden_sizes: hidden layer sizes.
        activation: name of the activation function after each hidden layer.
        orthogonal: whether to initialise weights orthogonally.
        convolutions: channels, kernel size and stride of each convolution. Convolutions are applied
            to images (uint8) before these are joined with other observations. Empty: images are
            flattened.
        recurrent: type of a recurrent layer after the hidden layers, ``lstm`` or ``gru``; ``None``:
            no recurrent layer.
        recurrent_size: hidden size of the recurrent layer.
        burn_in: number of initial steps in each sequence that only warm up the hidden state.

    Raises:
        SettingError: if convolutions are given but there is no image, or an image is too small.
    """
    sizes = (hidden_sizes, activation, orthogonal, 1.0)
    keys, network = observation_network(env, None, *sizes, convolutions=convolutions)
    if recurrent is None:
        return TensorDictModule(network, in_keys=keys, out_keys=["features"])
    return Recurrent(keys, network, recurrent, recurrent_size, burn_in)


def observation_network(
    env: Any,
    out_features: int | None,
    hidden_sizes: Sequence[int],
    activation: str,
    orthogonal: bool,
    out_gain: float,
    without: Sequence[Any] = (),
    convolutions: Kernels = (),
    **layers: Any,
) -> tuple[list[Any], FlattenMLP]:
    """Create a network that reads all observations; return its input keys and the network.

    Args:
        env: the environment.
        out_features: size of the output layer; ``None``: no output layer.
        hidden_sizes: see :func:`make_backbone`.
        activation: see :func:`make_backbone`.
        orthogonal: see :func:`make_backbone`.
        out_gain: gain of the output layer's orthogonal weights.
        without: keys of observations to omit.
        convolutions: see :func:`make_backbone`.
        **layers: further arguments for :class:`~kit.modules.FlattenMLP`.

    Raises:
        SettingError: if convolutions are given but there is no image, or an image is too small.
    """
    keys = [leaf.key for leaf in env.observation_leaves if leaf.key not in without]
    specs: Any = [env.full_observation_spec[key] for key in keys]
    if convolutions:
        if not any(map(is_image, specs)):
            hint = "Use convolutions=[], or an environment with image observations (uint8)"
            shapes = ", ".join(str(list(spec.shape[1:])) for spec in specs)
            reason = f"Convolutions need an image, but the observations have shape {shapes}"
            raise SettingError("env.id", env.name, reason, hint)
        specs = Mixed(specs, convolutions, orthogonal=orthogonal)
    layers |= {"orthogonal": orthogonal, "out_gain": out_gain}
    return keys, FlattenMLP(specs, out_features, hidden_sizes, activation, **layers)
