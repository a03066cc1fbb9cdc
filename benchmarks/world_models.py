"""Cost of a gradient step and an acting step of DreamerV3 in kit and sheeprl.

    python -m benchmarks.world_models [--rounds 5] [--size 12m]

**Gradient step**: from a minibatch to the updated slow critic, with size ``tiny``, 16 sequences of
64 records of CartPole-v1, and 15 imagined steps from each record. ``--size`` measures another size
without sheeprl.

- "Recorded" is ``compile="auto"``.
- sheeprl is ``dreamer_v3_5`` with the same layers, weights and minibatch.
- "Matrix products" runs only the matrix products of kit's step on tensors of the same shapes.

**Acting step**: a policy step of CartPole-v1 in one environment, in batches of 4 as in the recipe.
kit's time includes the environment; sheeprl's includes only the player.

Values are processor time (``time.process_time``) on one thread, medians and ranges over rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torchrl.objectives import SoftUpdate
from torchrl.trainers.algorithms import DreamerV3Optimizer

from benchmarks.measure import (
    interleaved,
    machine,
    markdown_table,
    median,
    processor_time,
    ratio,
    write_results,
)
from benchmarks.products import Products
from kit.buffers import SequenceReplay
from kit.collectors import VectorCollector
from kit.envs import make_env
from kit.losses import DreamerV3Loss
from kit.modules.world import LatentActor, Player, make_critic, make_world_model
from kit.update import Update

THREADS = 1
ENV, SEQUENCES, TIME, HORIZON = "CartPole-v1", 16, 64, 15
STEPS, ACTS = 2, 1_000
"""gradient steps and policy steps of one round."""
RECORDED = "kit, recorded"
AT_LEAST, AT_MOST = 3.0, 1.0
"""times as fast as sheeprl; milliseconds of an acting step."""


def make_loss(starts: int | None = None, size: str = "tiny") -> DreamerV3Loss:
    """Return a loss with new networks, the same each time."""
    torch.manual_seed(0)
    model = make_world_model(make_env(ENV), size)
    actor = LatentActor(model.code, model.features, model.size)
    settings: dict[str, Any] = {"imagination_horizon": HORIZON, "imagination_starts": starts}
    loss = DreamerV3Loss(model, actor, make_critic(model), **settings)
    SoftUpdate(loss, tau=0.02)
    return loss


def make_minibatch() -> Any:
    """Return sequences of records of a random policy."""
    torch.manual_seed(0)
    collector = VectorCollector(make_env(ENV, SEQUENCES), None, steps_per_env=4 * TIME)
    replay = SequenceReplay(SEQUENCES * 4 * TIME, TIME)
    replay.extend(next(iter(collector)))
    collector.shutdown()
    return replay.sample(SEQUENCES)


# ---------------------------------------------------------------------- gradient steps
def kit_step(minibatch: Any, compile: Any, **settings: Any) -> Callable[[], Any]:
    """Return the kit's gradient step, recorded and verified where it is to be."""
    loss = make_loss(**settings)
    optimizer = DreamerV3Optimizer(loss.parameters(), lr=4e-5)
    updater = SoftUpdate(loss, tau=0.02)
    update = Update(loss, optimizer, compile=compile, target_updater=updater)
    for _ in range(4 if compile else 1):
        update(minibatch)
    assert not compile or not update.plain_reason, update.plain_reason
    return lambda: update(minibatch)


def sheeprl_step(minibatch: Any) -> Callable[[], Any]:
    """Return sheeprl's gradient step."""
    from benchmarks.sheeprl_dreamer import Agent

    agent = Agent(make_loss(), (4,))
    data = agent.data(minibatch)
    agent.disabled = True

    def step() -> None:
        agent.step(data)
        agent.move_slow_critic()

    step()
    return step


def floor(minibatch: Any, size: str = "tiny") -> Callable[[], Any]:
    """Return all matrix products of a gradient step."""
    loss = make_loss(size=size)
    with Products(shared=size != "tiny") as products:
        outputs = loss(minibatch)
        sum(value for name, value in outputs.items() if name.startswith("loss")).backward()

    return products.alone


