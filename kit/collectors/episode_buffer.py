"""Buffer for batches of complete episodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from kit.collectors.policy import Tensors
from kit.collectors.rollout_buffer import CHUNK, RolloutBuffer, Row, first_infinite
from kit.envs.episodes import Episode
from kit.envs.errors import EnvError
from kit.envs.spaces import Arrays, path_of
from kit.envs.vector_env import VectorEnv


@dataclass
class Span:
    """An episode's location in the buffer."""

    env: int
    start: int
    end: int = 0
    """Index of the time step after the episode's last step; 0 while the episode is open."""

    @property
    def steps(self) -> slice:
        """Slice that selects a finished episode's time steps."""
        return slice(self.start, self.end)


class EpisodeBuffer:
    """Buffer that grows while episodes are collected.

    Args:
        env: environments whose observations and rewards are stored.

    Attributes:
        steps: number of time steps so far.
    """

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        self.steps = 0
        self._chunks: list[RolloutBuffer] = []

    def rows(self) -> Iterator[Row]:
        """Yield one buffer row per time step, indefinitely."""
        while True:
            chunk = RolloutBuffer(self.env, CHUNK)
            chunk.begin()
            self._chunks.append(chunk)
            for row in chunk.rows:
                self.steps += 1
                yield row

    def _whole(self, name: str) -> NDArray[Any]:
        """Return a field of :class:`StepArrays` for all time steps, ``[steps, num_envs, ...]``."""
        return self._joined([getattr(chunk.whole, name) for chunk in self._chunks])

    def _joined(self, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return (parts[0] if len(parts) == 1 else np.concatenate(parts))[: self.steps]

    def acted_on(self) -> Arrays:
        """Return the observations that the policy acted on, ``[steps, num_envs, ...]``."""
        keys = self._chunks[0].acted_on
        return {key: self._joined([c.acted_on[key] for c in self._chunks]) for key in keys}

    def _following(self) -> Arrays:
        """Return the observations after each step, ``[steps, num_envs, ...]``."""
        chunks = [chunk.whole.next_observation for chunk in self._chunks]
        return {key: self._joined([chunk[key] for chunk in chunks]) for key in chunks[0]}

    def episodes(self, spans: Sequence[Span]) -> list[Episode]:
        """Return the statistics of each episode in the batch."""
        rewards = self._whole("raw_reward" if self.env.needs_raw_reward else "reward")
        env_steps, terminated = self._whole("env_steps"), self._whole("terminated")
        infos = self.env.take_infos()
        return [
            Episode(
                env=span.env,
                episode_return=float(rewards[span.steps, span.env].sum(dtype=np.float64)),
                length=span.end - span.start,
                env_steps=int(env_steps[span.steps, span.env].sum()),
                terminated=bool(terminated[span.end - 1, span.env]),
                info=infos.get((span.end - 1, span.env), {}),
            )
            for span in spans
        ]

    def check_finite(self, name: str, spans: Sequence[Span]) -> None:
        """Raise an error for the first infinite or NaN value.

        Raises:
            EnvError: if an observation or reward of an episode is infinite or NaN.
        """
        observations = (*self._following().items(), *self.acted_on().items())
        for what, values in (("reward", self._whole("reward")), *observations):
            if first_infinite(values) is None:  # idle environments may contain NaN
                continue
            for span in spans:
                found = first_infinite(values[span.steps, span.env, None])
                if found is not None:
                    step, _, value = found
                    text = f"returned {value} as {what}, {step} policy steps into its episode"
                    raise EnvError(name, span.env, text)

    def tensordict(
        self, spans: Sequence[Span], outputs: Tensors, layout: str, first: int
    ) -> TensorDictBase:
        """Return the episodes as a batch.

        Args:
            spans: buffer locations of the episodes.
            outputs: policy outputs ``[num_envs, steps, ...]``.
            layout: ``padded`` or ``flat``.
            first: value of ``traj_ids`` in the first episode.
        """
        place = _Places(spans, layout)
        batch = TensorDict({}, place.numbers.shape)
        seen, following = self.acted_on(), self._following()
        for key in seen:
            batch[key] = place.of(torch.from_numpy(seen[key]))
            batch[("next", *path_of(key))] = place.of(torch.from_numpy(following[key]))
        for name in ("reward", "terminated", "truncated"):
            batch["next", name] = place.of(torch.from_numpy(self._whole(name))).unsqueeze(-1)
        batch["next", "done"] = batch["next", "terminated"] | batch["next", "truncated"]
        for key, value in outputs.items():
            batch[key] = place.of(value.transpose(0, 1))
        batch["collector", "traj_ids"] = place.numbers + first
        if place.mask is not None:
            batch["collector", "mask"] = place.mask
        return batch


class _Places:
    """Indices that copy steps from the buffer into the layout of an episode batch."""

    def __init__(self, spans: Sequence[Span], layout: str) -> None:
        lengths = torch.tensor([span.end - span.start for span in spans])
        starts = torch.tensor([span.start for span in spans])
        envs = torch.tensor([span.env for span in spans])
        offsets = torch.arange(int(lengths.max())).expand(len(spans), -1)
        mask = offsets < lengths.unsqueeze(-1)
        numbers = torch.arange(len(spans)).unsqueeze(-1).expand_as(mask)
        steps = torch.where(mask, starts.unsqueeze(-1) + offsets, 0)
        envs = envs.unsqueeze(-1).expand_as(mask)
        self.mask: Tensor | None = mask if layout == "padded" else None
        if self.mask is None:
            numbers, steps, envs = numbers[mask], steps[mask], envs[mask]
        self.numbers, self._steps, self._envs = numbers.clone(), steps, envs

    def of(self, values: Tensor) -> Tensor:
        """Arrange values ``[steps, num_envs, ...]`` in the layout of the batch. Padding is zero."""
        device = values.device
        picked = values[self._steps.to(device), self._envs.to(device)]
        if self.mask is not None:
            picked[~self.mask.to(device)] = 0
        return picked
