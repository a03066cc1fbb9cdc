"""State that a run shares with its process: global random numbers, PyTorch's threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torchrl.checkpoint import GlobalRNGState

from kit.steps import SettingError

Method = TypeVar("Method", bound=Callable[..., Any])


class IsolatedRNG:
    """The global random numbers of Python, NumPy and PyTorch, as one run draws from them.

    Within ``with numbers:`` the process draws from them, and from its own afterwards. They
    begin where those of the process stand when this is made. TorchRL's ``GlobalRNGState`` reads and
    writes them; this makes runs in one process independent of each other.

    Attributes:
        threads: of PyTorch within; ``None``: as they are.
    """

    def __init__(self) -> None:
        self.threads: int | None = None
        self._state, self._outside = GlobalRNGState().state_dict(), {"threads": 0}
        self._depth = 0

    def __enter__(self) -> None:
        """Let the process draw from these.

        Raises:
            SettingError: if the process draws from those of a run in another thread.
        """
        if self._depth == 0:
            _hold()
        self._depth += 1
        if self._depth == 1:
            self._outside = {**GlobalRNGState().state_dict(), "threads": torch.get_num_threads()}
            GlobalRNGState().load_state_dict(self._state)
            if self.threads is not None:
                torch.set_num_threads(self.threads)

    def __exit__(self, *error: object) -> None:
        """Keep these, and restore those of the process."""
        self._depth -= 1
        if self._depth == 0:
            self._state = GlobalRNGState().state_dict()
            GlobalRNGState().load_state_dict(self._outside)
            if self.threads is not None:
                torch.set_num_threads(self._outside["threads"])
            _HOLDERS.remove(threading.get_ident())

    def restore_global(self) -> None:
        """Let the process continue from these."""
        GlobalRNGState().load_state_dict(self._state)

    def state_dict(self) -> dict[str, Any]:
        """Their present state."""
        return dict(GlobalRNGState().state_dict() if self._depth else self._state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`."""
        self._state = dict(state_dict)
        if self._depth:
            GlobalRNGState().load_state_dict(state_dict)


_HOLDERS: list[int] = []
"""Threads of the runs from whose numbers the process draws now: one, whose runs may be nested."""


def _hold() -> None:
    own = threading.get_ident()
    _HOLDERS.append(own)  # first: of two threads that look at the same time, both are refused
    if {*_HOLDERS} != {own}:
        _HOLDERS.remove(own)
        why = "would share the random numbers of the process with the run of another thread"
        works = "run one after the other, or each in a process of its own"
        raise SettingError("trainer", "Trainer", why, works)


def isolated_rng(method: Method) -> Method:
    """Let a method of a trainer draw from the numbers of its run."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.numbers:
            return method(self, *args, **kwargs)

    return cast("Method", call)
