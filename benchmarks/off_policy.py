"""What one policy step costs, what SAC does besides its gradient steps, and drawing by priority.

    python -m benchmarks.off_policy [--rounds 5]

One step: Pendulum-v1, one environment, batches of one policy step, as SAC, TD3 and DQN collect
them. The environment alone is stepped with actions drawn before, and nothing is kept. The policy is
the recipe's actor (two hidden layers of 64).

SAC: ``recipes.sac`` (one environment, one gradient step of 256 transitions for each policy step) in
its learning phase, with layers of its default size and with those of the paper (Haarnoja et al.
2018), which are also Stable-Baselines3's default. The gradient step includes looking for changes in
what it depends on. "Trainer" is what is left of an iteration: counting, cadence, hooks, rows.

By priority: places of 256 of 1,000,000 transitions with their weights, and these transitions' new
priorities, each repeated alone and both in turns, as in a run. With Numba's tree (the extra
``numba``) and with that of tensors, which is used without Numba and on GPUs. "As
a run": a transition of Pendulum is stored, a minibatch is drawn with all its entries, and its
priorities are set.

Figures are processor time (``time.process_time``) on one thread, medians of the rounds. The table
is of a Zen 4. On a Zen 5, where the environment alone takes 8 microseconds, a step costs 4.6
environments, and SAC spends 22 % (layers of 64) and 13 % (256) outside of its gradient steps.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage

from benchmarks.measure import interleaved, machine, markdown_table, median, write_results

THREADS = 1
PENDULUM = "Pendulum-v1"
STEPS = 2_000
"""policy steps of one round."""
AT_MOST = {"one step": 5.0, "outside": 0.15, "by priority": 60.0}
"""a collected step, in steps of the environment alone; share of SAC outside its gradient step;
microseconds to draw by priority and to set priorities, in turns."""
TRANSITIONS, DRAWN = 1_000_000, 256


# ---------------------------------------------------------------------- one collected step
def environment_alone() -> float:
    """Return the microseconds of a step of the environment, with resets."""
    env = gym.make(PENDULUM)
    env.action_space.seed(0)
    env.reset(seed=0)
    actions = [env.action_space.sample() for _ in range(STEPS)]
    began = time.process_time()
    for action in actions:
        *_, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return _microseconds(began)


def collected(policy: bool = True, steps_per_env: int = 1, **settings: Any) -> float:
    """Return the microseconds of a collected policy step, in steady state.

    Args:
        policy: whether the recipe's actor acts; otherwise actions are random.
        steps_per_env: policy steps of one batch.
        **settings: for the collector.
    """
    from kit.collectors import VectorCollector
    from kit.envs import make_env
    from kit.modules import make_actor

    env = make_env(PENDULUM, 1)
    actor = None
    if policy:
        kind = {"continuous": "tanh_normal", "return_log_prob": False}
        actor = make_actor(env, (64, 64), "relu", **kind).select_out_keys("action")
    collector = VectorCollector(env, actor, steps_per_env=steps_per_env, **settings)
    for _ in range(20):
        collector.collect()
    began = time.process_time()
    for _ in range(STEPS // steps_per_env):
        collector.collect()
    microseconds = _microseconds(began)
    collector.shutdown()
    return microseconds


def _microseconds(began: float) -> float:
    return (time.process_time() - began) / STEPS * 1e6


ONE_STEP: dict[str, Callable[[], float]] = {
    "environment alone": environment_alone,
    "random actions": functools.partial(collected, policy=False),
    "policy": collected,
    "policy, exact": functools.partial(collected, fast_policy="exact"),
    "policy, 125 steps a batch": functools.partial(collected, steps_per_env=125),
}


# ---------------------------------------------------------------------- SAC
class Clock:
    """Sums processor time by part, from a given collected batch on."""

    def __init__(self, first: int) -> None:
        self.first, self.batches = first, 0
        self.seconds: dict[str, float] = defaultdict(float)
        self.began = self.ended = 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, whose processor time is added to ``part``."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if part == "collect":
                self._next_batch()
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.ended = time.process_time()
                self.seconds[part] += self.ended - began

        return wrapper

    def timed_iterator(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, whose iterator's processor time is added to ``part``."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Iterator[Any]:
            iterator = function(*args, **kwargs)
            draw = self.timed(part, lambda: next(iterator, None))
            return iter(draw, None)

        return wrapper

    def _next_batch(self) -> None:
        self.batches += 1
        if self.batches == self.first:
            self.seconds.clear()
            self.began = time.process_time()


def sac(**settings: Any) -> dict[str, float]:
    """Return the microseconds of an iteration of SAC by part, in the learning phase.

    Args:
        **settings: of the recipe.
    """
    from kit.buffers import ReplayMinibatches
    from kit.collectors.base import KitCollector
    from kit.config.settings import EnvConfig
    from kit.steps.settings import OffPolicySteps
    from kit.update import Update
    from recipes.sac import Config, build

    clock = Clock(first=STEPS)
    steps = OffPolicySteps(total_policy_steps=2 * STEPS, evaluation_every=None)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        nowhere = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        for owner, name, part in (
            (KitCollector, "collect", "collect"),
            (ReplayMinibatches, "extend", "extend"),
            (Update, "__call__", "gradient step"),
        ):
            stack.enter_context(patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        looking = property(clock.timed("gradient step", Update.keys_read.fget))  # type: ignore[attr-defined]
        stack.enter_context(patch.object(Update, "keys_read", looking))
        drawing = clock.timed_iterator("sample", ReplayMinibatches.epoch)
        stack.enter_context(patch.object(ReplayMinibatches, "epoch", drawing))
        env = EnvConfig(id=PENDULUM, num_envs=1)
        cadence: dict[str, Any] = {"log_every": 200, "checkpoint_every": 2_000}  # of 20,000 steps
        build(
            Config(env=env, steps=steps, log_dir=folder, threads=THREADS, **cadence, **settings)
        ).run()
    iterations = clock.batches - clock.first + 1
    parts = {name: seconds / iterations * 1e6 for name, seconds in clock.seconds.items()}
    whole = (clock.ended - clock.began) / iterations * 1e6
    parts["trainer"] = whole - sum(parts.values())
    return parts


PARTS = ("collect", "extend", "sample", "trainer", "gradient step")
SIZES = {"64": [64, 64], "256": [256, 256]}
"""of SAC's two hidden layers: the recipe's default, and the paper's."""


