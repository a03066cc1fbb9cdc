"""Handing the turn to another process and back, quicker than a pipe can. Imports no torch."""

from __future__ import annotations

import os
import platform
import time
from multiprocessing.connection import Connection
from typing import Any

WAKE = b"\0"
"""Message that says nothing but: look at the counts."""
_LOOKS = 64, 8192
"""How often a side looks at the counts before it sleeps, at least and at most."""
_SHORT = 0.001
"""Seconds of waiting up to which it pays to look: about as long as looking most often takes."""
_SECONDS = 0.01
"""How long a side sleeps before it looks again, should nobody wake it."""

_ASKED, _ANSWERED, _ASKER_SLEEPS, _ANSWERER_SLEEPS, _SAID = 0, 8, 16, 24, 32
SIZE = 40
"""Whole numbers of 8 bytes in the shared memory; each on a cache line of its own."""


def can_look(processes: int) -> bool:
    """Return whether sides may look instead of sleep.

    They need a core each; and a processor that shows others what is written in the order in which
    it was written.

    Args:
        processes: that answer; the one that asks comes on top.
    """
    ordered = platform.machine().lower() in ("x86_64", "amd64")
    return ordered and processes < len(os.sched_getaffinity(0))


class Turns:
    """One side of an exchange of turns: counts in shared memory, and a pipe to sleep on.

    Waking a process that sleeps takes longer than many environments need for a step, so each side
    first looks at the counts for a while; ever shorter where turns are long all the same. What was
    written to shared memory before a turn is handed over can be read by the other side afterwards.

    Args:
        memory: shared by both sides: ``SIZE`` whole numbers of 8 bytes, zeros at first.
        pipe: between them; every message but ``WAKE`` is left to its reader.
    """

    def __init__(self, memory: Any, pipe: Connection) -> None:
        self._counts = memoryview(memory).cast("B").cast("q")
        self._pipe = pipe
        self._looks = _LOOKS[1]

    def _look(self, wanted: bool) -> bool:
        """Look for a while whether all turns are answered (or not); return whether it is so."""
        counts = self._counts
        return any((counts[_ANSWERED] == counts[_ASKED]) is wanted for _ in range(self._looks))

    def _slept(self, began: float) -> None:
        """Look longer the next time if it had been worth it, shorter if not."""
        if time.perf_counter() - began < _SHORT:
            self._looks = _LOOKS[1]
        else:
            self._looks = max(self._looks // 2, _LOOKS[0])

    # ------------------------------------------------------------------ the side that asks
    def ask(self) -> None:
        """Hand the turn over."""
        counts = self._counts
        counts[_ASKED] += 1
        if counts[_ANSWERER_SLEEPS]:
            self._pipe.send_bytes(WAKE)

    def wait_for_answer(self) -> bytes:
        """Wait until the turn comes back; return what is said with it, empty if nothing is.

        Raises:
            EOFError: if the other side is gone.
        """
        counts, message, began = self._counts, b"", time.perf_counter()
        if self._look(True):
            return receive(self._pipe) if counts[_SAID] else message
        counts[_ASKER_SLEEPS] = 1
        try:
            while counts[_ANSWERED] != counts[_ASKED]:
                if self._pipe.poll(_SECONDS):
                    received = self._pipe.recv_bytes()
                    message = message if received == WAKE else received
        finally:
            counts[_ASKER_SLEEPS] = 0
            self._slept(began)
        return receive(self._pipe) if counts[_SAID] and not message else message

    # ------------------------------------------------------------------ the side that answers
    def wait_to_be_asked(self) -> bytes:
        """Wait for the turn, or for a message; return the message, empty if it is the turn.

        Raises:
            EOFError: if the other side is gone.
        """
        counts, began = self._counts, time.perf_counter()
        if self._look(False):
            return b""
        counts[_ANSWERER_SLEEPS] = 1
        try:
            while counts[_ASKED] == counts[_ANSWERED]:
                if self._pipe.poll(_SECONDS):
                    message = self._pipe.recv_bytes()
                    if message != WAKE:
                        return message
        finally:
            counts[_ANSWERER_SLEEPS] = 0
            self._slept(began)
        return b""

    def answer(self, message: bytes) -> None:
        """Hand the turn back, with a message if there is something to say."""
        counts = self._counts
        counts[_SAID] = bool(message)
        if message:
            self._pipe.send_bytes(message)
        counts[_ANSWERED] = counts[_ASKED]
        if counts[_ASKER_SLEEPS]:
            self._pipe.send_bytes(WAKE)


def receive(pipe: Connection) -> bytes:
    """Return the next message that says something.

    Raises:
        EOFError: if the other side is gone.
    """
    while True:
        message = pipe.recv_bytes()
        if message != WAKE:
            return message
