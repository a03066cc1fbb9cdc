"""Registry of collectors, and a function that creates a collector for a step plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchrl.collectors import BaseCollector, Collector
from torchrl.envs import EnvBase

from kit.collectors.asynchronous import AsyncCollector
from kit.collectors.episode import EpisodeCollector
from kit.collectors.policy import Policy, is_recurrent
from kit.collectors.ray import RayCollector
from kit.collectors.rollout import VectorCollector
from kit.collectors.tensor import TensorCollector
from kit.envs.backends.base import derived_seed
from kit.envs.tensor import TENSOR_ENVS, TensorBackend
from kit.envs.vector_env import VectorEnv
from kit.steps import SettingError, StepPlan
from kit.steps.errors import nearest_first

COLLECTORS: dict[str, type[BaseCollector]] = {
    "vector": VectorCollector,
    "tensor": TensorCollector,
    "episode": EpisodeCollector,
    "async": AsyncCollector,
    "ray": RayCollector,
    "torchrl": Collector,
}
"""Collector classes, keyed by their names in configs. You can add custom classes."""


def make_collector(
    collector: str | Callable[..., BaseCollector],
    env: EnvBase,
    policy: Policy | None,
    plan: StepPlan,
    *,
    seed: int = 0,
    rank: int = 0,
    device: torch.device | str | None = None,
    exploration_policy: Policy | None = None,
    **kwargs: Any,
) -> BaseCollector:
    """Create the collector for one process of a run.

    Args:
        collector: name in :data:`COLLECTORS`, or a class or function with the same arguments.
        env: training environments of this process. The ``tensor`` collector replaces them with
            equivalent torch environments if necessary. The ``async`` and ``ray`` collectors create
            them again in their worker processes.
        policy: policy to train; ``None``: random actions.
        plan: step plan, which determines batch sizes and random steps.
        seed: seed for the policy and random actions. Each process derives its own seed from it.
        rank: index of this process.
        device: device of the policy and the batches.
        exploration_policy: policy that acts during the plan's ``exploration_steps``.
        **kwargs: arguments for the collector, such as ``max_staleness``, ``layout`` or ``reuse``.

    Raises:
        SettingError: if the collector's name is unknown.
        TypeError: if the collector does not accept the arguments.
    """
    make = _resolve(collector)
    kind = make if isinstance(make, type) else object
    in_processes = issubclass(kind, (AsyncCollector, RayCollector))
    if in_processes:
        inner = EpisodeCollector if plan.collects_episodes else VectorCollector
        kwargs["collector"] = _resolve(kwargs.get("collector", inner))
    if exploration_policy is not None or plan.exploration_steps:
        kwargs["exploration_frames"] = plan.exploration_steps // plan.world_size
        kwargs["exploration_policy"] = exploration_policy
    if make is Collector:
        return _torchrl(env, policy, plan, device, **kwargs)
    rank_seed = derived_seed(seed, rank) if rank else seed
    kwargs |= {"seed": rank_seed, "device": device}
    if in_processes:
        kwargs = {"storing_device": device or "cpu", **kwargs}
        del kwargs["device"]
    if issubclass(kind, AsyncCollector):
        kwargs["policy_device"] = device
    if issubclass(kind, TensorCollector):
        env = _as_tensor_env(env, device)
    return make(env, policy, **step_counts(plan), **kwargs)


def _resolve(collector: str | Callable[..., BaseCollector]) -> Any:
    """Return the collector class for a name; return classes and functions unchanged.

    Raises:
        SettingError: if the name is unknown.
    """
    if isinstance(collector, str) and collector not in COLLECTORS:
        near = nearest_first(collector, [*COLLECTORS])
        raise SettingError("collector", collector, "is not a registered collector", near)
    return COLLECTORS[collector] if isinstance(collector, str) else collector


def step_counts(plan: StepPlan) -> dict[str, Any]:
    """Return the collector arguments that define one process's step counts."""
    total = plan.total_policy_steps if plan.is_exact else None
    prefill = plan.prefill_steps
    local = plan.local_prefill_steps * plan.world_size if prefill and plan.is_exact else prefill
    at_random = max(plan.random_steps, local if plan.prefill_random else 0)
    counts: dict[str, Any] = {
        "init_random_frames": at_random // plan.world_size,
        "prefill_frames": prefill // plan.world_size,
        "total_frames": -1 if total is None else total // plan.world_size,
    }
    episodes = ["min_episodes", "min_steps", "episode_length"]
    batch = episodes if plan.collects_episodes else ["frames_per_batch"]
    if prefill and plan.prefill_random and not plan.is_exact:  # the prefill length is unknown
        counts["prefill_random"] = True
    return counts | {name: getattr(plan, name) for name in batch}


def _as_tensor_env(env: Any, device: torch.device | str | None) -> Any:
    """Return an equivalent torch environment on ``device`` if there is one, else ``env``."""
    if not isinstance(env, VectorEnv):
        return env
    here = torch.device(device or "cpu").type
    if isinstance(env.backend, TensorBackend) and env.backend.env.device.type == here:
        return env
    if env.make_again is None or env.name not in TENSOR_ENVS:
        return env
    again = env.make_again(vectorization="tensor", device=device)
    again.normalizer = env.normalizer
    env.close(raise_if_closed=False)
    return again


def _torchrl(
    env: EnvBase,
    policy: Policy | None,
    plan: StepPlan,
    device: torch.device | str | None,
    **kwargs: Any,
) -> BaseCollector:
    """Create TorchRL's collector. It supports neither prefill nor exploration policies.

    The collector takes no seed, because its policy uses PyTorch's global RNG and its environments
    are already seeded.
    """
    counts = step_counts(plan)
    for field in ("prefill_frames", "exploration_frames"):
        for arguments in (counts, kwargs):
            if not arguments.get(field, 1):
                del arguments[field]
    kwargs.pop("exploration_policy", None)
    return Collector(
        env,
        policy,
        **counts,
        policy_device=device,
        trust_policy=True,
        **{
            "storing_device": device,
            "env_device": env.device or "cpu",
            "auto_register_policy_transforms": is_recurrent(policy),
            **kwargs,
        },
    )
