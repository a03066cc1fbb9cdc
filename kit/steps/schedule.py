"""Schedule for the gradient steps, evaluations, metrics and checkpoints in a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kit.steps.counting import COUNTING_RULES, CountingRule, Fixed, ReplayRatio, counting_rule
from kit.steps.counts import PlannedCounts
from kit.steps.errors import whole_number
from kit.steps.every import multiples_crossed


@dataclass(frozen=True, slots=True)
class Due:
    """Work that is due in an iteration after its batch has been collected."""

    gradient_steps: int
    """number of gradient steps in each process."""
    evaluations: int
    """number of evaluations after the update."""
    row: bool
    """whether to write a row of metrics at the end of the iteration."""
    checkpoint: bool
    """whether to write a checkpoint at the end of the iteration. ``False`` at the end of the run,
    where the trainer always writes a checkpoint."""


class RunSchedule:
    """Computes the work that is due after each collection in a run.

    Periods are in policy steps (total) or, for offline plans, in gradient steps in each process. An
    event is due at the end of each iteration that crosses a multiple of the event's period.
    Therefore, events do not drift, and do not depend on where a run was resumed.

    Args:
        plan: plan of the run.
        log_every: period of metrics; ``None``: 1% of the run.
        checkpoint_every: period of checkpoints; ``None``: 10% of the run.

    Raises:
        SettingError: if a period is not a whole number of at least 1.
    """

    _STATE = ("iterations", "policy_steps", "gradient_steps", "_surplus", "_learning")

    def __init__(
        self,
        plan: PlannedCounts,
        *,
        log_every: int | None = None,
        checkpoint_every: int | None = None,
    ) -> None:
        self.plan = plan
        self.log_every = self._period("log_every", log_every, 100)
        self.checkpoint_every = self._period("checkpoint_every", checkpoint_every, 10)
        self.iterations = self.gradient_steps = self.policy_steps = 0
        if not plan.prefill_is_iteration:  # for inexact plans, use the requested number
            self.policy_steps = plan.policy_steps_after(0) if plan.is_exact else plan.prefill_steps
        self._surplus = 0
        self._learning = False
        self._rule = counting_rule(plan.counting)(plan)
        self._pretrain_steps = 0 if self._rule.pretrains else plan.pretrain_steps

    def _period(self, field: str, period: int | None, share: int) -> int:
        if period is not None:
            return whole_number(field, period, at_least=1)
        return max((self.plan.length or 1) // share, 1)

    @property
    def progress(self) -> int:
        """Policy steps so far or, for offline plans, gradient steps in each process."""
        steps: int = getattr(self, self.plan.axis)
        return steps

    @property
    def done(self) -> bool:
        """Whether all planned iterations (inexact plans: policy steps) have been collected."""
        if self.plan.iterations is not None:
            return self.iterations >= self.plan.iterations
        return self.policy_steps >= self.plan.total_policy_steps

    @property
    def initial_evaluations(self) -> int:
        """Number of evaluations before the first iteration."""
        return self._evaluations(0, 0)

    def prefilled(self, policy_steps: int) -> None:
        """Set the actual number of prefill steps. Whole episodes may take more than planned.

        The additional steps do not count toward ``learning_starts``.

        Args:
            policy_steps: number of policy steps collected, summed over all processes.
        """
        self._surplus = policy_steps - self.policy_steps
        self.policy_steps = policy_steps

    def advance(self, policy_steps: int) -> Due:
        """Advance by one iteration of ``policy_steps`` steps per process; return the due work."""
        before = self.progress
        self.iterations += 1
        self.policy_steps += policy_steps * self.plan.world_size
        gradient_steps = self._newly_due(policy_steps)
        self.gradient_steps += gradient_steps
        evaluations = self._evaluations(self.iterations, before)
        done = self.done
        checkpoint = not done and self._crossed(self.checkpoint_every, before)
        row = done or evaluations > 0 or self._crossed(self.log_every, before)
        return Due(gradient_steps, evaluations, row=row, checkpoint=checkpoint)

    def _newly_due(self, policy_steps: int) -> int:
        if self.policy_steps - self._surplus < self.plan.learning_starts:
            return 0
        pretrain = 0 if self._learning else self._pretrain_steps
        self._learning = True
        return pretrain + self._rule.advance(policy_steps)

    def _crossed(self, period: int | None, before: int) -> bool:
        return multiples_crossed(period, before, self.progress) > 0

    def _evaluations(self, iteration: int, before: int) -> int:
        """Return the number of evaluations due after ``iteration`` (0: at the start of the run)."""
        plan = self.plan
        if plan.is_exact:
            return plan.evaluations(iteration)
        every, early = plan.evaluation_every_iterations, plan.evaluation_before_update
        if iteration == 0:
            return plan.initial_evaluations + (every is not None and early and not self.done)
        due = multiples_crossed(plan.evaluation_every, before, self.progress)
        if every is not None:
            due = int(iteration % every == 0 and not (early and self.done))
        if not plan.evaluate_each_multiple:
            due = min(due, 1)
        return due or int(plan.final_evaluation and self.done)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's position in the run as plain values."""
        return {name: getattr(self, name) for name in self._STATE} | {
            "rule": self._rule.state_dict()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        for name in self._STATE:
            setattr(self, name, state_dict[name])
        self._rule.load_state_dict(state_dict["rule"])


class _Epochs(CountingRule):
    """Rule that counts the gradient steps of ``update_epochs`` passes over each batch."""

    STATE = ("waiting",)

    def __init__(self, plan: PlannedCounts) -> None:
        self.plan = plan
        self.waiting = plan.local_prefill_steps if plan.prefill_in_first_batch else 0

    def advance(self, policy_steps: int) -> int:
        rows, self.waiting = policy_steps + self.waiting, 0
        newest = self.plan.train_on_newest
        return self.plan.epoch_gradient_steps(rows if newest is None else min(rows, newest))

    def total(self, trainings: int, policy_steps: int, first: int) -> int:
        start = self.plan.first_training_iteration
        each = self.plan.epoch_gradient_steps(self.plan.rows(start + 1)) if trainings > 1 else 0
        return self.plan.epoch_gradient_steps(self.plan.rows(start)) + (trainings - 1) * each


def _exact_rule(plan: PlannedCounts, argument: str) -> CountingRule:
    """Create the exact rule, which uses integers and fractions only."""
    if plan.replay_ratio is not None:
        return ReplayRatio(plan.replay_ratio)
    if plan.update_epochs is not None:
        return _Epochs(plan)
    return Fixed(plan.gradient_steps_per_iteration or 0)


COUNTING_RULES["exact"] = _exact_rule
