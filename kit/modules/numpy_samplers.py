"""Sample actions with NumPy from a network's outputs and PyTorch's random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kit.modules.distributions import Categorical, Normal, TanhNormal
from kit.modules.random_actions import draw_alike

Array = NDArray[Any]

_32_BITS, _24_BITS = 2**32 - 1, 2**24 - 1

# Module-level names save an attribute lookup per call.
add, exp, maximum, minimum, multiply, tanh = (
    np.add, np.exp, np.maximum, np.minimum, np.multiply, np.tanh
)  # fmt: skip


class Sampler:
    """Base class for samplers that select actions from a network's outputs.

    Args:
        head: head that defines the action's distribution.
        num_envs: number of environments.

    Attributes:
        shape: shape of the random numbers for one time step, ``[num_envs, ...]``.
        actions: shape of the actions for one time step, ``[num_envs, ...]``.
        dtype: dtype of actions.
        at_once: whether one call for several time steps draws the same numbers as one call per
            step.
        draws_any: whether actions depend on random numbers.
    """

    fill: Callable[..., Tensor] = Tensor.normal_
    dtype: Any = np.float32
    draws_any = True

    def __init__(self, head: Any, num_envs: int) -> None:
        self.head = head
        self.shape = self.actions = (num_envs, *getattr(head, "shape", (head.columns,)))
        self.at_once = draw_alike(lambda: [self._draw(16, True)], lambda: [self._draw(16, False)])

    @property
    def draws(self) -> tuple[Any, ...]:
        """Values that identify the distribution and shape of the random numbers."""
        return type(self), self.shape

    def refresh(self) -> None:
        """Once per batch, update values that are derived from the policy's parameters."""

    def noise(self, steps: int) -> Array:
        """Draw the noise for ``steps`` consecutive time steps, ``[steps, num_envs, ...]``."""
        return self._draw(steps, self.at_once).numpy()  # type: ignore[no-any-return]

    def _draw(self, steps: int, at_once: bool) -> Tensor:
        if at_once:
            # Filling a contiguous tensor would draw the numbers in a different order.
            apart = torch.empty(steps, *self.shape, 2)[..., 0]
            return type(self).fill(apart).contiguous()
        whole = torch.empty(steps, *self.shape)
        for row in whole.unbind():
            type(self).fill(row)
        return whole

    def sample(self, columns: Array, noise: Array, out: Array | None) -> Array:
        """Return sampled actions, ``[num_envs, ...]``.

        Args:
            columns: network outputs; must not change until the next time step.
            noise: random numbers for this time step.
            out: output array; ``None``: allocate an array.
        """
        raise NotImplementedError

    def likeliest(self, columns: Array, out: Array | None) -> Array:
        """Return the most probable actions, ``[num_envs, ...]``."""
        raise NotImplementedError


class _Categorical(Sampler):
    """Samples by an exponential race, as :class:`~kit.modules.distributions.Categorical` does."""

    fill = Tensor.exponential_
    dtype = np.intp

    def __init__(self, head: Any, num_envs: int) -> None:
        super().__init__(head, num_envs)
        self.actions = (num_envs,)

    def noise(self, steps: int) -> Array:
        return np.log(super().noise(steps))  # type: ignore[no-any-return]

    def sample(self, columns: Array, noise: Array, out: Array | None) -> Array:
        return (columns - noise).argmax(-1, out)  # type: ignore[no-any-return]

    def likeliest(self, columns: Array, out: Array | None) -> Array:
        return columns.argmax(-1, out)  # type: ignore[no-any-return]


class _Normal(Sampler):
    """Normal distribution with a state-independent standard deviation."""

    def refresh(self) -> None:
        self._scale = self.head.log_scale.detach().exp().numpy()[None]

    def sample(self, columns: Array, noise: Array, out: Array | None) -> Array:
        return add(columns, multiply(noise, self._scale, out), out)  # type: ignore[no-any-return]

    def likeliest(self, columns: Array, out: Array | None) -> Array:
        return np.positive(columns, out)  # type: ignore[no-any-return]


class _TanhNormal(Sampler):
    """Normal distribution squashed to the action bounds, as in TorchRL's ``TanhNormal``."""

    def __init__(self, head: Any, num_envs: int) -> None:
        super().__init__(head, num_envs)
        low, high = (head.keywords[name].numpy() for name in ("low", "high"))
        self._middle, self._half = (high + low)[None] / 2, (high - low)[None] / 2
        self._bounds = self._middle.item(0), self._half.item(0)
        self._limit = np.float32(1 - torch.finfo(torch.float32).resolution)  # as in TorchRL's tanh
        # For a single number, Python's math module is faster than NumPy.
        self._single = num_envs * head.size == 1

    def _squashed(self, value: Array, out: Array | None) -> Array:
        value = tanh(value, out)
        maximum(value, -self._limit, out=value)
        minimum(value, self._limit, out=value)
        multiply(value, self._half, value)
        return add(value, self._middle, value)  # type: ignore[no-any-return]

    def _one(self, columns: Array, noise: Array, out: Array | None) -> Array:
        """Sample a single number with Python's ``math`` module."""
        (mean, raw), head, limit = columns[0].tolist(), self.head, float(self._limit)
        deviation = math.exp(head.middle + head.half_range * math.tanh(raw))
        value = math.tanh(mean + deviation * noise.item())
        out = np.empty(self.shape, np.float32) if out is None else out
        out[...] = self._bounds[0] + self._bounds[1] * min(max(value, -limit), limit)
        return out

    def sample(self, columns: Array, noise: Array, out: Array | None) -> Array:
        if self._single:
            return self._one(columns, noise, out)
        size, head = self.head.size, self.head
        scale = tanh(columns[:, size:])
        scale *= head.half_range
        scale += head.middle
        exp(scale, scale)
        multiply(scale, noise, scale)
        add(scale, columns[:, :size], scale)
        return self._squashed(scale, out)

    def likeliest(self, columns: Array, out: Array | None) -> Array:
        return self._squashed(columns[:, : self.head.size], out)