# ---------------------------------------------------------------------- acting
def kit_acting(**settings: Any) -> Callable[[], Any]:
    """Return a batch of four policy steps of the kit."""
    loss = make_loss()
    player = Player(loss.world_model, loss.actor)
    collector = VectorCollector(make_env(ENV, 1), player, steps_per_env=4, **settings)
    for _ in range(20):
        collector.collect()
    return collector.collect


def sheeprl_acting(minibatch: Any) -> Callable[[], Any]:
    """Return sheeprl's choice of an action."""
    from benchmarks.sheeprl_dreamer import Agent

    player = Agent(make_loss(), (4,)).player
    player.init_states()
    seen = {"observation": minibatch["observation"][:1, :1]}

    @torch.no_grad()
    def act() -> None:
        player.get_actions(seen)

    return act


# ---------------------------------------------------------------------- results
def spread(figures: list[float]) -> list[str]:
    """Return the median and the range, to be written."""
    return [f"{median(figures):.2f}", f"{min(figures):.2f} to {max(figures):.2f}"]


def table(figures: dict[str, list[float]], against: str) -> str:
    """Return a table with the ratio to one of the cases."""
    rows = [
        [name, *spread(found), f"{ratio(found, figures[against]):.2f}"]
        for name, found in figures.items()
    ]
    return markdown_table(["", "ms", "range", f"times {against}"], rows)


def against_sheeprl(gradient: dict[str, list[float]]) -> str:
    """Return whether the kit is as fast as it should be."""
    if "sheeprl" not in gradient:
        return "Not measured against sheeprl."
    rounds = [f"{a / b:.2f}" for a, b in zip(gradient["sheeprl"], gradient[RECORDED])]
    faster = ratio(gradient["sheeprl"], gradient[RECORDED])
    reached = "yes" if faster >= AT_LEAST else f"no, {faster:.2f} times"
    each = ", ".join(rounds)
    return f"At least {AT_LEAST:.0f} times as fast as sheeprl: {reached} (rounds: {each})."


def main(rounds: int = 5) -> Path:
    """Measure, write the tables and return their path."""
    torch.set_num_threads(THREADS)
    minibatch = make_minibatch()
    steps = {
        RECORDED: kit_step(minibatch, "auto"),
        "kit, eager": kit_step(minibatch, False),
        "kit, recorded, imagination_starts=8": kit_step(minibatch, "auto", starts=8),
        "matrix products": floor(minibatch),
    }
    four = processor_time(kit_acting(), ACTS // 4)
    acts = {"kit": lambda: four() / 4}
    if importlib.util.find_spec("sheeprl"):
        steps["sheeprl"] = sheeprl_step(minibatch)
        acts["sheeprl"] = processor_time(sheeprl_acting(minibatch), ACTS)
    gradient = interleaved(
        {name: processor_time(step, STEPS) for name, step in steps.items()}, rounds
    )
    acting = interleaved(acts, rounds)
    quick = "yes" if median(acting["kit"]) <= AT_MOST else "no"
    text = (
        f"{__doc__}\n{machine(THREADS, ['sheeprl'])}; {rounds} rounds.\n\n"
        f"## Gradient step\n\n{table(gradient, RECORDED)}\n\n{against_sheeprl(gradient)}\n\n"
        f"## Acting step\n\n{table(acting, 'kit')}\n\n"
        f"At most {AT_MOST:.0f} ms: {quick}."
    )
    return write_results("world_models", "World models", text)


def of_size(size: str, rounds: int = 3) -> Path:
    """Measure the gradient step of another size, write the table and return its path."""
    torch.set_num_threads(THREADS)
    minibatch = make_minibatch()
    steps = {
        RECORDED: kit_step(minibatch, "auto", size=size),
        "matrix products": floor(minibatch, size),
    }
    figures = interleaved({name: processor_time(step, 1) for name, step in steps.items()}, rounds)
    share = ratio(figures["matrix products"], figures[RECORDED])
    text = (
        f"{__doc__}\n{machine(THREADS)}; {rounds} rounds.\n\n"
        f"## Gradient step of {size}\n\n{table(figures, RECORDED)}\n\n"
        f"Matrix products are {share:.2f} of the step (target for 12m: at least 0.6)."
    )
    return write_results(f"world_models_{size}", f"World models: {size}", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", default="tiny")
    given = parser.parse_args()
    written = main(given.rounds) if given.size == "tiny" else of_size(given.size, given.rounds)
    print(written.read_text())
