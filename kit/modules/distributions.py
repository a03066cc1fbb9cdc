"""Action distributions whose sampling costs no more than its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torchrl.modules
from torch import Tensor

_MANY_ROWS = 128
"""From how many rows on inverting cumulative probabilities is the cheaper way to sample."""
_ROUNDING = 1e-5
"""Share of the action's range by which NumPy and PyTorch may squash a value differently."""


class Categorical(torch.distributions.Categorical):
    """A categorical distribution that samples without reading probabilities on the host.

    The same distribution as PyTorch's, three times cheaper for a few choices: logits are
    normalised in one operation, and PyTorch's multinomial, which first checks the probabilities, is
    not used. For a few rows, and on a GPU, a sample is the winner of an exponential race (the
    choice whose exponential waiting time, divided by its probability, is smallest). For many rows
    on a CPU the cumulative probabilities are inverted, which needs one random number for each row;
    an H100 takes 198 us for 32,768 rows of two so, and 8 us for the race. Neither ever returns a
    choice of probability zero.

    Args:
        logits: unnormalised log-probabilities, ``[..., choices]``.
        probs: probabilities, ``[..., choices]``; one of the two is given.
    """

    def __init__(
        self, logits: Tensor | None = None, probs: Tensor | None = None, **kwargs: Any
    ) -> None:
        if logits is None:
            super().__init__(probs=probs, **kwargs)
            self._scores: Tensor = self.logits
            return
        self._param = self.logits = logits.log_softmax(dim=-1)
        self._scores = logits  # the same but for a constant, which no race depends on
        self._num_events = logits.shape[-1]
        kwargs.setdefault("validate_args", False)
        torch.distributions.Distribution.__init__(self, logits.shape[:-1], **kwargs)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return choices as integers, ``[*sample_shape, ...]``."""
        shape = torch.Size((*sample_shape, *self.logits.shape))
        logits: Tensor = self.logits
        if logits.is_cuda or shape[:-1].numel() < _MANY_ROWS:
            waiting = logits.new_empty(shape).exponential_()
            return (self._scores - waiting.log()).argmax(dim=-1)
        reached = logits.exp().cumsum(dim=-1)
        # In (0, total]: no choice of probability zero is the first to reach it.
        wanted = (1 - logits.new_empty((*shape[:-1], 1)).uniform_()) * reached[..., -1:]
        return (reached < wanted).sum(dim=-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of choices of the shape of a sample."""
        if value.shape != self.logits.shape[:-1]:
            return super().log_prob(value)  # type: ignore[no-any-return, no-untyped-call]
        return self.logits.gather(-1, value.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Return the entropy, ``[...]``."""
        finite = self.logits.clamp(min=torch.finfo(self.logits.dtype).min)
        return -(finite * self.probs).sum(-1)

    @property
    def deterministic_sample(self) -> Tensor:
        """The most probable choice."""
        return self.logits.argmax(dim=-1)


class Normal(torch.distributions.Independent[torch.distributions.Normal]):
    """Independent normal distributions of the entries of an action, in few tensor operations.

    The same distribution as TorchRL's ``IndependentNormal``. The noise of a sample is kept,
    so that without gradients its log-probability does not have to be computed back from it.

    Args:
        loc: means, ``[..., *event]``.
        scale: deviations, of the same shape.
        event_dim: how many of the last dimensions are one action.
    """

    def __init__(self, loc: Tensor, scale: Tensor, event_dim: int = 1, **kwargs: Any) -> None:
        base = torch.distributions.Normal(loc, scale, validate_args=False)
        kwargs.setdefault("validate_args", False)
        super().__init__(base, event_dim, **kwargs)
        self.loc, self.scale = loc, scale
        self._dimensions = tuple(range(-event_dim, 0))
        self._drawn: tuple[Tensor, Tensor] | None = None

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Return actions, ``[*sample_shape, ..., *event]``, through which gradients flow."""
        shape = torch.Size((*sample_shape, *self.loc.shape))
        noise = self.loc.new_empty(shape).normal_()
        value = torch.addcmul(self.loc, self.scale, noise)
        self._drawn = (value, noise)
        return value

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return actions, ``[*sample_shape, ..., *event]``."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of whole actions, ``[...]``."""
        if self._drawn is not None and value is self._drawn[0] and not torch.is_grad_enabled():
            noise = self._drawn[1]
        else:
            noise = (value - self.loc) / self.scale
        each = torch.add(self.scale.log(), noise * noise, alpha=0.5)
        constant = -0.5 * math.log(2 * math.pi) * self.event_shape.numel()
        return constant - each.sum(self._dimensions)

    @property
    def deterministic_sample(self) -> Tensor:
        """The mean."""
        return self.loc


class TanhNormal(torchrl.modules.TanhNormal):  # type: ignore[misc, unused-ignore]
    """TorchRL's distribution; log-probabilities are those of the value before the tanh, if known.

    Near its bounds a float32 action does not determine that value: beyond 9 the tanh is 1. The
    density of ``a = tanh(u)`` is ``log N(u) - sum(log(1 - tanh(u)^2))`` (Haarnoja et al. 2018,
    appendix C).

    Attributes:
        pre_tanh: actions before the tanh, ``[..., *event]``: those drawn last, or those that
            :class:`~kit.modules.squashed.SquashedSampling` reads from a batch; ``None``: unknown.
    """

    pre_tanh: Tensor | None = None

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Return actions, ``[*sample_shape, ..., *event]``, through which gradients flow."""
        self.pre_tanh = self.base_dist.rsample(torch.Size(sample_shape))
        return self._t(self.pre_tanh)  # type: ignore[no-any-return]

    @property
    def deterministic_sample(self) -> Tensor:
        """The squashed mean."""
        self.pre_tanh = self.loc
        return self._t(self.loc)  # type: ignore[no-any-return]

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of whole actions, ``[...]``.

        Args:
            value: actions; those that are not the squashed ``pre_tanh`` are inverted.
        """
        if self.pre_tanh is None:
            return super().log_prob(value)  # type: ignore[no-any-return]
        near = (value - self._t(self.pre_tanh)).abs() <= _ROUNDING * (self.high - self.low)
        pre_tanh = torch.where(near, self.pre_tanh, self._t.inv(value))
        slopes = self._t.log_abs_det_jacobian(pre_tanh, value)
        event = tuple(range(-len(self.event_shape), 0))
        return self.base_dist.log_prob(pre_tanh) - slopes.sum(event)  # type: ignore[no-any-return]


@torch.distributions.register_kl(TanhNormal, TanhNormal)  # type: ignore[no-untyped-call, untyped-decorator]
def _divergence_before_the_tanh(one: TanhNormal, other: TanhNormal) -> Tensor:
    """The Kullback-Leibler divergence, which no invertible function changes."""
    return torch.distributions.kl_divergence(one.base_dist, other.base_dist)


class MultiDiscrete(torch.distributions.Distribution):
    """Several independent categorical choices, as of a ``MultiDiscrete`` space.

    Args:
        logits: unnormalised log-probabilities of all choices side by side, ``[..., sum(choices)]``.
        choices: how many there are for each entry of the action.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012  # torch's name and type
    has_rsample = False

    def __init__(self, logits: Tensor, choices: Sequence[int], **kwargs: Any) -> None:
        parts = torch.split(logits, list(choices), dim=-1)
        self.parts = [Categorical(logits=part) for part in parts]
        kwargs.setdefault("validate_args", False)
        super().__init__(logits.shape[:-1], torch.Size([len(self.parts)]), **kwargs)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return integers, ``[*sample_shape, ..., entries]``."""
        return torch.stack([part.sample(sample_shape) for part in self.parts], dim=-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of whole actions, ``[...]``."""
        entries = [part.log_prob(value[..., n]) for n, part in enumerate(self.parts)]
        return torch.stack(entries, dim=-1).sum(dim=-1)

    def entropy(self) -> Tensor:
        """Return the entropy of whole actions, ``[...]``."""
        return torch.stack([part.entropy() for part in self.parts], dim=-1).sum(dim=-1)

    @property
    def mode(self) -> Tensor:
        """The most probable choice of each entry."""
        return torch.stack([part.deterministic_sample for part in self.parts], dim=-1)

    deterministic_sample = mode


@torch.distributions.register_kl(MultiDiscrete, MultiDiscrete)  # type: ignore[no-untyped-call, untyped-decorator]
def _divergence_of_choices(one: MultiDiscrete, other: MultiDiscrete) -> Tensor:
    """The Kullback-Leibler divergence of independent choices: the sum of theirs."""
    parts = [torch.distributions.kl_divergence(*both) for both in zip(one.parts, other.parts)]
    return torch.stack(parts, dim=-1).sum(dim=-1)
