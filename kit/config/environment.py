"""Whether environment and data set fit the settings of a recipe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from kit.config.checks import reject_unused
from kit.config.settings import ActorCriticConfig, OfflineConfig, RunConfig
from kit.steps import SettingError
from kit.steps.errors import show

Actions = Literal["continuous", "discrete"]


def check_arguments(cfg: RunConfig, settings: Mapping[str, Any]) -> None:
    """Refuse arguments of the environment that are settings, or change nothing offline."""
    for name in ("normalize_observation", "normalize_reward"):
        if isinstance(cfg, OfflineConfig) and getattr(cfg.env, name):
            why = "changes collected batches alone, and this recipe collects none"
            works = "leave it out; normalize_data=true normalises observations"
            raise SettingError(f"env.{name}", True, why, works)
    steps = settings.get("normalization_steps")
    if steps and not cfg.env.normalize_observation:
        why, works = "make statistics that nothing uses", "or use env.normalize_observation=true"
        raise SettingError("steps.num_normalization_steps", steps, why, [0], works)
    kwargs = cfg.env.kwargs
    for name in {*settings, "device"} & set(kwargs):
        ours = f"env.{name}" if hasattr(cfg.env, name) else name
        works = f"use {ours}={show(kwargs[name])}"
        raise SettingError(f"env.kwargs.{name}", kwargs[name], f"is {ours} of the kit", works)


@contextlib.contextmanager
def named_as_in(cfg: RunConfig) -> Iterator[None]:
    """Name ``normalize_data`` in errors of the argument that it becomes in an offline recipe."""
    try:
        yield
    except SettingError as error:
        if error.field != "env.normalize_observation" or not isinstance(cfg, OfflineConfig):
            raise
        raise SettingError("normalize_data", error.value, error.why, error.works) from None


def check_stacked_frames(cfg: RunConfig, env: Any) -> None:
    """Refuse a number of frames that observations are no stacks of."""
    frames = getattr(cfg, "stacked_frames", 1)
    for leaf in env.observation_leaves if frames > 1 else ():
        stacked = leaf.shape[0] if len(leaf.shape) > 1 else 1
        if stacked != frames:
            key = leaf.key if isinstance(leaf.key, str) else ".".join(leaf.key)
            why = f"are not in {key} of shape {leaf.shape}"
            raise SettingError("stacked_frames", frames, why, [stacked])


def check_actions(env: Any, wanted: Actions | None, algorithm: str) -> None:
    """Refuse an environment whose actions are not one array of real numbers, or one choice."""
    leaves, continuous = env.action_leaves, wanted == "continuous"
    one = len(leaves) == 1 and (continuous or leaves[0].shape == ())
    kinds = "f" if continuous else "iu"
    if wanted is None or (one and leaves[0].dtype.kind in kinds):
        return
    spaces = ", ".join(str(leaf.dtype if leaf.space is None else leaf.space) for leaf in leaves)
    why = f"has actions that are not {wanted} ({spaces}), and {algorithm} selects no others"
    kind = "Box of real numbers" if continuous else "Discrete"
    works = f"use an environment with a {kind} action space, or another recipe"
    raise SettingError("env.id", env.name, why, works)


def check_deviation(cfg: RunConfig, env: Any) -> None:
    """Reject settings of continuous actions if all actions are discrete."""
    if isinstance(cfg, ActorCriticConfig) and all(x.dtype.kind != "f" for x in env.action_leaves):
        names = [name for name in ("initial_log_std", "squash_actions") if hasattr(cfg, name)]
        reject_unused(cfg, names, f"{env.name} has no continuous actions")
    if getattr(cfg, "squash_actions", False):
        why = "squash_actions=true learns a standard deviation for each state"
        reject_unused(cfg, ["initial_log_std"], why)


def check_dataset(env: Any, rows: Any, names: Sequence[str]) -> None:
    """Refuse ``rows`` ``[transitions]`` of data sets with other observations or actions."""
    leaves = {"observation": env.observation_leaves, "action": env.action_leaves}
    for key, (leaf, *more) in leaves.items():
        parts = (rows, rows["next"]) if key == "observation" else (rows,)
        for found, wanted in _differences([part[key] for part in parts], leaf, bool(more)):
            why = f"holds {key}s {found}, and those of {env.name} {wanted}"
            raise SettingError("dataset", [*names], why, "give the environment that was recorded")
    action, space = rows["action"], env.action_leaves[0].space
    if isinstance(space, gym.spaces.Box):
        most, least = (end(0).double().numpy() for end in (action.amax, action.amin))
        low, high = (bound.astype(np.float64) for bound in (space.low, space.high))
        beyond = (most - high).max(), (low - least).max()
        if max(beyond) > 1e-3 * (high - low).min():  # less than that is rounding
            why = f"holds actions {max(beyond):.3g} beyond the bounds of those of {env.name}"
            works = "give the recorded environment, or store the actions as it clipped them"
            raise SettingError("dataset", [*names], why, works)


def _differences(parts: Sequence[Any], leaf: Any, several: bool) -> Iterator[tuple[str, str]]:
    """Yield what a data set has, and what the environment has in its place."""
    shape = tuple(parts[0].shape[1:])
    if several or leaf.path or leaf.shape != shape:
        named = several or leaf.path
        yield f"of shape {shape}", "have names" if named else f"have shape {leaf.shape}"
    dtype = np.dtype(str(parts[0].dtype).removeprefix("torch."))
    if _kind(dtype, leaf) != _kind(leaf.dtype, leaf):
        yield f"of type {dtype}", f"have type {leaf.dtype}"
    choices = _choices(leaf)
    if choices is None:
        return
    low = np.zeros(leaf.shape, np.int64) if leaf.start is None else leaf.start
    high = low + choices - 1
    for values in parts:
        least, most = values.amin(0).numpy(), values.amax(0).numpy()
        if (least < low).any() or (most > high).any():
            yield f"{least.tolist()} to {most.tolist()}", f"are {low.tolist()} to {high.tolist()}"


def _kind(dtype: np.dtype[Any], leaf: Any) -> str:
    """Real numbers, whole ones, or the bytes of pictures; a choice may be kept in a byte."""
    if dtype == np.uint8 and _choices(leaf) is None:
        return "bytes"
    return "real" if dtype.kind == "f" else "whole"


def _choices(leaf: Any) -> Any:
    """How many values each number of a space of choices has; ``None``: it is no such space."""
    if isinstance(leaf.space, gym.spaces.MultiBinary):
        return 2
    return getattr(leaf.space, "n", getattr(leaf.space, "nvec", None))
