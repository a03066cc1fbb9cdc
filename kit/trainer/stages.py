"""Stages of the training loop, and the operations registered at each stage."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from kit.steps import SettingError
from kit.steps.errors import place_of


@dataclass(frozen=True)
class Stage:
    """A point in the training loop at which hooks run."""

    name: str
    """Name of the stage, equal to TorchRL's name if TorchRL has the same stage."""
    signature: str
    """Key in ``SIGNATURES`` for the arguments and result of the stage's hooks."""
    when: str
    """Description of when the stage runs."""
    needs: str = ""
    """What the stage requires: ``update`` (gradient steps), ``collection``, or nothing (empty)."""


SIGNATURES: dict[str, tuple[str, int]] = {
    "fire": ("() -> None", 0),
    "pipe": ("(batch) -> batch or None", 1),
    "log": ("(batch) -> dict of metrics or None", 1),
    "losses": ("(minibatch, losses) -> losses or None", 2),
    "optimizer": ("(losses, clip_grad_norm, clip_norm, index) -> losses or None", 4),
    "summary": ("(gradient_steps, mean_metrics) -> dict of metrics or None", 2),
    "row": ("(row) -> None", 1),
    "path": ("(path) -> None", 1),
    "episodes": ("(episodes) -> None", 1),
    "evaluation": ("(result, is_best) -> None", 2),
    "error": ("(error) -> None", 1),
}
"""Call signature and number of arguments of each kind of hook."""

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("setup", "fire", "once, before the first iteration"),
        Stage("load", "path", "after a checkpoint is loaded; follows `setup`"),
        Stage("pre_collect", "fire", "before a batch is collected", "collection"),
        Stage("batch_process", "pipe", "after a batch is collected", "collection"),
        Stage("pre_steps_log", "log", "after the batch is counted", "collection"),
        Stage("episodes", "episodes", "next, if episodes ended since the last batch", "collection"),
        Stage("pre_optim_steps", "fire", "at the start of an update phase", "update"),
        Stage("pre_epoch_log", "log", "at the start of an update epoch", "update"),
        Stage(
            "pre_epoch",
            "pipe",
            "next, before minibatches are drawn; off-policy, before each batch is stored",
            "update",
        ),
        Stage("process_optim_batch", "pipe", "after a minibatch is drawn", "update"),
        Stage("process_loss", "losses", "after the losses, before the gradients", "update"),
        Stage("optimizer", "optimizer", "instead of the update's gradient step", "update"),
        Stage("post_loss", "pipe", "after the losses", "update"),
        Stage("post_backward", "fire", "after the gradients, before clipping", "update"),
        Stage("post_optim", "fire", "after a gradient step", "update"),
        Stage("post_optim_log", "log", "next", "update"),
        Stage("post_epoch_log", "log", "at the end of an update epoch", "update"),
        Stage("post_epoch", "fire", "next", "update"),
        Stage("post_optim_complete_log", "summary", "at the end of an update phase", "update"),
        Stage("post_steps", "fire", "at the end of an iteration, with or without an update"),
        Stage("post_steps_log", "log", "next"),
        Stage("evaluation", "evaluation", "after an evaluation"),
        Stage("log_row", "row", "after a row of metrics is logged"),
        Stage("save", "fire", "before a checkpoint is written"),
        Stage("post_save", "path", "after a checkpoint is written"),
        Stage("error", "error", "when an exception ends the run"),
        Stage("shutdown", "fire", "once, at the end of the run, even after an exception"),
    )
}
"""All stages, in the order of the training loop."""


_SEES_BATCHES = (
    "batch_process", "pre_steps_log", "pre_epoch_log", "pre_epoch", "post_epoch_log",
    "post_steps_log",
)  # fmt: skip


class HookError(RuntimeError):
    """Raised when a hook raises an exception."""

    def __init__(self, hook: str, stage: str, error: BaseException) -> None:
        self.hook, self.stage, self.error = hook, stage, error
        what = " ".join(f"{type(error).__name__}: {error}".split())
        super().__init__(f"hook {hook} at stage {stage!r} raised {what}{place_of(error)}")


@dataclass
class _Operation:
    function: Callable[..., Any]
    keywords: dict[str, Any]
    name: str


