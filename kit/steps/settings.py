"""Step settings for recipes. The environment provides the remaining settings of a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kit.steps.counts import Rounding
from kit.steps.errors import SettingError
from kit.steps.given import GivenFields, given_fields
from kit.steps.plan import StepPlan
from kit.steps.schema import NonNegativeInt, PositiveInt


@dataclass
class _Steps(GivenFields):
    """Step settings shared by on-policy and off-policy recipes."""

    total_policy_steps: int
    """policy steps in the run, summed over all envs."""
    steps_per_env: int | None
    """policy steps per env and iteration; null: collect whole episodes."""
    frames_per_batch: int | None = field(default=None, kw_only=True)
    """policy steps per iteration, summed over all envs (num_envs * steps_per_env); null: use
    steps_per_env."""
    min_episodes: int | None = None
    """minimum number of complete episodes per iteration. null: 1, if min_steps is set."""
    min_steps: int | None = None
    """minimum number of policy steps per iteration when whole episodes are collected."""
    evaluation_every: int | None = None
    """policy steps between evaluations; null: only after the run."""
    evaluation_episodes: int = 10
    """number of whole episodes per evaluation."""
    rounding: Rounding = "up"
    """how to round total_policy_steps to whole iterations, and learning_starts and random_steps to
    multiples of num_envs: up, down, or error (raise an error instead)."""

    def to_plan(self, **environment: Any) -> StepPlan:
        """Return the plan for these settings.

        Args:
            **environment: fields of the plan that depend on the environment: ``num_envs``,
                ``action_repeat`` and ``max_episode_steps``.

        Raises:
            SettingError: if the settings are inconsistent.
        """
        return StepPlan(**self._collection(), **environment)

    def _collection(self) -> dict[str, Any]:
        """Return the plan's settings, with only one setting for the batch size."""
        settings, given = asdict(self), given_fields(self)
        counted = {n for n in ("steps_per_env", "frames_per_batch") if settings[n] is not None}
        if counted & given and given.isdisjoint(_EPISODES):
            settings |= dict.fromkeys(_EPISODES)
        if self.frames_per_batch is not None and "steps_per_env" not in given:
            settings["steps_per_env"] = None
        return settings


_EPISODES = ("min_episodes", "min_steps")


@dataclass
class OnPolicySteps(_Steps):
    """Step settings for on-policy recipes, which discard each batch after training on it."""

    total_policy_steps: int = 65_536
    steps_per_env: int | None = 64
    """policy steps per env and iteration; a batch has num_envs * steps_per_env transitions.
    null: collect whole episodes."""
    evaluation_every: int | None = 8_192
    update_epochs: int = 10
    """number of passes over each batch."""
    minibatch_size: int | None = 128
    """transitions (sequences if sequence_length is set) per minibatch; null: the whole batch."""
    sequence_length: int | None = None
    """time steps per training sequence; null: train on single transitions."""
    minibatches: PositiveInt | None = None
    """number of equal minibatches per epoch, instead of minibatch_size; null: use
    minibatch_size."""
    num_normalization_steps: NonNegativeInt = 0
    """policy steps with random actions before the first iteration, included in the total. The
    observation statistics are estimated from these steps and then frozen. 0: the statistics are
    updated throughout training."""

    def to_plan(self, **environment: Any) -> StepPlan:
        """Return the plan, with ``minibatches`` converted to a minibatch size."""
        settings = {**self._collection(), **environment}
        minibatches = settings.pop("minibatches")
        settings["prefill_steps"] = self._normalization_steps(settings)
        if minibatches is not None:
            whole = StepPlan(**{**settings, "minibatch_size": None})
            settings["minibatch_size"] = self._equal_part(whole, minibatches)
        return StepPlan(**settings)

    def _normalization_steps(self, settings: dict[str, Any]) -> int:
        """Remove ``num_normalization_steps`` from a plan's settings and return its value."""
        count: int = settings.pop("num_normalization_steps")
        if count and any(settings[name] is not None for name in _EPISODES):
            why = "cannot be combined with collecting whole episodes"
            raise SettingError("num_normalization_steps", count, why, [0])
        envs = settings.get("num_envs", 1)
        if left := count % envs:
            why = f"is not divisible by num_envs={envs}"
            near = [count - left, count - left + envs]
            raise SettingError("num_normalization_steps", count, why, near)
        return count

    def _equal_part(self, plan: StepPlan, count: int) -> int:
        """Return the minibatch size that divides a batch into ``count`` equal parts."""
        if self.minibatch_size is not None and "minibatch_size" in given_fields(self):
            why = f"conflicts with steps.minibatch_size={self.minibatch_size}"
            raise SettingError("minibatches", count, why, [None])
        if plan.collects_episodes:
            why = "cannot divide whole episodes, because their lengths are not known in advance"
            raise SettingError("minibatches", count, why, [None], "or set minibatch_size")
        rows = plan.frames_per_batch // (plan.sequence_length or 1)
        if rows % count:
            divisors = [n for n in range(1, rows + 1) if rows % n == 0]
            nearest = sorted(divisors, key=lambda n: abs(n - count))[:2]
            batch = f"num_envs={plan.num_envs} x steps_per_env={plan.steps_per_env}"
            why = f"does not divide a batch of {rows} ({batch})"
            raise SettingError("minibatches", count, why, sorted(nearest))
        return rows // count


