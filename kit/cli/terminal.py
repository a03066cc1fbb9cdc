"""Terminals of few characters, and closed pipes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_CLOSED_PIPE = 128 + 13
"""exit code of commands that SIGPIPE has ended."""


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Print ``?`` for what the terminal cannot show; end in silence once the pipe is closed."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python writes what is left once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(_CLOSED_PIPE) from None
