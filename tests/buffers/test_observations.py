"""Observations that are stored once are read as if both of a transition had been stored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data.replay_buffers.samplers import RandomSampler

from kit.buffers import ObservationStorage, PrioritizedSampler, make_replay_buffer, replay
from tests.errors import raises_setting


class Player:
    """An environment whose frames are numbers, seen alone or as a stack.

    Args:
        number: of the environment.
        frames: of a stack; 1: frames are seen alone.
        lengths: of its episodes, in turn; negative: the environment is reset without an end.
    """

    def __init__(self, number, frames, lengths):
        self.frames, self.lengths, self.episode = frames, lengths, 0
        self.next_frame = 1_000_000 * (number + 1)
        self.reset()

    def frame(self):
        self.next_frame += 1
        return torch.tensor([float(self.next_frame), -float(self.next_frame)])

    def reset(self):
        self.left = self.lengths[self.episode % len(self.lengths)]
        self.episode += 1
        self.stack = [self.frame()] * self.frames

    def observation(self):
        return torch.stack(self.stack) if self.frames > 1 else self.stack[0]

    def step(self):
        seen = self.observation()
        self.stack = [*self.stack[1:], self.frame()]
        after, ends = self.observation(), abs(self.left) == 1
        done = ends and self.left > 0
        if ends:
            self.reset()
        else:
            self.left -= 1 if self.left > 0 else -1
        return seen, after, done


def batch(players, steps):
    """A batch ``[num_envs, steps]`` of transitions."""
    rows = [[player.step() for _ in range(steps)] for player in players]
    seen, after = (torch.stack([torch.stack([t[n] for t in r]) for r in rows]) for n in (0, 1))
    done = torch.tensor([[[t[2]] for t in row] for row in rows])
    size = [len(players), steps]
    following = TensorDict({"observation": after, "done": done, "reward": done.float()}, size)
    return TensorDict({"observation": seen, "action": seen.sum(-1), "next": following}, size)


def in_time(new):
    """Its rows in the order in which they are written."""
    return new.transpose(0, 1).reshape(-1)


@settings(max_examples=60)
@example(num_envs=3, frames=2, size=6, steps=[2, 2], lengths=[4])  # a batch fills the memory
@given(
    num_envs=st.integers(1, 3),
    frames=st.sampled_from([1, 2, 4]),
    size=st.integers(6, 23),
    steps=st.lists(st.integers(1, 5), min_size=1, max_size=14),
    lengths=st.lists(st.integers(-6, 6).filter(bool), min_size=1, max_size=5),
)
def test_storage_returns_written_transitions(num_envs, frames, size, steps, lengths):
    """For any episodes, resets, number of environments and places where the memory wraps."""
    buffer = make_replay_buffer(size, 4, store_next_observation=False, stacked_frames=frames)
    players = [Player(number, frames, lengths[number:] + lengths) for number in range(num_envs)]
    written = []
    for count in steps:
        count = max(min(count, size // num_envs), 1)
        new = batch(players, count)
        buffer.extend(new.clone())
        written += in_time(new).unbind(0)
        filled = min(len(written), size)
        found = buffer.buffer.storage.get(range(filled))
        for number in range(len(written) - filled, len(written)):
            for key in ("observation", "action", ("next", "observation"), ("next", "done")):
                assert torch.equal(found[key][number % size], written[number][key])


def test_reading_full_storage_does_not_modify_it():
    buffer, players = make_replay_buffer(8, 4, **ONCE), [Player(0, 1, [5])]
    buffer.extend(batch(players, 8))
    for _ in range(2):
        new = batch(players, 8)
        buffer.extend(new.clone())
        assert torch.equal(buffer.buffer[:]["observation"], in_time(new)["observation"])
    assert "observation" not in buffer.buffer.storage.rows(slice(None)).keys()


@pytest.mark.parametrize("frames", [1, 4])
@pytest.mark.parametrize("sampler", [RandomSampler, lambda: PrioritizedSampler(40, 0.6, 0.4)])
def test_samples_match_buffer_storing_both_observations(frames, sampler):
    once = make_replay_buffer(40, 16, sampler=sampler(), stacked_frames=frames, **ONCE)
    both = make_replay_buffer(40, 16, sampler=sampler())
    players = [Player(number, frames, [5, 3, 7]) for number in range(2)]
    for seed in range(30):
        new = batch(players, 2)
        for buffer in (once, both):
            buffer.extend(new.clone())
        torch.manual_seed(seed)
        one = once._samples(16, 1)[0]
        torch.manual_seed(seed)
        other = both._samples(16, 1)[0]
        for key in ("observation", "action", ("next", "observation"), ("next", "reward"), "index"):
            assert torch.equal(one[key], other[key])


ONCE = {"store_next_observation": False}


def bytes_of(buffer):
    """Bytes of the tensors of a buffer's state."""

    def found(value):
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
        inner = value.values() if isinstance(value, dict) else value
        return sum(map(found, inner)) if isinstance(value, (dict, list, tuple)) else 0

    return found(buffer.state_dict())


