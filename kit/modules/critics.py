"""Critics: state-value functions, action-value functions and Q-networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.data import Categorical
from torchrl.modules import QValueActor, ValueOperator

from kit.modules.backbones import observation_network
from kit.modules.heads import action_masks, masked, only_action
from kit.modules.images import Kernels
from kit.modules.layers import NoisyLinear
from kit.modules.networks import FlattenMLP, Layers, linear
from kit.modules.recurrent import Recurrent
from kit.steps import SettingError


def make_value(
    env: Any,
    hidden_sizes: Sequence[int] = (64, 64),
    activation: str = "tanh",
    *,
    body: TensorDictModule | Recurrent | None = None,
    orthogonal: bool = True,
) -> TensorDictModuleBase:
    """Create a state-value function that writes ``state_value``.

    Args:
        env: the environment.
        hidden_sizes: hidden layer sizes; ignored if ``body`` is given.
        activation: name of the activation function.
        body: backbone to share with an actor, such as one from :func:`make_backbone`. It must write
            ``features`` and have an attribute ``out_features``. ``None``: create hidden layers.
        orthogonal: whether to initialise weights orthogonally.
    """
    if body is None:
        keys, network = observation_network(env, 1, hidden_sizes, activation, orthogonal, 1.0)
        return ValueOperator(network, in_keys=keys)
    last = linear(body.out_features, 1, 1.0 if orthogonal else None)
    return TensorDictSequential(body, ValueOperator(last, in_keys=["features"]))


def make_action_value(
    env: Any,
    hidden_sizes: Sequence[int] = (256, 256),
    activation: str = "relu",
    *,
    outputs: int = 1,
    before: Layers | None = None,
    after: Layers | None = None,
) -> ValueOperator:
    """Create an action-value function that writes ``state_action_value``, ``[..., outputs]``.

    Args:
        env: the environment.
        hidden_sizes: hidden layer sizes.
        activation: name of the activation function.
        outputs: number of outputs: 1, or the number of return quantiles.
        before: factory of extra layers between each hidden linear layer and its activation.
        after: factory of extra layers after the joined inputs and after each activation.
    """
    keys = [leaf.key for leaf in (*env.observation_leaves, *env.action_leaves)]
    specs = [env.full_observation_spec[leaf.key] for leaf in env.observation_leaves]
    specs += [env.full_action_spec[leaf.key] for leaf in env.action_leaves]
    network = FlattenMLP(specs, outputs, hidden_sizes, activation, before=before, after=after)
    return ValueOperator(network, in_keys=keys)


def make_q_network(
    env: Any,
    hidden_sizes: Sequence[int] = (64, 64),
    activation: str = "relu",
    *,
    dueling: bool = False,
    noisy: bool = False,
    atoms: int = 1,
    support: Sequence[float] | None = None,
    convolutions: Kernels = (),
) -> QValueActor:
    """Create a Q-network for a single discrete action, as a greedy policy for ``DQNLoss``.

    The network writes ``action_value`` (a Q-value per action), ``action`` (the greedy action) and
    ``chosen_action_value``.

    Args:
        env: the environment. If it has an observation ``action_mask``, the greedy action is chosen
            among the allowed actions.
        hidden_sizes: hidden layer sizes.
        activation: name of the activation function.
        dueling: whether to compute Q-values as the sum of a state value and zero-mean advantages
            (Wang et al. 2016, eq. 9).
        noisy: whether to use :class:`~kit.modules.NoisyLinear` layers.
        atoms: number of atoms per action. If above 1, the network also writes
            ``return_distribution``, ``[..., choices, atoms]``, whose means are the Q-values.
        support: smallest and largest return of equally spaced atoms. The network then predicts
            logits of their probabilities (C51). ``None``: the network predicts quantiles.
        convolutions: channels, kernel size and stride of each convolution, applied to images
            (uint8).

    Raises:
        SettingError: if the action space is not ``Discrete``, ``support`` is not an increasing
            pair, or convolutions are given but there is no image, or an image is too small.
    """
    leaf = only_action(env, "Discrete", "a Q-network", "make_actor(continuous='deterministic')")
    spec = env.full_action_spec[leaf.key]
    if type(spec) is not Categorical:
        reason = "A Q-network needs a single integer action"
        raise SettingError("action_space", type(spec).__name__, reason, ["Discrete"])
    choices = int(spec.n)
    masks = action_masks(env, choices)
    module: nn.Module
    columns, layer = (choices + dueling) * atoms, NoisyLinear if noisy else None
    shape: Any = (hidden_sizes, activation, False, 1.0, masks, convolutions)
    keys, network = observation_network(env, columns, *shape, layer=layer)
    options: dict[str, Any] = {"spec": spec[0].clone(), "action_key": leaf.key}
    if atoms > 1:
        module = _Distributions(network, atoms, support, dueling=dueling, masked=bool(masks))
        out_keys = ["action_value", "return_distribution"]
        values = TensorDictModule(module, in_keys=[*keys, *masks], out_keys=out_keys)
        return QValueActor(values, **options)
    module = _DuelingValues(network) if dueling else network
    module = _MaskedValues(module) if masks else module
    return QValueActor(module, in_keys=[*keys, *masks], **options)


class _MaskedValues(nn.Module):
    """Sets the Q-values of forbidden actions far below all others. The last input is the mask."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        return masked(self.network(*inputs[:-1]), inputs[-1])


def _dueling(columns: Tensor) -> Tensor:
    """Return Q-values computed from a state value (first column) and advantages."""
    advantage = columns[..., 1:]
    return columns[..., :1] + advantage - advantage.mean(-1, keepdim=True)


class _DuelingValues(nn.Sequential):
    """Runs a network with one or more inputs and converts its outputs to dueling Q-values."""

    def forward(self, *inputs: Tensor) -> Tensor:
        (network,) = self
        return _dueling(network(*inputs))


class _Distributions(nn.Module):
    """Computes each action's return-distribution atoms, and their mean as the Q-value."""

    support: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        atoms: int,
        support: Sequence[float] | None,
        *,
        dueling: bool,
        masked: bool,
    ) -> None:
        super().__init__()
        self.network, self.atoms, self.masked, self.dueling = network, atoms, masked, dueling
        if support is not None and not (len(support) == 2 and support[0] < support[1]):
            reason = "The support must be an increasing pair of returns"
            raise SettingError("support", list(support), reason, "For example, use [-10, 10]")
        points = None if support is None else torch.linspace(support[0], support[1], atoms)
        self.register_buffer("support", points)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        columns = self.network(*(inputs[:-1] if self.masked else inputs))
        atoms = columns.unflatten(-1, (-1, self.atoms))
        if self.dueling:
            atoms = _dueling(atoms.movedim(-1, -2)).movedim(-1, -2)
        values = atoms.mean(-1) if self.support is None else atoms.softmax(-1) @ self.support
        if self.masked:
            values = masked(values, inputs[-1])
        return values, atoms
