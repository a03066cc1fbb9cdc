"""Random configurations of a recipe that a person could mean, by the types of its settings."""

from __future__ import annotations

import dataclasses
import functools
import random
import types
import typing
from typing import Annotated, Any, Literal

import torchrl.objectives

from kit.collectors.registry import COLLECTORS
from kit.config.plain import to_plain
from tests.dialects.random_settings import EVERY_DIALECT, random_settings
from tests.stored import NAMES

INTEGERS = [1, 2, 3, 4, 5, 7, 8, 16, 64, 100, 1000]
FLOATS = [0.0, 1e-6, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0, 2.0, 20.0]
LOSSES = [name for name in dir(torchrl.objectives) if name.endswith("Loss")]
WORDS: dict[str, list[Any]] = {
    "loss": [*LOSSES, "torch.nn:Linear", "nowhere:Loss"],
    "activation": ["tanh", "relu", "gelu", "sigmoid_tanh", "Tanh"],
    "device": ["cpu", "cpu:0", "cuda", "gpu"],
    "collector": [*(name for name in COLLECTORS if name != "ray"), "vecor", None],  # Ray is slow
    "logger": ["csv", "none", "csv,none", "tensorboard", "wnb"],
    "log_dir": [None, None, "runs", "a/../b"],
    "resume": [None, "latest", "nowhere"],
    "id": ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCarContinuous-v0", "CartPole-v9",
           "Taxi-v3", "Blackjack-v1", "nowhere:Env-v0", "kit.testing.envs:kit/Glimpse-v0"],
    "replay_ratio": [1, "1/4", 0.3, 2, 0, "1/3", "x/y"],
    "rounding": ["error", "down", "up", "sideways"],
    "dataset": [[NAMES[0]], NAMES, [], ["nowhere"]],
    "size": ["nano", "tiny", "1m", "nan0"],
    "convolutions": [[[4, 8, 4]], [[32, 8, 4], [64, 4, 2]], [], [[4, 800, 4]]],
    "support": [[0.0, 10.0], [-1.0, 1.0], [1.0, 0.0]],
    "hidden_sizes": [[], [8], [4, 4], [16, 8, 4], [0], (8, 8)],
}  # fmt: skip
SCHEDULES = [
    "constant", "linear", "cosine", "exponential", "warmup 0.1 cosine", "piecewise 0.5 0.1", "lin",
    "warmup", "warmup 2",
]  # fmt: skip
WORDS |= {f"anneal{part}": SCHEDULES for part in ("", "_clip", "_critic", "_entropy")}
ARGUMENTS: dict[str, list[Any]] = {
    "restart_on_error": [0, 1, 3], "num_workers": [1, 2], "action_mask": [True, False],
    "normalize_reward": [True], "g": [9.81], "sutton_barto_reward": [True],
    "render_mode": ["rgb_array", "x"], "max_staleness": [0, 2],
    "fast_policy": ["auto", "exact", "x"], "layout": ["flat", "x"], "reuse": [True], "block": [4],
    "split_trajs": [True], "storing_device": ["cpu"], "autoreset": [False],
}  # fmt: skip
"""Arguments of environments and collectors, and those that belong to others."""


def random_config(config_class: type, draw: random.Random) -> dict[str, Any]:
    """Nested plain values of a small run with some settings changed.

    Args:
        config_class: settings of the recipe.
        draw: random numbers.
    """
    values = small_config(config_class)
    leaves = leaves_of(config_class)
    for path, hint in draw.sample(leaves, draw.choice([1, 1, 2, 3, 5, 8])):
        *groups, name = path
        group = values
        for part in groups:
            group = group[part]
        group[name] = sensible(name, hint, draw)
    if draw.random() < 0.05:
        name = draw.choice(EVERY_DIALECT)
        values["steps"] = {"dialect": name, **random_settings(name, draw, nasty=0.0)}
    return values


def small_config(config_class: type) -> dict[str, Any]:
    """Plain values of a run of some dozen policy (offline: gradient) steps; it writes nothing."""
    values = to_plain(config_class())
    steps, on_policy = values["steps"], "update_epochs" in values["steps"]
    values |= {"log_dir": None, "progress": False, "collector": None}
    values |= {"hidden_sizes": [8]} if "hidden_sizes" in values else {}
    values |= {"num_particles": 2} if "num_particles" in values else {}
    if "imagination_horizon" in values:  # recording takes longer than such a run
        values |= {"imagination_horizon": 3, "compile": False}
    values["env"]["num_envs"] = 2
    if "preprocess" in values:
        values |= {"preprocess": "none", "convolutions": [[4, 3, 2]]}
        values["env"]["id"] = "kit.testing.envs:kit/Glimpse-v0"
    steps |= {"evaluation_every": None, "evaluation_episodes": 1}
    if "dataset" in values:
        values["dataset"] = [NAMES[0]]
        steps |= {"gradient_steps": 64, "gradient_steps_per_iteration": 8, "minibatch_size": 4}
        return values
    whole_episodes = steps["steps_per_env"] is None
    steps |= {"total_policy_steps": 64}
    steps |= {"update_epochs": 1} if on_policy else {"learning_starts": 32}
    if steps.get("sequence_length"):
        steps["sequence_length"] = 4
    if whole_episodes:
        steps |= {"min_steps": 16}
        values["env"]["max_episode_steps"] = 16
    else:
        steps |= {"steps_per_env": 8 if on_policy else 2, "minibatch_size": 4}
    if "max_kl" in values:  # a trust region is of the whole batch
        steps["minibatch_size"] = None
    return values


def sensible(name: str, hint: Any, draw: random.Random) -> Any:
    """A value of a setting's type."""
    if name in ("kwargs", "collector_kwargs"):
        chosen = draw.sample([*ARGUMENTS], draw.choice([0, 1, 1, 2]))
        return {argument: draw.choice(ARGUMENTS[argument]) for argument in chosen}
    if name in WORDS:
        return draw.choice(WORDS[name])
    if typing.get_origin(hint) is Annotated:
        return sensible(name, typing.get_args(hint)[0], draw)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return sensible(name, draw.choice(typing.get_args(hint)), draw)
    if typing.get_origin(hint) is Literal:
        return draw.choice(typing.get_args(hint))
    if hint is bool:
        return draw.random() < 0.5
    if hint is int:
        return draw.choice(INTEGERS)
    if hint is float:
        return draw.choice(FLOATS)
    return None if hint is type(None) else draw.choice(["", "text", 3])


@functools.cache
def leaves_of(cls: type, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Path and type of every setting; of several groups in one place, the kit's own."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        if typing.get_origin(hint) is typing.ClassVar:
            continue
        group = next(iter(typing.get_args(hint)), hint)
        if dataclasses.is_dataclass(group) and isinstance(group, type):
            found += leaves_of(group, (*path, name))
        else:
            found.append(((*path, name), hint))
    return found