class Stages(dict[str, list[_Operation]]):
    """Operations registered at each stage, which are called in registration order.

    Args:
        updates: whether the run takes gradient steps.
        collections: whether the run collects batches.

    Attributes:
        keeps_batches: whether a registered hook may keep a batch after its call returns.
    """

    def __init__(self, *, updates: bool = True, collections: bool = True) -> None:
        self._missing: dict[str, str] = {
            "update": "" if updates else "the plan takes no gradient steps",
            "collection": "" if collections else "the plan collects no batches (offline)",
        }
        self._began = self.keeps_batches = False
        super().__init__({name: [] for name in STAGES})

    def register(self, stage: str, function: Callable[..., Any], **keywords: Any) -> None:
        """Register a function at a stage.

        Args:
            stage: name of a stage in ``STAGES``.
            function: function with the signature of the stage.
            **keywords: keyword arguments passed in every call.

        Raises:
            KeyError: if there is no such stage.
            SettingError: if the stage never runs, or the function does not accept the stage's
                arguments.
        """
        name = _name(function)
        missing = self._missing.get(STAGES[stage].needs)
        if stage == "setup" and self._began:
            missing = "the run has begun"
        if missing:
            raise SettingError("stage", stage, f"never runs ({missing}), so {name} is never called")
        text, count = SIGNATURES[STAGES[stage].signature]
        if not _accepts(function, count, keywords):
            reason = f"does not accept the arguments of stage {stage!r}"
            raise SettingError("hook", name, reason, f"use the signature {text}")
        self.keeps_batches |= stage in _SEES_BATCHES and declares(function, "keeps_batches")
        self[stage].append(_Operation(function, keywords, name))

    def fire(self, stage: str, *arguments: Any) -> None:
        """Call every operation of a stage."""
        for operation in self[stage]:
            self._call(stage, operation, *arguments)
        self._began |= stage == "setup"

    def pipe(self, stage: str, batch: Any, before: Any = None) -> Any:
        """Pass ``batch`` through every operation of a stage and return the result.

        Args:
            stage: name of the stage.
            batch: value passed to the first operation. An operation that returns ``None`` leaves
                the value unchanged.
            before: extra first argument of every operation, such as the losses' minibatch.
        """
        for operation in self[stage]:
            arguments = (batch,) if before is None else (before, batch)
            result = self._call(stage, operation, *arguments)
            batch = batch if result is None else result
        return batch

    def optimize(self, losses: TensorDictBase, clip_grad_norm: bool, clip_norm: Any) -> Any:
        """Call every operation of stage ``optimizer``, and return the detached losses."""
        for index, operation in enumerate(self["optimizer"]):
            arguments = (losses, clip_grad_norm, clip_norm, index)
            result = self._call("optimizer", operation, *arguments)
            losses = losses if result is None else result
        return losses.detach()

    def log(self, stage: str, *arguments: Any) -> Iterator[dict[str, Any]]:
        """Yield the metrics that each operation of a stage returns."""
        for operation in self[stage]:
            result = self._call(stage, operation, *arguments)
            if result is None:
                continue
            yield dict(result.items())

    def _call(self, stage: str, operation: _Operation, *arguments: Any) -> Any:
        try:
            return operation.function(*arguments, **operation.keywords)
        except Exception as error:
            # TorchRL's replay buffer hook raises StopIteration at the end of an epoch.
            ends = stage == "process_optim_batch" and isinstance(error, StopIteration)
            if ends or isinstance(error, HookError) or getattr(error, "stops_the_run", False):
                raise
            raise HookError(operation.name, stage, error) from error


def declares(function: Any, capability: str) -> bool:
    """Return whether a hook has a capability; ``True`` unless the hook declares otherwise.

    Args:
        function: registered function with this attribute, or a method of an object that has the
            attribute.
        capability: name of the attribute: ``keeps_batches``, ``reads_minibatches`` or
            ``changes_training``.
    """
    owner = getattr(function, "__self__", None)
    return bool(getattr(function, capability, getattr(owner, capability, True)))


def _name(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        return f"{type(owner).__name__}.{function.__name__}"
    return str(getattr(function, "__qualname__", type(function).__name__))


def _accepts(function: Callable[..., Any], count: int, keywords: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*([None] * count), **keywords)
    except TypeError:
        return False
    except ValueError:
        return True  # some builtins have no signature
    return True
