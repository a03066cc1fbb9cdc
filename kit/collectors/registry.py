"""Collectors by name, with what a plan says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torchrl.collectors import BaseCollector, Collector
from torchrl.envs import EnvBase

from kit.collectors.asynchronous import AsyncCollector
from kit.collectors.base import KitCollector
from kit.collectors.policy import Policy, is_recurrent
from kit.collectors.rollout import EpisodeCollector, VectorCollector
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
        SettingError: if there is no such collector, or it cannot collect what the plan says.
    """
    make = _named(collector)
    if make is AsyncCollector:
        inner = EpisodeCollector if plan.collects_episodes else VectorCollector
        inner = kwargs["collector"] = _named(kwargs.get("collector", inner))
        _check_fits(inner, plan)
    _check_fits(make, plan)
    _check_arguments(make, kwargs)
    if exploration_policy is not None or plan.exploration_steps:
        kwargs["exploration_frames"] = plan.exploration_steps // plan.world_size
        kwargs["exploration_policy"] = exploration_policy
    if make is Collector:
        return _torchrl(env, policy, plan, device, **kwargs)
    kwargs |= {"seed": process_seed(seed, rank), "device": device}
    if make is AsyncCollector:
        kwargs = {"storing_device": device or "cpu", **kwargs, "policy_device": device}
        del kwargs["device"]
        return make(env, policy, **_amounts(plan), **kwargs)
    if make is TensorCollector:
        env = _written_in_torch(env, device)
    written_in: str = getattr(getattr(make, "__init__", None), "__module__", None) or ""
    if isinstance(make, type) and written_in.startswith("torchrl."):
        works = "give a function (env, policy, **arguments) that makes one"
        why = "takes other arguments than the kit's"
        raise SettingError("collector", make.__name__, why, works)
    kwargs |= _amounts(plan)
    _check_callable(make, kwargs)
    return make(env, policy, **kwargs)


def _check_callable(make: Callable[..., BaseCollector], arguments: Mapping[str, Any]) -> None:
    """Raise SettingError if a class or function cannot be called with these arguments."""
    try:
        inspect.signature(make).bind(None, None, **arguments)
    except TypeError as error:
        why = f"cannot be called with (env, policy, {', '.join(arguments)}): {error}"
        works = "name the arguments that it needs, and take the others as **others"
        raise SettingError("collector", getattr(make, "__name__", make), why, works) from None


def _check_arguments(make: Callable[..., BaseCollector], given: Mapping[str, Any]) -> None:
    """Refuse arguments that a collector does not have, or that follow from other settings.

    Raises:
        SettingError: at the first one; the nearest spelling comes first.
    """
    name = getattr(make, "__name__", type(make).__name__)
    known, takes_any = _arguments(make)
    if make is AsyncCollector:  # which passes on what it does not know
        others, takes_any = _arguments(given["collector"])
        known |= others
    for argument, value in given.items():
        if argument in _OTHER_SETTINGS:
            why = f"of {name} follows from other settings"
            raise SettingError(argument, value, why, "leave it out")
        if argument not in known and (not takes_any or make in COLLECTORS.values()):
            near = nearest_first(argument, sorted(known - _OTHER_SETTINGS))
            raise SettingError(argument, value, f"is no argument of {name}", near[:3])


def _arguments(make: Callable[..., BaseCollector]) -> tuple[set[str], bool]:
    """Return the names of a function's arguments, and whether it takes any others.

    A class of the kit that takes any others passes them on to the classes that it derives from.
    """
    bases = inspect.getmro(make) if isinstance(make, type) else ()
    makers: list[Callable[..., Any]] = [make]
    makers += [base for base in bases if issubclass(base, KitCollector)]
    parameters = [p for one in makers for p in inspect.signature(one).parameters.values()]
    others = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    known = {p.name for p in parameters if p.kind not in others}
    return known, any(p.kind is p.VAR_KEYWORD for p in parameters)


_OTHER_SETTINGS = {
    "create_env_fn", "policy", "frames_per_batch", "steps_per_env", "total_frames", "seed",
    "init_random_frames", "prefill_frames", "prefill_random", "exploration_frames", "min_episodes",
    "min_steps", "episode_length", "device", "policy_device",
}  # fmt: skip
"""Arguments that plan, environment, seed and device of a recipe decide."""


def process_seed(seed: int, rank: int) -> int:
    """Return the seed of a process: that of the run for the first one."""
    return derived_seed(seed, rank) if rank else seed


def _named(collector: str | Callable[..., BaseCollector]) -> Any:
    """A collector's class by its name.

    Raises:
        SettingError: if there is none.
    """
    if isinstance(collector, str) and collector not in COLLECTORS:
        near = nearest_first(collector, [*COLLECTORS])
        raise SettingError("collector", collector, "is no collector", near)
    return COLLECTORS[collector] if isinstance(collector, str) else collector


def _check_fits(make: Any, plan: StepPlan) -> None:
    """Refuse a collector of steps for a plan of whole episodes, and the other way round."""
    whole = isinstance(make, type) and issubclass(make, EpisodeCollector)
    if plan.collects_episodes and make in (VectorCollector, TensorCollector, Collector):
        why = "collects steps, where the plan has whole episodes"
        raise SettingError("collector", make.__name__, why, ["episode", "async"])
    if whole and not plan.collects_episodes:
        why = f"collects whole episodes, where the plan has steps_per_env={plan.steps_per_env}"
        least = f"min_steps={plan.frames_per_batch}"
        works = f"give steps_per_env=null with {least} or with min_episodes"
        raise SettingError("collector", "episode", why, works)


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
    """Return ``env``, or its like written in torch, on ``device``; normalisation is shared.

    Raises:
        SettingError: if there is none.
    """
    if not isinstance(env, VectorEnv):
        return env
    here = torch.device(device or "cpu").type
    if isinstance(env.backend, TensorBackend) and env.backend.env.device.type == here:
        return env
    if env.make_again is None or env.name not in TENSOR_ENVS:
        why = f"needs an environment written in torch, which {env.name} is not"
        works = f"use one of {', '.join(TENSOR_ENVS)}, or collector='vector'"
        raise SettingError("collector", "tensor", why, works)
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
        if kwargs.pop(field, 0) or amounts.pop(field, 0):
            works = "use collector='vector', or leave it out of the plan"
            raise SettingError("collector", "torchrl", f"knows no {field}", works)
    at_random, size = amounts["init_random_frames"], amounts["frames_per_batch"]
    if at_random % size:
        why = f"is not a whole number of TorchRL's batches of {size} policy steps"
        near = [at_random // size * size, -(-at_random // size) * size]
        raise SettingError("random_steps", at_random, why, near, "or use collector='vector'")
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
