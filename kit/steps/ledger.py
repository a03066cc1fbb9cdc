"""Ledger that records all step counts during a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kit.steps.counts import PlannedCounts

_TOTALS = ("iterations", "policy_steps", "random_policy_steps", "env_steps", "episodes",
           "update_epochs", "gradient_steps", "skipped_gradient_steps", "samples", "evaluations",
           "evaluation_episodes", "environment_errors")  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """Difference between a planned and a counted value."""

    name: str
    """name of the counter."""
    planned: int
    """planned value after the same number of iterations."""
    counted: int
    """value counted during the run."""

    def __str__(self) -> str:
        return f"{self.name}: planned {self.planned}, counted {self.counted}"


class PlanMismatchError(RuntimeError):
    """Raised if the counts of a run differ from its plan."""

    def __init__(self, differences: Sequence[Difference]) -> None:
        self.differences = list(differences)
        super().__init__("the counts differ from the plan: " + "; ".join(map(str, differences)))


@dataclass(eq=False, repr=False)
class StepLedger:
    """Integer counts of the steps and episodes in one run.

    Counters with the prefix ``local_`` belong to this process; the others are totals over all
    processes. All processes take the same number of policy steps, gradient steps and samples, so
    these totals are ``world_size`` times the local counts. Env steps and episodes differ between
    processes, so :meth:`synchronize` sets their totals.
    """

    world_size: int = 1
    """number of processes that train together."""
    iterations: int = 0
    """number of iterations, each with a collection and an update phase."""
    local_policy_steps: int = 0
    """number of selected actions."""
    local_random_policy_steps: int = 0
    """number of policy steps with random actions."""
    local_env_steps: int = 0
    """number of simulator steps, as reported by the environments."""
    local_episodes: int = 0
    """number of episodes that ended in training environments."""
    local_gradient_steps: int = 0
    """number of optimiser updates."""
    local_samples: int = 0
    """number of transitions trained on, counted once per use."""
    local_skipped_gradient_steps: int = 0
    """number of gradient steps skipped because a hook ended an update phase early."""
    local_skipped_samples: int = 0
    """number of transitions in the skipped gradient steps."""
    update_epochs: int = 0
    """number of passes over collected batches."""
    evaluations: int = 0
    """number of evaluations."""
    evaluation_episodes: int = 0
    """number of whole episodes played in evaluations."""
    local_environment_errors: int = 0
    """number of environment failures that the run recovered from."""
    _env_steps: int | None = None
    _episodes: int | None = None
    _environment_errors: int | None = None

    # ------------------------------------------------------------------ totals
    @property
    def policy_steps(self) -> int:
        """Number of selected actions, summed over all processes."""
        return self.local_policy_steps * self.world_size

    @property
    def random_policy_steps(self) -> int:
        """Number of policy steps with random actions, summed over all processes."""
        return self.local_random_policy_steps * self.world_size

    @property
    def gradient_steps(self) -> int:
        """Number of optimizer updates, summed over all processes."""
        return self.local_gradient_steps * self.world_size

    @property
    def samples(self) -> int:
        """Number of transitions trained on, summed over all processes and counted once per use."""
        return self.local_samples * self.world_size

    @property
    def skipped_gradient_steps(self) -> int:
        """Total gradient steps skipped because a hook ended an update phase early."""
        return self.local_skipped_gradient_steps * self.world_size

    @property
    def env_steps(self) -> int:
        """Number of simulator steps reported by the environments, summed over all processes."""
        return self.local_env_steps if self._env_steps is None else self._env_steps

    @property
    def episodes(self) -> int:
        """Number of finished training episodes, summed over all processes."""
        return self.local_episodes if self._episodes is None else self._episodes

    @property
    def environment_errors(self) -> int:
        """Number of environment failures that the run recovered from, over all processes."""
        total = self._environment_errors
        return self.local_environment_errors if total is None else total

    # ------------------------------------------------------------------ counting
    def collected(
        self, policy_steps: int, env_steps: int, episodes: int, random_policy_steps: int = 0
    ) -> None:
        """Count one batch collected by this process."""
        self.local_policy_steps += policy_steps
        self.local_env_steps += env_steps
        self.local_episodes += episodes
        self.local_random_policy_steps += random_policy_steps

    def updated(self, samples: int, gradient_steps: int = 1) -> None:
        """Count gradient steps taken by this process and their transitions."""
        self.local_gradient_steps += gradient_steps
        self.local_samples += samples

    def skipped(self, samples: int, gradient_steps: int) -> None:
        """Count skipped gradient steps and their samples."""
        self.local_skipped_gradient_steps += gradient_steps
        self.local_skipped_samples += samples

    def evaluated(self, episodes: int) -> None:
        """Count one evaluation with ``episodes`` whole episodes."""
        self.evaluations += 1
        self.evaluation_episodes += episodes

    def synchronize(self, env_steps: int, episodes: int, environment_errors: int = 0) -> None:
        """Set the totals of counters that differ between processes."""
        self._env_steps, self._episodes = env_steps, episodes
        self._environment_errors = environment_errors

    def counters(self) -> dict[str, int]:
        """Return all counters, keyed by name. If ``world_size`` > 1, include local counters."""
        totals = {name: getattr(self, name) for name in _TOTALS}
        if self.world_size > 1:
            totals |= {n: value for n, value in vars(self).items() if n.startswith("local_")}
        return totals

    # ------------------------------------------------------------------ verification
    def verify(self, plan: PlannedCounts) -> None:
        """Raise an error if a count differs from ``plan``.

        Raises:
            PlanMismatchError: if :meth:`compare` returns differences.
        """
        if differences := self.compare(plan):
            raise PlanMismatchError(differences)

    def compare(self, plan: PlannedCounts) -> list[Difference]:
        """Return the differences from ``plan`` after the same number of iterations.

        Skipped gradient steps count as taken. Without action repeat, env steps must equal policy
        steps. Otherwise, each policy step must have between 1 and ``action_repeat`` env steps.
        """
        found: list[Difference] = []
        if plan.is_exact:
            expected = plan.after(min(self.iterations, plan.iterations))
            counted = {
                "iterations": self.iterations,
                "policy_steps": self.policy_steps,
                "random_policy_steps": self.random_policy_steps,
                "gradient_steps": self.gradient_steps + self.skipped_gradient_steps,
                "samples": self.samples + self.local_skipped_samples * self.world_size,
                "evaluations": self.evaluations,
            }
            if plan.minibatch_size is None and plan.update_epochs is None:
                del counted["samples"]  # this count depends on the buffer size
            planned = ((name, getattr(expected, name), count) for name, count in counted.items())
            found = [Difference(*row) for row in planned if row[1] != row[2]]
        # Before synchronize() sets the totals, env steps are local to this process.
        steps = self.local_policy_steps if self._env_steps is None else self.policy_steps
        nearest = min(max(self.env_steps, steps), steps * plan.action_repeat)
        if nearest != self.env_steps:
            found.append(Difference("env_steps", nearest, self.env_steps))
        return found

    # ------------------------------------------------------------------ saving and loading
    def state_dict(self) -> dict[str, Any]:
        """Return all counters as plain values."""
        return {name: value for name, value in vars(self).items() if name != "world_size"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        saved = dict(state_dict)
        if (errors := saved.pop("environment_errors", None)) is not None:  # older checkpoints
            saved |= {"local_environment_errors": errors, "_environment_errors": None}
        for name in self.state_dict():
            setattr(self, name, saved[name])

    def __repr__(self) -> str:
        return f"StepLedger({', '.join(f'{k}={v}' for k, v in self.counters().items())})"
