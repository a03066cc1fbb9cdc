"""VectorCollector: exact counts, totals and episodes; TorchRL's ways of using a collector."""

from __future__ import annotations

import gc
import weakref

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torchrl.collectors import BaseCollector
from torchrl.data import Unbounded
from torchrl.envs.transforms import TensorDictPrimer

from kit.collectors import VectorCollector
from kit.collectors.rollout_buffer import RolloutBuffer
from kit.envs import make_env
from kit.modules import make_actor
from kit.steps import SettingError
from kit.testing import CollectorCase, counter_env
from tests.collectors.kinds import vector
from tests.envs.odd_envs import Steps
from tests.tiny import assert_same

CASE = CollectorCase()


def steps(num_envs=2, **kwargs):
    return VectorCollector(make_env(Steps, num_envs), **kwargs)


# ---------------------------------------------------------------------- how much
def test_vector_collector_is_base_collector_with_torchrl_keys():
    collector = vector(CASE)
    assert isinstance(collector, BaseCollector)
    keys = {"observation", "action", "action_log_prob", "logits", ("collector", "traj_ids")}
    names = ("observation", "reward", "done", "terminated", "truncated")
    batch = collector.collect()
    assert set(batch.keys(True, True)) == keys | {("next", name) for name in names}
    for name in names[1:]:
        assert batch["next", name].shape == (3, 5, 1)


def test_frames_per_batch_and_steps_per_env_are_equivalent():
    assert steps(frames_per_batch=6).steps_per_env == 3
    assert steps(steps_per_env=3).frames_per_batch == 6


def test_len_matches_number_of_collected_batches():
    collector = steps(frames_per_batch=6, total_frames=18)
    assert len(collector) == len(list(collector)) == 3
    assert collector.policy_steps == 18


def test_len_raises_type_error_without_total_frames():
    with pytest.raises(TypeError):
        len(steps(frames_per_batch=6))


def test_prefill_is_separate_first_batch():
    collector = steps(frames_per_batch=6, prefill_frames=10, total_frames=28)
    assert [batch.shape[1] for batch in collector] == [5, 3, 3, 3]


@pytest.mark.parametrize(
    ("settings", "field", "nearest"),
    [
        ({"frames_per_batch": 7}, "frames_per_batch", ["6", "8"]),
        ({"frames_per_batch": 1}, "frames_per_batch", ["2"]),
        ({"frames_per_batch": 6, "steps_per_env": 4}, "steps_per_env", ["3"]),
        ({"frames_per_batch": 6, "total_frames": 20}, "total_frames", ["18", "24"]),
        ({"frames_per_batch": 6, "total_frames": 3}, "total_frames", ["6"]),
        ({"frames_per_batch": 6, "init_random_frames": 5}, "init_random_frames", ["4", "6"]),
        ({"frames_per_batch": 6, "prefill_frames": 3}, "prefill_frames", ["2", "4"]),
        ({"frames_per_batch": 0}, "frames_per_batch", []),
        ({"frames_per_batch": 6.5}, "frames_per_batch", []),
    ],
)
def test_unreachable_counts_raise_error_with_nearest_values(settings, field, nearest):
    with pytest.raises(SettingError) as caught:
        steps(**settings)
    assert caught.value.field == field
    for value in nearest:
        assert value in str(caught.value).partition("Try")[2]


# ---------------------------------------------------------------------- what it steps
def test_collector_accepts_env_factory():
    collector = VectorCollector(lambda: make_env(Steps, 2), steps_per_env=3)
    assert collector.collect().shape == (2, 3)


def test_env_steps_are_exact_when_episode_ends_inside_repeat():
    # Episodes of three env steps: repeats of two make two and one.
    collector = VectorCollector(make_env(Steps, 2, action_repeat=2), steps_per_env=5)
    batch = collector.collect()
    assert batch[0]["next", "reward"].flatten().tolist() == [2, 1, 2, 1, 2]
    assert (collector.policy_steps, collector.env_steps) == (10, 2 * (2 + 1 + 2 + 1 + 2))
    found = [(e.length, e.env_steps, e.episode_return) for e in collector.take_episodes()]
    assert found == [(2, 3, 3.0)] * 4


