"""Settings for TorchRL's ``Trainer``, collectors and replay buffers.

TorchRL counts frames, which are policy steps in a collector but env steps (policy steps times
``frame_skip``) in the trainer. An iteration is one batch from the collector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar, Literal

from kit.dialects.base import OFF_POLICY, ON_POLICY, Dialect, steps_of_training, trains
from kit.dialects.fields import count_field, extra_field, mapped
from kit.steps.counting import (
    COUNTING_RULES,
    CountingRule,
    Fixed,
    KnownTotals,
    needed,
    rule_numbers,
)
from kit.steps.counts import PlannedCounts
from kit.steps.errors import SettingError, whole_number
from kit.steps.plan import StepPlan
from kit.steps.schema import NonNegativeInt, PositiveInt

RANDOM, WITHOUT = "random", "without_replacement"
RULE = "torchrl-growing"


@dataclass
class TorchRL(Dialect):
    """Settings for TorchRL's collector, replay buffer and ``Trainer``."""

    NAME = "torchrl"
    LIBRARY = "TorchRL"
    VERSIONS: ClassVar = {"0.14.1": "code of 0.14.1"}
    ALGORITHMS: ClassVar = {
        **dict.fromkeys(("ppo", "a2c", "reinforce"), ON_POLICY),
        **dict.fromkeys(("sac", "dqn", "td3", "ddpg", "redq", "iql", "cql"), OFF_POLICY),
    }
    CANNOT: ClassVar = {
        "world_size": (1, "a trainer runs in a single process"),
        "collects_episodes": (False, "a collector collects a fixed number of frames"),
        "offline": (False, "each iteration collects a batch"),
    }
    SECTIONS = frozenset({"", "trainer", "collector", "replay_buffer"})
    PATHS: ClassVar = {"collector.total_frames": "collector_total_frames"}

    frames_per_batch: PositiveInt = 1000
    """Policy steps per batch in all environments, rounded up to a multiple of ``num_envs``."""
    total_frames: NonNegativeInt = 1_000_000
    """Env steps in the run (policy steps times ``frame_skip``), rounded up to whole batches."""
    collector_total_frames: int | None = None
    """Policy steps after which the collector stops; ``None`` or -1 for no limit."""
    frame_skip: PositiveInt = count_field("action_repeat", 1)
    """Env steps per policy step, as counted by the trainer."""
    init_random_frames: int | None = None
    """Frames with random actions before training, rounded up to whole batches."""
    optim_steps_per_batch: NonNegativeInt | None = None
    """Maximum number of minibatches per epoch; ``None`` to exhaust the sampler."""
    num_epochs: NonNegativeInt = 1
    """Epochs per batch."""
    batch_size: PositiveInt = count_field()
    """Transitions per minibatch; defaults to ``frames_per_batch``."""
    buffer_size: PositiveInt = mapped("buffer_size", family=OFF_POLICY)
    """Capacity of the replay buffer in transitions. The default depends on the algorithm."""
    sampler: Literal["random", "without_replacement"] = count_field()
    """``random`` or ``without_replacement``. The default depends on the algorithm."""
    iterate: bool = count_field()
    """Whether an epoch iterates over the buffer once. The default depends on other settings."""
    drop_last: bool = False
    """Whether to drop the last minibatch if it is smaller."""
    num_envs: PositiveInt = extra_field("num_envs", 1)
    """Number of environments in the collector."""
    max_episode_steps: PositiveInt | None = extra_field("max_episode_steps")
    """Policy steps after which a transform truncates an episode."""

    def implied_algorithm(self) -> str:
        """Return the algorithm family that the settings imply."""
        return ON_POLICY if self.sampler == WITHOUT or self.iterate is True else OFF_POLICY

    def _defaults(self) -> Mapping[str, Any]:
        on_policy = self.family == ON_POLICY
        frames = self.frames_per_batch
        return {
            "iterate": on_policy and self.sampler is None and self.optim_steps_per_batch is None,
            "sampler": WITHOUT if on_policy else RANDOM,
            "batch_size": frames,
            "buffer_size": frames if on_policy else 1_000_000,
        }

    @property
    def collected(self) -> int:
        """Number of policy steps per batch, after rounding."""
        return -(-self.frames_per_batch // self.num_envs) * self.num_envs

    # ------------------------------------------------------------------ to a plan
    def _plan(self) -> dict[str, Any]:
        batch = self.collected
        iterations = -(-self.total_frames // (batch * self.frame_skip))
        if self.collector_total_frames not in (None, -1):
            limit = whole_number("collector_total_frames", self.collector_total_frames)
            iterations = min(iterations, -(-limit // batch))
        random, first = self._random_batches()
        return {
            "iterations": iterations,
            "steps_per_env": batch // self.num_envs,
            "random_steps": min(random, iterations) * batch,
            "learning_starts": first * batch if first > 1 else 0,
            **self._updates(iterations, first),
        }

    def _random_batches(self) -> tuple[int, int]:
        """Return the number of random-action batches and the index of the first training batch."""
        if self.init_random_frames in (None, -1):
            return 0, 1
        frames = whole_number("init_random_frames", self.init_random_frames)
        first = max(-(-frames // (self.collected * self.frame_skip)), 1)
        return -(-frames // self.collected), first

    def _updates(self, iterations: int, first: int) -> dict[str, Any]:
        limit = self.optim_steps_per_batch
        if limit is None and (self.sampler == RANDOM or not self.iterate):
            cause = "with sampler=random" if self.sampler == RANDOM else "with iterate=false"
            reason = f"An epoch never ends {cause}"
            raise SettingError("optim_steps_per_batch", None, reason, [1])
        if self.sampler == RANDOM:
            steps = (limit or 0) * self.num_epochs
            return {"gradient_steps_per_iteration": steps, "minibatch_size": self.batch_size}
        if self.buffer_size > self.collected:
            return self._growing(limit, iterations, first)
        return self._without_replacement(limit)

    def _without_replacement(self, limit: int | None) -> dict[str, Any]:
        rows = min(self.collected, self.buffer_size)
        size = min(self.batch_size, rows)
        if self.drop_last and self.batch_size > rows:
            reason = f"The buffer has only {rows} frames"
            raise SettingError("batch_size", self.batch_size, reason, [rows])
        plan: dict[str, Any] = {
            "update_epochs": self.num_epochs,
            "minibatch_size": size,
            "minibatches_per_epoch": limit or None,
            "last_minibatch": "drop" if self.drop_last else "smaller",
            "train_on_newest": rows if rows < self.collected else None,
        }
        if limit == 0:
            return plan | {"update_epochs": 0}
        available = rows // size if self.drop_last else -(-rows // size)
        if self.iterate and (limit is None or limit > available):
            return plan | {"minibatches_per_epoch": None}
        if self.iterate:
            return plan | {"counting": "torchrl"}
        if self.drop_last:
            return plan | {"counting": "torchrl:sample"}
        return plan | {"last_minibatch": "carry"}

    def _growing(self, limit: int | None, iterations: int, first: int) -> dict[str, Any]:
        """Return plan settings for sampling from a growing buffer without replacement."""
        size, most = self.batch_size, self.buffer_size // self.batch_size
        iterated = {first, first + 1, iterations} if iterations > first else {first}
        rows = [min(k * self.collected, self.buffer_size) for k in sorted(iterated)]
        if self.drop_last and size > min(rows):
            reason = f"The buffer has only {min(rows)} frames"
            raise SettingError("batch_size", size, reason, [min(rows)])
        if not self.drop_last and any(number % size for number in rows):
            sizes = ", ".join(map(str, rows))
            reason = f"The value must divide every size of the growing buffer ({sizes}, ...)"
            raise SettingError("batch_size", size, reason, [gcd(*rows)], "or drop_last=True")
        epochs = self.num_epochs
        limit = most + 1 if limit is None else min(limit, most + 1)
        plan: dict[str, Any] = {
            "minibatch_size": size,
            "gradient_steps_per_iteration": epochs * limit,
        }
        if self.iterate and epochs and limit:
            plan["gradient_steps_per_iteration"] = epochs * min(limit, most)
            plan["counting"] = f"{RULE}:{self.buffer_size},{epochs},{limit}"
        return plan

    # ------------------------------------------------------------------ from a plan
    @staticmethod
    def _fields_for(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        fields = {
            "algo": settings.get("algo", ON_POLICY if plan.on_policy else OFF_POLICY),
            "frames_per_batch": plan.frames_per_batch,
            "total_frames": plan.total_policy_steps * plan.action_repeat,
            "init_random_frames": _init_random_frames(plan) or None,
            "batch_size": plan.minibatch_size or plan.frames_per_batch,
        }
        if not plan.on_policy and trains(plan) and plan.counting.startswith(RULE):
            size, epochs, most = arguments(plan)
            return fields | _epochs(epochs, most, size, iterate=True, drop_last=True)
        if not plan.on_policy:
            return fields | {"sampler": RANDOM, "optim_steps_per_batch": steps_of_training(plan)}
        limit = plan.minibatches_per_epoch
        rows = plan.train_on_newest or plan.frames_per_batch
        straddles = plan.last_minibatch == "carry" or plan.counting == "torchrl:sample"
        if limit is None and straddles:
            limit = rows // fields["batch_size"]
        drop = plan.last_minibatch == "drop"
        epochs = plan.update_epochs or 0
        return fields | _epochs(epochs, limit, rows, iterate=not straddles, drop_last=drop)

    # ------------------------------------------------------------------ caveats
    def _notes(self, plan: StepPlan) -> Iterator[str]:
        if self.collected != self.frames_per_batch:
            yield f"A batch is {self.collected} frames, a multiple of num_envs."
        frames = plan.total_policy_steps * self.frame_skip
        if frames != self.total_frames:
            over = frames - self.total_frames
            yield f"The run has {frames:,} frames ({over:+,}) in whole batches."
        if self.frame_skip > 1:
            yield (
                f"frame_skip={self.frame_skip} only scales the trainer's count. total_frames are "
                "env steps, and frames_per_batch are policy steps. A skip at the end of an episode "
                "is counted in full."
            )
        yield from self._random(plan)
        if plan.on_policy and plan.counting == "exact" and plan.last_minibatch == "carry":
            yield "Without iterate, minibatches extend across epochs and batches."
        if plan.counting == "torchrl":
            steps = [plan.gradient_steps(k) for k in range(1, min(plan.iterations, 4) + 1)]
            yield (
                f"If the sampler is exhausted after the {self.optim_steps_per_batch} minibatches "
                "of an epoch, the next epoch draws nothing. Gradient steps per batch are "
                f"{', '.join(map(str, steps))}, ..."
            )
        if self.sampler == "without_replacement" and not plan.on_policy:
            yield "A new permutation is drawn whenever the buffer grows, even within a pass."
        if plan.train_on_newest is not None:
            yield (
                f"The buffer holds {plan.train_on_newest} frames, less than a batch. TorchRL keeps "
                "the last environments of a flattened batch; the kit keeps the newest frames of "
                "each environment."
            )
        if self.iterate and self.sampler == "without_replacement":
            yield "TorchRL's trainer counts an additional optimisation step per ended pass."

    def _random(self, plan: StepPlan) -> Iterator[str]:
        requested = self.init_random_frames
        if requested in (None, -1, 0):
            return
        if plan.random_steps != requested:
            yield f"init_random_frames={requested} is rounded up to {plan.random_steps} frames."
        begins = plan.first_training_iteration * plan.frames_per_batch
        if self.frame_skip > 1 and begins < plan.random_steps:
            yield (
                f"The collector has random actions for {plan.random_steps:,} policy steps. The "
                f"trainer counts env steps and begins to train after {begins:,} policy steps."
            )


def _epochs(epochs: int, limit: int | None, buffer_size: int, **ends: bool) -> dict[str, Any]:
    return {
        "sampler": WITHOUT,
        "num_epochs": epochs,
        "optim_steps_per_batch": limit,
        "buffer_size": buffer_size,
        **ends,
    }


def _init_random_frames(plan: StepPlan) -> int:
    """Return the ``init_random_frames`` value for the plan's random steps and training start."""
    batch, first = plan.frames_per_batch, plan.first_training_iteration
    skipped = batch * plan.action_repeat
    for frames in (plan.random_steps, (first - 1) * skipped + 1, first * skipped):
        random = min(-(-frames // batch) * batch, plan.iterations * batch)
        starts = max(-(-frames // skipped), 1)
        if random == min(plan.random_steps, plan.iterations * batch) and starts == first:
            return frames
    return plan.random_steps


# ---------------------------------------------------------------------- counting rules
# The sampler draws a new permutation whenever the buffer grows.
# Once the buffer is full, a permutation continues in the next iteration.
# Counts are exact if no permutation ends with a smaller minibatch.
class IteratedSampler(KnownTotals):
    """Counts gradient steps for epochs that iterate over a sampler without replacement.

    An epoch draws at most ``limit`` minibatches. If a pass ends exactly at the limit, the end is
    detected only in the next epoch, which then draws nothing.

    Args:
        available: number of minibatches in a pass over the buffer.
        limit: maximum number of minibatches per epoch; ``None`` for no limit.
        epochs: number of epochs per iteration.
    """

    def __init__(self, available: int, limit: int | None, epochs: int) -> None:
        self.available, self.epochs = available, epochs
        self.limit = available + 1 if limit is None else limit

    def after(self, iterations: int, *, attempts: bool = False) -> int:
        """Return the number of gradient steps in the first ``iterations`` training iterations.

        Args:
            iterations: number of training iterations.
            attempts: whether to count like TorchRL's trainer, which adds one step per complete
                pass.
        """
        epochs_of_pass = self.available // self.limit + 1
        passes, rest = divmod(iterations * self.epochs, epochs_of_pass)
        return passes * (self.available + attempts) + rest * self.limit


class GrowingSampler(CountingRule):
    """Counts gradient steps for epochs that iterate over a growing buffer without replacement.

    Args:
        batch: number of transitions added per iteration.
        before: number of iterations before the first training iteration.
        size: transitions per minibatch. A smaller last minibatch is dropped.
        buffer_size: capacity of the buffer in transitions.
        epochs: number of epochs per iteration.
        limit: maximum number of minibatches per epoch.
    """

    STATE = ("iteration", "epochs_drawn", "attempts")

    def __init__(
        self, batch: int, before: int, size: int, buffer_size: int, epochs: int, limit: int
    ) -> None:
        self.batch, self.size, self.buffer_size = batch, size, buffer_size
        self.epochs, self.limit = epochs, limit
        self.iteration = before
        self.epochs_drawn = 0
        """Epochs since the buffer last grew, when a new permutation was drawn."""
        self.attempts = 0
        """Complete passes, which TorchRL's trainer also counts as optimisation steps."""

    def advance(self, policy_steps: int) -> int:
        """Return the number of gradient steps in the next iteration."""
        epochs, rows = self.epochs, self._rows(self.iteration)
        self.iteration += 1
        if self._rows(self.iteration) != rows:
            if self._ended_at_limit(rows):  # The next epoch only detects the end of the old pass.
                epochs -= 1
                self.attempts += 1
            self.epochs_drawn = 0
        sampler = self._sampler(self._rows(self.iteration))
        before, after = self.epochs_drawn, self.epochs_drawn + epochs
        self.epochs_drawn = after
        due = sampler.after(after) - sampler.after(before)
        counted = sampler.after(after, attempts=True) - sampler.after(before, attempts=True)
        self.attempts += counted - due
        return due

    def _rows(self, iteration: int) -> int:
        return min(self.batch * iteration, self.buffer_size)

    def _sampler(self, rows: int) -> IteratedSampler:
        return IteratedSampler(rows // self.size, self.limit, epochs=1)

    def _ended_at_limit(self, rows: int) -> bool:
        """Return whether the newest epoch reached its limit at the end of the data."""
        full, left = divmod(rows // self.size, self.limit)
        return full > 0 and not left and self.epochs_drawn % (full + 1) == full


def arguments(plan: PlannedCounts) -> tuple[int, int, int]:
    """Return the buffer size, epochs and minibatches per epoch from a plan's counting rule.

    Raises:
        SettingError: if the rule's arguments are invalid.
    """
    argument = plan.counting.partition(":")[2]
    buffer_size, epochs, limit = rule_numbers(plan, argument, 3, f"{RULE}:1000,1,1")
    needed(plan, "minibatch_size")
    return buffer_size, epochs, whole_number("minibatches of counting", limit, at_least=1)


def _growing(plan: PlannedCounts, argument: str) -> GrowingSampler:
    buffer_size, epochs, limit = arguments(plan)
    assert plan.minibatch_size is not None
    before = plan.first_training_iteration - 1
    batch = plan.frames_per_batch
    return GrowingSampler(batch, before, plan.minibatch_size, buffer_size, epochs, limit)


def _sampler(plan: PlannedCounts, argument: str) -> CountingRule:
    """Create the rule ``torchrl`` (iterated epochs) or ``torchrl:sample`` (fixed-size epochs)."""
    limit, epochs = plan.minibatches_per_epoch, needed(plan, "update_epochs")
    if argument == "sample":
        return Fixed(epochs * (limit or 1))
    rows = plan.rows(2)
    size = plan.minibatch_size or max(rows, 1)
    available = rows // size if plan.last_minibatch == "drop" else -(-rows // size)
    return IteratedSampler(available, limit, epochs)


COUNTING_RULES.update({"torchrl": _sampler, RULE: _growing})
