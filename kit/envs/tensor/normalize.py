"""Running normalisation on tensors: what :mod:`kit.envs.normalize` does, without the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kit.envs.normalize import EPSILON, Normalizer
from kit.envs.tensor.base import TensorStep
from kit.steps.errors import SettingError


class Statistics(NamedTuple):
    """Running statistics, all in float64: what a step reads and gives anew."""

    mean: Tensor
    """of the observations, ``[observation_size]``."""
    var: Tensor
    """of the observations, ``[observation_size]``."""
    seen: Tensor
    """observations seen, ``[]``; begins with a small number, as on arrays."""
    returns: Tensor
    """discounted sum of rewards of each copy, ``[num_envs]``."""
    return_mean: Tensor
    """of these sums, ``[]``."""
    return_var: Tensor
    """of these sums, ``[]``."""
    returns_seen: Tensor
    """sums seen, ``[]``."""


class TensorNormalizer:
    """The statistics of a :class:`~kit.envs.Normalizer`, kept on a device.

    Statistics are updated at the same moments, and by the same formulas, as on arrays. The
    functions are pure, so that several steps can be one program. The normaliser on the host
    follows: it looks here when episodes begin, and for a checkpoint.

    Args:
        normalizer: says what is normalised and how; the statistics go on from its.
        num_envs: number of copies.
        size: numbers in an observation.
        device: where they are.

    Raises:
        SettingError: if its observations have another size.
    """

    def __init__(
        self, normalizer: Normalizer, num_envs: int, size: int, device: torch.device
    ) -> None:
        self.observation, self.reward = bool(normalizer.observation), normalizer.reward is not None
        self.gamma, self.clip = normalizer.gamma, normalizer.clip
        for key, known in normalizer.observation.items():
            if (key, known.mean.shape) != ("observation", (size,)):
                shape = tuple(known.mean.shape)
                raise SettingError("normalizer", (key, shape), "is of another environment")
        normalizer.bring_here()

        def make(value: float, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.float64, device=device)

        self.statistics = Statistics(
            mean=make(0.0, size),
            var=make(1.0, size),
            seen=make(0.0),
            returns=make(0.0, num_envs),
            return_mean=make(0.0),
            return_var=make(1.0),
            returns_seen=make(0.0),
        )
        self.push(normalizer)
        normalizer.elsewhere = self

    # ------------------------------------------------------------------ pure functions
    def first(self, statistics: Statistics, observation: Tensor) -> Statistics:
        """Take in the first observations of episodes that begin in all copies.

        Args:
            statistics: before.
            observation: as the environment gave it, ``[num_envs, size]``.
        """
        seen = self._observed(statistics, observation) if self.observation else statistics
        return seen._replace(returns=torch.zeros_like(seen.returns))

    def apply(self, statistics: Statistics, observation: Tensor) -> Tensor:
        """Return an observation normalised."""
        if not self.observation:
            return observation
        scaled = (observation - statistics.mean) / (statistics.var + EPSILON).sqrt()
        return scaled.clamp(-self.clip, self.clip).to(observation.dtype)

    def step(
        self, statistics: Statistics, step: TensorStep, learn: bool
    ) -> tuple[Statistics, TensorStep]:
        """Take in a step, and normalise what it led to and its reward.

        Args:
            statistics: before.
            step: as the environment gave it; its ``observation`` and return stay as they are.
            learn: whether the statistics change.
        """
        if self.observation:
            if learn:
                statistics = self._observed(statistics, step.observation)
            step = step._replace(next_observation=self.apply(statistics, step.next_observation))
        if not self.reward:
            return statistics, step
        reward = step.reward.double()
        if learn:
            statistics = self._rewarded(statistics, reward, step.terminated | step.truncated)
        scaled = reward / (statistics.return_var + EPSILON).sqrt()
        scaled = scaled.clamp(-self.clip, self.clip).to(step.reward.dtype)
        return statistics, step._replace(reward=scaled)

    def _observed(self, statistics: Statistics, observation: Tensor) -> Statistics:
        before = (statistics.mean, statistics.var, statistics.seen)
        mean, var, seen = _merged(*before, observation)
        return statistics._replace(mean=mean, var=var, seen=seen)

    def _rewarded(self, statistics: Statistics, reward: Tensor, done: Tensor) -> Statistics:
        returns = statistics.returns * self.gamma + reward
        before = (statistics.return_mean, statistics.return_var, statistics.returns_seen)
        mean, var, seen = _merged(*before, returns)
        returns = returns.masked_fill(done, 0.0)
        return statistics._replace(
            returns=returns, return_mean=mean, return_var=var, returns_seen=seen
        )

    # ------------------------------------------------------------------ to the host and back
    def store(self, statistics: Statistics) -> None:
        """Write statistics in place."""
        for present, after in zip(self.statistics, statistics):
            present.copy_(after)

    def pull(self, normalizer: Normalizer) -> None:
        """Give a normaliser on the host these statistics; waits for the device."""
        now = [tensor.cpu().numpy().copy() for tensor in self.statistics]
        mean, var, seen, returns, return_mean, return_var, returns_seen = now
        for known in normalizer.observation.values():
            known.mean, known.var, known.count = mean, var, float(seen)
        if normalizer.reward is not None:
            known = normalizer.reward
            known.mean, known.var, known.count = return_mean, return_var, float(returns_seen)
        if len(returns) == len(normalizer.returns):
            normalizer.returns = returns

    def push(self, normalizer: Normalizer) -> None:
        """Take over the statistics of a normaliser on the host."""
        after = self.statistics._asdict()
        for known in normalizer.observation.values():
            after |= {"mean": known.mean, "var": known.var, "seen": known.count}
        if normalizer.reward is not None:
            known = normalizer.reward
            after |= {"return_mean": known.mean, "return_var": known.var}
            after["returns_seen"] = known.count
        if len(normalizer.returns) == len(self.statistics.returns):
            after["returns"] = normalizer.returns
        kind = torch.float64
        self.store(Statistics(*[torch.as_tensor(value, dtype=kind) for value in after.values()]))


def _merged(
    mean: Tensor, var: Tensor, count: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance and count with ``values``, ``[num_envs, ...]``, taken in.

    Values among which is a NaN are left out: whoever finds the NaN then finds it in its copy alone.
    """
    new_var, new_mean = torch.var_mean(values.double(), dim=0, correction=0)
    new = len(values)
    delta, total = new_mean - mean, count + new
    squares = var * count + new_var * new + delta.square() * count * new / total
    bad = new_var.isnan().any()
    return (
        torch.where(bad, mean, mean + delta * new / total),
        torch.where(bad, var, squares / total),
        torch.where(bad, count, total),
    )
