"""What minibatches are: passes over a batch, samples of TorchRL's replay buffers."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import torchrl.data
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers import samplers
from torchrl.data.replay_buffers.samplers import (
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
)
from torchrl.envs.transforms import MultiStepTransform, Reward2GoTransform

from kit.buffers import (
    NStep,
    PrioritizedSampler,
    ReplayMinibatches,
    RolloutMinibatches,
    SliceWriter,
    as_minibatches,
    make_replay_buffer,
    valid_rows,
)
from kit.buffers.rollout_batches import _permutation
from kit.trainer import Trainer
from kit.trainer.chunked_state import _apart
from tests.errors import raises_setting
from tests.tiny import assert_equal, off_policy_plan, on_policy_plan, sac_parts, weights


def batch_of(num_envs: int, steps: int, start: int = 0) -> TensorDict:
    """Transitions numbered env by env, rewards that are powers of ten by time."""
    shape = (num_envs, steps)
    number = torch.arange(num_envs * steps).reshape(shape) + start
    flags = torch.zeros(*shape, 1, dtype=torch.bool)
    following = {
        "observation": number.unsqueeze(-1).float() + 1, "reward": torch.ones(*shape, 1),
        "done": flags, "terminated": flags.clone(), "truncated": flags.clone(),
    }  # fmt: skip
    return TensorDict(
        {"number": number, "observation": number.unsqueeze(-1).float(), "next": following}, shape
    )


def episodes_of(lengths: list[int], start: int = 0) -> TensorDict:
    """Whole episodes as rows, padded to the longest."""
    batch = batch_of(len(lengths), max(lengths), start)
    for row, length in zip(batch, lengths):
        row["next", "done"][length - 1] = row["next", "terminated"][length - 1] = True
        row[length:] = row[length:].apply(torch.zeros_like)
    batch["collector", "mask"] = torch.arange(batch.shape[1]) < torch.tensor(lengths)[:, None]
    return batch


def through_a_file(state: dict) -> dict:
    """Write and read a state as a checkpoint does: without code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def numbers(
    minibatches: RolloutMinibatches | ReplayMinibatches, plan, limit: int = 100
) -> list[list[list[int]]]:
    return [[m["number"].tolist() for m in group] for group in minibatches.epoch(plan, limit)]


# ---------------------------------------------------------------------- passes
def test_epoch_visits_each_transition_once_in_new_order():
    passes = RolloutMinibatches()
    passes.extend(batch_of(2, 8))
    first, second = (numbers(passes, on_policy_plan(minibatch_size=4)) for _ in range(2))
    assert [len(group) for group in first] == [1] * 4
    assert sorted(n for (m,) in first for n in m) == list(range(16))
    assert sorted(n for (m,) in second for n in m) == list(range(16))
    assert first != second


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"minibatch_size": 6}, [[6], [6], [4]]),
        ({"minibatch_size": 6, "last_minibatch": "drop"}, [[6], [6]]),
        ({"minibatch_size": 6, "last_minibatch": "merge"}, [[6], [10]]),
        ({"minibatch_size": 6, "minibatches_per_epoch": 2}, [[6], [6]]),
        ({"minibatch_size": 6, "minibatches_per_gradient_step": 2}, [[6, 6], [4]]),
        ({"minibatch_size": 6, "minibatches_per_gradient_step": None}, [[6, 6, 4]]),
        ({"minibatch_size": None}, [[16]]),
        ({"minibatch_size": 6, "train_on_newest": 10}, [[6], [4]]),
    ],
)
def test_minibatch_sizes_match_plan(settings, sizes):
    passes = RolloutMinibatches()
    passes.extend(batch_of(2, 8))
    groups = numbers(passes, on_policy_plan(**settings))
    assert [[len(m) for m in group] for group in groups] == sizes


def test_full_batch_minibatch_is_unshuffled_and_keeps_rng_state():
    passes = RolloutMinibatches()
    passes.extend(batch_of(2, 8))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert numbers(passes, on_policy_plan(minibatch_size=None)) == [[list(range(16))]]
    assert torch.equal(torch.get_rng_state(), before)


