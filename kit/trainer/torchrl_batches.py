"""Adapter that counts the steps of TorchRL's collectors."""

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
    """Return an adapter that counts a collector's steps. Without a collector, batches are empty."""
    if collector is None:
        return CollectorAdapter(NoCollector(0), plan)
    is_kit = isinstance(collector, KitCollector)
    return (CollectorAdapter if is_kit else TorchRLCollectorAdapter)(collector, plan)


class TorchRLCollectorAdapter(CollectorAdapter):
    """Counts the steps of a TorchRL collector.

    Policy steps and finished episodes are counted from the batches. Env steps are counted exactly
    if kit's environment runs in this process. Otherwise, as in TorchRL, each policy step counts as
    ``action_repeat`` env steps. Batches are reshaped to ``[num_envs, steps]``. Worker processes
    receive the policy's weights before each batch.
    """

    def __init__(self, collector: BaseCollector, plan: StepPlan) -> None:
        super().__init__(collector, plan)
        self._ended: Tensor | int = 0
        self._returns: list[Tensor] = []
        env = base_env_of(getattr(collector, "env", None))
        self._env = env if isinstance(env, VectorEnv) else None
        self._env_steps = self._restarts = 0

    def _take(self, iterator: Iterator[TensorDictBase]) -> TensorDictBase:
        policy = getattr(self.collector, "policy", None)
        trained = isinstance(policy, nn.Module) and next(policy.parameters(), None) is not None
        if self._taken and trained:
            self.collector.update_policy_weights_()
        before = 0 if self._env is None else self._env.env_steps_made
        batch = next(iterator)
        self._env_steps += 0 if self._env is None else self._env.env_steps_made - before
        if batch.ndim == 1:
            batch = batch.unsqueeze(0)
        elif batch.ndim > 2:  # several workers
            batch = batch.flatten(0, -2)
        self.collected = size_of(batch)
        # TorchRL collects whole random batches until init_random_frames is reached.
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
        shape = f"returned a batch of {rows} rows of {batch.shape[1]} steps, but num_envs={planned}"
        reason, hint = shape, f"use num_envs={rows} in the plan"
        if isinstance(self.collector, MultiSyncCollector):
            reason, hint = f"{shape}. Workers may be joined along time", "use cat_results='stack'"
        raise SettingError("collector", type(self.collector).__name__, reason, hint)

    def count_environment(self, ledger: StepLedger) -> None:
        """Update the environment counters in ``ledger``. Synchronises with the GPU."""
        ledger.local_environment_errors = self._evaluation_faults
        estimated = self._policy_steps * self.plan.action_repeat
        ledger.local_env_steps = estimated if self._env is None else self._env_steps
        ledger.local_episodes = int(self._ended)

    def _episodes(self) -> list[Episode]:
        if self._env is not None:  # kit's environment reports unnormalised returns
            return self._env.take_episodes()
        returns, self._returns = self._returns, []
        values = [value for part in returns for value in part[~part.isnan()].tolist()]
        return [Episode(0, value, 0, 0, terminated=False) for value in values]

    def not_resumable(self) -> str:
        """Return why a resumed run cannot continue exactly."""
        return "TorchRL's collectors do not save it"

    def state_dict(self) -> dict[str, Any]:
        """Return step counts and the collector's state."""
        counts = {"env_steps": self._env_steps, "begun_again": self._restarts}
        return {**super().state_dict(), **counts, "ended": int(self._ended)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        state = dict(state_dict["collector"])
        env = getattr(self.collector, "env", None)
        # Fill the state in place, because evaluation environments may share the statistics.
        if isinstance(env, TransformedEnv):
            present = env.transform.state_dict()
            state["env_state_dict"] = filled(present, state["env_state_dict"])
        super().load_state_dict({**state_dict, "collector": state})
        self._ended, self._env_steps = int(state_dict["ended"]), int(state_dict["env_steps"])
        # Use a different seed than at the start of the run, so that episodes do not repeat.
        self._restarts = int(state_dict["begun_again"]) + 1
        self.collector.set_seed(derived_seed(torch.initial_seed(), self._restarts))
        self.collector.reset()


def acts_at_random(collector: BaseCollector) -> bool:
    """Return whether a TorchRL collector takes only random actions."""
    if not isinstance(collector, (Collector, MultiCollector)):
        return False
    built = any(getattr(collector, "policy_factory", None) or ())  # in worker processes
    return isinstance(collector.policy, RandomPolicy) or (collector.policy is None and not built)
