"""Adapter that counts steps in kit's collectors, and a collector that yields empty batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import BaseCollector

from kit.collectors.base import KitCollector
from kit.envs.episodes import Episode
from kit.envs.errors import EnvError
from kit.fast.nested import entry
from kit.hooks.evaluation import Evaluator
from kit.steps import SettingError, StepLedger, StepPlan


class CollectorAdapter:
    """Collects batches with one of kit's collectors and counts their steps.

    Attributes:
        collected: number of policy steps in the last batch.
        collected_at_random: number of policy steps in the last batch that used random actions.
        evaluate: evaluator whose environment failures are counted and whose state is saved, or
            ``None``.
    """

    evaluate: Any = None

    def __init__(self, collector: BaseCollector, plan: StepPlan) -> None:
        self.collector: Any = collector
        self.plan = plan
        self.collected = self.collected_at_random = 0
        self._iterator: Iterator[TensorDictBase] | None = None
        self._taken = 0
        self._policy_steps = 0
        self._may_share: Callable[[], bool] | None = None
        self._shown: list[Episode] = []

    def next(self) -> TensorDictBase:
        """Collect the next batch and count its steps.

        Raises:
            SettingError: if the collector stops early, or the batch size differs from the plan.
        """
        if self._iterator is None:
            self._iterator = iter(self.collector)
        try:
            batch = self._take(self._iterator)
        except StopIteration:
            reason = f"ended after {self._policy_steps} policy steps, before the end of the plan"
            hint = f"use total_frames={self.plan.total_policy_steps // self.plan.world_size} or -1"
            raise SettingError("collector", type(self.collector).__name__, reason, hint) from None
        self._taken += 1
        self._policy_steps += self.collected
        self._check(batch)
        return batch

    @property
    def iteration(self) -> int:
        """Number of batches collected so far, excluding a separate prefill batch."""
        separate = self.plan.prefill_steps > 0 and not self.plan.prefill_is_iteration
        return max(self._taken - separate, 0)

    def _take(self, iterator: Iterator[TensorDictBase]) -> TensorDictBase:
        """Collect the next batch and count its policy steps, including random ones."""
        if self._may_share is not None:
            self.collector.reuse = self._may_share()
        random_before = self.collector.random_policy_steps
        batch = next(iterator)
        self.collected = size_of(batch)
        self.collected_at_random = self.collector.random_policy_steps - random_before
        return batch

    def _check(self, batch: TensorDictBase) -> None:
        plan, iteration = self.plan, self.iteration
        if not plan.is_exact:
            return
        expected = plan.collected(iteration) if iteration else plan.local_prefill_steps
        if self.collected == expected:
            return
        field: str = "collector"
        value: Any = type(self.collector).__name__
        hint = f"use frames_per_batch={expected}"
        if plan.collects_episodes:
            field, value = "episode_length", plan.episode_length
            hint = "remove episode_length (pyrado: episode_length=varies), because episodes may "
            hint += "end earlier"
        batch_size = f"a batch of shape {tuple(batch.shape)} has {self.collected} policy steps"
        raise SettingError(
            field, value, f"does not match the plan: {batch_size} instead of {expected}", hint
        )

    def share_memory(self, may_share: Callable[[], bool]) -> None:
        """If the collector can reuse batch memory, allow reuse whenever ``may_share()`` is true."""
        if getattr(self.collector, "reuse", None) is False:
            self._may_share = may_share

    # ------------------------------------------------------------------ logging
    def count_environment(self, ledger: StepLedger) -> None:
        """Update the environment counters in ``ledger``. May synchronise with the GPU."""
        ledger.local_environment_errors = (
            self.collector.environment_errors + self._evaluation_faults
        )
        ledger.local_env_steps = self.collector.env_steps
        ledger.local_episodes = self.collector.episodes

    def metrics(self) -> dict[str, float]:
        """Return the collector's metrics, such as ``collector/staleness``."""
        return dict(getattr(self.collector, "metrics", dict)())

    def take_episodes(self) -> list[Episode]:
        """Return the episodes that ended since the last call.

        Raises:
            EnvError: if an episode return is infinite or NaN.
        """
        self.new_episodes()
        episodes, self._shown = self._shown, []
        return episodes

    def new_episodes(self) -> list[Episode]:
        """Return episodes that ended since the last call, and keep them for :meth:`take_episodes`.

        Raises:
            EnvError: if an episode return is infinite or NaN.
        """
        episodes = self._episodes()
        for episode in episodes:
            if not math.isfinite(episode.episode_return):
                what = f"returned rewards that sum to {episode.episode_return} over an episode"
                env = getattr(self.collector, "env", None)
                name = getattr(env, "name", type(env).__name__)
                raise EnvError(name, episode.env, what)
        self._shown += episodes
        return episodes

    def _episodes(self) -> list[Episode]:
        return list(self.collector.take_episodes())

    # ------------------------------------------------------------------ saving and loading
    @property
    def _evaluation_faults(self) -> int:
        return int(getattr(self.evaluate, "faults", 0))

    def not_resumable(self) -> str:
        """Return why a resumed run cannot continue exactly, or an empty string if it can."""
        state = self.collector.state_dict()
        # The state is nested if the collector runs in another process.
        env = state.get("collector", state).get("env", {})
        return str(env.get("not_resumable", ""))

    def state_dict(self) -> dict[str, Any]:
        """Return step counts and the states of the collector and the evaluation environments."""
        has_state = isinstance(self.evaluate, Evaluator)
        return {
            "taken": self._taken,
            "policy_steps": self._policy_steps,
            "evaluation": self.evaluate.state_dict() if has_state else None,
            "shown": [list(episode) for episode in self._shown],
            "collector": dict(self.collector.state_dict()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._taken = int(state_dict["taken"])
        self._policy_steps = int(state_dict["policy_steps"])
        evaluation = state_dict.get("evaluation")  # missing from older checkpoints
        if evaluation is not None and isinstance(self.evaluate, Evaluator):
            self.evaluate.load_state_dict(evaluation)
        self._shown = [Episode(*episode) for episode in state_dict.get("shown", ())]
        self.collector.load_state_dict(state_dict["collector"])

    def shutdown(self) -> None:
        """Shut down the collector."""
        self.collector.shutdown(raise_on_error=False)


class NoCollector(KitCollector):
    """Yields empty batches for runs without a collector."""

    def _collect(self) -> TensorDictBase:
        return TensorDict(batch_size=[0])

    def _seed_environments(self, seed: int) -> None:
        """Do nothing, because there are no environments."""


def size_of(batch: TensorDictBase) -> int:
    """Return the number of policy steps in a batch, excluding padding."""
    mask = entry(batch, ("collector", "mask"))
    return batch.batch_size.numel() if mask is None else int(mask.sum())