def test_permutation_uses_device_of_entries_when_batch_has_none():
    rows = TensorDict({"number": torch.zeros(4, device="meta")}, [4])
    assert rows.device is None
    assert _permutation(4, rows).is_meta


@pytest.mark.parametrize("minibatch_size", [None, 16, 8])
def test_minibatch_writes_do_not_affect_batch_or_next_epoch(minibatch_size):
    passes, plan = RolloutMinibatches(), on_policy_plan(minibatch_size=minibatch_size)
    batch = batch_of(2, 8)
    passes.extend(batch)
    for _ in range(2):
        for (minibatch,) in passes.epoch(plan, 4):
            assert {"td_error", ("next", "td_error")}.isdisjoint(minibatch.keys(True))
            minibatch["td_error"] = minibatch["next", "td_error"] = torch.ones(len(minibatch))
            minibatch["number"].fill_(-1)
            minibatch["next", "reward"].mul_(2)
    assert batch["number"].flatten().tolist() == list(range(16))
    assert (batch["next", "reward"] == 1).all()


def test_valid_rows_selects_flat_and_nested_keys():
    batch = batch_of(2, 8)
    rows = valid_rows(batch, ["number", ("next", "reward"), "missing"])
    assert set(rows.keys(True, True)) == {"number", ("next", "reward")}
    assert rows.batch_size == rows["next"].batch_size == (16,)
    for key, value in valid_rows(batch).items(True, True):
        torch.testing.assert_close(value, batch.reshape(-1)[key])


def test_epoch_stops_at_gradient_step_limit():
    passes = RolloutMinibatches()
    passes.extend(batch_of(2, 8))
    assert len(numbers(passes, on_policy_plan(minibatch_size=4), limit=3)) == 3


def test_carried_rows_enter_next_epoch_also_after_resume():
    plan = on_policy_plan(minibatch_size=6, last_minibatch="carry")
    passes = RolloutMinibatches()
    passes.extend(batch_of(2, 8))
    seen = [n for group in numbers(passes, plan) for m in group for n in m]
    resumed = RolloutMinibatches()
    resumed.extend(batch_of(2, 8))
    resumed.load_state_dict(through_a_file(passes.state_dict()))
    state = torch.get_rng_state()
    going_on = numbers(passes, plan)
    torch.set_rng_state(state)
    assert numbers(resumed, plan) == going_on
    seen += [n for group in going_on for m in group for n in m]
    assert sorted(seen[:16]) == list(range(16))


def test_train_on_newest_takes_equal_rows_from_each_env():
    passes = RolloutMinibatches()
    passes.extend(batch_of(2, 8))
    ((minibatch,),) = numbers(passes, on_policy_plan(train_on_newest=6, minibatch_size=None))
    assert minibatch == [5, 6, 7, 13, 14, 15]
    plan = on_policy_plan(train_on_newest=8, minibatch_size=2, sequence_length=2)
    sequences = [row for group in numbers(passes, plan) for m in group for row in m]
    assert sorted(sequences) == [[4, 5], [6, 7], [12, 13], [14, 15]]


def test_train_on_newest_takes_last_rows_of_complete_episodes():
    passes = RolloutMinibatches()
    passes.extend(episodes_of([2, 4, 3]))
    ((minibatch,),) = numbers(passes, on_policy_plan(train_on_newest=6, minibatch_size=None))
    assert minibatch == [5, 6, 7, 8, 9, 10]


def test_rollout_sequences_are_consecutive_steps_of_one_env():
    passes = RolloutMinibatches()
    passes.extend(batch_of(2, 8))
    plan = on_policy_plan(sequence_length=4, minibatch_size=2)
    sequences = [row for group in numbers(passes, plan) for m in group for row in m]
    assert sorted(sequences) == [list(range(n, n + 4)) for n in (0, 4, 8, 12)]


