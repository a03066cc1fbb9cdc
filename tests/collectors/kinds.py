"""Every kind of collector, made for a case of the conformance suite."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import torch
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv

from kit.collectors import AsyncCollector, EpisodeCollector, TensorCollector, VectorCollector
from kit.collectors.rollout import as_vector_env
from kit.envs import make_env
from kit.testing import CARTPOLE, REPEATING, CollectorCase, counter_env, counter_policy
from kit.testing.counter import COUNTER

SAME_STEP = gym.vector.AutoresetMode.SAME_STEP


def amounts(case: CollectorCase) -> dict[str, Any]:
    """What a collector of steps is asked for."""
    return {
        "frames_per_batch": case.frames_per_batch,
        "total_frames": case.total_frames,
        "seed": case.seed,
        "fast_policy": case.fast,
    }


def vector(case: CollectorCase, env: Any = None, **changes: Any) -> VectorCollector:
    env = counter_env(case) if env is None else env
    return VectorCollector(env, counter_policy(env), **{**amounts(case), **changes})


def vector_workers(case: CollectorCase) -> VectorCollector:
    return vector(case, counter_env(case, "async", num_workers=2))


def vector_gymnasium(case: CollectorCase) -> VectorCollector:
    """A vector environment of Gymnasium that was made before."""
    copies = [lambda: gym.make(COUNTER)] * case.num_envs
    made = gym.vector.SyncVectorEnv(copies, autoreset_mode=SAME_STEP)
    return vector(case, make_env(made, seed=case.seed))


def vector_gymnasium_by_mask(case: CollectorCase) -> VectorCollector:
    copies = [lambda: gym.make(COUNTER)] * case.num_envs
    made = gym.vector.SyncVectorEnv(copies, autoreset_mode=gym.vector.AutoresetMode.DISABLED)
    return vector(case, make_env(made, seed=case.seed))


def vector_native(case: CollectorCase, **changes: Any) -> VectorCollector:
    """The environment's own vector environment."""
    return vector(case, counter_env(case, "native", **changes))


def vector_native_by_mask(case: CollectorCase) -> VectorCollector:
    return vector_native(case, autoreset_mode=gym.vector.AutoresetMode.DISABLED)


def torchrl_env(case: CollectorCase) -> Any:
    """Copies as TorchRL makes them, with a transform."""
    made = [lambda: GymEnv(COUNTER, categorical_action_encoding=True)] * case.num_envs
    return TransformedEnv(SerialEnv(case.num_envs, made), StepCounter())


def vector_torchrl(case: CollectorCase) -> VectorCollector:
    return vector(case, make_env(torchrl_env(case), seed=case.seed))


def vector_on_tensors(case: CollectorCase) -> VectorCollector:
    return vector(case, counter_env(case, "tensor"))


def tensor(case: CollectorCase, env: Any = None, **changes: Any) -> TensorCollector:
    env = counter_env(case, "tensor") if env is None else env
    return TensorCollector(env, counter_policy(env), **{**amounts(case), **changes})


def tensor_in_blocks(case: CollectorCase) -> TensorCollector:
    """Blocks that do not divide the batch."""
    return tensor(case, block=3)


def episodes(case: CollectorCase, env: Any = None, **changes: Any) -> EpisodeCollector:
    """Whole episodes of at least as many steps as a batch has."""
    env = counter_env(case) if env is None else env
    least = {} if "min_episodes" in changes else {"min_steps": case.frames_per_batch}
    settings = {"total_frames": case.total_frames, "seed": case.seed, "fast_policy": case.fast}
    return EpisodeCollector(env, counter_policy(env), **{**least, **settings, **changes})


def episodes_flat(case: CollectorCase) -> EpisodeCollector:
    return episodes(case, layout="flat")


def episodes_in_workers(case: CollectorCase) -> EpisodeCollector:
    return episodes(case, counter_env(case, "async", num_workers=2))


def episodes_native(case: CollectorCase) -> EpisodeCollector:
    return episodes(case, counter_env(case, "native"))


def episodes_that_stray(case: CollectorCase) -> EpisodeCollector:
    """Copies that cannot stand still."""
    return episodes(case, counter_env(case, "tensor"))


