"""When gradient steps are due: the running counterpart of a plan."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from kit.steps.errors import SettingError, nearest_first
from kit.steps.ratio import ReplayRatio

if TYPE_CHECKING:
    from kit.steps.updates import UpdatePlan


class CountingRule(Protocol):
    """Turns collections into gradient steps. One object follows one run.

    A rule may have a few things more. ``pretrains = True`` says that it does the pretraining
    itself. ``total(trainings, policy_steps)`` returns the gradient steps of the first ``trainings``
    training iterations of ``policy_steps`` each, or ``None`` where only following them tells.
    ``follow(times, policy_steps)`` yields what so many calls of ``advance`` return, but faster.
    ``asks_each_step = True`` says that it takes as long as there are policy steps.
    """

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

    def __init__(self, plan: UpdatePlan) -> None:
        self.plan = plan
        self.waiting = plan.local_prefill_steps if plan.prefill_in_first_batch else 0

    def advance(self, policy_steps: int) -> int:
        rows, self.waiting = policy_steps + self.waiting, 0
        newest = self.plan.train_on_newest
        return self.plan.epoch_gradient_steps(rows if newest is None else min(rows, newest))

    def state_dict(self) -> dict[str, Any]:
        return {"waiting": self.waiting}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.waiting = int(state_dict["waiting"])


class Fixed:
    """The same number of gradient steps in every iteration.

    Args:
        gradient_steps: gradient steps of one iteration.
    """

    def __init__(self, gradient_steps: int) -> None:
        self.gradient_steps = gradient_steps

    def advance(self, policy_steps: int) -> int:
        """Return the gradient steps of one iteration, whatever it collected."""
        del policy_steps
        return self.gradient_steps

    def total(self, trainings: int, policy_steps: int) -> int:
        """Return the gradient steps of the first ``trainings`` iterations."""
        del policy_steps
        return trainings * self.gradient_steps

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is nothing to remember."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what :meth:`state_dict` returned."""
        del state_dict


def exact_rule(plan: UpdatePlan) -> CountingRule:
    """Return the kit's own rule for ``plan``: integers and one exact remainder."""
    if plan.replay_ratio is not None:
        return ReplayRatio(plan.replay_ratio)
    if plan.update_epochs is not None:
        return _Epochs(plan)
    return Fixed(plan.gradient_steps_per_iteration or 0)


RuleFactory = Callable[["UpdatePlan", str], CountingRule]

COUNTING_RULES: dict[str, RuleFactory] = {"exact": lambda plan, argument: exact_rule(plan)}
"""Rules by name, made from a plan and the text after the colon of ``counting="name:argument"``.

A dialect adds its library's rules when it is imported; their names begin with its module's name.
"""


@lru_cache(maxsize=256)
def counting_rule(counting: str) -> Callable[[UpdatePlan], CountingRule]:
    """Return what makes the rule called ``counting``, importing the dialect it belongs to.

    Args:
        counting: ``exact``, ``sheeprl-0.5.7``, or with an argument ``dreamer:24``.

    Raises:
        SettingError: if there is no such rule.
    """
    name, _, argument = counting.partition(":")
    if name not in COUNTING_RULES:
        module = name.split("-")[0]
        if module.isidentifier():
            try:
                importlib.import_module(f"kit.dialects.{module}")
            except ModuleNotFoundError as error:
                if error.name != f"kit.dialects.{module}":
                    raise
    if name not in COUNTING_RULES:
        rules = ", ".join(nearest_first(name, [*COUNTING_RULES])[:6])
        raise SettingError(
            "counting", counting, "is not a counting rule", ["exact"], f"known are {rules}"
        )
    factory = COUNTING_RULES[name]
    return lambda plan: factory(plan, argument)


class UpdateClock:
    """Follows a run and says, after each collection, how many gradient steps are due.

    The trainer moves one; a plan moves another to predict. They agree because they are the same.

    Args:
        plan: what the run will do.
    """

    def __init__(self, plan: UpdatePlan) -> None:
        self.plan = plan
        self.policy_steps = 0 if plan.prefill_is_iteration else _prefilled(plan)
        self.learning = False
        self._rule = counting_rule(plan.counting)(plan)
        self._pretrain_steps = 0 if getattr(self._rule, "pretrains", False) else plan.pretrain_steps

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
        pretrain = 0 if self.learning else self._pretrain_steps
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


def _prefilled(plan: UpdatePlan) -> int:
    """Policy steps of a separate prefill: those asked for, where only the run will know more."""
    return plan.local_prefill_steps * plan.world_size if plan.is_exact else plan.prefill_steps