def test_padding_is_not_stored():
    batch = batch_of(2, 3)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    batch.set(("collector", "mask"), mask)
    assert valid_rows(batch)["number"].tolist() == [0, 1, 3]
    replay = make_replay_buffer(10, 2)
    for _ in range(2):
        replay.extend(batch)
    assert replay.buffer[:]["number"].tolist() == [0, 1, 3, 0, 1, 3]
    with raises_setting("storage"):
        slices().extend(batch)


# ---------------------------------------------------------------------- replay
def test_replay_buffer_stores_transitions_in_time_order():
    replay = make_replay_buffer(20, 4)
    replay.extend(batch_of(2, 3))
    replay.extend(batch_of(2, 1, start=100))
    assert replay.buffer[:]["number"].tolist() == [0, 3, 1, 4, 2, 5, 100, 101]


def test_full_buffer_overwrites_oldest_transitions():
    replay = make_replay_buffer(4, 2)
    for start in range(0, 60, 10):
        replay.extend(batch_of(1, 1, start=start))
    assert sorted(replay.buffer[:]["number"].tolist()) == [20, 30, 40, 50]


@pytest.mark.parametrize("per_step", [1, 3])
def test_replay_draws_one_sample_group_per_gradient_step(per_step):
    replay = make_replay_buffer(20, 4)
    replay.extend(batch_of(2, 3))
    plan = off_policy_plan(minibatches_per_gradient_step=per_step)
    groups = numbers(replay, plan, limit=5)
    assert [[len(m) for m in group] for group in groups] == [[4] * per_step] * 5
    assert {n for group in groups for m in group for n in m} <= set(range(6))


def test_sample_has_buffer_length_without_minibatch_size():
    replay = ReplayMinibatches(ReplayBuffer(storage=LazyTensorStorage(20)))
    replay.extend(batch_of(2, 3))
    plan = off_policy_plan(minibatch_size=None)
    assert [[len(m) for m in g] for g in numbers(replay, plan, limit=1)] == [[6]]


def test_sampling_empty_buffer_raises_setting_error():
    with raises_setting("learning_starts"):
        numbers(make_replay_buffer(20, 4, n_step=3), off_policy_plan(), limit=1)


def test_unfinished_transitions_are_sampled_if_none_is_stored():
    replay = make_replay_buffer(20, 4, n_step=3, gamma=0.5)
    batch = batch_of(1, 2)
    batch["next", "reward"] = torch.tensor([[[1.0], [4.0]]])
    replay.extend(batch)
    (minibatch,) = next(replay.epoch(off_policy_plan(minibatch_size=40), limit=1))
    found = set(zip(minibatch["next", "reward"].flatten().tolist(),
                    minibatch["steps_to_next_obs"].flatten().tolist()))  # fmt: skip
    assert found == {(1.0 + 0.5 * 4.0, 2), (4.0, 1)}
    assert not minibatch["next", "done"].any()
    assert len(replay.buffer) == 0


def test_make_replay_buffer_rejects_invalid_sizes():
    for size in (0, -1, 1.5):
        with raises_setting("buffer_size"):
            make_replay_buffer(size, 1)
    with raises_setting("n_step"):
        make_replay_buffer(4, 2, n_step=0)


def test_as_minibatches_wraps_torchrl_buffer_without_copy():
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=3)
    assert as_minibatches(buffer).buffer is buffer
    assert isinstance(as_minibatches(None), RolloutMinibatches)
    own = RolloutMinibatches()
    assert as_minibatches(own) is own


def test_slice_sampler_rejects_interleaved_envs():
    sampler = SliceSampler(slice_len=2, end_key=("next", "done"))
    replay = ReplayMinibatches(
        TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
    )
    replay.extend(batch_of(1, 3))
    replay.extend(episodes_of([2, 3], start=10))
    assert replay.buffer[:]["number"].tolist() == [0, 1, 2, 10, 11, 13, 14, 15]
    with raises_setting("sampler"):
        replay.extend(batch_of(2, 3))


