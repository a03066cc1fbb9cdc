"""Random numbers and NumPy arithmetic by which an action is chosen from a network's columns."""

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

# A function of a module is looked up at every use.
add, exp, maximum, minimum, multiply, tanh = (
    np.add, np.exp, np.maximum, np.minimum, np.multiply, np.tanh
)  # fmt: skip


class Sampler:
    """Chooses actions from the columns of the network.

    Args:
        head: says which distribution they are parameters of.
        num_envs: rows.

    Attributes:
        shape: of the random numbers of a time step, ``[num_envs, ...]``.
        actions: shape of the actions of a time step, ``[num_envs, ...]``.
        dtype: of actions.
        at_once: whether one call draws for many time steps what a call for each draws.
        draws_any: whether actions depend on random numbers at all.
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
        """Distribution and shape of the random numbers."""
        return type(self), self.shape

    def refresh(self) -> None:
        """Compute functions of the parameters; once per batch."""

    def noise(self, steps: int) -> Array:
        """Draw the noise of samples, ``[steps, num_envs, ...]``, in the order of the steps."""
        return self._draw(steps, self.at_once).numpy()  # type: ignore[no-any-return]

    def _draw(self, steps: int, at_once: bool) -> Tensor:
        if at_once:
            # With other memory in between, or PyTorch draws many at once in another order.
            apart = torch.empty(steps, *self.shape, 2)[..., 0]
            return type(self).fill(apart).contiguous()
        whole = torch.empty(steps, *self.shape)
        for row in whole.unbind():
            type(self).fill(row)
        return whole

    def sample(self, columns: Array, noise: Array, out: Array | None) -> Array:
        """Return actions, ``[num_envs, ...]``.

        Args:
            columns: of the network, unchanged until the next time step.
            noise: random numbers of this time step.
            out: where they are written; ``None``: to an array of their own.
        """
        raise NotImplementedError

    def likeliest(self, columns: Array, out: Array | None) -> Array:
        """Return the likeliest actions, ``[num_envs, ...]``."""
        raise NotImplementedError


class _Categorical(Sampler):
    """The winner of an exponential race, as :class:`~kit.modules.distributions.Categorical`."""

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
    """Mean plus deviation times noise; the deviation is the same in all states."""

    def refresh(self) -> None:
        self._scale = self.head.log_scale.detach().exp().numpy()[None]

    def sample(self, columns: Array, noise: Array, out: Array | None) -> Array:
        return add(columns, multiply(noise, self._scale, out), out)  # type: ignore[no-any-return]

    def likeliest(self, columns: Array, out: Array | None) -> Array:
        return np.positive(columns, out)  # type: ignore[no-any-return]


class _TanhNormal(Sampler):
    """A normal distribution squashed to the bounds, as TorchRL's ``TanhNormal``."""

    def __init__(self, head: Any, num_envs: int) -> None:
        super().__init__(head, num_envs)
        low, high = (head.keywords[name].numpy() for name in ("low", "high"))
        self._middle, self._half = (high + low)[None] / 2, (high - low)[None] / 2
        self._bounds = self._middle.item(0), self._half.item(0)
        self._limit = np.float32(1 - torch.finfo(torch.float32).resolution)  # TorchRL's safe tanh
        # Python computes one number faster than NumPy an array of one.
        self._single = num_envs * head.size == 1

    def _squashed(self, value: Array, out: Array | None) -> Array:
        value = tanh(value, out)
        maximum(value, -self._limit, out=value)
        minimum(value, self._limit, out=value)
        multiply(value, self._half, value)
        return add(value, self._middle, value)  # type: ignore[no-any-return]

    def _one(self, columns: Array, noise: Array, out: Array | None) -> Array:
        """Sample a single number."""
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
    """The choice of the largest column or, with probability epsilon, one drawn uniformly.

    Args:
        noise: TorchRL's ``EGreedyModule``, which says what epsilon is; ``None``: never at random.
        num_envs: rows.
        choices: columns.
    """

    dtype = np.int64

    def __init__(self, noise: Any, num_envs: int, choices: int) -> None:
        self.head, self.choices = noise, choices
        self.draws_any, self.at_once = noise is not None, True
        self.shape, self.actions = (2, num_envs), (num_envs,)

    def refresh(self) -> None:
        """Read epsilon."""
        if self.draws_any:
            self._epsilon = np.float32(self.head.eps.item())

    def noise(self, steps: int) -> Array:
        """Draw chances and choices, as the module does: for each step the ones, then the others.

        The module draws each from 32 bits of PyTorch's generator. Here whole words of 64 are drawn
        at once, which takes a twentieth of the time.
        """
        words = torch.empty(steps * self.actions[0], dtype=torch.int64).random_(-(2**63), None)
        drawn = words.numpy()
        bits = np.stack([drawn >> 32 & _32_BITS, drawn & _32_BITS], -1).reshape(steps, *self.shape)
        noise = np.empty(bits.shape, np.float32)
        noise[:, 0] = (bits[:, 0] & _24_BITS) / 2**24
        noise[:, 1] = bits[:, 1] % self.choices
        return noise

    def sample(self, columns: Array, noise: Array, out: Array | None) -> Array:
        """Return choices, ``[num_envs]``."""
        action: Array = columns.argmax(-1, out)
        chance, choice = noise
        if len(chance) == 1:
            if chance[0] < self._epsilon:
                action[0] = choice[0]
        else:
            np.copyto(action, choice, casting="unsafe", where=chance < self._epsilon)
        return action

    def likeliest(self, columns: Array, out: Array | None) -> Array:
        """Return greedy choices, ``[num_envs]``."""
        return columns.argmax(-1, out)  # type: ignore[no-any-return]


class ScaledSampler(Sampler):
    """An action scaled to its bounds by tanh, with Gaussian noise, clipped to the bounds.

    Args:
        head: centre and half range of the bounds.
        num_envs: rows.
        noise: :class:`~kit.modules.exploration.GaussianNoise`; ``None``: there is none.
        bounds: smallest and largest action; ``None``: it is not clipped.
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
        """Read mean and deviation of the noise."""
        if self.draws_any:
            sigma, mean = self._noise.sigma.item(), self._noise.mean.item()
            std = self._noise.std.numpy().astype(np.float64)  # a number, or one for each dimension
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
"""What samples the actions of a distribution."""
