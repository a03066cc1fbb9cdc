"""Latents that a replay of sequences keeps: a window begins with that of the record before it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from kit.buffers import SequenceReplay
from tests.buffers.test_records import World, batch

LATENT = {"deter": torch.zeros(1), "known": torch.zeros(1, dtype=torch.bool)}
WRITTEN = 10_000.0


def with_latents(transitions: TensorDict, added: float = 0.0) -> TensorDict:
    """Each transition's latent is its observation, plus a number."""
    deter = transitions["observation"] + added
    return transitions.set("latent", {"deter": deter, "known": torch.ones_like(deter).bool()})


def filled(size: int, length: int, episodes: list[list[int]], steps: int) -> SequenceReplay:
    replay = SequenceReplay(size, length, latents=LATENT)
    worlds = [World(number, lengths) for number, lengths in enumerate(episodes)]
    for _ in range(steps):
        replay.extend(with_latents(batch(worlds, 1)))
    return replay


def trained(replay: SequenceReplay, windows: int) -> set[float]:
    """Write the latents of sampled windows back; the records that they are of."""
    minibatch = replay.sample(windows)
    with_latents(minibatch, WRITTEN)
    replay.update_priority(minibatch)
    return set(minibatch["observation"].flatten().tolist())


@given(
    episodes=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3),
    capacity=st.integers(4, 12),
    length=st.integers(2, 4),
    steps=st.integers(4, 20),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_window_starts_from_newest_latent_of_previous_record(
    episodes, capacity, length, steps, seed
):
    torch.manual_seed(seed)
    replay = filled(capacity * len(episodes), length, episodes, steps)
    stored = replay.sample(500)["observation"].squeeze(-1)
    oldest = {int(env): stored[stored // 1000 == env].min() for env in (stored // 1000).unique()}
    written = trained(replay, 2)
    windows = replay.sample(50)
    for first, is_init, before in zip(
        windows["observation"][:, 0, 0], windows["is_init"][:, 0, 0], windows["before"][:, 0]
    ):
        number = float(before["observation"])
        if first == oldest[int(first // 1000)]:
            assert is_init, "the record before the oldest is the newest: nobody knows what was"
            continue
        assert number == first - 1
        assert before["latent", "known"] == (not before["done"] or number in written)
        assert is_init == bool(before["done"]), "no policy acts on, or goes on from, a last record"
        if number in written or not before["done"]:
            assert before["latent", "deter"] == number + WRITTEN * (number in written)


def test_last_latent_wins_for_record_in_several_windows():
    replay = filled(8, 4, [[50]], 4)
    windows = replay.sample(3)
    assert torch.equal(windows["index"], torch.arange(4).expand(3, 4))
    windows["latent", "deter"] = torch.arange(12.0).view(3, 4, 1)
    replay.update_priority(windows)
    assert replay.sample(1)["latent", "deter"].flatten().tolist() == [8.0, 9.0, 10.0, 11.0]


def test_window_starts_with_is_init_without_stored_latent():
    replay = SequenceReplay(8, 2, latents=LATENT)
    worlds = [World(0, [50])]
    replay.extend(batch(worlds, 3))  # of random actions
    replay.extend(with_latents(batch(worlds, 3)))
    windows = replay.sample(40)
    first, is_init = windows["observation"][:, 0, 0], windows["is_init"][:, 0, 0]
    assert torch.equal(is_init, first <= 3)
    assert set(first.tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0}


def test_stored_latents_are_restored_from_state_dict():
    replay = filled(24, 3, [[3], [5]], 9)
    trained(replay, 3)
    resumed = SequenceReplay(24, 3, latents=LATENT)
    resumed.load_state_dict(replay.state_dict())
    samples = []
    for one in (replay, resumed):
        torch.manual_seed(1)
        samples.append(one.sample(9))
    assert (samples[0] == samples[1]).all()


@pytest.mark.parametrize("latents", [None, LATENT])
def test_stored_latents_do_not_change_windows_or_counts(latents):
    replay = SequenceReplay(40, 4, latents=latents)
    for _ in range(3):
        replay.extend(batch([World(0, [3]), World(1, [5])], 6))
    torch.manual_seed(0)
    windows = replay.sample(8)
    assert windows.numel() == 8 * 4
    torch.manual_seed(0)
    plain = SequenceReplay(40, 4)
    plain.load_state_dict(replay.state_dict())
    assert torch.equal(plain.sample(8)["observation"], windows["observation"])
