"""What a gradient step of PPO and A2C costs, beside the same loss of TorchRL minimised eagerly.

    python -m benchmarks.gradient_steps [--rounds 9]

Minibatches of 64 rows of CartPole-v1, networks of 64 x 64, advantages given: the loss module of the
recipe, its gradients, clipping by norm and the optimiser's step. "Recorded" is the kit's ``Update``
with ``compile="auto"``, after warm-up; "eager" is the same loss module with ``backward``,
``clip_grad_norm_`` and PyTorch's optimiser as it is by default, written out.

Figures are microseconds of processor time on one thread, medians of the rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Adam, Optimizer
from torch.optim import RMSprop as TorchRMSprop

from benchmarks.measure import (
    interleaved,
    machine,
    markdown_table,
    median,
    processor_time,
    ratio,
    write_results,
)
from kit.fast.optimizers import RMSprop
from kit.update import Update

THREADS, ROWS, NORM = 1, 64, 0.5
MICROSECONDS = 1e6
AT_MOST = 0.16
"""of TorchRL's eager gradient step."""
RATES = {"lr": 3e-4, "eps": 1e-5}


def parts(recipe: Any) -> tuple[Any, Any]:
    """Return the loss module of a recipe, and a minibatch for it."""
    torch.manual_seed(0)
    trainer = recipe.build(recipe.Config(runs=None, progress=False))
    batch = trainer.advantage(trainer.collector.collect())
    rows = torch.arange(ROWS) % batch.numel()
    minibatch = batch.reshape(-1)[rows].clone()
    trainer.collector.shutdown()
    return trainer.update.loss_module, minibatch


def recorded(recipe: Any, optimizer: Callable[..., Optimizer]) -> Callable[[], Any]:
    """Return the kit's gradient step."""
    loss, minibatch = parts(recipe)
    update = Update(loss, optimizer(loss.parameters(), **RATES), max_grad_norm=NORM)
    for _ in range(10):
        update(minibatch)
    assert not update.plain_reason, update.plain_reason
    return lambda: update(minibatch)


def eager(recipe: Any, make_optimizer: Callable[..., Optimizer]) -> Callable[[], Any]:
    """Return TorchRL's, written out."""
    loss, minibatch = parts(recipe)
    parameters = list(loss.parameters())
    optimizer = make_optimizer(parameters, **RATES)

    def step() -> None:
        outputs = loss(minibatch)
        total = sum(value for name, value in outputs.items() if name.startswith("loss_"))
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, NORM)
        optimizer.step()

    return step


def fused_adam(parameters: Any, **settings: Any) -> Optimizer:
    """Adam as the recipes have it."""
    return Adam(parameters, **settings, fused=True)


def main(rounds: int = 9) -> Path:
    """Measure, write the table and return its path."""
    import recipes.a2c
    import recipes.ppo

    torch.set_num_threads(THREADS)
    cases = {
        "PPO (ClipPPOLoss), Adam": (recipes.ppo, fused_adam, Adam),
        "A2C (A2CLoss), Adam": (recipes.a2c, fused_adam, Adam),
        "A2C (A2CLoss), RMSprop": (recipes.a2c, RMSprop, TorchRMSprop),
    }
    steps: dict[str, Callable[[], float]] = {}
    for name, (recipe, own, theirs) in cases.items():
        steps[f"{name}, recorded"] = processor_time(recorded(recipe, own), 300, MICROSECONDS)
        steps[f"{name}, eager"] = processor_time(eager(recipe, theirs), 60, MICROSECONDS)
    figures = interleaved(steps, rounds)
    rows = []
    for name in cases:
        fast, slow = figures[f"{name}, recorded"], figures[f"{name}, eager"]
        share = ratio(fast, slow)
        reached = "yes" if share <= AT_MOST else "no"
        rows.append([name, f"{median(fast):.0f}", f"{median(slow):.0f}", f"{share:.3f}", reached])
    header = ["", "recorded, us", "eager, us", "share", f"at most {AT_MOST}"]
    text = f"{__doc__}\n{machine(THREADS)}; {rounds} rounds.\n\n{markdown_table(header, rows)}"
    return write_results("gradient_steps", "One gradient step", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    print(main(parser.parse_args().rounds).read_text())
