"""Collection speed of environments in torch, in policy steps per second.

Run with ``python -m benchmarks.tensor_envs [--threads 1 2] [--num-envs 64 1024 4096]``, or with
``--device cuda``, where blocks of steps are CUDA graphs.

Each value is the median of interleaved rounds.

- kit's ``TensorCollector`` samples actions of a policy with two hidden layers of 64 units. It
  stores observations, actions, log-probabilities, rewards, end flags and true next observations.
- "sigmoid_tanh" computes tanh from the sigmoid.
- "Upper bound" runs only the network, or only its three matrix products.
- JAX uses the same environment, network and batch in one compiled scan per batch. JAX chooses its
  number of threads.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measure import interleaved, machine, markdown_table, median, ratio, write_results
from kit.modules.networks import SigmoidTanh

STEPS = 64
"""policy steps of each env in a batch."""
SECONDS = 0.5
"""how long one case runs in a round, at least."""
ACTIVATIONS = {"tanh": torch.tanh, "sigmoid_tanh": SigmoidTanh(), "relu": torch.relu}
JAX_ACTIVATIONS = ("tanh", "relu")
OTHERS = ("Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1")

Case = Callable[[], float]


def rate_of(call: Callable[[], Any], policy_steps: int, device: torch.device) -> Case:
    """Return a case: call for a while, and return policy steps per second."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def run() -> float:
        calls, began = 0, now()
        while now() - began < SECONDS:
            call()
            calls += 1
        return calls * policy_steps / (now() - began)

    for _ in range(3):  # the second call traces
        call()
    return run


def collector(id: str, num_envs: int, device: torch.device, activation: str | None) -> Case:
    """The kit's collector; without a policy actions are drawn at random."""
    from kit.collectors import TensorCollector
    from kit.envs import make_env
    from kit.modules import make_actor

    env = make_env(id, num_envs, vectorization="tensor", device=device, seed=0)
    actor = None
    if activation is not None:
        actor = make_actor(env, hidden_sizes=(64, 64), activation=activation).to(device)
    batches = iter(TensorCollector(env, actor, steps_per_env=STEPS, seed=0))
    return rate_of(lambda: next(batches), STEPS * num_envs, device)


def network(num_envs: int, device: torch.device, activation: str | None) -> Case:
    """The network alone, or its matrix products alone."""
    sizes = ((4, 64), (64, 64), (64, 2))
    layers = [nn.Linear(*size).requires_grad_(False).to(device) for size in sizes]
    inputs = [torch.randn(num_envs, size, device=device) for size, _ in sizes]
    between = ACTIVATIONS[activation] if activation else None

    def products() -> None:
        for layer, value in zip(layers, inputs):
            layer(value)

    def whole() -> None:
        assert between is not None
        layers[2](between(layers[1](between(layers[0](inputs[0])))))

    return rate_of(whole if between else products, num_envs, device)


def jax_scan(num_envs: int, device: torch.device, activation: str) -> Case:
    """The same in JAX."""
    from benchmarks.jax_cartpole import JaxCartPole

    platform = "gpu" if device.type == "cuda" else "cpu"
    return rate_of(JaxCartPole(num_envs, STEPS, activation, platform), STEPS * num_envs, device)


def cases_of(num_envs: int, device: torch.device) -> dict[str, Case]:
    """Everything that is measured with one number of envs."""
    cases = {"upper bound: three matrix products": network(num_envs, device, None)}
    for activation in ACTIVATIONS:
        cases[f"upper bound: network, {activation}"] = network(num_envs, device, activation)
    cases["CartPole-v1, random actions"] = collector("CartPole-v1", num_envs, device, None)
    for activation in ACTIVATIONS:
        cases[f"CartPole-v1, {activation}"] = collector("CartPole-v1", num_envs, device, activation)
        if importlib.util.find_spec("jax") and activation in JAX_ACTIVATIONS:
            cases[f"CartPole-v1 in JAX, {activation}"] = jax_scan(num_envs, device, activation)
    for id in OTHERS:
        cases[f"{id}, tanh"] = collector(id, num_envs, device, "tanh")
    return cases


def table(num_envs: Sequence[int], device: torch.device, rounds: int) -> str:
    """Measure with the present number of threads and return a table."""
    columns: list[dict[str, list[float]]] = []
    for number in num_envs:
        columns.append(interleaved(cases_of(number, device), rounds))
    rows = [
        [name, *(f"{median(column[name]) / 1e3:,.0f}" for column in columns)] for name in columns[0]
    ]
    for activation in ACTIVATIONS:
        ours = f"CartPole-v1, {activation}"
        theirs = f"CartPole-v1 in JAX, {activation.removeprefix('sigmoid_')}"
        pairs = {"to network alone": f"upper bound: network, {activation}", "to JAX": theirs}
        for what, other in pairs.items():
            if other in columns[0]:
                ratios = (f"{ratio(column[ours], column[other]):.2f}" for column in columns)
                rows.append([f"*CartPole-v1, {activation}: ratio {what}*", *ratios])
    return markdown_table(["", *(f"{number:,} envs" for number in num_envs)], rows)


@torch.no_grad()
def main(arguments: Sequence[str] = ()) -> Path:
    """Measure, write a table for each number of threads, and return its path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    given = parser.parse_args(arguments)
    threads = sorted(set(given.threads))
    parts = [f"Values are thousands of policy steps per second. {machine(threads[-1], ['jax'])}."]
    if given.device.type == "cuda":
        parts.append(f"Device: {torch.cuda.get_device_name(given.device)}.")
    for number in threads:
        torch.set_num_threads(number)
        parts.append(f"With {number} PyTorch threads, {given.device.type}:")
        parts.append(table(given.num_envs, given.device, given.rounds))
    name = "tensor_envs" + ("_cuda" if given.device.type == "cuda" else "")
    return write_results(name, "Environments in torch", "\n\n".join(parts))


if __name__ == "__main__":
    import sys

    print(main(sys.argv[1:]).read_text())
