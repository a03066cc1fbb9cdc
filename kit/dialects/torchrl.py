"""The vocabulary of TorchRL's own ``Trainer``, its collectors and its replay buffers.

Its unit is the frame: a policy step in a collector, an env step (policy steps times ``frame_skip``)
in the trainer. An iteration is one batch of the collector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar, Literal

from kit.dialects.base import OFF_POLICY, ON_POLICY, Dialect, steps_of_training, trains
from kit.dialects.fields import acts, counts, fact
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
    """Settings of TorchRL's collector, replay buffer and ``Trainer``."""

    NAME = "torchrl"
    LIBRARY = "TorchRL"
    VERSIONS: ClassVar = {"0.14.1": "the code of 0.14.1"}
    ALGORITHMS: ClassVar = {
        **dict.fromkeys(("ppo", "a2c", "reinforce"), ON_POLICY),
        **dict.fromkeys(("sac", "dqn", "td3", "ddpg", "redq", "iql", "cql"), OFF_POLICY),
    }
    CANNOT: ClassVar = {
        "world_size": (1, "a trainer is one process"),
        "collects_episodes": (False, "a collector counts frames"),
        "offline": (False, "an iteration collects"),
    }
    SECTIONS = frozenset({"", "trainer", "collector", "replay_buffer"})
    PATHS: ClassVar = {"collector.total_frames": "collector_total_frames"}

    frames_per_batch: PositiveInt = 1000
    """policy steps of one batch, over all environments, rounded up to equally many of each."""
    total_frames: NonNegativeInt = 1_000_000
    """env steps of the run (policy steps times ``frame_skip``), rounded up to whole batches."""
    collector_total_frames: int | None = None
    """policy steps after which the collector ends; ``None`` or -1: never."""
    frame_skip: PositiveInt = counts("action_repeat", 1)
    """env steps of one policy step, as the trainer counts it."""
    init_random_frames: int | None = None
    """frames with random actions, rounded up to whole batches: the collector counts policy steps,
    and the trainer begins to train after as many env steps."""
    optim_steps_per_batch: NonNegativeInt | None = None
    """minibatches of one epoch, at most; ``None``: until the sampler has none left."""
    num_epochs: NonNegativeInt = 1
    """epochs of one batch."""
    batch_size: PositiveInt = counts()
    """transitions in a minibatch of the replay buffer; ``None``: ``frames_per_batch``."""
    buffer_size: PositiveInt = acts("buffer_size", family=OFF_POLICY)
    """transitions that the replay buffer holds; ``None``: a batch, or a million if sampled at
    random."""
    sampler: Literal["random", "without_replacement"] = counts()
    """``random``, or ``without_replacement``; ``None``: as the algorithm needs it."""
    iterate: bool = counts()
    """whether an epoch iterates over the buffer, and so ends with it; ``None``: on-policy where
    neither the sampler nor ``optim_steps_per_batch`` says how an epoch ends."""
    drop_last: bool = False
    """whether a last, smaller minibatch is dropped."""
    num_envs: PositiveInt = fact("num_envs", 1)
    """environments of the collector."""
    max_episode_steps: PositiveInt | None = fact("max_episode_steps")
    """policy steps after which an episode is truncated; a transform's business."""

    def implied_algorithm(self) -> str:
        """The family that the given settings imply: an epoch that ends is on-policy."""
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
        """Policy steps of one batch."""
        return -(-self.frames_per_batch // self.num_envs) * self.num_envs

    # ------------------------------------------------------------------ to a plan
    def _plan(self) -> dict[str, Any]:
        batch = self.collected
        iterations = -(-self.total_frames // (batch * self.frame_skip))
        if self.collector_total_frames not in (None, -1):
            own = whole_number("collector_total_frames", self.collector_total_frames)
            iterations = min(iterations, -(-own // batch))
        random, first = self._random_batches()
        return {
            "iterations": iterations,
            "steps_per_env": batch // self.num_envs,
            "random_steps": min(random, iterations) * batch,
            "learning_starts": first * batch if first > 1 else 0,
            **self._updates(iterations, first),
        }

    def _random_batches(self) -> tuple[int, int]:
        """Batches with random actions, and the first batch that is trained on."""
        if self.init_random_frames in (None, -1):
            return 0, 1
        asked = whole_number("init_random_frames", self.init_random_frames)
        first = max(-(-asked // (self.collected * self.frame_skip)), 1)
        return -(-asked // self.collected), first

    def _updates(self, iterations: int, first: int) -> dict[str, Any]:
        limit = self.optim_steps_per_batch
        if limit is None and (self.sampler == RANDOM or not self.iterate):
            when = "with a random sampler" if self.sampler == RANDOM else "without iterate"
            raise SettingError("optim_steps_per_batch", None, f"never ends {when}", [1])
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
            why = f"is more than the {rows} frames of a buffer"
            raise SettingError("batch_size", self.batch_size, why, [rows])
        made: dict[str, Any] = {
            "update_epochs": self.num_epochs,
            "minibatch_size": size,
            "minibatches_per_epoch": limit or None,
            "last_minibatch": "drop" if self.drop_last else "smaller",
            "train_on_newest": rows if rows < self.collected else None,
        }
        if limit == 0:
            return made | {"update_epochs": 0}
        available = rows // size if self.drop_last else -(-rows // size)
        if self.iterate and (limit is None or limit > available):
            return made | {"minibatches_per_epoch": None}
        if self.iterate:
            return made | {"counting": "torchrl"}
        if self.drop_last:
            return made | {"counting": "torchrl:sample"}
        return made | {"last_minibatch": "carry"}

    def _growing(self, limit: int | None, iterations: int, first: int) -> dict[str, Any]:
        """Samples a growing buffer without replacement, from training iteration ``first`` on."""
        size, most = self.batch_size, self.buffer_size // self.batch_size
        iterated = {first, first + 1, iterations} if iterations > first else {first}
        rows = [min(k * self.collected, self.buffer_size) for k in sorted(iterated)]
        if self.drop_last and size > min(rows):
            why = f"is more than the {min(rows)} frames of a buffer"
            raise SettingError("batch_size", size, why, [min(rows)])
        if not self.drop_last and any(number % size for number in rows):
            held = ", ".join(map(str, rows))
            why = f"does not divide what a growing buffer holds ({held}, ...): "
            why += "minibatches would be of several sizes, sampled from a buffer"
            raise SettingError("batch_size", size, why, [gcd(*rows)], "or drop_last=True")
        epochs = self.num_epochs
        limit = most + 1 if limit is None else min(limit, most + 1)
        made: dict[str, Any] = {
            "minibatch_size": size,
            "gradient_steps_per_iteration": epochs * limit,
        }
        if self.iterate and epochs and limit:
            made["gradient_steps_per_iteration"] = epochs * min(limit, most)
            made["counting"] = f"{RULE}:{self.buffer_size},{epochs},{limit}"
        return made

    # ------------------------------------------------------------------ from a plan
    @staticmethod
    def _from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        made = {
            "algo": settings.get("algo", ON_POLICY if plan.on_policy else OFF_POLICY),
            "frames_per_batch": plan.frames_per_batch,
            "total_frames": plan.total_policy_steps * plan.action_repeat,
            "init_random_frames": _init_random_frames(plan) or None,
            "batch_size": plan.minibatch_size or plan.frames_per_batch,
        }
        if not plan.on_policy and trains(plan) and plan.counting.startswith(RULE):
            size, epochs, most = arguments(plan)
            return made | _epochs(epochs, most, size, iterate=True, drop_last=True)
        if not plan.on_policy:
            return made | {"sampler": RANDOM, "optim_steps_per_batch": steps_of_training(plan)}
        limit = plan.minibatches_per_epoch
        rows = plan.train_on_newest or plan.frames_per_batch
        straddles = plan.last_minibatch == "carry" or plan.counting == "torchrl:sample"
        if limit is None and straddles:
            limit = rows // made["batch_size"]
        drop = plan.last_minibatch == "drop"
        epochs = plan.update_epochs or 0
        return made | _epochs(epochs, limit, rows, iterate=not straddles, drop_last=drop)

    # ------------------------------------------------------------------ caveats
    def _notes(self, plan: StepPlan) -> Iterator[str]:
        if self.collected != self.frames_per_batch:
            yield f"A batch is {self.collected} frames: equally many of each environment."
        frames = plan.total_policy_steps * self.frame_skip
        if frames != self.total_frames:
            over = frames - self.total_frames
            yield f"The run makes {frames:,} frames, {over:+,}: whole batches."
        if self.frame_skip > 1:
            yield (
                f"frame_skip={self.frame_skip} is only a factor of the trainer's count: "
                f"total_frames={self.total_frames:,} are env steps, frames_per_batch are policy "
                "steps, and an episode that ends inside a skip is counted in full."
            )
        yield from self._random(plan)
        if plan.on_policy and plan.counting == "exact" and plan.last_minibatch == "carry":
            yield "Without iterate, minibatches straddle epochs and batches."
        if plan.counting == "torchrl":
            steps = [plan.gradient_steps(k) for k in range(1, min(plan.iterations, 4) + 1)]
            yield (
                f"An epoch of {self.optim_steps_per_batch} minibatches that ends just where the "
                "sampler does leaves the next epoch nothing: gradient steps per batch are "
                f"{', '.join(map(str, steps))}, ..."
            )
        if self.sampler == "without_replacement" and not plan.on_policy:
            yield "A new permutation is drawn whenever the buffer grows, even in the middle of one."
        if plan.train_on_newest is not None:
            yield (
                f"The buffer holds {plan.train_on_newest} frames, less than a batch. TorchRL keeps "
                "the end of a flattened batch, its last environments; here the newest of each are "
                "kept."
            )
        if self.iterate and self.sampler == "without_replacement":
            yield "The trainer counts one optimisation step too many for each ended pass."

    def _random(self, plan: StepPlan) -> Iterator[str]:
        asked = self.init_random_frames
        if asked in (None, -1, 0):
            return
        if plan.random_steps != asked:
            yield f"init_random_frames={asked} is rounded up to {plan.random_steps} frames."
        begins = plan.first_training_iteration * plan.frames_per_batch
        if self.frame_skip > 1 and begins < plan.random_steps:
            yield (
                f"The collector acts randomly for {plan.random_steps:,} policy steps, but the "
                f"trainer, which counts env steps, begins to train after {begins:,}."
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
    """Frames that make the plan's random steps, and begin to train where it does."""
    batch, first = plan.frames_per_batch, plan.first_training_iteration
    skipped = batch * plan.action_repeat
    for frames in (plan.random_steps, (first - 1) * skipped + 1, first * skipped):
        random = min(-(-frames // batch) * batch, plan.iterations * batch)
        starts = max(-(-frames // skipped), 1)
        if random == min(plan.random_steps, plan.iterations * batch) and starts == first:
            return frames
    return plan.random_steps


# ---------------------------------------------------------------------- how TorchRL counts
# Where the replay buffer holds more than a batch, the sampler draws a new permutation whenever the
# buffer has grown, also in the middle of one. Once the buffer is full it continues from one
# iteration to the next. All counts follow, as long as no permutation ends with a smaller minibatch.
class IteratedSampler(KnownTotals):
    """Gradient steps of a sampler without replacement that an epoch iterates over.

    An epoch draws at most ``limit`` minibatches. A pass that ends just at the limit is found to
    have ended only by the next epoch, which then draws nothing.

    Args:
        available: minibatches in a pass over the buffer.
        limit: minibatches that an epoch draws at most; ``None``: until the pass ends.
        epochs: epochs of one iteration.
    """

    def __init__(self, available: int, limit: int | None, epochs: int) -> None:
        self.available, self.epochs = available, epochs
        self.limit = available + 1 if limit is None else limit

    def after(self, iterations: int, *, attempts: bool = False) -> int:
        """The gradient steps of the first ``iterations``.

        Args:
            iterations: training iterations.
            attempts: whether to count as the trainer does, which adds one for each pass that is
                found to have ended.
        """
        epochs_of_pass = self.available // self.limit + 1
        passes, rest = divmod(iterations * self.epochs, epochs_of_pass)
        return passes * (self.available + attempts) + rest * self.limit


class GrowingSampler(CountingRule):
    """Gradient steps of epochs that iterate over a growing buffer without replacement.

    Args:
        batch: transitions that an iteration adds.
        before: iterations before the first that trains.
        size: transitions in a minibatch; those left over are dropped.
        buffer_size: transitions that the buffer holds.
        epochs: epochs of one iteration.
        limit: minibatches that an epoch draws at most.
    """

    STATE = ("iteration", "epochs_drawn", "attempts")

    def __init__(
        self, batch: int, before: int, size: int, buffer_size: int, epochs: int, limit: int
    ) -> None:
        self.batch, self.size, self.buffer_size = batch, size, buffer_size
        self.epochs, self.limit = epochs, limit
        self.iteration = before
        self.epochs_drawn = 0
        """epochs since the last permutation that a change of the buffer made."""
        self.attempts = 0
        """passes that were found to have ended, which TorchRL's trainer counts as well."""

    def advance(self, policy_steps: int) -> int:
        """The gradient steps of the next iteration."""
        epochs, rows = self.epochs, self._rows(self.iteration)
        self.iteration += 1
        if self._rows(self.iteration) != rows:
            if self._ends_unseen(rows):  # found only now, by an epoch that draws nothing
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

    def _ends_unseen(self, rows: int) -> bool:
        """Whether the last epoch drew the last minibatch of a pass, and no more."""
        full, left = divmod(rows // self.size, self.limit)
        return full > 0 and not left and self.epochs_drawn % (full + 1) == full


def arguments(plan: PlannedCounts) -> tuple[int, int, int]:
    """The buffer's size, the epochs and the minibatches of an epoch that a plan names.

    Raises:
        SettingError: if it names none.
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
    """``torchrl``: epochs over one iterator; ``torchrl:sample``: so many samples in each epoch."""
    limit, epochs = plan.minibatches_per_epoch, needed(plan, "update_epochs")
    if argument == "sample":
        return Fixed(epochs * (limit or 1))
    rows = plan.rows(2)
    size = plan.minibatch_size or max(rows, 1)
    available = rows // size if plan.last_minibatch == "drop" else -(-rows // size)
    return IteratedSampler(available, limit, epochs)


COUNTING_RULES.update({"torchrl": _sampler, RULE: _growing})
