"""What a run will do, known exactly before it starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from kit.steps import validation
from kit.steps.errors import SettingError, nearest_first
from kit.steps.evaluation import EvaluationPlan

if TYPE_CHECKING:
    from kit.steps.ledger import StepLedger

Rounding = Literal["error", "down", "up"]


@dataclass(frozen=True, slots=True)
class Counts:
    """What has happened after some iteration; totals over all processes unless named local."""

    iterations: int
    """collections, each followed by one update phase."""
    policy_steps: int
    """actions chosen, over all copies of all processes."""
    random_policy_steps: int
    """policy steps with random actions, part of ``policy_steps``."""
    local_gradient_steps: int
    """optimiser updates of one process."""
    gradient_steps: int
    """optimiser updates of all processes together."""
    samples: int
    """transitions trained on by all processes together, each as often as it was used."""
    evaluations: int
    """evaluation phases, of ``evaluation_episodes`` episodes each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan(EvaluationPlan):
    """Every count of a run, before it runs.

    A run is a number of iterations. Each collects ``steps_per_env`` policy steps from each of
    ``num_envs`` copies in each of ``world_size`` processes, and then makes the gradient steps that
    are due: ``update_epochs`` passes over the batch (on-policy), ``replay_ratio`` gradient steps
    per policy step (off-policy), or ``gradient_steps_per_iteration``. At most one of the three is
    given; without any of them nothing is trained.

    The settings are documented where they are counted: what is collected in ``CollectionPlan``,
    what is trained in ``UpdatePlan``, when the policy is evaluated in ``EvaluationPlan``.

    Two plans are equal if they make the same run, count by count and iteration by iteration, even
    if they say it in different settings: ``replay_ratio=1/4`` with batches of four policy steps is
    ``gradient_steps_per_iteration=1``.

    Raises:
        SettingError: if a setting is invalid, contradicts another or cannot be reached exactly.
            The message names the field, the value, why, and the nearest values that work.

    Examples:
        >>> plan = StepPlan(
        ...     total_policy_steps=65_536, num_envs=8, steps_per_env=128, update_epochs=4,
        ...     minibatch_size=256,
        ... )
        >>> plan.iterations, plan.frames_per_batch, plan.after(1).gradient_steps
        (64, 1024, 16)
    """

    rounding: Rounding = "error"
    """what to do with counts that do not divide: refuse them, or round them ``down`` or ``up``."""
    asked: dict[str, Any] = field(default_factory=dict, repr=False)
    """what was asked where rounding changed it (filled in)."""

    def __post_init__(self) -> None:
        validation.complete(self)

    def after(self, iteration: int) -> Counts:
        """Return the counts at the end of ``iteration``; 0 is the start of the run.

        Raises:
            SettingError: if ``iteration`` is not in the plan, or the plan is not exact.
        """
        if not 0 <= iteration <= self.iterations:
            raise SettingError("iteration", iteration, "is not in the plan", [0, self.iterations])
        steps = self.policy_steps_after(iteration)
        gradient_steps = self.gradient_steps_after(iteration)
        return Counts(
            iterations=iteration,
            policy_steps=steps,
            random_policy_steps=self.random_steps_until(steps),
            local_gradient_steps=gradient_steps,
            gradient_steps=gradient_steps * self.world_size,
            samples=self.samples_after(iteration) * self.world_size,
            evaluations=self.evaluations_after(iteration),
        )

    # ------------------------------------------------------------------ equality
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepPlan):
            return NotImplemented
        return self._run == other._run

    def __hash__(self) -> int:
        return hash(self._run)

    @property
    def _run(self) -> tuple[tuple[str, Any], ...]:
        from kit.steps.same_run import run_key

        return run_key(self)

    # ------------------------------------------------------------------ in and out
    def to_dict(self) -> dict[str, Any]:
        """Return plain values (JSON, YAML) from which :meth:`from_dict` makes an equal plan."""
        values = asdict(self)
        values["replay_ratio"] = None if self.replay_ratio is None else str(self.replay_ratio)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StepPlan:
        """Make a plan from what :meth:`to_dict` returned.

        Raises:
            SettingError: if a key is no field of a plan, or a value is invalid.
        """
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise SettingError(
                    name,
                    values[name],
                    "is not a setting of a plan",
                    nearest_first(name, known)[:3],
                )
        return cls(**values)

    def replace(self, **changes: Any) -> StepPlan:
        """Return a plan with some settings changed; the iterations follow from the budget anew."""
        values = asdict(self)
        offline = self.steps_per_env == 0  # nothing is collected: a budget says nothing
        derived = "total_policy_steps" if "iterations" in changes or offline else "iterations"
        if self.is_exact and not {"total_policy_steps", "iterations"} <= set(changes):
            del values[derived]
        return type(self)(**{**values, **changes})

    def table(self, ledger: StepLedger | None = None) -> str:
        """Return the plan as a text table: asked, planned and, given a ledger, counted."""
        from kit.steps.table import plan_table

        return plan_table(self, ledger)
