"""Decide when tracing a function is worth its cost."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

PATIENCE = 20
MOST_GRAPHS = 32
FIRST_CALLS = 3
FIRST_CHECK, LAST_CHECK = 64, 2_048


class TracingPolicy:
    """Decides when a traced function is traced, verified again, or run eagerly.

    A trace costs about as much as ten eager calls; a verification costs as much as ten replays of a
    small network. Rules:

    1. The first input signature is traced at its first call. Another signature is traced at its
    second call, or with n traced graphs at call n // 2 if that is later. The latest 32 graphs are
    kept; each has its own memory.
    2. When 20 graphs have signatures that never recurred, they are dropped. If no other graph is
    left (as with whole episodes), the function runs eagerly from then on.
    3. If all graphs were dropped 20 times in a row before any graph had 20 replays, the function
    runs eagerly from then on.
    4. If 3 traces in a row changed the function's dependencies, it runs eagerly from then on. Fewer
    are allowed, because a first call may create objects that later calls use.
    5. A verified graph is verified again after 64, 256, 1,024 and then every 2,048 calls, which
    costs about half a percent.

    If matrix products may round differently, every signature is traced at its first call. Once a
    graph rounds differently, rules 2 to 4 no longer stop tracing, because a resumed run must round
    in the same way.

    Args:
        trace_always: Whether matrix products may round differently.
        verify_again: Whether rule 5 applies.

    Attributes:
        never_stop: Whether a graph rounds differently.
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
        """Count an eager call with a signature; return whether the signature is worth tracing.

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
        """Record that graphs were dropped, given their numbers of replays."""
        if replays:
            self._wasted = self._wasted + 1 if max(replays) < PATIENCE else 0
        self._eager_calls.clear()

    @property
    def wastes_traces(self) -> bool:
        """Whether rule 3 stops tracing."""
        return self._wasted >= PATIENCE and not self.never_stop

    def count_trace(self, *, changed_itself: bool) -> bool:
        """Count a trace; return whether rule 4 stops tracing."""
        self._own_changes = self._own_changes + 1 if changed_itself else 0
        return self._own_changes >= FIRST_CALLS and not self.never_stop

    @property
    def check_is_due(self) -> bool:
        """Whether the next call with all inputs is verified again."""
        return self.unchecked >= self._check_after

    def count_check(self) -> None:
        """Record that a verified graph has been verified again."""
        self.unchecked, self._check_after = 0, min(4 * self._check_after, LAST_CHECK)
