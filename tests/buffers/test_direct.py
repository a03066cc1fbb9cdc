"""Rows past TensorDict: what is stored and sampled is what TorchRL stores and samples."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.envs.transforms import RenameTransform

from kit.buffers import (
    PrioritizedSampler,
    ReplayMinibatches,
    SequenceSampler,
    direct,
    make_replay_buffer,
)
from kit.buffers.direct import FastStorageIO
from kit.buffers.writer import SliceWriter
from tests.errors import raises_setting
from tests.tiny import off_policy_plan


def batch(first, num_envs=2, steps=3):
    """Transitions that can be told apart."""
    numbers = torch.arange(first, first + num_envs * steps, dtype=torch.float32)
    numbers = numbers.reshape(num_envs, steps)
    done = (numbers % 3 == 0).unsqueeze(-1)
    following = {"observation": numbers.unsqueeze(-1) + 1, "done": done}
    return TensorDict(
        {
            "observation": numbers.unsqueeze(-1).expand(-1, -1, 2).clone(),
            "action": numbers.long(),
            ("collector", "traj_ids"): numbers.long(),
            "next": TensorDict(following, [num_envs, steps]),
        },
        [num_envs, steps],
    )


def torchrls(size, minibatch_size, sampler=None):
    """The same buffer, as TorchRL extends and samples it."""
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(size),
        writer=SliceWriter(),
        sampler=sampler,
        batch_size=minibatch_size,
    )


SAMPLERS = {
    "uniformly": lambda num_envs: RandomSampler(),
    "by priority": lambda num_envs: PrioritizedSampler(20, alpha=0.6, beta=0.4),
    "in sequences": lambda num_envs: SequenceSampler(1, num_envs),
}


@pytest.mark.parametrize("drawn", SAMPLERS)
@pytest.mark.parametrize(("num_envs", "steps"), [(1, 1), (2, 3), (4, 1)])
def test_storage_and_samples_are_bitwise_equal_to_torchrl(num_envs, steps, drawn):
    make_sampler = SAMPLERS[drawn]
    ours = make_replay_buffer(20, 8, sampler=make_sampler(num_envs))
    theirs = torchrls(20, 8, make_sampler(num_envs))
    for number in range(15):  # round the end of the storage, in one piece and in two
        new = batch(10 * number, num_envs, steps)
        revision = ours.buffer.storage._mutation_revision
        ours.extend(new.clone())
        theirs.extend(new.transpose(0, 1).reshape(-1))
        assert ours.buffer.storage._mutation_revision > revision
        assert ours.buffer.storage._last_cursor_index == theirs.storage._last_cursor_index
        torch.manual_seed(number)
        found = ours._samples(8, 1)[0]
        torch.manual_seed(number)
        wanted = theirs.sample()
        assert found.batch_size == wanted.batch_size
        assert set(found.keys(True, True)) == set(wanted.keys(True, True))
        for key in found.keys(True, True):
            assert torch.equal(found[key], wanted[key])
            assert found[key].dtype == wanted[key].dtype
        errors = torch.rand(8)
        ours.update_priority(found.set("td_error", errors))
        theirs.update_tensordict_priority(wanted.set("td_error", errors))
    assert len(ours.buffer) == len(theirs)
    for key, value in theirs.storage.get(range(len(theirs))).items(True, True):
        assert torch.equal(ours.buffer.storage.get(range(len(theirs)))[key], value)
    assert ours.buffer.writer.state_dict() == theirs.writer.state_dict()
    states = [dict(buffer.sampler.state_dict()) for buffer in (ours.buffer, theirs)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_sampling_matches_torchrl_with_torchrl_writer():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=8)
    replay = ReplayMinibatches(buffer)
    for number in range(5):
        replay.extend(batch(6 * number))
        torch.manual_seed(number)
        found = replay._samples(8, 1)[0]
        assert replay._direct.filled == len(buffer)
        torch.manual_seed(number)
        assert (found == buffer.sample()).all()


def test_td_errors_in_batch_become_initial_priorities():
    sampler = PrioritizedSampler(20, alpha=1.0, beta=0.4, eps=0.0)
    buffer = make_replay_buffer(20, 4, sampler=sampler)
    for number in range(2):
        new = batch(6 * number)
        buffer.extend(new.set("td_error", new["action"] + 1.0))
    assert sampler.state_dict()["values"].tolist() == [1, 4, 2, 5, 3, 6, 7, 10, 8, 11, 9, 12]


def test_buffers_sharing_storage_receive_new_rows():
    buffer = make_replay_buffer(20, 4)
    sampler = PrioritizedSampler(20, alpha=1.0, beta=0.4, eps=0.0)
    other = TensorDictReplayBuffer(storage=buffer.buffer.storage, sampler=sampler, batch_size=4)
    for number in range(2):
        buffer.extend(batch(6 * number))
    assert other.sampler.state_dict()["values"].tolist() == [1.0] * 12


@pytest.mark.parametrize("kind", ["uniformly", "in sequences", "observations once"])
@pytest.mark.parametrize("each", [1, 2])
def test_batched_draws_match_single_draws(kind, each, monkeypatch):
    how = {"sequence_length": 2} if kind == "in sequences" else {}
    how |= {"store_next_observation": False} if kind == "observations once" else {}
    replay = make_replay_buffer(20, 4, **how)
    for number in range(5):
        replay.extend(batch(6 * number))
    plan = off_policy_plan(
        minibatch_size=4, sequence_length=how.get("sequence_length"),
        minibatches_per_gradient_step=each,
    )  # fmt: skip
    draws: list[int] = []
    draw = FastStorageIO._drawn

    def counting(self, size, several, *others):
        draws.append(several)
        return draw(self, size, several, *others)

    monkeypatch.setattr(FastStorageIO, "_drawn", counting)
    found = {}
    for at_once in (0, 2**20):
        monkeypatch.setattr(direct, "AT_ONCE", at_once)
        torch.manual_seed(0)
        found[at_once] = [m.clone() for group in replay.epoch(plan, 7) for m in group]
    assert draws == [1] * 7 * each + [7 * each]
    assert all((one == other).all() for one, other in zip(*found.values(), strict=True))


def test_sampling_omits_unread_entries():
    found = []
    for keys in ((), ["action", ("next", "done")]):
        replay = make_replay_buffer(20, 4)
        replay.extend(batch(0))
        replay.keys_read = keys
        torch.manual_seed(0)
        found += [minibatch for [minibatch] in replay.epoch(off_policy_plan(minibatch_size=4), 1)]
    whole, part = found
    assert set(part.keys(True, True)) == {"action", ("next", "done"), "index"}
    assert all(torch.equal(part[key], whole[key]) for key in part.keys(True, True))


def test_extend_stores_current_values_of_reused_batch():
    replay, shared = make_replay_buffer(40, 4), batch(0)
    for number in range(4):
        shared.update_(batch(6 * number))
        replay.extend(shared)
        if number == 2:
            shared = shared.clone()
    stored = replay.buffer[:]["observation"].flatten().tolist()
    expected = [batch(6 * number).transpose(0, 1)["observation"].flatten() for number in range(4)]
    assert stored == torch.cat(expected).tolist()


def test_batched_draws_do_not_share_memory():
    replay = make_replay_buffer(20, 4)
    replay.extend(batch(0))
    for [minibatch] in replay.epoch(off_policy_plan(minibatch_size=4), 7):
        assert minibatch["observation"].max() >= 0
        minibatch.apply_(lambda value: value.fill_(-1) if value.is_floating_point() else value)


def test_prioritized_draws_use_latest_priorities():
    sampler = PrioritizedSampler(20, alpha=1.0, beta=0.5, eps=0.0)
    replay = make_replay_buffer(20, 4, sampler=sampler)
    replay.extend(batch(0))
    sampler.update_priority(torch.arange(6), torch.tensor([1.0, 0, 0, 0, 0, 0]))
    drawn = []
    for [minibatch] in replay.epoch(off_policy_plan(minibatch_size=4), 6):
        place = int(minibatch["index"][0])
        drawn.append(minibatch["index"].unique().tolist())
        sampler.update_priority(torch.tensor([place, (place + 1) % 6]), torch.tensor([0.0, 1.0]))
    assert drawn == [[place] for place in range(6)]


def test_stored_rows_do_not_alias_batch_or_sample():
    buffer = make_replay_buffer(20, 4)
    for _ in range(2):
        new = batch(0)
        buffer.extend(new)
        new.zero_()
    assert buffer.buffer.storage.get(range(12))["observation"].max() == 5
    buffer._samples(4, 1)[0].zero_()
    assert buffer.buffer.storage.get(range(12))["observation"].max() == 5


def test_storage_without_device_is_writable():
    storage = LazyTensorStorage(20, device="auto")  # None: batches do not say it either
    buffer = TensorDictReplayBuffer(storage=storage, writer=SliceWriter(), batch_size=4)
    replay = ReplayMinibatches(buffer)
    for number in range(2):
        replay.extend(batch(6 * number))
    assert storage[:]["action"].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.parametrize("buffer", [ReplayMinibatches(torchrls(6, 4)), make_replay_buffer(6, 4)])
def test_extend_rejects_unknown_entry(buffer):
    buffer.extend(batch(0))
    with raises_setting("entry"):
        buffer.extend(batch(6).set("mask", torch.ones(2, 3)))
    assert "mask" not in buffer.buffer.storage.get(slice(6))


@pytest.mark.parametrize("buffer", [ReplayMinibatches(torchrls(6, 4)), make_replay_buffer(6, 4)])
@pytest.mark.parametrize(
    "changed", [None, torch.full((2, 3), 0.5), torch.ones(2, 3, 1, dtype=torch.long)]
)
def test_extend_rejects_missing_or_incompatible_entry(buffer, changed):
    buffer.extend(batch(0))
    other = batch(6).exclude("action")
    with raises_setting("entry"):
        buffer.extend(other if changed is None else other.set("action", changed))


def test_extend_rejects_missing_entry_with_one_env():
    buffer = make_replay_buffer(6, 4)
    for number in range(2):
        buffer.extend(batch(3 * number, num_envs=1))
    with raises_setting("entry"):
        buffer.extend(batch(6, num_envs=1).exclude("action"))


def test_buffer_supports_size_one():
    for sampler in (None, PrioritizedSampler(1, alpha=0.6, beta=0.4)):
        buffer = make_replay_buffer(1, 4, sampler=sampler)
        for number in range(2):
            buffer.extend(batch(number, num_envs=1, steps=1))
        assert buffer._samples(4, 1)[0]["action"].tolist() == [1] * 4


def test_buffer_supports_bfloat16_entries():
    buffer = make_replay_buffer(20, 8)
    for number in range(4):
        new = batch(10 * number)
        buffer.extend(new.set("features", new["observation"].bfloat16()))
    found = buffer._samples(8, 1)[0]
    assert found["features"].dtype == torch.bfloat16
    assert torch.equal(found["features"], found["observation"].bfloat16())


def test_buffer_supports_zero_size_entries():
    buffer = make_replay_buffer(20, 8)
    for number in range(2):
        buffer.extend(batch(10 * number).set("nothing", torch.zeros(2, 3, 0)))
    found = buffer._samples(8, 1)[0]
    assert found["nothing"].shape == (8, 0)
    assert found["observation"].unique().numel() > 4


def test_sampling_applies_transform_appended_later():
    buffer = make_replay_buffer(20, 8)
    buffer.extend(batch(0))
    buffer.buffer.append_transform(RenameTransform(["observation"], ["seen"]))
    assert "seen" in buffer._samples(8, 1)[0].keys()
