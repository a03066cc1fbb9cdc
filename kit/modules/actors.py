"""Actors and critics for any environment the kit makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict.nn import (
    CompositeDistribution,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torchrl.data import Binary, Bounded, MultiCategorical, Unbounded
from torchrl.data import Categorical as CategoricalSpec
from torchrl.modules import Actor, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator

from kit.modules.distributions import Categorical, MultiDiscrete, Normal
from kit.modules.images import Kernels, Mixed, is_image
from kit.modules.layers import NoisyLinear
from kit.modules.networks import FlattenMLP, Layers, linear
from kit.modules.recurrent import Recurrent, RecurrentKind
from kit.steps import SettingError

Continuous = Literal["normal", "tanh_normal", "deterministic"]


class _Parameters(nn.Module):
    """From the columns of a network to the parameters of one action's distribution."""

    names: tuple[str, ...] = ("logits",)
    distribution: Any = Categorical
    keywords: dict[str, Any]

    def __init__(self, columns: int, **keywords: Any) -> None:
        super().__init__()
        self.columns = columns
        self.keywords = keywords

    def _apply(self, fn: Any, recurse: bool = True) -> _Parameters:
        """Move the bounds of the distribution with the weights."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        tensors = {k: value for k, value in self.keywords.items() if isinstance(value, Tensor)}
        self.keywords.update({name: fn(value) for name, value in tensors.items()})
        return self

    def forward(self, columns: Tensor) -> tuple[Tensor, ...]:
        return (columns,)


class _Choices(_Parameters):
    """Several categorical choices side by side."""

    distribution = MultiDiscrete


class _Normal(_Parameters):
    """Means from the network; one learnt deviation for all states."""

    names = ("loc", "scale")
    distribution = Normal

    def __init__(self, shape: Sequence[int], initial_log_std: float, **keywords: Any) -> None:
        super().__init__(math.prod(shape), event_dim=len(shape), **keywords)
        self.shape = tuple(shape)
        self.log_scale = nn.Parameter(torch.full(self.shape, float(initial_log_std)))

    def forward(self, columns: Tensor) -> tuple[Tensor, ...]:
        loc = _shaped(columns, self.shape)
        return loc, self.log_scale.exp().expand_as(loc)


class _TanhNormal(_Parameters):
    """Means and deviations from the network; samples squashed to the bounds of the action.

    The logarithm of the deviation is kept in [-5, 2] by a tanh, as in the reference implementation
    of soft actor-critic (Haarnoja et al. 2018, appendix C gives the squashing).
    """

    names = ("loc", "scale")
    distribution = TanhNormal
    least, most = -5.0, 2.0

    def __init__(self, shape: Sequence[int], low: Tensor, high: Tensor) -> None:
        size = math.prod(shape)
        super().__init__(2 * size, low=low, high=high, event_dims=len(shape))
        self.shape, self.size = tuple(shape), size

    def forward(self, columns: Tensor) -> tuple[Tensor, ...]:
        loc, raw = columns.split(self.size, dim=-1)  # type: ignore[no-untyped-call]
        middle, half = (self.most + self.least) / 2, (self.most - self.least) / 2
        scale = (middle + half * raw.tanh()).exp()
        return _shaped(loc, self.shape), _shaped(scale, self.shape)


class _Scaled(_Parameters):
    """Actions of a deterministic policy: the columns of a network, scaled to the bounds by tanh."""

    names = ("action",)
    centre: Tensor
    half_range: Tensor

    def __init__(self, shape: Sequence[int], low: Tensor, high: Tensor) -> None:
        super().__init__(math.prod(shape))
        self.shape = tuple(shape)
        self.register_buffer("centre", (high + low) / 2)
        self.register_buffer("half_range", (high - low) / 2)

    def forward(self, columns: Tensor) -> tuple[Tensor, ...]:
        columns = _shaped(columns, self.shape)
        return (torch.addcmul(self.centre, columns.tanh(), self.half_range),)


def _shaped(columns: Tensor, shape: tuple[int, ...]) -> Tensor:
    return columns if len(shape) == 1 else columns.unflatten(-1, shape)  # type: ignore[no-any-return, no-untyped-call]


class Heads(nn.Module):
    """A network whose columns are split over the parameters of several actions."""

    def __init__(self, network: nn.Module, heads: Sequence[_Parameters]) -> None:
        super().__init__()
        self.network = network
        self.heads = nn.ModuleList(heads)
        self._columns = [head.columns for head in heads]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters of all heads, one after the other."""
        columns = self.network(*inputs)
        parts = columns.split(self._columns, dim=-1) if len(self.heads) > 1 else [columns]
        return tuple(p for part, head in zip(parts, self.heads) for p in head(part))


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Logits or Q-values, far below all others where a mask of any type is false."""
    # The root of the largest number, not the lowest: a loss may multiply it by its temperature, and
    # subtract one of them from another, without an infinity, which times probability 0 is NaN.
    return values.masked_fill(mask == 0, -(torch.finfo(values.dtype).max ** 0.5))


class _MaskedHeads(Heads):
    """Logits of choices; the last input is a mask."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        (logits,) = super().forward(*inputs[:-1])
        return (_masked(logits, inputs[-1]),)


