"""Action distributions with low sampling overhead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torchrl.modules
from torch import Tensor

_MANY_ROWS = 128
"""Minimum number of rows at which sampling on a CPU inverts cumulative probabilities."""
_ROUNDING = 1e-5
"""Maximum difference between NumPy's and PyTorch's tanh, relative to the action's range."""


class Categorical(torch.distributions.Categorical):
    """A categorical distribution that samples without reading probabilities on the host.

    Equivalent to PyTorch's distribution, but three times faster for few categories, because one
    operation normalises the logits and the argument check of PyTorch's ``multinomial`` is skipped.

    On a GPU, or for few rows, samples are drawn by an exponential race. Each category draws an
    exponential waiting time, divided by its probability, and the smallest waiting time wins. For
    many rows on a CPU, the cumulative probabilities are inverted, which needs one random number per
    row. On an H100, sampling 32,768 rows of two categories takes 198 us by inversion and 8 us by
    the race. Neither method returns a category of probability zero.

    Args:
        logits: unnormalised log-probabilities, ``[..., categories]``.
        probs: probabilities, ``[..., categories]``; used if ``logits`` is ``None``.
    """

    def __init__(
        self, logits: Tensor | None = None, probs: Tensor | None = None, **kwargs: Any
    ) -> None:
        if logits is None:
            super().__init__(probs=probs, **kwargs)
            self._scores: Tensor = self.logits
            return
        self._param = self.logits = logits.log_softmax(dim=-1)
        self._scores = logits  # not normalised, because a constant offset does not change the race
        self._num_events = logits.shape[-1]
        kwargs.setdefault("validate_args", False)
        torch.distributions.Distribution.__init__(self, logits.shape[:-1], **kwargs)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return sampled category indices, ``[*sample_shape, ...]``."""
        shape = torch.Size((*sample_shape, *self.logits.shape))
        logits: Tensor = self.logits
        if logits.is_cuda or shape[:-1].numel() < _MANY_ROWS:
            waiting = logits.new_empty(shape).exponential_()
            return (self._scores - waiting.log()).argmax(dim=-1)
        cumulative = logits.exp().cumsum(dim=-1)
        # Thresholds are in (0, total], so categories of probability zero are never selected.
        uniform = logits.new_empty((*shape[:-1], 1)).uniform_()
        return (cumulative < (1 - uniform) * cumulative[..., -1:]).sum(dim=-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of sampled categories."""
        if value.shape != self.logits.shape[:-1]:
            return super().log_prob(value)  # type: ignore[no-any-return, no-untyped-call]
        return self.logits.gather(-1, value.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Return the entropy, ``[...]``."""
        finite = self.logits.clamp(min=torch.finfo(self.logits.dtype).min)
        return -(finite * self.probs).sum(-1)

    @property
    def deterministic_sample(self) -> Tensor:
        """The most probable category, ``[...]``."""
        return self.logits.argmax(dim=-1)


class Normal(torch.distributions.Independent[torch.distributions.Normal]):
    """Independent normal distributions for action entries, computed with few tensor operations.

    Equivalent to TorchRL's ``IndependentNormal``. The noise of the last sample is cached. If
    gradients are disabled, the sample's log-probability is computed from this noise.

    Args:
        loc: means, ``[..., *event]``.
        scale: standard deviations, ``[..., *event]``.
        event_dim: number of trailing dimensions that form one action.
    """

    def __init__(self, loc: Tensor, scale: Tensor, event_dim: int = 1, **kwargs: Any) -> None:
        base = torch.distributions.Normal(loc, scale, validate_args=False)
        kwargs.setdefault("validate_args", False)
        super().__init__(base, event_dim, **kwargs)
        self.loc, self.scale = loc, scale
        self._dimensions = tuple(range(-event_dim, 0))
        self._drawn: tuple[Tensor, Tensor] | None = None

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Return differentiable samples, ``[*sample_shape, ..., *event]``."""
        shape = torch.Size((*sample_shape, *self.loc.shape))
        noise = self.loc.new_empty(shape).normal_()
        value = torch.addcmul(self.loc, self.scale, noise)
        self._drawn = (value, noise)
        return value

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return samples, ``[*sample_shape, ..., *event]``."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of actions, ``[...]``."""
        if self._drawn is not None and value is self._drawn[0] and not torch.is_grad_enabled():
            noise = self._drawn[1]
        else:
            noise = (value - self.loc) / self.scale
        each = torch.add(self.scale.log(), noise * noise, alpha=0.5)
        constant = -0.5 * math.log(2 * math.pi) * self.event_shape.numel()
        return constant - each.sum(self._dimensions)

    @property
    def deterministic_sample(self) -> Tensor:
        """The mean of the distribution."""
        return self.loc


class TanhNormal(torchrl.modules.TanhNormal):  # type: ignore[misc, unused-ignore]
    """TorchRL's TanhNormal with exact log-probabilities, computed from actions before the tanh.

    Near the bounds, the value before the tanh cannot be recovered from a float32 action, because
    the tanh of numbers above 9 rounds to 1. The log-density of ``a = tanh(u)`` is ``log N(u) -
    sum(log(1 - tanh(u)^2))`` (Haarnoja et al. 2018, appendix C).

    Attributes:
        pre_tanh: actions before the tanh, ``[..., *event]``, from the last sample or read from a
            batch by :class:`~kit.modules.squashed.SquashedSampling`; ``None`` if unavailable.
    """

    pre_tanh: Tensor | None = None

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Return differentiable samples, ``[*sample_shape, ..., *event]``."""
        return self.squash(self.base_dist.rsample(torch.Size(sample_shape)))

    def squash(self, pre_tanh: Tensor) -> Tensor:
        """Return actions within the bounds, and store the actions before the tanh."""
        self.pre_tanh = pre_tanh
        return self._t(pre_tanh)  # type: ignore[no-any-return]

    @property
    def deterministic_sample(self) -> Tensor:
        """The base distribution's mean, squashed to the action bounds."""
        return self.squash(self.loc)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of actions, ``[...]``.

        Args:
            value: actions. Where an action does not match ``pre_tanh``, the tanh is inverted.
        """
        if self.pre_tanh is None:
            return super().log_prob(value)  # type: ignore[no-any-return]
        near = (value - self._t(self.pre_tanh)).abs() <= _ROUNDING * (self.high - self.low)
        pre_tanh = torch.where(near, self.pre_tanh, self._t.inv(value))
        slopes = self._t.log_abs_det_jacobian(pre_tanh, value)
        event = tuple(range(-len(self.event_shape), 0))
        return self.base_dist.log_prob(pre_tanh) - slopes.sum(event)  # type: ignore[no-any-return]


@torch.distributions.register_kl(TanhNormal, TanhNormal)  # type: ignore[no-untyped-call, untyped-decorator]
def _kl_before_tanh(one: TanhNormal, other: TanhNormal) -> Tensor:
    """Return the KL divergence, computed between base distributions because tanh preserves it."""
    return torch.distributions.kl_divergence(one.base_dist, other.base_dist)


class MultiDiscrete(torch.distributions.Distribution):
    """Independent categorical distributions for the entries of a ``MultiDiscrete`` action.

    Args:
        logits: concatenated unnormalised log-probabilities of all entries, ``[..., sum(choices)]``.
        choices: number of categories for each entry.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012  # name and type are defined by torch
    has_rsample = False

    def __init__(self, logits: Tensor, choices: Sequence[int], **kwargs: Any) -> None:
        parts = torch.split(logits, list(choices), dim=-1)
        self.parts = [Categorical(logits=part) for part in parts]
        kwargs.setdefault("validate_args", False)
        super().__init__(logits.shape[:-1], torch.Size([len(self.parts)]), **kwargs)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return sampled actions as integers, ``[*sample_shape, ..., entries]``."""
        return torch.stack([part.sample(sample_shape) for part in self.parts], dim=-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of actions, ``[...]``."""
        entries = [part.log_prob(value[..., n]) for n, part in enumerate(self.parts)]
        return torch.stack(entries, dim=-1).sum(dim=-1)

    def entropy(self) -> Tensor:
        """Return the entropy of actions, ``[...]``."""
        return torch.stack([part.entropy() for part in self.parts], dim=-1).sum(dim=-1)

    @property
    def mode(self) -> Tensor:
        """The most probable category for each entry."""
        return torch.stack([part.deterministic_sample for part in self.parts], dim=-1)

    deterministic_sample = mode


@torch.distributions.register_kl(MultiDiscrete, MultiDiscrete)  # type: ignore[no-untyped-call, untyped-decorator]
def _kl_of_choices(one: MultiDiscrete, other: MultiDiscrete) -> Tensor:
    """Return the KL divergence, summed over all entries."""
    parts = [torch.distributions.kl_divergence(*pair) for pair in zip(one.parts, other.parts)]
    return torch.stack(parts, dim=-1).sum(dim=-1)
