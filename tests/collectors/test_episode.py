"""EpisodeCollector: whole episodes, none dropped, none preferred."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from kit.collectors import EpisodeCollector
from kit.envs import make_env
from kit.envs.errors import EnvError
from kit.modules import make_actor
from kit.testing import CollectorCase, counter_env
from tests.collectors.kinds import episodes
from tests.envs.odd_envs import Raises, Steps
from tests.errors import raises_setting

CASE = CollectorCase()


def of_length(length, num_envs=2, **kwargs):
    return EpisodeCollector(make_env(lambda: Steps(length), num_envs), **kwargs)


def lengths(batch):
    return batch["collector", "mask"].sum(-1).tolist()


# ---------------------------------------------------------------------- how much
@pytest.mark.parametrize("num_envs", [1, 2, 5])
def test_min_episodes_collects_exact_episode_count(num_envs):
    collector = episodes(
        CASE, make_env("kit/Counter-v0", num_envs), min_episodes=7, total_frames=100
    )
    for batch in collector:
        assert len(batch) == 7
    assert collector.episodes == 7 * (collector._iter + 1)


@pytest.mark.parametrize("num_envs", [1, 2, 3, 8])
def test_known_episode_length_gives_minimal_episode_count(num_envs):
    collector = of_length(4, num_envs, min_steps=10, episode_length=4)
    assert lengths(collector.collect()) == [4, 4, 4]
    assert (collector.policy_steps, collector.env_steps) == (12, 12)


def test_batch_meets_min_steps_and_min_episodes():
    collector = of_length(4, 2, min_steps=10, min_episodes=5)
    assert lengths(collector.collect()) == [4] * 5
    collector = of_length(4, 2, min_steps=10, min_episodes=2)
    assert lengths(collector.collect()) == [4] * 3


def test_first_batch_is_larger_when_episode_length_is_unknown():
    collector = of_length(4, 8, min_steps=8)
    assert [len(collector.collect()), len(collector.collect())] == [8, 2]


def test_collection_stops_after_total_frames():
    collector = of_length(4, 2, min_episodes=2, total_frames=20)
    assert [int(b["collector", "mask"].sum()) for b in collector] == [8, 8, 8]


def test_prefill_is_separate_first_batch():
    collector = of_length(4, 1, min_episodes=1, prefill_frames=10, total_frames=24)
    assert [len(batch) for batch in collector] == [3, 1, 1, 1]


def test_episode_collector_requires_min_steps_or_min_episodes():
    with raises_setting("min_episodes"):
        of_length(4)


# ---------------------------------------------------------------------- without bias
@pytest.mark.parametrize("vectorization", ["sync", "tensor"])
def test_batch_contains_every_started_episode(vectorization):
    """Dropping the episodes that are open when enough have ended would prefer short ones."""
    collector = episodes(CASE, counter_env(CASE, vectorization), min_episodes=6, total_frames=-1)
    for _ in range(4):
        batch = collector.collect()
        last = batch["collector", "mask"].sum(-1) - 1
        ended = batch["next", "done"].squeeze(-1)[torch.arange(6), last]
        assert ended.all()
        assert batch["observation"][:, 0, 1:].eq(0).all()
        assert int(batch["next", "done"].sum()) == 6


def test_batch_is_not_biased_to_short_episodes():
    """Copy 1 plays ten episodes while copy 0 plays one; exactly two begin, one in each."""

    made = []

    def make():
        made.append(None)
        return Steps(length=10 if len(made) == 1 else 1)

    collector = EpisodeCollector(make_env(make, 2), min_episodes=2)
    assert sorted(lengths(collector.collect())) == [1, 10]


# ---------------------------------------------------------------------- layouts
def test_padding_is_zero_outside_mask():
    batch = episodes(CASE, min_episodes=9).collect()
    mask = batch["collector", "mask"]
    assert mask.shape == batch.shape == (9, int(mask.sum(-1).max()))
    assert not mask.all()
    for key in ("observation", "action", ("next", "reward"), ("next", "done")):
        assert batch[key][~mask].eq(0).all()


def test_flat_layout_concatenates_same_episodes():
    padded = episodes(CASE, min_episodes=9).collect()
    flat = episodes(CASE, min_episodes=9, layout="flat").collect()
    mask = padded["collector", "mask"]
    assert flat.shape == (int(mask.sum()),)
    for key in flat.keys(True, True):
        assert torch.equal(flat[key], padded[key][mask])


def test_episode_collector_rejects_unknown_layout():
    with raises_setting("layout"):
        of_length(4, min_episodes=1, layout="stacked")


# ---------------------------------------------------------------------- copies that are free
def test_idle_envs_are_not_stepped():
    collector = of_length(4, 3, min_episodes=4)
    collector.collect()
    assert (collector.env_steps, collector.idle_env_steps) == (16, 0)


def test_idle_env_steps_are_counted_separately():
    env = make_env("CartPole-v1", 3, vectorization="native", max_episode_steps=5)
    collector = EpisodeCollector(env, min_episodes=4, episode_length=5)
    batch = collector.collect()
    assert lengths(batch) == [5] * 4
    assert (collector.policy_steps, collector.env_steps) == (20, 20)
    assert collector.idle_env_steps == 2 * 5  # two copies, while the third plays the fourth
    collector.collect()
    assert collector.episodes == 8


def test_growing_buffer_keeps_long_episodes_complete():
    batch = of_length(300, 2, min_episodes=2).collect()
    assert lengths(batch) == [300, 300]
    seen = batch["observation"][1].flatten().numpy()
    assert np.array_equal(seen, np.arange(300))


# ---------------------------------------------------------------------- policies made by NumPy
def collected_twice(id, batches=4, num_envs=3, **kwargs):
    """What a small policy collects by way of NumPy, and by way of PyTorch."""
    found = []
    for fast, path in (("auto", "numpy"), ("exact", "program")):
        torch.manual_seed(0)
        env = make_env(id, num_envs, seed=1, max_episode_steps=40)
        actor = make_actor(env, (8,), "tanh")
        collector = EpisodeCollector(env, actor, seed=2, fast_policy=fast, **kwargs)
        found.append((collector, [collector.collect() for _ in range(batches)]))
        assert collector.policy_path.name == path
    return found


@pytest.mark.parametrize(
    "kwargs",
    [
        {"min_episodes": 2},
        {"min_steps": 400},
        {"min_steps": 100, "layout": "flat"},
        {"min_steps": 50, "init_random_frames": 61},
    ],
)
@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1"])
def test_numpy_policy_matches_pytorch_episodes_and_rng(id, kwargs):
    (one, ours), (other, theirs) = collected_twice(id, **kwargs)
    for mine, wanted in zip(ours, theirs):
        assert mine.shape == wanted.shape
        assert torch.equal(mine["collector", "traj_ids"], wanted["collector", "traj_ids"])
        for key in ("observation", "action", "action_log_prob", ("next", "reward")):
            torch.testing.assert_close(mine[key], wanted[key], rtol=1e-3, atol=1e-3)
    states = [c.state_dict()["random_numbers"]["state"] for c in (one, other)]
    assert torch.equal(*states)
    assert one.random_policy_steps == other.random_policy_steps


def test_collector_returns_complete_episodes_after_env_error(tmp_path):
    raising = functools.partial(Raises, at=(6,), path=str(tmp_path / "calls"), length=4)
    collector = EpisodeCollector(make_env(raising, 2), min_episodes=2)
    with pytest.raises(EnvError):
        collector.collect()
    batch = collector.collect()
    assert lengths(batch) == [4, 4]
    assert batch["observation"][0].flatten().tolist() == [0, 1, 2, 3]
    assert collector.policy_steps == 8


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_normalizer_ignores_idle_env_steps(vectorization):
    env = make_env("CartPole-v1", 4, vectorization=vectorization, normalize_observation=True)
    collector = EpisodeCollector(env, None, min_episodes=5)
    for _ in range(4):
        collector.collect()
    count = round(float(env.normalizer.observation["observation"].count))
    assert vectorization == "sync" or collector.idle_env_steps > 50
    # Every step, and the first observations of episodes that begin a batch.
    assert collector.policy_steps + 4 <= count <= collector.policy_steps + 4 * 5


@pytest.mark.parametrize("vectorization", ["native", "tensor"])
def test_idle_stepped_env_is_reset_before_new_episode(vectorization):
    """Such copies cannot stand still, and one without an episode may get one in the same batch."""
    env = make_env("CartPole-v1", 3, vectorization=vectorization, seed=0)
    collector = EpisodeCollector(env, None, min_steps=60)
    for _ in range(12):
        batch = collector.collect()
        assert batch["observation"][:, 0].abs().max() <= 0.05  # of a reset
    assert collector.idle_env_steps > 0
