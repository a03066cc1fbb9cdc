"""The settings of a plan that a user of a recipe gives; the rest follows from the environment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kit.steps.plan import StepPlan


@dataclass
class OnPolicySteps:
    """Steps of a recipe that trains on each batch and then forgets it."""

    total_policy_steps: int = 65_536
    """policy steps of the run, over all copies."""
    steps_per_env: int | None = 64
    """policy steps each copy takes in one iteration; a batch has num_envs times as many. null:
    whole episodes are collected."""
    min_episodes: int | None = None
    """whole episodes of one iteration, at least; null: one, if min_steps is given."""
    min_steps: int | None = None
    """policy steps of one iteration in whole episodes, at least."""
    update_epochs: int = 10
    """passes over each batch."""
    minibatch_size: int = 128
    """transitions in a minibatch."""
    evaluation_every: int | None = 8_192
    """policy steps between evaluations; null: only after the run."""
    evaluation_episodes: int = 10
    """whole episodes in one evaluation."""
    rounding: str = "error"
    """what to do with a total that does not divide: error, down or up."""

    def to_plan(self, **environment: Any) -> StepPlan:
        """Return the plan.

        Args:
            **environment: fields of the plan that the environment decides: ``num_envs``,
                ``action_repeat``, ``max_episode_steps``.

        Raises:
            SettingError: if the settings make no plan.
        """
        return StepPlan(**asdict(self), **environment)


@dataclass
class OffPolicySteps:
    """Steps of a recipe that trains on samples of a replay buffer."""

    total_policy_steps: int = 20_000
    """policy steps of the run, over all copies."""
    steps_per_env: int | None = 1
    """policy steps each copy takes in one iteration; null: whole episodes are collected."""
    min_episodes: int | None = None
    """whole episodes of one iteration, at least; null: one, if min_steps is given."""
    min_steps: int | None = None
    """policy steps of one iteration in whole episodes, at least."""
    learning_starts: int = 1_000
    """policy steps with random actions before the first gradient step."""
    replay_ratio: Any = 1
    """gradient steps per policy step: a number, or a fraction such as "1/4"; exact."""
    pretrain_steps: int = 0
    """gradient steps done once, when learning starts, on top of those due."""
    minibatch_size: int = 256
    """transitions in a minibatch."""
    evaluation_every: int | None = 2_000
    """policy steps between evaluations; null: only after the run."""
    evaluation_episodes: int = 10
    """whole episodes in one evaluation."""
    rounding: str = "error"
    """what to do with a total that does not divide: error, down or up."""

    def to_plan(self, **environment: Any) -> StepPlan:
        """Return the plan.

        Args:
            **environment: fields of the plan that the environment decides: ``num_envs``,
                ``action_repeat``, ``max_episode_steps``.

        Raises:
            SettingError: if the settings make no plan.
        """
        return StepPlan(**asdict(self), **environment)
