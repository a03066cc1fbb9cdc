"""Running statistics of several ranks count each value once."""

from __future__ import annotations

from typing import Any

import numpy as np

from kit.envs.normalize import RunningMeanStd, merge_gains


def initial(*shape: int) -> RunningMeanStd:
    return RunningMeanStd(np.zeros(shape), np.ones(shape), np.array(1e-4))


def taught(moments: RunningMeanStd, values: Any) -> RunningMeanStd:
    return moments.merged(values.mean(0), values.var(0), len(values))


def test_merged_count_is_exact_after_thousand_merges():
    rng = np.random.default_rng(0)
    shared, seen = initial(3), []
    for iteration in range(1_000):
        batches = [rng.normal(7, 4, (5 + rank + iteration % 3, 3)) for rank in range(3)]
        seen += batches
        shared = merge_gains(shared, [taught(shared, batch) for batch in batches])
        if iteration == 500:  # as in a checkpoint
            shared = RunningMeanStd(*(np.array(value.tolist()) for value in shared))
    values = np.concatenate(seen)
    assert round(shared.count.item() - 1e-4) == len(values)
    assert abs(shared.count.item() - len(values) - 1e-4) < 1e-7
    np.testing.assert_allclose(shared.mean, values.mean(0), rtol=1e-6)
    np.testing.assert_allclose(shared.var, values.var(0), rtol=1e-6)


def test_rank_that_learned_nothing_changes_nothing():
    shared = taught(initial(2), np.arange(20.0).reshape(10, 2))
    merged = merge_gains(shared, [shared, taught(shared, np.ones((4, 2))), shared])
    assert merged.count.item() == shared.count.item() + 4
