"""The settings of a plan that a user of a recipe gives; the rest follows from the environment."""

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
    """What on-policy and off-policy recipes have in common."""

    total_policy_steps: int
    """policy steps of the run, over all envs."""
    steps_per_env: int | None
    """policy steps of each env in one iteration; null: whole episodes are collected."""
    frames_per_batch: int | None = field(default=None, kw_only=True)
    """policy steps of one iteration over all envs, in place of steps_per_env: num_envs times as
    many; null: as steps_per_env says."""
    min_episodes: int | None = None
    """whole episodes of one iteration, at least; null: one, if min_steps is given."""
    min_steps: int | None = None
    """policy steps of one iteration in whole episodes, at least."""
    evaluation_every: int | None = None
    """policy steps between evaluations; null: only after the run."""
    evaluation_episodes: int = 10
    """whole episodes in one evaluation."""
    rounding: Rounding = "up"
    """how to round total_policy_steps to whole iterations, and learning_starts and random_steps to
    steps of all environments: up, down, or error (not at all)."""

    def to_plan(self, **environment: Any) -> StepPlan:
        """The plan of these settings.

        Args:
            **environment: fields of the plan that the environment decides: ``num_envs``,
                ``action_repeat``, ``max_episode_steps``.

        Raises:
            SettingError: if the settings make no plan.
        """
        return StepPlan(**self._collection(), **environment)

    def _collection(self) -> dict[str, Any]:
        """Return the settings of the plan, of which one says how much is collected."""
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
    """Steps of an on-policy recipe: each batch is trained on once collected, then discarded."""

    total_policy_steps: int = 65_536
    steps_per_env: int | None = 64
    """policy steps of each env in one iteration; a batch has num_envs times as many. null: whole
    episodes are collected."""
    evaluation_every: int | None = 8_192
    update_epochs: int = 10
    """passes over each batch."""
    minibatch_size: int | None = 128
    """transitions (with sequence_length: sequences) in a minibatch; null: the whole batch."""
    sequence_length: int | None = None
    """time steps of each sequence of a minibatch; null: single transitions."""
    minibatches: PositiveInt | None = None
    """equal minibatches of one epoch, in place of minibatch_size; null: as minibatch_size says."""
    num_normalization_steps: NonNegativeInt = 0
    """policy steps with random actions before the first iteration, part of the total, from which
    the statistics of observations are, for good; 0: they run along with training."""

    def to_plan(self, **environment: Any) -> StepPlan:
        """The plan, as for :class:`_Steps`; ``minibatches`` are those of its batch."""
        settings = {**self._collection(), **environment}
        minibatches = settings.pop("minibatches")
        settings["prefill_steps"] = self._normalization_steps(settings)
        if minibatches is not None:
            whole = StepPlan(**{**settings, "minibatch_size": None})
            settings["minibatch_size"] = self._equal_part(whole, minibatches)
        return StepPlan(**settings)

    def _normalization_steps(self, settings: dict[str, Any]) -> int:
        """Take the steps of normalisation out of the settings of a plan."""
        count: int = settings.pop("num_normalization_steps")
        if count and any(settings[name] is not None for name in _EPISODES):
            why = "are no whole episodes, which are collected here"
            raise SettingError("num_normalization_steps", count, why, [0])
        envs = settings.get("num_envs", 1)
        if left := count % envs:
            why = f"are not as many in each of {envs} environments"
            near = [count - left, count - left + envs]
            raise SettingError("num_normalization_steps", count, why, near)
        return count

    def _equal_part(self, plan: StepPlan, count: int) -> int:
        """The size of one of ``count`` equal parts of a batch of ``plan``."""
        if self.minibatch_size is not None and "minibatch_size" in given_fields(self):
            why = f"contradicts minibatch_size={self.minibatch_size}"
            raise SettingError("minibatches", count, why, [None])
        if plan.collects_episodes:
            why = "cannot divide whole episodes, whose number of steps is not known beforehand"
            raise SettingError("minibatches", count, why, [None], "or give minibatch_size")
        rows = plan.frames_per_batch // (plan.sequence_length or 1)
        if rows % count:
            divisors = [n for n in range(1, rows + 1) if rows % n == 0]
            nearest = sorted(divisors, key=lambda n: abs(n - count))[:2]
            batch = f"num_envs={plan.num_envs} x steps_per_env={plan.steps_per_env}"
            why = f"does not divide the {rows} of one batch ({batch})"
            raise SettingError("minibatches", count, why, sorted(nearest))
        return rows // count


@dataclass
class OffPolicySteps(_Steps):
    """Steps of an off-policy recipe: minibatches are sampled from a replay buffer."""

    total_policy_steps: int = 20_000
    steps_per_env: int | None = 1
    evaluation_every: int | None = 2_000
    learning_starts: int = 1_000
    """policy steps before the first gradient step."""
    random_steps: int | None = None
    """policy steps with random actions, at first; null: learning_starts."""
    replay_ratio: Any = 1
    """gradient steps per policy step: a number, or a fraction such as "1/4"; exact."""
    pretrain_steps: int = 0
    """gradient steps done once, when learning starts, on top of those due."""
    minibatch_size: int = 256
    """transitions (with sequence_length: sequences) in a minibatch."""
    sequence_length: int | None = None
    """time steps of each sampled sequence; null: single transitions are sampled."""


@dataclass
class SequenceSteps(OffPolicySteps):
    """Steps of a recipe that learns from sequences, such as a world model's."""

    steps_per_env: int | None = 4
    learning_starts: int = 512
    random_steps: int | None = 0
    replay_ratio: Any = "1/4"
    """gradient steps per policy step, exact. Times minibatch_size times sequence_length it is the
    train ratio of the Dreamer papers, published as 32 (Atari) to 1,024 (control)."""
    minibatch_size: int = 16
    """sequences in a minibatch."""
    sequence_length: int | None = 32
    """time steps of each sampled sequence."""
    evaluation_every: int | None = 4_000


@dataclass
class ExplorationSteps(SequenceSteps):
    """Steps of a recipe with an exploration phase."""

    exploration_steps: int = 12_000
    """policy steps of the exploration policy, at first."""


@dataclass
class OfflineSteps(GivenFields):
    """Steps of a recipe that learns from a stored data set: gradient steps alone."""

    gradient_steps: PositiveInt = 20_000
    """gradient steps of the run."""
    gradient_steps_per_iteration: PositiveInt = 100
    """gradient steps between two checks of the time, of stop requests and of schedules."""
    minibatch_size: int = 256
    """transitions in a minibatch."""
    evaluation_every: int | None = None
    """gradient steps between evaluations; null: only after the run."""
    evaluation_episodes: int = 10
    """whole episodes in one evaluation."""

    def to_plan(self, **environment: Any) -> StepPlan:
        """The plan of these settings, as for :class:`_Steps`."""
        settings = asdict(self)
        total, each = settings.pop("gradient_steps"), self.gradient_steps_per_iteration
        if total % each:
            why = f"is not a whole number of iterations of {each} gradient steps"
            works = [max(each, total // each * each), (total // each + 1) * each]
            raise SettingError("gradient_steps", total, why, works)
        return StepPlan(iterations=total // each, steps_per_env=0, **settings, **environment)