# ---------------------------------------------------------------------- several steps
def test_pending_n_steps_survive_batch_reuse():
    replay, shared = make_replay_buffer(100, 4, n_step=3), batch_of(2, 4)
    for start in (0, 8, 16):
        shared.copy_(batch_of(2, 4, start))  # as a collector with reuse does
        replay.extend(shared)
    stored = replay.buffer.storage[:]["observation"].flatten().tolist()
    first = [number for t in range(4) for number in (t, t + 4)]
    assert stored == [start + n for start in (0, 8, 16) for n in first][: len(stored)]


def n_step_transitions(batches: list[TensorDict], n_step: int, gamma: float) -> TensorDict:
    replay = make_replay_buffer(100, 4, n_step=n_step, gamma=gamma)
    for batch in batches:
        replay.extend(batch)
    return replay.buffer[:]


@settings(max_examples=60)
@given(
    envs=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    steps=st.integers(2, 5),
    ends=st.sampled_from([0.0, 0.2, 0.6]),
    seed=st.integers(0, 1_000),
)
def test_n_step_matches_torchrl(envs, sizes, steps, ends, seed):
    torch.manual_seed(seed)
    ours, theirs = NStep(steps, 0.9), MultiStepTransform(steps, 0.9, done_keys=[])
    for start, size in enumerate(sizes):
        batch = batch_of(envs, size, start=100 * start)
        batch["next", "reward"] = torch.rand(envs, size, 1)
        batch["next", "done"] = torch.rand(envs, size, 1) < ends
        batch["action"] = torch.rand(envs, size, 2)  # of the first of the steps
        found, expected = ours(batch), theirs.inv(batch.clone())
        assert (found is None) == (expected is None)
        if expected is not None:
            expected = expected.exclude("gamma", "nonterminal", ("next", "original_reward"))
            torch.testing.assert_close(found.to_dict(), expected.to_dict())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.float64])
def test_n_step_reward_keeps_float_dtype(dtype):
    batch = batch_of(2, 6)
    batch["next", "reward"] = batch["next", "reward"].to(dtype)
    summed = NStep(3, 0.5)(batch)["next", "reward"]
    assert summed.dtype is (dtype if dtype.is_floating_point else torch.float32)
    assert summed.unique().tolist() == [1.75]


@pytest.mark.parametrize("change", [Tensor.requires_grad_, Tensor.bfloat16])
def test_n_step_continues_after_batch_unsupported_by_numpy(change):
    batches = [batch_of(2, 4, start=start) for start in (0, 100, 200)]
    expected = n_step_transitions([one.clone() for one in batches], n_step=3, gamma=0.5)
    batches[1]["next", "observation"] = change(batches[1]["next", "observation"])
    stored = n_step_transitions(batches, n_step=3, gamma=0.5)
    assert torch.equal(stored["next", "reward"], expected["next", "reward"])


def test_n_step_sums_rewards_within_padded_episodes():
    batches = [episodes_of([4, 2]), episodes_of([1, 4], start=100)]
    stored = n_step_transitions(batches, n_step=3, gamma=1.0)
    assert stored["number"].tolist() == [0, 1, 2, 3, 4, 5, 100, 104]
    assert stored["next", "reward"].flatten().tolist() == [3, 3, 2, 1, 2, 1, 1, 3]
    assert stored["next", "observation"].flatten().tolist() == [3, 4, 4, 4, 6, 6, 101, 107]


def test_n_step_rejects_incomplete_padded_episodes():
    batch = episodes_of([4, 2])
    batch["next", "done"][0, 3] = False
    with raises_setting("n_step"):
        n_step_transitions([batch], n_step=3, gamma=1.0)


def test_n_step_rejects_changed_num_envs():
    buffer = make_replay_buffer(100, 4, n_step=3)
    buffer.extend(batch_of(2, 2))
    with raises_setting("num_envs"):
        buffer.extend(batch_of(3, 2))


