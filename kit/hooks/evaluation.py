"""Measuring a policy: whole episodes in environments of its own."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.envs.utils import ExplorationType

from kit.collectors.actor import ActionSelector
from kit.collectors.base import RNGStream
from kit.collectors.policy import FastPolicy, fast_policy_of
from kit.collectors.rollout import ActiveEnvs, rollout
from kit.collectors.rollout_buffer import CHUNK, SMALL, RolloutBuffer, first_infinite
from kit.config.devices import usable_device
from kit.envs.backends.base import Mask, StepArrays, derived_seed
from kit.envs.episodes import Episode, EpisodeStatistics
from kit.envs.errors import EnvError
from kit.envs.vector_env import VectorEnv
from kit.logging.metrics_recorder import episode_columns
from kit.modules.layers import in_training
from kit.modules.particles import particle_of
from kit.steps.errors import SettingError, whole_number
from kit.steps.table import plural


class Evaluator:
    """Plays whole episodes with deterministic actions and returns their mean and spread.

    Every environment plays its share of the episodes, whether they are short or long, so short ones
    are not preferred. Environments and random numbers are seeded again for every evaluation, from
    ``seed`` and its number: the same policy gives the same result where ``reset(seed=...)`` decides
    all that an environment does. What it keeps over episodes is part of :meth:`state_dict`.
    Running normalisation is frozen, hidden state is reset where an episode begins. Training is not
    disturbed: random numbers of all devices stay as they are.

    Args:
        env: environments of its own, in evaluation mode from now on.
        policy: the one to measure.
        episodes: played in one evaluation; ``None``: as many as the plan of the trainer says, or 10
            without a trainer.
        max_steps: policy steps after which an episode that has not ended is cut; its return so far
            counts. Without a limit, an evaluation in an environment without one might never end.
        seed: of the environments.
        exploration_type: whether actions are sampled; by default they are not.
        device: where the policy runs; that of its parameters by default.
        particles: of the policy, see :class:`~kit.modules.particles.Particles`; the mean return of
            each and the best of these are columns of their own, where there are several.
        fast_policy: how the policy is called, see :class:`~kit.collectors.KitCollector`.

    Raises:
        SettingError: if a transform of TorchRL or a wrapper of Gymnasium would go on learning in
            evaluations, or there is no such number of episodes or seed.
    """

    def __init__(
        self,
        env: VectorEnv,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        episodes: int | None = None,
        max_steps: int = 100_000,
        seed: int = 0,
        exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
        device: torch.device | str | None = None,
        particles: int = 1,
        fast_policy: FastPolicy | bool = "auto",
    ) -> None:
        if env.backend.learns is not None:
            why = "would learn in evaluations, whose statistics are not those of training"
            works = (
                "freeze() it, or use normalize_observation and normalize_reward of make_env(...)"
            )
            raise SettingError("evaluate", env.backend.learns, why, works)
        self.env = env.eval()
        self.particles = particles
        self.policy = policy
        self.follows_plan = episodes is None
        given = 10 if episodes is None else episodes
        self.episodes = whole_number("evaluation_episodes", given, at_least=1)
        self.max_steps = whole_number("evaluation_max_steps", max_steps, at_least=1)
        self._cut = 0  # episodes of the last evaluation
        self.seed = whole_number("seed", seed)
        self.exploration_type = exploration_type
        self.device = _device_of(policy) if device is None else usable_device(device=device)
        self.fast_policy = fast_policy_of(fast_policy)
        how = {"exploration_type": exploration_type, "device": self.device}
        how |= {"fast_policy": self.fast_policy, "keeps_outputs": False}
        with in_training(policy, False):  # it is copied from a GPU as it is called
            self._actor = ActionSelector(env, policy, **how)

    def __call__(self, number: int = 0) -> dict[str, float]:
        """Evaluate once.

        Args:
            number: of this evaluation in its run, from 0; part of the seed.

        Returns:
            Mean, spread (population standard deviation), least and greatest return, mean length in
            policy steps, and the means of the numbers in ``info``. If episodes were cut after
            ``max_steps``, ``evaluation/truncated_episodes`` is their number.
        """
        episodes = self.play(number)
        columns = episode_columns(episodes, "evaluation")
        columns |= {"evaluation/truncated_episodes": self._cut} if self._cut else {}
        if self.particles > 1:
            returns: dict[int, list[float]] = {}
            for episode in episodes:
                particle = particle_of(episode.env, self.env.num_envs, self.particles)
                returns.setdefault(particle, []).append(episode.episode_return)
            means = {n: statistics.fmean(own) for n, own in sorted(returns.items())}
            columns |= {f"evaluation/return_particle_{n}": mean for n, mean in means.items()}
            columns["evaluation/return_best"] = max(means.values())
        return columns

    def play(self, number: int = 0) -> list[Episode]:
        """Play the episodes of one evaluation and return them."""
        env = self.env
        seed = derived_seed(self.seed, number)
        env.set_seed(seed)
        schedule = _Shares(env, self.episodes, self.max_steps)
        self._actor.restart()
        self._actor.seeded()
        buffer, numbers = _memory(env), RNGStream(seed, self.device)
        with numbers, in_training(self.policy, False):
            self._actor.prepare()
            try:
                while not schedule.done:
                    buffer.begin(shown=True)
                    steps = min(buffer.steps, schedule.room)
                    with self._actor.begin(steps=steps):
                        rollout(env, self._actor, islice(buffer.rows, steps), schedule)
                    schedule.count(buffer, steps)
                    if (longest := schedule.cut_longest()) is not None:
                        env.restart(longest)
                        self._actor.end_episodes(longest)
            except EnvError as fault:
                what, step = f"{fault.what} (in an evaluation)", schedule.steps
                raise EnvError(fault.name, fault.env, what, step) from fault
        if schedule.cut and not self._cut:
            what = f"cut {plural(schedule.cut, 'episode')} of {env.name} after {self.max_steps:,}"
            works = "set env.max_episode_steps or evaluation_max_steps"
            warnings.warn(f"an evaluation {what} policy steps; {works}", stacklevel=2)
        self._cut = schedule.cut
        return schedule.finished

    def again(self, *, episodes: int, seed: int, **env: Any) -> Evaluator:
        """Make an evaluator of the same policy, in other environments.

        Args:
            episodes: played in one evaluation.
            seed: of the environments.
            **env: arguments of ``make_env`` that differ.

        Raises:
            SettingError: if environments like those of this one cannot be made.
        """
        if self.env.make_again is None:
            why, works = "cannot be made a second time", "make it by make_env(id or function)"
            raise SettingError("env", self.env.name, why, works)
        made = self.env.make_again(**env)
        made.normalizer = self.env.normalizer
        names = ("max_steps", "exploration_type", "device", "particles", "fast_policy")
        same = {name: getattr(self, name) for name in names}
        return Evaluator(made, self.policy, episodes=episodes, seed=seed, **same)

    @property
    def faults(self) -> int:
        """Faults of environments recovered from so far."""
        return int(self.env.backend.faults)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the environments; warn once if it cannot be captured."""
        known = self.env.not_resumable
        state = {**self.env.full_state(), "normalizer": None}  # the training environments save it
        if state["not_resumable"] and not known:
            what = "the state of the environments of evaluations is not in checkpoints"
            then = "what they keep over episodes begins anew in a resumed run"
            warnings.warn(f"{what}: {state['not_resumable']}; {then}", stacklevel=2)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.env.load_full_state(state_dict)

    def close(self) -> None:
        """Close the environments."""
        self.env.close(raise_if_closed=False)


