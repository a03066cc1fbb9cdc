"""Settings of a plan, and the step counts that follow from these settings."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, Literal

from kit.steps.counting import counting_rule
from kit.steps.errors import Limits, SettingError, whole_number
from kit.steps.every import multiples_crossed
from kit.steps.minibatches import LastMinibatch, Permutation, permutation
from kit.steps.schema import NonNegativeInt, PositiveInt

Rounding = Literal["error", "down", "up"]

LARGEST_RATIO = 10**9
"""Largest accepted number of gradient steps per policy step."""
FOLLOWED = 600_000
"""Maximum number of iterations to simulate for counting rules without a closed form."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts at the end of an iteration, summed over all processes unless named ``local_``."""

    iterations: int
    """number of iterations, each with a collection and an update phase."""
    policy_steps: int
    """number of actions selected in all envs of all processes."""
    random_policy_steps: int
    """policy steps with random actions, included in ``policy_steps``."""
    local_gradient_steps: int
    """number of optimizer updates in each process."""
    gradient_steps: int
    """number of optimizer updates, summed over all processes."""
    samples: int
    """number of transitions trained on, summed over all processes and counted once per use."""
    evaluations: int
    """number of evaluations, each with ``evaluation_episodes`` episodes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedCounts:
    """All settings of a plan, and methods that compute its counts."""

    # ------------------------------------------------------------------ settings: collection
    total_policy_steps: NonNegativeInt = None  # type: ignore[assignment]  # filled in from iterations
    """policy steps in the run, summed over all envs and processes and including the prefill."""
    iterations: NonNegativeInt = None  # type: ignore[assignment]  # filled in from total_policy_steps
    """number of iterations; derived from ``total_policy_steps`` if not set, and vice versa."""
    num_envs: PositiveInt = 1
    """number of environments per process."""
    steps_per_env: NonNegativeInt | None = 1
    """policy steps per iteration in each environment. ``None`` if whole episodes are collected or
    ``frames_per_batch`` is set. 0: the run is offline and collects nothing. Its evaluations,
    metrics and checkpoints are scheduled by gradient steps in each process."""
    world_size: PositiveInt = 1
    """number of processes that train together, each with its own environments."""
    action_repeat: PositiveInt = 1
    """number of env steps per action (frame skip); affects no other count."""
    max_episode_steps: PositiveInt | None = None
    """policy steps after which an episode is truncated; ``None``: the environment's default."""

    min_episodes: PositiveInt | None = None
    """minimum number of whole episodes per iteration and process."""
    min_steps: PositiveInt | None = None
    """minimum number of policy steps per iteration and process, collected in whole episodes."""
    episode_length: PositiveInt | None = None
    """policy steps per episode if all episodes have the same length. Makes the plan exact."""

    random_steps: NonNegativeInt = None  # type: ignore[assignment]  # None: see below
    """policy steps (total) with random actions; ``None``: ``learning_starts`` for off-policy
    updates, otherwise 0."""
    prefill_steps: NonNegativeInt = 0
    """policy steps (total) collected before the first iteration, included in the run's total."""
    prefill_random: bool = True
    """whether the prefill uses random actions."""
    prefill_is_iteration: bool = False
    """whether the prefill replaces the collection of the first iteration and is followed by an
    update phase."""
    normalization_steps: NonNegativeInt = 0
    """policy steps with random actions in separate environments before the run, from which each
    process estimates fixed observation statistics. They are part of no count."""
    exploration_steps: NonNegativeInt = 0
    """policy steps (total) taken by an exploration policy at the start of the run."""

    # ------------------------------------------------------------------ settings: gradient steps
    learning_starts: NonNegativeInt = 0
    """policy steps (total) before the first gradient step, which is taken at the end of the
    iteration that reaches this number."""
    pretrain_steps: NonNegativeInt = 0
    """additional gradient steps in each process, taken once when learning starts."""

    update_epochs: NonNegativeInt | None = None
    """number of passes over each collected batch (on-policy)."""
    replay_ratio: Annotated[Fraction, Limits(0, LARGEST_RATIO)] | None = None
    """gradient steps per policy step, counted exactly from the start of the first training
    iteration. A float is converted to the simplest fraction that rounds to it."""
    gradient_steps_per_iteration: NonNegativeInt | None = None
    """gradient steps per iteration in each process, independent of the batch size."""
    counting: str = "exact"
    """rule that counts gradient steps: ``exact``, or the name of a library whose rounding is
    reproduced (see ``kit.dialects``)."""

    minibatch_size: PositiveInt | None = None
    """transitions (or sequences) per minibatch in each process; ``None``: the whole batch
    (on-policy) or the whole replay buffer."""
    sequence_length: PositiveInt | None = None
    """time steps per sequence, if minibatches consist of sequences."""
    last_minibatch: LastMinibatch = "smaller"
    """treatment of the rows that do not fill a minibatch: ``smaller`` forms a smaller minibatch,
    ``merge`` adds them to the last minibatch, ``drop`` omits them, ``carry`` keeps them for the
    next epoch."""
    minibatches_per_epoch: PositiveInt | None = None
    """maximum number of minibatches per update epoch; ``None``: no limit."""
    minibatches_per_gradient_step: PositiveInt | None = 1
    """number of minibatches whose gradients are accumulated into one gradient step; ``None``: all
    minibatches of an update epoch."""
    prefill_in_first_batch: bool = False
    """whether the first batch of an on-policy update includes the prefill."""
    train_on_newest: PositiveInt | None = None
    """maximum number of transitions used from each on-policy batch. The update uses the newest
    transitions of each environment and discards the others. ``None``: no limit."""

    # ------------------------------------------------------------------ settings: evaluation
    # Evaluations follow the update phase of an iteration. Iteration 0 is the start of the run.
    evaluation_every: PositiveInt | None = None
    """policy steps (total; offline: gradient steps in each process) between evaluations. An
    evaluation runs at the end of each iteration that crosses a multiple of this number. ``None``:
    no evaluations during training."""
    evaluate_each_multiple: bool = False
    """whether an iteration that crosses several multiples of ``evaluation_every`` runs that many
    evaluations instead of one, as Stable-Baselines3 does."""
    evaluation_every_iterations: PositiveInt | None = None
    """number of iterations between evaluations, instead of ``evaluation_every``."""
    evaluation_before_update: bool = False
    """whether to evaluate before the update phase of an iteration instead of after it. This is
    counted as an evaluation after the previous iteration, because the policy is the same. The first
    periodic evaluation precedes the first iteration, and none follows the last iteration."""
    evaluation_episodes: PositiveInt = 10
    """number of whole episodes per evaluation."""
    initial_evaluations: NonNegativeInt = 0
    """number of evaluations before the first iteration."""
    final_evaluation: bool = True
    """whether to evaluate at the end of the run even if no periodic evaluation is due."""

    rounding: Rounding = "error"
    """whether to raise an ``error`` for indivisible counts or round them ``down`` or ``up``."""
    asked: dict[str, Any] = field(default_factory=dict, repr=False)
    """original values of rounded settings and of ``frames_per_batch``, recorded automatically."""
    remarks: list[str] = field(default_factory=list, repr=False)
    """notes printed below the table, for example about other effects of a dialect's settings."""

    # ------------------------------------------------------------------ collection
    @cached_property
    def collects_episodes(self) -> bool:
        """Whether an iteration collects whole episodes instead of a fixed number of steps."""
        return self.min_episodes is not None or self.min_steps is not None

    @cached_property
    def offline(self) -> bool:
        """Whether the run collects nothing and trains on stored transitions."""
        return self.steps_per_env == 0

    @property
    def axis(self) -> str:
        """Name of the counter that measures progress and is the x axis of metrics."""
        return "gradient_steps" if self.offline else "policy_steps"

    @cached_property
    def is_exact(self) -> bool:
        """Whether all counts are known in advance, which requires known episode lengths."""
        return not self.collects_episodes or self.episode_length is not None

    @cached_property
    def frames_per_batch(self) -> int:
        """Policy steps per iteration in each process, by default ``num_envs * steps_per_env``."""
        if self.collects_episodes:
            return self._episodes_for(self.min_steps or 0, self.min_episodes or 1)
        assert self.steps_per_env is not None
        return self.num_envs * self.steps_per_env

    @property
    def policy_steps_per_iteration(self) -> int:
        """Policy steps per iteration, summed over all processes."""
        return self.frames_per_batch * self.world_size

    @property
    def local_prefill_steps(self) -> int:
        """Number of prefill steps in each process."""
        if not self.prefill_steps:
            return 0
        per_process = self.prefill_steps // self.world_size
        return self._episodes_for(per_process, 1) if self.collects_episodes else per_process

    def _episodes_for(self, steps: int, episodes: int) -> int:
        """Return the number of policy steps needed to reach both minimums with whole episodes."""
        if self.episode_length is None:
            why = "does not determine the counts, because episode lengths are unknown"
            works = "set episode_length if all episodes have the same length"
            raise SettingError("episode_length", None, why, works)
        length = self.episode_length
        return max(-(-steps // length), episodes) * length

    def collected(self, iteration: int) -> int:
        """Return the number of policy steps each process collects in ``iteration`` (from 1)."""
        prefills = iteration == 1 and self.prefill_is_iteration
        return self.local_prefill_steps if prefills else self.frames_per_batch

    def policy_steps_after(self, iteration: int) -> int:
        """Return the number of policy steps through ``iteration``, summed over all processes."""
        if self.prefill_is_iteration and iteration == 0:
            return 0
        batches = iteration - self.prefill_is_iteration
        collected = batches * self.frames_per_batch if batches else 0
        return (self.local_prefill_steps + collected) * self.world_size

    def random_steps_until(self, policy_steps: int) -> int:
        """Return how many of the first ``policy_steps`` policy steps use random actions."""
        random_steps = self.random_steps
        if self.prefill_random and self.prefill_steps:
            random_steps = max(random_steps, self.local_prefill_steps * self.world_size)
        return min(random_steps, policy_steps)

    def env_steps_after(self, iteration: int, episode_env_steps: int) -> int:
        """Return the number of env steps through ``iteration``, summed over all processes.

        All episodes must have the same length. The last action of an episode is repeated only until
        the episode ends, so an episode of ``L`` env steps takes ``ceil(L / action_repeat)`` policy
        steps. All environments start their first episode together, and a reset takes no step.

        Args:
            iteration: number of completed iterations.
            episode_env_steps: env steps per episode before truncation by ``max_episode_steps``.
        """
        envs = 1 if self.collects_episodes else self.num_envs
        each = self.policy_steps_after(iteration) // (self.world_size * envs)
        repeat = self.action_repeat
        length = -(-episode_env_steps // repeat)
        if self.max_episode_steps is not None:
            length = min(length, self.max_episode_steps)
        whole = min(episode_env_steps, length * repeat)
        episodes, rest = divmod(each, length)
        return self.world_size * envs * (episodes * whole + min(rest * repeat, whole))

    # ------------------------------------------------------------------ gradient steps
    @cached_property
    def on_policy(self) -> bool:
        """Whether each batch is discarded after training on it."""
        return self.update_epochs is not None

    @property
    def trains(self) -> bool:
        """Whether the plan has any gradient steps."""
        rules = (self.update_epochs, self.replay_ratio, self.gradient_steps_per_iteration)
        return any(rule is not None for rule in rules)

    @property
    def first_training_iteration(self) -> int:
        """First iteration that reaches ``learning_starts`` and therefore trains."""
        if self.policy_steps_after(1) >= self.learning_starts:
            return 1
        each = self.policy_steps_per_iteration
        if each == 0:
            return self.iterations + 1
        return 1 + -(-(self.learning_starts - self.policy_steps_after(1)) // each)

    def gradient_steps(self, iteration: int) -> int:
        """Return the number of gradient steps in ``iteration`` (from 1) in each process."""
        return self.gradient_steps_after(iteration) - self.gradient_steps_after(iteration - 1)

    def gradient_steps_after(self, iteration: int) -> int:
        """Return the number of gradient steps in each process up to the end of ``iteration``."""
        first = self.first_training_iteration
        if iteration < first:
            return 0
        rule, trainings = counting_rule(self.counting)(self), iteration - first + 1
        known = rule.total(trainings, self.frames_per_batch, self.collected(first))
        due = self._followed_until(trainings, first) if known is None else known
        return due + (0 if rule.pretrains else self.pretrain_steps)

    def _followed_until(self, trainings: int, first: int) -> int:
        """Simulate a counting rule without a closed form, and cache the results."""
        if not hasattr(self, "_followed"):
            rule = counting_rule(self.counting)(self)
            start = array("q", [0, rule.advance(self.collected(first))])
            object.__setattr__(self, "_followed", (rule, start))
        rule, reached = self._followed  # type: ignore[attr-defined]
        each = self.frames_per_batch
        steps = (rule.advance(each) for _ in range(trainings + 1 - len(reached)))
        reached.extend(accumulate(steps, initial=reached.pop()))
        done: int = reached[trainings]
        return done

    # ------------------------------------------------------------------ minibatches
    def rows(self, iteration: int) -> int:
        """Return the number of on-policy transitions each process trains on in ``iteration``."""
        rows = self.collected(iteration)
        if self.prefill_in_first_batch and iteration == self.first_training_iteration:
            rows += self.local_prefill_steps
        return rows if self.train_on_newest is None else min(rows, self.train_on_newest)

    def epoch_gradient_steps(self, rows: int) -> int:
        """Return the number of gradient steps in all update epochs over ``rows`` transitions."""
        if not self.update_epochs or rows == 0:
            return 0
        minibatches = self.minibatches_in_epoch(rows)
        accumulated = self.minibatches_per_gradient_step or max(minibatches, 1)
        return self.update_epochs * -(-minibatches // accumulated)

    def minibatches_in_epoch(self, rows: int) -> int:
        """Return the number of minibatches in one update epoch over ``rows`` transitions."""
        cut, limit = self._cut(rows), self.minibatches_per_epoch
        if self.last_minibatch == "carry":
            return limit if limit is not None else cut.minibatches - (cut.last < cut.size)
        return cut.minibatches if limit is None else min(limit, cut.minibatches)

    def _cut(self, rows: int) -> Permutation:
        """Divide ``rows`` transitions into minibatches of transitions or sequences."""
        rows //= self.sequence_length or 1
        return permutation(rows, self.minibatch_size or max(rows, 1), self.last_minibatch)

    def minibatch_sizes(self, iteration: int) -> list[int]:
        """Return the sizes of each process's minibatches in ``iteration`` (from 1), in order.

        Sizes are in transitions, or in sequences if ``sequence_length`` is set.

        Raises:
            SettingError: if a minibatch is the whole replay buffer, whose size is not planned.
        """
        cut, drawn, wanted, times = self._draws(iteration)
        return cut.sizes(drawn, wanted) * times

    def minibatch_counts(self, iteration: int) -> dict[int, int]:
        """Return the number of minibatches of each size in ``iteration``."""
        cut, drawn, wanted, times = self._draws(iteration)
        counts = cut.counts(drawn, wanted)
        return {size: n * times for size, n in counts.items() if size > 0 and n * times > 0}

    def _draws(self, iteration: int) -> tuple[Permutation, int, int, int]:
        """Return a pass's minibatches, how many to skip and to take, and the number of passes."""
        if self.update_epochs is None:
            if self.minibatch_size is None:
                raise SettingError(
                    "minibatch_size", None, "is the whole buffer, whose size is unknown"
                )
            sampled = Permutation(1, self.minibatch_size, self.minibatch_size)
            accumulated = self.minibatches_per_gradient_step or 1
            return sampled, 0, self.gradient_steps(iteration) * accumulated, 1
        cut = self._cut(self.rows(iteration))
        if iteration < self.first_training_iteration:
            return cut, 0, 0, 0
        if self._carries:
            before = self.gradient_steps_after(iteration - 1)
            return cut, before, self.gradient_steps(iteration), 1
        return cut, 0, self.minibatches_in_epoch(self.rows(iteration)), self.update_epochs

    @property
    def _carries(self) -> bool:
        """Whether an iteration continues the permutation of the previous iteration."""
        return self.last_minibatch == "carry" or self.counting != "exact"

    def samples_after(self, iteration: int) -> int:
        """Return the number of transitions each process has trained on after ``iteration``."""
        length = self.sequence_length or 1
        if self.update_epochs is None:
            size = (self.minibatch_size or 0) * (self.minibatches_per_gradient_step or 1)
            return self.gradient_steps_after(iteration) * size * length
        first = self.first_training_iteration
        if iteration < first:
            return 0
        if self._carries:
            cut = self._cut(self.rows(iteration))
            return cut.rows(self.gradient_steps_after(iteration)) * length
        done = self._epoch_rows(self.rows(first))
        if iteration > first:
            done += (iteration - first) * self._epoch_rows(self.rows(first + 1))
        return done * self.update_epochs * length

    def _epoch_rows(self, rows: int) -> int:
        """Return the number of rows (or sequences) that one update epoch trains on."""
        return self._cut(rows).rows(self.minibatches_in_epoch(rows))

    def unseen_samples(self, iteration: int, drawn: int) -> int:
        """Return how many transitions ``iteration`` trains on after ``drawn`` minibatches."""
        if not self.is_exact:
            return 0
        return sum(self.minibatch_sizes(iteration)[drawn:]) * (self.sequence_length or 1)

    # ------------------------------------------------------------------ evaluations
    def evaluations(self, iteration: int) -> int:
        """Return the number of evaluations after ``iteration``, where 0 is the start of the run."""
        before = self.evaluations_after(iteration - 1) if iteration else 0
        return self.evaluations_after(iteration) - before

    def evaluations_after(self, iteration: int) -> int:
        """Return the total number of evaluations up to and including ``iteration``."""
        done = self.initial_evaluations + self._due_until(iteration)
        if self.final_evaluation and iteration == self.iterations and not self.ends_on_evaluation:
            done += 1
        return done

    @property
    def ends_on_evaluation(self) -> bool:
        """Whether a periodic evaluation is due at the end of the last iteration."""
        last = self.iterations
        return last > 0 and self._due_until(last) > self._due_until(last - 1)

    def _due_until(self, iteration: int) -> int:
        """Return the number of periodic evaluations up to the end of ``iteration``."""
        if self.evaluation_every_iterations is None:
            return self._crossings_until(iteration)
        period = self.evaluation_every_iterations
        if not self.evaluation_before_update:
            return iteration // period
        # An evaluation before an update belongs to the end of the previous iteration.
        return min(iteration, self.iterations - 1) // period + 1 if self.iterations else 0

    def _crossings_until(self, iteration: int) -> int:
        """Return how many iterations up to ``iteration`` cross a multiple of the period.

        With ``evaluate_each_multiple``, return the number of multiples.
        """
        every = self.evaluation_every
        if every is None:
            return 0
        if self.evaluate_each_multiple:
            return multiples_crossed(every, 0, self.policy_steps_after(iteration))
        if self.offline:
            progress, each = self.gradient_steps_after, self.gradient_steps_per_iteration or 0
        else:
            progress, each = self.policy_steps_after, self.policy_steps_per_iteration
        done = first = 0
        # The first iteration may differ in size from later iterations.
        if (self.prefill_is_iteration or self.offline) and iteration:
            first = 1
            done = min(multiples_crossed(every, 0, progress(1)), 1)
        start = progress(first)
        each = each if iteration > first else 0
        if each >= every:  # every iteration crosses at least one multiple
            return done + (iteration - first)
        return done + multiples_crossed(every, start, start + (iteration - first) * each)

    # ------------------------------------------------------------------ all counts
    @property
    def length(self) -> int | None:
        """Final value of the counter ``axis``; ``None`` if only the iteration count is known."""
        if self.offline:
            return self.gradient_steps_after(self.iterations)
        return self.total_policy_steps

    def after(self, iteration: int) -> Counts:
        """Return the counts at the end of ``iteration``, where 0 is the start of the run.

        Raises:
            SettingError: if ``iteration`` is not in the plan, or the plan is not exact.
        """
        iteration = whole_number("iteration", iteration)
        if iteration > self.iterations:
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


def can_count(plan: PlannedCounts) -> bool:
    """Return whether all counts of a plan can be computed quickly."""
    if not plan.is_exact or can_follow(plan, plan.iterations):
        return plan.is_exact
    each = plan.frames_per_batch
    return counting_rule(plan.counting)(plan).total(1, each, each) is not None


def can_follow(plan: PlannedCounts, iteration: int, most: int = FOLLOWED) -> bool:
    """Return whether the plan's counting rule can be simulated quickly up to ``iteration``."""
    rule = counting_rule(plan.counting)(plan)
    asked = plan.policy_steps_per_iteration if rule.asks_each_step else 1
    return iteration * asked <= most