def test_n_step_rejects_non_tensor_entry():
    buffer, batch = make_replay_buffer(100, 4, n_step=3), batch_of(2, 2)
    batch["next", "text"] = NonTensorData("left", batch_size=batch.shape)
    with raises_setting("entry"):
        buffer.extend(batch)


def test_pending_n_steps_are_restored_from_checkpoint():
    batches = [batch_of(2, 2, start=start) for start in (0, 100, 200, 300)]
    whole = make_replay_buffer(100, 4, n_step=3)
    first = make_replay_buffer(100, 4, n_step=3)
    for batch in batches:
        whole.extend(batch.clone())
    for batch in batches[:2]:
        first.extend(batch.clone())
    second = make_replay_buffer(100, 4, n_step=3)
    second.load_state_dict(through_a_file(first.state_dict()))
    for batch in batches[2:]:
        second.extend(batch.clone())
    assert (whole.buffer[:] == second.buffer[:]).all()


def test_state_dict_references_storage_without_copy():
    buffer = make_replay_buffer(100, 4)
    buffer.extend(batch_of(2, 5))
    stored = {value.data_ptr() for value in buffer.buffer.storage[:].values(True, True)}
    saved = buffer.state_dict()["rows"]["values"]
    assert {value.data_ptr() for value in saved} == stored
    assert {len(value) for value in saved} == {10}


# ---------------------------------------------------------------------- in and out
def flat_buffer() -> ReplayMinibatches:
    return make_replay_buffer(10, 4)


def without_replacement() -> ReplayMinibatches:
    return make_replay_buffer(12, 4, sampler=SamplerWithoutReplacement())


def sequences() -> ReplayMinibatches:
    return make_replay_buffer(10, 2, sequence_length=2)


def slices() -> ReplayMinibatches:
    return ReplayMinibatches(
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(20, ndim=2),
            sampler=SliceSampler(slice_len=2, traj_key="copy", strict_length=False),
            batch_size=4,
        )
    )


def prioritized() -> ReplayMinibatches:
    return make_replay_buffer(10, 4, sampler=PrioritizedSampler(10, alpha=0.9, beta=0.5))


def generator_of_its_own() -> ReplayMinibatches:
    storage, generator = LazyTensorStorage(10), torch.Generator().manual_seed(3)
    return ReplayMinibatches(
        TensorDictReplayBuffer(storage=storage, batch_size=4, generator=generator)
    )


BUFFERS = [flat_buffer, without_replacement, slices, sequences, prioritized, generator_of_its_own]


def test_two_dimensional_storage_accepts_one_step_batches():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20, ndim=2), batch_size=4)
    batches = ReplayMinibatches(buffer)
    for start, steps in enumerate((3, 1, 1)):  # a prefill, and batches of one step
        batches.extend(batch_of(2, steps, 10 * start))
    assert buffer.storage.get(slice(5))["number"].T.tolist() == [
        [0, 1, 2, 10, 20],
        [3, 4, 5, 11, 21],
    ]


@pytest.mark.parametrize("make", BUFFERS)
@pytest.mark.parametrize("batches", [0, 2, 7])
def test_restored_buffer_has_same_rows_and_samples(make, batches):
    plan = off_policy_plan(
        **({"sequence_length": 2, "minibatch_size": 2} if make in (slices, sequences) else {})
    )
    before, after = make(), make()
    for number in range(batches):
        batch = batch_of(2, 2, start=10 * number)
        batch["copy"] = torch.arange(2).unsqueeze(-1).expand(2, 2).clone()
        before.extend(batch)
        for (minibatch,) in before.epoch(plan, 1):
            minibatch["td_error"] = minibatch["number"].float() + 1
            before.update_priority(minibatch)
    after.load_state_dict(through_a_file(before.state_dict()))
    assert len(after.buffer) == len(before.buffer)
    if not batches:
        return
    assert (after.buffer[:] == before.buffer[:]).all()
    drawn = []
    for replay in (before, after):
        torch.manual_seed(5)
        replay.extend(batch.clone())
        drawn.append(numbers(replay, plan, limit=6))
    assert drawn[0] == drawn[1]
    assert (after.buffer[:] == before.buffer[:]).all()


