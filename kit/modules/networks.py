"""Multilayer perceptrons for observations from any supported space."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, Unbounded
from torchrl.objectives import A2CLoss

from kit.steps import SettingError
from kit.steps.errors import one_of, whole_number


class SigmoidTanh(nn.Module):
    """The hyperbolic tangent, computed as ``tanh(x) = 2 sigmoid(2 x) - 1``.

    Equal to tanh up to rounding (absolute error below 3e-7 in float32). On CPUs, PyTorch's sigmoid
    is three times faster than its ``tanh``, which matters for batches of thousands of rows.
    """

    def forward(self, value: Tensor) -> Tensor:
        """Return the hyperbolic tangent of each entry."""
        return (value + value).sigmoid().mul(2).sub(1)


Layers = Callable[[int], Sequence[nn.Module]]
"""Function that maps a layer size to extra layers, such as dropout or normalisation."""

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "sigmoid_tanh": SigmoidTanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


class Flatten(nn.Module):
    """Concatenates observations (and actions) into one vector and one-hot encodes discrete values.

    Args:
        specs: spec of each input of ``forward``, with a leading dimension ``num_envs``.

    Attributes:
        out_features: size of the vector.
        choices: for each input, the number of categories of each entry, or ``None`` if numeric.
        parts: for each concatenated part, its size and whether it is a one-hot vector.
        is_vector: whether the only input is already a floating-point vector.

    Raises:
        SettingError: if a spec is not supported.
    """

    def __init__(self, specs: Sequence[Any]) -> None:
        super().__init__()
        self.choices = [_choices(spec) for spec in specs]
        self._shapes = [tuple(spec.shape[1:]) for spec in specs]
        self.parts = [
            (width, choices is not None)
            for choices, shape in zip(self.choices, self._shapes)
            for width in choices or [math.prod(shape)]
        ]
        self.out_features = sum(width for width, _ in self.parts)
        self.is_vector = (
            self.choices == [None]
            and len(self._shapes[0]) == 1
            and specs[0].dtype.is_floating_point
        )

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the concatenated vector, ``[..., out_features]``."""
        parts: list[Tensor] = []
        for value, choices, shape in zip(inputs, self.choices, self._shapes):
            leading = value.shape[: value.ndim - len(shape)]
            if choices is None:
                flat = value if len(shape) == 1 else value.reshape(*leading, -1)
                parts.append(flat if flat.is_floating_point() else flat.float())
                continue
            chosen = value.reshape(*leading, len(choices)).long().unbind(dim=-1)
            parts += [one_hot(choice, count) for choice, count in zip(chosen, choices)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def one_hot(choice: Tensor, classes: int) -> Tensor:
    """Return one-hot vectors, ``[..., classes]``.

    Unlike PyTorch's ``one_hot``, this function does not read the indices on the host.
    """
    indices = torch.arange(classes, device=choice.device)
    return (choice.unsqueeze(-1) == indices).float()


def _choices(spec: Any) -> list[int] | None:
    """Return the number of categories of each entry, or ``None`` for a numeric input."""
    # Binary and MultiCategorical are checked first because they are subclasses of Categorical.
    if isinstance(spec, (Bounded, Unbounded, Binary)):
        return None
    if isinstance(spec, MultiCategorical):
        return [int(count) for count in spec.nvec.reshape(-1, spec.shape[-1])[0]]
    if isinstance(spec, Categorical):
        return [int(spec.n)]
    reason = "Networks do not support this type of spec"
    raise SettingError("observation", type(spec).__name__, reason)


class FlattenMLP(nn.Module):
    """A multilayer perceptron on inputs that are concatenated by :class:`Flatten`.

    Args:
        specs: specs of the inputs for :class:`Flatten`, or a module that joins the inputs.
        out_features: size of the output layer; ``None``: no output layer.
        hidden_sizes: hidden layer sizes.
        activation: a key of ``ACTIVATIONS``.
        orthogonal: whether to initialise weights orthogonally, with gain sqrt(2) in hidden layers,
            and biases to zero (Andrychowicz et al. 2021, section 3.2). ``False``: PyTorch's
            initialisation.
        out_gain: gain of the output layer's orthogonal weights.
        before: factory of extra layers between each hidden linear layer and its activation.
        after: factory of extra layers after the joined inputs and after each activation.
        layer: function that maps input and output sizes to a linear layer; default: ``nn.Linear``.

    Attributes:
        out_features: size of the output.

    Raises:
        SettingError: if the activation is unknown or a size is not positive.
    """

    def __init__(
        self,
        specs: Sequence[Any] | nn.Module,
        out_features: int | None,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        *,
        orthogonal: bool = False,
        out_gain: float = 1.0,
        before: Layers | None = None,
        after: Layers | None = None,
        layer: Callable[[int, int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        one_of("activation", activation, [*ACTIVATIONS])
        join: Any = specs if isinstance(specs, nn.Module) else Flatten(specs)
        self.flatten = join
        self.has_output = out_features is not None
        width: int = join.out_features
        layers: list[nn.Module] = [*after(width)] if after else []
        gain = 2**0.5 if orthogonal else None
        for one in hidden_sizes:
            size = whole_number("hidden_sizes", one, at_least=1)
            layers.append(layer(width, size) if layer else linear(width, size, gain))
            layers += [*(before(size) if before else ()), ACTIVATIONS[activation]()]
            layers += after(size) if after else ()
            width = size
        if out_features is not None:
            gain = out_gain if orthogonal else None
            layers.append(
                layer(width, out_features) if layer else linear(width, out_features, gain)
            )
            width = out_features
        self.layers = nn.Sequential(*layers)
        self.out_features = width

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the network's output, ``[..., out_features]``."""
        return self.layers(self.flatten(*inputs))  # type: ignore[no-any-return]

    def body_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all layers except the output layer."""
        head = list(self.layers[-1].parameters()) if self.has_output else []
        return [p for p in self.parameters() if all(p is not other for other in head)]


def linear(in_features: int, out_features: int, gain: float | None = None) -> nn.Linear:
    """Create a linear layer. With ``gain``, weights are initially orthogonal and biases zero."""
    layer = nn.Linear(in_features, out_features)
    if gain is not None:
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return layer


def parameter_groups(
    loss: nn.Module,
    networks: Sequence[nn.Module],
    learning_rate: float,
    body_factor: float = 1.0,
    critic_body_factor: float | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimiser, with separate learning rates for hidden layers.

    Args:
        loss: loss module whose parameters are trained.
        networks: actor and critic, created by :func:`~kit.modules.make_actor_critic` or similar
            functions.
        learning_rate: learning rate of output layers and all other parameters.
        body_factor: learning-rate multiplier for hidden layers.
        critic_body_factor: learning-rate multiplier for the critic's hidden layers; ``None``: same
            as ``body_factor``.

    Raises:
        SettingError: if a multiplier is not 1 and there are no such hidden layers, or if both
            networks share hidden layers and their multipliers differ.
    """
    critic_factor = body_factor if critic_body_factor is None else critic_body_factor
    factors: dict[int, float] = {}
    for network, factor in zip(networks, (body_factor, critic_factor)):
        modules: list[Any] = [m for m in network.modules() if hasattr(m, "body_parameters")]
        for parameter in (p for module in modules for p in module.body_parameters()):
            if factors.setdefault(id(parameter), factor) != factor:
                reason = f"Shared hidden layers have only one backbone_lr_scale={body_factor}"
                raise SettingError("critic_backbone_lr_scale", factor, reason, [None, body_factor])
    groups: dict[float, list[nn.Parameter]] = {1.0: [], body_factor: [], critic_factor: []}
    for parameter in loss.parameters():
        groups[factors.get(id(parameter), 1.0)].append(parameter)
    names = {critic_factor: "critic_backbone_lr_scale", body_factor: "backbone_lr_scale"}
    for factor, name in names.items():
        if factor != 1.0 and not groups[factor]:
            raise SettingError(name, factor, "The networks have no such hidden layers", [1.0])
    return [
        {"params": parameters, "lr": learning_rate * factor}
        for factor, parameters in groups.items()
        if parameters
    ]


def drop_log_prob(actor: Any, loss: nn.Module) -> Any:
    """Restrict the policy's outputs to its actions if the loss reads no other outputs.

    Computing log-probabilities and distribution parameters takes a tenth of the run time if batches
    are short. Only ``A2CLoss`` never reads them. For other losses, the actor is returned unchanged.

    Args:
        actor: policy from :func:`~kit.modules.make_actor`; its outputs are changed in place.
        loss: loss module that trains the policy.
    """
    return actor.select_out_keys(*actor.dist_sample_keys) if type(loss) is A2CLoss else actor
