"""The batches of any collector, the kit's or TorchRL's, counted; and the batches of none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import BaseCollector
from torchrl.envs import TransformedEnv

from kit.collectors.base import KitCollector
from kit.envs.episodes import Episode
from kit.envs.vector_env import VectorEnv
from kit.steps import SettingError, StepLedger, StepPlan


class CountedBatches:
    """Takes batches from a collector and counts them.

    A collector of the kit counts by itself. One of TorchRL yields batches only: their policy steps
    are counted here, their env steps are taken to be ``action_repeat`` for each policy step, as
    TorchRL does, and finished episodes are counted on the device. Its batches get the shape
    ``[num_envs, steps]``, and its processes are sent the policy's weights before each batch.

    Args:
        collector: the kit's or TorchRL's.
        plan: sizes of the batches.

    Attributes:
        collected: policy steps of the last batch.
        collected_at_random: those of them with random actions.
    """

    def __init__(self, collector: BaseCollector, plan: StepPlan) -> None:
        self.collector = collector
        self.plan = plan
        self.own = collector if isinstance(collector, KitCollector) else None
        self.collected = self.collected_at_random = 0
        self._iterator: Iterator[TensorDictBase] | None = None
        self._taken = 0
        self._policy_steps = 0
        self._ended: Tensor | None = None
        self._returns: list[Tensor] = []

    def next(self) -> TensorDictBase:
        """Take the next batch and count it.

        Raises:
            SettingError: if the collector ends early or the batch has another size than planned.
        """
        if self._iterator is None:
            self._iterator = iter(self.collector)
        if self.own is None and self._taken and self._has_policy:
            self.collector.update_policy_weights_()
        random_before = 0 if self.own is None else self.own.random_policy_steps
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise SettingError(
                "collector",
                type(self.collector).__name__,
                f"ended after {self._policy_steps} policy steps, before the plan",
                f"total_frames={self.plan.total_policy_steps // self.plan.world_size} or -1",
            ) from None
        if self.own is None:
            batch = _envs_first(batch)
        self._taken += 1
        self.collected = self._count(batch)
        if self.own is not None:
            self.collected_at_random = self.own.random_policy_steps - random_before
        else:
            self.collected_at_random = self._random_of_torchrl()
            self._note_ends(batch)
        self._policy_steps += self.collected
        self._check(batch)
        return batch

    @property
    def _has_policy(self) -> bool:
        """Whether TorchRL's collector has a policy whose weights it can be sent."""
        policy = getattr(self.collector, "policy", None)
        return isinstance(policy, nn.Module) and next(policy.parameters(), None) is not None

    def _count(self, batch: TensorDictBase) -> int:
        mask = batch.get(("collector", "mask"), None)
        return batch.numel() if mask is None else int(mask.sum())

    def _random_of_torchrl(self) -> int:
        """TorchRL takes random actions until ``init_random_frames`` is reached, batch by batch."""
        wanted = getattr(self.collector, "init_random_frames", None) or 0
        return self.collected if self._policy_steps < wanted else 0

    def _check(self, batch: TensorDictBase) -> None:
        if not self.plan.is_exact:
            return
        separate = self.plan.prefill_steps > 0 and not self.plan.prefill_is_iteration
        iteration = self._taken - separate
        expected = self.plan.collected(iteration) if iteration else self.plan.local_prefill_steps
        if self.collected != expected:
            raise SettingError(
                "collector",
                type(self.collector).__name__,
                f"gave a batch of {self.collected} policy steps, shape {tuple(batch.shape)}, where "
                f"the plan has {expected}",
                f"frames_per_batch={expected}",
            )

    def _note_ends(self, batch: TensorDictBase) -> None:
        done = batch.get(("next", "done"))
        ended = done.sum()
        self._ended = ended if self._ended is None else self._ended + ended
        returns = batch.get(("next", "episode_reward"), None)
        if returns is not None:
            self._returns.append(torch.where(done, returns, torch.nan).reshape(-1))

    # ------------------------------------------------------------------ at log points
    def count_environment(self, ledger: StepLedger) -> None:
        """Bring env steps, episodes and faults of ``ledger`` up to date; may read the device."""
        if self.own is None:
            env_steps = self._policy_steps * self.plan.action_repeat
            episodes = 0 if self._ended is None else int(self._ended)
        else:
            env_steps, episodes = self.own.env_steps, self.own.episodes
            ledger.environment_errors = self.own.environment_errors
        ledger.collected(0, env_steps - ledger.local_env_steps, episodes - ledger.local_episodes)

    def metrics(self) -> dict[str, float]:
        """The collector's own metrics: ``collector/staleness``, for one."""
        return {} if self.own is None else self.own.metrics()

    def take_episodes(self) -> list[Episode]:
        """The episodes that ended since the last call, as far as they are known."""
        if self.own is not None:
            return self.own.take_episodes()
        env = getattr(self.collector, "env", None)
        env = env.base_env if isinstance(env, TransformedEnv) else env
        if isinstance(env, VectorEnv):  # it knows rewards before normalisation
            return env.take_episodes()
        returns, self._returns = self._returns, []
        if not returns:
            return []
        values = torch.cat(returns)
        known = values[~values.isnan()].tolist()
        return [Episode(0, value, 0, 0, terminated=False) for value in known]

    # ------------------------------------------------------------------ in and out
    @property
    def exact_resume(self) -> bool:
        """Whether the collector continued exactly where it was saved."""
        return bool(getattr(self.collector, "exact_resume", True))

    def state_dict(self) -> dict[str, Any]:
        """Counts and the collector's state."""
        return {
            "taken": self._taken,
            "policy_steps": self._policy_steps,
            "ended": None if self._ended is None else int(self._ended),
            "collector": dict(self.collector.state_dict()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        self._taken = int(state_dict["taken"])
        self._policy_steps = int(state_dict["policy_steps"])
        if state_dict["ended"] is not None:
            self._ended = torch.tensor(state_dict["ended"])
        self.collector.load_state_dict(state_dict["collector"])

    def shutdown(self) -> None:
        """Release the collector."""
        self.collector.shutdown(raise_on_error=False)


class NoBatches:
    """The batches of a run that collects nothing: empty ones."""

    collected = collected_at_random = 0
    exact_resume = True

    def next(self) -> TensorDictBase:
        """An empty batch."""
        return TensorDict(batch_size=[0])

    def count_environment(self, ledger: StepLedger) -> None:
        """Nothing is stepped."""

    def metrics(self) -> dict[str, float]:
        """None."""
        return {}

    def take_episodes(self) -> list[Episode]:
        """None."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore."""

    def shutdown(self) -> None:
        """Nothing to release."""


def _envs_first(batch: TensorDictBase) -> TensorDictBase:
    """A batch of TorchRL, of several workers or of one environment, as ``[num_envs, steps]``."""
    if batch.ndim == 1:
        return batch.unsqueeze(0)
    return batch.flatten(0, -2) if batch.ndim > 2 else batch
