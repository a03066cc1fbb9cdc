"""Plan that computes all step counts before a run starts."""

from __future__ import annotations

from dataclasses import InitVar, asdict, dataclass
from typing import Any, Self

from kit.steps.counts import PlannedCounts
from kit.steps.errors import check_fields
from kit.steps.given import given_fields
from kit.steps.ledger import StepLedger
from kit.steps.same_run import run_key
from kit.steps.schema import PositiveInt
from kit.steps.table import plan_table
from kit.steps.validation import complete


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan(PlannedCounts):
    """All step counts of a run, computed before the run starts.

    A run is a sequence of iterations. Each iteration collects ``steps_per_env`` policy steps from
    each of ``num_envs`` environments in each of ``world_size`` processes. Then it takes gradient
    steps, whose number is set by at most one of three settings:

    - ``update_epochs``: passes over the batch (on-policy),
    - ``replay_ratio``: gradient steps per policy step (off-policy),
    - ``gradient_steps_per_iteration``: a fixed number.

    If none of them is set, nothing is trained. With ``steps_per_env=0`` nothing is collected
    (offline). ``PlannedCounts`` documents all settings.

    Two plans are equal if their counts agree in every iteration, even if their settings differ.
    For example, ``replay_ratio=1/4`` with batches of four policy steps equals
    ``gradient_steps_per_iteration=1``.

    Raises:
        SettingError: if a setting is invalid, conflicts with another setting or cannot be reached
            exactly. The message contains the nearest valid values.

    Examples:
        >>> plan = StepPlan(
        ...     total_policy_steps=65_536, num_envs=8, steps_per_env=128, update_epochs=4,
        ...     minibatch_size=256,
        ... )
        >>> plan.iterations, plan.frames_per_batch, plan.after(1).gradient_steps
        (64, 1024, 16)
    """

    frames_per_batch: InitVar[PositiveInt | None] = None
    """policy steps per iteration in each process, as an alternative to ``steps_per_env``."""

    def __new__(cls, **settings: Any) -> Self:
        """Record which settings were passed, to detect explicit contradictions."""
        made = super().__new__(cls)
        object.__setattr__(made, "_given", frozenset(settings))
        return made

    def __post_init__(self, frames_per_batch: int | None) -> None:
        if frames_per_batch is not None and "steps_per_env" not in given_fields(self):
            object.__setattr__(self, "steps_per_env", None)
        complete(self, frames_per_batch)

    # ------------------------------------------------------------------ equality
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepPlan):
            return NotImplemented
        return run_key(self) == run_key(other)

    def __hash__(self) -> int:
        return hash(run_key(self))

    # ------------------------------------------------------------------ saving and loading
    def to_dict(self) -> dict[str, Any]:
        """Return plain values (JSON, YAML) from which :meth:`from_dict` creates an equal plan."""
        values = asdict(self)
        values["replay_ratio"] = None if self.replay_ratio is None else str(self.replay_ratio)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StepPlan:
        """Create a plan from the output of :meth:`to_dict`.

        Raises:
            SettingError: if a key is not a plan field, or a value is invalid.
        """
        named = {name: value for name, value in values.items() if name != "frames_per_batch"}
        check_fields(named, cls, "is not a setting of a plan")
        return cls(**values)

    def replace(self, **changes: Any) -> StepPlan:
        """Return a copy of the plan with some settings changed.

        Derived settings are recomputed: ``iterations`` (or ``total_policy_steps``, if iterations
        change or the plan is offline), and ``random_steps`` if it equals ``learning_starts``.
        """
        values = asdict(self)
        keep_iterations = "iterations" in changes or self.offline  # offline: no policy steps
        derived = "total_policy_steps" if keep_iterations else "iterations"
        if self.is_exact and not {"total_policy_steps", "iterations"} <= set(changes):
            del values[derived]
        if "learning_starts" in changes and self.random_steps == self.learning_starts:
            del values["random_steps"]
        if "frames_per_batch" in changes:
            del values["steps_per_env"]
        values["asked"].pop("frames_per_batch", None)
        return type(self)(**{**values, **changes})

    def table(self, ledger: StepLedger | None = None) -> str:
        """Return a text table of requested, planned and, with a ledger, counted values."""
        return plan_table(self, ledger)


# The default of this init argument is a class attribute that hides the inherited property.
del StepPlan.frames_per_batch
