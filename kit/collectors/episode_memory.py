"""The memory of whole episodes, which grows as they are played."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from kit.collectors.memory import BatchMemory
from kit.collectors.policy import Tensors
from kit.collectors.stretches import OpenNumpyStretch, tensors_of_steps
from kit.envs.backends.base import StepArrays
from kit.envs.episodes import Episode
from kit.envs.errors import EnvironmentFault
from kit.envs.spaces import Arrays, Key
from kit.envs.vector_env import VectorEnv

CHUNK = 128
"""Steps by which the memory grows."""


@dataclass
class Span:
    """Where an episode is in the memory: in which copy, and from which step to which."""

    copy: int
    start: int
    end: int = 0
    """step after its last one; 0 while it is open."""

    @property
    def steps(self) -> slice:
        """Its steps, once it has ended."""
        return slice(self.start, self.end)


class _Chunk:
    """A few steps of all copies, and what the policy wrote in them.

    Args:
        env: whose steps they are.
        stretch: makes the policy's operations; ``None``: somebody calls it.
    """

    def __init__(self, env: VectorEnv, stretch: OpenNumpyStretch | None) -> None:
        self.memory, self.stretch = BatchMemory(env, CHUNK), stretch
        self.memory.begin(env.start())
        acted_on = self.memory.acted_on(0, CHUNK)
        self.rows = self.memory.results(0, CHUNK).rows()
        self.outputs: list[Sequence[Tensor]] = []
        self.observations: Iterator[Tensors] = iter(())
        self.actions: Iterator[Arrays] = iter(())
        if stretch is None:
            self.observations = tensors_of_steps(acted_on)
        else:
            stretch.begin(acted_on)
            self.actions = iter(stretch)

    def end(self) -> None:
        """No further step comes."""
        if self.stretch is not None:
            self.stretch.end()

    def value(self, number: int, key: Key) -> Tensor:
        """Return what the policy wrote under ``key``, the ``number``-th of its outputs."""
        if self.stretch is None:
            return torch.stack([outputs[number] for outputs in self.outputs])
        value = self.stretch.value(key)
        assert value is not None
        return value


class EpisodeMemory:
    """What environments and policy write while episodes are played, time first.

    Args:
        env: whose episodes they are.
        stretch: returns who makes the policy's operations in the next :data:`CHUNK` steps;
            ``None``: somebody calls it, step by step.

    Attributes:
        steps: written so far, of each copy.
    """

    def __init__(self, env: VectorEnv, stretch: Callable[[], OpenNumpyStretch | None]) -> None:
        self.env = env
        self.steps = 0
        self._stretch = stretch
        self._chunks: list[_Chunk] = []

    def next_row(self) -> StepArrays:
        """Return where the next step writes."""
        if self.steps % CHUNK == 0:
            self.end()
            self._chunks.append(_Chunk(self.env, self._stretch()))
        self.steps += 1
        return next(self._chunks[-1].rows)

    def actions(self) -> Arrays | None:
        """Return the actions of the next step; ``None``: the policy has to be called."""
        return next(self._chunks[-1].actions, None)

    def observation(self) -> Tensors:
        """Return what the next step acts on, where the policy has to be called."""
        return next(self._chunks[-1].observations)

    def keep(self, outputs: Sequence[Tensor]) -> None:
        """Keep what the policy wrote in this step."""
        self._chunks[-1].outputs.append(outputs)

    def end(self) -> None:
        """No further step comes, for the time being."""
        if self._chunks:
            self._chunks[-1].end()

    def _whole(self, name: str, key: Key | None = None) -> NDArray[Any]:
        """Return an array of all steps, ``[steps, num_envs, ...]``."""
        arrays = [getattr(chunk.memory, name) for chunk in self._chunks]
        if key is not None:
            arrays = [of_key[key] for of_key in arrays]
        return np.concatenate([array[:CHUNK] for array in arrays])[: self.steps]

    def written(self, keys: Sequence[Key]) -> Tensors:
        """Return what the policy wrote, ``[num_envs, steps, ...]``.

        Args:
            keys: of all that it wrote.
        """
        whole: Tensors = {}
        for number, key in enumerate(keys):
            parts = [chunk.value(number, key) for chunk in self._chunks]
            whole[key] = torch.cat(parts).transpose(0, 1)
        return whole

    def seen(self) -> Tensors:
        """Return what was acted on, ``[num_envs, steps, ...]``."""
        arrays = {
            leaf.key: self._whole("observation", leaf.key) for leaf in self.env.observation_leaves
        }
        return {key: torch.from_numpy(array).transpose(0, 1) for key, array in arrays.items()}

    def episodes(self, spans: list[Span]) -> list[Episode]:
        """Return what is reported of episodes."""
        raw = "raw_reward" if self.env.needs_raw_reward else "reward"
        rewards, env_steps = self._whole(raw), self._whole("env_steps")
        terminated = self._whole("terminated")
        return [
            Episode(
                copy=span.copy,
                episode_return=float(rewards[span.steps, span.copy].sum(dtype=np.float64)),
                length=span.end - span.start,
                env_steps=int(env_steps[span.steps, span.copy].sum()),
                terminated=bool(terminated[span.end - 1, span.copy]),
            )
            for span in spans
        ]

    def check_finite(self, name: str, spans: list[Span]) -> None:
        """Refuse NaN, naming the copy and the step.

        Raises:
            EnvironmentFault: if an observation or reward of an episode is NaN.
        """
        arrays = {"reward": self._whole("reward")}
        for leaf in self.env.observation_leaves:
            if leaf.dtype.kind == "f":
                arrays[str(leaf.key)] = self._whole("next_observation", leaf.key)
        for what, values in arrays.items():
            if not np.isnan(values.sum()):
                continue
            for span in spans:
                found = np.argwhere(np.isnan(values[span.steps, span.copy]))
                if len(found):
                    text = f"returned NaN as {what}, {found[0][0]} policy steps into its episode"
                    raise EnvironmentFault(name, span.copy, text)

    def tensordict(
        self, spans: list[Span], written: Tensors, layout: str, first: int
    ) -> TensorDictBase:
        """Return the episodes as a batch.

        Args:
            spans: where they are.
            written: by the policy, ``[num_envs, steps, ...]``.
            layout: ``padded`` or ``flat``.
            first: number of the first episode.
        """
        place = _Places(spans, layout)
        root: dict[Any, Tensor] = {}
        following: dict[Any, Tensor] = {}
        for leaf in self.env.observation_leaves:
            key = leaf.key
            root[key] = place.of(self._whole("observation", key))
            following[key] = place.of(self._whole("next_observation", key))
        for key, given in written.items():
            value = place.of(given.transpose(0, 1))
            if isinstance(key, tuple) and key[0] == "next":
                following[key[1] if len(key) == 2 else key[1:]] = value
            else:
                root[key] = value
        for name in ("reward", "terminated", "truncated"):
            following[name] = place.of(self._whole(name)).unsqueeze(-1)
        following["done"] = following["terminated"] | following["truncated"]
        root[("collector", "traj_ids")] = place.numbers + first
        if place.mask is not None:
            root[("collector", "mask")] = place.mask
        shape = place.numbers.shape
        return TensorDict({**root, "next": TensorDict(following, shape)}, shape)


class _Places:
    """Which step of which copy is where in a batch of episodes."""

    def __init__(self, spans: list[Span], layout: str) -> None:
        lengths = torch.tensor([span.end - span.start for span in spans])
        starts = torch.tensor([span.start for span in spans])
        copies = torch.tensor([span.copy for span in spans])
        offsets = torch.arange(int(lengths.max())).expand(len(spans), -1)
        mask = offsets < lengths.unsqueeze(-1)
        numbers = torch.arange(len(spans)).unsqueeze(-1).expand_as(mask)
        steps = torch.where(mask, starts.unsqueeze(-1) + offsets, 0)
        copies = copies.unsqueeze(-1).expand_as(mask)
        self.mask: Tensor | None = mask if layout == "padded" else None
        if self.mask is None:
            numbers, steps, copies = numbers[mask], steps[mask], copies[mask]
        self.numbers, self._steps, self._copies = numbers.clone(), steps, copies

    def of(self, values: NDArray[Any] | Tensor) -> Tensor:
        """Pick from values ``[steps, num_envs, ...]``; zero in the padding."""
        tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
        device = tensor.device
        picked = tensor[self._steps.to(device), self._copies.to(device)]
        if self.mask is not None:
            picked[~self.mask.to(device)] = 0
        return picked
