"""How TorchRL counts the gradient steps of a sampler without replacement.

Where the replay buffer holds more than a batch, the sampler draws a new permutation whenever the
buffer has grown, also in the middle of one. Once the buffer is full it continues from one iteration
to the next. All counts follow, as long as no permutation ends with a smaller minibatch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.steps.counting import COUNTING_RULES, CountingRule, Fixed, KnownTotals, rule_numbers
from kit.steps.errors import SettingError

if TYPE_CHECKING:
    from kit.steps.updates import UpdatePlan

RULE = "torchrl-growing"


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
        del policy_steps
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


def arguments(plan: UpdatePlan) -> tuple[int, int, int]:
    """The buffer's size, the epochs and the minibatches of an epoch that a plan names.

    Raises:
        SettingError: if it names none.
    """
    argument = plan.counting.partition(":")[2]
    buffer_size, epochs, limit = rule_numbers(plan, argument, 3, f"{RULE}:1000,1,1")
    if not limit or plan.minibatch_size is None or plan.update_epochs is not None:
        name, value = ("minibatch_size", plan.minibatch_size) if limit else ("counting", 0)
        raise SettingError(name, value, f"cannot be with counting={RULE}", [1])
    return buffer_size, epochs, limit


def _growing(plan: UpdatePlan, argument: str) -> GrowingSampler:
    del argument
    buffer_size, epochs, limit = arguments(plan)
    assert plan.minibatch_size is not None
    before = plan.first_training_iteration - 1
    batch = plan.frames_per_batch
    return GrowingSampler(batch, before, plan.minibatch_size, buffer_size, epochs, limit)


def _sampler(plan: UpdatePlan, argument: str) -> CountingRule:
    """``torchrl``: epochs over one iterator; ``torchrl:sample``: so many samples in each epoch."""
    if plan.update_epochs is None:
        raise SettingError("update_epochs", None, "is needed for counting=torchrl", [1])
    limit, epochs = plan.minibatches_per_epoch, plan.update_epochs
    if argument == "sample":
        return Fixed(epochs * (limit or 1))
    rows = plan.rows(2)
    size = plan.minibatch_size or max(rows, 1)
    available = rows // size if plan.last_minibatch == "drop" else -(-rows // size)
    return IteratedSampler(available, limit, epochs)


COUNTING_RULES.update({"torchrl": _sampler, RULE: _growing})
