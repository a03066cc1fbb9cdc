"""How tianshou turns its settings into counts, in names common to both generations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kit.dialects.base import OFFLINE, ON_POLICY
from kit.dialects.tianshou.settings import (
    Tianshou1Settings,
    Tianshou2Settings,
    TianshouSettings,
)
from kit.steps.errors import SettingError, real_number, whole_number, yes_or_no
from kit.steps.plan import StepPlan
from kit.steps.validation import LARGEST_RATIO

INITIAL_TESTS = {"1.1.0": 2, "2.0.1": 1, "documented": 0}
"""Tests before training: in 1.1.0 ``run`` resets the trainer, and iterating over it once more."""


@dataclass(kw_only=True)
class Sampling:
    """Settings of tianshou, resolved and checked."""

    names: Any = None
    """the settings of one generation, for their names in messages."""
    family: str
    """on-policy, off-policy or offline."""
    version: str
    """behaviour that is meant."""
    epochs: int
    """epochs asked for."""
    epoch_steps: int
    """environment steps of one epoch; gradient steps, if offline."""
    envs: int
    """training environments."""
    collect: int | None
    """environment steps of one collection asked for; ``None``: episodes, or none if offline."""
    collect_episodes: int | None = None
    """episodes of one collection."""
    episode_length: int | None = None
    """steps of every episode, if they are known to be equally long."""
    batch_size: int | None
    """transitions in a minibatch; ``None``: all."""
    repeat: int | None
    """passes over the collected batch."""
    per_sample: float
    """gradient steps per collected step."""
    start: int
    """environment steps before training."""
    start_random: bool
    """whether they have random actions."""
    test_episodes: int
    """episodes of one test."""
    buffer: int
    """transitions in the replay buffer asked for."""
    stops: bool = False
    """whether the first test after an epoch ends the run."""

    # ------------------------------------------------------------------ counts
    def up(self, steps: int) -> int:
        """Round up to equally many steps of each environment."""
        return -(-steps // self.envs) * self.envs

    @property
    def capacity(self) -> int:
        """Transitions that the replay buffer holds."""
        return self.up(self.buffer)

    @property
    def collected(self) -> int:
        """Environment steps of one collection."""
        if self.collect is not None:
            return self.up(self.collect)
        return (self.collect_episodes or 0) * (self.episode_length or 0)

    @property
    def trainings_per_epoch(self) -> int:
        """Training steps of one epoch."""
        return -(-self.epoch_steps // self.collected)

    @property
    def epochs_run(self) -> int:
        """Epochs that are run: 1.1.0 asks whether it has ended only after the first."""
        epochs = max(self.epochs, 1) if self.version == "1.1.0" else self.epochs
        return min(epochs, 1) if self.stops else epochs

    def name_of(self, neutral: str) -> str:
        """Name of a field in the generation that is spoken."""
        names: Mapping[str, str] = self.names.NEUTRAL
        return next(own for own, meant in names.items() if meant == neutral)

    def gradient_steps(self) -> int:
        """Gradient steps of one training step (off-policy)."""
        name, ratio = self.name_of("per_sample"), self.per_sample
        ratio = real_number(name, ratio, 0, LARGEST_RATIO)
        if self.version == "documented":
            return int(Fraction(repr(ratio)) * self.collected + Fraction(1, 2))
        steps = round(ratio * self.collected)
        if steps == 0:
            raise SettingError(
                name,
                ratio,
                f"makes round({ratio} * {self.collected}) = 0 gradient steps of a collection, "
                "where tianshou fails",
                [1 / self.collected],
            )
        return steps

    # ------------------------------------------------------------------ plan
    def plan(self) -> StepPlan:
        """The run that these settings make."""
        if self.family == OFFLINE:
            return self._offline()
        made: dict[str, Any] = {
            "num_envs": self.envs,
            "prefill_steps": self.up(self.start),
            "prefill_random": self.start_random,
            "random_steps": 0,
        }
        if self.collect is None:
            made |= {"min_episodes": self.collect_episodes, "episode_length": self.episode_length}
            if self.episode_length is None:
                raise SettingError(
                    "episode_length", None, "is needed where episodes are collected", "give it"
                )
            made["prefill_steps"] = self.start
        else:
            made["steps_per_env"] = self.collected // self.envs
        made["iterations"] = self.epochs_run * self.trainings_per_epoch
        made |= self._on_policy() if self.family == ON_POLICY else self._off_policy()
        return StepPlan(**made, **self._tests(self.trainings_per_epoch))

    def _tests(self, every: int) -> dict[str, Any]:
        if not self.test_episodes:
            return {"final_evaluation": False}
        return {
            "initial_evaluations": INITIAL_TESTS[self.version],
            "evaluation_every_iterations": every,
            "evaluation_episodes": self.test_episodes,
            "final_evaluation": False,
        }

    def _off_policy(self) -> dict[str, Any]:
        return {
            "gradient_steps_per_iteration": self.gradient_steps(),
            "minibatch_size": self.batch_size,
        }

    def _on_policy(self) -> dict[str, Any]:
        documented = self.version == "documented"
        start = 0 if documented else self.up(self.start)
        rows = self.collected + start
        newest = None
        if not documented and self.capacity < rows:
            newest = rows = self.capacity
        return {
            "update_epochs": self.repeat,
            "minibatch_size": None if self.batch_size is None else min(self.batch_size, rows),
            "last_minibatch": "smaller" if documented else "merge",
            "prefill_in_first_batch": start > 0,
            "train_on_newest": newest,
        }

    def _offline(self) -> StepPlan:
        """An epoch is so many gradient steps; nothing is collected."""
        return StepPlan(
            iterations=self.epochs_run,
            steps_per_env=0,
            gradient_steps_per_iteration=self.epoch_steps,
            minibatch_size=self.batch_size,
            **self._tests(1),
        )


def to_plan(settings: TianshouSettings) -> StepPlan:
    """The plan of resolved settings."""
    return sampling(settings).plan()


def sampling(settings: TianshouSettings) -> Sampling:
    """Return resolved settings in names common to both generations."""
    if isinstance(settings, Tianshou2Settings):
        return _sampling_2(settings)
    assert isinstance(settings, Tianshou1Settings)
    return _sampling_1(settings)


def buffer_capacity(settings: TianshouSettings) -> int:
    """The transitions that the replay buffer holds: equally many of each environment."""
    return sampling(settings.resolved()).capacity


def _sampling_1(settings: Tianshou1Settings) -> Sampling:
    if settings.family == ON_POLICY:
        whole_number("repeat_per_collect", settings.repeat_per_collect)
    made = _translated(settings)
    stop, known = settings.stop_rew, settings.test_return
    if stop is not None and known is not None:
        made.stops = real_number("test_return", known) >= real_number("stop_rew", stop)
    return made


def _sampling_2(settings: Tianshou2Settings) -> Sampling:
    documented = settings.version == "documented"
    if settings.batch_size is None and settings.family != ON_POLICY and documented:
        raise SettingError("batch_size", None, "is for on-policy algorithms only", [64])
    if settings.test_step_num_episodes == 0 and not documented:
        raise SettingError(
            "test_step_num_episodes", 0, "fails in tianshou 2.0.1, which always tests", [-1, 1]
        )
    made = _translated(settings)
    made.collect = _collected(settings)
    return made


def _translated(settings: TianshouSettings) -> Sampling:
    said = {meant: getattr(settings, own) for own, meant in settings.NEUTRAL.items()}
    yes_or_no("start_timesteps_random", said["start_random"])
    return Sampling(names=settings, family=settings.family, version=settings.version, **said)


def _collected(settings: Tianshou2Settings) -> int | None:
    """Steps of one collection; ``None`` where episodes are collected."""
    steps, episodes = settings.collection_step_num_env_steps, settings.collection_step_num_episodes
    if settings.family == OFFLINE:
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
    if settings.version != "documented":
        raise SettingError(
            "collection_step_num_episodes",
            episodes,
            "is never forwarded by tianshou 2.0.1, which fails",
            [None],
            "give collection_step_num_env_steps, or say version=documented",
        )
    return None
