"""Policy steps per second of the torch environments, alone and with a 64x64 policy.

    python -m benchmarks.tensor_envs [--threads 1 2] [--copies 64 1024 4096] [--keep-memory]

Every number is the median of interleaved repeats: each repeat measures every row once, so that
other load on the machine falls on all of them. "traced" runs a block of steps as one flat graph
(``torch.jit.trace`` of ``TensorEnv.advance``, and of the policy), without Python between the
operations. With the policy, every step is also written into a batch: observations, actions,
rewards and ends.

The floors are what no environment can beat: the policy's three matrix products alone, and the
policy alone. "sigmoid" policies compute tanh(x) as 2 sigmoid(2 x) - 1, which PyTorch's kernels do
faster on a CPU than tanh, and equal up to rounding.

``--keep-memory`` asks glibc not to give freed memory back to the system. By default a block of a
megabyte, such as the hidden values of 4,096 copies, may be given back and faulted in again page by
page in every step.
"""

from __future__ import annotations

import argparse
import ctypes
import time
import warnings
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from kit.envs.tensor import TENSOR_ENVS, EpisodeState, TensorEnv, make_tensor_env

BLOCK = 16
"""policy steps in one call of a traced block."""
SECONDS = 0.3
"""how long one repeat of one row runs, at least."""

Rows = dict[str, tuple[Callable[[], object], int]]
"""What to call, and how many policy steps of every copy one call makes."""


class SigmoidTanh(nn.Module):
    """The hyperbolic tangent by the sigmoid."""

    def forward(self, value: Tensor) -> Tensor:
        """Return tanh(value), up to rounding."""
        return (value + value).sigmoid_().mul_(2).sub_(1)


def environment_rows(env: TensorEnv) -> Rows:
    """The environment alone, always with the same actions."""
    action = env.rand_action()["action"]

    def block(*state: Tensor) -> tuple[Tensor, ...]:
        *episodes, uniform = state
        now, kept = EpisodeState(*episodes), []
        for time_step in range(BLOCK):
            now, step = env.advance(now, action, uniform[time_step])
            kept.append(step.reward)
        return (*now, torch.stack(kept))

    def draw() -> tuple[Tensor, ...]:
        return (draw_block(env, env.uniform_size),)

    eager = (lambda: env.step_tensors(action)), 1
    return {"environment": eager, "environment, traced": (traced(env, block, draw), BLOCK)}


def policy_rows(env: TensorEnv, activation: type[nn.Module]) -> Rows:
    """A 64x64 policy for two actions, alone and with the environment."""
    name = "tanh" if activation is nn.Tanh else "sigmoid"
    layers = [nn.Linear(4, 64), activation(), nn.Linear(64, 64), activation(), nn.Linear(64, 2)]
    policy = nn.Sequential(*layers).requires_grad_(False).to(env.device)
    batch = make_batch(env)

    def choose(observation: Tensor, chance: Tensor) -> Tensor:
        """Sample one of two actions: the second one with the sigmoid of the logits' difference."""
        logits = policy(observation)
        return ((logits[:, 1] - logits[:, 0]).sigmoid() > chance).long()

    def keep(time_step: int, *values: Tensor) -> None:
        for column, value in zip(batch, values):
            column[time_step].copy_(value)

    def step_by_step() -> None:
        observation = env.observe(env.physics.clone())
        for time_step in range(BLOCK):
            action = choose(observation, draw_chance(env))
            step = env.step_tensors(action)
            keep(time_step, observation, action, *step[1:5])
            observation = step.observation

    def block(*state: Tensor) -> tuple[Tensor, ...]:
        *episodes, uniform, chance = state
        now = EpisodeState(*episodes)
        observation = env.observe(now.physics)
        for time_step in range(BLOCK):
            action = choose(observation, chance[time_step, 0])
            now, step = env.advance(now, action, uniform[time_step])
            keep(time_step, observation, action, *step[1:5])
            observation = step.observation
        return tuple(now)

    def draw() -> tuple[Tensor, ...]:
        return draw_block(env, env.uniform_size), draw_block(env, 1)

    observation = env.reset_tensors()
    return {
        f"{name} policy": ((lambda: choose(observation, draw_chance(env))), 1),
        f"{name} policy and environment": (step_by_step, BLOCK),
        f"{name} policy and environment, traced": (traced(env, block, draw), BLOCK),
    }


