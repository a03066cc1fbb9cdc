"""What a run will do, known exactly before it starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from kit.steps import validation
from kit.steps.clock import UpdateClock
from kit.steps.errors import SettingError
from kit.steps.every import multiples_crossed
from kit.steps.minibatches import (
    LastMinibatch,
    epoch_sizes,
    iteration_sizes,
    minibatches_per_epoch,
)

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


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Every count of a run, before it runs.

    A run is a number of iterations. Each collects ``steps_per_env`` policy steps from each of
    ``num_envs`` copies in each of ``world_size`` processes, and then makes the gradient steps that
    are due: ``update_epochs`` passes over the batch (on-policy), ``replay_ratio`` gradient steps
    per policy step (off-policy), or ``gradient_steps_per_iteration``. At most one of the three is
    given; without any of them nothing is trained.

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

    total_policy_steps: int = None  # type: ignore[assignment]  # filled in from iterations
    """policy steps of the run, over all copies of all processes, prefill included."""
    iterations: int = None  # type: ignore[assignment]  # filled in from total_policy_steps
    """iterations of the run; derived when ``total_policy_steps`` is given, and the other way."""
    num_envs: int = 1
    """environment copies in one process."""
    steps_per_env: int | None = 1
    """policy steps each copy takes in one iteration; 0 collects nothing (offline); ``None`` where
    whole episodes are collected."""
    world_size: int = 1
    """processes that train together, each with its own copies."""
    action_repeat: int = 1
    """env steps one action is held for; part of no other count."""
    max_episode_steps: int | None = None
    """policy steps after which an episode is truncated; ``None``: the environment's own limit."""

    min_episodes: int | None = None
    """whole episodes to collect in one iteration and process, at least."""
    min_steps: int | None = None
    """policy steps to collect in one iteration and process in whole episodes, at least."""
    episode_length: int | None = None
    """policy steps of every episode, where all are equally long; makes such a plan exact."""

    learning_starts: int = 0
    """policy steps (total) before the first gradient step, which comes at the end of the iteration
    that reaches them."""
    random_steps: int = None  # type: ignore[assignment]  # None: see below
    """policy steps (total) with random actions; ``None``: ``learning_starts`` where the update is
    off-policy, else 0."""
    prefill_steps: int = 0
    """policy steps (total) collected in one go before everything else, part of the budget."""
    prefill_random: bool = True
    """whether the prefill has random actions."""
    prefill_is_iteration: bool = False
    """whether the prefill is the first iteration, with its update phase, in place of a collection
    of the usual size."""
    exploration_steps: int = 0
    """policy steps (total) during which an exploring agent acts in place of the trained one."""
    pretrain_steps: int = 0
    """gradient steps of one process done once, when learning starts, on top of those due."""

    update_epochs: int | None = None
    """passes over each collected batch (on-policy)."""
    replay_ratio: Fraction | None = None
    """gradient steps per policy step, exact, counted from the start of the first iteration that
    trains; a float means the simplest fraction that rounds to it."""
    gradient_steps_per_iteration: int | None = None
    """gradient steps of one process in each iteration, however much was collected."""
    minibatch_size: int | None = None
    """transitions (or sequences) in a minibatch of one process; ``None``: all that was collected
    (on-policy), or all that the buffer holds."""
    last_minibatch: LastMinibatch = "smaller"
    """what becomes of the rows of a batch that do not fill a minibatch: they make a ``smaller``
    one, ``merge`` into the last, ``drop`` out of the epoch, or ``carry`` over into the next."""
    minibatches_per_gradient_step: int | None = 1
    """minibatches whose gradients are accumulated into one gradient step; ``None``: all of an
    update epoch."""
    sequence_length: int | None = None
    """time steps of a sequence, where a minibatch is made of sequences."""
    counting: str = "exact"
    """rule by which gradient steps are counted: ``exact``, or the name of a library whose rounding
    is reproduced (see ``kit.steps.dialects``)."""

    evaluation_every: int | None = None
    """policy steps (total) between evaluations; each comes at the end of the iteration that
    crosses a multiple. ``None``: none during training."""
    evaluation_episodes: int = 10
    """whole episodes in one evaluation."""
    initial_evaluations: int = 0
    """evaluations before the first iteration."""
    final_evaluation: bool = True
    """whether the run ends with an evaluation."""

    rounding: Rounding = field(default="error", compare=False)
    """what to do with counts that do not divide: refuse them, or round them ``down`` or ``up``."""
    asked: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """what was asked where rounding changed it (filled in)."""

    def __post_init__(self) -> None:
        validation.complete(self)
        object.__setattr__(self, "_simulated", [0])

    # ------------------------------------------------------------------ what one iteration is
    @property
    def collects_episodes(self) -> bool:
        """Whether an iteration collects whole episodes, not a number of steps."""
        return self.min_episodes is not None or self.min_steps is not None

    @property
    def is_exact(self) -> bool:
        """Whether all counts are known; not so for whole episodes of unknown length."""
        return not self.collects_episodes or self.episode_length is not None

    @property
    def on_policy(self) -> bool:
        """Whether each batch is trained on once collected, and then forgotten."""
        return self.update_epochs is not None

    @property
    def frames_per_batch(self) -> int:
        """Policy steps of one iteration in one process: ``num_envs * steps_per_env``."""
        if self.collects_episodes:
            return self._episodes_for(self.min_steps or 0, self.min_episodes or 1)
        assert self.steps_per_env is not None
        return self.num_envs * self.steps_per_env

    @property
    def policy_steps_per_iteration(self) -> int:
        """Policy steps of one iteration in all processes."""
        return self.frames_per_batch * self.world_size

    @property
    def local_prefill_steps(self) -> int:
        """Policy steps of the prefill in one process."""
        per_process = self.prefill_steps // self.world_size
        return self._episodes_for(per_process, 1) if self.collects_episodes else per_process

    def _episodes_for(self, steps: int, episodes: int) -> int:
        """Policy steps of the whole episodes that reach both minima."""
        if self.episode_length is None:
            raise SettingError(
                "episode_length",
                None,
                "leaves the length of whole episodes unknown, so counts are known only as they come",
                "give episode_length where all episodes are equally long",
            )
        length = self.episode_length
        return max(-(-steps // length), episodes) * length

    def collected(self, iteration: int) -> int:
        """Policy steps of one process in ``iteration`` (from 1), without a separate prefill."""
        if iteration == 1 and self.prefill_is_iteration:
            return self.local_prefill_steps
        return self.frames_per_batch

    # ------------------------------------------------------------------ what has happened when
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

    def policy_steps_after(self, iteration: int) -> int:
        """Policy steps of all processes at the end of ``iteration``."""
        prefill = self.local_prefill_steps if self.prefill_steps else 0
        if self.prefill_is_iteration:
            if iteration == 0:
                return 0
            iteration -= 1
        each = self.frames_per_batch if iteration else 0
        return (prefill + iteration * each) * self.world_size

    def random_steps_until(self, policy_steps: int) -> int:
        """How many of the first ``policy_steps`` have random actions."""
        random_steps = self.random_steps
        if self.prefill_random and self.prefill_steps:
            random_steps = max(random_steps, self.local_prefill_steps * self.world_size)
        return min(random_steps, policy_steps)

    @property
    def first_training_iteration(self) -> int:
        """The first iteration whose end reaches ``learning_starts``; it is the first to train."""
        if self.policy_steps_after(1) >= self.learning_starts:
            return 1
        each = self.policy_steps_per_iteration
        if each == 0:
            return self.iterations + 1
        return 1 + -(-(self.learning_starts - self.policy_steps_after(1)) // each)

    def gradient_steps(self, iteration: int) -> int:
        """Gradient steps of one process in ``iteration`` (from 1)."""
        return self.gradient_steps_after(iteration) - self.gradient_steps_after(iteration - 1)

    def gradient_steps_after(self, iteration: int) -> int:
        """Gradient steps of one process at the end of ``iteration``."""
        if self.counting != "exact":
            return self._simulate(iteration)
        first = self.first_training_iteration
        if iteration < first:
            return 0
        trained = iteration - first + 1
        done = self.pretrain_steps
        if self.replay_ratio is not None:
            before = self.policy_steps_after(first) // self.world_size - self.collected(first)
            steps = self.policy_steps_after(iteration) // self.world_size - before
            return done + self.replay_ratio.numerator * steps // self.replay_ratio.denominator
        if self.gradient_steps_per_iteration is not None:
            return done + trained * self.gradient_steps_per_iteration
        done += self.epoch_gradient_steps(self.collected(first))
        if trained > 1:
            done += (trained - 1) * self.epoch_gradient_steps(self.frames_per_batch)
        return done

    def _simulate(self, iteration: int) -> int:
        """Count with the rule of a foreign library, which has to be followed step by step."""
        reached: list[int] = self._simulated  # type: ignore[attr-defined]
        if len(reached) <= iteration:
            clock = self.clock()
            del reached[:]
            reached.append(0)
            for k in range(1, max(iteration, min(self.iterations, 2 * iteration)) + 1):
                reached.append(reached[-1] + clock.advance(self.collected(k)))
        return reached[iteration]

    def clock(self) -> UpdateClock:
        """Return a new clock that tells, collection by collection, what gradient steps are due."""
        return UpdateClock(self)

    # ------------------------------------------------------------------ minibatches
    def epoch_gradient_steps(self, rows: int) -> int:
        """Gradient steps that ``update_epochs`` passes over ``rows`` transitions make."""
        if not self.update_epochs or rows == 0:
            return 0
        size = self.minibatch_size or rows
        minibatches = minibatches_per_epoch(rows, size, self.last_minibatch)
        accumulated = self.minibatches_per_gradient_step or max(minibatches, 1)
        return self.update_epochs * -(-minibatches // accumulated)

    def minibatch_sizes(self, iteration: int) -> list[int]:
        """Sizes of the minibatches of ``iteration`` (from 1) in one process, in order.

        Transitions for an on-policy plan (and sequences where ``sequence_length`` is set).

        Raises:
            SettingError: if a minibatch is all that a replay buffer holds, which only the buffer
                knows.
        """
        if self.update_epochs is not None:
            if iteration < self.first_training_iteration:
                return []
            rows = self.collected(iteration)
            size = self.minibatch_size or max(rows, 1)
            before = iteration - self.first_training_iteration
            drawn = (
                before
                * self.update_epochs
                * minibatches_per_epoch(self.frames_per_batch, size, self.last_minibatch)
            )
            return iteration_sizes(rows, size, self.last_minibatch, self.update_epochs, drawn)
        if self.minibatch_size is None:
            raise SettingError("minibatch_size", None, "means all that the replay buffer holds")
        accumulated = self.minibatches_per_gradient_step or 1
        return [self.minibatch_size] * (self.gradient_steps(iteration) * accumulated)

    def samples_after(self, iteration: int) -> int:
        """Transitions trained on by one process at the end of ``iteration``."""
        length = self.sequence_length or 1
        if self.update_epochs is None:
            accumulated = self.minibatches_per_gradient_step or 1
            size = (self.minibatch_size or 0) * accumulated
            return self.gradient_steps_after(iteration) * size * length
        first = self.first_training_iteration
        if iteration < first:
            return 0
        if self.last_minibatch == "carry":
            rows, size = self.frames_per_batch, self.minibatch_size or self.frames_per_batch
            one_pass = epoch_sizes(rows, size, "carry")
            drawn = (iteration - first + 1) * self.update_epochs * (rows // size)
            passes, rest = divmod(drawn, len(one_pass))
            return (passes * rows + sum(one_pass[:rest])) * length
        later = sum(self.minibatch_sizes(first + 1)) if iteration > first else 0
        return (sum(self.minibatch_sizes(first)) + (iteration - first) * later) * length

    # ------------------------------------------------------------------ evaluation
    def evaluations(self, iteration: int) -> int:
        """How many evaluations follow ``iteration``; 0 means those before the first one."""
        return self.evaluations_after(iteration) - (
            self.evaluations_after(iteration - 1) if iteration else 0
        )

    def evaluations_after(self, iteration: int) -> int:
        """Evaluations done once ``iteration`` and its evaluations have ended."""
        done = self.initial_evaluations + self._evaluating_iterations(iteration)
        if self.final_evaluation and iteration == self.iterations and not self._ends_on_evaluation:
            done += 1
        return done

    @property
    def _ends_on_evaluation(self) -> bool:
        last = self.iterations
        return last > 0 and self._evaluating_iterations(last) > self._evaluating_iterations(
            last - 1
        )

    def _evaluating_iterations(self, iteration: int) -> int:
        """How many of the first iterations cross a multiple of ``evaluation_every``."""
        done, first = 0, 0
        if self.prefill_is_iteration and iteration:
            first = 1
            done = min(multiples_crossed(self.evaluation_every, 0, self.policy_steps_after(1)), 1)
        start, end = self.policy_steps_after(first), self.policy_steps_after(iteration)
        return done + min(multiples_crossed(self.evaluation_every, start, end), iteration - first)

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
                raise SettingError(name, values[name], "is not a setting of a plan", known)
        return cls(**values)

    def replace(self, **changes: Any) -> StepPlan:
        """Return a plan with some settings changed; the iterations follow from the budget anew."""
        values = asdict(self)
        derived = "total_policy_steps" if "iterations" in changes else "iterations"
        if self.is_exact:
            del values[derived]
        return type(self)(**{**values, **changes})

    def table(self, ledger: StepLedger | None = None) -> str:
        """Return the plan as a text table: asked, planned and, given a ledger, counted."""
        from kit.steps.table import plan_table

        return plan_table(self, ledger)
