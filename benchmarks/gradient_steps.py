"""What a gradient step costs: on policy beside TorchRL's, off policy beside its matrix products.

    python -m benchmarks.gradient_steps [--rounds 9]

On policy, the same loss of TorchRL minimised eagerly: minibatches of 64 rows of CartPole-v1,
networks of 64 x 64, advantages given: the loss module of the recipe, its gradients, clipping by
norm and the optimiser's step. "Recorded" is the kit's ``Update`` with ``compile="auto"``, after
warm-up; "eager" is the same loss module with ``backward``, ``clip_grad_norm_`` and PyTorch's
optimiser as it is by default, written out.

Off policy, the floor: minibatches of 256, networks of 256 x 256, and of the same gradient steps,
made eagerly, the matrix products alone (those of TD3's actor in every other step). "Products" are
these as PyTorch computes them one after the other, in its layouts, on memory of their own; "ideal"
are their additions and multiplications at the rate of one product of 256 x 256 that is repeated, so
that all it reads is in the cache; with oneDNN's rate beside it, whose products the kit takes where
they are the faster ones (``compile="exact"``: never). What is element by element, the optimiser and
the update of the target networks are in the gradient step alone.

Single products, of matrices of rows x inner and inner x columns, by PyTorch and by oneDNN: the kit
takes oneDNN's from ``kit.fast.products.LARGE`` multiplications on, where the processor is one on
which they are faster.

Figures are microseconds of processor time on one thread, medians of the rounds.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Adam, Optimizer
from torch.optim import RMSprop as TorchRMSprop
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

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
from kit.fast.optimizers import RMSprop
from kit.fast.products import LARGE, are_faster
from kit.update import Update

THREADS, ROWS, NORM = 1, 64, 0.5
MICROSECONDS = 1e6
AT_MOST = 0.16
"""of TorchRL's eager gradient step."""
FLOOR = 0.6
"""least share of the ideal in a gradient step."""
SIDE = 256
PERIOD = 2
"""gradient steps in which each loss is minimised: TD3's actor in every other one."""
OFF_POLICY = {
    "SAC, LunarLanderContinuous-v3": ("sac", "LunarLanderContinuous-v3"),
    "SAC, HalfCheetah-v5": ("sac", "HalfCheetah-v5"),
    "TD3, HalfCheetah-v5": ("td3", "HalfCheetah-v5"),
}
RATES = {"lr": 3e-4, "eps": 1e-5}


def parts(recipe: Any) -> tuple[Any, Any]:
    """Return the loss module of a recipe, and a minibatch for it."""
    torch.manual_seed(0)
    trainer = recipe.build(recipe.Config(log_dir=None, progress=False))
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


def off_policy(name: str, env: str) -> tuple[Callable[[], Any], Callable[[], Any], Products]:
    """Return the gradient steps of a recipe and the matrix products of ``PERIOD`` of them.

    The steps are those with the fastest products and those with PyTorch's own.
    """
    recipe: Any = importlib.import_module(f"recipes.{name}")
    updates, minibatch = [], None
    for how in ("auto", "exact", False):
        config = recipe.Config(log_dir=None, progress=False, hidden_sizes=[256, 256], compile=how)
        config.env.id, config.env.num_envs = env, 1
        config.steps.minibatch_size, config.steps.learning_starts = 256, 300
        trainer = recipe.build(config)
        rows = TensorDictReplayBuffer(storage=LazyTensorStorage(300), batch_size=256)
        while len(rows) < 256:
            rows.extend(trainer.collector.collect().reshape(-1))
        minibatch = rows.sample()
        trainer.collector.shutdown()
        for _ in range(20):
            trainer.update(minibatch)
        updates.append(trainer.update)
    update, exact, eager_update = updates
    assert not update.plain_reason, update.plain_reason
    with Products() as products:
        for _ in range(PERIOD):
            eager_update(minibatch)
    return (lambda: update(minibatch)), (lambda: exact(minibatch)), products


