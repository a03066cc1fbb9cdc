"""The batches of a collector of the kit, counted; and the batches of none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import (
    BaseCollector,
)

from kit.collectors.base import KitCollector
from kit.envs.episodes import Episode
from kit.envs.errors import EnvError
from kit.fast.nested import entry
from kit.hooks.evaluation import Evaluator
from kit.steps import SettingError, StepLedger, StepPlan


class CollectorAdapter:
    """Takes batches from a collector of the kit, and its counts.

    Attributes:
        collected: policy steps of the last batch.
        collected_at_random: those of them with random actions.
        evaluate: the evaluator, whose environments may have faults and keep state, too; or none.
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
        """Take the next batch and count it.

        Raises:
            SettingError: if the collector ends early or the batch has another size than planned.
        """
        if self._iterator is None:
            self._iterator = iter(self.collector)
        try:
            batch = self._take(self._iterator)
        except StopIteration:
            why = f"ended after {self._policy_steps} policy steps, before the plan"
            works = f"total_frames={self.plan.total_policy_steps // self.plan.world_size} or -1"
            raise SettingError("collector", type(self.collector).__name__, why, works) from None
        self._taken += 1
        self._policy_steps += self.collected
        self._check(batch)
        return batch

    @property
    def iteration(self) -> int:
        """That of the last batch, from 1; 0 for a prefill, or before any."""
        separate = self.plan.prefill_steps > 0 and not self.plan.prefill_is_iteration
        return max(self._taken - separate, 0)

    def _take(self, iterator: Iterator[TensorDictBase]) -> TensorDictBase:
        """The next batch, counted."""
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
        works = f"frames_per_batch={expected}"
        if plan.collects_episodes:
            field, value = "episode_length", plan.episode_length
            works = "leave out what declares it, as episodes may end earlier"
        why = f"gave a batch of {self.collected} policy steps, shape {tuple(batch.shape)}"
        raise SettingError(field, value, f"{why}, where the plan has {expected}", works)

    def share_memory(self, may: Callable[[], bool]) -> None:
        """Let batches share memory if a collector of the kit can; ``may`` is asked before each."""
        if getattr(self.collector, "reuse", None) is False:
            self._may_share = may

    # ------------------------------------------------------------------ at log points
    def count_environment(self, ledger: StepLedger) -> None:
        """Bring env steps, episodes and faults of ``ledger`` up to date; may read the device."""
        ledger.environment_errors = self.collector.environment_errors + self._evaluation_faults
        ledger.local_env_steps = self.collector.env_steps
        ledger.local_episodes = self.collector.episodes

    def metrics(self) -> dict[str, float]:
        """The collector's own metrics: ``collector/staleness``, for one."""
        return dict(getattr(self.collector, "metrics", dict)())

    def take_episodes(self) -> list[Episode]:
        """The episodes that ended since the last call, as far as they are known.

        Raises:
            EnvError: if a return is infinite or NaN, where no reward was checked.
        """
        self.new_episodes()
        found, self._shown = self._shown, []
        return found

    def new_episodes(self) -> list[Episode]:
        """Return the episodes that ended since the last call, and keep them for the next row.

        Raises:
            EnvError: if a return is infinite or NaN, where no reward was checked.
        """
        found = self._episodes()
        for episode in found:
            if not math.isfinite(episode.episode_return):
                what = f"gave rewards whose sum over an episode is {episode.episode_return}"
                env = getattr(self.collector, "env", None)
                name = getattr(env, "name", type(env).__name__)
                raise EnvError(name, episode.env, what)
        self._shown += found
        return found

    def _episodes(self) -> list[Episode]:
        return list(self.collector.take_episodes())

    # ------------------------------------------------------------------ in and out
    @property
    def _evaluation_faults(self) -> int:
        return int(getattr(self.evaluate, "faults", 0))

    def not_resumable(self) -> str:
        """Why a resumed run would not continue exactly; empty if it would."""
        state = self.collector.state_dict()
        env = state.get("collector", state).get("env", {})  # that of a process, or of this one
        return str(env.get("not_resumable", ""))

    def state_dict(self) -> dict[str, Any]:
        """Return counts and the states of the collector and the evaluation environments."""
        has_state = isinstance(self.evaluate, Evaluator)
        return {
            "taken": self._taken,
            "policy_steps": self._policy_steps,
            "evaluation": self.evaluate.state_dict() if has_state else None,
            "shown": [list(episode) for episode in self._shown],
            "collector": dict(self.collector.state_dict()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        self._taken = int(state_dict["taken"])
        self._policy_steps = int(state_dict["policy_steps"])
        evaluation = state_dict.get("evaluation")  # absent from older checkpoints
        if evaluation is not None and isinstance(self.evaluate, Evaluator):
            self.evaluate.load_state_dict(evaluation)
        self._shown = [Episode(*one) for one in state_dict.get("shown", ())]
        self.collector.load_state_dict(state_dict["collector"])

    def shutdown(self) -> None:
        """Release the collector."""
        self.collector.shutdown(raise_on_error=False)


class NoCollector(KitCollector):
    """Where a run collects nothing: its batches are empty."""

    def _collect(self) -> TensorDictBase:
        return TensorDict(batch_size=[0])

    def _seed_environments(self, seed: int) -> None:
        """There are none."""


def size_of(batch: TensorDictBase) -> int:
    """Policy steps of a batch, without padding."""
    mask = entry(batch, ("collector", "mask"))
    return batch.batch_size.numel() if mask is None else int(mask.sum())
