"""The vocabulary of tianshou (https://github.com/thu-ml/tianshou).

Its unit is the environment step, the policy step here. A training step, the iteration here,
collects ``c = ceil(step_per_collect / m) * m`` of them with ``m`` environments. An epoch is a
reporting period: as many training steps as reach ``step_per_epoch``, then a test. ``Tianshou`` has
the names of 1.x (``SamplingConfig``), ``Tianshou2`` those of 2.x.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from kit.dialects.base import OFF_POLICY, OFFLINE, ON_POLICY, Acts, Count, Dialect, Natural, Refused

_ALGORITHMS = {
    **dict.fromkeys(("ppo", "a2c", "reinforce", "npg", "trpo", "gail"), ON_POLICY),
    **dict.fromkeys(("sac", "dqn", "td3", "ddpg", "discrete_sac", "redq", "iqn"), OFF_POLICY),
    **dict.fromkeys(("c51", "rainbow", "qrdqn", "fqf", "bdqn"), OFF_POLICY),
    **dict.fromkeys(("bcq", "cql", "td3_bc", "discrete_cql", "discrete_bcq"), OFFLINE),
    **dict.fromkeys(("discrete_crr", "imitation"), OFFLINE),
}
_ALIASES = {"pg": "reinforce", "bdq": "bdqn", "branchingdqn": "bdqn", "rainbowdqn": "rainbow"}

_NEUTRAL = {
    "batch_size": "batch_size",
    "start_timesteps": "start",
    "start_timesteps_random": "start_random",
    "buffer_size": "buffer",
}
_NEUTRAL_1 = {
    "num_epochs": "epochs",
    "step_per_epoch": "epoch_steps",
    "num_train_envs": "envs",
    "num_test_episodes": "test_episodes",
    "step_per_collect": "collect",
    "repeat_per_collect": "repeat",
    "update_per_step": "per_sample",
}
_NEUTRAL_2 = {
    "max_epochs": "epochs",
    "epoch_num_steps": "epoch_steps",
    "num_training_envs": "envs",
    "test_step_num_episodes": "test_episodes",
    "collection_step_num_env_steps": "collect",
    "update_step_num_repetitions": "repeat",
    "update_step_num_gradient_steps_per_sample": "per_sample",
}
_NAMES_OF_2 = {
    old: new for old, one in _NEUTRAL_1.items() for new, two in _NEUTRAL_2.items() if one == two
}


class TianshouSettings(Dialect):
    """What both generations of names have in common."""

    LIBRARY: ClassVar[str] = "tianshou"
    ALGORITHMS: ClassVar[Mapping[str, str]] = _ALGORITHMS
    ALIASES: ClassVar[Mapping[str, str]] = _ALIASES
    CARRIED: ClassVar[Mapping[str, Acts | Refused]] = {
        "num_test_envs": Refused("there is an environment for each episode of an evaluation"),
        "buffer_size": Acts("buffer_size", family=OFF_POLICY),
        **dict.fromkeys(
            ("replay_buffer_ignore_obs_next", "replay_buffer_save_only_last_obs"),
            Refused("the replay buffer stores both observations of a transition"),
        ),
        "replay_buffer_stack_num": Refused("stack frames in the environment"),
    }
    NEUTRAL: ClassVar[Mapping[str, str]] = {}
    """names of a generation, and what both mean by them: fields of ``Sampling``."""


@dataclass
class Tianshou1Settings(TianshouSettings):
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
    CARRIED: ClassVar[Mapping[str, Acts | Refused]] = {
        **TianshouSettings.CARRIED,
        "train_seed": Acts("seed"),
        "stop_rew": Refused("add TorchRL's EarlyStopping to the hooks"),
    }
    FACTS: ClassVar[frozenset[str]] = Dialect.FACTS | {"stop_rew", "test_return"}
    NEUTRAL: ClassVar[Mapping[str, str]] = _NEUTRAL_1 | _NEUTRAL
    RENAMED: ClassVar[Mapping[str, str]] = {new: old for old, new in _NAMES_OF_2.items()}

    SECTIONS: ClassVar[frozenset[str]] = frozenset({"", "sampling_config", "sampling"})

    num_epochs: Natural = 100
    """epochs of training, each of as many training steps as reach ``step_per_epoch``, and a test;
    the run has ``num_epochs * ceil(step_per_epoch / c) * c`` environment steps."""
    step_per_epoch: Count = 30000
    """environment steps of one epoch, rounded up to whole training steps."""
    batch_size: Count | None = 64
    """transitions in a minibatch; ``None``: all of the buffer."""
    num_train_envs: Count = -1
    """training environments; -1: as many as the machine has CPUs."""
    train_seed: int = 42
    """seed of the training environments."""
    num_test_envs: Count = 1
    """test environments."""
    num_test_episodes: Count = 1
    """episodes of one test, over all test environments."""
    buffer_size: Count = 4096
    """transitions in the replay buffer, rounded up to equally many of each environment."""
    step_per_collect: Count = 2048
    """environment steps collected in one training step, rounded up to equally many of each."""
    repeat_per_collect: int | None = 1
    """passes over the collected batch (on-policy)."""
    update_per_step: float = 1.0
    """gradient steps per collected step (off-policy): ``round(update_per_step * c)`` in each
    training step, where a half goes to the even number and 0 is an error."""
    start_timesteps: Natural = 0
    """environment steps collected before training, outside of every epoch."""
    start_timesteps_random: bool = False
    """whether these have random actions."""
    replay_buffer_ignore_obs_next: bool = False
    """whether the buffer does not store next observations."""
    replay_buffer_save_only_last_obs: bool = False
    """whether the buffer stores only the last of stacked frames."""
    replay_buffer_stack_num: Count = 1
    """frames that the buffer stacks into one observation."""
    stop_rew: float | None = field(default=None, kw_only=True)
    """mean return of a test at which the run ends, after that epoch (``stop_fn``)."""
    test_return: float | None = field(default=None, kw_only=True)
    """return of every test episode, where it is known beforehand."""
    version: str = field(default="1.1.0", kw_only=True)
    """behaviour to reproduce; see ``VERSIONS``."""

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


@dataclass
class Tianshou2Settings(TianshouSettings):
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
    CARRIED: ClassVar[Mapping[str, Acts | Refused]] = {
        **TianshouSettings.CARRIED,
        "test_in_training": Refused("evaluations come between iterations"),
    }
    NEUTRAL: ClassVar[Mapping[str, str]] = {
        **_NEUTRAL_2,
        **_NEUTRAL,
        "collection_step_num_episodes": "collect_episodes",
        "episode_length": "episode_length",
    }
    RENAMED: ClassVar[Mapping[str, str]] = _NAMES_OF_2
    FACTS: ClassVar[frozenset[str]] = Dialect.FACTS | {"episode_length"}

    SECTIONS: ClassVar[frozenset[str]] = frozenset({"", "training_config", "training"})

    max_epochs: Natural = 100
    """epochs of training (``num_epochs`` of 1.x)."""
    epoch_num_steps: Count = 30000
    """environment steps of one epoch, rounded up to whole training steps."""
    num_training_envs: Count = -1
    """training environments; -1: as many as the machine has CPUs."""
    num_test_envs: Count = 1
    """test environments."""
    test_step_num_episodes: Natural = -1
    """episodes of one test; -1: one for each test environment; 0: none, where the code fails."""
    buffer_size: Count = 4096
    """transitions in the replay buffer, rounded up to equally many of each environment."""
    collection_step_num_env_steps: int | None = 2048
    """environment steps collected in one training step, rounded up to equally many of each."""
    collection_step_num_episodes: Count | None = None
    """episodes collected in one training step, in place of steps; the code never forwards it, and
    fails."""
    start_timesteps: Natural = 0
    """environment steps collected before training, outside of every epoch."""
    start_timesteps_random: bool = False
    """whether these have random actions."""
    replay_buffer_ignore_obs_next: bool = False
    """whether the buffer does not store next observations."""
    replay_buffer_save_only_last_obs: bool = False
    """whether the buffer stores only the last of stacked frames."""
    replay_buffer_stack_num: Count = 1
    """frames that the buffer stacks into one observation."""
    test_in_training: bool = False
    """whether a stop criterion met in training leads to a test."""
    batch_size: Count | None = 64
    """transitions in a minibatch; ``None``: all that was collected; off-policy the whole buffer,
    though its documentation has no ``None`` there."""
    update_step_num_repetitions: Natural = 1
    """passes over the collected batch (on-policy)."""
    update_step_num_gradient_steps_per_sample: float = 1.0
    """gradient steps per collected step (off-policy), rounded in each training step."""
    episode_length: Count | None = field(default=None, kw_only=True)
    """steps of every episode, where episodes are collected and all are equally long."""
    version: str = field(default="2.0.1", kw_only=True)
    """behaviour to reproduce; see ``VERSIONS``."""

    def __post_init__(self) -> None:
        if self.num_training_envs == -1:
            self.num_training_envs = os.cpu_count() or 1
        if self.test_step_num_episodes == -1:
            self.test_step_num_episodes = self.num_test_envs

    def _guess(self) -> str:
        ratio = self.update_step_num_gradient_steps_per_sample
        return OFF_POLICY if ratio != 1.0 or self.start_timesteps_random is True else ON_POLICY
