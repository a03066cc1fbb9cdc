"""When a plan evaluates the policy."""

from __future__ import annotations

from dataclasses import dataclass

from kit.steps.errors import Count, Natural
from kit.steps.every import multiples_crossed
from kit.steps.updates import UpdatePlan


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationPlan(UpdatePlan):
    """The part of a plan that says when the policy is evaluated, and for how long.

    An evaluation follows the update phase of its iteration; iteration 0 stands for the start of
    the run.
    """

    evaluation_every: Count | None = None
    """policy steps (total; offline: gradient steps of one process) between evaluations; each comes
    at the end of the iteration that crosses a multiple. ``None``: none during training."""
    evaluation_every_iterations: Count | None = None
    """iterations between evaluations, in place of ``evaluation_every``."""
    evaluation_before_update: bool = False
    """whether an iteration evaluates the policy that collected, before its update phase, and the
    first one begins the count: the policy is that of the end of the previous iteration, so these
    evaluations are counted there, the first one before the run and none at its end."""
    evaluation_episodes: Count = 10
    """whole episodes in one evaluation."""
    initial_evaluations: Natural = 0
    """evaluations before the first iteration."""
    final_evaluation: bool = True
    """whether the run ends with an evaluation even where none is due."""

    def evaluations(self, iteration: int) -> int:
        """How many evaluations follow ``iteration``; 0 means those before the first one."""
        before = self.evaluations_after(iteration - 1) if iteration else 0
        return self.evaluations_after(iteration) - before

    def evaluations_after(self, iteration: int) -> int:
        """Evaluations done once ``iteration`` and its evaluations have ended."""
        done = self.initial_evaluations + self._due_until(iteration)
        if self.final_evaluation and iteration == self.iterations and not self.ends_on_evaluation:
            done += 1
        return done

    @property
    def ends_on_evaluation(self) -> bool:
        """Whether an evaluation is due at the end of the last iteration."""
        last = self.iterations
        return last > 0 and self._due_until(last) > self._due_until(last - 1)

    def _due_until(self, iteration: int) -> int:
        """How many evaluations are due during training up to the end of ``iteration``."""
        if self.evaluation_every_iterations is None:
            return self._crossings_until(iteration)
        period = self.evaluation_every_iterations
        if not self.evaluation_before_update:
            return iteration // period
        # Counted one iteration early: at the end of the one before, and none at the very end.
        return min(iteration, self.iterations - 1) // period + 1 if self.iterations else 0

    def _crossings_until(self, iteration: int) -> int:
        """How many of the first iterations cross a multiple of ``evaluation_every``."""
        every = self.evaluation_every
        if every is None:
            return 0
        if self.offline:
            progress, each = self.gradient_steps_after, self.gradient_steps_per_iteration or 0
        else:
            progress, each = self.policy_steps_after, self.policy_steps_per_iteration
        done = first = 0
        if (self.prefill_is_iteration or self.offline) and iteration:  # it differs from the others
            first = 1
            done = min(multiples_crossed(every, 0, progress(1)), 1)
        start = progress(first)
        each = each if iteration > first else 0
        if each >= every:  # every iteration crosses at least one multiple
            return done + (iteration - first)
        return done + multiples_crossed(every, start, start + (iteration - first) * each)
