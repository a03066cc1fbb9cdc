"""Checks that the environment and the dataset match the settings of a recipe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from kit.config.checks import reject_unused
from kit.config.settings import (
    ActorCriticConfig,
    OfflineConfig,
    RunConfig,
    SquashedNoiseConfig,
    StateDependentNoiseConfig,
)
from kit.steps import SettingError
from kit.steps.errors import show

Actions = Literal["continuous", "discrete"]


def check_arguments(cfg: RunConfig, settings: Mapping[str, Any]) -> None:
    """Reject environment settings without effect, and arguments that duplicate settings.

    Args:
        cfg: recipe settings.
        settings: arguments for :func:`~kit.envs.make_env` that are derived from the settings.
    """
    for name in ("normalize_observation", "normalize_reward"):
        if isinstance(cfg, OfflineConfig) and getattr(cfg.env, name):
            reason = "It normalises collected data, but an offline recipe collects none"
            advice = "Remove it. To normalise the dataset's observations, use normalize_data=true"
            raise SettingError(f"env.{name}", True, reason, advice)
    steps = settings.get("normalization_steps")
    if steps and not cfg.env.normalize_observation:
        reason = "It has no effect unless observations are normalised"
        advice = "Use 0, or set env.normalize_observation=true"
        raise SettingError("steps.num_normalization_steps", steps, reason, advice)
    kwargs = cfg.env.kwargs
    for name in {*settings, "device"} & set(kwargs) - {"wrappers"}:  # callables, in Python
        setting = f"env.{name}" if hasattr(cfg.env, name) else name
        reason, advice = (
            "This argument cannot be set in env.kwargs",
            f"Use {setting}={show(kwargs[name])}",
        )
        raise SettingError(f"env.kwargs.{name}", kwargs[name], reason, advice)


@contextlib.contextmanager
def renamed_errors(cfg: RunConfig) -> Iterator[None]:
    """In offline recipes, report ``normalize_data`` instead of ``env.normalize_observation``."""
    try:
        yield
    except SettingError as error:
        if error.field != "env.normalize_observation" or not isinstance(cfg, OfflineConfig):
            raise
        raise SettingError("normalize_data", error.value, error.why, error.works) from None


def check_stacked_frames(cfg: RunConfig, env: Any) -> None:
    """Check that the first dimension of each observation has size ``stacked_frames``."""
    frames = getattr(cfg, "stacked_frames", 1)
    for leaf in env.observation_leaves if frames > 1 else ():
        stacked = leaf.shape[0] if len(leaf.shape) > 1 else 1
        if stacked != frames:
            key = leaf.key if isinstance(leaf.key, str) else ".".join(leaf.key)
            reason = f"The entry {key} has shape {leaf.shape}, and not {frames} frames"
            raise SettingError("stacked_frames", frames, reason, [stacked])


def check_actions(env: Any, wanted: Actions | None, algorithm: str) -> None:
    """Check that the environment has the required kind of actions.

    Args:
        env: training environments.
        wanted: one continuous action array or one discrete action. ``None``: any actions.
        algorithm: name of the algorithm, used in the error message.

    Raises:
        SettingError: if the environment has a different kind of actions.
    """
    leaves, continuous = env.action_leaves, wanted == "continuous"
    is_single = len(leaves) == 1 and (continuous or leaves[0].shape == ())
    kinds = "f" if continuous else "iu"
    if wanted is None or (is_single and leaves[0].dtype.kind in kinds):
        return
    spaces = ", ".join(str(leaf.dtype if leaf.space is None else leaf.space) for leaf in leaves)
    reason = f"The {algorithm} recipe needs {wanted} actions, but the action space is {spaces}"
    kind = "float Box" if continuous else "Discrete"
    advice = f"Use an environment with a {kind} action space, or another recipe"
    raise SettingError("env.id", env.name, reason, advice)


def check_continuous_settings(cfg: RunConfig, env: Any) -> None:
    """Reject continuous-action settings that have no effect in this environment."""
    if isinstance(cfg, ActorCriticConfig) and all(x.dtype.kind != "f" for x in env.action_leaves):
        continuous = ("gsde", "initial_log_std", "squash_actions")
        names = [name for name in continuous if hasattr(cfg, name)]
        reject_unused(cfg, names, f"{env.name} has no continuous actions")
    if getattr(cfg, "squash_actions", False):
        reason = "squash_actions=true uses a state-dependent standard deviation"
        reject_unused(cfg, ["initial_log_std"], reason)
    if isinstance(cfg, StateDependentNoiseConfig):
        if not cfg.gsde:
            names = ["gsde_sample_freq"]
            if isinstance(cfg, SquashedNoiseConfig):
                names += ["gsde_at_warmup", "gsde_expln", "initial_log_std"]
            reject_unused(cfg, names, "gsde=false")
        elif hasattr(cfg, "squash_actions"):
            reject_unused(cfg, ["squash_actions"], "actions with gsde=true are not squashed")


def check_dataset(env: Any, rows: Any, names: Sequence[str]) -> None:
    """Check that the observations and actions of a dataset match the environment.

    Args:
        env: environments that the dataset must match.
        rows: transitions of the dataset, ``[transitions]``.
        names: names of the datasets, used in the error message.

    Raises:
        SettingError: if shapes, data types, discrete values or action bounds do not match.
    """
    leaves = {"observation": env.observation_leaves, "action": env.action_leaves}
    for key, (leaf, *more) in leaves.items():
        parts = (rows, rows["next"]) if key == "observation" else (rows,)
        for found, wanted in _differences([part[key] for part in parts], leaf, bool(more)):
            reason = f"The dataset has {key}s {found}, but {env.name} has {key}s {wanted}"
            raise SettingError("dataset", [*names], reason, "Use the environment that was recorded")
    action, space = rows["action"], env.action_leaves[0].space
    if isinstance(space, gym.spaces.Box):
        most, least = (end(0).double().numpy() for end in (action.amax, action.amin))
        low, high = (bound.astype(np.float64) for bound in (space.low, space.high))
        excess = (most - high).max(), (low - least).max()
        if max(excess) > 1e-3 * (high - low).min():  # a smaller excess is a rounding error
            reason = f"Actions exceed the action bounds of {env.name} by up to {max(excess):.3g}"
            advice = "Use the environment that was recorded, or clip the stored actions"
            raise SettingError("dataset", [*names], reason, advice)


def _differences(parts: Sequence[Any], leaf: Any, several: bool) -> Iterator[tuple[str, str]]:
    """For each difference, yield descriptions of the dataset and of the environment."""
    shape = tuple(parts[0].shape[1:])
    if several or leaf.path or leaf.shape != shape:
        is_nested = several or leaf.path
        yield f"of shape {shape}", "in a dictionary" if is_nested else f"of shape {leaf.shape}"
    dtype = np.dtype(str(parts[0].dtype).removeprefix("torch."))
    if _kind(dtype, leaf) != _kind(leaf.dtype, leaf):
        yield f"of type {dtype}", f"of type {leaf.dtype}"
    choices = _choices(leaf)
    if choices is None:
        return
    low = np.zeros(leaf.shape, np.int64) if leaf.start is None else leaf.start
    high = low + choices - 1
    for values in parts:
        least, most = values.amin(0).numpy(), values.amax(0).numpy()
        if (least < low).any() or (most > high).any():
            found, wanted = (
                f"from {a.tolist()} to {b.tolist()}" for a, b in ((least, most), (low, high))
            )
            yield found, wanted


def _kind(dtype: np.dtype[Any], leaf: Any) -> str:
    """Classify a data type as real, integer, or bytes (images)."""
    if dtype == np.uint8 and _choices(leaf) is None:
        return "bytes"
    return "real" if dtype.kind == "f" else "integer"


def _choices(leaf: Any) -> Any:
    """Return how many values each discrete entry can take, or ``None`` for other spaces."""
    if isinstance(leaf.space, gym.spaces.MultiBinary):
        return 2
    return getattr(leaf.space, "n", getattr(leaf.space, "nvec", None))
