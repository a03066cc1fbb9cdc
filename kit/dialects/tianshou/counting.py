"""The counts of tianshou, in names common to both generations: to a plan, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kit.dialects.base import OFF_POLICY, OFFLINE, ON_POLICY, ratio_of
from kit.dialects.tianshou.settings import (
    BUFFER_SIZE,
    Tianshou1Settings,
    Tianshou2Settings,
    TianshouSettings,
)
from kit.steps.errors import SettingError, real_number, whole_number
from kit.steps.plan import StepPlan
from kit.steps.validation import LARGEST_RATIO

INITIAL_TESTS = {"1.1.0": 2, "2.0.1": 1, "documented": 0}
"""Tests before training: in 1.1.0 ``run`` resets the trainer, and iterating over it once more."""


@dataclass(kw_only=True)
class Sampling:
    """Settings of tianshou, resolved and checked, under names in common to both generations.

    The fields of a generation say at their place which of these names they have.
    """

    family: str
    version: str
    epochs: int
    epoch_steps: int
    envs: int
    collect: int | None
    collect_episodes: int | None = None
    episode_length: int | None = None
    batch_size: int | None
    repeat: int | None
    per_sample: float
    start: int
    start_random: bool
    test_episodes: int
    buffer: int
    names: Any = None
    """the settings of one generation, for their names in messages."""
    stops: bool = False
    """whether the first test after an epoch ends the run."""

    # ------------------------------------------------------------------ counts
    def up(self, steps: int) -> int:
        """``steps``, rounded up to equally many of each environment."""
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
        if self.episode_length is None:
            why = "is needed where episodes are collected"
            raise SettingError("episode_length", None, why, "give it")
        return (self.collect_episodes or 0) * self.episode_length

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
        return str(self.names.neutral()[neutral])

    def gradient_steps(self) -> int:
        """Gradient steps of one training step (off-policy)."""
        name, ratio = self.name_of("per_sample"), self.per_sample
        ratio = real_number(name, ratio, 0, LARGEST_RATIO)
        if self.version == "documented":
            return int(Fraction(repr(ratio)) * self.collected + Fraction(1, 2))
        steps = round(ratio * self.collected)
        if steps == 0:
            rounded = f"round({ratio} * {self.collected}) = 0"
            why = f"makes {rounded} gradient steps of a collection, where tianshou fails"
            raise SettingError(name, ratio, why, [1 / self.collected])
        return steps

    # ------------------------------------------------------------------ plan
    def plan(self) -> dict[str, Any]:
        """The settings of the plan."""
        offline = self.family == OFFLINE  # an epoch is so many gradient steps
        every = 1 if offline else self.trainings_per_epoch
        made: dict[str, Any] = {
            "iterations": self.epochs_run * every,
            "minibatch_size": self.batch_size,
            "initial_evaluations": INITIAL_TESTS[self.version],
            "evaluation_every_iterations": every,
            "evaluation_episodes": self.test_episodes,
        }
        if not self.test_episodes:
            made = {name: value for name, value in made.items() if "evaluation" not in name}
        if offline:
            return made | {"steps_per_env": 0, "gradient_steps_per_iteration": self.epoch_steps}
        start = self.up(self.start)
        if self.collect is not None:
            made["steps_per_env"] = self.collected // self.envs
        else:
            start = self.start
            made |= {"min_episodes": self.collect_episodes, "episode_length": self.episode_length}
        made |= {"num_envs": self.envs, "random_steps": 0}
        made |= {"prefill_steps": start, "prefill_random": self.start_random}
        if self.family == ON_POLICY:
            return made | self._on_policy()
        return made | {"gradient_steps_per_iteration": self.gradient_steps()}

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


# ---------------------------------------------------------------------- to a plan
def to_plan(settings: TianshouSettings) -> dict[str, Any]:
    """The plan's settings."""
    return sampling(settings).plan()


def buffer_capacity(settings: TianshouSettings) -> int:
    """The transitions that the replay buffer holds: equally many of each environment."""
    return sampling(settings.resolved()).capacity