def beside_products(rounds: int) -> str:
    """Return the table of gradient steps off policy."""
    left, right, result = (torch.randn(SIDE, SIDE) for _ in range(3))
    linear = torch.ops.mkldnn._linear_pointwise
    steps = {
        "one": processor_time(lambda: torch.mm(left, right, out=result), 200, MICROSECONDS),
        "oneDNN": processor_time(
            torch.no_grad()(lambda: linear(left, right, None, "none", [], "")), 200, MICROSECONDS
        ),
    }
    operations = {}
    for name, case in OFF_POLICY.items():
        step, exact, products = off_policy(*case)
        operations[name] = products.operations() / PERIOD
        steps[name] = processor_time(step, 60, MICROSECONDS)
        steps[f"{name}, exact"] = processor_time(exact, 60, MICROSECONDS)
        steps[f"{name}, products"] = processor_time(products.alone, 30, MICROSECONDS / PERIOD)
    figures = {name: median(found) for name, found in interleaved(steps, rounds).items()}
    rows = []
    for name in OFF_POLICY:
        ideal, ideal_onednn = (
            operations[name] * figures[one] / (2 * SIDE**3) for one in ("one", "oneDNN")
        )
        took, products_took = figures[name], figures[f"{name}, products"]
        share = ideal / took
        shares = [f"{share:.2f}", "yes" if share >= FLOOR else "no", f"{ideal_onednn / took:.2f}"]
        times = took, figures[f"{name}, exact"], products_took, ideal, ideal_onednn
        rows.append([name, *(f"{time:.0f}" for time in times), *shares])
    header = [
        "", "gradient step, us", "exact, us", "products, us", "ideal, us", "by oneDNN, us",
        "share of ideal", f"at least {FLOOR}", "of oneDNN's",
    ]  # fmt: skip
    return str(markdown_table(header, rows))


SHAPES = ((64, 64, 64), (128, 64, 64), (256, 64, 64), (128, 128, 128), (256, 23, 256),
          (256, 256, 256))  # fmt: skip
"""rows, inner and columns of single products."""


def single_products(rounds: int) -> str:
    """Return the table of single products."""
    linear = torch.ops.mkldnn._linear_pointwise
    cases: dict[Any, Callable[[], float]] = {}
    for rows, inner, columns in SHAPES:
        given, weight, bias = (
            torch.rand(rows, inner),
            torch.rand(columns, inner),
            torch.rand(columns),
        )

        def by_pytorch(given: Any = given, weight: Any = weight, bias: Any = bias) -> None:
            torch.addmm(bias, given, weight.t())

        def by_onednn(given: Any = given, weight: Any = weight, bias: Any = bias) -> None:
            linear(given, weight, bias, "none", [], "")

        shape = rows, inner, columns
        cases[shape, "PyTorch"] = processor_time(by_pytorch, 300, MICROSECONDS)
        cases[shape, "oneDNN"] = processor_time(by_onednn, 300, MICROSECONDS)
    with torch.no_grad():
        figures = {case: median(found) for case, found in interleaved(cases, rounds).items()}
    table = []
    for shape in SHAPES:
        one, other = figures[shape, "PyTorch"], figures[shape, "oneDNN"]
        taken = "oneDNN's" if are_faster() and math.prod(shape) >= LARGE else "PyTorch's"
        figured = [f"{math.prod(shape):,}", f"{one:.1f}", f"{other:.1f}", f"{one / other:.2f}"]
        table.append([" x ".join(map(str, shape)), *figured, taken])
    header = ["", "multiplications", "PyTorch, us", "oneDNN, us", "ratio", "the kit takes"]
    return str(markdown_table(header, table))


def main(rounds: int = 9) -> Path:
    """Measure, write the tables and return their path."""
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
    beside = f"{beside_products(rounds)}\n\n{single_products(rounds)}"
    tables = f"{markdown_table(header, rows)}\n\n{beside}"
    text = f"{__doc__}\n{machine(THREADS)}; {rounds} rounds.\n\n{tables}"
    return write_results("gradient_steps", "One gradient step", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    print(main(parser.parse_args().rounds).read_text())