class EpsilonGreedySampler(Sampler):
    """Selects greedy actions, which are replaced by random actions with probability epsilon.

    Args:
        noise: TorchRL's ``EGreedyModule``, which provides epsilon; ``None``: always greedy.
        num_envs: number of environments.
        choices: number of discrete actions.
    """

    dtype = np.int64

    def __init__(self, noise: Any, num_envs: int, choices: int) -> None:
        self.head, self.choices = noise, choices
        self.draws_any, self.at_once = noise is not None, True
        self.shape, self.actions = (2, num_envs), (num_envs,)

    def refresh(self) -> None:
        """Read epsilon from the noise module."""
        if self.draws_any:
            self._epsilon = np.float32(self.head.eps.item())

    def noise(self, steps: int) -> Array:
        """For each step, draw uniform numbers and then random actions, as ``EGreedyModule`` does.

        The module uses 32 bits from PyTorch's generator per number. Drawing all bits at once as
        64-bit words is twenty times faster.
        """
        words = torch.empty(steps * self.actions[0], dtype=torch.int64).random_(-(2**63), None)
        drawn = words.numpy()
        bits = np.stack([drawn >> 32 & _32_BITS, drawn & _32_BITS], -1).reshape(steps, *self.shape)
        noise = np.empty(bits.shape, np.float32)
        noise[:, 0] = (bits[:, 0] & _24_BITS) / 2**24
        noise[:, 1] = bits[:, 1] % self.choices
        return noise

    def sample(self, columns: Array, noise: Array, out: Array | None) -> Array:
        """Return epsilon-greedy actions, ``[num_envs]``."""
        action: Array = columns.argmax(-1, out)
        chance, choice = noise
        if len(chance) == 1:
            if chance[0] < self._epsilon:
                action[0] = choice[0]
        else:
            np.copyto(action, choice, casting="unsafe", where=chance < self._epsilon)
        return action

    def likeliest(self, columns: Array, out: Array | None) -> Array:
        """Return greedy actions, ``[num_envs]``."""
        return columns.argmax(-1, out)  # type: ignore[no-any-return]


class ScaledSampler(Sampler):
    """Scales actions to their bounds by a tanh, adds Gaussian noise and clips the result.

    Args:
        head: head with the centre and half range of the action bounds.
        num_envs: number of environments.
        noise: :class:`~kit.modules.exploration.GaussianNoise`; ``None``: no noise.
        bounds: smallest and largest action; ``None``: noisy actions are not clipped.
    """

    def __init__(
        self, head: Any, num_envs: int, noise: Any, bounds: tuple[Array, Array] | None
    ) -> None:
        super().__init__(head, num_envs)
        self._noise, self._bounds = noise, bounds
        self.draws_any = noise is not None
        scaled = head.keywords
        self._centre, self._half = (scaled[n].numpy()[None] for n in ("centre", "half_range"))

    def refresh(self) -> None:
        """Read the mean and standard deviation of the noise."""
        if self.draws_any:
            sigma, mean = self._noise.sigma.item(), self._noise.mean.item()
            std = self._noise.std.numpy().astype(np.float64)  # a scalar or one entry per dimension
            self._scale, self._shift = np.float32(sigma * std), np.float32(sigma * mean)

    def sample(self, columns: Array, noise: Array, out: Array | None) -> Array:
        """Return actions with noise, ``[num_envs, size]``."""
        action = self.likeliest(columns, out)
        add(action, noise * self._scale + self._shift, action)
        if self._bounds is not None:
            maximum(action, self._bounds[0], out=action)
            minimum(action, self._bounds[1], out=action)
        return action

    def likeliest(self, columns: Array, out: Array | None) -> Array:
        """Return actions without noise, ``[num_envs, size]``."""
        action: Array = tanh(columns, out)
        multiply(action, self._half, action)
        return add(action, self._centre, action)  # type: ignore[no-any-return]


OF_DISTRIBUTIONS: dict[Any, type[Sampler]] = {
    Categorical: _Categorical,
    Normal: _Normal,
    TanhNormal: _TanhNormal,
}
"""Sampler class for each supported distribution."""
