"""Initialisation of a new run from the weights of another run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torchrl.objectives import LossModule
from torchrl.objectives.value import ValueEstimatorBase

from kit.collectors import AsyncCollector
from kit.config import RunConfig
from kit.runs.saved_runs import find_run, read_config
from kit.steps import SettingError
from kit.trainer import Trainer
from kit.trainer.checkpoint import Checkpoints

_ARCHITECTURE = ("activation", "head", "support")
"""Settings that change the function that a network computes, but not its weight shapes."""
_LOADED = ("initial_alpha", "initial_log_std")
"""Settings for initial values, which loaded weights replace."""


def init_from(
    trainer: Trainer, name: str, cfg: RunConfig, recipe: str, with_buffer: bool = False
) -> Path:
    """Load the weights and normalisation statistics of another run into a new run.

    Args:
        trainer: trainer of the new run.
        name: run folder to load, or ``latest``.
        cfg: settings of the new run.
        recipe: name of the recipe to which ``latest`` refers.
        with_buffer: whether to also load the replay buffer.

    Returns:
        Folder of the loaded run.

    Raises:
        SettingError: if there is no such run, or its networks, normalisation or buffer are
            incompatible.
    """
    folder = find_run(name, Path(cfg.log_dir or "runs"), recipe, "init_from")
    if isinstance(trainer.collector, AsyncCollector) and trainer.collector.normalizer:
        reason = "The async collector's process would not receive the loaded normalisation"
        raise SettingError("init_from", str(folder), reason, "Use collector=vector")
    _check_architecture(cfg, folder)

    def read(checkpoint: Path) -> None:
        _check_normalization(trainer, checkpoint, folder)
        try:
            with _keep_settings(trainer.loss_module):
                trainer.load_policy(checkpoint)
        except SettingError as error:
            if error.field.startswith("env."):  # normalisation errors already name their setting
                raise
            advice = "Use a run with the same networks and loss"
            raise SettingError("init_from", str(folder), error.why, advice) from error
        if with_buffer:
            if not any((checkpoint / "components").glob("*-buffer")):
                reason = "The folder contains no replay buffer. Saved policies never contain one"
                raise SettingError("init_from", str(folder), reason, "Use the run folder")
            Checkpoints(checkpoint.parent, {"buffer": trainer.buffer}).load(checkpoint)

    check_has_checkpoint(folder, "init_from")
    Checkpoints.read_latest(folder / "checkpoints", read)
    return folder


def check_has_checkpoint(folder: Path, field: str) -> None:
    """Raise SettingError for the setting ``field`` if a run has no checkpoint."""
    if Checkpoints.latest(folder / "checkpoints") is None:
        raise SettingError(field, str(folder), "The run has no checkpoint yet", "Continue the run")


def _check_architecture(cfg: RunConfig, folder: Path) -> None:
    """Reject incompatible architectures, and initial values that the loaded weights replace."""
    saved = read_config(folder, "init_from")
    for name in _ARCHITECTURE:
        ours, theirs = getattr(cfg, name, None), saved.get(name)
        if None in (ours, theirs):
            continue  # one of the two recipes does not have this setting
        # tanh and sigmoid_tanh are the same function.
        if str(ours).removeprefix("sigmoid_") != str(theirs).removeprefix("sigmoid_"):
            reason = f"The run {folder} uses {theirs!r}"
            raise SettingError(name, ours, reason, [theirs])
    defaults = type(cfg)()
    for name in () if getattr(cfg, "fixed_alpha", False) else _LOADED:
        ours, default = getattr(cfg, name, None), getattr(defaults, name, None)
        if ours not in (default, saved.get(name)):
            reason = f"It has no effect because the value is loaded from the run {folder}"
            raise SettingError(name, ours, reason, [default])


def _check_normalization(trainer: Trainer, checkpoint: Path, folder: Path) -> None:
    """Raise SettingError if only one of the two runs uses normalisation."""
    theirs = any((checkpoint / "components").glob("*-normalization"))
    mine = trainer.policy_parts().get("normalization")
    if theirs == (mine is not None):
        return
    of_rewards = mine is not None and not mine.observation
    kind = "env.normalize_reward" if of_rewards else "env.normalize_observation"
    advice: str | list[Any] = [theirs]
    if trainer.plan.offline:
        kind = "normalize_data"
    elif theirs:
        advice = "Normalise the same quantities (observations or rewards) as that run"
    reason = f"The run {folder} {'uses' if theirs else 'does not use'} normalisation"
    raise SettingError(kind, not theirs, reason, advice)


@contextlib.contextmanager
def _keep_settings(loss_module: nn.Module | None) -> Iterator[None]:
    """On exit, restore settings such as ``gamma`` that TorchRL stores as buffers of a loss."""
    modules = [] if loss_module is None else loss_module.modules()
    losses = [m for m in modules if isinstance(m, (LossModule, ValueEstimatorBase))]
    buffers = [value for m in losses for value in m._buffers.values() if value is not None]
    before = [value.clone() for value in buffers]
    try:
        yield
    finally:
        for value, setting in zip(buffers, before):
            value.copy_(setting)
