"""Process-wide state that a run isolates: the global RNG state and PyTorch's thread count."""

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
    """Context manager that isolates a run's RNG state for Python, NumPy and PyTorch.

    Inside the ``with`` block, the process uses the run's RNG state. On exit, the previous RNG state
    is restored. Therefore, runs in one process do not affect each other. The run's RNG state starts
    as a copy of the global state. TorchRL's ``GlobalRNGState`` reads and sets the RNG states.

    Attributes:
        threads: number of PyTorch threads inside the context. If ``None``, it is not changed.
    """

    def __init__(self) -> None:
        self.threads: int | None = None
        self._state, self._outside = GlobalRNGState().state_dict(), {"threads": 0}
        self._depth = 0

    def __enter__(self) -> None:
        """Install the run's RNG state in the process.

        Raises:
            SettingError: if a run in another thread has installed its RNG state.
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
        """Save the run's RNG state, and restore the previous RNG state of the process."""
        self._depth -= 1
        if self._depth == 0:
            self._state = GlobalRNGState().state_dict()
            GlobalRNGState().load_state_dict(self._outside)
            if self.threads is not None:
                torch.set_num_threads(self._outside["threads"])
            _HOLDERS.remove(threading.get_ident())

    def restore_global(self) -> None:
        """Install the run's RNG state in the process permanently."""
        GlobalRNGState().load_state_dict(self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return the current RNG state of the run."""
        return dict(GlobalRNGState().state_dict() if self._depth else self._state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._state = dict(state_dict)
        if self._depth:
            GlobalRNGState().load_state_dict(state_dict)


_HOLDERS: list[int] = []
"""Thread IDs of the runs whose RNG state is installed. Nested runs share a thread."""


def _hold() -> None:
    thread = threading.get_ident()
    _HOLDERS.append(thread)  # add before checking, so that concurrent threads both raise
    if {*_HOLDERS} != {thread}:
        _HOLDERS.remove(thread)
        reason = "would share the global RNG state with a run in another thread"
        hint = "run the trainers one after the other, or in separate processes"
        raise SettingError("trainer", "Trainer", reason, hint)


def isolated_rng(method: Method) -> Method:
    """Decorate a trainer method so that it uses the run's RNG state."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.numbers:
            return method(self, *args, **kwargs)

    return cast("Method", call)
