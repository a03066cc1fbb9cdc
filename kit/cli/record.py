"""Record episodes with the policy of a saved run to a dataset in Minari format.

Run it::

    kit record latest --episodes 100 --to datasets/pendulum-expert-v0
    kit record latest --episodes 50 --random 0.3 --to datasets/pendulum-medium-v0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from kit.buffers.dataset_writer import DatasetWriter
from kit.cli.errors import errors_in_one_line
from kit.cli.evaluate import chosen_run, parser_for
from kit.collectors import VectorCollector
from kit.envs import VectorEnv
from kit.envs.backends.gymnasium import NativeBackend
from kit.envs.normalize import Normalizer
from kit.hooks import Evaluator
from kit.modules.world import Player
from kit.runs.saved_policy import SavedRun
from kit.steps.errors import real_number


def record(run: SavedRun, folder: Path, *, episodes: int, random: float, seed: int) -> int:
    """Play episodes as in an evaluation, and write them to a dataset.

    Args:
        run: run that contains the policy.
        folder: folder of the dataset.
        episodes: number of episodes.
        random: probability of replacing an action with a random action.
        seed: seed for the environment and the random actions.

    Returns:
        Number of recorded policy steps.

    Raises:
        SettingError: if the dataset cannot be written; raised before the first episode.
    """
    evaluator = run.trainer.evaluate
    real_number("random", random, at_least=0.0, at_most=1.0)
    # Record raw observations and rewards, with the metadata of a single environment.
    raw = {"normalize_reward": False, "normalize_observation": False}
    native = isinstance(evaluator.env.backend, NativeBackend)
    changes = {"vectorization": "sync"} if native else {}
    env = evaluator.env.make_again(num_envs=1, seed=seed, **raw, **changes)
    try:
        with DatasetWriter(folder, env) as writer:
            steps = _play(env, evaluator, episodes, random, seed)
            writer.write(steps, run.name)
    finally:
        env.close(raise_if_closed=False)
    return len(steps)


def _play(
    env: VectorEnv, evaluator: Evaluator, episodes: int, random: float, seed: int
) -> TensorDictBase:
    """Play complete episodes and return their steps, with batch size ``[steps]``."""
    normalizer = evaluator.env.normalizer
    policy = evaluator.policy
    if random:
        policy = RandomizedPolicy(policy, env.action_spec, random)
    if normalizer is not None and normalizer.statistics.observation is not None:
        policy = NormalizingPolicy(policy, normalizer, evaluator.device)
    if isinstance(policy, nn.Module):
        policy.eval()  # evaluation mode for batch normalisation and noisy weights
    collector = VectorCollector(
        env,
        policy,
        frames_per_batch=1,
        seed=seed,
        device=evaluator.device,
        exploration_type=evaluator.exploration_type,
        # RandomizedPolicy draws a random number per step, which cannot be traced.
        fast_policy="module" if random else "exact",
    )
    batches, ended = [], 0
    while ended < episodes:
        batches.append(collector.collect()[0].exclude("collector"))
        ended += int(batches[-1]["next", "done"].sum())
    return torch.cat(batches).cpu()


class _PolicyWrapper(nn.Module):
    """Policy wrapper with the same input and output keys as the wrapped policy."""

    def __init__(self, policy: Callable[[TensorDictBase], TensorDictBase]) -> None:
        super().__init__()
        self.policy = policy
        for name in ("in_keys", "out_keys"):
            if hasattr(policy, name):
                setattr(self, name, getattr(policy, name))


class NormalizingPolicy(_PolicyWrapper):
    """Policy that normalises raw observations with fixed statistics."""

    def __init__(self, policy: Any, normalizer: Normalizer, device: torch.device | str) -> None:
        super().__init__(policy)
        statistics = normalizer.statistics
        self.statistics = statistics.replaced(t.to(device) for t in statistics.tensors())
        self.normalizer = normalizer

    def forward(self, rows: TensorDictBase) -> TensorDictBase:
        """Select actions."""
        seen = rows["observation"]
        rows = rows.copy().set("observation", self.normalizer.apply(self.statistics, seen))
        return self.policy(rows).set("observation", seen)


class RandomizedPolicy(_PolicyWrapper):
    """Policy that selects a random action with a given probability."""

    def __init__(
        self, policy: Callable[[TensorDictBase], TensorDictBase], spec: Any, probability: float
    ) -> None:
        super().__init__(policy)
        self.spec, self.probability = spec, probability

    def forward(self, rows: TensorDictBase) -> TensorDictBase:
        """Select actions."""
        rows = self.policy(rows)
        if float(torch.rand(())) < self.probability:
            rows.set("action", self.spec.rand().to(rows["action"].device))
            if isinstance(self.policy, Player):
                self.policy.remember(rows)
        return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command ``kit record``."""
    parser = parser_for("kit record", __doc__, seed=54321)
    parser.add_argument("--to", type=Path, required=True, help="folder of the dataset")
    parser.add_argument(
        "--random", type=float, default=0.0, help="probability of random actions (default: 0)"
    )
    given = parser.parse_args(argv)
    with errors_in_one_line():
        run = chosen_run(given)
        chosen = {"random": given.random, "seed": given.seed}
        steps = record(run, given.to, episodes=given.episodes, **chosen)
        run.close()
        print(f"{given.to}: {given.episodes} episodes, {steps:,} transitions")
