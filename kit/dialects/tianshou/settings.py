"""The words of tianshou (https://github.com/thu-ml/tianshou).

Its unit is the environment step of one copy, which is the policy step here. A training step, the
iteration here, collects ``c = ceil(step_per_collect / m) * m`` of them with ``m`` copies. An epoch
is a reporting period: as many training steps as reach ``step_per_epoch``, then a test.
``Tianshou`` speaks with the names of 1.x (``SamplingConfig``), ``Tianshou2`` with those of 2.x.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from kit.dialects.base import OFF_POLICY, OFFLINE, ON_POLICY, Dialect
from kit.dialects.tianshou.counting import Sampling, sampling_from
from kit.steps.errors import SettingError, whole_number, yes_or_no
from kit.steps.plan import StepPlan

_ALGORITHMS = {
    **dict.fromkeys(("ppo", "a2c", "reinforce", "npg", "trpo", "gail"), ON_POLICY),
    **dict.fromkeys(("sac", "dqn", "td3", "ddpg", "discrete_sac", "redq", "iqn"), OFF_POLICY),
    **dict.fromkeys(("c51", "rainbow", "qrdqn", "fqf", "bdqn"), OFF_POLICY),
    **dict.fromkeys(("bcq", "cql", "td3_bc", "discrete_cql", "discrete_bcq"), OFFLINE),
    **dict.fromkeys(("discrete_crr", "imitation"), OFFLINE),
}
_ALIASES = {"pg": "reinforce", "bdq": "bdqn", "branchingdqn": "bdqn", "rainbowdqn": "rainbow"}


class _Tianshou(Dialect):
    """What both generations of names have in common."""

    LIBRARY: ClassVar[str] = "tianshou"
    ALGORITHMS: ClassVar[Mapping[str, str]] = _ALGORITHMS
    ALIASES: ClassVar[Mapping[str, str]] = _ALIASES

    def sampling(self) -> Sampling:
        """Return the resolved settings in words of neither generation."""
        raise NotImplementedError

    def _plan(self) -> StepPlan:
        return self.sampling().plan()

    def notes(self) -> list[str]:
        """Return what a reader of these settings would not expect, a sentence each."""
        return self.resolved().sampling().notes()

    def buffer_capacity(self) -> int:
        """Transitions that the replay buffer holds: equally many of each copy."""
        return self.resolved().sampling().capacity


@dataclass
class Tianshou(_Tianshou):
    """``SamplingConfig`` of tianshou 1.x, field by field."""

    NAME: ClassVar[str] = "tianshou"
    VERSIONS: ClassVar[Mapping[str, str]] = {
        "1.1.0": "the code of 1.1.0; two tests before training, and num_epochs=0 runs one epoch",
        "documented": "SamplingConfig as it reads: no test before training, halves are rounded up, "
        "on-policy updates see the preceding collection only, the last minibatch is smaller",
    }
    MEANS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "repeat_per_collect": (ON_POLICY,),
        "update_per_step": (OFF_POLICY,),
        "step_per_collect": (ON_POLICY, OFF_POLICY),
        "start_timesteps": (ON_POLICY, OFF_POLICY),
        "start_timesteps_random": (ON_POLICY, OFF_POLICY),
    }
    AT_LEAST: ClassVar[Mapping[str, int]] = {
        "num_epochs": 0,
        "step_per_epoch": 1,
        "batch_size": 1,
        "num_train_envs": 1,
        "num_test_envs": 1,
        "num_test_episodes": 1,
        "buffer_size": 1,
        "step_per_collect": 1,
        "start_timesteps": 0,
        "replay_buffer_stack_num": 1,
    }
    CARRIED: ClassVar[frozenset[str]] = frozenset(
        {"train_seed", "num_test_envs", "buffer_size", "replay_buffer_ignore_obs_next"}
        | {"replay_buffer_save_only_last_obs", "replay_buffer_stack_num"}
    )

    SECTIONS: ClassVar[frozenset[str]] = frozenset({"", "sampling_config", "sampling"})

    num_epochs: int = 100
    """epochs of training, each of as many training steps as reach ``step_per_epoch``, and a test;
    the run has ``num_epochs * ceil(step_per_epoch / c) * c`` environment steps."""
    step_per_epoch: int = 30000
    """environment steps of one epoch, rounded up to whole training steps."""
    batch_size: int | None = 64
    """transitions in a minibatch; ``None``: all of the buffer."""
    num_train_envs: int = -1
    """training environments; -1: as many as the machine has CPUs."""
    train_seed: int = 42
    """seed of the training environments."""
    num_test_envs: int = 1
    """test environments."""
    num_test_episodes: int = 1
    """episodes of one test, over all test environments."""
    buffer_size: int = 4096
    """transitions in the replay buffer, rounded up to equally many of each environment."""
    step_per_collect: int = 2048
    """environment steps collected in one training step, rounded up to equally many of each."""
    repeat_per_collect: int | None = 1
    """passes over the collected batch (on-policy)."""
    update_per_step: float = 1.0
    """gradient steps per collected step (off-policy): ``round(update_per_step * c)`` in each
    training step, where a half goes to the even number and 0 is an error."""
    start_timesteps: int = 0
    """environment steps collected before training, outside of every epoch."""
    start_timesteps_random: bool = False
    """whether these have random actions."""
    replay_buffer_ignore_obs_next: bool = False
    """whether the buffer does not store next observations."""
    replay_buffer_save_only_last_obs: bool = False
    """whether the buffer stores only the last of stacked frames."""
    replay_buffer_stack_num: int = 1
    """frames that the buffer stacks into one observation."""
    version: str = field(default="1.1.0", kw_only=True)
    """behaviour that is meant; see ``VERSIONS``."""

    def __post_init__(self) -> None:
        if self.num_train_envs == -1:
            self.num_train_envs = os.cpu_count() or 1

    @property
    def test_seed(self) -> int:
        """Seed of the test environments."""
        return self.train_seed + self.num_train_envs

    def _guess(self) -> str:
        off_policy = self.update_per_step != 1.0 or self.repeat_per_collect is None
        return OFF_POLICY if off_policy or self.start_timesteps_random is True else ON_POLICY

    def sampling(self) -> Sampling:
        """Return the resolved settings in words of neither generation."""
        yes_or_no("start_timesteps_random", self.start_timesteps_random)
        if self.family == ON_POLICY:
            whole_number("repeat_per_collect", self.repeat_per_collect)
        return Sampling(
            names=self,
            family=self.family,
            version=self.version,
            epochs=self.num_epochs,
            epoch_steps=self.step_per_epoch,
            envs=self.num_train_envs,
            collect=self.step_per_collect,
            batch_size=self.batch_size,
            repeat=self.repeat_per_collect,
            per_sample=("update_per_step", self.update_per_step),
            start=self.start_timesteps,
            start_random=self.start_timesteps_random,
            test_episodes=self.num_test_episodes,
            buffer=self.buffer_size,
        )

    @classmethod
    def _from(cls, plan: StepPlan, settings: Mapping[str, Any]) -> Self:
        made = sampling_from(plan, settings.get("algo"))
        return cls(
            algo=made.family,
            num_epochs=made.epochs,
            step_per_epoch=made.epoch_steps,
            batch_size=made.batch_size,
            num_train_envs=made.envs,
            num_test_episodes=made.test_episodes,
            buffer_size=made.buffer,
            step_per_collect=made.collect or 1,
            repeat_per_collect=made.repeat,
            update_per_step=made.per_sample[1],
            start_timesteps=made.start,
            start_timesteps_random=made.start_random,
        )


@dataclass
class Tianshou2(_Tianshou):
    """``OnPolicyTrainingConfig`` and ``OffPolicyTrainingConfig`` of tianshou 2.x in one."""

    NAME: ClassVar[str] = "tianshou2"
    VERSIONS: ClassVar[Mapping[str, str]] = {
        "2.0.1": "the code of 2.0.1; one test before training",
        "documented": "the configuration classes as they read: no test before training, halves are "
        "rounded up, episodes can be collected, the last minibatch is smaller",
    }
    MEANS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "update_step_num_repetitions": (ON_POLICY,),
        "update_step_num_gradient_steps_per_sample": (OFF_POLICY,),
        **dict.fromkeys(
            (
                "collection_step_num_env_steps",
                "collection_step_num_episodes",
                "test_in_training",
                "start_timesteps",
                "start_timesteps_random",
            ),
            (ON_POLICY, OFF_POLICY),
        ),
    }
    AT_LEAST: ClassVar[Mapping[str, int]] = {
        "max_epochs": 0,
        "epoch_num_steps": 1,
        "num_training_envs": 1,
        "num_test_envs": 1,
        "test_step_num_episodes": 0,
        "buffer_size": 1,
        "batch_size": 1,
        "start_timesteps": 0,
        "update_step_num_repetitions": 0,
        "collection_step_num_episodes": 1,
        "episode_length": 1,
        "replay_buffer_stack_num": 1,
    }
    CARRIED: ClassVar[frozenset[str]] = frozenset(
        {"num_test_envs", "buffer_size", "test_in_training", "replay_buffer_ignore_obs_next"}
        | {"replay_buffer_save_only_last_obs", "replay_buffer_stack_num"}
    )
    FACTS: ClassVar[frozenset[str]] = Dialect.FACTS | {"episode_length"}

    SECTIONS: ClassVar[frozenset[str]] = frozenset({"", "training_config", "training"})

    max_epochs: int = 100
    """epochs of training (``num_epochs`` of 1.x)."""
    epoch_num_steps: int = 30000
    """environment steps of one epoch, rounded up to whole training steps."""
    num_training_envs: int = -1
    """training environments; -1: as many as the machine has CPUs."""
    num_test_envs: int = 1
    """test environments."""
    test_step_num_episodes: int = -1
    """episodes of one test; -1: one for each test environment; 0: none, where the code fails."""
    buffer_size: int = 4096
    """transitions in the replay buffer, rounded up to equally many of each environment."""
    collection_step_num_env_steps: int | None = 2048
    """environment steps collected in one training step, rounded up to equally many of each."""
    collection_step_num_episodes: int | None = None
    """episodes collected in one training step, in place of steps; the code never forwards it, and
    fails."""
    start_timesteps: int = 0
    """environment steps collected before training, outside of every epoch."""
    start_timesteps_random: bool = False
    """whether these have random actions."""
    replay_buffer_ignore_obs_next: bool = False
    """whether the buffer does not store next observations."""
    replay_buffer_save_only_last_obs: bool = False
    """whether the buffer stores only the last of stacked frames."""
    replay_buffer_stack_num: int = 1
    """frames that the buffer stacks into one observation."""
    test_in_training: bool = False
    """whether a stop criterion met in training leads to a test."""
    batch_size: int | None = 64
    """transitions in a minibatch; ``None``: all that was collected; off-policy the whole buffer,
    though its documentation has no ``None`` there."""
    update_step_num_repetitions: int = 1
    """passes over the collected batch (on-policy)."""
    update_step_num_gradient_steps_per_sample: float = 1.0
    """gradient steps per collected step (off-policy), rounded in each training step."""
    episode_length: int | None = field(default=None, kw_only=True)
    """steps of every episode, where episodes are collected and all are equally long."""
    version: str = field(default="2.0.1", kw_only=True)
    """behaviour that is meant; see ``VERSIONS``."""

    def __post_init__(self) -> None:
        if self.num_training_envs == -1:
            self.num_training_envs = os.cpu_count() or 1
        if self.test_step_num_episodes == -1:
            self.test_step_num_episodes = self.num_test_envs

    def _guess(self) -> str:
        ratio = self.update_step_num_gradient_steps_per_sample
        return OFF_POLICY if ratio != 1.0 or self.start_timesteps_random is True else ON_POLICY

    def _collected(self) -> int | None:
        """Steps of one collection; ``None`` where episodes are collected."""
        steps, episodes = self.collection_step_num_env_steps, self.collection_step_num_episodes
        if self.family == OFFLINE:
            return None
        if (steps is None) == (episodes is None):
            raise SettingError(
                "collection_step_num_episodes",
                episodes,
                f"and collection_step_num_env_steps={steps}: one of them must be given",
                [None] if steps is not None else [1],
            )
        if steps is not None:
            return whole_number("collection_step_num_env_steps", steps, 1)
        if self.version != "documented":
            raise SettingError(
                "collection_step_num_episodes",
                episodes,
                "is never forwarded by tianshou 2.0.1, which fails",
                [None],
                "give collection_step_num_env_steps, or say version=documented",
            )
        return None

    def sampling(self) -> Sampling:
        """Return the resolved settings in words of neither generation."""
        yes_or_no("start_timesteps_random", self.start_timesteps_random)
        documented = self.version == "documented"
        if self.batch_size is None and self.family != ON_POLICY and documented:
            raise SettingError("batch_size", None, "is for on-policy algorithms only", [64])
        if self.test_step_num_episodes == 0 and not documented:
            raise SettingError(
                "test_step_num_episodes", 0, "fails in tianshou 2.0.1, which always tests", [-1, 1]
            )
        return Sampling(
            names=self,
            family=self.family,
            version=self.version,
            epochs=self.max_epochs,
            epoch_steps=self.epoch_num_steps,
            envs=self.num_training_envs,
            collect=self._collected(),
            collect_episodes=self.collection_step_num_episodes,
            episode_length=self.episode_length,
            batch_size=self.batch_size,
            repeat=self.update_step_num_repetitions,
            per_sample=(
                "update_step_num_gradient_steps_per_sample",
                self.update_step_num_gradient_steps_per_sample,
            ),
            start=self.start_timesteps,
            start_random=self.start_timesteps_random,
            test_episodes=self.test_step_num_episodes,
            buffer=self.buffer_size,
        )

    @classmethod
    def _from(cls, plan: StepPlan, settings: Mapping[str, Any]) -> Self:
        made = sampling_from(plan, settings.get("algo"))
        return cls(
            algo=made.family,
            max_epochs=made.epochs,
            epoch_num_steps=made.epoch_steps,
            batch_size=made.batch_size,
            num_training_envs=made.envs,
            test_step_num_episodes=made.test_episodes,
            buffer_size=made.buffer,
            collection_step_num_env_steps=made.collect,
            collection_step_num_episodes=made.collect_episodes,
            episode_length=made.episode_length,
            update_step_num_repetitions=made.repeat or 1,
            update_step_num_gradient_steps_per_sample=made.per_sample[1],
            start_timesteps=made.start,
            start_timesteps_random=made.start_random,
        )
