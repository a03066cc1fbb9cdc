"""Policy that decides when tracing a function is worth its cost."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

PATIENCE = 20
MOST_GRAPHS = 32
FIRST_CALLS = 3
FIRST_CHECK, LAST_CHECK = 64, 2_048


class TracingPolicy:
    """Decides when a function is traced, verified again or run eagerly.

    Tracing costs about as much as ten eager calls. For a small network, a verification costs as
    much as ten replays. Rules:

    1. The first input signature is traced at its first call. Any other signature is traced at its
    k-th call, where k is max(2, n // 2) and n is the number of traced graphs. The latest 32 graphs
    are kept. Each graph has its own memory.
    2. When 20 graphs have signatures that never recurred, these graphs are dropped. If no graph is
    left, as with episodes of varying length, the function runs eagerly from then on.
    3. If all graphs were dropped 20 times in a row before any graph was replayed 20 times, the
    function runs eagerly from then on.
    4. If tracing changed the function's dependencies 3 times in a row, the function runs eagerly
    from then on. Fewer changes are allowed, because a first call may create objects for later use.
    5. A verified graph is verified again after 64, 256 and 1,024 calls, and then after every 2,048
    calls. This costs about 0.5 % of the time.

    If matrix products may round differently, every signature is traced at its first call. Once a
    graph rounds differently, rules 2 to 4 no longer stop tracing, because a resumed run must round
    in the same way.

    Args:
        trace_always: Whether every signature is traced at its first call.
        verify_again: Whether verified graphs are verified again (rule 5).

    Attributes:
        never_stop: Whether tracing never stops, because a graph rounds differently.
        unchecked: Number of calls since the last verification.
    """

    def __init__(self, *, trace_always: bool = False, verify_again: bool = True) -> None:
        self.never_stop = False
        self.unchecked = 0
        self._trace_always = trace_always
        self._check_after = FIRST_CHECK if verify_again else math.inf
        self._eager_calls: Counter[Any] = Counter()
        self._wasted = self._own_changes = 0

    def traces(self, signature: Any, graphs: int) -> bool:
        """Count an eager call and return whether its input signature is worth tracing.

        Args:
            signature: Signature of the call's inputs.
            graphs: Number of graphs with other signatures.
        """
        if self._trace_always or not graphs:
            return True
        self._eager_calls[signature] += 1
        if self._eager_calls[signature] < max(2, graphs // 2):
            return False
        del self._eager_calls[signature]
        return True

    def count_dropped(self, replays: list[int]) -> None:
        """Count dropped graphs. ``replays`` has the number of replays of each graph."""
        if replays:
            self._wasted = self._wasted + 1 if max(replays) < PATIENCE else 0
        self._eager_calls.clear()

    @property
    def wastes_traces(self) -> bool:
        """Whether graphs are dropped too often to be worth tracing (rule 3)."""
        return self._wasted >= PATIENCE and not self.never_stop

    def count_trace(self, *, changed_itself: bool) -> bool:
        """Count a trace and return whether the function changes itself too often (rule 4)."""
        self._own_changes = self._own_changes + 1 if changed_itself else 0
        return self._own_changes >= FIRST_CALLS and not self.never_stop

    @property
    def check_is_due(self) -> bool:
        """Whether the next call that passes all inputs will verify its graph again."""
        return self.unchecked >= self._check_after

    def count_check(self) -> None:
        """Record that a verified graph has been verified again."""
        self.unchecked, self._check_after = 0, min(4 * self._check_after, LAST_CHECK)