def make_actor(
    env: Any,
    hidden_sizes: Sequence[int] = (64, 64),
    activation: str = "tanh",
    *,
    continuous: Continuous = "normal",
    initial_log_std: float = 0.0,
    body: TensorDictModule | Recurrent | None = None,
    orthogonal: bool = True,
    return_log_prob: bool = True,
) -> ProbabilisticActor | Actor:
    """Make a policy for the environment's observations and actions.

    Discrete actions are drawn from categorical distributions, continuous ones from normal
    distributions, entries of a ``Dict`` space independently of each other.

    Args:
        env: the environment. Where it has an observation ``action_mask`` and one discrete action,
            forbidden choices have probability 0.
        hidden_sizes: widths of the hidden layers; those of ``body`` where one is given.
        activation: name of the activation between them.
        continuous: ``normal``: unbounded, with one learned deviation for all states (actions are
            clipped); ``tanh_normal``: squashed to the bounds, deviation learned for each state;
            ``deterministic``: one action, scaled to the bounds by tanh (for TD3 and DDPG).
        initial_log_std: initial log standard deviation of ``normal``.
        body: module that writes ``features``, shared with a critic, of :func:`make_body` or any
            whose ``out_features`` is their number; ``None``: a network of its own.
        orthogonal: whether weights start orthogonal, the last layer's with gain 0.01.
        return_log_prob: whether the policy writes the log-probability of its actions.

    Raises:
        SettingError: if an action is of a kind this policy cannot choose, or cannot be masked; or
            if ``body`` writes no ``features``, or does not say how many.
    """
    if continuous == "deterministic":
        if body is not None:
            works = "leave body out: a deterministic policy has a network of its own"
            raise SettingError("body", type(body).__name__, "cannot be shared", works)
        return _deterministic(env, hidden_sizes, activation, orthogonal)
    kinds = continuous, initial_log_std
    heads = {leaf.key: _head(env, leaf, *kinds) for leaf in env.action_leaves}
    columns = sum(head.columns for head in heads.values())
    parameters = _parameter_keys(heads)
    masks = action_masks(env, columns if parameters == ["logits"] else 0)
    kind = _MaskedHeads if masks else Heads
    if body is None:
        keys, network = _network(env, columns, hidden_sizes, activation, orthogonal, 0.01, masks)
        module: TensorDictModuleBase = TensorDictModule(
            kind(network, list(heads.values())), in_keys=[*keys, *masks], out_keys=parameters
        )
    else:
        last = linear(_features_of(body), columns, 0.01 if orthogonal else None)
        head = kind(last, list(heads.values()))
        module = TensorDictSequential(
            body, TensorDictModule(head, in_keys=["features", *masks], out_keys=parameters)
        )
    one = next(iter(heads.values()))
    several = {
        "distribution_map": {key: head.distribution for key, head in heads.items()},
        "extra_kwargs": {key: head.keywords for key, head in heads.items()},
    }
    is_one = len(heads) == 1
    return ProbabilisticActor(
        module,
        in_keys=parameters if is_one else ["params"],
        out_keys=list(heads),
        distribution_class=one.distribution if is_one else CompositeDistribution,
        distribution_kwargs=one.keywords if is_one else several,
        return_log_prob=return_log_prob,
        spec=env.action_spec if is_one else None,
    )