def test_close_open_episodes_truncates_last_transitions():
    replay = make_replay_buffer(10, 4)
    replay.extend(batch_of(2, 3))
    replay.close_open_episodes(2)
    stored = replay.buffer[:]
    for name in ("done", "truncated"):
        assert stored["next", name].flatten().tolist() == [False] * 4 + [True] * 2
    assert not stored["next", "terminated"].any()


def test_close_open_episodes_handles_wrapped_buffer():
    replay = make_replay_buffer(5, 4)
    replay.extend(batch_of(2, 3))
    replay.close_open_episodes(2)
    stored = replay.buffer[:]
    closed = stored["number"][stored["next", "done"].flatten()]
    assert sorted(closed.tolist()) == [2, 5]


def test_close_open_episodes_handles_slice_buffer():
    replay = slices()
    batch = batch_of(2, 3)
    batch["copy"] = torch.arange(2).unsqueeze(-1).expand(2, 3).clone()
    replay.extend(batch)
    replay.close_open_episodes(2)
    assert replay.buffer[:]["next", "done"].squeeze(-1).tolist() == [[False, False, True]] * 2


def test_close_open_episodes_handles_pending_n_steps():
    replay = make_replay_buffer(100, 4, n_step=3, gamma=1.0)
    replay.extend(batch_of(1, 4))
    replay.close_open_episodes(1)
    replay.extend(batch_of(1, 6, start=50))
    rewards = {int(row["number"]): float(row["next", "reward"]) for row in replay.buffer[:]}
    assert rewards == {0: 3.0, 1: 3.0, 2: 2.0, 3: 1.0, 50: 3.0, 51: 3.0, 52: 3.0}


def test_close_open_episodes_skips_terminated_episode():
    replay = make_replay_buffer(10, 4)
    batch = batch_of(1, 2)
    batch["next", "done"][0, 1] = batch["next", "terminated"][0, 1] = True
    replay.extend(batch)
    replay.close_open_episodes(1)
    assert not replay.buffer[:]["next", "truncated"].any()


def test_close_open_episodes_skips_max_value_writer():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(3),
        writer=TensorDictMaxValueWriter(rank_key=("next", "reward")),
        batch_size=4,
    )
    replay = ReplayMinibatches(buffer)
    batch = batch_of(1, 4)
    batch["next", "reward"] = batch["observation"]
    replay.extend(batch)  # the newest takes the place of the oldest
    assert replay.buffer[:]["number"].tolist() == [3, 1, 2]
    replay.close_open_episodes(1)
    assert not replay.buffer[:]["next", "truncated"].any()


# ---------------------------------------------------------------------- in the loop
def test_prioritized_sampler_receives_errors_of_each_minibatch():
    plan = off_policy_plan()
    parts = sac_parts(plan)
    sampler = PrioritizedSampler(100, alpha=1.0, beta=0.5, eps=0.0)
    parts["buffer"] = make_replay_buffer(100, plan.minibatch_size, sampler=sampler)
    trainer = Trainer(plan, **parts)
    errors: dict[int, float] = {}

    def note(minibatch):
        indices, found = minibatch["index"].flatten().tolist(), minibatch["td_error"].flatten()
        errors.update(zip(indices, found.tolist()))

    trainer.register_op("post_loss", note)
    trainer.run()
    assert len(errors) > 10
    for index, error in errors.items():
        assert float(sampler.state_dict()["values"][index]) == pytest.approx(error)


