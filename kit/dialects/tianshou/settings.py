"""The vocabulary of tianshou (https://github.com/thu-ml/tianshou).

Its unit is the environment step, the policy step here. A training step, the iteration here,
collects ``c = ceil(step_per_collect / m) * m`` of them with ``m`` environments. An epoch is a
reporting period: as many training steps as reach ``step_per_epoch``, then a test. ``Tianshou`` has
the names of 1.x (``SamplingConfig``), ``Tianshou2`` those of 2.x.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from kit.dialects.base import OFF_POLICY, OFFLINE, ON_POLICY, Dialect
from kit.dialects.fields import Acts, Refused, acts, fact, refused
from kit.steps.errors import Count, Natural, SettingError

_ALGORITHMS = {
    **dict.fromkeys(("ppo", "a2c", "reinforce", "npg", "trpo", "gail"), ON_POLICY),
    **dict.fromkeys(("sac", "dqn", "td3", "ddpg", "discrete_sac", "redq", "iqn"), OFF_POLICY),
    **dict.fromkeys(("c51", "rainbow", "qrdqn", "fqf", "bdqn"), OFF_POLICY),
    **dict.fromkeys(("bcq", "cql", "td3_bc", "discrete_cql", "discrete_bcq"), OFFLINE),
    **dict.fromkeys(("discrete_crr", "imitation"), OFFLINE),
}
_COLLECTING = (ON_POLICY, OFF_POLICY)
BUFFER_SIZE = 4096
"""Default of ``buffer_size``."""


def _stores_next(ignored: bool, settings: Any) -> bool:
    del settings
    return not ignored


def _stacked(given: Any, settings: Any) -> int:
    """Frames of a stack of which the newest alone is stored."""
    del given
    frames, newest = settings.replay_buffer_stack_num, settings.replay_buffer_save_only_last_obs
    if frames > 1 and not newest:
        why = "makes stacks that the policy has not acted on"
        works = "stack frames in the environment, and set replay_buffer_save_only_last_obs=true"
        raise SettingError("replay_buffer_stack_num", frames, why, works)
    if newest and frames == 1:
        why = "leaves one frame of stacks that the policy has acted on"
        works = "set replay_buffer_stack_num to the frames that the environment stacks"
        raise SettingError("replay_buffer_save_only_last_obs", newest, why, works)
    return int(frames)


_USED_UP = Refused("a batch of on-policy algorithms is used up at once")


def _capacity(given: int, settings: Any) -> int:
    """The transitions that the buffer holds: equally many of each environment."""
    envs = settings.said()["envs"]
    return int(-(-given // envs) * envs)


def _as(neutral: str, default: Any, only: tuple[str, ...] = (), **more: Any) -> Any:
    """A field that counts, with its name in both generations: a field of ``Sampling``."""
    return field(default=default, metadata={"neutral": neutral, "only": only, **more})


@dataclass
class TianshouSettings(Dialect):
    """What both generations of names have in common."""

    LIBRARY = "tianshou"
    ALGORITHMS: ClassVar = _ALGORITHMS
    ALIASES: ClassVar = {"pg": "reinforce", "bdq": "bdqn", "branchingdqn": "bdqn"} | {
        "rainbowdqn": "rainbow"
    }
    CANNOT: ClassVar = {"world_size": (1, "one process trains")}

    batch_size: Count | None = _as("batch_size", 64)
    """transitions in a minibatch; ``None``: all that was collected; off-policy the whole buffer,
    though the documentation of 2.x has no ``None`` there."""
    num_test_envs: Count = refused("there is an environment for each episode of an evaluation", 1)
    """test environments."""
    buffer_size: Count = _as("buffer", BUFFER_SIZE, use=Acts("buffer_size", _capacity, OFF_POLICY))
    """transitions in the replay buffer, rounded up to equally many of each environment."""
    start_timesteps: Natural = _as("start", 0, _COLLECTING)
    """environment steps collected before training, outside of every epoch."""
    start_timesteps_random: bool = _as("start_random", False, _COLLECTING)
    """whether these have random actions."""
    replay_buffer_ignore_obs_next: bool = acts(
        "store_next_observation", False, _stores_next, family=OFF_POLICY, otherwise=_USED_UP
    )
    """whether the buffer does not store next observations."""
    replay_buffer_save_only_last_obs: bool = acts(
        "stacked_frames", False, _stacked, family=OFF_POLICY, otherwise=_USED_UP
    )
    """whether the buffer stores only the last of stacked frames."""
    replay_buffer_stack_num: Count = acts(
        "stacked_frames", 1, _stacked, family=OFF_POLICY, otherwise=_USED_UP
    )
    """frames that the buffer stacks into one observation; with ``save_only_last_obs``, as many as
    the environment stacks: what is learned from is what was acted on."""

    @classmethod
    def neutral(cls) -> dict[str, str]:
        """Names in common to both generations, and the fields of this one."""
        return {f.metadata["neutral"]: f.name for f in fields(cls) if "neutral" in f.metadata}

    def said(self) -> dict[str, Any]:
        """The settings under names in common to both generations."""
        return {neutral: getattr(self, own) for neutral, own in self.neutral().items()}

    def implied_algorithm(self) -> str:
        """The family that the given settings imply: gradient steps per sample are off-policy."""
        said = self.said()
        off_policy = said["per_sample"] != 1.0 or said["repeat"] is None
        return OFF_POLICY if off_policy or said["start_random"] is True else ON_POLICY


@dataclass
class Tianshou1Settings(TianshouSettings):
    """``SamplingConfig`` of tianshou 1.x, field by field."""

    NAME = "tianshou"
    VERSIONS: ClassVar = {
        "1.1.0": "the code of 1.1.0; two tests before training, and num_epochs=0 runs one epoch",
        "documented": "SamplingConfig as it reads: no test before training, halves are rounded up, "
        "on-policy updates see the preceding collection only, the last minibatch is smaller",
    }
    SECTIONS = frozenset({"", "sampling_config", "sampling"})

    num_epochs: Natural = _as("epochs", 100)
    """epochs of training, each of as many training steps as reach ``step_per_epoch``, and a test;
    the run has ``num_epochs * ceil(step_per_epoch / c) * c`` environment steps."""
    step_per_epoch: Count = _as("epoch_steps", 30000)
    """environment steps of one epoch, rounded up to whole training steps."""
    num_train_envs: Count = _as("envs", -1)
    """training environments; -1: as many as the machine has CPUs."""
    train_seed: int = acts("seed", 42)
    """seed of the training environments."""
    num_test_episodes: Count = _as("test_episodes", 1)
    """episodes of one test, over all test environments."""
    step_per_collect: Count = _as("collect", 2048, _COLLECTING)
    """environment steps collected in one training step, rounded up to equally many of each."""
    repeat_per_collect: int | None = _as("repeat", 1, (ON_POLICY,))
    """passes over the collected batch (on-policy)."""
    update_per_step: float = _as("per_sample", 1.0, (OFF_POLICY,))
    """gradient steps per collected step (off-policy): ``round(update_per_step * c)`` in each
    training step, where a half goes to the even number and 0 is an error."""
    stop_rew: float | None = fact(use=Acts("stop_at_return"))
    """mean return of a test at which the run ends, after that epoch (``stop_fn``)."""
    test_return: float | None = fact()
    """return of every test episode, where it is known beforehand."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_train_envs == -1:
            self.num_train_envs = os.cpu_count() or 1

    @property
    def test_seed(self) -> int:
        """Seed of the test environments."""
        return self.train_seed + self.num_train_envs


