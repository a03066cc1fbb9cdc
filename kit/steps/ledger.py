"""The counts of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kit.steps.counts import PlannedCounts


@dataclass(frozen=True)
class Difference:
    """One count that is not what the plan says."""

    name: str
    """name of the counter."""
    planned: int
    """expected by the plan after as many iterations."""
    counted: int
    """in the run."""

    def __str__(self) -> str:
        return f"{self.name}: planned {self.planned}, counted {self.counted}"


class PlanNotKept(RuntimeError):
    """Counts of a run differ from its plan.

    Args:
        differences: the counts that differ.
    """

    def __init__(self, differences: Sequence[Difference]) -> None:
        self.differences = list(differences)
        super().__init__("the run did not do what was planned: " + "; ".join(map(str, differences)))


class StepLedger:
    """Counts of one run, in integers.

    ``local`` counters are those of this process; those without the word are totals over all
    processes. Processes collect and update in step, so totals of policy steps, gradient steps and
    samples are ``world_size`` times the local ones; env steps and episodes differ from process to
    process and their totals are set by :meth:`synchronize`.

    Args:
        world_size: processes that train together.
    """

    _COUNTERS = (
        "iterations",
        "local_policy_steps",
        "local_random_policy_steps",
        "local_env_steps",
        "local_episodes",
        "local_gradient_steps",
        "local_samples",
        "local_skipped_gradient_steps",
        "local_skipped_samples",
        "update_epochs",
        "evaluations",
        "evaluation_episodes",
        "environment_errors",
    )

    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size
        self.iterations = 0
        self.local_policy_steps = 0
        self.local_random_policy_steps = 0
        self.local_env_steps = 0
        self.local_episodes = 0
        self.local_gradient_steps = 0
        self.local_samples = 0
        self.local_skipped_gradient_steps = 0
        self.local_skipped_samples = 0
        self.update_epochs = 0
        self.evaluations = 0
        self.evaluation_episodes = 0
        self.environment_errors = 0
        self._env_steps: int | None = None
        self._episodes: int | None = None

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
        totals = {
            "iterations": self.iterations,
            "policy_steps": self.policy_steps,
            "random_policy_steps": self.random_policy_steps,
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "update_epochs": self.update_epochs,
            "gradient_steps": self.gradient_steps,
            "skipped_gradient_steps": self.skipped_gradient_steps,
            "samples": self.samples,
            "evaluations": self.evaluations,
            "evaluation_episodes": self.evaluation_episodes,
            "environment_errors": self.environment_errors,
        }
        if self.world_size > 1:
            totals |= {n: getattr(self, n) for n in self._COUNTERS if n.startswith("local_")}
        return totals

    # ------------------------------------------------------------------ proof
    def verify(self, plan: PlannedCounts) -> None:
        """Compare with ``plan``.

        Raises:
            PlanNotKept: if a count differs from what :meth:`compare` expects.
        """
        differences = self.compare(plan)
        if differences:
            raise PlanNotKept(differences)

    def compare(self, plan: PlannedCounts) -> list[Difference]:
        """The counts that differ from what ``plan`` says after as many iterations.

        Gradient steps that a hook has skipped count as done: the plan says how many are due.
        Env steps are compared as far as a plan can know them: exactly without action repeat, else
        between one and ``action_repeat`` per policy step.
        """
        found: list[Difference] = []
        if plan.is_exact:
            expected = plan.after(min(self.iterations, plan.iterations))
            known = ("iterations", "policy_steps", "random_policy_steps")
            pairs = [(name, getattr(expected, name), getattr(self, name)) for name in known]
            steps = self.gradient_steps + self.skipped_gradient_steps
            pairs.append(("gradient_steps", expected.gradient_steps, steps))
            if plan.minibatch_size is not None or plan.update_epochs is not None:
                samples = self.samples + self.local_skipped_samples * self.world_size
                pairs.append(("samples", expected.samples, samples))
            pairs.append(("evaluations", expected.evaluations, self.evaluations))
            found = [Difference(*pair) for pair in pairs if pair[1] != pair[2]]
        # Env steps are those of this process alone until synchronize() has set the totals.
        steps = self.local_policy_steps if self._env_steps is None else self.policy_steps
        nearest = min(max(self.env_steps, steps), steps * plan.action_repeat)
        if nearest != self.env_steps:
            found.append(Difference("env_steps", nearest, self.env_steps))
        return found

    # ------------------------------------------------------------------ in and out
    def state_dict(self) -> dict[str, Any]:
        """Every counter: plain values."""
        state: dict[str, Any] = {name: getattr(self, name) for name in self._COUNTERS}
        return state | {"env_steps": self._env_steps, "episodes": self._episodes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        for name in self._COUNTERS:
            setattr(self, name, int(state_dict[name]))
        self._env_steps, self._episodes = state_dict["env_steps"], state_dict["episodes"]

    def __repr__(self) -> str:
        return f"StepLedger({', '.join(f'{k}={v}' for k, v in self.counters().items())})"
