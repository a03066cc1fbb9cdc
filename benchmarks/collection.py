"""Collection speed of kit, other libraries and hand-written loops in policy steps per second.

    python -m benchmarks.collection [--rounds 11]

All cases of a column run in turn in one process, round by round, in batches of 128 policy steps per
env. Each value is the median over rounds. Each ratio is the median of the ratios per round. All
processes use one PyTorch thread.

Stored data:

- kit, TorchRL and the hand-written loops store observation, action, log-probability, reward,
  terminated, truncated and the true next observation.
- Stable-Baselines3 stores no next observation and also evaluates its value network.
- tianshou stores no log-probability.

Rows:

- "kit, sync" evaluates the small policy in NumPy. "Exact policy" evaluates it in PyTorch.
- The TorchRL rows use a policy with PyTorch and TorchRL distributions. "kit, sync, TorchRL's
  policy" uses the same policy object in kit's collector.
- "Environment alone" steps one env after another with pre-sampled actions and stores nothing.
- "Environment alone, in kit's workers" uses the same two worker processes as "kit, async",
  including messages. Compare rows with workers to this row.
- "Environment and bare network" adds three ``addmm`` and two ``tanh`` to each step of "environment
  alone". It is an upper bound for any loop that calls a PyTorch network in every step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks import collection_rivals as rivals
from benchmarks.collection_rivals import STEPS, Case
from benchmarks.measure import interleaved, machine, markdown_table, median, ratio, write_results

THREADS = 1
PROCESSES = 2
"""of everything that steps environments in processes."""

CARTPOLE, CHEETAH = "CartPole-v1", "HalfCheetah-v5"
COLUMNS = [(CARTPOLE, 1), (CARTPOLE, 8), (CARTPOLE, 64), (CHEETAH, 1), (CHEETAH, 4)]

Column = tuple[str, int]
Figures = dict[str, list[float]]


def kit(
    id: str, num_envs: int, vectorization: str = "sync", theirs: bool = False, exact: bool = False
) -> Case:
    """Return the kit's ``VectorCollector`` as a case.

    Args:
        id: of the environment.
        num_envs: number of envs.
        vectorization: how the envs are stepped.
        theirs: whether the policy is that of TorchRL's rows.
        exact: whether PyTorch has to make the policy's operations.
    """
    from kit.collectors import VectorCollector
    from kit.envs import make_env
    from kit.modules import make_actor

    workers = min(PROCESSES, num_envs) if vectorization == "async" else None
    env = make_env(id, num_envs, vectorization=vectorization, num_workers=workers)
    policy = rivals.torchrl_policy(env) if theirs else make_actor(env, (64, 64), "tanh")
    fast = "exact" if exact else "auto"
    collector = VectorCollector(env, policy, steps_per_env=STEPS, fast_policy=fast)
    return Case(lambda: collector.collect().numel(), collector.shutdown)


def workers_alone(id: str, num_envs: int) -> Case:
    """The kit's worker processes, with actions drawn before; nothing is kept."""
    from kit.envs import make_env

    env = make_env(id, num_envs, vectorization="async", num_workers=min(PROCESSES, num_envs))
    drawn = np.asarray(rivals.random_actions(env.backend.action_space, STEPS * num_envs))
    drawn = drawn.reshape(STEPS, num_envs, *drawn.shape[1:])
    env.start()
    result = env.new_step()

    def collect() -> int:
        for actions in drawn:
            env.step_arrays({"action": actions}, result)
        return STEPS * num_envs

    return Case(collect, env.close)


Maker = Callable[[str, int], Case]
KIT: dict[str, Maker] = {
    "kit, sync": kit,
    "kit, sync, exact policy": functools.partial(kit, exact=True),
    "kit, async": functools.partial(kit, vectorization="async"),
    "kit, native": functools.partial(kit, vectorization="native"),
    "kit, sync, TorchRL's policy": functools.partial(kit, theirs=True),
}
LOOPS: dict[str, Maker] = {
    "hand-written loop over envs": rivals.loop_of_envs,
    "hand-written loop over SyncVectorEnv": rivals.loop_of_vector,
}
NATIVE_LOOP: dict[str, Maker] = {
    "hand-written loop over the native vector environment": functools.partial(
        rivals.loop_of_vector, mode="vector_entry_point"
    )
}
TORCHRL: dict[str, Maker] = {
    "TorchRL, SerialEnv": rivals.torchrl,
    "TorchRL, ParallelEnv": lambda id, n: rivals.torchrl(id, n, processes=min(PROCESSES, n)),
}
LIBRARIES: dict[str, Maker] = {
    "Stable-Baselines3": rivals.stable_baselines3,
    "tianshou": rivals.tianshou,
}
ALONE: dict[str, Maker] = {
    "environment alone": rivals.environment_alone,
    "environment alone, in kit's workers": workers_alone,
    "environment and bare network": rivals.environment_and_network,
}
ROWS = {**KIT, **LOOPS, **NATIVE_LOOP, **TORCHRL, **LIBRARIES, **ALONE}