class Knowing(RandomSampler):
    """Knows the errors of transitions."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[int, float] = {}

    def update_priority(self, index, priority, *, storage=None):
        self.errors |= zip(index.flatten().tolist(), priority.flatten().tolist())


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_custom_sampler_receives_td_errors(storage):
    plan = off_policy_plan()
    sampler = Knowing()
    buffer = TensorDictReplayBuffer(
        storage=storage(100), sampler=sampler, batch_size=plan.minibatch_size
    )
    trainer = Trainer(plan, **{**sac_parts(plan), "buffer": buffer})
    found = []
    trainer.register_op("post_loss", lambda minibatch: found.append(minibatch["td_error"]))
    trainer.run()
    assert {error for errors in found for error in errors.tolist()} >= {*sampler.errors.values()}
    assert sampler.errors


def test_priorities_are_equal_with_and_without_compile():
    plan = off_policy_plan()
    states = []
    for compile in ("auto", False):
        parts = sac_parts(plan)
        sampler = PrioritizedSampler(100, alpha=1.0, beta=0.5)
        parts["buffer"] = make_replay_buffer(100, plan.minibatch_size, sampler=sampler)
        update = parts["update"]
        parts["update"] = type(update)(
            update.loss_module, update.optimizers["optimizer"], compile=compile,
            target_updater=update.target_updater,
        )  # fmt: skip
        trainer = Trainer(plan, **parts)
        trainer.run()
        states.append((weights(trainer), trainer.buffer.state_dict()["sampler"]["values"]))
    assert_equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])


# ---------------------------------------------------------------------- writing
@pytest.mark.parametrize("sizes", [[3], [10], [4, 4, 4, 4], [7, 7, 1, 10, 2], [12, 3], [25, 1, 8]])
def test_slice_writer_matches_torchrl_writer(sizes):
    ours = TensorDictReplayBuffer(storage=LazyTensorStorage(10), writer=SliceWriter(), batch_size=4)
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    start = 0
    for size in sizes:
        rows = torch.arange(start, start + size)
        start += size
        places = [b.extend(TensorDict({"row": rows.clone()}, [size])) for b in (ours, theirs)]
        assert torch.equal(*places)
    assert len(ours) == len(theirs)
    assert ours.write_count == theirs.write_count == sum(sizes)
    assert ours.storage._last_cursor_index == theirs.storage._last_cursor_index
    assert ours.writer.state_dict() == theirs.writer.state_dict()
    for key in ("row", "index"):
        assert torch.equal(ours[:][key], theirs[:][key]), key


# ---------------------------------------------------------------------- parts of TorchRL's buffers
@pytest.mark.parametrize("transform", [MultiStepTransform(3, 0.9), Reward2GoTransform()])
def test_extend_rejects_step_joining_transform_with_several_envs(transform):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=transform)
    replay = ReplayMinibatches(buffer)
    with raises_setting("transform"):
        replay.extend(batch_of(2, 8))
    assert replay.joins_steps


def test_load_warns_about_unsaved_transform_steps():
    def made():
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(100), transform=MultiStepTransform(3, 0.9)
        )
        return ReplayMinibatches(buffer)

    replay = made()
    replay.extend(batch_of(1, 8))
    with pytest.warns(UserWarning, match="MultiStepTransform are not in checkpoints"):
        made().load_state_dict(through_a_file(replay.state_dict()))


@pytest.mark.parametrize("size", [5, 20])
def test_load_rejects_different_buffer_size(size):
    earlier, replay = make_replay_buffer(10, 4), make_replay_buffer(size, 4)
    earlier.extend(batch_of(1, 13))
    with raises_setting("buffer_size"):
        replay.load_state_dict(earlier.state_dict())


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("rows", [0, 6])
def test_load_replaces_existing_rows(n_step, rows):
    """Whatever it held before: going back to an earlier checkpoint, or restoring twice."""
    earlier = make_replay_buffer(50, 4, n_step=n_step)
    if rows:
        earlier.extend(batch_of(1, rows + n_step * (n_step > 1)))
    state = through_a_file(earlier.state_dict())
    replay = make_replay_buffer(50, 4, n_step=n_step)
    replay.extend(batch_of(1, 40, start=1_000))
    for _ in range(2):
        replay.load_state_dict(state)
        assert len(replay.buffer) == rows
    replay.extend(batch_of(1, 10, start=2_000))
    kept = replay.buffer.storage.get(slice(len(replay.buffer)))["number"].tolist()
    assert kept[:rows] == [*range(rows)]
    assert not [number for number in kept if 1_000 <= number < 2_000]


def test_replay_minibatches_rejects_prefetch():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=8, prefetch=2)
    with raises_setting("prefetch") as refused:
        ReplayMinibatches(buffer)
    assert refused.value.works == [0]


def used_up() -> ReplayMinibatches:
    sampler = getattr(samplers, "ConsumingSampler", None)
    if sampler is None:
        pytest.skip("this TorchRL has none")
    storage = LazyTensorStorage(20)
    return ReplayMinibatches(
        TensorDictReplayBuffer(storage=storage, batch_size=4, sampler=sampler())
    )


def test_epoch_raises_when_sampler_is_exhausted():
    replay, plan = used_up(), off_policy_plan(minibatch_size=4)
    replay.extend(batch_of(1, 8))
    with raises_setting("sampler"):
        list(replay.epoch(plan, 3))


def test_consumed_buffer_resumes_with_same_write_positions():
    replay, restored, plan = used_up(), used_up(), off_policy_plan(minibatch_size=4)
    replay.extend(batch_of(1, 8))
    list(replay.epoch(plan, 2))
    restored.load_state_dict(through_a_file(replay.state_dict()))
    drawn = []
    for one in (replay, restored):
        one.extend(batch_of(1, 8, start=50))
        one.extend(batch_of(1, 4, start=80))
        torch.manual_seed(0)
        drawn.append(numbers(one, plan, limit=3))
    assert drawn[0] == drawn[1]


def test_replay_minibatches_rejects_torchrl_prioritized_sampler():
    class Compiled(torchrl.data.PrioritizedSampler):
        def _init(self) -> None:
            """Makes no trees: TorchRL's extension may be that of another release of PyTorch."""

    sampler = Compiled(100, alpha=0.6, beta=0.4)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=8)
    with raises_setting("sampler") as refused:
        ReplayMinibatches(buffer)
    assert refused.value.works == "Use kit.buffers.PrioritizedSampler with the same arguments"


