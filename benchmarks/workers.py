"""Environments in worker processes: the kit's against Gymnasium's, both stepped with arrays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from benchmarks.measure import RESULTS, interleaved, machine, median, ratio
from kit.envs import VectorEnv, make_env

STEPS = 1_000
"""vector steps of one figure."""


def kits(id: str, num_envs: int) -> VectorEnv:
    """The kit's backend, with a process for each environment as Gymnasium has."""
    return make_env(id, num_envs, vectorization="async", num_workers=num_envs)


def kits_by_cores(id: str, num_envs: int) -> VectorEnv:
    """The kit's backend as it is by default: a process for each core."""
    return make_env(id, num_envs, vectorization="async")


def gymnasiums(id: str, num_envs: int) -> VectorEnv:
    """Gymnasium's vector environment, through the kit's adapter."""
    makers = [lambda: gym.make(id)] * num_envs
    mode = AutoresetMode.SAME_STEP
    return make_env(AsyncVectorEnv(makers, shared_memory=True, autoreset_mode=mode))


BACKENDS = {
    "kit, a process per core": kits_by_cores,
    "kit, a process per env": kits,
    "AsyncVectorEnv": gymnasiums,
}


def measured(make: Callable[[str, int], VectorEnv], id: str, num_envs: int) -> Callable[[], float]:
    """A case: policy steps per second of wall time, in an environment that is made once."""
    env = make(id, num_envs)
    env.start()
    action = {leaf.key: env.full_action_spec.zero()[leaf.key].numpy() for leaf in env.action_leaves}
    result = env.new_step()

    def case() -> float:
        begin = time.perf_counter()
        for _ in range(STEPS):
            result.terminated[...] = result.truncated[...] = False
            env.step_arrays(action, result)
        return num_envs * STEPS / (time.perf_counter() - begin)

    return case


def main() -> None:
    """Measure and write the table."""
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    lines = [
        "# Worker processes",
        "",
        "Policy steps per second of wall time, median of 3 interleaved rounds; in brackets the",
        "median of the ratios to Gymnasium's `AsyncVectorEnv(shared_memory=True, SAME_STEP)`.",
        "",
        f"{machine(1)}, load {os.getloadavg()[0]:.0f}",
        "",
        "| | " + " | ".join(BACKENDS) + " |",
        "|---|" + "--:|" * len(BACKENDS),
    ]
    for id in ("CartPole-v1", "HalfCheetah-v5"):
        for num_envs in (2, 4, 8):
            cases = {name: measured(make, id, num_envs) for name, make in BACKENDS.items()}
            figures = interleaved(cases)
            base = figures["AsyncVectorEnv"]
            row = [f"{median(f):,.0f} ({ratio(f, base):.2f})" for f in figures.values()]
            lines.append(f"| {id}, {num_envs} envs | " + " | ".join(row) + " |")
            print(lines[-1], flush=True)
    (RESULTS / "workers.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
