"""Heads that convert network outputs to distribution parameters and apply action masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrl.data import Binary, Bounded, MultiCategorical, Unbounded
from torchrl.data import Categorical as CategoricalSpec

from kit.envs.spaces import path_of
from kit.modules.distributions import Categorical, MultiDiscrete, Normal, TanhNormal
from kit.steps import SettingError

Continuous = Literal[
    "normal", "tanh_normal", "clipped_tanh_normal", "gsde", "tanh_gsde", "tanh_gsde_expln",
    "deterministic",
]  # fmt: skip


class Parameters(nn.Module):
    """Converts network outputs to the parameters of one action's distribution."""

    names: tuple[str, ...] = ("logits",)
    distribution: Any = Categorical
    keywords: dict[str, Any]

    def __init__(self, columns: int, **keywords: Any) -> None:
        super().__init__()
        self.columns = columns
        self.keywords = keywords

    def _apply(self, fn: Any, recurse: bool = True) -> Parameters:
        """Move the distribution's bounds together with the weights."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        tensors = {k: value for k, value in self.keywords.items() if isinstance(value, Tensor)}
        self.keywords.update({name: fn(value) for name, value in tensors.items()})
        return self

    def forward(self, columns: Tensor) -> tuple[Tensor, ...]:
        """Convert network outputs ``[..., columns]`` to parameters, in the order of ``names``."""
        return (columns,)


class _Choices(Parameters):
    """Head that outputs the concatenated logits of independent categorical distributions."""

    distribution = MultiDiscrete


class _Normal(Parameters):
    """Head with means from the network and a learned, state-independent standard deviation."""

    names = ("loc", "scale")
    distribution = Normal

    def __init__(self, shape: Sequence[int], initial_log_std: float, **keywords: Any) -> None:
        super().__init__(math.prod(shape), event_dim=len(shape), **keywords)
        self.shape = tuple(shape)
        self.log_scale = nn.Parameter(torch.full(self.shape, float(initial_log_std)))

    def forward(self, columns: Tensor) -> tuple[Tensor, ...]:
        loc = _shaped(columns, self.shape)
        return loc, self.log_scale.exp().expand_as(loc)


class _TanhNormal(Parameters):
    """Head for tanh-normal actions, with means and standard deviations from the network.

    A tanh bounds the log standard deviation to [-5, 2], as in the reference implementation of SAC
    (Haarnoja et al. 2018; squashing in appendix C).
    """

    names = ("loc", "scale")
    distribution = TanhNormal
    least, most = -5.0, 2.0
    middle, half_range = (most + least) / 2, (most - least) / 2

    def __init__(self, shape: Sequence[int], low: Tensor, high: Tensor) -> None:
        size = math.prod(shape)
        super().__init__(2 * size, low=low, high=high, event_dims=len(shape))
        self.shape, self.size = tuple(shape), size

    def forward(self, columns: Tensor) -> tuple[Tensor, ...]:
        loc, raw = columns.split(self.size, dim=-1)  # type: ignore[no-untyped-call]
        scale = self._log_deviation(raw).exp()
        return _shaped(loc, self.shape), _shaped(scale, self.shape)

    def _log_deviation(self, raw: Tensor) -> Tensor:
        return self.middle + self.half_range * raw.tanh()


class ClippedTanhNormal(_TanhNormal):
    """Tanh-normal head that clips the log standard deviation to [-20, 2], as in CrossQ.

    See Bhatt et al. (2024). The base class's tanh has slopes of up to 3.5, which amplifies
    differences between states. With that tanh, four of five CrossQ runs on Hopper did not learn.
    """

    least, most = -20.0, 2.0

    def _log_deviation(self, raw: Tensor) -> Tensor:
        return raw.clamp(self.least, self.most)


class Scaled(Parameters):
    """Scales network outputs to the action bounds by a tanh, for deterministic policies.

    The bounds are not buffers, so loading weights from another run does not change them.
    """

    names = ("action",)

    def __init__(self, shape: Sequence[int], low: Tensor, high: Tensor) -> None:
        bounds = {"centre": (high + low) / 2, "half_range": (high - low) / 2}
        super().__init__(math.prod(shape), **bounds)
        self.shape = tuple(shape)

    def forward(self, columns: Tensor) -> tuple[Tensor, ...]:
        """Return the action, scaled to its bounds."""
        centre, half_range = self.keywords["centre"], self.keywords["half_range"]
        return (torch.addcmul(centre, _shaped(columns, self.shape).tanh(), half_range),)


HEADS = (Parameters, _Choices, _Normal, _TanhNormal, ClippedTanhNormal, Scaled)
"""Head classes that NumPy policies support. Subclasses are not supported."""


def _shaped(columns: Tensor, shape: tuple[int, ...]) -> Tensor:
    return columns if len(shape) == 1 else columns.unflatten(-1, shape)  # type: ignore[no-any-return, no-untyped-call]


class Heads(nn.Module):
    """Splits a network's outputs into the distribution parameters of several actions."""

    def __init__(self, network: nn.Module, heads: Sequence[Parameters]) -> None:
        super().__init__()
        self.network = network
        self.heads = nn.ModuleList(heads)
        self._columns = [head.columns for head in heads]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters from all heads as one flat tuple."""
        columns = self.network(*inputs)
        parts = columns.split(self._columns, dim=-1) if len(self.heads) > 1 else [columns]
        return tuple(p for part, head in zip(parts, self.heads) for p in head(part))


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return logits or Q-values with a very low value wherever ``mask`` is 0."""
    # The square root of the largest float is used because losses multiply and subtract masked
    # values, and an infinite result times a probability of 0 would be NaN.
    return values.masked_fill(mask == 0, -(torch.finfo(values.dtype).max ** 0.5))