def asynchronous(case: CollectorCase, env: Any = None, **changes: Any) -> AsyncCollector:
    env = counter_env(case) if env is None else env
    return AsyncCollector(env, counter_policy(env), **{**amounts(case), **changes})


def vector_exact(case: CollectorCase) -> VectorCollector:
    """Held to the policy's rounding, too."""
    return vector(case, fast_policy="exact")


KINDS: dict[str, Callable[[CollectorCase], Any]] = {
    "vector, sync": vector,
    "vector, exact policy": vector_exact,
    "vector, async": vector_workers,
    "vector, Gymnasium's": vector_gymnasium,
    "vector, Gymnasium's, reset by mask": vector_gymnasium_by_mask,
    "vector, native": vector_native,
    "vector, native, reset by mask": vector_native_by_mask,
    "vector, TorchRL's": vector_torchrl,
    "vector, torch": vector_on_tensors,
    "tensor": tensor,
    "tensor, odd blocks": tensor_in_blocks,
    "episode": episodes,
    "episode, flat": episodes_flat,
    "episode, async": episodes_in_workers,
    "episode, native": episodes_native,
    "episode, torch": episodes_that_stray,
    "async": asynchronous,
}


# ---------------------------------------------------------------------- with actions repeated
REPEATING_KINDS: dict[str, Callable[[CollectorCase], Any]] = {
    "vector, sync": lambda case: vector(case, REPEATING.env(case)),
    "vector, torch": lambda case: vector(case, REPEATING.env(case, "tensor")),
    "tensor": lambda case: tensor(case, REPEATING.env(case, "tensor")),
    "episode": lambda case: episodes(case, REPEATING.env(case)),
    "episode, torch": lambda case: episodes(case, REPEATING.env(case, "tensor")),
}


# ---------------------------------------------------------------------- in CartPole
def vector_in_cartpole(vectorization: str, case: CollectorCase) -> VectorCollector:
    return vector(case, CARTPOLE.env(case, vectorization))


def tensor_in_cartpole(case: CollectorCase) -> TensorCollector:
    return tensor(case, CARTPOLE.env(case, "tensor"))


def episodes_in_cartpole(vectorization: str, case: CollectorCase) -> EpisodeCollector:
    return episodes(case, CARTPOLE.env(case, vectorization))


def asynchronous_on_envpool(case: CollectorCase) -> AsyncCollector:
    return asynchronous(case, CARTPOLE.env(case, "envpool"))


CARTPOLE_KINDS: dict[str, Callable[[CollectorCase], Any]] = {
    "vector, sync": functools.partial(vector_in_cartpole, "sync"),
    "vector, native": functools.partial(vector_in_cartpole, "native"),
    "vector, torch": functools.partial(vector_in_cartpole, "tensor"),
    "tensor": tensor_in_cartpole,
    "episode": functools.partial(episodes_in_cartpole, "sync"),
    "episode, native": functools.partial(episodes_in_cartpole, "native"),
}

ENVPOOL_KINDS: dict[str, Callable[[CollectorCase], Any]] = {
    "vector, EnvPool": functools.partial(vector_in_cartpole, "envpool"),
    "episode, EnvPool": functools.partial(episodes_in_cartpole, "envpool"),
}
"""In CartPole as well: EnvPool has its own environments alone, and does not give their state."""


# ---------------------------------------------------------------------- TorchRL's own
def torchrl_collector(case: CollectorCase, env: Any = None) -> Collector:
    """TorchRL's, which has no random numbers of its own."""
    torch.manual_seed(case.seed)
    env = counter_env(case) if env is None else env
    sizes = {"frames_per_batch": case.frames_per_batch, "total_frames": case.total_frames}
    return Collector(env, counter_policy(as_vector_env(env)), trust_policy=True, **sizes)


def torchrl_on_torchrl(case: CollectorCase) -> Collector:
    env = torchrl_env(case)
    env.set_seed(case.seed)
    return torchrl_collector(case, env)


def torchrl_on_tensors(case: CollectorCase) -> Collector:
    return torchrl_collector(case, counter_env(case, "tensor"))


TORCHRL_KINDS: dict[str, Callable[[CollectorCase], Any]] = {
    "TorchRL, the kit's environment": torchrl_collector,
    "TorchRL, the kit's environment in torch": torchrl_on_tensors,
    "TorchRL, TorchRL's environment": torchrl_on_torchrl,
}