# ---------------------------------------------------------------------- by priority
def by_priority(make_tree: Callable[..., Any]) -> dict[str, Callable[[], float]]:
    """Return cases: the microseconds of drawing, of setting priorities, and of both in turns."""
    from kit.buffers import PrioritizedSampler, priorities

    with patch.object(priorities, "make_priority_tree", make_tree):
        sampler = PrioritizedSampler(TRANSITIONS, alpha=0.6, beta=0.4)
    storage = LazyTensorStorage(TRANSITIONS)
    storage.set(range(TRANSITIONS), TensorDict({"row": torch.arange(TRANSITIONS)}, [TRANSITIONS]))
    for places in torch.arange(TRANSITIONS).split(TRANSITIONS // 10):
        sampler.update_priority(places, torch.rand(len(places)))
    drawn = [sampler.sample(storage, DRAWN)[0] for _ in range(STEPS)]
    errors = torch.rand(STEPS, DRAWN)
    replay, transition = replay_by_priority(make_tree)

    def as_a_run(number: int) -> None:
        replay.extend(transition)
        minibatch = replay._samples(DRAWN, 1)[0]
        replay.update_priority(minibatch.set("td_error", errors[number]))

    def draw(number: int) -> torch.Tensor:
        places: torch.Tensor = sampler.sample(storage, DRAWN)[0]
        return places

    def case(step: Callable[[int], Any]) -> Callable[[], float]:
        def figure() -> float:
            began = time.process_time()
            for number in range(STEPS):
                step(number)
            return _microseconds(began)

        return figure

    return {
        "draw": case(draw),
        "set": case(lambda number: sampler.update_priority(drawn[number], errors[number])),
        "in turns": case(lambda number: sampler.update_priority(draw(number), errors[number])),
        "as a run": case(as_a_run),
    }


def replay_by_priority(make_tree: Any) -> tuple[Any, TensorDict]:
    """Return a full replay buffer with priorities, and a transition to store."""
    from kit.buffers import PrioritizedSampler, make_replay_buffer, priorities
    from kit.collectors import VectorCollector
    from kit.envs import make_env

    with patch.object(priorities, "make_priority_tree", make_tree):
        sampler = PrioritizedSampler(TRANSITIONS, alpha=0.6, beta=0.4)
    replay = make_replay_buffer(TRANSITIONS, DRAWN, sampler=sampler)
    collector = VectorCollector(make_env(PENDULUM, 1), None, steps_per_env=1_000)
    batch = collector.collect()
    for _ in range(TRANSITIONS // batch.numel()):
        replay.extend(batch)
    collector.shutdown()
    sampler.update_priority(torch.arange(TRANSITIONS), torch.rand(TRANSITIONS))
    return replay, batch[:, :1].clone()


# ---------------------------------------------------------------------- results
def one_step_table(figures: dict[str, list[float]]) -> str:
    """Return the table of collected steps."""
    alone = median(figures["environment alone"])
    rows = [
        [name, f"{median(us):.0f}", f"{median(us) / alone:.1f}"] for name, us in figures.items()
    ]
    reached = "yes" if median(figures["policy"]) <= AT_MOST["one step"] * alone else "no"
    note = f"\n\nAt most {AT_MOST['one step']:.0f} times the environment alone: {reached}."
    return markdown_table(["", "us per policy step", "environments"], rows) + note


def sac_table(rounds: list[dict[str, dict[str, float]]]) -> str:
    """Return the table of SAC's parts, by the size of its layers."""
    rows = [[name] for name in (*PARTS, "outside the gradient step")]
    reached = []
    for size in SIZES:
        parts = [float(np.median([found[size][name] for found in rounds])) for name in PARTS]
        whole, outside = sum(parts), sum(parts[:-1])
        for row, us in zip(rows, (*parts, outside)):
            row += [f"{us:.0f}", f"{us / whole:.1%}"]
        reached.append(f"{size} {'yes' if outside <= AT_MOST['outside'] * whole else 'no'}")
    header = ["us per iteration", *(part for size in SIZES for part in (f"layers of {size}", ""))]
    note = f"\n\nAt most {AT_MOST['outside']:.0%} outside the gradient step: {', '.join(reached)}."
    return markdown_table(header, rows) + note


def priority_table(rounds: int) -> str:
    """Return the table of drawing by priority."""
    from kit.buffers.numba_tree import NumbaPriorityTree
    from kit.buffers.priority_trees import PriorityTree

    trees = {
        "Numba's tree": by_priority(lambda size, _: NumbaPriorityTree(size)),
        "tree of tensors": by_priority(PriorityTree),
    }
    cases = {(name, part): case for name, parts in trees.items() for part, case in parts.items()}
    figures = interleaved(cases, rounds)
    names = list(trees["Numba's tree"])
    rows = [[tree, *(f"{median(figures[tree, name]):.0f}" for name in names)] for tree in trees]
    in_turns = median(figures["Numba's tree", "in turns"])
    reached = "yes" if in_turns <= AT_MOST["by priority"] else "no"
    note = f"\n\nAt most {AT_MOST['by priority']:.0f} us in turns: {reached}."
    return markdown_table(["us", *names], rows) + note


def main(rounds: int = 5) -> Path:
    """Measure, write the tables and return their path."""
    torch.set_num_threads(THREADS)
    figures = interleaved(ONE_STEP, rounds)
    cases = {size: functools.partial(sac, hidden_sizes=sizes) for size, sizes in SIZES.items()}
    shares = [{size: case() for size, case in cases.items()} for _ in range(max(rounds // 2, 1))]
    text = (
        f"{__doc__}\n{machine(THREADS)}; medians of {rounds} rounds.\n\n"
        f"## One collected step\n\n{one_step_table(figures)}\n\n"
        f"## SAC\n\n{sac_table(shares)}\n\n"
        f"## By priority\n\n{priority_table(rounds)}"
    )
    return write_results("off_policy", "Off-policy: one step at a time", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    print(main(parser.parse_args().rounds).read_text())
