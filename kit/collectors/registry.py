"""Collectors by name, with what a plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchrl.collectors import BaseCollector, Collector
from torchrl.envs import EnvBase

from kit.collectors.asynchronous import AsyncCollector
from kit.collectors.episode import EpisodeCollector
from kit.collectors.policy import Policy, is_recurrent
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
    "torchrl": Collector,
}
"""Classes of collectors by the name that a recipe's settings give; add your own."""


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
    """Make the collector of one process of a plan.

    Args:
        collector: name in :data:`COLLECTORS`, or a class (or function) called as these are.
        env: training environments of this process. ``tensor`` makes an equal one written in torch
            of it, if it is none; ``async`` makes it again in its process.
        policy: what is trained; ``None`` acts at random.
        plan: says how many policy steps, and which of them have random actions.
        seed: of policy and random actions; each process draws its own from it.
        rank: number of this process, from 0.
        device: where the policy runs and batches are delivered.
        exploration_policy: acts during the plan's ``exploration_steps``.
        **kwargs: for the collector: ``max_staleness``, ``layout``, ``reuse``, ...

    Raises:
        SettingError: if there is no such collector.
        TypeError: if it does not take the arguments, or those that the plan needs.
    """
    make = _named(collector)
    kind = make if isinstance(make, type) else object
    is_async = issubclass(kind, AsyncCollector)
    if is_async:
        inner = EpisodeCollector if plan.collects_episodes else VectorCollector
        kwargs["collector"] = _named(kwargs.get("collector", inner))
    if exploration_policy is not None or plan.exploration_steps:
        kwargs["exploration_frames"] = plan.exploration_steps // plan.world_size
        kwargs["exploration_policy"] = exploration_policy
    if make is Collector:
        return _torchrl(env, policy, plan, device, **kwargs)
    own_seed = derived_seed(seed, rank) if rank else seed
    kwargs |= {"seed": own_seed, "device": device}
    if is_async:
        kwargs = {"storing_device": device or "cpu", **kwargs, "policy_device": device}
        del kwargs["device"]
    if issubclass(kind, TensorCollector):
        env = _written_in_torch(env, device)
    return make(env, policy, **_amounts(plan), **kwargs)


def _named(collector: str | Callable[..., BaseCollector]) -> Any:
    """A collector's class by its name.

    Raises:
        SettingError: if there is none.
    """
    if isinstance(collector, str) and collector not in COLLECTORS:
        near = nearest_first(collector, [*COLLECTORS])
        raise SettingError("collector", collector, "is no collector", near)
    return COLLECTORS[collector] if isinstance(collector, str) else collector


def _amounts(plan: StepPlan) -> dict[str, Any]:
    """Return how much one process collects."""
    total = plan.total_policy_steps if plan.is_exact else None
    prefill = plan.prefill_steps
    local = plan.local_prefill_steps * plan.world_size if prefill and plan.is_exact else prefill
    at_random = max(plan.random_steps, local if plan.prefill_random else 0)
    amounts: dict[str, Any] = {
        "init_random_frames": at_random // plan.world_size,
        "prefill_frames": prefill // plan.world_size,
        "total_frames": -1 if total is None else total // plan.world_size,
    }
    episodes = ["min_episodes", "min_steps", "episode_length"]
    batch = episodes if plan.collects_episodes else ["frames_per_batch"]
    if prefill and plan.prefill_random and not plan.is_exact:  # its end is not known beforehand
        amounts["prefill_random"] = True
    return amounts | {name: getattr(plan, name) for name in batch}


def _written_in_torch(env: Any, device: torch.device | str | None) -> Any:
    """Return ``env``, or its like written in torch, on ``device``; normalisation is shared."""
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
    """Make TorchRL's collector, which has batches of one size and random ones at the beginning.

    There is no seed: its policies use PyTorch's random numbers, environments have their own.
    """
    amounts = _amounts(plan)
    for field in ("prefill_frames", "exploration_frames"):
        for given in (amounts, kwargs):
            if not given.get(field, 1):
                del given[field]
    kwargs.pop("exploration_policy", None)
    return Collector(
        env,
        policy,
        **amounts,
        policy_device=device,
        trust_policy=True,
        **{
            "storing_device": device,
            "env_device": env.device or "cpu",
            "auto_register_policy_transforms": is_recurrent(policy),
            **kwargs,
        },
    )
