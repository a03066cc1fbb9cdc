"""The batches of any collector, the kit's or TorchRL's, counted; and the batches of none."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import (
    BaseCollector,
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)
from torchrl.envs import TransformedEnv
from torchrl.modules import RandomPolicy

from kit.collectors.base import KitCollector
from kit.envs.backends.base import derived_seed
from kit.envs.backends.torchrl_layers import base_env_of, filled
from kit.envs.episodes import Episode
from kit.envs.errors import EnvironmentFault
from kit.envs.vector_env import VectorEnv
from kit.fast.nested import entry
from kit.hooks.evaluation import Evaluator
from kit.steps import SettingError, StepLedger, StepPlan


def counted(collector: BaseCollector | None, plan: StepPlan) -> CountedBatches:
    """The counted batches of a collector; empty ones where there is none."""
    if collector is None:
        return CountedBatches(_NoCollector(0), plan)
    own = isinstance(collector, KitCollector)
    return (CountedBatches if own else TorchRLBatches)(collector, plan)


class CountedBatches:
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

    @contextlib.contextmanager
    def sharing_memory(self, may: Callable[[], bool]) -> Iterator[None]:
        """Let all batches within share one memory, where a collector of the kit can.

        Args:
            may: asked before each batch, whether nothing keeps it.
        """
        before = getattr(self.collector, "reuse", None)
        if before is not False or not isinstance(self.collector, KitCollector):
            yield  # it was asked for already, or there is nothing to ask for
            return
        self._may_share = may
        try:
            yield
        finally:
            self._may_share, self.collector.reuse = None, before

    # ------------------------------------------------------------------ at log points
    def count_environment(self, ledger: StepLedger) -> None:
        """Bring env steps, episodes and faults of ``ledger`` up to date; may read the device."""
        ledger.environment_errors = self.collector.environment_errors + self._evaluation_faults
        ledger.local_env_steps = self.collector.env_steps
        ledger.local_episodes = self.collector.episodes

    def metrics(self) -> dict[str, float]:
        """The collector's own metrics: ``collector/staleness``, for one."""
        return dict(self.collector.metrics())

    def take_episodes(self) -> list[Episode]:
        """The episodes that ended since the last call, as far as they are known.

        Raises:
            EnvironmentFault: if a return is infinite or NaN, where no reward was checked.
        """
        self.new_episodes()
        found, self._shown = self._shown, []
        return found

    def new_episodes(self) -> list[Episode]:
        """Return the episodes that ended since the last call, and keep them for the next row.

        Raises:
            EnvironmentFault: if a return is infinite or NaN, where no reward was checked.
        """
        found = self._episodes()
        for episode in found:
            if not math.isfinite(episode.episode_return):
                what = f"gave rewards whose sum over an episode is {episode.episode_return}"
                env = getattr(self.collector, "env", None)
                name = getattr(env, "name", type(env).__name__)
                raise EnvironmentFault(name, episode.env, what)
        self._shown += found
        return found

    def _episodes(self) -> list[Episode]:
        return list(self.collector.take_episodes())

    # ------------------------------------------------------------------ in and out
    @property
    def exact_resume(self) -> bool:
        """Whether the collector continued exactly where it was saved."""
        return bool(getattr(self.collector, "exact_resume", False))

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


