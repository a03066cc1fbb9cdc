"""Terminals of few characters, and closed pipes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_CLOSED_PIPE, _INTERRUPTED = 128 + 13, 128 + 2
"""Exit codes of commands that SIGPIPE and SIGINT have ended."""


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Print ``?`` for what the terminal cannot show; end without a stack trace.

    In silence once the pipe is closed (``| head``), with a word after Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        raise SystemExit(_INTERRUPTED) from None
    except BrokenPipeError:
        # Python writes what is left once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(_CLOSED_PIPE) from None