class MaskedHeads(Heads):
    """Computes masked logits for discrete actions. The last input is the action mask."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the logits, with a very low value for each forbidden action."""
        (logits,) = super().forward(*inputs[:-1])
        return (masked(logits, inputs[-1]),)


def only_action(env: Any, space: str, algorithm: str, other: str) -> Any:
    """Return the environment's only action; raise SettingError if it is not of type ``space``."""
    leaf, *more = env.action_leaves
    kinds = "f" if space == "Box" else "iu"
    if not more and leaf.dtype.kind in kinds:
        return leaf
    found = ", ".join(str(leaf.space or leaf.dtype) for leaf in env.action_leaves)
    reason = f"{algorithm[:1].upper()}{algorithm[1:]} needs exactly one {space} action"
    hint = f"Use {other}, or an environment with a {space} action space"
    raise SettingError("action_space", found, reason, hint)


def action_masks(env: Any, choices: int) -> list[Any]:
    """Return a list with the key of the action mask, or an empty list if there is no mask.

    Args:
        env: the environment.
        choices: required size of the mask for each environment; 0 if the action cannot be masked.

    Raises:
        SettingError: if the mask's shape does not match the action.
    """
    for leaf in env.observation_leaves:
        if not leaf.is_action_mask:
            continue
        if leaf.shape == (choices,):
            return [leaf.key]
        reason = f"The mask has shape {list(leaf.shape)}, but {choices} categories can be masked"
        hint = "Use a single Discrete or MultiDiscrete action, or rename the observation"
        raise SettingError("action_mask", str(leaf.key), reason, hint)
    return []


def parameter_keys(heads: dict[Any, Parameters]) -> list[Any]:
    """Return the keys of all actions' distribution parameters, in the order of the heads."""
    if len(heads) == 1:
        return list(next(iter(heads.values())).names)
    return [("params", *path_of(key), name) for key, head in heads.items() for name in head.names]


def head_of(env: Any, leaf: Any, continuous: Continuous, initial_log_std: float) -> Parameters:
    """Create the head for one action.

    Args:
        env: the environment.
        leaf: entry of the action space.
        continuous: distribution of a continuous action: ``normal``, ``tanh_normal`` or
            ``clipped_tanh_normal``.
        initial_log_std: initial log standard deviation of the ``normal`` distribution.

    Raises:
        SettingError: if no distribution supports the action's spec.
    """
    spec = env.full_action_spec[leaf.key]
    shape = tuple(spec.shape[1:])
    if isinstance(spec, Binary):  # checked first because Binary is a subclass of Categorical
        return _Choices(2 * shape[-1], choices=[2] * shape[-1])
    if isinstance(spec, MultiCategorical):
        choices = [int(count) for count in spec.nvec.reshape(-1, spec.shape[-1])[0]]
        return _Choices(sum(choices), choices=choices)
    if isinstance(spec, CategoricalSpec):
        return Parameters(int(spec.n))
    if isinstance(spec, (Bounded, Unbounded)) and spec.dtype.is_floating_point:
        if continuous == "normal":
            return _Normal(shape, initial_log_std)
        low, high = bounds_of(leaf, spec)
        clipped = continuous == "clipped_tanh_normal"
        return (ClippedTanhNormal if clipped else _TanhNormal)(shape, low, high)
    reason = f"Policies do not support the space of the action {leaf.key}"
    kinds = ["Discrete", "MultiDiscrete", "MultiBinary", "Box of floating-point numbers"]
    raise SettingError("action_space", leaf.space or type(spec).__name__, reason, kinds)


def bounds_of(leaf: Any, spec: Any) -> tuple[Tensor, Tensor]:
    """Return the finite bounds of an action, or raise SettingError if it is unbounded."""
    if isinstance(spec, Bounded):
        low, high = spec.space.low[0].clone(), spec.space.high[0].clone()
        if (high - low).isfinite().all():
            return low, high
    reason = "Squashed actions need finite bounds"
    hint = "Add bounds in a wrapper, or use a normal distribution as recipes.ppo does"
    raise SettingError("action_space", leaf.space or type(spec).__name__, reason, hint)