def sampling(settings: TianshouSettings) -> Sampling:
    """Resolved settings in names common to both generations.

    Raises:
        SettingError: if they contradict each other, or the library fails.
    """
    made = Sampling(
        names=settings, family=settings.family, version=settings.version, **settings.said()
    )
    if isinstance(settings, Tianshou2Settings):
        _check_2(settings)
        made.collect = _collected(settings)
        return made
    assert isinstance(settings, Tianshou1Settings)
    if settings.family == ON_POLICY:
        whole_number("repeat_per_collect", settings.repeat_per_collect)
    stop, known = settings.stop_rew, settings.test_return
    if stop is not None:
        reached = real_number("stop_rew", stop)
        made.stops = known is not None and real_number("test_return", known) >= reached
    return made


def _check_2(settings: Tianshou2Settings) -> None:
    documented = settings.version == "documented"
    if settings.batch_size is None and settings.family != ON_POLICY and documented:
        raise SettingError("batch_size", None, "is for on-policy algorithms only", [64])
    if settings.test_step_num_episodes == 0 and not documented:
        why = "fails in tianshou 2.0.1, which always tests"
        raise SettingError("test_step_num_episodes", 0, why, [-1, 1])


def _collected(settings: Tianshou2Settings) -> int | None:
    """Steps of one collection; ``None`` where episodes are collected."""
    steps, episodes = settings.collection_step_num_env_steps, settings.collection_step_num_episodes
    if settings.family == OFFLINE:
        return None
    if (steps is None) == (episodes is None):
        why = f"and collection_step_num_env_steps={steps}: one of them must be given"
        works = [None] if steps is not None else [1]
        raise SettingError("collection_step_num_episodes", episodes, why, works)
    if steps is not None:
        return whole_number("collection_step_num_env_steps", steps, 1)
    if settings.version != "documented":
        why = "is never forwarded by tianshou 2.0.1, which fails"
        hint = "give collection_step_num_env_steps, or say version=documented"
        raise SettingError("collection_step_num_episodes", episodes, why, [None], hint)
    return None


# ---------------------------------------------------------------------- from a plan
def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of 1.x nearest to ``plan``."""
    made = _sampling_from(plan, settings.get("algo"))
    made.collect = made.collect or 1
    return _said(made, Tianshou1Settings)


def settings_2_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of 2.x nearest to ``plan``."""
    made = _sampling_from(plan, settings.get("algo"))
    made.repeat = made.repeat or 1
    return _said(made, Tianshou2Settings)


def _said(made: Sampling, generation: type[Any]) -> dict[str, Any]:
    names = generation.neutral().items()
    return {own: getattr(made, neutral) for neutral, own in names} | {"algo": made.family}


def _sampling_from(plan: StepPlan, algo: str | None) -> Sampling:
    rows = plan.frames_per_batch
    family = ON_POLICY if plan.on_policy else OFF_POLICY if rows else OFFLINE
    every = plan.evaluation_every_iterations
    if every is None and plan.evaluation_every and rows:
        every = max(plan.evaluation_every // rows, 1)
    every = min(every or plan.iterations, plan.iterations) or 1
    tests = plan.evaluations_after(plan.iterations) > 0
    capacity = plan.train_on_newest or max(rows + plan.local_prefill_steps, 1)
    return Sampling(
        family=algo or family,
        version="",
        epochs=-(-plan.iterations // every),
        epoch_steps=every * (rows or plan.gradient_steps_per_iteration or 1),
        envs=plan.num_envs,
        collect=None if plan.collects_episodes else rows,
        collect_episodes=rows // (plan.episode_length or 1) if plan.collects_episodes else None,
        episode_length=plan.episode_length,
        batch_size=plan.minibatch_size,
        repeat=plan.update_epochs if plan.on_policy else 1,
        per_sample=1.0 if plan.on_policy else float(ratio_of(plan)),
        start=plan.local_prefill_steps,
        start_random=plan.prefill_random and plan.prefill_steps > 0,
        test_episodes=plan.evaluation_episodes if tests else 1,
        buffer=capacity if plan.on_policy else BUFFER_SIZE,
    )
