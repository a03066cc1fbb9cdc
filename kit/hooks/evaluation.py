"""Policy evaluation over complete episodes in separate environments."""

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
    """Plays complete episodes with deterministic actions and reports return statistics.

    Every environment plays a fixed number of episodes, which avoids a bias towards short episodes.
    Each evaluation seeds environments and RNG with a value derived from ``seed`` and the
    evaluation's index. Repeating an evaluation therefore gives the same result if
    ``reset(seed=...)`` determines the environment's behaviour. :meth:`state_dict` includes
    environment state that persists across episodes. Running normalisation statistics are frozen,
    and hidden state is reset at the start of each episode. The global RNG state of all devices is
    restored, so evaluations do not affect training.

    Args:
        env: evaluation environments, which are switched to evaluation mode.
        policy: policy to evaluate.
        episodes: episodes per evaluation. Defaults to the number in the trainer's plan, or to 10
            without a trainer.
        max_steps: policy steps after which an unfinished episode is truncated. The episode's return
            up to this point is reported. This bounds evaluations in environments without a time
            limit.
        seed: seed for environments and RNG.
        exploration_type: how actions are chosen; deterministic by default.
        device: device of the policy; by default the device of its parameters.
        particles: number of particles (see :class:`~kit.modules.particles.Particles`). With several
            particles, each particle's mean return and the best mean return are also logged.
        fast_policy: how the policy is executed (see :class:`~kit.collectors.KitCollector`).

    Raises:
        SettingError: if a TorchRL transform or Gymnasium wrapper would update its statistics during
            evaluations, or if ``episodes``, ``max_steps`` or ``seed`` is invalid.
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
            reason = "would update its statistics during evaluations"
            hint = "freeze it, or use make_env(normalize_observation=..., normalize_reward=...)"
            raise SettingError("evaluate", env.backend.learns, reason, hint)
        self.env = env.eval()
        self.particles = particles
        self.policy = policy
        self.follows_plan = episodes is None
        requested = 10 if episodes is None else episodes
        self.episodes = whole_number("evaluation_episodes", requested, at_least=1)
        self.max_steps = whole_number("evaluation_max_steps", max_steps, at_least=1)
        self._cut = 0  # number of truncated episodes in the last evaluation
        self.seed = whole_number("seed", seed)
        self.exploration_type = exploration_type
        self.device = _device_of(policy) if device is None else usable_device(device=device)
        self.fast_policy = fast_policy_of(fast_policy)
        how = {"exploration_type": exploration_type, "device": self.device}
        how |= {"fast_policy": self.fast_policy, "keeps_outputs": False}
        with in_training(policy, False):  # so that a GPU policy is copied in evaluation mode
            self._actor = ActionSelector(env, policy, **how)

    def __call__(self, number: int = 0) -> dict[str, float]:
        """Evaluate the policy once.

        Args:
            number: index of this evaluation within its run, starting at 0. The seed depends on it.

        Returns:
            Mean, population standard deviation, minimum and maximum of the returns, mean episode
            length in policy steps, and means of numeric ``info`` entries.
            ``evaluation/truncated_episodes`` is included if episodes were truncated after
            ``max_steps``.
        """
        episodes = self.play(number)
        columns = episode_columns(episodes, "evaluation")
        columns |= {"evaluation/truncated_episodes": self._cut} if self._cut else {}
        if self.particles > 1:
            returns: dict[int, list[float]] = {}
            for episode in episodes:
                particle = particle_of(episode.env, self.env.num_envs, self.particles)
                returns.setdefault(particle, []).append(episode.episode_return)
            means = {n: statistics.fmean(values) for n, values in sorted(returns.items())}
            columns |= {f"evaluation/return_particle_{n}": mean for n, mean in means.items()}
            columns["evaluation/return_best"] = max(means.values())
        return columns

    def play(self, number: int = 0) -> list[Episode]:
        """Play the episodes of one evaluation and return their results."""
        env = self.env
        seed = derived_seed(self.seed, number)
        env.set_seed(seed)
        schedule = _EpisodeQuota(env, self.episodes, self.max_steps)
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
            except EnvError as error:
                what, step = f"{error.what} (in an evaluation)", schedule.steps
                raise EnvError(error.name, error.env, what, step) from error
        if schedule.cut and not self._cut:
            episodes = f"{plural(schedule.cut, 'episode')} of {env.name}"
            hint = "Set env.max_episode_steps or evaluation_max_steps."
            what = f"An evaluation truncated {episodes} after {self.max_steps:,} policy steps"
            warnings.warn(f"{what}. {hint}", stacklevel=2)
        self._cut = schedule.cut
        return schedule.finished

    def again(self, *, episodes: int, seed: int, **env: Any) -> Evaluator:
        """Create an evaluator for the same policy with new environments.

        Args:
            episodes: episodes per evaluation.
            seed: seed for environments and RNG.
            **env: ``make_env`` arguments to override.

        Raises:
            SettingError: if the environments cannot be created a second time.
        """
        if self.env.make_again is None:
            reason, hint = "cannot be created a second time", "use make_env with an ID or function"
            raise SettingError("env", self.env.name, reason, hint)
        copied = self.env.make_again(**env)
        copied.normalizer = self.env.normalizer
        names = ("max_steps", "exploration_type", "device", "particles", "fast_policy")
        same = {name: getattr(self, name) for name in names}
        return Evaluator(copied, self.policy, episodes=episodes, seed=seed, **same)

    @property
    def faults(self) -> int:
        """Number of environment failures that evaluations have recovered from."""
        return int(self.env.backend.faults)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the environments. Warn once if it cannot be captured."""
        known = self.env.not_resumable
        # The normalizer is saved with the training environments.
        state = {**self.env.full_state(), "normalizer": None}
        if state["not_resumable"] and not known:
            what = "Checkpoints do not contain the state of the evaluation environments"
            then = "In a resumed run, state that persists across episodes starts from scratch."
            warnings.warn(f"{what}: {state['not_resumable']}. {then}", stacklevel=2)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self.env.load_full_state(state_dict)

    def close(self) -> None:
        """Close the environments."""
        self.env.close(raise_if_closed=False)


