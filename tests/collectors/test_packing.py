"""Packed batches are joined bit for bit, and next observations are stored once."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from kit.collectors.packing import join, pack


def batch(envs=2, steps=4, ends=(), **entries):
    """A batch whose observations count, with episodes that end at the given places."""
    shown = torch.arange(float(envs * steps)).reshape(envs, steps, 1)
    following = shown + 1
    done = torch.zeros(envs, steps, 1, dtype=torch.bool)
    for env, step in ends:
        done[env, step], following[env, step] = True, -1.0
    made = {
        "observation": shown,
        "collector": {"traj_ids": torch.zeros(envs, steps, dtype=torch.int64)},
        "next": {"observation": following, "done": done, "reward": torch.ones(envs, steps, 1)},
    }
    return TensorDict(made | entries, [envs, steps])


def assert_same(found, expected):
    for key in expected.keys(True, True):
        bits = [value[key].reshape(-1).view(torch.uint8) for value in (found, expected)]
        assert found[key].shape == expected[key].shape, key
        assert torch.equal(*bits), key


@pytest.mark.parametrize("ends", [(), ((0, 1), (1, 3)), ((0, 0), (0, 1), (0, 2), (0, 3))])
def test_packed_batch_is_restored(ends):
    one = batch(ends=ends)
    assert_same(join([pack(one)], [0]), one)


def test_next_observation_is_stored_only_where_episodes_end():
    sizes = [len(pack(batch(8, 100, ends))[0]) for ends in ((), ((0, 5), (1, 5), (2, 5), (3, 5)))]
    size = 8 * 100 * 4
    assert sizes[0] < 2 * size + 8 * 100 * (8 + 1) + 200  # observation and reward, ids and flags
    assert sizes[1] == sizes[0] + 4 * 4


def test_next_observation_that_differs_is_stored_completely():
    one = batch()
    one["next", "observation"][0, 1] = 50.0
    assert_same(join([pack(one)], [0]), one)
    zero = batch(1, 2)
    zero["observation"][0, 1], zero["next", "observation"][0, 0] = 0.0, -0.0
    assert_same(join([pack(zero)], [0]), zero)


def test_layout_repeats_although_ends_differ():
    assert pack(batch())[1] == pack(batch(ends=((0, 1),)))[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_entries_of_other_types_are_restored(dtype):
    one = batch(extra=torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]).to(dtype))
    found = join([pack(one)], [0])
    assert found["extra"].dtype == dtype
    assert_same(found, one)


def test_single_steps_are_restored():
    one = batch(3, 1, ends=((1, 0),))
    expected = torch.cat([one, one])
    expected["collector", "traj_ids"] = torch.tensor([0] * 3 + [1] * 3).unsqueeze(-1)
    assert_same(join([pack(one), pack(one)], [0, 0]), expected)


def test_padded_episodes_are_padded_to_longest():
    def padded(length, number):
        made = batch(1, length)
        made["collector", "mask"] = torch.ones(1, length, dtype=torch.bool)
        made["collector", "traj_ids"] += number
        return made

    joined = join([pack(padded(2, 5)), pack(padded(4, 7))], [0, 10])
    assert joined.shape == (2, 4)
    assert joined["collector", "mask"].tolist() == [[True, True, False, False], [True] * 4]
    assert joined["collector", "traj_ids"].tolist() == [[10] * 4, [35] * 4]
    assert joined["observation"][0, 2:].abs().sum() == 0