def test_buffer_applies_sample_unit():
    units = pytest.importorskip("torchrl.data.replay_buffers.sample_units")
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), batch_size=8, sample_unit=units.Sequence(length=3)
    )
    replay = ReplayMinibatches(buffer)
    replay.extend(batch_of(1, 40))
    ((minibatch,),) = replay.epoch(off_policy_plan(minibatch_size=8), 1)
    assert minibatch.shape == (24,)
    with raises_setting("sample_unit"):
        replay.extend(batch_of(2, 8))


def test_buffer_applies_collate_fn():
    def halved(rows):
        return rows.set("observation", rows["observation"] / 2)

    plain = {"storage": LazyTensorStorage(100), "batch_size": 64}
    buffer = TensorDictReplayBuffer(**plain, collate_fn=halved)
    replay = ReplayMinibatches(buffer)
    replay.extend(batch_of(1, 40))
    ((minibatch,),) = replay.epoch(off_policy_plan(minibatch_size=64), 1)
    assert (minibatch["observation"][:, 0] == minibatch["number"] / 2).all()


@pytest.mark.parametrize("storage", [ListStorage, LazyMemmapStorage])
@pytest.mark.parametrize("size", [100, 30])
def test_checkpoint_restores_list_and_memmap_storages(storage, size):
    def made():
        return ReplayMinibatches(TensorDictReplayBuffer(storage=storage(size), batch_size=4))

    replay = made()
    for start in range(0, 40, 8):
        replay.extend(batch_of(1, 8, start))
    restored = made()
    restored.load_state_dict(through_a_file(_apart(replay.state_dict(), Path(), None)))
    both = (replay, restored)
    for one in both:
        one.extend(batch_of(1, 8, 100))
    kept = [[int(row["number"]) for row in one.buffer.storage.get(range(30))] for one in both]
    assert kept[0] == kept[1]
