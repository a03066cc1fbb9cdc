"""One-line messages, instead of stack traces, for errors that end a command."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from kit.cli.terminal import limit_of_system, terminal
from kit.collectors.base import PolicyError
from kit.collectors.chunks import WorkerError
from kit.distributed import RankError, Ranks
from kit.envs.errors import EnvError
from kit.hooks.guards import NonFiniteError
from kit.logging.files import WriteError
from kit.logging.loggers import LoggerError
from kit.steps.errors import SettingError
from kit.trainer import PlanMismatchError
from kit.trainer.stages import HookError

EXPLAINED = (
    SettingError, EnvError, PolicyError, HookError, LoggerError, NonFiniteError, WriteError,
    PlanMismatchError, RankError, WorkerError,
)  # fmt: skip
"""Errors that are printed without a stack trace."""

_INSTALLED = tuple(
    [str(Path(__file__).parents[2] / name) + os.sep for name in ("kit", "recipes")]
    + [sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")]
    + ["<"]  # file names of generated code and frozen modules
)
"""Path prefixes of installed code."""


def _passes_user_code(error: BaseException) -> bool:
    """Return whether the stack trace contains user code, where the bug may be."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(not frame.filename.startswith(_INSTALLED) for frame in frames)


def _rank_of(error: BaseException) -> str | None:
    """Return the text before an error: the rank of several, or nothing if there is one.

    Return ``None`` if another rank shows an error that came first, or the same error.
    """
    ranks = Ranks.current
    if ranks is None or ranks.size == 1:  # every rank reads the same command line
        return "" if os.environ.get("RANK", "0") == "0" else None
    is_first = ranks.report(error)
    if getattr(error, "reported", False) or not is_first:
        return None
    return f"{ranks.name}: "


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Print errors as one line. Unexpected errors in user code keep their stack trace.

    As in Hydra, ``HYDRA_FULL_ERROR=1`` shows the stack trace of all unexpected errors.
    """
    with terminal():
        try:
            yield
        except EXPLAINED as error:
            prefix = _rank_of(error)
            text = error.message(none="null") if isinstance(error, SettingError) else error
            if prefix is not None:
                print(f"\nerror: {prefix}{text}", file=sys.stderr)
            raise SystemExit(1) from None
        except Exception as error:
            prefix = _rank_of(error)
            if prefix is None:
                raise SystemExit(1) from None
            full = os.environ.get("HYDRA_FULL_ERROR") == "1" or _passes_user_code(error)
            if full or isinstance(error, BrokenPipeError) or limit_of_system(error) is not None:
                raise
            text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            print(
                f"\nerror: {prefix}{text} (set HYDRA_FULL_ERROR=1 to see the stack trace)",
                file=sys.stderr,
            )
            raise SystemExit(1) from None