def _memory(env: VectorEnv) -> RolloutBuffer:
    """Memory of some time steps, which is used again; of images few, that it stays in caches."""
    row = sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in env.observation_leaves)
    return RolloutBuffer(env, min(SMALL // (row * env.num_envs) + 1, CHUNK))


class _Shares(ActiveEnvs):
    """Every environment steps until all have played their share of the episodes."""

    def __init__(self, env: VectorEnv, episodes: int, max_steps: int) -> None:
        super().__init__(env.num_envs)
        self.cut = 0  # episodes
        self.room = self._max_steps = max_steps  # policy steps until the longest episode is cut
        self._env = env
        self.steps = 0  # of each environment
        self.finished: list[Episode] = []
        self._statistics = EpisodeStatistics(self.num_envs)
        self._left = np.full(self.num_envs, episodes // self.num_envs)
        self._left[: episodes % self.num_envs] += 1
        self._shares = self._left.tolist()  # of what is not counted

    def stepped(self, result: StepArrays) -> None:
        """Note whether all have played their share.

        Raises:
            EnvError: if a reward or an observation is infinite or NaN.
        """
        for what, values in (("reward", result.reward), *result.next_observation.items()):
            found = first_infinite(values[None])
            if found is not None:
                text = f"returned {found[2]} as {what}"
                raise EnvError(self._env.name, found[1], text)
        self.steps += 1
        self._left -= result.terminated | result.truncated
        self.done = self._left.max() <= 0

    def count(self, buffer: RolloutBuffer, steps: int) -> None:
        """Take in the episodes that ended in the steps since the last call.

        Args:
            buffer: where these are, from its first row on.
            steps: its rows that were to be written.
        """
        # No episode ends in rows that are left over where all have played their share.
        reward, terminated, truncated, env_steps = buffer.whole.counted
        flags, made = (terminated[:steps], truncated[:steps]), env_steps[:steps]
        infos = self._env.take_infos()
        self._add(self._statistics.add(reward[:steps], *flags, made, infos))
        self._set_room()

    def cut_longest(self) -> Mask | None:
        """Count the episodes that are as long as they may be; return their environments."""
        if self.room > 0 or self.done:
            return None
        longest = (self._statistics.lengths >= self._max_steps) & (np.array(self._shares) > 0)
        self._add(found := self._statistics.cut(longest))
        self.cut += len(found)
        self._statistics.restart(longest)
        self._left -= longest
        self.done = self._left.max() <= 0
        self._set_room()
        return longest

    def _add(self, episodes: list[Episode]) -> None:
        for episode in episodes:
            if self._shares[episode.env]:
                self._shares[episode.env] -= 1
                self.finished.append(episode)

    def _set_room(self) -> None:
        lengths = self._statistics.lengths[np.array(self._shares) > 0]
        self.room = self._max_steps - int(lengths.max(initial=0))


def _device_of(policy: object) -> torch.device:
    """The device of a policy's parameters, the CPU if it has none."""
    parameters = policy.parameters() if isinstance(policy, nn.Module) else iter(())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