def test_storage_holds_one_frame_or_stack_per_transition():
    """84 x 84 pixels in stacks of 4: an eighth of both observations, and of each end one more.

    A checkpoint has what was written, and what followed the newest.
    """
    size, sizes = 200, {}
    pixels = torch.randint(256, (206, 84, 84), dtype=torch.uint8)
    for name, how in (("both", {}), ("once", ONCE), ("newest", {"stacked_frames": 4})):
        buffer = make_replay_buffer(size, 4, **how)
        for step in range(size):
            first = step // 50 * 50  # of the episode
            stacks = [
                pixels[torch.arange(last - 3, last + 1).clamp(min=first)]
                for last in (step, step + 1)
            ]
            done = torch.tensor([[[step % 50 == 49]]])
            after = TensorDict({"observation": stacks[1][None, None], "done": done}, [1, 1])
            seen = {"observation": stacks[0][None, None], "next": after}
            buffer.extend(TensorDict(seen, [1, 1]))
        sizes[name] = bytes_of(buffer)
    frame, flags = 84 * 84, 200 * (1 + 8)  # done, place
    assert sizes["both"] == 200 * 8 * frame + flags
    written, ends = 200 + 1, 64
    assert sizes["once"] == (written + ends) * 4 * frame + (200 + 1) + 200 * 8 + flags
    assert sizes["newest"] == (written + ends) * frame + (200 + 4) + 200 * 8 + flags


def test_checkpoint_is_small_when_buffer_is_nearly_empty():
    buffer = make_replay_buffer(100_000, 4, **ONCE)
    players = [Player(number, 1, [5]) for number in range(2)]
    buffer.extend(batch(players, 3))
    state = buffer.buffer.storage.observations()
    assert [len(values) for values in state["values"]] == [6 + 2]


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("before", [3, 8, 9, 13])
def test_resumed_buffer_matches_uninterrupted_buffer(frames, before):
    """Whether it was full or not."""

    def made():
        return make_replay_buffer(17, 4, stacked_frames=frames, **ONCE)

    ours, resumed = made(), made()
    players = [Player(number, frames, [4, -3, 6]) for number in range(2)]
    for _ in range(before):
        ours.extend(batch(players, 1))
    resumed.load_state_dict(ours.state_dict())
    for _ in range(9):
        new = batch(players, 1)
        ours.extend(new.clone())
        resumed.extend(new)
        one, other = (b.buffer.storage.get(range(len(ours.buffer))) for b in (ours, resumed))
        assert (one == other).all()


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("how", ["state_dict", "dumps", "add", "empty"])
def test_torchrl_buffer_methods_keep_observations_aligned(how, before, tmp_path):
    """Those that save it, empty it and store one row, into a buffer that held other rows."""
    players = [Player(0, 1, [4, 3])]
    old, *rest = (in_time(batch(players, n)) for n in (max(before, 1), 7, 6, 3))
    ours, other = (make_replay_buffer(9, 4, **ONCE).buffer for _ in range(2))
    if before:
        other.extend(old)
    for new in rest[:2]:
        ours.extend(new.clone())
    if how == "state_dict":
        other.load_state_dict(ours.state_dict())
    elif how == "dumps":
        ours.dumps(tmp_path)
        other.loads(tmp_path)
    else:
        other.empty()
        for row in torch.cat(rest[:2]):
            other.add(row.clone()) if how == "add" else other.extend(row.clone().unsqueeze(0))
    other.extend(rest[2].clone())
    found, written = other[:], torch.cat(rest)[-9:]
    order = found["observation"][:, 0].argsort()
    for key in ("observation", ("next", "observation"), ("next", "done")):
        assert torch.equal(found[key][order], written[key])