class TorchRLBatches(CountedBatches):
    """Takes batches from a collector of TorchRL, which yields batches only.

    Policy steps are counted here, and finished episodes on the device. Env steps are those that an
    environment of the kit in this process has made; others do not tell, and are taken to make
    ``action_repeat`` for each policy step, as TorchRL does. Batches get the shape
    ``[num_envs, steps]``, and processes are sent the policy's weights before each batch.
    """

    def __init__(self, collector: BaseCollector, plan: StepPlan) -> None:
        super().__init__(collector, plan)
        self._ended: Tensor | int = 0
        self._returns: list[Tensor] = []
        env = base_env_of(getattr(collector, "env", None))
        self._own = env if isinstance(env, VectorEnv) else None
        self._env_steps = self._begun_again = 0

    def _take(self, iterator: Iterator[TensorDictBase]) -> TensorDictBase:
        policy = getattr(self.collector, "policy", None)
        trained = isinstance(policy, nn.Module) and next(policy.parameters(), None) is not None
        if self._taken and trained:
            self.collector.update_policy_weights_()
        before = 0 if self._own is None else self._own.env_steps_made
        batch = next(iterator)
        self._env_steps += 0 if self._own is None else self._own.env_steps_made - before
        if batch.ndim == 1:
            batch = batch.unsqueeze(0)
        elif batch.ndim > 2:  # of several workers
            batch = batch.flatten(0, -2)
        self.collected = size_of(batch)
        # TorchRL takes random actions until this many are reached, batch by batch.
        random = getattr(self.collector, "init_random_frames", None) or 0
        at_random = self._policy_steps < random or acts_at_random(self.collector)
        self.collected_at_random = self.collected if at_random else 0
        done = batch.get(("next", "done"))
        self._ended = self._ended + done.sum()
        returns = batch.get(("next", "episode_reward"), None)
        if returns is not None:
            self._returns.append(torch.where(done, returns, torch.nan).reshape(-1))
        return batch

    def _check(self, batch: TensorDictBase) -> None:
        super()._check(batch)
        rows, planned = batch.shape[0], self.plan.num_envs
        cut = entry(batch, ("collector", "mask")) is not None
        if rows == planned or cut or isinstance(self.collector, MultiAsyncCollector):
            return
        why = f"gave a batch of {rows} rows of {batch.shape[1]} steps, not of num_envs={planned}"
        works = f"num_envs={rows} in the plan"
        if isinstance(self.collector, MultiSyncCollector):
            why, works = f"{why}: it may join workers along time", "cat_results='stack'"
        raise SettingError("collector", type(self.collector).__name__, why, works)

    def count_environment(self, ledger: StepLedger) -> None:
        """Bring env steps and episodes of ``ledger`` up to date; reads the device."""
        ledger.environment_errors = self._evaluation_faults
        taken_to_be = self._policy_steps * self.plan.action_repeat
        ledger.local_env_steps = taken_to_be if self._own is None else self._env_steps
        ledger.local_episodes = int(self._ended)

    def metrics(self) -> dict[str, float]:
        """None."""
        return {}

    def _episodes(self) -> list[Episode]:
        if self._own is not None:  # it knows rewards before normalisation
            return self._own.take_episodes()
        returns, self._returns = self._returns, []
        known = [value for part in returns for value in part[~part.isnan()].tolist()]
        return [Episode(0, value, 0, 0, terminated=False) for value in known]

    def not_resumable(self) -> str:
        """The environments begin again: collectors of TorchRL save no episodes."""
        return "collectors of TorchRL do not save it"

    def state_dict(self) -> dict[str, Any]:
        """Counts and the collector's state."""
        counts = {"env_steps": self._env_steps, "begun_again": self._begun_again}
        return {**super().state_dict(), **counts, "ended": int(self._ended)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        given = dict(state_dict["collector"])
        env = getattr(self.collector, "env", None)
        if isinstance(env, TransformedEnv):  # in place: an evaluation may share its statistics
            present = env.transform.state_dict()
            given["env_state_dict"] = filled(present, given["env_state_dict"])
        super().load_state_dict({**state_dict, "collector": given})
        self._ended, self._env_steps = int(state_dict["ended"]), int(state_dict["env_steps"])
        # Other episodes than those with which the run began.
        self._begun_again = int(state_dict["begun_again"]) + 1
        self.collector.set_seed(derived_seed(torch.initial_seed(), self._begun_again))
        self.collector.reset()


def acts_at_random(collector: BaseCollector) -> bool:
    """Whether a collector of TorchRL has no policy but random actions."""
    if not isinstance(collector, (Collector, MultiCollector)):
        return False
    made = any(getattr(collector, "policy_factory", None) or ())  # in processes
    return isinstance(collector.policy, RandomPolicy) or (collector.policy is None and not made)


class _NoCollector(KitCollector):
    """Where a run collects nothing: its batches are empty."""

    def _collect(self) -> TensorDictBase:
        return TensorDict(batch_size=[0])

    def _seed_environments(self, seed: int) -> None:
        """There are none."""

    def shutdown(self, **kwargs: Any) -> None:
        """Nothing to release."""


def size_of(batch: TensorDictBase) -> int:
    """Policy steps of a batch, without padding."""
    mask = entry(batch, ("collector", "mask"))
    return batch.batch_size.numel() if mask is None else int(mask.sum())
