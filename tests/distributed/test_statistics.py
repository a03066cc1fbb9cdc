"""Running statistics of several ranks count each value once."""

from __future__ import annotations

import torch

from kit.envs.normalize import RunningMeanStd, merge_gains


def initial(*shape: int) -> RunningMeanStd:
    return RunningMeanStd(
        torch.zeros(shape, dtype=torch.float64),
        torch.ones(shape, dtype=torch.float64),
        torch.tensor(1e-4, dtype=torch.float64),
    )


def taught(moments: RunningMeanStd, values: torch.Tensor) -> RunningMeanStd:
    count = torch.tensor(float(len(values)), dtype=torch.float64)
    return moments.merged(values.mean(0), values.var(0, correction=0), count)


def test_merged_count_is_exact_after_thousand_merges():
    torch.manual_seed(0)
    shared, seen = initial(3), []
    for iteration in range(1_000):
        batches = [torch.randn(5 + rank + iteration % 3, 3).double() * 4 + 7 for rank in range(3)]
        seen += batches
        shared = merge_gains(shared, [taught(shared, batch) for batch in batches])
        if iteration == 500:  # as in a checkpoint
            shared = RunningMeanStd(
                *(torch.tensor(value.tolist(), dtype=torch.float64) for value in shared)
            )
    values = torch.cat(seen)
    assert (shared.count - 1e-4).round().item() == len(values)
    assert abs(shared.count.item() - len(values) - 1e-4) < 1e-7
    torch.testing.assert_close(shared.mean, values.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(shared.var, values.var(0, correction=0), rtol=1e-6, atol=0)


def test_rank_that_learned_nothing_changes_nothing():
    shared = taught(initial(2), torch.randn(10, 2).double())
    merged = merge_gains(shared, [shared, taught(shared, torch.ones(4, 2).double()), shared])
    assert merged.count.item() == shared.count.item() + 4
