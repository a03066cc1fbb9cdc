"""Errors of the user's, which end a command with one line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from kit.cli.terminal import terminal
from kit.collectors.base import PolicyFault
from kit.envs.errors import EnvironmentFault
from kit.hooks.guards import NotFinite
from kit.logging.files import NotSaved
from kit.logging.loggers import LoggerError
from kit.steps.errors import SettingError
from kit.trainer import PlanNotKept
from kit.trainer.stages import HookError

EXPLAINED = (
    SettingError, EnvironmentFault, PolicyFault, HookError, LoggerError, NotFinite, NotSaved,
    PlanNotKept,
)  # fmt: skip
"""Errors of the user's, printed without a stack trace."""


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the process with one line for the user's errors, and as :func:`terminal` does."""
    with terminal():
        try:
            yield
        except EXPLAINED as error:
            text = error.message(none="null") if isinstance(error, SettingError) else error
            print(f"\nerror: {text}", file=sys.stderr)
            raise SystemExit(1) from None
