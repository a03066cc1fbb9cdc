"""Networks that read observations."""

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
    """The hyperbolic tangent computed by the sigmoid: ``tanh(x) = 2 sigmoid(2 x) - 1``.

    Equal up to rounding (absolute error below 3e-7 in float32). PyTorch's kernels for CPUs need a
    third of the time of its ``tanh``, which pays where thousands of rows pass at once.
    """

    def forward(self, value: Tensor) -> Tensor:
        """Return the hyperbolic tangent of each entry."""
        return (value + value).sigmoid().mul(2).sub(1)


Layers = Callable[[int], Sequence[nn.Module]]
"""Makes layers for a given width, such as dropout and normalisation."""

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "sigmoid_tanh": SigmoidTanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


class Flatten(nn.Module):
    """Joins observations (and actions) into one vector: numbers as they are, choices one-hot.

    Args:
        specs: spec of each input, in the order in which they are passed; each with the
            environment's batch dimension in front.

    Attributes:
        out_features: width of the vector.
        choices: of each input, how many choices each of its numbers has; ``None``: it has none.
        parts: widths of what is joined, and whether it is one choice.
        is_vector: whether there is one input, and it is the vector, of floating-point numbers.

    Raises:
        SettingError: if a spec is of a kind that has no place in a vector.
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
        """Return ``[..., out_features]``."""
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
    """One-hot numbers ``[..., classes]`` of integers ``[...]``; PyTorch's read them on the host."""
    places = torch.arange(classes, device=choice.device)
    return (choice.unsqueeze(-1) == places).float()


def _choices(spec: Any) -> list[int] | None:
    """Numbers of choices of an integer input; ``None`` for numbers."""
    # TorchRL derives Binary and MultiCategorical from Categorical.
    if isinstance(spec, (Bounded, Unbounded, Binary)):
        return None
    if isinstance(spec, MultiCategorical):
        return [int(count) for count in spec.nvec.reshape(-1, spec.shape[-1])[0]]
    if isinstance(spec, Categorical):
        return [int(spec.n)]
    raise SettingError("observation", type(spec).__name__, "is a spec that no network here reads")


class FlattenMLP(nn.Module):
    """A multilayer perceptron over inputs joined by :class:`Flatten`.

    Args:
        specs: specs of the inputs, joined by :class:`Flatten`; or the module that joins them.
        out_features: width of the output; ``None`` ends with the last hidden layer's activation.
        hidden_sizes: widths of the hidden layers.
        activation: name of ``ACTIVATIONS``.
        orthogonal: whether weights start orthogonal, with gain sqrt(2) and ``out_gain`` at the end,
            and biases at zero (Andrychowicz et al. 2021, section 3.2). Otherwise they start as
            PyTorch's do.
        out_gain: gain of the output layer, where weights start orthogonal.
        before: layers between each hidden linear layer and its activation.
        after: layers after the joined inputs and after each activation.
        layer: makes a linear layer of given widths; ``None``: PyTorch's.

    Attributes:
        out_features: width of the output.

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
        """Return ``[..., out_features]``."""
        return self.layers(self.flatten(*inputs))  # type: ignore[no-any-return]

    def body_parameters(self) -> list[nn.Parameter]:
        """Parameters of all layers but the output layer."""
        head = list(self.layers[-1].parameters()) if self.has_output else []
        return [p for p in self.parameters() if all(p is not other for other in head)]


def linear(in_features: int, out_features: int, gain: float | None = None) -> nn.Linear:
    """Return a linear layer, orthogonal with ``gain`` and without bias at first if one is given."""
    layer = nn.Linear(in_features, out_features)
    if gain is not None:
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return layer


def parameter_groups(
    loss: nn.Module, networks: Sequence[nn.Module], learning_rate: float, body_factor: float = 1.0
) -> list[dict[str, Any]]:
    """Parameters of a loss for an optimiser, with another learning rate for hidden layers.

    Args:
        loss: whose parameters are trained.
        networks: of :func:`~kit.modules.make_actor` and its like, which know their hidden layers.
        learning_rate: of output layers and of everything else.
        body_factor: factor of the learning rate of hidden layers; 1: there is one group.

    Raises:
        SettingError: if there is a factor, and no hidden layer.
    """
    parameters = list(loss.parameters())
    modules: list[Any] = [module for network in networks for module in network.modules()]
    found = [m.body_parameters() for m in modules if hasattr(m, "body_parameters")]
    body = {id(p) for own in found for p in own} if body_factor != 1.0 else set()
    groups = [
        {"params": [p for p in parameters if id(p) not in body], "lr": learning_rate},
        {"params": [p for p in parameters if id(p) in body], "lr": learning_rate * body_factor},
    ]
    if body_factor != 1.0 and not groups[1]["params"]:
        why = "has no effect: there are no hidden layers"
        raise SettingError("backbone_lr_scale", body_factor, why, [1.0])
    return [group for group in groups if group["params"]]


def drop_log_prob(actor: Any, loss: nn.Module) -> Any:
    """The policy that acts, without outputs that the loss computes by itself.

    They are log-probabilities and parameters of distributions, a tenth of the time of a run whose
    batches are short. ``A2CLoss`` does not read them; any other loss may, and its policy is the
    actor as it is.

    Args:
        actor: of :func:`~kit.modules.make_actor`; its outputs change in place.
        loss: that is minimised.
    """
    return actor.select_out_keys(*actor.dist_sample_keys) if type(loss) is A2CLoss else actor
