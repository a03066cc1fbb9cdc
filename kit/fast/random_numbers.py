"""States of random number generators."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class RandomNumbers:
    """Where random number generators are: PyTorch's on all devices, Python's and NumPy's.

    Args:
        others: of which those that are generators of Python or NumPy are included.
    """

    def __init__(self, others: Sequence[Any]) -> None:
        self._cpu = torch.get_rng_state()
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if used else []
        found = [getattr(one, "bit_generator", one) for one in others if isinstance(one, _RANDOM)]
        self._on_the_host = [*_OF_MODULES, *found]
        self._states = self._host_states()

    def _host_states(self) -> list[Any]:
        return [one.__getstate__() for one in self._on_the_host]

    def drawn_on_the_host(self) -> bool:
        """Whether Python or NumPy has drawn a random number since."""
        return not _alike(self._host_states(), self._states)

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for one, state in zip(self._on_the_host, self._states):
            one.__setstate__(state)


def _alike(one: Any, other: Any) -> bool:
    """Whether two states of random number generators are equal."""
    try:
        return bool(one == other)
    except ValueError:  # arrays have no truth value
        if isinstance(one, np.ndarray):
            return np.array_equal(one, other)
        pairs = zip(one.values(), other.values()) if isinstance(one, dict) else zip(one, other)
        return all(_alike(*pair) for pair in pairs)


_RANDOM = (random.Random, np.random.Generator, np.random.RandomState)
_OF_MODULES: list[Any] = [random._inst, np.random.mtrand._rand]  # type: ignore[attr-defined]
"""Those behind the functions of the modules."""
