"""Traced graphs and their executors."""

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
_GLOBAL_RNGS: list[Any] = [random._inst, np.random.mtrand._rand]  # type: ignore[attr-defined]
"""Global random number generators of Python and NumPy."""


class Program:
    """A traced graph for one input signature, and its executor.

    Args:
        recording: Recording of a call with this input signature.
        places: Positions of this graph's inputs in the combined inputs of all graphs.
        outputs: Names of the outputs.
        executor: Name of the requested executor.
        fast_products: Whether large matrix products may use oneDNN, which rounds differently.
        keeps_memory: Whether results may be written to preallocated memory.

    Attributes:
        verified: Whether calls replay the graph instead of running the function. Otherwise, the
            next call runs both and compares the results.
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
        if compiles:  # inductor rounds and samples differently, so the eager graph is verified
            self._run, self.executor = executed(recording, executor)
            self.rounds_otherwise = True
        self._in_own_memory: Run | None = None
        on_host = all(tensor.is_cpu for tensor in (*recording.inputs, *recording.constants))
        if on_host and self.executor in ("interpreter", "python"):
            self._make_faster(fast_products, keeps_memory)

    def _make_faster(self, fast_products: bool, keeps_memory: bool) -> None:
        """Use faster matrix products, and prepare execution in preallocated memory."""
        faster = copy.copy(self.recording)
        graph = with_fast_products(faster.graph) if fast_products else None
        if graph is not None:
            faster.graph, self.rounds_otherwise = graph, True
            self._run, _ = executed(faster, self.executor)
        found = None
        if keeps_memory:
            with contextlib.suppress(RuntimeError):  # raised if a view is impossible
                found = with_own_memory(faster.graph, faster.constants)
        if found is not None:
            faster.graph, faster.constants = found
            run, executor = executed(faster)
            self._in_own_memory = run if executor == self.executor else None

    def verify_memory(self, outcome: Callable[[Run], Any]) -> None:
        """Switch to preallocated memory if the results are bitwise equal.

        Args:
            outcome: Function that runs an executor and returns its outputs and the values of the
                tensors that it modifies in place.
        """
        if self._in_own_memory is None:
            return
        results, changed = outcome(self._run)
        with contextlib.suppress(RuntimeError):  # raised if an operation cannot write to the memory
            others, also_changed = outcome(self._in_own_memory)
            if all(map(equal, [*results, *changed], [*others, *also_changed])):
                self._run = self._in_own_memory

    def select_inputs(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Select this graph's inputs from the combined inputs of all graphs."""
        return [values[place] for place in self._places]

    def __call__(self, values: Sequence[Tensor]) -> Outputs:
        """Replay the graph."""
        self.replays += 1
        return dict(zip(self._outputs, self._run(*self.select_inputs(values))))

    def as_recorded(self, values: Sequence[Tensor]) -> Outputs:
        """Replay the graph exactly as traced, without faster products or compilation."""
        return dict(zip(self._outputs, self._as_recorded(*self.select_inputs(values))))


def equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, treating NaN as equal to NaN."""
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


class RNGState:
    """RNG states of PyTorch (on all devices), Python and NumPy.

    Args:
        others: Objects that may include further Python or NumPy generators.
    """

    def __init__(self, others: Sequence[Any]) -> None:
        self._cpu = torch.get_rng_state()
        has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if has_cuda else []
        found = [getattr(one, "bit_generator", one) for one in others if isinstance(one, _RANDOM)]
        self._host_generators = [*_GLOBAL_RNGS, *found]
        self._states = self._host_states()

    def _host_states(self) -> list[bytes]:
        return [pickle.dumps(one.__getstate__()) for one in self._host_generators]

    def drawn_on_the_host(self) -> bool:
        """Return whether Python or NumPy has drawn random numbers since the states were saved."""
        return self._host_states() != self._states

    def restore(self) -> None:
        """Restore the RNG states."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for one, state in zip(self._host_generators, self._states):
            one.__setstate__(pickle.loads(state))
