"""Sequences of records: what happened, in order, with the last observation of each episode."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from kit.buffers import SequenceReplay
from tests.errors import raises_setting

PARTS = st.lists(st.integers(1, 7), min_size=1, max_size=6)
"""Steps of consecutive batches."""


class World:
    """One environment: observations count records, rewards are a tenth of what they arrive with."""

    def __init__(self, number: int, lengths: list[int]) -> None:
        self.lengths, self.episode, self.step, self.count = lengths, 0, 0, 1000 * number

    def transition(self) -> dict[str, float | bool]:
        done = self.step + 1 == self.lengths[self.episode % len(self.lengths)]
        row = {
            "observation": float(self.count), "action": self.count % 7, "is_init": self.step == 0,
            "following": float(self.count + 1), "reward": (self.count + 1) / 10, "done": done,
            "terminated": done and self.episode % 2 == 0,
        }  # fmt: skip
        self.step, self.count = (0, self.count + 2) if done else (self.step + 1, self.count + 1)
        self.episode += done
        return row


def batch(worlds: list[World], steps: int) -> TensorDict:
    rows = [[world.transition() for _ in range(steps)] for world in worlds]

    def of(name: str) -> torch.Tensor:
        return torch.tensor([[row[name] for row in env] for env in rows])

    arrived = {name: of(name).unsqueeze(-1) for name in ("reward", "done", "terminated")}
    following = {"observation": of("following").unsqueeze(-1), **arrived}
    own = {"observation": of("observation").unsqueeze(-1), "action": of("action")}
    return TensorDict({**own, "next": following}, [len(worlds), steps])


def filled(size: int, length: int, episodes: list[list[int]], parts: list[int]) -> SequenceReplay:
    replay = SequenceReplay(size, length)
    worlds = [World(number, lengths) for number, lengths in enumerate(episodes)]
    for steps in parts:
        replay.extend(batch(worlds, steps))
    return replay


def test_three_step_episode_creates_four_records():
    replay = filled(4, 4, [[3]], [2, 1])
    (window,) = replay.sample(1)
    assert window["observation"].flatten().tolist() == [0, 1, 2, 3]
    assert window["action"].tolist() == [0, 1, 2, 0], "no action follows the last observation"
    torch.testing.assert_close(window["reward"].flatten(), torch.tensor([0.0, 0.1, 0.2, 0.3]))
    assert window["is_init"].flatten().tolist() == [True, False, False, False]
    assert window["done"].flatten().tolist() == [False, False, False, True]
    assert window["terminated"].flatten().tolist() == [False, False, False, True]


@given(
    episodes=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    parts=PARTS,
    capacity=st.integers(2, 12),
    length=st.integers(2, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=100)
def test_windows_are_consecutive_records_of_one_environment(
    episodes, parts, capacity, length, seed
):
    if length > capacity or sum(parts) < length:
        return
    replay = filled(capacity * len(episodes), length, episodes, parts)
    torch.manual_seed(seed)
    windows = replay.sample(20)
    numbers = windows["observation"].squeeze(-1)
    assert torch.equal(numbers.diff(dim=1), torch.ones(20, length - 1)), "nothing is skipped"
    first, last, reward = (windows[name].squeeze(-1) for name in ("is_init", "done", "reward"))
    assert first[:, 0].all(), "what came before a window is not known"
    assert torch.equal(first[:, 1:], last[:, :-1]), "a first record follows a last one"
    inside = ~first[:, 1:]
    torch.testing.assert_close(reward[:, 1:][inside], numbers[:, 1:][inside] / 10)
    assert (reward[:, 1:][~inside] == 0).all(), "no reward arrives with a first observation"
    newest = max(world_records(lengths, sum(parts)) for lengths in episodes)
    assert numbers.remainder(1000).max() < newest


def world_records(lengths: list[int], steps: int) -> int:
    """Records of an environment after so many policy steps."""
    world = World(0, lengths)
    ended = sum(bool(world.transition()["done"]) for _ in range(steps))
    return steps + ended


def test_windows_are_drawn_uniformly():
    replay = filled(100, 3, [[4], [50]], [10])
    starts = replay.sample(30_000)["observation"][:, 0, 0]
    values, counts = starts.unique(return_counts=True)
    assert values.tolist() == [*range(10), *range(1000, 1008)]
    assert (counts.float() - 30_000 / 18).abs().max() < 5 * (30_000 / 18) ** 0.5


def test_records_are_independent_of_batch_sizes():
    torch.manual_seed(0)
    one = filled(40, 4, [[3], [5]], [12]).sample(8)
    torch.manual_seed(0)
    other = filled(40, 4, [[3], [5]], [1, 2, 3, 1, 5]).sample(8)
    assert (one == other).all()


def test_restored_replay_continues_identically():
    saved = filled(24, 3, [[3], [5]], [4, 5])
    resumed = SequenceReplay(24, 3)
    resumed.load_state_dict(saved.state_dict())
    for replay in (saved, resumed):
        worlds = [World(number, [3]) for number in range(2)]
        replay.extend(batch(worlds, 7))
    torch.manual_seed(1)
    one = saved.sample(16)
    torch.manual_seed(1)
    assert (one == resumed.sample(16)).all()


@pytest.mark.parametrize("size", [12, 240])
def test_load_rejects_different_buffer_size(size):
    """With them came their number: a larger memory forgot as early as that which was saved."""
    saved = filled(24, 3, [[3], [5]], [4, 5]).state_dict()
    with raises_setting("buffer_size"):
        SequenceReplay(size, 3).load_state_dict(saved)


def test_closed_episode_ends_before_next_episode():
    replay = filled(20, 5, [[100]], [3])
    replay.close_open_episodes(1)
    replay.extend(batch([World(5, [100])], 2))
    (window,) = replay.sample(1)
    assert window["observation"].flatten().tolist() == [0, 1, 2, 5000, 5001]
    assert window["is_init"].flatten().tolist() == [True, False, False, True, False]
    assert window["done"].flatten().tolist() == [False, False, True, False, False]
    assert not window["terminated"].any(), "nobody knows that it ended"


def test_uint8_observations_keep_dtype():
    data = batch([World(0, [3])], 4)
    pixels = torch.randint(256, (1, 4, 8, 8, 3), dtype=torch.uint8)
    data["observation"], data["next", "observation"] = pixels, pixels
    replay = SequenceReplay(10, 3)
    replay.extend(data)
    assert replay.sample(2)["observation"].dtype == torch.uint8


def test_replay_rejects_sizes_below_one_window():
    with raises_setting("sequence_length"):
        SequenceReplay(5, None)
    with raises_setting("buffer_size"):
        filled(10, 6, [[3], [3]], [1])
    with raises_setting("learning_starts") as refused:
        filled(40, 8, [[99], [99]], [3]).sample(1)
    assert refused.value.works == "Set steps.learning_starts to 16 or more"


def test_extend_rejects_changed_num_envs():
    replay = filled(40, 4, [[3], [3]], [2])
    with raises_setting("num_envs") as refused:
        replay.extend(batch([World(number, [3]) for number in range(3)], 2))
    assert refused.value.works == [2]


def test_len_returns_stored_record_count():
    assert len(SequenceReplay(40, 4)) == 0
    assert len(filled(40, 4, [[3], [99]], [3])) == 4 + 3
    assert len(filled(16, 4, [[99], [99]], [10])) == 16


def test_empty_batch_adds_no_records():
    replay = filled(40, 4, [[9]], [5])
    replay.extend(batch([World(0, [9])], 1)[:, :0])
    assert len(replay) == 5


def test_loading_empty_state_clears_replay():
    replay = filled(40, 4, [[9]], [5])
    replay.load_state_dict(SequenceReplay(40, 4).state_dict())
    assert len(replay) == 0
    replay.extend(batch([World(0, [9]), World(1, [9])], 4))
    assert len(replay) == 8


def test_complete_episodes_are_stored_consecutively():
    long, short = batch([World(0, [4])], 4)[0], batch([World(1, [2])], 2)[0]
    padded = torch.cat([short, torch.zeros_like(short)])
    episodes = torch.stack([long, padded])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    replay = SequenceReplay(8, 8)
    replay.extend(episodes.update({"collector": {"mask": mask}}))
    (window,) = replay.sample(1)
    assert window["observation"].flatten().tolist() == [0, 1, 2, 3, 4, 1000, 1001, 1002]
    assert window["done"].flatten().nonzero().flatten().tolist() == [4, 7]


def test_extend_rejects_incomplete_padded_episodes():
    piece = batch([World(0, [99])], 3).update({"collector": {"mask": torch.ones(1, 3).bool()}})
    with raises_setting("sequence_length"):
        SequenceReplay(8, 2).extend(piece)
