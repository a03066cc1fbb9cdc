"""Short runs of the recipes of world models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kit.experiment import EnvConfig
from kit.trainer import Trainer


def build(recipe: Any, runs: Path | None = None, hooks: Any = (), **changes: Any) -> Trainer:
    """17 gradient steps: one when 64 policy steps were made, then one for every 4."""
    steps_class = type(recipe.Config().steps)
    names = steps_class.__dataclass_fields__
    own = {name: changes.pop(name) for name in list(changes) if name in names}
    steps = {
        "total_policy_steps": 128, "steps_per_env": 4, "learning_starts": 64, "random_steps": 0,
        "replay_ratio": "1/4", "minibatch_size": 2, "sequence_length": 6,
        "evaluation_every": None, "evaluation_episodes": 2, **own,
    }  # fmt: skip
    settings = {
        "env": EnvConfig(id="CartPole-v1", num_envs=1), "imagination_horizon": 3,
        "imagination_starts": 2, "progress": False, "compile": False,
        "log_dir": None if runs is None else str(runs),
    }  # fmt: skip
    config = recipe.Config(steps=steps_class(**steps), **{**settings, **changes})
    return recipe.build(config, hooks=list(hooks))


def weights(trainer: Trainer) -> list[torch.Tensor]:
    """All parameters and buffers."""
    return [value.detach().clone() for value in trainer.update.loss_module.state_dict().values()]


def assert_equal(one: Trainer, other: Trainer) -> None:
    """The weights of two runs are bitwise equal."""
    assert all(torch.equal(*pair) for pair in zip(weights(one), weights(other), strict=True))
