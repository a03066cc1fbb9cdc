"""Recipes on a GPU: a gradient step, and runs from end to end.

    python -m benchmarks.on_a_gpu [--rounds 3] [--device cuda] [--tables steps runs]

Gradient step: from the minibatch on the device to the moved targets, by the recipe's ``Update``.
"Graph" is ``compile="auto"``, one CUDA graph; "eager" is ``compile=false``, the same operations
called by Python one after the other, as TorchRL's own training scripts do. Microseconds; the device
is waited for once in half a second.

From end to end: policy steps per second of whole iterations (collecting, storing, drawing, gradient
steps), networks and replay buffer on the device, environments on the host or, in "torch", on the
device, too. Stable-Baselines3, where it is installed, runs the same number of gradient steps of the
same sizes.

Figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import interleaved, machine, markdown_table, median, ratio, write_results

SECONDS = 0.5
"""for which gradient steps are made, at least."""
WARM, AT_ONCE = 20, 5
"""gradient steps before the first figure; gradient steps between two looks at the clock."""
TORCH = {"env.vectorization": "tensor", "collector": "tensor"}
BIG = {"hidden_sizes": [256, 256], "steps.minibatch_size": 256, "steps.learning_starts": 512}
PIXELS = {
    "env.id": "ale_py:PongNoFrameskip-v4",
    "steps.learning_starts": 200,
    "buffer_size": 5_000,
    "steps.total_policy_steps": 400,
}
DREAMER = {
    "steps.learning_starts": 1_100,
    "steps.total_policy_steps": 1_120,
    "steps.sequence_length": 64,
}
SB3_PPO = {"steps.steps_per_env": 128, "steps.minibatch_size": 64, "steps.update_epochs": 4}
SB3_DQN = {
    "steps.steps_per_env": 4,
    "steps.learning_starts": 1_000,
    "steps.replay_ratio": "1/4",
    "steps.minibatch_size": 64,
    "hidden_sizes": [64, 64],
}
"""As Stable-Baselines3 is asked for below."""
SHORT = {"steps.total_policy_steps": 600}
GRADIENT_STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "PPO, CartPole, minibatch 64": ("ppo", {**SB3_PPO, "steps.total_policy_steps": 4_096}),
    "PPO, CartPole, minibatch 16,384": (
        "ppo",
        {**TORCH, "env.num_envs": 1_024, "steps.steps_per_env": 32, "steps.rounding": "up",
         "steps.minibatch_size": 16_384, "steps.total_policy_steps": 65_536},
    ),
    "DQN, CartPole, minibatch 64": ("dqn", {**SB3_DQN, "steps.total_policy_steps": 3_000}),
    "DQN, Pong, minibatch 32": ("dqn_pixels", PIXELS),
    "SAC, HalfCheetah, minibatch 256": ("sac", {**BIG, **SHORT, "env.id": "HalfCheetah-v5"}),
    "TD3, HalfCheetah, minibatch 256": ("td3", {**BIG, **SHORT, "env.id": "HalfCheetah-v5"}),
    "CrossQ, HalfCheetah, minibatch 256": ("crossq", {**BIG, **SHORT, "env.id": "HalfCheetah-v5"}),
    "DreamerV3 (tiny), CartPole, 16 sequences of 64": ("dreamerv3", {**DREAMER, "size": "tiny"}),
}  # fmt: skip
RUNS: dict[str, tuple[str, dict[str, Any], int]] = {
    "PPO, CartPole in torch, 4,096 envs": (
        "ppo",
        {**TORCH, "env.num_envs": 4_096, "steps.steps_per_env": 32, "steps.update_epochs": 4,
         "steps.minibatch_size": 16_384, "steps.total_policy_steps": 13 * 131_072}, 5 * 131_072,
    ),
    "PPO, CartPole, 8 envs": ("ppo", {**SB3_PPO, "steps.total_policy_steps": 16_384}, 3_072),
    "DQN, CartPole": ("dqn", {**SB3_DQN, "steps.total_policy_steps": 6_000}, 1_500),
    "SAC, HalfCheetah": (
        "sac", {**BIG, "env.id": "HalfCheetah-v5", "steps.total_policy_steps": 2_000}, 700,
    ),
    "TD3, HalfCheetah": (
        "td3", {**BIG, "env.id": "HalfCheetah-v5", "steps.total_policy_steps": 2_000}, 700,
    ),
    "DQN, Pong": ("dqn_pixels", {**PIXELS, "steps.total_policy_steps": 1_400}, 500),
}  # fmt: skip
"""Recipe, settings, and the policy steps from which it is timed."""
PEERS = ("PPO, CartPole, 8", "DQN, CartPole", "SAC", "TD3")
"""Runs that Stable-Baselines3 makes, too."""


def now(device: torch.device) -> float:
    """Seconds, once the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def build(name: str, settings: dict[str, Any], device: torch.device, compile: Any) -> Any:
    """Return the trainer of a recipe that writes nothing and evaluates once."""
    recipe: Any = importlib.import_module(f"recipes.{name}")
    config = recipe.Config(log_dir=None, progress=False, device=str(device), compile=compile)
    config.steps.evaluation_every, config.steps.evaluation_episodes = None, 1
    for path, value in settings.items():
        *groups, field = path.split(".")
        owner = config
        for group in groups:
            owner = getattr(owner, group)
        assert hasattr(owner, field), path
        setattr(owner, field, value)
    return recipe.build(config)


