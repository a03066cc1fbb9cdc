"""Networks from an environment's observations, and the body that actor and critic share."""

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
    """Return a network from all observations to ``features``, for an actor and a critic to share.

    Args:
        env: the environment.
        hidden_sizes: widths of the hidden layers.
        activation: name of the activation after each.
        orthogonal: whether weights start orthogonal.
        convolutions: channels, kernel size and stride of each convolution, which images (bytes)
            pass before they are joined with other observations; none: images are flattened.
        recurrent: ``lstm`` or ``gru``: a recurrent layer after the hidden ones; ``None``: none.
        recurrent_size: its width.
        burn_in: steps at the beginning of each sequence that only prepare its hidden state.

    Raises:
        SettingError: if there are convolutions and no image that they fit.
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
    """Make a network whose inputs are all observations; return their keys and it.

    Args:
        env: the environment.
        out_features: columns of the last layer; ``None``: the last hidden layer is the last.
        hidden_sizes: see :func:`make_backbone`.
        activation: see :func:`make_backbone`.
        orthogonal: see :func:`make_backbone`.
        out_gain: that of the last layer's weights.
        without: keys of observations that are left out.
        convolutions: see :func:`make_backbone`.
        **layers: further arguments of :class:`~kit.modules.FlattenMLP`.

    Raises:
        SettingError: if there are convolutions and no image.
    """
    keys = [leaf.key for leaf in env.observation_leaves if leaf.key not in without]
    specs: Any = [env.full_observation_spec[key] for key in keys]
    if convolutions:
        if not any(map(is_image, specs)):
            works = "use convolutions=[], or an environment with images of bytes (uint8)"
            shapes = ", ".join(str(list(spec.shape[1:])) for spec in specs)
            why = f"has no image for the convolutions: its observations have shape {shapes}"
            raise SettingError("env.id", env.name, why, works)
        specs = Mixed(specs, convolutions, orthogonal=orthogonal)
    layers |= {"orthogonal": orthogonal, "out_gain": out_gain}
    return keys, FlattenMLP(specs, out_features, hidden_sizes, activation, **layers)
