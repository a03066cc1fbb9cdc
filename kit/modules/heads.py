"""From a network's columns to actions: the parameters of their distributions, and masks."""

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

Continuous = Literal["normal", "tanh_normal", "clipped_tanh_normal", "deterministic"]


class Parameters(nn.Module):
    """From the columns of a network to the parameters of one action's distribution."""

    names: tuple[str, ...] = ("logits",)
    distribution: Any = Categorical
    keywords: dict[str, Any]

    def __init__(self, columns: int, **keywords: Any) -> None:
        super().__init__()
        self.columns = columns
        self.keywords = keywords

    def _apply(self, fn: Any, recurse: bool = True) -> Parameters:
        """Move the bounds of the distribution with the weights."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        tensors = {k: value for k, value in self.keywords.items() if isinstance(value, Tensor)}
        self.keywords.update({name: fn(value) for name, value in tensors.items()})
        return self

    def forward(self, columns: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters by ``names``, from columns ``[..., columns]``."""
        return (columns,)


class _Choices(Parameters):
    """Several categorical choices side by side."""

    distribution = MultiDiscrete


class _Normal(Parameters):
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


class _TanhNormal(Parameters):
    """Means and deviations from the network; samples squashed to the bounds of the action.

    The logarithm of the deviation is kept in [-5, 2] by a tanh, as in the reference implementation
    of soft actor-critic (Haarnoja et al. 2018, appendix C gives the squashing).
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
    """The logarithm of the deviation is clipped to [-20, 2], as in CrossQ (Bhatt et al. 2024).

    The slope of the tanh's range, 3.5, spreads deviations more from state to state. Of actors with
    batch renormalisation four of five runs of CrossQ on Hopper stood still with it.
    """

    least, most = -20.0, 2.0

    def _log_deviation(self, raw: Tensor) -> Tensor:
        return raw.clamp(self.least, self.most)


class Scaled(Parameters):
    """Actions of a deterministic policy: the columns of a network, scaled to the bounds by tanh.

    The bounds are no buffers: weights of another run come without those of its environment.
    """

    names = ("action",)

    def __init__(self, shape: Sequence[int], low: Tensor, high: Tensor) -> None:
        bounds = {"centre": (high + low) / 2, "half_range": (high - low) / 2}
        super().__init__(math.prod(shape), **bounds)
        self.shape = tuple(shape)

    def forward(self, columns: Tensor) -> tuple[Tensor, ...]:
        """Return the action."""
        centre, half_range = self.keywords["centre"], self.keywords["half_range"]
        return (torch.addcmul(centre, _shaped(columns, self.shape).tanh(), half_range),)


HEADS = (Parameters, _Choices, _Normal, _TanhNormal, ClippedTanhNormal, Scaled)
"""The classes whose samples NumPy can draw. A subclass may change its parameters."""


def _shaped(columns: Tensor, shape: tuple[int, ...]) -> Tensor:
    return columns if len(shape) == 1 else columns.unflatten(-1, shape)  # type: ignore[no-any-return, no-untyped-call]


class Heads(nn.Module):
    """A network whose columns are split over the parameters of several actions."""

    def __init__(self, network: nn.Module, heads: Sequence[Parameters]) -> None:
        super().__init__()
        self.network = network
        self.heads = nn.ModuleList(heads)
        self._columns = [head.columns for head in heads]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters of all heads, one after the other."""
        columns = self.network(*inputs)
        parts = columns.split(self._columns, dim=-1) if len(self.heads) > 1 else [columns]
        return tuple(p for part, head in zip(parts, self.heads) for p in head(part))


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Logits or Q-values, far below all others where a mask of any type is false."""
    # The root of the largest number, not the lowest: a loss may multiply it by its temperature, and
    # subtract one of them from another, without an infinity, which times probability 0 is NaN.
    return values.masked_fill(mask == 0, -(torch.finfo(values.dtype).max ** 0.5))


class MaskedHeads(Heads):
    """Logits of choices; the last input is a mask."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the logits, those of forbidden choices far below all others."""
        (logits,) = super().forward(*inputs[:-1])
        return (masked(logits, inputs[-1]),)


def only_action(env: Any, space: str, algorithm: str, other: str) -> Any:
    """The action of an environment that has one, of the kind that an algorithm needs."""
    leaf, *more = env.action_leaves
    kinds = "f" if space == "Box" else "iu"
    if not more and leaf.dtype.kind in kinds:
        return leaf
    found = ", ".join(str(leaf.space or leaf.dtype) for leaf in env.action_leaves)
    why = f"does not suit {algorithm}, which needs one {space} action"
    works = f"use {other}, or an environment with a {space} action space"
    raise SettingError("action_space", found, why, works)


def action_masks(env: Any, choices: int) -> list[Any]:
    """The key of the environment's mask ``[num_envs, choices]``, alone in a list; else none.

    Args:
        env: the environment.
        choices: of the action; 0: it is none that can be masked.

    Raises:
        SettingError: if there is a mask that does not fit the action.
    """
    for leaf in env.observation_leaves:
        if not leaf.is_action_mask:
            continue
        if leaf.shape == (choices,):
            return [leaf.key]
        why = f"has shape {list(leaf.shape)} and masks none of {choices} choices"
        works = "use Discrete or MultiDiscrete actions alone, or another name for the observation"
        raise SettingError("action_mask", str(leaf.key), why, works)
    return []


def parameter_keys(heads: dict[Any, Parameters]) -> list[Any]:
    """The keys of the parameters of all actions, in the order of their heads."""
    if len(heads) == 1:
        return list(next(iter(heads.values())).names)
    return [("params", *path_of(key), name) for key, head in heads.items() for name in head.names]


def head_of(env: Any, leaf: Any, continuous: Continuous, initial_log_std: float) -> Parameters:
    """Make what gives the parameters of one action's distribution.

    Args:
        env: the environment.
        leaf: the action.
        continuous: its distribution, if it is continuous: ``normal``, ``tanh_normal`` or
            ``clipped_tanh_normal``.
        initial_log_std: initial log standard deviation of ``normal``.

    Raises:
        SettingError: if the action is of a kind that no distribution here chooses.
    """
    spec = env.full_action_spec[leaf.key]
    shape = tuple(spec.shape[1:])
    if isinstance(spec, Binary):  # TorchRL derives it and the next one from Categorical
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
    why = f"({leaf.key}) is not a kind of action that this policy can choose"
    kinds = ["Discrete", "MultiDiscrete", "MultiBinary", "Box of real numbers"]
    raise SettingError("action_space", leaf.space or type(spec).__name__, why, kinds)


def bounds_of(leaf: Any, spec: Any) -> tuple[Tensor, Tensor]:
    """The least and the greatest action of a policy that squashes its actions."""
    if isinstance(spec, Bounded):
        low, high = spec.space.low[0].clone(), spec.space.high[0].clone()
        if (high - low).isfinite().all():
            return low, high
    why = "has no bounds to which actions could be squashed"
    works = "give it bounds in a wrapper, or use a normal distribution, as recipes.ppo does"
    raise SettingError("action_space", leaf.space or type(spec).__name__, why, works)
