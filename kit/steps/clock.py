"""When gradient steps are due: the running counterpart of a plan."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from kit.steps.errors import SettingError
from kit.steps.ratio import ReplayRatio

if TYPE_CHECKING:
    from kit.steps.plan import StepPlan


class CountingRule(Protocol):
    """Turns collections into gradient steps. One object follows one run."""

    def advance(self, policy_steps: int) -> int:
        """Take the policy steps one process collected in a training iteration.

        Returns:
            Gradient steps of one process that are due before the next collection.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on after a resume: plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


class _Epochs:
    """Passes over the collected batch."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan

    def advance(self, policy_steps: int) -> int:
        return self.plan.epoch_gradient_steps(policy_steps)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        del state_dict


class _Fixed(_Epochs):
    """The same number in every iteration."""

    def advance(self, policy_steps: int) -> int:
        del policy_steps
        return self.plan.gradient_steps_per_iteration or 0


def exact_rule(plan: StepPlan) -> CountingRule:
    """Return the kit's own rule for ``plan``: integers and one exact remainder."""
    if plan.replay_ratio is not None:
        return ReplayRatio(plan.replay_ratio)
    return _Epochs(plan) if plan.update_epochs is not None else _Fixed(plan)


COUNTING_RULES: dict[str, Callable[[StepPlan], CountingRule]] = {"exact": exact_rule}
"""Rules by name. A dialect adds its library's rule when it is imported."""


def counting_rule(name: str) -> Callable[[StepPlan], CountingRule]:
    """Return the rule called ``name``, importing the dialect it belongs to (``sheeprl-0.5.7``).

    Raises:
        SettingError: if there is no such rule.
    """
    if name not in COUNTING_RULES:
        try:
            importlib.import_module(f"kit.steps.dialects.{name.split('-')[0]}")
        except (ImportError, ValueError):
            pass
    if name not in COUNTING_RULES:
        raise SettingError("counting", name, "is not a counting rule", sorted(COUNTING_RULES))
    return COUNTING_RULES[name]


class UpdateClock:
    """Follows a run and says, after each collection, how many gradient steps are due.

    The trainer moves one; a plan moves another to predict. They agree because they are the same.

    Args:
        plan: what the run will do.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.policy_steps = 0 if plan.prefill_is_iteration else plan.prefill_steps
        self.learning = False
        self._rule = counting_rule(plan.counting)(plan)

    def advance(self, policy_steps: int) -> int:
        """Take one iteration's collection and return the gradient steps now due.

        Args:
            policy_steps: policy steps that one process has collected in this iteration.

        Returns:
            Gradient steps of one process, pretraining included when learning starts.
        """
        self.policy_steps += policy_steps * self.plan.world_size
        if self.policy_steps < self.plan.learning_starts:
            return 0
        pretrain = 0 if self.learning else self.plan.pretrain_steps
        self.learning = True
        return pretrain + self._rule.advance(policy_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the run: plain values."""
        return {
            "policy_steps": self.policy_steps,
            "learning": self.learning,
            "rule": self._rule.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.policy_steps = int(state_dict["policy_steps"])
        self.learning = bool(state_dict["learning"])
        self._rule.load_state_dict(state_dict["rule"])