@dataclass(frozen=True)
class Target:
    """A ratio to reach: the best row of ``ours`` over the best row of ``theirs``."""

    id: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    at_least: dict[int, float]
    """by number of envs."""

    def lines(self, columns: dict[Column, Figures]) -> Iterator[list[str]]:
        """Yield a line of the table for each number of envs."""
        for num_envs, least in self.at_least.items():
            figures = columns[self.id, num_envs]
            ours, theirs = _best(figures, self.ours), _best(figures, self.theirs)
            line = [f"{self.id}, {num_envs}: {ours or self.ours[0]} / {theirs or self.theirs[0]}"]
            if ours is None or theirs is None:
                yield [*line, f"{least:g}", "", "not measured"]
                continue
            reached = ratio(figures[ours], figures[theirs])
            yield [*line, f"{least:g}", f"{reached:.2f}", "yes" if reached >= least else "**no**"]


def _best(figures: Figures, names: tuple[str, ...]) -> str | None:
    found = [name for name in names if figures.get(name)]
    return max(found, key=lambda name: median(figures[name])) if found else None


IN_PROCESS = ("kit, sync",)
TARGETS = [
    Target(CARTPOLE, IN_PROCESS, tuple(TORCHRL), {1: 6, 8: 12, 64: 20}),
    Target(CARTPOLE, ("kit, native",), tuple(TORCHRL), {64: 20}),
    Target(CARTPOLE, IN_PROCESS, ("Stable-Baselines3",), {1: 1, 8: 1, 64: 1}),
    Target(CARTPOLE, IN_PROCESS, ("tianshou",), {1: 1, 8: 1, 64: 1}),
    Target(CARTPOLE, IN_PROCESS, tuple(LOOPS), {1: 0.95, 8: 0.95, 64: 0.95}),
    Target(CARTPOLE, ("kit, native",), tuple(NATIVE_LOOP), {1: 0.95, 8: 0.95, 64: 0.95}),
    Target(CHEETAH, IN_PROCESS, ("environment alone",), {1: 0.6, 4: 0.75}),
    Target(CHEETAH, ("kit, async",), ("environment alone, in kit's workers",), {4: 0.75}),
    Target(CHEETAH, IN_PROCESS, ("environment and bare network",), {1: 0.6, 4: 0.75}),
    Target(CHEETAH, IN_PROCESS, tuple(LOOPS), {1: 0.95, 4: 0.95}),
]


def measure(id: str, num_envs: int, rounds: int) -> Figures:
    """Return the figures of every row that is possible, by its name."""
    with contextlib.ExitStack() as stack:
        cases = {}
        for name, make in {**ALONE, **ROWS}.items():  # what is compared most closely comes in turn
            if id == CHEETAH and "native" in name:  # it has no vector environment of its own
                continue
            with contextlib.suppress(ImportError):  # a rival that is not installed
                cases[name] = make(id, num_envs)
                stack.callback(cases[name].close)
        return interleaved(cases, rounds)


def rates(columns: dict[Column, Figures]) -> str:
    """Return the table of policy steps per second."""
    rows = []
    for name in ROWS:
        figures = [columns[column].get(name) for column in COLUMNS]
        if any(figures):
            rows.append([name, *(f"{median(found):,.0f}" if found else "" for found in figures)])
        else:
            rows.append([name, "not installed", *[""] * (len(COLUMNS) - 1)])
    return markdown_table(["", *(f"{id}, {n}" for id, n in COLUMNS)], rows)


def main(rounds: int = 11) -> Path:
    """Measure, write the table and return its path."""
    threads = torch.get_num_threads()
    os.environ["OMP_NUM_THREADS"] = str(THREADS)  # of processes that begin later
    torch.set_num_threads(THREADS)
    try:
        columns = {column: measure(*column, rounds) for column in COLUMNS}
    finally:
        torch.set_num_threads(threads)
    lines = [line for target in TARGETS for line in target.lines(columns)]
    explained = __doc__.split("\n\n", 2)[2]
    text = (
        f"{machine(THREADS, ['stable_baselines3', 'tianshou', 'mujoco'])}; {rounds} rounds.\n\n"
        f"{rates(columns)}\n\n{explained}\n## Targets\n\n"
        f"{markdown_table(['envs: compared rows', 'at least', 'ratio', 'reached'], lines)}"
    )
    return write_results("collection", "Collection: policy steps per second", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    print(main(parser.parse_args().rounds).read_text())