def _deterministic(
    env: Any, hidden_sizes: Sequence[int], activation: str, orthogonal: bool
) -> Actor:
    leaf = _only_action(env, "Box", "a deterministic policy", "make_q_network")
    action_masks(env, 0)
    spec = env.full_action_spec[leaf.key]
    head = _Scaled(_numbers(tuple(spec.shape[1:])), *_bounds(leaf, spec))
    keys, network = _network(env, head.columns, hidden_sizes, activation, orthogonal, 0.01)
    return Actor(Heads(network, [head]), in_keys=keys, out_keys=[leaf.key], spec=spec[0].clone())


def _only_action(env: Any, space: str, algorithm: str, other: str) -> Any:
    """The action of an environment that has one, of the kind that an algorithm needs."""
    leaf, *more = env.action_leaves
    kinds = "f" if space == "Box" else "iu"
    if not more and leaf.dtype.kind in kinds:
        return leaf
    found = ", ".join(str(leaf.space or leaf.dtype) for leaf in env.action_leaves)
    why = f"does not suit {algorithm}, which needs one {space} action"
    works = f"use {other}, or an environment with a {space} action space"
    raise SettingError("action_space", found, why, works)


def _parameter_keys(heads: dict[Any, _Parameters]) -> list[Any]:
    if len(heads) == 1:
        return list(next(iter(heads.values())).names)
    keys: list[Any] = []
    for key, head in heads.items():
        path = key if isinstance(key, tuple) else (key,)
        keys += [("params", *path, name) for name in head.names]
    return keys


def _head(env: Any, leaf: Any, continuous: Continuous, initial_log_std: float) -> _Parameters:
    spec = env.full_action_spec[leaf.key]
    shape = tuple(spec.shape[1:])
    # TorchRL derives the first two from Categorical.
    if isinstance(spec, Binary):
        if len(shape) > 1:
            why = f"has {len(shape)} dimensions, and this policy chooses along one"
            works = f"reshape it in a wrapper: MultiBinary({math.prod(shape)})"
            raise SettingError("action_space.n", list(shape), why, works)
        return _Choices(2 * shape[-1], choices=[2] * shape[-1])
    if isinstance(spec, MultiCategorical):
        if len(shape) > 1:
            nvec, size = spec.nvec[0], math.prod(shape)
            why = f"has {len(shape)} dimensions, and this policy chooses along one"
            works = f"reshape it in a wrapper: MultiDiscrete({nvec.reshape(size).tolist()})"
            raise SettingError("action_space.nvec", nvec.tolist(), why, works)
        choices = [int(count) for count in spec.nvec.reshape(-1, spec.shape[-1])[0]]
        return _Choices(sum(choices), choices=choices)
    if isinstance(spec, CategoricalSpec):
        return _Parameters(int(spec.n))
    if isinstance(spec, (Bounded, Unbounded)) and spec.dtype.is_floating_point:
        shape = _numbers(shape)
        if continuous == "normal":
            return _Normal(shape, initial_log_std)
        low, high = _bounds(leaf, spec)
        if not (low < high).all():
            why = "has equal bounds, between which no action can be drawn"
            raise SettingError(
                "action_space", leaf.space, why, "leave that number out in a wrapper"
            )
        return _TanhNormal(shape, low, high)
    why = f"({leaf.key}) is not a kind of action that this policy can choose"
    kinds = ["Discrete", "MultiDiscrete", "MultiBinary", "Box of real numbers"]
    raise SettingError("action_space", leaf.space or type(spec).__name__, why, kinds)


def _bounds(leaf: Any, spec: Any) -> tuple[Tensor, Tensor]:
    """The least and the greatest action of a policy that squashes its actions."""
    if isinstance(spec, Bounded):
        low, high = spec.space.low[0].clone(), spec.space.high[0].clone()
        if (high - low).isfinite().all():
            return low, high
    why = "has no bounds to which actions could be squashed"
    works = "give it bounds in a wrapper, or use a normal distribution, as recipes.ppo does"
    raise SettingError("action_space", leaf.space or type(spec).__name__, why, works)