@dataclass
class Tianshou2Settings(TianshouSettings):
    """``OnPolicyTrainingConfig`` and ``OffPolicyTrainingConfig`` of tianshou 2.x in one."""

    NAME = "tianshou2"
    VERSIONS: ClassVar = {
        "2.0.1": "the code of 2.0.1; one test before training",
        "documented": "the configuration classes as they read: no test before training, halves are "
        "rounded up, episodes can be collected, the last minibatch is smaller",
    }
    SECTIONS = frozenset({"", "training_config", "training"})

    max_epochs: Natural = _as("epochs", 100)
    """epochs of training (``num_epochs`` of 1.x)."""
    epoch_num_steps: Count = _as("epoch_steps", 30000)
    """environment steps of one epoch, rounded up to whole training steps."""
    num_training_envs: Count = _as("envs", -1)
    """training environments; -1: as many as the machine has CPUs."""
    test_step_num_episodes: Natural = _as("test_episodes", -1)
    """episodes of one test; -1: one for each test environment; 0: none, where the code fails."""
    collection_step_num_env_steps: int | None = _as("collect", 2048, _COLLECTING)
    """environment steps collected in one training step, rounded up to equally many of each."""
    collection_step_num_episodes: Count | None = _as("collect_episodes", None, _COLLECTING)
    """episodes collected in one training step, in place of steps; the code never forwards it, and
    fails."""
    test_in_training: bool = refused("evaluations come between iterations", False, only=_COLLECTING)
    """whether a stop criterion met in training leads to a test."""
    update_step_num_repetitions: Natural = _as("repeat", 1, (ON_POLICY,))
    """passes over the collected batch (on-policy)."""
    update_step_num_gradient_steps_per_sample: float = _as("per_sample", 1.0, (OFF_POLICY,))
    """gradient steps per collected step (off-policy), rounded in each training step."""
    episode_length: Count | None = field(
        default=None, kw_only=True, metadata={"neutral": "episode_length"}
    )
    """steps of every episode, where episodes are collected and all are equally long."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_training_envs == -1:
            self.num_training_envs = os.cpu_count() or 1
        if self.test_step_num_episodes == -1:
            self.test_step_num_episodes = self.num_test_envs

    def unchanged(self) -> Self:
        """The library's defaults; there are as many test episodes as test environments."""
        made = super().unchanged()
        made.test_step_num_episodes = self.num_test_envs
        return made


def _renamed(old: type[Any], new: type[Any]) -> dict[str, str]:
    """Names of one generation, and those of another where they differ."""
    names, others = old.neutral(), new.neutral()
    return {name: others[n] for n, name in names.items() if others.get(n, name) != name}


Tianshou1Settings.RENAMED = _renamed(Tianshou2Settings, Tianshou1Settings)
Tianshou2Settings.RENAMED = _renamed(Tianshou1Settings, Tianshou2Settings)
