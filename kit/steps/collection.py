"""The batches of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kit.steps.errors import Count, Natural, SettingError


@dataclass(frozen=True, kw_only=True, eq=False)
class CollectionPlan:
    """The part of a plan about collection: sizes of batches, and their actions."""

    total_policy_steps: Natural = None  # type: ignore[assignment]  # filled in from iterations
    """policy steps of the run, over all envs of all processes, prefill included."""
    iterations: Natural = None  # type: ignore[assignment]  # filled in from total_policy_steps
    """iterations of the run; derived when ``total_policy_steps`` is given, and the other way."""
    num_envs: Count = 1
    """environments in one process."""
    steps_per_env: Natural | None = 1
    """policy steps of each environment in one iteration; ``None`` where whole episodes are
    collected. 0 collects nothing: the run is offline, and periods (of evaluations, rows and
    checkpoints) count gradient steps of one process in place of policy steps."""
    world_size: Count = 1
    """processes that train together, each with its own environments."""
    action_repeat: Count = 1
    """env steps one action is held for; part of no other count."""
    max_episode_steps: Count | None = None
    """policy steps after which an episode is truncated; ``None``: the environment's own limit."""

    min_episodes: Count | None = None
    """whole episodes to collect in one iteration and process, at least."""
    min_steps: Count | None = None
    """policy steps to collect in one iteration and process in whole episodes, at least."""
    episode_length: Count | None = None
    """policy steps of every episode, where all are equally long; makes such a plan exact."""

    random_steps: Natural = None  # type: ignore[assignment]  # None: see below
    """policy steps (total) with random actions; ``None``: ``learning_starts`` where the update is
    off-policy, else 0."""
    prefill_steps: Natural = 0
    """policy steps (total) collected in one go before everything else, part of the budget."""
    prefill_random: bool = True
    """whether the prefill has random actions."""
    prefill_is_iteration: bool = False
    """whether the prefill is the first iteration, with its update phase, in place of a collection
    of the usual size."""
    exploration_steps: Natural = 0
    """policy steps (total) during which an exploring agent acts in place of the trained one."""

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
        return self.world_size * envs * env_steps(self, each, episode_env_steps)


def env_steps(plan: CollectionPlan, policy_steps: int, episode_env_steps: int) -> int:
    """Env steps of one environment in ``policy_steps``, with episodes of equal length."""
    repeat = plan.action_repeat
    length = -(-episode_env_steps // repeat)
    if plan.max_episode_steps is not None:
        length = min(length, plan.max_episode_steps)
    whole = min(episode_env_steps, length * repeat)
    episodes, rest = divmod(policy_steps, length)
    return episodes * whole + min(rest * repeat, whole)
