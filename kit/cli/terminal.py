"""Handling of encoding errors, closed pipes, Ctrl-C and system limits in commands."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator

_CLOSED_PIPE, _INTERRUPTED = 128 + 13, 128 + 2
"""Exit codes of commands that SIGPIPE or SIGINT ended."""
_MORE_FILES = "raise the limit of open files (ulimit -n 4096), or use fewer processes"
_DISK = "free some space on the disk or in shared memory (df -h /dev/shm)"
_MEMORY = "use smaller settings, fewer processes, or a machine with more memory"
_LIMITS = {
    errno.EMFILE: _MORE_FILES, errno.ENFILE: _MORE_FILES, errno.ENOSPC: _DISK, errno.EDQUOT: _DISK,
    errno.EFBIG: _DISK, errno.ENOMEM: _MEMORY,
}  # fmt: skip
"""Advice, keyed by error number."""
_NO_MEMORY = re.compile(r"can't allocate memory|CUDA out of memory|Storage size calculation over")
"""PyTorch's messages for tensors that do not fit in memory."""


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Replace characters that the terminal cannot encode, and exit without a stack trace.

    A command exits silently if its output is closed (``| head``). It prints one word after Ctrl-C,
    and one line if the system runs out of disk space, memory or open files.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # python ... >&-
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        if hasattr(stream := getattr(sys, name), "reconfigure"):
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
        # Python flushes the remaining output once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(_CLOSED_PIPE) from None
    except Exception as error:
        if (limit := limit_of_system(error)) is None:
            raise
        print(f"\nerror: {limit}", file=sys.stderr)
        raise SystemExit(1) from None


def limit_of_system(error: BaseException | None) -> str | None:
    """Return a message if a system limit caused an error, else ``None``."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
            return f"{' '.join(str(error).split())}: {_MEMORY}"
        for number, advice in _LIMITS.items():
            name = os.strerror(number)
            # PyTorch reports only text: "unable to open shared memory: Too many open files (24)".
            if getattr(error, "errno", None) == number or f"{name} ({number})" in str(error):
                return f"{name}: {advice}"
        error = error.__cause__ or error.__context__
    return None
