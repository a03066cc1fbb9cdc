"""How a batch is cut into minibatches, and what becomes of the rows left over."""

from __future__ import annotations

from collections import Counter
from itertools import chain, cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.steps.minibatches import epoch_sizes, permutation
from tests.steps.step_plans import cut

_rows, _size = st.integers(0, 60), st.integers(1, 70)
_last = st.sampled_from(["smaller", "merge", "drop"])


@pytest.mark.parametrize(
    ("last", "sizes"),
    [("smaller", [20, 20, 20, 4]), ("merge", [20, 20, 24]), ("drop", [20, 20, 20])],
)
def test_epoch_sizes_apply_rule_for_leftover_rows(last, sizes):
    assert epoch_sizes(64, 20, last) == sizes


@given(_rows, _size, _last, st.none() | st.integers(1, 5))
def test_epoch_sizes_match_cut_of_rows(rows, size, last, limit):
    sizes = [len(minibatch) for minibatch in cut(rows, size, last)]
    assert epoch_sizes(rows, size, last) == sizes
    one = permutation(rows, size, last)
    assert one.minibatches == len(sizes)
    assert one.rows(len(sizes[:limit])) == sum(sizes[:limit])


@given(_rows, _size, st.sampled_from(["carry", "smaller", "drop"]), _rows, _rows)
def test_endless_sampler_cycles_through_permutations(rows, size, last, drawn, wanted):
    one = [len(m) for m in cut(rows, size, "smaller" if last == "carry" else last)]
    endless = list(islice(chain.from_iterable(cycle([one])), drawn + wanted)) if one else []
    sampler = permutation(rows, size, last)
    assert sampler.sizes(drawn, wanted) == endless[drawn:]
    assert sampler.rows(drawn + wanted) == sum(endless)
    assert +sampler.counts(drawn, wanted) == Counter(endless[drawn:])
