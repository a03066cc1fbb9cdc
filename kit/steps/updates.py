"""The gradient steps of each iteration of a plan, and their minibatches."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate

from kit.steps.collection import CollectionPlan
from kit.steps.counting import counting_rule
from kit.steps.errors import Count, Natural, SettingError
from kit.steps.minibatches import LastMinibatch, Permutation, permutation


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdatePlan(CollectionPlan):
    """The part of a plan for gradient steps: when, how many, and on which rows."""

    learning_starts: Natural = 0
    """policy steps (total) before the first gradient step, which comes at the end of the iteration
    that reaches them."""
    pretrain_steps: Natural = 0
    """gradient steps of one process done once, when learning starts, on top of those due."""

    update_epochs: Natural | None = None
    """passes over each collected batch (on-policy)."""
    replay_ratio: Fraction | None = None
    """gradient steps per policy step, exact, counted from the start of the first iteration that
    trains; a float means the simplest fraction that rounds to it."""
    gradient_steps_per_iteration: Natural | None = None
    """gradient steps of one process in each iteration, however much was collected."""
    counting: str = "exact"
    """rule by which gradient steps are counted: ``exact``, or the name of a library whose rounding
    is reproduced (see ``kit.dialects``)."""

    minibatch_size: Count | None = None
    """transitions (or sequences) in a minibatch of one process; ``None``: all that was collected
    (on-policy), or all that the buffer holds."""
    sequence_length: Count | None = None
    """time steps of a sequence, where a minibatch is made of sequences."""
    last_minibatch: LastMinibatch = "smaller"
    """the rows of a batch that do not fill a minibatch: they make a ``smaller``
    one, ``merge`` into the last, ``drop`` out of the epoch, or ``carry`` over into the next."""
    minibatches_per_epoch: Count | None = None
    """minibatches drawn in an update epoch, at most; ``None``: all that a batch makes."""
    minibatches_per_gradient_step: Count | None = 1
    """minibatches whose gradients are accumulated into one gradient step; ``None``: all of an
    update epoch."""
    prefill_in_first_batch: bool = False
    """whether an on-policy update also trains on the prefill, as part of its first batch."""
    train_on_newest: Count | None = None
    """transitions of a batch that an on-policy update trains on, at most: the newest of each
    environment; the others are forgotten unseen. ``None``: all."""

    @cached_property
    def on_policy(self) -> bool:
        """Whether each batch is trained on once collected, and then forgotten."""
        return self.update_epochs is not None

    @property
    def trains(self) -> bool:
        """Whether gradient steps are made at all."""
        rules = (self.update_epochs, self.replay_ratio, self.gradient_steps_per_iteration)
        return any(rule is not None for rule in rules)

    @property
    def first_training_iteration(self) -> int:
        """The first iteration whose end reaches ``learning_starts``; it is the first to train."""
        if self.policy_steps_after(1) >= self.learning_starts:
            return 1
        each = self.policy_steps_per_iteration
        if each == 0:
            return self.iterations + 1
        return 1 + -(-(self.learning_starts - self.policy_steps_after(1)) // each)

    # ------------------------------------------------------------------ gradient steps
    def gradient_steps(self, iteration: int) -> int:
        """Gradient steps of one process in ``iteration`` (from 1)."""
        return self.gradient_steps_after(iteration) - self.gradient_steps_after(iteration - 1)

    def gradient_steps_after(self, iteration: int) -> int:
        """Gradient steps of one process at the end of ``iteration``."""
        first = self.first_training_iteration
        if iteration < first:
            return 0
        rule, trainings = counting_rule(self.counting)(self), iteration - first + 1
        known = rule.total(trainings, self.frames_per_batch, self.collected(first))
        due = self._followed_until(trainings, first) if known is None else known
        return due + (0 if rule.pretrains else self.pretrain_steps)

    def _followed_until(self, trainings: int, first: int) -> int:
        """Follow the rule; its results are kept, so that each iteration is followed once."""
        if not hasattr(self, "_followed"):
            rule = counting_rule(self.counting)(self)
            start = array("q", [0, rule.advance(self.collected(first))])
            object.__setattr__(self, "_followed", (rule, start))
        rule, reached = self._followed  # type: ignore[attr-defined]
        each = self.frames_per_batch
        steps = (rule.advance(each) for _ in range(trainings + 1 - len(reached)))
        reached.extend(accumulate(steps, initial=reached.pop()))
        done: int = reached[trainings]
        return done

    # ------------------------------------------------------------------ minibatches
    def rows(self, iteration: int) -> int:
        """Transitions of the batch that ``iteration`` trains on in one process (on-policy)."""
        rows = self.collected(iteration)
        if self.prefill_in_first_batch and iteration == self.first_training_iteration:
            rows += self.local_prefill_steps
        return rows if self.train_on_newest is None else min(rows, self.train_on_newest)

    def epoch_gradient_steps(self, rows: int) -> int:
        """Gradient steps that ``update_epochs`` passes over ``rows`` transitions make."""
        if not self.update_epochs or rows == 0:
            return 0
        minibatches = self.minibatches_in_epoch(rows)
        accumulated = self.minibatches_per_gradient_step or max(minibatches, 1)
        return self.update_epochs * -(-minibatches // accumulated)

    def minibatches_in_epoch(self, rows: int) -> int:
        """Minibatches of one update epoch over ``rows`` transitions."""
        cut, limit = self._cut(rows), self.minibatches_per_epoch
        if self.last_minibatch == "carry":
            return limit if limit is not None else cut.minibatches - (cut.last < cut.size)
        return cut.minibatches if limit is None else min(limit, cut.minibatches)

    def _cut(self, rows: int) -> Permutation:
        """The minibatches of a pass over ``rows`` transitions (or their sequences, if so asked)."""
        rows //= self.sequence_length or 1
        return permutation(rows, self.minibatch_size or max(rows, 1), self.last_minibatch)

    def minibatch_sizes(self, iteration: int) -> list[int]:
        """Sizes of the minibatches of ``iteration`` (from 1) in one process, in order.

        Transitions, or sequences where ``sequence_length`` is set.

        Raises:
            SettingError: if a minibatch is all that a replay buffer holds, which only the buffer
                knows.
        """
        cut, drawn, wanted, times = self._draws(iteration)
        return cut.sizes(drawn, wanted) * times

    def minibatch_counts(self, iteration: int) -> dict[int, int]:
        """How many minibatches of each size ``iteration`` sees: ``minibatch_sizes``, counted."""
        cut, drawn, wanted, times = self._draws(iteration)
        counts = cut.counts(drawn, wanted)
        return {size: n * times for size, n in counts.items() if size > 0 and n * times > 0}

    def _draws(self, iteration: int) -> tuple[Permutation, int, int, int]:
        """The minibatches of a pass, those drawn before, those of ``iteration``, and how often."""
        if self.update_epochs is None:
            if self.minibatch_size is None:
                raise SettingError("minibatch_size", None, "means all that the replay buffer holds")
            sampled = Permutation(1, self.minibatch_size, self.minibatch_size)
            accumulated = self.minibatches_per_gradient_step or 1
            return sampled, 0, self.gradient_steps(iteration) * accumulated, 1
        cut = self._cut(self.rows(iteration))
        if iteration < self.first_training_iteration:
            return cut, 0, 0, 0
        if self._carries:
            before = self.gradient_steps_after(iteration - 1)
            return cut, before, self.gradient_steps(iteration), 1
        return cut, 0, self.minibatches_in_epoch(self.rows(iteration)), self.update_epochs

    @property
    def _carries(self) -> bool:
        """Whether an iteration continues the permutation of the previous one."""
        return self.last_minibatch == "carry" or self.counting != "exact"

    def samples_after(self, iteration: int) -> int:
        """Transitions trained on by one process at the end of ``iteration``."""
        length = self.sequence_length or 1
        if self.update_epochs is None:
            size = (self.minibatch_size or 0) * (self.minibatches_per_gradient_step or 1)
            return self.gradient_steps_after(iteration) * size * length
        first = self.first_training_iteration
        if iteration < first:
            return 0
        if self._carries:
            cut = self._cut(self.rows(iteration))
            return cut.rows(self.gradient_steps_after(iteration)) * length
        done = self._epoch_rows(self.rows(first))
        if iteration > first:
            done += (iteration - first) * self._epoch_rows(self.rows(first + 1))
        return done * self.update_epochs * length

    def _epoch_rows(self, rows: int) -> int:
        """Rows (sequences, if so asked) that one update epoch trains on."""
        return self._cut(rows).rows(self.minibatches_in_epoch(rows))

    def unseen_samples(self, iteration: int, drawn: int) -> int:
        """Transitions in the minibatches of ``iteration`` after the first ``drawn`` of them."""
        if not self.is_exact:
            return 0
        return sum(self.minibatch_sizes(iteration)[drawn:]) * (self.sequence_length or 1)
