"""Checks that a collector returns the batches, episodes and counts that a step plan requires."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torchrl.collectors import Collector, MultiAsyncCollector, MultiCollector
from torchrl.envs import EnvBase

from kit.collectors.base import KitCollector
from kit.envs.backends.torchrl import TorchRLBackend
from kit.envs.backends.torchrl_layers import base_env_of, frame_skip_of
from kit.envs.vector_env import VectorEnv
from kit.steps import StepLedger, StepPlan

Refusal = tuple[Any, ...]
"""Arguments for a ``SettingError``."""


def in_collector(plan: StepPlan, collector: Any, *, joins_steps: bool) -> Iterator[Refusal]:
    """Yield errors if a collector's batches or counts would differ from the plan.

    Args:
        plan: step plan of the run.
        collector: collector from kit or TorchRL.
        joins_steps: whether the buffer combines steps from consecutive batches.
    """
    yield from _in_restarts(plan, collector, joins_steps)
    with _environment_of(collector) as env:
        yield from _in_environment(plan, collector, env)
    if plan.collects_episodes:
        yield from _in_episodes(plan, collector)


def _in_restarts(plan: StepPlan, collector: Any, joins_steps: bool) -> Iterator[Refusal]:
    """Yield errors if batch boundaries would cause episodes to be joined, cut or miscounted."""
    if joins_steps and isinstance(collector, MultiAsyncCollector) and collector.num_workers > 1:
        reason = "returns batches in any order, but the buffer joins consecutive batches"
        hint = "use MultiSyncCollector or a single worker"
        yield "collector", type(collector).__name__, reason, hint
    random_frames = getattr(collector, "init_random_frames", None)
    if random_frames and isinstance(collector, MultiAsyncCollector) and plan.is_exact:
        reason = "cannot be counted exactly, because other workers have already started batches"
        yield "init_random_frames", random_frames, reason, [0], "or use another collector"
    restarts = getattr(collector, "reset_at_each_iter", False)
    ends = getattr(collector, "set_truncated", False)
    if joins_steps and restarts and not ends:
        reason = "resets without ending episodes, but the buffer combines steps within episodes"
        hint = "remove reset_at_each_iter, or truncate episodes with env.max_episode_steps"
        yield "reset_at_each_iter", True, reason, hint
    if ends and not restarts:
        reason = "ends episodes that continue in the next batch, so they would be counted twice"
        yield "set_truncated", True, reason, "remove set_truncated, or set reset_at_each_iter=True"
    if plan.on_policy and getattr(collector, "split_trajs", False) and not ends:
        reason = "pads partial episodes, so advantages would be computed from padding"
        yield "split_trajs", True, reason, "remove split_trajs, which advantages do not need"


@contextlib.contextmanager
def _environment_of(collector: Any) -> Iterator[Any]:
    """Yield a collector's environment, or a new one if its environments are in other processes.

    Batches from other processes do not report env steps, so an action repeat that differs from the
    plan would otherwise go unnoticed.
    """
    if not isinstance(collector, MultiCollector):
        yield getattr(collector, "env", None)
        return
    make, arguments = collector.create_env_fn[0], collector.create_env_kwargs[0]
    env = make if isinstance(make, EnvBase) else make(**arguments)
    try:
        yield env
    finally:
        if env is not make:
            env.close(raise_if_closed=False)


def _in_environment(plan: StepPlan, collector: Any, env: Any) -> Iterator[Refusal]:
    """Yield errors if a collector's environments contradict the plan."""
    base: Any = base_env_of(env)
    again = base.make_again if isinstance(base, VectorEnv) else None
    arguments = getattr(again, "keywords", {})  # arguments of make_env
    num_envs = getattr(collector, "num_envs", getattr(base, "num_envs", None))
    several = isinstance(collector, MultiCollector)  # num_envs is checked with the first batch
    found = {
        "num_envs": None if several else num_envs,
        "action_repeat": arguments.get("action_repeat") or _frame_skip_of(env, base),
    }
    if plan.max_episode_steps is not None and arguments:
        found["max_episode_steps"] = arguments.get("max_episode_steps") or "the registered limit"
    for field, value in found.items():
        planned = getattr(plan, field)
        if value is not None and value != planned:
            reason = f"in the collector differs from {field}={planned} in the plan"
            yield f"env.{field}", value, reason, [planned], "or change the plan"


def _frame_skip_of(env: Any, base: Any) -> int | None:
    """Return the frame skip of a TorchRL environment, or ``None`` if it is unknown."""
    found = frame_skip_of(env) if isinstance(env, EnvBase) else 1
    if isinstance(base, VectorEnv):
        return base.backend.action_repeat if isinstance(base.backend, TorchRLBackend) else None
    return None if found == 1 else found  # custom environments may repeat actions differently


def _in_episodes(plan: StepPlan, collector: Any) -> Iterator[Refusal]:
    """Yield errors if the plan requires complete episodes but the collector returns others."""
    trajectories = getattr(collector, "trajs_per_batch", None)
    is_torchrl = isinstance(collector, (Collector, MultiCollector))
    if not trajectories and (is_torchrl or getattr(collector, "frames_per_batch", -1) > 0):
        reason = "collects a fixed number of steps, but the plan requires complete episodes"
        hint = "pass an EpisodeCollector, or a plan with steps_per_env"
        yield "collector", type(collector).__name__, reason, hint
    found = {name: getattr(collector, name, None) for name in ("min_episodes", "min_steps")}
    found["min_episodes"] = found["min_episodes"] or trajectories
    for field, value in found.items():
        planned = getattr(plan, field) or 1
        if value not in (None, planned):
            reason = f"in the collector differs from {field}={planned} in the plan"
            yield field, value, reason, [planned], "or change the plan"


def in_counts(collector: Any, ledger: StepLedger) -> Iterator[Refusal]:
    """Yield an error if a collector has already collected steps that are not part of this run."""
    collected = collector.policy_steps if isinstance(collector, KitCollector) else 0
    if collected > ledger.local_policy_steps:
        reason = f"has already collected {collected:,} policy steps that are not part of this run"
        yield "collector", type(collector).__name__, reason, "create a new collector"


def in_random_steps(plan: StepPlan, ledger: StepLedger, collector: Any) -> Iterator[Refusal]:
    """Yield an error if the number of random steps so far differs from the plan."""
    if not plan.is_exact or plan.collects_episodes or collector is None:
        return
    steps, found = ledger.policy_steps, ledger.random_policy_steps
    if found != (planned := plan.random_steps_until(steps)):
        reason = f"took {found:,} policy steps at random, but the plan has {planned:,} in the first"
        hint = "take random actions until init_random_frames, and count random_policy_steps"
        yield "collector", type(collector).__name__, f"{reason} {steps:,}", hint