def _memory(env: VectorEnv) -> RolloutBuffer:
    """Create a reusable rollout buffer with a number of rows chosen to fit CPU caches."""
    row = sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in env.observation_leaves)
    return RolloutBuffer(env, min(SMALL // (row * env.num_envs) + 1, CHUNK))


class _EpisodeQuota(ActiveEnvs):
    """Steps the environments until each has played its quota of episodes."""

    def __init__(self, env: VectorEnv, episodes: int, max_steps: int) -> None:
        super().__init__(env.num_envs)
        self.cut = 0  # number of truncated episodes
        self.room = self._max_steps = max_steps  # policy steps until an episode is truncated
        self._env = env
        self.steps = 0  # policy steps taken in each environment
        self.finished: list[Episode] = []
        self._statistics = EpisodeStatistics(self.num_envs)
        self._left = np.full(self.num_envs, episodes // self.num_envs)
        self._left[: episodes % self.num_envs] += 1
        self._quotas = self._left.tolist()  # episodes per environment that remain to be counted

    def stepped(self, result: StepArrays) -> None:
        """Update the number of episodes that each environment still has to play.

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
        """Count the episodes that ended since the last call.

        Args:
            buffer: buffer whose first rows contain the new steps.
            steps: number of these rows, including unwritten rows after the last episode.
        """
        # Unwritten rows contain no episode ends.
        reward, terminated, truncated, env_steps = buffer.whole.counted
        flags, made = (terminated[:steps], truncated[:steps]), env_steps[:steps]
        infos = self._env.take_infos()
        self._add(self._statistics.add(reward[:steps], *flags, made, infos))
        self._set_room()

    def cut_longest(self) -> Mask | None:
        """Truncate episodes at the maximum length; return a mask of the affected environments."""
        if self.room > 0 or self.done:
            return None
        longest = (self._statistics.lengths >= self._max_steps) & (np.array(self._quotas) > 0)
        self._add(found := self._statistics.cut(longest))
        self.cut += len(found)
        self._statistics.restart(longest)
        self._left -= longest
        self.done = self._left.max() <= 0
        self._set_room()
        return longest

    def _add(self, episodes: list[Episode]) -> None:
        for episode in episodes:
            if self._quotas[episode.env]:
                self._quotas[episode.env] -= 1
                self.finished.append(episode)

    def _set_room(self) -> None:
        lengths = self._statistics.lengths[np.array(self._quotas) > 0]
        self.room = self._max_steps - int(lengths.max(initial=0))


def _device_of(policy: object) -> torch.device:
    """Return the device of a policy's parameters, or the CPU if the policy has no parameters."""
    parameters = policy.parameters() if isinstance(policy, nn.Module) else iter(())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
