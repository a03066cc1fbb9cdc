"""Whether a collector delivers the batches, episodes and counts of a plan."""

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
"""Arguments of a ``SettingError``."""


def in_collector(plan: StepPlan, collector: Any, *, joins_steps: bool) -> Iterator[Refusal]:
    """Yield how a collector would make other batches or counts than planned.

    Args:
        plan: counts of the run.
        collector: of the kit or TorchRL.
        joins_steps: whether the buffer joins steps of an environment across batches.
    """
    yield from _in_restarts(plan, collector, joins_steps)
    with _environment_of(collector) as env:
        yield from _in_environment(plan, collector, env)
    if plan.collects_episodes:
        yield from _in_episodes(plan, collector)


def _in_restarts(plan: StepPlan, collector: Any, joins_steps: bool) -> Iterator[Refusal]:
    """Yield episodes that would be joined, cut or counted wrongly between two batches."""
    if joins_steps and isinstance(collector, MultiAsyncCollector) and collector.num_workers > 1:
        why = "gives batches of its workers in any order, and the memory joins each to the last"
        yield "collector", type(collector).__name__, why, "use MultiSyncCollector, or one worker"
    asked = getattr(collector, "init_random_frames", None)
    if asked and isinstance(collector, MultiAsyncCollector) and plan.is_exact:
        why = "end with batches that other workers have begun by then, so they cannot be counted"
        yield "init_random_frames", asked, why, [0], "or another collector"
    restarts = getattr(collector, "reset_at_each_iter", False)
    ends = getattr(collector, "set_truncated", False)
    if joins_steps and restarts and not ends:
        why = "leaves episodes without an end, and the memory joins steps until an episode ends"
        works = "leave it out, or truncate episodes with env.max_episode_steps"
        yield "reset_at_each_iter", True, why, works
    if ends and not restarts:
        why = "ends episodes that go on in the next batch, which would be counted as two"
        yield "set_truncated", True, why, "leave it out, or give reset_at_each_iter=True, too"
    if plan.on_policy and getattr(collector, "split_trajs", False) and not ends:
        why = "pads pieces of episodes, whose advantages would read the padding"
        yield "split_trajs", True, why, "leave it out: they do not pass the end of an episode"


@contextlib.contextmanager
def _environment_of(collector: Any) -> Iterator[Any]:
    """Yield a collector's environment; create one if its environments are in other processes.

    Batches of processes do not report env steps. An action repeat that differs from the plan's
    would go unnoticed, and all env steps would be wrong.
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
    """Yield counts of a collector's environments that contradict the plan."""
    base: Any = base_env_of(env)
    again = base.make_again if isinstance(base, VectorEnv) else None
    made = getattr(again, "keywords", {})  # arguments of make_env
    num_envs = getattr(collector, "num_envs", getattr(base, "num_envs", None))
    several = isinstance(collector, MultiCollector)  # the first batch shows how many
    found = {
        "num_envs": None if several else num_envs,
        "action_repeat": made.get("action_repeat") or _frame_skip_of(env, base),
    }
    if plan.max_episode_steps is not None and made:
        found["max_episode_steps"] = made.get("max_episode_steps") or "the registered one"
    for field, value in found.items():
        planned = getattr(plan, field)
        if value is not None and value != planned:
            why = f"of the collector contradicts the plan's {field}={planned}"
            yield f"env.{field}", value, why, [planned], "or change the plan"


def _frame_skip_of(env: Any, base: Any) -> int | None:
    """Env steps of one policy step in an environment of TorchRL; ``None`` where it is not known."""
    found = frame_skip_of(env) if isinstance(env, EnvBase) else 1
    if isinstance(base, VectorEnv):
        return base.backend.action_repeat if isinstance(base.backend, TorchRLBackend) else None
    return None if found == 1 else found  # it may hold actions in a way of its own


def _in_episodes(plan: StepPlan, collector: Any) -> Iterator[Refusal]:
    """Yield a collector of steps, or of other episodes than planned."""
    whole = getattr(collector, "trajs_per_batch", None)
    of_torchrl = isinstance(collector, (Collector, MultiCollector))
    if not whole and (of_torchrl or getattr(collector, "frames_per_batch", -1) > 0):
        why = "collects steps, where the plan has whole episodes"
        works = "give an EpisodeCollector, or a plan with steps_per_env"
        yield "collector", type(collector).__name__, why, works
    found = {name: getattr(collector, name, None) for name in ("min_episodes", "min_steps")}
    found["min_episodes"] = found["min_episodes"] or whole
    for field, value in found.items():
        planned = getattr(plan, field) or 1
        if value not in (None, planned):
            why = f"of the collector contradicts the plan's {field}={planned}"
            yield field, value, why, [planned], "or change the plan"


def in_counts(collector: Any, ledger: StepLedger) -> Iterator[Refusal]:
    """Yield a collector that has collected steps which are not part of the run."""
    collected = collector.policy_steps if isinstance(collector, KitCollector) else 0
    if collected > ledger.local_policy_steps:
        why = f"has collected {collected:,} policy steps before, which are not in this run"
        yield "collector", type(collector).__name__, why, "make another one"


def in_random_steps(plan: StepPlan, ledger: StepLedger, collector: Any) -> Iterator[Refusal]:
    """Yield another number of steps with random actions than planned until now."""
    if not plan.is_exact or plan.collects_episodes or collector is None:
        return
    steps, found = ledger.policy_steps, ledger.random_policy_steps
    if found != (planned := plan.random_steps_until(steps)):
        why = f"took {found:,} policy steps at random, and the plan has {planned:,} of the first"
        works = "let it act at random until init_random_frames, and count random_policy_steps"
        yield "collector", type(collector).__name__, f"{why} {steps:,}", works