def floor_rows(env: TensorEnv) -> Rows:
    """The policy's three matrix products."""
    layers = [nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 2)]
    layers = [layer.requires_grad_(False).to(env.device) for layer in layers]
    inputs = [torch.randn(env.num_envs, size, device=env.device) for size in (4, 64, 64)]

    def products() -> None:
        for layer, value in zip(layers, inputs):
            layer(value)

    return {"three matrix products": (products, 1)}


def draw_block(env: TensorEnv, size: int) -> Tensor:
    """Uniform random numbers for a block of steps, ``[BLOCK, size, num_envs]``."""
    shape = (BLOCK, size, env.num_envs)
    return torch.rand(shape, generator=env.generator, device=env.device)


def draw_chance(env: TensorEnv) -> Tensor:
    """Uniform random numbers, ``[num_envs]``."""
    return torch.rand(env.num_envs, generator=env.generator, device=env.device)


def make_batch(env: TensorEnv) -> list[Tensor]:
    """Memory for a block of steps; an observation's entries lie as the environment's do."""
    shape, device = (BLOCK, env.num_envs), env.device
    observations = [torch.empty(BLOCK, 4, env.num_envs, device=device).mT for _ in range(2)]
    action = torch.empty(shape, dtype=torch.int64, device=device)
    ends = [torch.empty(shape, dtype=torch.bool, device=device) for _ in range(2)]
    return [observations[0], action, observations[1], torch.empty(shape, device=device), *ends]


def traced(
    env: TensorEnv,
    block: Callable[..., tuple[Tensor, ...]],
    draw: Callable[[], tuple[Tensor, ...]],
) -> Callable[[], None]:
    """Make a block of steps one flat graph that goes on where the environment stands."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch.jit.trace(block, (*env.episodes, *draw()), check_trace=False)

    def run() -> None:
        with torch.jit.optimized_execution(False):
            after = graph(*env.episodes, *draw())
        for buffer, value in zip(env.episodes, after):
            buffer.copy_(value)

    return run


def measure(rows: Rows, num_envs: int, repeats: int, device: torch.device) -> dict[str, float]:
    """Return the median policy steps per second of each row."""
    rates: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(repeats):
        for name, (call, steps) in rows.items():
            call()
            calls, began = 0, start(device)
            while time.perf_counter() - began < SECONDS:
                call()
                calls += 1
            seconds = start(device) - began
            rates[name].append(calls * steps * num_envs / seconds)
    return {name: median(values) for name, values in rates.items()}


def start(device: torch.device) -> float:
    """Return the time when the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def keep_memory() -> None:
    """Have glibc serve large blocks from its heap, and keep the heap."""
    mmap_threshold, trim_threshold, gigabyte = -3, -1, 2**30  # names and numbers of mallopt(3)
    libc = ctypes.CDLL(None)
    for option in (mmap_threshold, trim_threshold):
        if not libc.mallopt(option, gigabyte):
            warnings.warn(f"mallopt refused option {option}", stacklevel=2)


def rows_of(id: str, num_envs: int, device: torch.device) -> Rows:
    """Everything that is measured of one environment."""
    env = make_tensor_env(id, num_envs, device=device, seed=0)
    rows = environment_rows(env)
    if id == "CartPole-v1":
        rows |= floor_rows(env) | policy_rows(env, nn.Tanh) | policy_rows(env, SigmoidTanh)
    return {f"{id}: {name}": row for name, row in rows.items()}


@torch.no_grad()
def main() -> None:
    """Measure, and print a Markdown table for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--copies", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--ids", nargs="+", default=[i for i in TENSOR_ENVS if i != "CartPole-v0"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--keep-memory", action="store_true")
    given = parser.parse_args()
    if given.keep_memory:
        keep_memory()
    for threads in sorted(set(given.threads)):
        torch.set_num_threads(threads)
        table: dict[str, list[float]] = {}
        for copies in given.copies:
            rows: Rows = {}
            for id in given.ids:
                rows |= rows_of(id, copies, given.device)
            for name, rate in measure(rows, copies, given.repeats, given.device).items():
                table.setdefault(name, []).append(rate)
        print(f"\n{threads} thread(s), {given.device}, thousand policy steps per second\n")
        print("| | " + " | ".join(f"{copies} copies" for copies in given.copies) + " |")
        print("|---|" + "---:|" * len(given.copies))
        for name, rates in table.items():
            print(f"| {name} | " + " | ".join(f"{rate / 1e3:,.0f}" for rate in rates) + " |")


if __name__ == "__main__":
    main()