def test_closed_episodes_keep_last_observation():
    buffer = make_replay_buffer(20, 4, **ONCE)
    players = [Player(number, 1, [100]) for number in range(2)]
    new = batch(players, 3)
    buffer.extend(new.clone())
    buffer.close_open_episodes(2)
    for player in players:
        player.reset()
    buffer.extend(batch(players, 2))
    found = buffer.buffer.storage.get(range(6))
    assert torch.equal(found["next", "observation"], in_time(new)["next", "observation"])
    assert found["next", "done"].flatten().tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("frames", [1, 3])
def test_failed_episode_repeats_last_observation(frames):
    """It is that of before the fault, whole: no frame follows in a stack."""
    buffer = make_replay_buffer(8, 4, store_next_observation=False, stacked_frames=frames)
    players = [Player(0, frames, [2]), Player(1, frames, [100])]
    new = batch(players, 2)
    new["next", "observation"][1, 1] = new["observation"][1, 1]
    new["next", "done"][1, 1] = True
    buffer.extend(new.clone())
    players[1].reset()
    after = batch(players, 2)
    buffer.extend(after.clone())
    found = buffer.buffer.storage.get(range(8))
    for key in ("observation", ("next", "observation")):
        assert torch.equal(found[key], torch.cat([in_time(new)[key], in_time(after)[key]]))


# ---------------------------------------------------------------------- refused
def test_extend_rejects_non_consecutive_frame_stacks():
    buffer = make_replay_buffer(20, 4, stacked_frames=3)
    player = Player(0, 3, [9])
    buffer.extend(batch([player], 2))
    new = batch([player], 1)
    new["observation"][..., 0, :] += 1
    with raises_setting("stacked_frames"):
        buffer.extend(new)


def test_observations_stay_on_host_and_samples_move_to_device(monkeypatch):
    monkeypatch.setattr(replay, "usable_device", lambda device: torch.device(device))
    buffer = make_replay_buffer(20, 4, **ONCE, device="meta")
    buffer.extend(batch([Player(0, 1, [9])], 5))
    minibatch = buffer._samples(4, 1)[0]
    assert {value.device.type for value in minibatch.values(True, True)} == {"meta"}
    assert {value.device.type for value in buffer._rows(0).values(True, True)} == {"cpu"}


@pytest.mark.parametrize("given", [{"n_step": 3}, {"sequence_length": 4}])
def test_single_observation_storage_rejects_n_step_and_sequences(given):
    with raises_setting(*given):
        make_replay_buffer(20, 4, **ONCE, **given)


@pytest.mark.parametrize("first_has_it", [True, False])
def test_extend_rejects_inconsistent_observation_keys(first_has_it):
    buffer = make_replay_buffer(20, 4, **ONCE)
    one, other = batch([Player(0, 1, [9])], 5), batch([Player(0, 1, [9])], 5)
    more = one if first_has_it else other
    more["goal"], more["next", "goal"] = more["observation"], more["next", "observation"]
    buffer.extend(one)
    with raises_setting("entry"):
        buffer.extend(other)


def test_extend_rejects_changed_num_envs():
    buffer = make_replay_buffer(20, 4, **ONCE)
    buffer.extend(batch([Player(n, 1, [5]) for n in range(2)], 1))
    with raises_setting("num_envs"):
        buffer.extend(batch([Player(n, 1, [5]) for n in range(3)], 1))
    with raises_setting("buffer_size"):
        ObservationStorage(5).belong_to(3)
