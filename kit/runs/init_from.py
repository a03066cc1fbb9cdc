"""A new run that begins with the weights of another one."""

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

_MEANINGS = ("activation", "head", "support")
"""Settings that say what weights of the same shapes stand for: functions, returns of atoms."""
_LEARNT = ("initial_alpha", "initial_log_std")
"""Settings of what begins as the other run has learnt it."""


def init_from(
    trainer: Trainer, name: str, cfg: RunConfig, recipe: str, with_buffer: bool = False
) -> Path:
    """Load weights and normalisation of another run into a new one; return the other's folder.

    Args:
        trainer: trainer of the new run.
        name: run folder to load, or ``latest``.
        cfg: settings of the new run.
        recipe: name of the recipe, for ``latest``.
        with_buffer: whether to load the replay buffer as well.

    Raises:
        SettingError: if there is no such run, or its networks, normalisation or buffer do not fit.
    """
    folder = find_run(name, Path(cfg.log_dir or "runs"), recipe, "init_from")
    if isinstance(trainer.collector, AsyncCollector) and trainer.collector.normalizer:
        why = "has a normalisation that the environments of another process would not have"
        raise SettingError("init_from", str(folder), why, "use collector=vector")
    _check_meaning(cfg, folder)

    def read(checkpoint: Path) -> None:
        _check_normalization(trainer, checkpoint, folder)
        try:
            with _settings_kept(trainer.loss_module):
                trainer.load_policy(checkpoint)
        except SettingError as error:
            if error.field.startswith("env."):  # normalisation says it itself
                raise
            works = "give a run with the same networks and loss"
            raise SettingError("init_from", str(folder), error.why, works) from error
        if with_buffer:
            if not any((checkpoint / "components").glob("*-buffer")):
                why = "has no replay buffer, as a saved policy has none"
                works = "give the folder of the whole run"
                raise SettingError("init_from", str(folder), why, works)
            Checkpoints(checkpoint.parent, {"buffer": trainer.buffer}).load(checkpoint)

    check_has_checkpoint(folder, "init_from")
    Checkpoints.read_latest(folder / "checkpoints", read)
    return folder


def check_has_checkpoint(folder: Path, field: str) -> None:
    """Refuse a run without a checkpoint, for which the setting ``field`` asks."""
    if Checkpoints.latest(folder / "checkpoints") is None:
        works = "let it run on, or resume it"
        raise SettingError(field, str(folder), "has no checkpoint yet", works)


def _check_meaning(cfg: RunConfig, folder: Path) -> None:
    """Raise SettingError for weights of another meaning, and for settings that they replace."""
    saved = read_config(folder, "init_from")
    for name in _MEANINGS:
        ours, theirs = getattr(cfg, name, None), saved.get(name)
        if None in (ours, theirs):
            continue  # a recipe of another kind, that says it in its code
        # Tanh has two names.
        if str(ours).removeprefix("sigmoid_") != str(theirs).removeprefix("sigmoid_"):
            why = f"and the networks of init_from={folder} have {theirs!r}"
            raise SettingError(name, ours, why, [theirs])
    usual = type(cfg)()
    for name in () if getattr(cfg, "fixed_alpha", False) else _LEARNT:
        ours, works = getattr(cfg, name, None), getattr(usual, name, None)
        if ours not in (works, saved.get(name)):
            why = f"has no effect: it begins as init_from={folder} has learnt it"
            raise SettingError(name, ours, why, [works])


def _check_normalization(trainer: Trainer, checkpoint: Path, folder: Path) -> None:
    """Refuse weights that were learnt with normalisation where there is none, and vice versa."""
    theirs = any((checkpoint / "components").glob("*-normalization"))
    mine = trainer.policy_parts().get("normalization")
    if theirs == (mine is not None):
        return
    of_rewards = mine is not None and not mine.observation
    kind = "env.normalize_reward" if of_rewards else "env.normalize_observation"
    works: str | list[Any] = [theirs]
    if trainer.plan.offline:
        kind = "normalize_data"
    elif theirs:
        works = "normalise observations and rewards as that run does"
    why = f"and init_from={folder} {'has' if theirs else 'has no'} normalisation"
    raise SettingError(kind, not theirs, why, works)


@contextlib.contextmanager
def _settings_kept(loss_module: nn.Module | None) -> Iterator[None]:
    """Leave the settings of a loss as they are, which TorchRL keeps in its state: ``gamma``, ..."""
    modules = [] if loss_module is None else loss_module.modules()
    own = [one for one in modules if isinstance(one, (LossModule, ValueEstimatorBase))]
    buffers = [value for one in own for value in one._buffers.values() if value is not None]
    before = [value.clone() for value in buffers]
    try:
        yield
    finally:
        for value, setting in zip(buffers, before):
            value.copy_(setting)
