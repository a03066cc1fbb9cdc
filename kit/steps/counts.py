"""The settings of a plan, and the counts that they make after each of its iterations."""

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
"""Gradient steps per policy step that are accepted at most."""
FOLLOWED = 600_000
"""Iterations that are followed one by one at most, where a foreign rule leaves no other way."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts after some iteration; totals over all processes unless named local."""

    iterations: int
    """collections, each followed by one update phase."""
    policy_steps: int
    """actions chosen, over all envs of all processes."""
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
class PlannedCounts:
    """All settings of a plan, and the counts that they make."""

    # ------------------------------------------------------------------ settings: collection
    total_policy_steps: NonNegativeInt = None  # type: ignore[assignment]  # filled in from iterations
    """policy steps of the run, over all envs of all processes, prefill included."""
    iterations: NonNegativeInt = None  # type: ignore[assignment]  # filled in from total_policy_steps
    """iterations of the run; derived when ``total_policy_steps`` is given, and the other way."""
    num_envs: PositiveInt = 1
    """environments in one process."""
    steps_per_env: NonNegativeInt | None = 1
    """policy steps of each environment in one iteration; ``None`` where whole episodes are
    collected, or ``frames_per_batch`` is given. 0 collects nothing: the run is offline, and periods
    (of evaluations, rows and checkpoints) count gradient steps of one process in place of policy
    steps."""
    world_size: PositiveInt = 1
    """processes that train together, each with its own environments."""
    action_repeat: PositiveInt = 1
    """env steps one action is held for; part of no other count."""
    max_episode_steps: PositiveInt | None = None
    """policy steps after which an episode is truncated; ``None``: the environment's own limit."""

    min_episodes: PositiveInt | None = None
    """whole episodes to collect in one iteration and process, at least."""
    min_steps: PositiveInt | None = None
    """policy steps to collect in one iteration and process in whole episodes, at least."""
    episode_length: PositiveInt | None = None
    """policy steps of every episode, where all are equally long; makes such a plan exact."""

    random_steps: NonNegativeInt = None  # type: ignore[assignment]  # None: see below
    """policy steps (total) with random actions; ``None``: ``learning_starts`` where the update is
    off-policy, else 0."""
    prefill_steps: NonNegativeInt = 0
    """policy steps (total) collected in one go before everything else, part of the budget."""
    prefill_random: bool = True
    """whether the prefill has random actions."""
    prefill_is_iteration: bool = False
    """whether the prefill is the first iteration, with its update phase, in place of a collection
    of the usual size."""
    exploration_steps: NonNegativeInt = 0
    """policy steps (total) during which an exploring agent acts in place of the trained one."""

    # ------------------------------------------------------------------ settings: gradient steps
    learning_starts: NonNegativeInt = 0
    """policy steps (total) before the first gradient step, which comes at the end of the iteration
    that reaches them."""
    pretrain_steps: NonNegativeInt = 0
    """gradient steps of one process done once, when learning starts, on top of those due."""

    update_epochs: NonNegativeInt | None = None
    """passes over each collected batch (on-policy)."""
    replay_ratio: Annotated[Fraction, Limits(0, LARGEST_RATIO)] | None = None
    """gradient steps per policy step, exact, counted from the start of the first iteration that
    trains; a float means the simplest fraction that rounds to it."""
    gradient_steps_per_iteration: NonNegativeInt | None = None
    """gradient steps of one process in each iteration, however much was collected."""
    counting: str = "exact"
    """rule by which gradient steps are counted: ``exact``, or the name of a library whose rounding
    is reproduced (see ``kit.dialects``)."""

    minibatch_size: PositiveInt | None = None
    """transitions (or sequences) in a minibatch of one process; ``None``: all that was collected
    (on-policy), or all that the buffer holds."""
    sequence_length: PositiveInt | None = None
    """time steps of a sequence, where a minibatch is made of sequences."""
    last_minibatch: LastMinibatch = "smaller"
    """the rows of a batch that do not fill a minibatch: they make a ``smaller``
    one, ``merge`` into the last, ``drop`` out of the epoch, or ``carry`` over into the next."""
    minibatches_per_epoch: PositiveInt | None = None
    """minibatches drawn in an update epoch, at most; ``None``: all that a batch makes."""
    minibatches_per_gradient_step: PositiveInt | None = 1
    """minibatches whose gradients are accumulated into one gradient step; ``None``: all of an
    update epoch."""
    prefill_in_first_batch: bool = False
    """whether an on-policy update also trains on the prefill, as part of its first batch."""
    train_on_newest: PositiveInt | None = None
    """transitions of a batch that an on-policy update trains on, at most: the newest of each
    environment; the others are forgotten unseen. ``None``: all."""

    # ------------------------------------------------------------------ settings: evaluation
    # An evaluation follows the update phase of its iteration; iteration 0 is the start of the run.
    evaluation_every: PositiveInt | None = None
    """policy steps (total; offline: gradient steps of one process) between evaluations; each comes
    at the end of the iteration that crosses a multiple. ``None``: none during training."""
    evaluation_every_iterations: PositiveInt | None = None
    """iterations between evaluations, in place of ``evaluation_every``."""
    evaluation_before_update: bool = False
    """whether an iteration evaluates the policy that collected, before its update phase, and the
    first one begins the count: the policy is that of the end of the previous iteration, so these
    evaluations are counted there, the first one before the run and none at its end."""
    evaluation_episodes: PositiveInt = 10
    """whole episodes in one evaluation."""
    initial_evaluations: NonNegativeInt = 0
    """evaluations before the first iteration."""
    final_evaluation: bool = True
    """whether the run ends with an evaluation even where none is due."""

    rounding: Rounding = "error"
    """what to do with counts that do not divide: refuse them, or round them ``down`` or ``up``."""
    asked: dict[str, Any] = field(default_factory=dict, repr=False)
    """settings as they were given, where rounding changed them, and ``frames_per_batch`` (filled
    in)."""
    remarks: list[str] = field(default_factory=list, repr=False)
    """sentences under the table: what a run takes from another library's words besides counts."""

    # ------------------------------------------------------------------ collection
    @cached_property
    def collects_episodes(self) -> bool:
        """Whether an iteration collects whole episodes, not a number of steps."""
        return self.min_episodes is not None or self.min_steps is not None

    @cached_property
    def offline(self) -> bool:
        """Whether nothing is collected: minibatches come from stored transitions."""
        return self.steps_per_env == 0

    @property
    def axis(self) -> str:
        """The counter that says how far a run is, against which its metrics are drawn."""
        return "gradient_steps" if self.offline else "policy_steps"

    @cached_property
    def is_exact(self) -> bool:
        """Whether all counts are known; not so for whole episodes of unknown length."""
        return not self.collects_episodes or self.episode_length is not None

    @cached_property
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
        if not self.prefill_steps:
            return 0
        per_process = self.prefill_steps // self.world_size
        return self._episodes_for(per_process, 1) if self.collects_episodes else per_process

    def _episodes_for(self, steps: int, episodes: int) -> int:
        """Policy steps of the whole episodes that reach both minima."""
        if self.episode_length is None:
            why = "leaves the length of whole episodes unknown, so counts are known as they come"
            works = "give episode_length where all episodes are equally long"
            raise SettingError("episode_length", None, why, works)
        length = self.episode_length
        return max(-(-steps // length), episodes) * length

    def collected(self, iteration: int) -> int:
        """Policy steps of one process in ``iteration`` (from 1), without a separate prefill."""
        prefills = iteration == 1 and self.prefill_is_iteration
        return self.local_prefill_steps if prefills else self.frames_per_batch

    def policy_steps_after(self, iteration: int) -> int:
        """Policy steps of all processes at the end of ``iteration``."""
        if self.prefill_is_iteration and iteration == 0:
            return 0
        batches = iteration - self.prefill_is_iteration
        collected = batches * self.frames_per_batch if batches else 0
        return (self.local_prefill_steps + collected) * self.world_size

    def random_steps_until(self, policy_steps: int) -> int:
        """How many of the first ``policy_steps`` have random actions."""
        random_steps = self.random_steps
        if self.prefill_random and self.prefill_steps:
            random_steps = max(random_steps, self.local_prefill_steps * self.world_size)
        return min(random_steps, policy_steps)

    def env_steps_after(self, iteration: int, episode_env_steps: int) -> int:
        """Env steps of all processes at the end of ``iteration`` with equally long episodes.

        The last action of an episode is held only as long as the episode lasts, so that an episode
        of ``L`` env steps takes ``ceil(L / action_repeat)`` policy steps. Environments start
        their first episode together and a reset costs no step.

        Args:
            iteration: iterations that have ended.
            episode_env_steps: env steps of one episode, if ``max_episode_steps`` does not cut it.
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
        """Whether each batch is trained on once collected, and then forgotten."""
        return self.update_epochs is not None

    @property
    def trains(self) -> bool:
        """Whether gradient steps are made at all."""
        rules = (self.update_epochs, self.replay_ratio, self.gradient_steps_per_iteration)
        return any(rule is not None for rule in rules)

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
        first = self.first_training_iteration
        if iteration < first:
            return 0
        rule, trainings = counting_rule(self.counting)(self), iteration - first + 1
        known = rule.total(trainings, self.frames_per_batch, self.collected(first))
        due = self._followed_until(trainings, first) if known is None else known
        return due + (0 if rule.pretrains else self.pretrain_steps)

    def _followed_until(self, trainings: int, first: int) -> int:
        """Follow the rule; its results are kept, so that each iteration is followed once."""
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
        """Transitions of the batch that ``iteration`` trains on in one process (on-policy)."""
        rows = self.collected(iteration)
        if self.prefill_in_first_batch and iteration == self.first_training_iteration:
            rows += self.local_prefill_steps
        return rows if self.train_on_newest is None else min(rows, self.train_on_newest)

    def epoch_gradient_steps(self, rows: int) -> int:
        """Gradient steps that ``update_epochs`` passes over ``rows`` transitions make."""
        if not self.update_epochs or rows == 0:
            return 0
        minibatches = self.minibatches_in_epoch(rows)
        accumulated = self.minibatches_per_gradient_step or max(minibatches, 1)
        return self.update_epochs * -(-minibatches // accumulated)

    def minibatches_in_epoch(self, rows: int) -> int:
        """Minibatches of one update epoch over ``rows`` transitions."""
        cut, limit = self._cut(rows), self.minibatches_per_epoch
        if self.last_minibatch == "carry":
            return limit if limit is not None else cut.minibatches - (cut.last < cut.size)
        return cut.minibatches if limit is None else min(limit, cut.minibatches)

    def _cut(self, rows: int) -> Permutation:
        """The minibatches of a pass over ``rows`` transitions (or their sequences, if so asked)."""
        rows //= self.sequence_length or 1
        return permutation(rows, self.minibatch_size or max(rows, 1), self.last_minibatch)

    def minibatch_sizes(self, iteration: int) -> list[int]:
        """Sizes of the minibatches of ``iteration`` (from 1) in one process, in order.

        Transitions, or sequences where ``sequence_length`` is set.

        Raises:
            SettingError: if a minibatch is all that a replay buffer holds, which only the buffer
                knows.
        """
        cut, drawn, wanted, times = self._draws(iteration)
        return cut.sizes(drawn, wanted) * times

    def minibatch_counts(self, iteration: int) -> dict[int, int]:
        """How many minibatches of each size ``iteration`` sees: ``minibatch_sizes``, counted."""
        cut, drawn, wanted, times = self._draws(iteration)
        counts = cut.counts(drawn, wanted)
        return {size: n * times for size, n in counts.items() if size > 0 and n * times > 0}

    def _draws(self, iteration: int) -> tuple[Permutation, int, int, int]:
        """The minibatches of a pass, those drawn before, those of ``iteration``, and how often."""
        if self.update_epochs is None:
            if self.minibatch_size is None:
                raise SettingError("minibatch_size", None, "means all that the replay buffer holds")
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
        """Whether an iteration continues the permutation of the previous one."""
        return self.last_minibatch == "carry" or self.counting != "exact"

    def samples_after(self, iteration: int) -> int:
        """Transitions trained on by one process at the end of ``iteration``."""
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
        """Rows (sequences, if so asked) that one update epoch trains on."""
        return self._cut(rows).rows(self.minibatches_in_epoch(rows))

    def unseen_samples(self, iteration: int, drawn: int) -> int:
        """Transitions in the minibatches of ``iteration`` after the first ``drawn`` of them."""
        if not self.is_exact:
            return 0
        return sum(self.minibatch_sizes(iteration)[drawn:]) * (self.sequence_length or 1)

    # ------------------------------------------------------------------ evaluations
    def evaluations(self, iteration: int) -> int:
        """How many evaluations follow ``iteration``; 0 means those before the first one."""
        before = self.evaluations_after(iteration - 1) if iteration else 0
        return self.evaluations_after(iteration) - before

    def evaluations_after(self, iteration: int) -> int:
        """Evaluations done once ``iteration`` and its evaluations have ended."""
        done = self.initial_evaluations + self._due_until(iteration)
        if self.final_evaluation and iteration == self.iterations and not self.ends_on_evaluation:
            done += 1
        return done

    @property
    def ends_on_evaluation(self) -> bool:
        """Whether an evaluation is due at the end of the last iteration."""
        last = self.iterations
        return last > 0 and self._due_until(last) > self._due_until(last - 1)

    def _due_until(self, iteration: int) -> int:
        """How many evaluations are due during training up to the end of ``iteration``."""
        if self.evaluation_every_iterations is None:
            return self._crossings_until(iteration)
        period = self.evaluation_every_iterations
        if not self.evaluation_before_update:
            return iteration // period
        # Counted one iteration early: at the end of the one before, and none at the very end.
        return min(iteration, self.iterations - 1) // period + 1 if self.iterations else 0

    def _crossings_until(self, iteration: int) -> int:
        """How many of the first iterations cross a multiple of ``evaluation_every``."""
        every = self.evaluation_every
        if every is None:
            return 0
        if self.offline:
            progress, each = self.gradient_steps_after, self.gradient_steps_per_iteration or 0
        else:
            progress, each = self.policy_steps_after, self.policy_steps_per_iteration
        done = first = 0
        if (self.prefill_is_iteration or self.offline) and iteration:  # it differs from the others
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
        """What ``axis`` reaches; ``None`` where only the number of iterations is known."""
        if self.offline:
            return self.gradient_steps_after(self.iterations)
        return self.total_policy_steps

    def after(self, iteration: int) -> Counts:
        """The counts at the end of ``iteration``; 0 is the start of the run.

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
    """Whether all counts of a plan are known at once, or after a short while."""
    if not plan.is_exact or can_follow(plan, plan.iterations):
        return plan.is_exact
    each = plan.frames_per_batch
    return counting_rule(plan.counting)(plan).total(1, each, each) is not None


def can_follow(plan: PlannedCounts, iteration: int, most: int = FOLLOWED) -> bool:
    """Whether a foreign rule can be followed, float by float, to ``iteration`` in a short while."""
    rule = counting_rule(plan.counting)(plan)
    asked = plan.policy_steps_per_iteration if rule.asks_each_step else 1
    return iteration * asked <= most
