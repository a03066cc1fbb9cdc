"""Waiting for what another process or thread does: for the event, never for a length of time."""

from __future__ import annotations

import time
from collections.abc import Callable

LONG = 600.0
"""Seconds after which nothing will come any more: a test that would hang fails instead."""


def wait_until(happened: Callable[[], object], what: str) -> None:
    """Wait until ``happened`` returns something true.

    Args:
        happened: looks whether it is so.
        what: the event, for the message of a test that waited in vain.
    """
    end = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.01)
