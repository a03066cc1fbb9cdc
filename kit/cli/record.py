"""Recording the policy of a saved run to a data set, in Minari's format.

Run it::

    python -m kit record latest --episodes 100 --to datasets/pendulum-expert-v0
    python -m kit record latest --episodes 50 --random 0.3 --to datasets/pendulum-medium-v0
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
    """Play whole episodes with the actions of evaluations, and write them; return policy steps.

    Args:
        run: run whose policy acts.
        folder: folder of the data set.
        episodes: number of episodes.
        random: probability of a random action instead of the policy's.
        seed: seed of the environment and of random actions.

    Raises:
        SettingError: if the data set cannot be written; raised before any episode.
    """
    own = run.trainer.evaluate
    real_number("random", random, at_least=0.0, at_most=1.0)
    # Raw observations and rewards are recorded, with the metadata of an unvectorised environment.
    raw = {"normalize_reward": False, "normalize_observation": False}
    native = isinstance(own.env.backend, NativeBackend)
    changes = {"vectorization": "sync"} if native else {}
    env = own.env.make_again(num_envs=1, seed=seed, **raw, **changes)
    try:
        with DatasetWriter(folder, env) as writer:
            steps = _played(env, own, episodes, random, seed)
            writer.write(steps, run.name)
    finally:
        env.close(raise_if_closed=False)
    return len(steps)


def _played(
    env: VectorEnv, own: Evaluator, episodes: int, random: float, seed: int
) -> TensorDictBase:
    """Return the steps of this number of whole episodes, ``[steps]``."""
    normalizer = own.env.normalizer
    mixed = own.policy
    if random:
        mixed = SometimesRandom(mixed, env.action_spec, random)
    if normalizer is not None and normalizer.statistics.observation is not None:
        mixed = SeesNormalized(mixed, normalizer, own.device)
    if isinstance(mixed, nn.Module):
        mixed.eval()  # as it is evaluated: normalisation of batches, noise in weights
    collector = VectorCollector(
        env,
        mixed,
        frames_per_batch=1,
        seed=seed,
        device=own.device,
        exploration_type=own.exploration_type,
        # SometimesRandom decides on the host, step by step.
        fast_policy="module" if random else "exact",
    )
    batches, ended = [], 0
    while ended < episodes:
        batches.append(collector.collect()[0].exclude("collector"))
        ended += int(batches[-1]["next", "done"].sum())
    return torch.cat(batches).cpu()


class _Around(nn.Module):
    """Wrapper of a policy with the same keys."""

    def __init__(self, policy: Callable[[TensorDictBase], TensorDictBase]) -> None:
        super().__init__()
        self.policy = policy
        for name in ("in_keys", "out_keys"):
            if hasattr(policy, name):
                setattr(self, name, getattr(policy, name))


class SeesNormalized(_Around):
    """Policy that normalises raw observations by fixed statistics."""

    def __init__(self, policy: Any, normalizer: Normalizer, device: torch.device | str) -> None:
        super().__init__(policy)
        known = normalizer.statistics
        self.statistics = known.replaced(one.to(device) for one in known.tensors())
        self.normalizer = normalizer

    def forward(self, rows: TensorDictBase) -> TensorDictBase:
        """Act."""
        seen = rows["observation"]
        rows = rows.copy().set("observation", self.normalizer.apply(self.statistics, seen))
        return self.policy(rows).set("observation", seen)


class SometimesRandom(_Around):
    """Policy that is replaced by random actions with a probability."""

    def __init__(
        self, policy: Callable[[TensorDictBase], TensorDictBase], spec: Any, probability: float
    ) -> None:
        super().__init__(policy)
        self.spec, self.probability = spec, probability

    def forward(self, rows: TensorDictBase) -> TensorDictBase:
        """Act."""
        rows = self.policy(rows)
        if float(torch.rand(())) < self.probability:
            rows.set("action", self.spec.rand().to(rows["action"].device))
            if isinstance(self.policy, Player):
                self.policy.remember(rows)
        return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Record a policy from the command line."""
    parser = parser_for("kit record", __doc__, seed=54321)
    parser.add_argument("--to", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--random", type=float, default=0.0, help="share of random actions")
    given = parser.parse_args(argv)
    with errors_in_one_line():
        run = chosen_run(given)
        chosen = {"random": given.random, "seed": given.seed}
        steps = record(run, given.to, episodes=given.episodes, **chosen)
        run.close()
        print(f"{given.to}: {given.episodes} episodes, {steps:,} transitions")
