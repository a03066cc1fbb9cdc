"""How tianshou turns its settings into counts, in words of neither of its generations."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kit.dialects.base import OFF_POLICY, OFFLINE, ON_POLICY
from kit.steps.errors import SettingError, real_number
from kit.steps.plan import StepPlan
from kit.steps.validation import LARGEST_RATIO

INITIAL_TESTS = {"1.1.0": 2, "2.0.1": 1, "documented": 0}
"""Tests before training: in 1.1.0 ``run`` resets the trainer, and iterating over it once more."""


@dataclass(kw_only=True)
class Sampling:
    """Settings of tianshou, resolved and checked."""

    names: Any = None
    """the dialect that speaks, for its names in messages."""
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
    per_sample: tuple[str, float]
    """gradient steps per collected step, with the setting's name."""
    start: int
    """environment steps before training."""
    start_random: bool
    """whether they have random actions."""
    test_episodes: int
    """episodes of one test."""
    buffer: int
    """transitions in the replay buffer asked for."""

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
        return max(self.epochs, 1) if self.version == "1.1.0" else self.epochs

    def gradient_steps(self) -> int:
        """Gradient steps of one training step (off-policy)."""
        name, ratio = self.per_sample
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
        """Return the run that these settings make."""
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

    # ------------------------------------------------------------------ notes
    def notes(self) -> list[str]:
        """Return one sentence for each surprise."""
        found = []
        if self.names.algo not in self.names.ALGORITHMS:
            read = self.family.replace("_", "-")
            found.append(f"Read as {read}: the settings do not name an algorithm, algo=... does.")
        if self.family == OFFLINE:
            return [*found, "Offline, an epoch is so many gradient steps; nothing is collected."]
        if self.collect is not None and self.collected != self.collect:
            found.append(
                f"A collection is {self.collected} environment steps, not {self.collect}: equally "
                f"many of each of {self.envs} environments."
            )
        epoch = self.trainings_per_epoch * self.collected
        if epoch != self.epoch_steps:
            found.append(
                f"An epoch is {epoch:,} environment steps, not {self.epoch_steps:,}: "
                f"{self.trainings_per_epoch:,} whole collections."
            )
        if self.epochs_run != self.epochs:
            found.append("num_epochs=0 still runs one epoch.")
        if INITIAL_TESTS[self.version] == 2:
            found.append("The initial test is run twice: there are two tests more than epochs.")
        found += self._start_notes()
        return found + (self._ratio_notes() if self.family == OFF_POLICY else self._batch_notes())

    def _start_notes(self) -> list[str]:
        if not self.start:
            return []
        where = f"{self.up(self.start):,} environment steps before training are part of no epoch"
        found = [f"start_timesteps: {where}, and the environments are reset after them."]
        if self.family == ON_POLICY and self.version != "documented":
            found.append("They are trained on as part of the first batch.")
        return found

    def _ratio_notes(self) -> list[str]:
        name, ratio = self.per_sample
        steps = self.gradient_steps()
        found = []
        if Fraction(repr(float(ratio))) * self.collected != steps:
            found.append(
                f"{name}={ratio} makes round({ratio} * {self.collected}) = {steps} gradient steps "
                f"of each collection, half to even and without carry: {steps / self.collected:.4g} "
                "per environment step."
            )
        if steps > 1:
            found.append(
                "A linear learning rate would count gradient steps against training steps: it "
                f"reaches zero after 1/{steps} of the run and then turns negative."
            )
        return found

    def _batch_notes(self) -> list[str]:
        found = []
        if self.capacity < self.collected:
            found.append(
                f"The buffer holds {self.capacity} transitions, fewer than a collection: only the "
                "newest are trained on, without a word."
            )
        rows, size = min(self.collected, self.capacity), self.batch_size
        if size is not None and rows % size and rows > size and self.version != "documented":
            found.append(
                f"The last minibatch takes the remainder: {size + rows % size} transitions, not "
                f"{size}."
            )
        return found


def sampling_from(plan: StepPlan, algo: str | None) -> Sampling:
    """Return the settings nearest to ``plan``."""
    if plan.world_size > 1:
        raise SettingError(
            "world_size", plan.world_size, "cannot be said in tianshou: one process trains", [1]
        )
    rows = plan.frames_per_batch
    family = ON_POLICY if plan.on_policy else OFF_POLICY if rows else OFFLINE
    every = plan.evaluation_every_iterations
    if every is None and plan.evaluation_every and rows:
        every = max(plan.evaluation_every // rows, 1)
    every = min(every or plan.iterations, plan.iterations) or 1
    epochs = -(-plan.iterations // every)
    ratio = plan.replay_ratio
    if ratio is None:
        ratio = Fraction(plan.gradient_steps_per_iteration or 0, rows or 1)
    per_step = float(ratio)
    tests = plan.evaluations_after(plan.iterations) > 0
    capacity = plan.train_on_newest or max(rows + plan.local_prefill_steps, 1)
    return Sampling(
        family=algo or family,
        version="",
        epochs=epochs,
        epoch_steps=every * (rows or plan.gradient_steps_per_iteration or 1),
        envs=plan.num_envs,
        collect=None if plan.collects_episodes else rows,
        collect_episodes=rows // (plan.episode_length or 1) if plan.collects_episodes else None,
        episode_length=plan.episode_length,
        batch_size=plan.minibatch_size,
        repeat=plan.update_epochs if plan.on_policy else 1,
        per_sample=("", 1.0 if plan.on_policy else per_step),
        start=plan.local_prefill_steps,
        start_random=plan.prefill_random and plan.prefill_steps > 0,
        test_episodes=plan.evaluation_episodes if tests else 1,
        buffer=capacity if plan.on_policy else 1_000_000,
    )
