"""PPO on CartPole-v1, end to end with everything on, against Stable-Baselines3.

One environment, batches of 128, 10 epochs, minibatches of 64, 65,536 policy steps, the same
networks and number of gradient steps; rows to CSV, progress shown, the policy evaluated at the end.

    python -m benchmarks.ppo
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.measure import interleaved, machine, markdown_table, median, ratio, write_results

POLICY_STEPS = 65_536
THREADS = 1


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Let a case show its progress, to nobody."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


class Kit:
    """The recipe with its defaults for everything that does not have to be equal."""

    gradient_steps = 0

    def __init__(self, **settings: object) -> None:
        self.settings = settings

    def __call__(self) -> float:
        """Train once and return the seconds."""
        from kit.experiment import EnvConfig
        from kit.steps.settings import OnPolicySteps
        from recipes.ppo import Config, build

        with tempfile.TemporaryDirectory() as folder, _unseen():
            config = Config(
                env=EnvConfig(
                    num_envs=1, normalize_observation=False, normalize_reward=False
                ),
                steps=OnPolicySteps(
                    total_policy_steps=POLICY_STEPS, steps_per_env=128, update_epochs=10,
                    minibatch_size=64, evaluation_every=None,
                ),
                learning_rate=3e-4, anneal="constant", runs=folder, threads=THREADS,
                **self.settings,
            )  # fmt: skip
            began = time.perf_counter()
            ledger = build(config).run()
            seconds = time.perf_counter() - began
        self.gradient_steps = ledger.gradient_steps
        return seconds


class StableBaselines3:
    """Stable-Baselines3 with the same counts, its CSV logger and its progress bar."""

    gradient_steps = 0

    def __call__(self) -> float:
        """Train once and return the seconds."""
        from stable_baselines3 import PPO
        from stable_baselines3.common.evaluation import evaluate_policy
        from stable_baselines3.common.logger import configure

        torch.set_num_threads(THREADS)
        with tempfile.TemporaryDirectory() as folder, _unseen():
            began = time.perf_counter()
            model = PPO(
                "MlpPolicy", "CartPole-v1", n_steps=128, batch_size=64, n_epochs=10,
                ent_coef=0.0, learning_rate=3e-4, seed=0, device="cpu",
            )  # fmt: skip
            model.set_logger(configure(folder, ["csv"]))
            model.learn(POLICY_STEPS, progress_bar=True)
            evaluate_policy(model, model.get_env(), n_eval_episodes=10)
            seconds = time.perf_counter() - began
        self.gradient_steps = model._n_updates * 2  # it counts epochs, of two minibatches here
        return seconds


def main(repeats: int = 3) -> Path:
    """Measure, write the table and return its path."""
    cases = {
        "kit": Kit(),
        "kit, eager (compile=false)": Kit(compile=False),
        "Stable-Baselines3": StableBaselines3(),
    }
    seconds = interleaved(cases, repeats, warm_up=False)
    theirs = seconds["Stable-Baselines3"]
    rows = [
        [
            name,
            f"{median(seconds[name]):.1f}",
            f"{min(seconds[name]):.1f} to {max(seconds[name]):.1f}",
            f"{POLICY_STEPS / median(seconds[name]):,.0f}",
            f"{case.gradient_steps:,}",
            f"{ratio(theirs, seconds[name]):.2f}",
        ]
        for name, case in cases.items()
    ]
    header = ["", "seconds", "range", "policy steps/s", "gradient steps", "times faster"]
    text = f"{__doc__}\n{machine(THREADS)}; medians of {repeats} interleaved rounds.\n\n"
    return write_results("ppo", "PPO end to end", text + markdown_table(header, rows))


if __name__ == "__main__":
    print(main().read_text())
