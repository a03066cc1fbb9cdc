"""Graphs that were recorded, and what executes them."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kit.fast.executors import Run, executed
from kit.fast.memory import with_own_memory
from kit.fast.products import with_fast_products
from kit.fast.trace import Recording

Key = Any
Outputs = Mapping[Key, Tensor]

_RANDOM = (random.Random, np.random.Generator, np.random.RandomState)
_OF_MODULES: list[Any] = [random._inst, np.random.mtrand._rand]  # type: ignore[attr-defined]
"""Generators behind the functions of Python's and NumPy's modules."""


class Program:
    """The graph of one input signature, with what executes it.

    Args:
        recording: of a call with inputs of the signature.
        places: positions of its inputs among those that any program reads.
        outputs: names of its outputs.
        executor: that was asked for.
        fast_products: whether large matrix products may be rounded otherwise.
        keeps_memory: whether results may stay in memory of the program's own.

    Attributes:
        verified: whether it is replayed in place of the function. Otherwise the next call runs
            both and compares them.
    """

    def __init__(
        self,
        recording: Recording,
        places: list[int],
        outputs: list[Key],
        executor: str,
        fast_products: bool,
        keeps_memory: bool,
    ) -> None:
        self.recording = recording
        self.verified = False
        self.rounds_otherwise = False
        self.replays = 0
        self.inputs_changed: list[Key] = []
        self._places, self._outputs = places, outputs
        self._as_recorded: Run
        compiles = executor == "inductor"
        self._as_recorded, self.executor = executed(recording, "python" if compiles else executor)
        self._run = self._as_recorded
        if compiles:  # verified as it was recorded: what is compiled rounds and draws otherwise
            self._run, self.executor = executed(recording, executor)
            self.rounds_otherwise = True
        self._in_own_memory: Run | None = None
        on_host = all(tensor.is_cpu for tensor in (*recording.inputs, *recording.constants))
        if on_host and self.executor in ("interpreter", "python"):
            self._make_faster(fast_products, keeps_memory)

    def _make_faster(self, fast_products: bool, keeps_memory: bool) -> None:
        """Use faster products; prepare a program that keeps its memory."""
        faster = copy.copy(self.recording)
        graph = with_fast_products(faster.graph) if fast_products else None
        if graph is not None:
            faster.graph, self.rounds_otherwise = graph, True
            self._run, _ = executed(faster, self.executor)
        found = None
        if keeps_memory:
            with contextlib.suppress(RuntimeError):  # a view that no memory of its own has
                found = with_own_memory(faster.graph, faster.constants)
        if found is not None:
            faster.graph, faster.constants = found
            run, executor = executed(faster)
            self._in_own_memory = run if executor == self.executor else None

    def verify_memory(self, outcome: Callable[[Run], Any]) -> None:
        """Keep the memory of results if that makes no difference to them.

        Args:
            outcome: what a program returns, and the values of what it changes.
        """
        if self._in_own_memory is None:
            return
        results, changed = outcome(self._run)
        with contextlib.suppress(RuntimeError):  # an operation that does not take this memory
            others, also_changed = outcome(self._in_own_memory)
            if all(map(equal, [*results, *changed], [*others, *also_changed])):
                self._run = self._in_own_memory

    def given(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The inputs that are read, of those that any program reads."""
        return [values[place] for place in self._places]

    def __call__(self, values: Sequence[Tensor]) -> Outputs:
        """Replay the graph."""
        self.replays += 1
        return dict(zip(self._outputs, self._run(*self.given(values))))

    def as_recorded(self, values: Sequence[Tensor]) -> Outputs:
        """The outputs, products as they were recorded."""
        return dict(zip(self._outputs, self._as_recorded(*self.given(values))))


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


class RNGState:
    """States of random number generators: PyTorch's on all devices, Python's and NumPy's.

    Args:
        others: values; the generators of Python and NumPy among them are included.
    """

    def __init__(self, others: Sequence[Any]) -> None:
        self._cpu = torch.get_rng_state()
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if used else []
        found = [getattr(one, "bit_generator", one) for one in others if isinstance(one, _RANDOM)]
        self._on_the_host = [*_OF_MODULES, *found]
        self._states = self._host_states()

    def _host_states(self) -> list[bytes]:
        return [pickle.dumps(one.__getstate__()) for one in self._on_the_host]

    def drawn_on_the_host(self) -> bool:
        """Return whether Python or NumPy has drawn a random number since."""
        return self._host_states() != self._states

    def restore(self) -> None:
        """Restore the states."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for one, state in zip(self._on_the_host, self._states):
            one.__setstate__(pickle.loads(state))
