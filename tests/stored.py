"""Data sets in memory, for recipes that learn from one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kit.buffers.datasets import read_datasets
from kit.collectors import VectorCollector
from kit.envs import make_env

NAMES = ["stored-0", "stored-1"]


def transitions(rows: int = 200, ends: int = 20, seed: int = 3) -> Any:
    """Transitions of random actions in the pendulum, in episodes of ``ends`` steps."""
    env = make_env("Pendulum-v1", 1, seed=seed, max_episode_steps=ends)
    collector = VectorCollector(env, None, frames_per_batch=rows, seed=seed)
    batch = next(iter(collector))[0].exclude("collector")
    collector.shutdown()
    return batch


def read_stored(folders: Sequence[str]) -> Any:
    """Data sets of :data:`NAMES`, joined; where there is any other, all are read from files."""
    if not folders or not {*folders} <= {*NAMES}:
        return read_datasets(folders)
    with torch.random.fork_rng():
        return torch.cat([transitions(seed=NAMES.index(name)) for name in folders])