@dataclass
class OffPolicySteps(_Steps):
    """Step settings for off-policy recipes, which sample minibatches from a replay buffer."""

    total_policy_steps: int = 20_000
    steps_per_env: int | None = 1
    evaluation_every: int | None = 2_000
    learning_starts: int = 1_000
    """policy steps before the first gradient step."""
    random_steps: int | None = None
    """policy steps with random actions at the start of the run. null: learning_starts steps."""
    replay_ratio: Any = 1
    """gradient steps per policy step: a number or an exact fraction such as "1/4"."""
    pretrain_steps: int = 0
    """additional gradient steps taken once, when learning starts."""
    minibatch_size: int = 256
    """transitions (or sequences, if sequence_length is set) per minibatch."""
    sequence_length: int | None = None
    """time steps per sampled sequence; null: sample single transitions."""


@dataclass
class SequenceSteps(OffPolicySteps):
    """Step settings for recipes that train on sequences, such as world models."""

    steps_per_env: int | None = 4
    learning_starts: int = 512
    random_steps: int | None = 0
    replay_ratio: Any = "1/4"
    """gradient steps per policy step: a number or an exact fraction such as "1/4". The train ratio
    of the Dreamer papers is replay_ratio * minibatch_size * sequence_length, from 32 (Atari) to
    1,024 (control)."""
    minibatch_size: int = 16
    """sequences per minibatch."""
    sequence_length: int | None = 32
    """time steps per sampled sequence."""
    evaluation_every: int | None = 4_000


@dataclass
class ExplorationSteps(SequenceSteps):
    """Step settings for recipes with an exploration phase."""

    exploration_steps: int = 12_000
    """policy steps taken by the exploration policy at the start of the run."""


@dataclass
class OfflineSteps(GivenFields):
    """Step settings for offline recipes, which only take gradient steps."""

    gradient_steps: PositiveInt = 20_000
    """gradient steps in the run."""
    gradient_steps_per_iteration: PositiveInt = 100
    """gradient steps per iteration. Time limits are only checked between iterations."""
    minibatch_size: int = 256
    """transitions per minibatch."""
    evaluation_every: int | None = None
    """gradient steps between evaluations; null: only after the run."""
    evaluation_episodes: int = 10
    """number of whole episodes per evaluation."""

    def to_plan(self, **environment: Any) -> StepPlan:
        """Create a plan from these settings, combined with the plan fields in ``environment``."""
        settings = asdict(self)
        total, each = settings.pop("gradient_steps"), self.gradient_steps_per_iteration
        if total % each:
            why = f"is not a multiple of gradient_steps_per_iteration={each}"
            works = [max(each, total // each * each), (total // each + 1) * each]
            raise SettingError("gradient_steps", total, why, works)
        return StepPlan(iterations=total // each, steps_per_env=0, **settings, **environment)
