"""Sequences are what one environment experienced, in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from kit.buffers import ReplayMinibatches, SequenceSampler, make_replay_buffer
from tests.errors import raises_setting
from tests.tiny import off_policy_plan


def batch_of(num_envs: int, steps: int, start: int) -> TensorDict:
    """Transitions that know their environment and time; every fifth step ends an episode."""
    time = (torch.arange(steps) + start).expand(num_envs, steps)
    env = torch.arange(num_envs).unsqueeze(-1).expand(num_envs, steps)
    done = (time % 5 == 4).unsqueeze(-1)
    return TensorDict({"time": time, "env": env, "next": {"done": done}}, [num_envs, steps])


@given(
    st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 6), st.integers(24, 60), st.integers(0, 1_000),
)  # fmt: skip
@settings(max_examples=60)
def test_sequences_stay_in_one_env_and_behind_write_head(num_envs, batches, length, size, seed):
    torch.manual_seed(seed)
    replay, time = make_replay_buffer(size, 4, sequence_length=length), 0
    for steps in batches:
        replay.extend(batch_of(num_envs, steps, time))
        time += steps
    if len(replay.buffer) < (length - 1) * num_envs + 1:
        return
    plan = off_policy_plan(sequence_length=length, minibatch_size=4)
    for (minibatch,) in replay.epoch(plan, 5):
        assert minibatch.shape == (4, length)
        assert (minibatch["env"] == minibatch["env"][:, :1]).all()
        assert (minibatch["time"].diff(dim=1) == 1).all()
        first = minibatch["time"] % 5 == 0
        first[:, 0] = True
        assert torch.equal(minibatch["is_init"], first.unsqueeze(-1))


def test_sequences_are_drawn_uniformly():
    torch.manual_seed(0)
    replay = make_replay_buffer(3_000, 1_000, sequence_length=3)
    replay.extend(batch_of(2, 5, 0))
    plan = off_policy_plan(sequence_length=3, minibatch_size=1_000)
    ((minibatch,),) = replay.epoch(plan, 1)
    drawn = torch.bincount(minibatch["time"][:, 0] * 2 + minibatch["env"][:, 0])
    assert len(drawn) == 6
    assert drawn.min() > 120


def test_sampling_raises_before_first_full_sequence():
    replay = make_replay_buffer(50, 2, sequence_length=4)
    replay.extend(batch_of(2, 3, 0))
    plan = off_policy_plan(sequence_length=4, minibatch_size=2)
    with raises_setting("learning_starts"):
        next(replay.epoch(plan, 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_step": 3}, "n_step"),
        ({"sampler": "own"}, "sampler"),
        ({"sequence_length": 0}, "sequence_length"),
    ],
)
def test_replay_buffer_rejects_incompatible_sequence_settings(settings, message):
    from torchrl.data.replay_buffers.samplers import RandomSampler

    if "sampler" in settings:
        settings = {"sampler": RandomSampler()}
    with raises_setting(message):
        make_replay_buffer(**{"size": 50, "minibatch_size": 4, "sequence_length": 4, **settings})


def test_extend_accepts_padded_episodes_only_with_length_one():
    episodes = batch_of(2, 5, 0)
    episodes["collector", "mask"] = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    replay = make_replay_buffer(50, 4, sequence_length=1)
    replay.extend(episodes)
    assert len(replay.buffer) == 8
    plan = off_policy_plan(sequence_length=1, minibatch_size=4)
    ((minibatch,),) = replay.epoch(plan, 1)
    assert minibatch.shape == minibatch["is_init"].squeeze(-1).shape == (4, 1)
    assert minibatch["is_init"].all()
    with raises_setting("buffer"):
        make_replay_buffer(50, 4, sequence_length=2).extend(episodes)


def test_num_envs_can_change_only_when_buffer_is_empty():
    replay = make_replay_buffer(50, 4, sequence_length=2)
    replay.extend(batch_of(2, 5, 0))
    with raises_setting("num_envs") as refused:
        replay.extend(batch_of(3, 5, 0))
    assert refused.value.works == [2]
    replay.buffer.empty()
    replay.extend(batch_of(3, 5, 0))
    assert len(replay.buffer) == 15


def test_sequence_sampler_dumps_and_loads(tmp_path):
    replay, again = (make_replay_buffer(8, 4, sequence_length=2).buffer for _ in range(2))
    replay.extend(batch_of(1, 11, 0)[0])
    replay.dumps(tmp_path)
    again.loads(tmp_path)
    drawn = []
    for buffer in (replay, again):
        torch.manual_seed(0)
        drawn.append(buffer.sample()["time"])
    assert torch.equal(*drawn)


def test_buffer_is_allocated_on_first_use():
    assert len(make_replay_buffer(10**15, 4).buffer) == 0


def test_sequences_in_shared_storage_do_not_cross_write_head():
    torch.manual_seed(0)
    storage = LazyTensorStorage(30)
    writes = ReplayMinibatches(TensorDictReplayBuffer(storage=storage, batch_size=4))
    reads = TensorDictReplayBuffer(storage=storage, sampler=SequenceSampler(4), batch_size=16)
    for start in range(0, 72, 8):
        writes.extend(batch_of(1, 8, start))
        if len(storage) >= 4:
            time = reads.sample()["time"].reshape(-1, 4)
            assert (time.diff(dim=1) == 1).all()