def _numbers(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a continuous action, which has a dimension."""
    if shape:
        return shape
    why = "has no dimension, and policies here choose arrays of numbers"
    raise SettingError("action_space.shape", shape, why, [(1,)], "reshape actions in a wrapper")


def _network(
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


def _features_of(body: Any) -> int:
    """Number of the features that a body writes."""
    name, number = type(body).__name__, getattr(body, "out_features", None)
    if "features" not in getattr(body, "out_keys", ()):
        works = 'TensorDictModule(network, in_keys=[...], out_keys=["features"])'
        raise SettingError("body", name, "does not write 'features'", works)
    if not isinstance(number, int):
        why = "does not say how many features it writes"
        raise SettingError("body", name, why, "set out_features, of it or of its network")
    return number


def make_body(
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
    keys, network = _network(env, None, *sizes, convolutions=convolutions)
    if recurrent is None:
        return TensorDictModule(network, in_keys=keys, out_keys=["features"])
    return Recurrent(keys, network, recurrent, recurrent_size, burn_in)


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
        body: module that writes ``features``, shared with an actor, of :func:`make_body` or any
            whose ``out_features`` is their number; ``None``: a network of its own.
        orthogonal: whether weights start orthogonal.
    """
    if body is None:
        keys, network = _network(env, 1, hidden_sizes, activation, orthogonal, 1.0)
        return ValueOperator(network, in_keys=keys)
    last = linear(_features_of(body), 1, 1.0 if orthogonal else None)
    return TensorDictSequential(body, ValueOperator(last, in_keys=["features"]))


def make_actor_critic(
    env: Any,
    hidden_sizes: Sequence[int] = (64, 64),
    activation: str = "tanh",
    *,
    shared_body: bool = False,
    initial_log_std: float = 0.0,
    device: torch.device | str = "cpu",
    **body: Any,
) -> tuple[ProbabilisticActor, TensorDictModuleBase]:
    """Make a policy, as :func:`make_actor` does, and its state-value function.

    Args:
        env: the environment.
        hidden_sizes: widths of the hidden layers of each.
        activation: name of the activation between them.
        shared_body: whether they share their hidden layers.
        initial_log_std: initial log standard deviation of continuous actions.
        device: where they are.
        **body: further arguments of :func:`make_body`: convolutions, a recurrent layer.

    Raises:
        SettingError: if a recurrent body is not shared: collectors keep the policy's hidden state
            alone.
    """
    shape: dict[str, Any] = {"hidden_sizes": hidden_sizes, "activation": activation}
    if body.get("recurrent") and not shared_body:
        why = "leaves the critic without the hidden state, which collectors keep for the policy"
        raise SettingError("shared_body", False, why, [True])
    own = shared_body or body
    first = make_body(env, **shape, **body) if own else None
    second = make_body(env, **shape, **body) if body and not shared_body else first
    actor = make_actor(env, **shape, body=first, initial_log_std=initial_log_std).to(device)
    critic = make_value(env, **shape, body=second).to(device)
    return actor, critic


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
    leaf = _only_action(env, "Discrete", "a Q-network", "make_actor(continuous='deterministic')")
    spec = env.full_action_spec[leaf.key]
    if isinstance(spec, (Binary, MultiCategorical)) or not isinstance(spec, CategoricalSpec):
        kind = type(spec).__name__
        raise SettingError("action_space", kind, "is not one choice", ["Discrete"])
    choices = int(spec.n)
    masks = action_masks(env, choices)
    module: nn.Module
    columns, layer = (choices + dueling) * atoms, NoisyLinear if noisy else None
    shape: Any = (hidden_sizes, activation, False, 1.0, masks, convolutions)
    keys, network = _network(env, columns, *shape, layer=layer)
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
        return _masked(self.network(*inputs[:-1]), inputs[-1])


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
            values = _masked(values, inputs[-1])
        return values, atoms


def action_masks(env: Any, choices: int) -> list[Any]:
    """The key of the environment's mask ``[num_envs, choices]``, alone in a list; else none.

    Args:
        env: the environment.
        choices: of the action; 0: it is none that can be masked.

    Raises:
        SettingError: if there is a mask that does not fit the action.
    """
    for leaf in env.observation_leaves:
        if "action_mask" not in (leaf.key, leaf.key[-1]):
            continue
        if leaf.shape == (choices,):
            return [leaf.key]
        why = f"has shape {list(leaf.shape)} and masks none of {choices} choices"
        works = "use Discrete or MultiDiscrete actions alone, or another name for the observation"
        raise SettingError("action_mask", str(leaf.key), why, works)
    return []
