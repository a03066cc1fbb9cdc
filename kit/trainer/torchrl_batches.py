"""The batches of TorchRL's collectors, counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
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
from kit.envs.vector_env import VectorEnv
from kit.fast.nested import entry
from kit.steps import SettingError, StepLedger, StepPlan
from kit.trainer.batches import CollectorAdapter, NoCollector, size_of


def counted(collector: BaseCollector | None, plan: StepPlan) -> CollectorAdapter:
    """The counted batches of a collector; empty ones where there is none."""
    if collector is None:
        return CollectorAdapter(NoCollector(0), plan)
    own = isinstance(collector, KitCollector)
    return (CollectorAdapter if own else TorchRLCollectorAdapter)(collector, plan)


class TorchRLCollectorAdapter(CollectorAdapter):
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
