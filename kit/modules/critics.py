"""Critics: state values, action values, and Q-networks."""

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
    """Return a state-value function, which writes ``state_value``.

    Args:
        env: the environment.
        hidden_sizes: widths of the hidden layers; those of ``body`` where one is given.
        activation: name of the activation between them.
        body: module that writes ``features``, shared with an actor, of :func:`make_backbone` or any
            whose ``out_features`` is their number; ``None``: a network of its own.
        orthogonal: whether weights start orthogonal.
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
    """Return an action-value function, which writes ``state_action_value``, ``[..., outputs]``.

    Args:
        env: the environment.
        hidden_sizes: widths of the hidden layers.
        activation: name of the activation between them.
        outputs: 1, or the number of quantiles of the return.
        before: layers between each hidden linear layer and its activation.
        after: layers after the joined inputs and after each activation.
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
    """Make a Q-network for one discrete action: a greedy policy, trained by TorchRL's DQNLoss.

    It writes ``action_value``, one Q-value for each choice, ``action``, the greedy one, and
    ``chosen_action_value``.

    Args:
        env: the environment. Where it has an observation ``action_mask``, the greedy action is
            among those allowed.
        hidden_sizes: widths of the hidden layers.
        activation: name of the activation between them.
        dueling: whether Q-values are the sum of a state value and advantages of mean 0 (Wang et
            al. 2016, eq. 9).
        noisy: whether layers are :class:`~kit.modules.NoisyLinear`.
        atoms: above 1, the network also writes ``return_distribution``, ``[..., choices, atoms]``,
            of which Q-values are the means.
        support: smallest and largest return, between which the atoms stand for returns at equal
            distances and are logits of their probabilities; ``None``: the atoms are quantiles.
        convolutions: channels, kernel size and stride of each convolution, which images (bytes)
            pass through first.

    Raises:
        SettingError: if the action is not one choice of a ``Discrete`` space, the support is no
            range, or there are convolutions and no image that they fit.
    """
    leaf = only_action(env, "Discrete", "a Q-network", "make_actor(continuous='deterministic')")
    spec = env.full_action_spec[leaf.key]
    if type(spec) is not Categorical:
        kind = type(spec).__name__
        raise SettingError("action_space", kind, "is not one choice", ["Discrete"])
    choices = int(spec.n)
    masks = action_masks(env, choices)
    module: nn.Module
    columns, layer = (choices + dueling) * atoms, NoisyLinear if noisy else None
    shape: Any = (hidden_sizes, activation, False, 1.0, masks, convolutions)
    keys, network = observation_network(env, columns, *shape, layer=layer)
    of_action: dict[str, Any] = {"spec": spec[0].clone(), "action_key": leaf.key}
    if atoms > 1:
        module = _Distributions(network, atoms, support, dueling=dueling, masked=bool(masks))
        written = ["action_value", "return_distribution"]
        values = TensorDictModule(module, in_keys=[*keys, *masks], out_keys=written)
        return QValueActor(values, **of_action)
    module = _DuelingValues(network) if dueling else network
    module = _MaskedValues(module) if masks else module
    return QValueActor(module, in_keys=[*keys, *masks], **of_action)


class _MaskedValues(nn.Module):
    """Q-values; the last input is a mask."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        return masked(self.network(*inputs[:-1]), inputs[-1])


def _dueling(columns: Tensor) -> Tensor:
    """Q-values from one state value, in the first column, and advantages."""
    advantage = columns[..., 1:]
    return columns[..., :1] + advantage - advantage.mean(-1, keepdim=True)


class _DuelingValues(nn.Sequential):
    """A network of any number of inputs, whose columns become Q-values."""

    def forward(self, *inputs: Tensor) -> Tensor:
        (network,) = self
        return _dueling(network(*inputs))


class _Distributions(nn.Module):
    """Q-values, and the distributions of which they are the means."""

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
            works = "give the smallest and the largest return: [-10, 10]"
            raise SettingError("support", list(support), "is not a range of returns", works)
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
