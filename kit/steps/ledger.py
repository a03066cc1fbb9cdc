"""The counts of a run."""

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
    """One count that differs from the plan's."""

    name: str
    """name of the counter."""
    planned: int
    """expected by the plan after as many iterations."""
    counted: int
    """in the run."""

    def __str__(self) -> str:
        return f"{self.name}: planned {self.planned}, counted {self.counted}"


class PlanMismatchError(RuntimeError):
    """Counts of a run differ from its plan."""

    def __init__(self, differences: Sequence[Difference]) -> None:
        self.differences = list(differences)
        super().__init__("the run did not do what was planned: " + "; ".join(map(str, differences)))


@dataclass(eq=False, repr=False)
class StepLedger:
    """Counts of one run, in integers.

    ``local`` counters are those of this process; those without the word are totals over all
    processes. Processes collect and update in step, so totals of policy steps, gradient steps and
    samples are ``world_size`` times the local ones; env steps and episodes differ from process to
    process and their totals are set by :meth:`synchronize`.
    """

    world_size: int = 1
    """processes that train together."""
    iterations: int = 0
    """collections, each followed by one update phase."""
    local_policy_steps: int = 0
    """actions chosen."""
    local_random_policy_steps: int = 0
    """of these at random."""
    local_env_steps: int = 0
    """calls into the simulators, as the environments report them."""
    local_episodes: int = 0
    """episodes that ended in training environments."""
    local_gradient_steps: int = 0
    """optimiser updates."""
    local_samples: int = 0
    """transitions trained on, each as often as it was used."""
    local_skipped_gradient_steps: int = 0
    """gradient steps that were due but not made, because a hook ended an update phase."""
    local_skipped_samples: int = 0
    """transitions that these would have trained on."""
    update_epochs: int = 0
    """passes over collected batches."""
    evaluations: int = 0
    """evaluation phases."""
    evaluation_episodes: int = 0
    """whole episodes in them."""
    environment_errors: int = 0
    """failures of environments that were recovered from."""
    _env_steps: int | None = None
    _episodes: int | None = None

    # ------------------------------------------------------------------ totals
    @property
    def policy_steps(self) -> int:
        """Actions chosen, in all processes."""
        return self.local_policy_steps * self.world_size

    @property
    def random_policy_steps(self) -> int:
        """Policy steps with random actions, in all processes."""
        return self.local_random_policy_steps * self.world_size

    @property
    def gradient_steps(self) -> int:
        """Optimiser updates, in all processes."""
        return self.local_gradient_steps * self.world_size

    @property
    def samples(self) -> int:
        """Transitions trained on, in all processes, each as often as it was used."""
        return self.local_samples * self.world_size

    @property
    def skipped_gradient_steps(self) -> int:
        """Gradient steps that were due but not made, because a hook ended an update phase."""
        return self.local_skipped_gradient_steps * self.world_size

    @property
    def env_steps(self) -> int:
        """Calls into the simulators, as the environments report them, in all processes."""
        return self.local_env_steps if self._env_steps is None else self._env_steps

    @property
    def episodes(self) -> int:
        """Episodes that ended in training environments, in all processes."""
        return self.local_episodes if self._episodes is None else self._episodes

    # ------------------------------------------------------------------ counting
    def collected(
        self, policy_steps: int, env_steps: int, episodes: int, random_policy_steps: int = 0
    ) -> None:
        """Count one collected batch of this process."""
        self.local_policy_steps += policy_steps
        self.local_env_steps += env_steps
        self.local_episodes += episodes
        self.local_random_policy_steps += random_policy_steps

    def updated(self, samples: int, gradient_steps: int = 1) -> None:
        """Count gradient steps of this process and the transitions they saw."""
        self.local_gradient_steps += gradient_steps
        self.local_samples += samples

    def skipped(self, samples: int, gradient_steps: int) -> None:
        """Count gradient steps that were due but not made, and their samples."""
        self.local_skipped_gradient_steps += gradient_steps
        self.local_skipped_samples += samples

    def evaluated(self, episodes: int) -> None:
        """Count one evaluation of ``episodes`` whole episodes."""
        self.evaluations += 1
        self.evaluation_episodes += episodes

    def synchronize(self, env_steps: int, episodes: int) -> None:
        """Set the totals that differ from process to process, summed over all of them."""
        self._env_steps, self._episodes = env_steps, episodes

    def counters(self) -> dict[str, int]:
        """Every counter by name; local ones too where several processes train."""
        totals = {name: getattr(self, name) for name in _TOTALS}
        if self.world_size > 1:
            totals |= {n: value for n, value in vars(self).items() if n.startswith("local_")}
        return totals

    # ------------------------------------------------------------------ proof
    def verify(self, plan: PlannedCounts) -> None:
        """Compare with ``plan``.

        Raises:
            PlanMismatchError: if a count differs from what :meth:`compare` expects.
        """
        if differences := self.compare(plan):
            raise PlanMismatchError(differences)

    def compare(self, plan: PlannedCounts) -> list[Difference]:
        """The counts that differ from those of ``plan`` after as many iterations.

        Gradient steps that a hook has skipped count as done: the plan says how many are due.
        Env steps are compared as far as a plan can know them: exactly without action repeat, else
        between one and ``action_repeat`` per policy step.
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
                del counted["samples"]  # only the buffer knows
            planned = ((name, getattr(expected, name), count) for name, count in counted.items())
            found = [Difference(*row) for row in planned if row[1] != row[2]]
        # Env steps are those of this process alone until synchronize() has set the totals.
        steps = self.local_policy_steps if self._env_steps is None else self.policy_steps
        nearest = min(max(self.env_steps, steps), steps * plan.action_repeat)
        if nearest != self.env_steps:
            found.append(Difference("env_steps", nearest, self.env_steps))
        return found

    # ------------------------------------------------------------------ in and out
    def state_dict(self) -> dict[str, Any]:
        """Every counter: plain values."""
        return {name: value for name, value in vars(self).items() if name != "world_size"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        for name in self.state_dict():
            setattr(self, name, state_dict[name])

    def __repr__(self) -> str:
        return f"StepLedger({', '.join(f'{k}={v}' for k, v in self.counters().items())})"