# ---------------------------------------------------------------------- gradient steps
def gradient_step(
    name: str, settings: dict[str, Any], device: torch.device, compile: Any
) -> tuple[Callable[[], float], str]:
    """Return a case, and how steps are executed."""
    trainer = build(name, settings, device, compile)
    minibatches: list[Any] = []

    def keep(minibatch: Any) -> None:
        minibatches[:] = [minibatch.clone()]

    trainer.register_op("process_optim_batch", keep)
    trainer.run()
    update, (minibatch,) = trainer.update, minibatches
    for _ in range(WARM):
        update(minibatch)

    def case() -> float:
        began, steps = now(device), 0
        while time.perf_counter() - began < SECONDS:
            for _ in range(AT_ONCE):
                update(minibatch)
            steps += AT_ONCE
        return (now(device) - began) / steps * 1e6

    return case, update.plain_reason if compile else ""


def gradient_steps(device: torch.device, rounds: int) -> str:
    """Return the table of gradient steps."""
    rows, notes = [], []
    for title, (name, settings) in GRADIENT_STEPS.items():
        cases = {}
        for how, compile in (("graph", "auto"), ("eager", False)):
            cases[how], reason = gradient_step(name, settings, device, compile)
            if reason:
                notes.append(f"{title}, {how}: runs eagerly, {reason}")
        found = interleaved(cases, rounds, warm_up=False)
        times = [f"{median(found[how]):.0f}" for how in cases]
        rows.append([title, *times, f"{ratio(found['eager'], found['graph']):.2f}"])
        print("\t".join(rows[-1]), flush=True)
    header = ["", "graph, us", "eager, us", "eager / graph"]
    return "\n\n".join([markdown_table(header, rows), *notes])


# ---------------------------------------------------------------------- from end to end
def run(name: str, settings: dict[str, Any], first: int, device: torch.device) -> float:
    """Return policy steps per second, once there were ``first``."""
    trainer = build(name, settings, device, "auto")
    times: list[tuple[float, int]] = []

    def note() -> None:
        steps = trainer.ledger.policy_steps
        if (not times and steps >= first) or trainer.ledger.iterations == trainer.plan.iterations:
            times.append((now(device), steps))

    trainer.register_op("post_steps", note)
    trainer.run()
    (began, before), (ended, after) = times
    return (after - before) / (ended - began)


def sb3(title: str, device: torch.device) -> float:
    """Return policy steps per second of Stable-Baselines3 in its learning phase."""
    from stable_baselines3 import DQN, PPO, SAC, TD3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class Clock(BaseCallback):
        began: tuple[float, int] | None = None

        def _on_step(self) -> bool:
            if self.began is None and self.num_timesteps >= first:
                self.began = now(device), self.num_timesteps
            return True

    common: dict[str, Any] = {"seed": 0, "device": str(device)}
    replay: dict[str, Any] = {"learning_starts": 512, "batch_size": 256, "buffer_size": 10_000}
    network = {"net_arch": [64, 64]}
    if title.startswith("PPO"):
        model: Any = PPO(
            "MlpPolicy", make_vec_env("CartPole-v1", 8), n_steps=128, batch_size=64, n_epochs=4,
            policy_kwargs=network, **common,
        )  # fmt: skip
        first, total = 2_048, 5_120
    elif title.startswith("DQN"):
        model = DQN(
            "MlpPolicy", "CartPole-v1", learning_starts=1_000, train_freq=4, batch_size=64,
            policy_kwargs=network, buffer_size=50_000, **common,
        )  # fmt: skip
        first, total = 1_500, 4_000
    else:
        kind = SAC if title.startswith("SAC") else TD3
        model = kind(
            "MlpPolicy", "HalfCheetah-v5", train_freq=1, gradient_steps=1,
            policy_kwargs={"net_arch": [256, 256]}, **replay, **common,
        )  # fmt: skip
        first, total = 700, 1_200
    clock = Clock()
    model.learn(total, callback=clock)
    assert clock.began is not None
    return (model.num_timesteps - clock.began[1]) / (now(device) - clock.began[0])


def end_to_end(device: torch.device, rounds: int) -> str:
    """Return the table of whole runs."""
    peers = importlib.util.find_spec("stable_baselines3") is not None
    rows = []
    for title, (name, settings, first) in RUNS.items():
        cases = {"kit": functools.partial(run, name, settings, first, device)}
        if peers and title.startswith(PEERS):
            cases["sb3"] = functools.partial(sb3, title, device)
        found = interleaved(cases, rounds, warm_up=False)
        row = [title, f"{median(found['kit']):,.0f}"]
        theirs = found.get("sb3")
        row += (
            [f"{median(theirs):,.0f}", f"{ratio(found['kit'], theirs):.2f}"] if theirs else ["", ""]
        )
        rows.append(row)
        print("\t".join(row), flush=True)
    header = ["", "kit", "Stable-Baselines3", "times as fast"]
    return str(markdown_table(header, rows))


TABLES = {"steps": gradient_steps, "runs": end_to_end}


def main(
    rounds: int = 3, device: torch.device | None = None, tables: Sequence[str] = tuple(TABLES)
) -> Path:
    """Measure, write the tables and return their path."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = device or torch.device("cuda")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    about = f"{machine(1, ['stable-baselines3'])}; {where}; {rounds} rounds."
    text = [str(__doc__), about]
    for name in tables:
        text.append(TABLES[name](device, rounds))
        path = write_results("on_a_gpu", "On a GPU", "\n\n".join(text))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    given = parser.parse_args()
    print(main(given.rounds, given.device, given.tables).read_text())