def test_reset_at_each_iter_starts_new_episodes():
    collector = steps(steps_per_env=4, reset_at_each_iter=True, total_frames=16)
    for batch in collector:
        assert batch["observation"][0].flatten().tolist() == [0, 1, 2, 0]
    assert collector.episodes == 4
    assert [e.length for e in collector.take_episodes()] == [3] * 4


# ---------------------------------------------------------------------- memory and seeds
@pytest.mark.parametrize("steps_per_env", [1, 2, 5])
def test_batch_modifications_do_not_change_counts(steps_per_env):
    ours, other = (steps(steps_per_env=steps_per_env) for _ in range(2))
    for _ in range(12):
        batch, wanted = ours.collect(), other.collect()
        for key in ("reward", "done", "terminated", "truncated"):
            batch["next", key].zero_()
        assert torch.equal(batch["observation"], wanted["observation"])
        assert torch.equal(batch["collector", "traj_ids"], wanted["collector", "traj_ids"])
    assert ours.take_episodes() == other.take_episodes()
    assert (ours.env_steps, ours.episodes) == (other.env_steps, other.episodes)
    assert ours.episodes == 2 * (12 * steps_per_env // 3)


class Remembers(gym.Env):
    """Observes the action before the last one, which it has kept, and changes what it was given."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gym.spaces.Box(-np.inf, np.inf, (1,))

    def reset(self, **_):
        self.before = np.zeros(1, np.float32)
        return self.before.copy(), {}

    def step(self, action):
        seen, self.before = self.before.copy(), action
        return seen, 0.0, False, False, {}


class Spoils(Remembers):
    def step(self, action):
        action *= 0
        return super().step(action)


@pytest.mark.parametrize("fast_policy", ["auto", "exact"])
@pytest.mark.parametrize("steps_per_env", [1, 3])
def test_env_may_store_or_modify_action(steps_per_env, fast_policy):
    found = []
    for kind in (Remembers, Spoils):
        env = make_env(kind, 2)
        torch.manual_seed(0)
        actor = make_actor(env, (8,), orthogonal=False)
        collector = VectorCollector(
            env, actor, steps_per_env=steps_per_env, fast_policy=fast_policy
        )
        batches = torch.cat([collector.collect() for _ in range(6)], dim=1)
        found.append((batches["action"], batches["next", "observation"]))
    (actions, seen), (spoilt, _) = found
    assert torch.equal(seen[:, 1:], actions[:, :-1])
    assert (spoilt != 0).all()


class RemembersWhatItSaw(TensorDictModuleBase):
    """Its hidden state is the observation of the step before."""

    in_keys = ("observation", "previous")
    out_keys = ("action", ("next", "previous"))

    def __init__(self, reads_it):
        super().__init__()
        self.reads_it = reads_it

    def forward(self, tensordict):
        seen = tensordict["observation"]
        before = tensordict["previous"] if self.reads_it else 0
        tensordict["action"] = (seen > before)[..., 2].long()
        return tensordict.set(("next", "previous"), seen)

    def make_tensordict_primer(self):
        return TensorDictPrimer({"previous": Unbounded((4,))}, expand_specs=True)


@pytest.mark.parametrize("reads_it", [True, False])
@pytest.mark.parametrize("steps_per_env", [1, 3])
def test_policy_may_store_observation(steps_per_env, reads_it):
    policy = RemembersWhatItSaw(reads_it)
    collector = VectorCollector(make_env("CartPole-v1", 2), policy, steps_per_env=steps_per_env)
    batch = torch.cat([collector.collect() for _ in range(24 // steps_per_env)], dim=1)
    going_on = ~batch["next", "done"][:, :-1, 0]
    wanted = batch["observation"][:, :-1][going_on]
    assert torch.equal(batch["previous"][:, 1:][going_on], wanted)


def test_observation_key_may_equal_collector_entry_name():
    class Named(gym.Env):
        observation_space = gym.spaces.Dict(traj_ids=gym.spaces.Box(0, 99, (1,)))
        action_space = gym.spaces.Discrete(2)

        def reset(self, **_):
            self.time = 0
            return {"traj_ids": np.zeros(1, np.float32)}, {}

        def step(self, action):
            self.time += 1
            return {"traj_ids": np.full(1, self.time, np.float32)}, 0.0, False, False, {}

    collector = VectorCollector(make_env(Named, 1), steps_per_env=1)
    seen = [collector.collect()["traj_ids"].item() for _ in range(5)]
    assert seen == [0, 1, 2, 3, 4]


def test_used_collector_continues_from_loaded_state():
    def made():
        env = make_env("CartPole-v1", 2, max_episode_steps=5)
        torch.manual_seed(0)
        return VectorCollector(env, make_actor(env, (8,)), steps_per_env=1)

    saved, used = made(), made()
    state = saved.state_dict()  # before a random number was drawn
    for _ in range(13):
        used.collect()
    used.load_state_dict(state)
    for _ in range(20):
        batch, wanted = used.collect(), saved.collect()
        assert [k for k in batch.keys(True, True) if not torch.equal(batch[k], wanted[k])] == []


@pytest.mark.parametrize("steps_per_env", [1, 7])
def test_episode_returns_do_not_depend_on_query_time(steps_per_env):
    asked, other = (
        VectorCollector(
            make_env("Pendulum-v1", 2, max_episode_steps=21), steps_per_env=steps_per_env
        )
        for _ in range(2)
    )
    for _ in range(63 // steps_per_env):
        asked.collect()
        assert asked.env_steps == asked.policy_steps
        asked.state_dict()
        other.collect()
    found = other.take_episodes()
    assert len(found) == 6
    assert asked.take_episodes() == found


def test_large_batches_are_never_overwritten(monkeypatch):
    monkeypatch.setattr("kit.collectors.rollout.SMALL", 0)
    given, copied = steps(steps_per_env=4), steps(steps_per_env=4)
    batches = [given.collect() for _ in range(3)]
    monkeypatch.setattr("kit.collectors.rollout.SMALL", 2**22)
    for batch in batches:
        wanted = copied.collect()
        assert all(torch.equal(batch[key], wanted[key]) for key in wanted.keys(True, True))
    assert given.take_episodes() == copied.take_episodes()


def test_retained_entry_does_not_retain_other_entries(monkeypatch):
    for module in ("rollout", "rollout_buffer"):
        monkeypatch.setattr(f"kit.collectors.{module}.SMALL", 0)
    collector = steps(steps_per_env=4)
    kept = collector.collect()["next", "reward"]
    memory = weakref.ref(collector._buffer.acted_on["observation"].base)
    collector.collect()
    gc.collect()
    assert memory() is None
    assert kept.shape == (2, 4, 1)


def test_rollout_buffer_arrays_are_aligned_to_16_bytes():
    buffer = RolloutBuffer(make_env("Pendulum-v1", 3), 5)
    arrays = [*buffer.acted_on.values(), *buffer.whole.next_observation.values()]
    assert [array.ctypes.data % 16 for array in (*arrays, buffer.whole.reward)] == [0, 0, 0]


def test_reuse_overwrites_previous_batch():
    collector = steps(steps_per_env=2, reuse=True)
    first, second = collector.collect(), collector.collect()
    assert first["observation"].data_ptr() == second["observation"].data_ptr()
    assert first["observation"][0].flatten().tolist() == [2, 0]


@pytest.mark.parametrize("steps_per_env", [1, 3])
@pytest.mark.parametrize("exact", [False, True])
def test_reused_batches_match_copied_batches(steps_per_env, exact):
    collectors = []
    for reuse in (False, True):
        torch.manual_seed(0)
        env = make_env("Pendulum-v1", 2, seed=1, max_episode_steps=20)
        policy = make_actor(env, (8,)).select_out_keys("action")
        collectors.append(
            VectorCollector(
                env, policy, steps_per_env=steps_per_env, init_random_frames=12, reuse=reuse,
                fast_policy="exact" if exact else "auto",
            )
        )  # fmt: skip
    for _ in range(150 // steps_per_env):
        copied, shared = (collector.collect() for collector in collectors)
        assert_same(copied.to_dict(), shared.to_dict())
    copied, shared = collectors
    assert copied.env_steps == shared.env_steps == 300 // steps_per_env * steps_per_env
    assert copied.take_episodes() == shared.take_episodes()
    assert copied.episodes == shared.episodes > 10


def test_replaced_entry_does_not_affect_next_batch():
    collector, copied = steps(steps_per_env=2, reuse=True), steps(steps_per_env=2)
    for _ in range(3):
        batch = collector.collect()
        assert_same(batch.to_dict(), copied.collect().to_dict())
        batch["observation"] = batch["observation"] * 2
        batch["note"] = batch["observation"]


def test_last_reused_batch_is_stable_after_reuse_is_disabled():
    collector = steps(steps_per_env=2, reuse=True)
    collector.collect()
    last = collector.collect()
    before = last.clone()
    collector.reuse = False
    collector.collect()
    assert_same(last.to_dict(), before.to_dict())


def test_batch_writes_do_not_affect_later_batches():
    collector, copied = steps(1, steps_per_env=1), steps(1, steps_per_env=1)
    for number in range(12):
        collector.reuse = number % 4 > 0
        batch = collector.collect()
        assert_same(batch.to_dict(), copied.collect().to_dict())
        for value in batch.values(True, True):
            value.fill_(1)
    assert collector.take_episodes() == copied.take_episodes()
    assert collector.env_steps == copied.env_steps == 12


def test_each_batch_draws_new_policy_noise():
    def noise(observation):
        return torch.rand(observation.shape[0], 1)

    policy = TensorDictModule(noise, in_keys=["observation"], out_keys=["action"])
    env = make_env("Pendulum-v1", 2)
    collector = VectorCollector(env, policy, frames_per_batch=8, seed=3)
    drawn = torch.cat([collector.collect()["action"].flatten().clone() for _ in range(3)])
    assert len(drawn.unique()) == len(drawn) == 24
    collector.shutdown()


def test_set_seed_reproduces_batches_and_returns_next_seed():
    collector = vector(CASE, total_frames=-1)
    found = []
    for _ in range(2):
        assert collector.set_seed(7) == 8
        found.append(collector.collect().clone())
    for key in ("observation", "action", "action_log_prob"):
        assert torch.equal(found[0][key], found[1][key])
    assert collector.set_seed(7, static_seed=True) == 7


def test_episodes_interrupted_by_set_seed_are_not_reported():
    collector = steps(steps_per_env=2)
    collector.collect()
    collector.set_seed(1)
    assert collector.collect()["observation"][0].flatten().tolist() == [0, 1]
    collector.collect()
    assert [e.length for e in collector.take_episodes()] == [3, 3]


# ---------------------------------------------------------------------- in and out
def test_collect_raises_after_shutdown():
    collector = vector(CASE)
    collector.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        collector.collect()


def test_shutdown_can_leave_env_open():
    env = counter_env(CASE)
    collector = VectorCollector(env, steps_per_env=2)
    collector.collect()
    collector.shutdown(close_env=False)
    assert VectorCollector(env, steps_per_env=2).collect().shape == (3, 2)


def test_env_without_state_starts_new_episodes_after_resume():
    class Opaque(Steps):
        """Holds something that is no plain value."""

        def __init__(self):
            super().__init__(length=4)
            self.simulator = object()

    def make():
        return VectorCollector(make_env(Opaque), steps_per_env=6)

    saving, going_on = make(), make()
    saving.collect()
    going_on.load_state_dict(saving.state_dict())
    assert not going_on.exact_resume
    batch = going_on.collect()
    assert batch["observation"].flatten().tolist() == [0, 1, 2, 3, 0, 1]
    assert (going_on.policy_steps, going_on.episodes) == (12, 2)
    # The one that was open is not reported: nobody knows how it would have ended.
    assert [e.length for e in going_on.take_episodes()] == [4, 4]
