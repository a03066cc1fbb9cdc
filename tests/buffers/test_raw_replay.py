"""Replay memory stores raw values and normalises minibatches when they are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

from kit.buffers import (
    HindsightReplayBuffer,
    PrioritizedSampler,
    ReplayMinibatches,
    SequenceReplay,
    make_replay_buffer,
)
from kit.collectors import AsyncCollector, EpisodeCollector, TensorCollector, VectorCollector
from kit.envs import VectorEnv, make_env
from kit.trainer import Trainer
from tests.errors import raises_setting
from tests.tiny import collector_of, off_policy_plan, sac_parts, sac_trainer

BOTH = {"normalize_observation": True, "normalize_reward": True}
CLIP = 10.0


class Told(gym.Env):
    """Observes and rewards random numbers, and keeps every transition. Truncated after 5 steps.

    Args:
        kind: of the observations: ``vector``, ``stack`` (of two frames) or ``dict``.
    """

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, kind: str) -> None:
        self.kind, self.count, self.log = kind, 0, list[tuple[Any, Any, float, bool]]()
        one = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        number = gym.spaces.Box(0, 9_999, (1,), np.int64)
        self.observation_space = {
            "vector": one,
            "stack": gym.spaces.Box(-np.inf, np.inf, (2, 2), np.float32),
            "dict": gym.spaces.Dict(
                observation=one, achieved_goal=one, desired_goal=one, number=number
            ),
        }[kind]

    def _frame(self, scale: float = 5.0) -> np.ndarray:
        return self.np_random.normal([1.0, -20.0], [1.0, scale]).astype(np.float32)

    def _see(self, first: bool) -> Any:
        self.count += 1
        frame = self._frame()
        if self.kind == "stack":
            return np.stack([frame if first else self.now[1], frame])
        if self.kind == "vector":
            return frame
        goals = {"achieved_goal": self._frame(0.1), "desired_goal": self._frame(50.0)}
        return {"observation": frame, "number": np.array([self.count]), **goals}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.steps, self.now = 0, self._see(first=True)
        return self.now, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        before, self.now = self.now, self._see(first=False)
        self.steps += 1
        reward = float(np.float32(self.np_random.normal(-3.0, 1.0)))
        if len(self.log) % 7 == 3:
            reward *= 500  # clipped
        self.log.append((before, self.now, reward, self.steps == 5))
        return self.now, reward, False, self.steps == 5, {}


def played(kind: str = "vector") -> tuple[VectorCollector, list[Told]]:
    """A collector of raw batches of 3 steps in each of two environments, and these."""
    told: list[Told] = []

    def make() -> Told:
        told.append(Told(kind))
        return told[-1]

    collector = VectorCollector(make_env(make, 2, seed=1, **BOTH), None, steps_per_env=3)
    assert collector.deliver_raw(True)
    return collector, told


def by_hand(moments: Any, value: Any, shifted: bool = True) -> list[float]:
    """Numbers normalised one by one."""
    found = []
    values = np.asarray(value, np.float64)
    means = np.broadcast_to(moments.mean.numpy(), values.shape).ravel().tolist()
    variances = np.broadcast_to(moments.var.numpy(), values.shape).ravel().tolist()
    for number, mean, var in zip(values.ravel().tolist(), means, variances):
        scaled = (number - (mean if shifted else 0.0)) / math.sqrt(var + 1e-8)
        found.append(min(max(scaled, -CLIP), CLIP))
    return found


def assert_near(found: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found.flatten().double(), torch.tensor(expected).double())


def observed(normalizer: Any, key: str, seen: Any) -> list[float]:
    return by_hand(normalizer.observation[key], seen[key] if isinstance(seen, dict) else seen)


def rewarded(normalizer: Any, reward: float) -> float:
    return by_hand(normalizer.reward, reward, shifted=False)[0]


def drawn(replay: Any, length: int | None = None) -> TensorDictBase:
    """Rows of a minibatch."""
    several: dict[str, Any] = {"minibatches_per_gradient_step": None, "sequence_length": length}
    ((minibatch,),) = replay.epoch(SimpleNamespace(minibatch_size=8, **several), 1)
    return minibatch.reshape(-1)


def without_replacement() -> ReplayMinibatches:
    storage = LazyTensorStorage(60)
    parts = {"sampler": SamplerWithoutReplacement(), "batch_size": 8}
    return ReplayMinibatches(TensorDictReplayBuffer(storage=storage, **parts))


PATHS: dict[str, Callable[[Any], ReplayMinibatches]] = {
    "rows": lambda _: make_replay_buffer(60, 8),
    "torchrl": lambda _: without_replacement(),
    "n_step": lambda _: make_replay_buffer(60, 8, n_step=3, gamma=0.5),
    "priorities": lambda _: make_replay_buffer(60, 8, sampler=PrioritizedSampler(60, 0.6, 0.4)),
    "sequences": lambda _: make_replay_buffer(60, 8, sequence_length=2),
    "once": lambda _: make_replay_buffer(60, 8, store_next_observation=False),
    "stack": lambda _: make_replay_buffer(60, 8, stacked_frames=2),
    "dict": lambda _: make_replay_buffer(60, 8),
    "disk": lambda folder: make_replay_buffer(60, 8, folder=folder),
}


@pytest.mark.parametrize("path", PATHS)
def test_minibatch_is_normalised_by_statistics_at_sampling_time(path, tmp_path):
    collector, told = played(path if path in ("stack", "dict") else "vector")
    normalizer, replay = collector.normalizer, PATHS[path](tmp_path)
    replay.normalize_by(normalizer)
    several, length = 3 if path == "n_step" else 1, 2 if path == "sequences" else None
    for collected in (2, 1, 1):  # statistics change in between
        for _ in range(collected):
            replay.extend(collector.collect())
        rows = drawn(replay, length)
        assert len(rows) == 8 * (length or 1)
        for row in rows:
            step, env = divmod(int(row["index"]), 2)
            following = told[env].log[step : step + several]
            ends = [done for *_, done in following]
            following = following[: ends.index(True) + 1] if True in ends else following
            (seen, *_), (_, then, *_) = following[0], following[-1]
            for key in normalizer.observation:
                assert_near(row[key], observed(normalizer, key, seen))
                assert_near(row["next", key], observed(normalizer, key, then))
            rewards = [rewarded(normalizer, reward) for _, _, reward, _ in following]
            assert_near(row["next", "reward"], [sum(r * 0.5**n for n, r in enumerate(rewards))])
            if path == "dict":
                assert row["number"].tolist() == seen["number"].tolist()


def test_records_are_normalised_by_statistics_at_sampling_time():
    collector, told = played("dict")
    normalizer, replay = collector.normalizer, SequenceReplay(60, 4)
    replay.normalize_by(normalizer)
    for _ in range(4):
        replay.extend(collector.collect())
    first = {(env, log[0][0]["number"][0]): 0.0 for env, log in enumerate(t.log for t in told)}
    assert len(first) == 2
    for window in replay.sample(8):
        arrived = {}
        for log in (one.log for one in told):
            for seen, then, reward, _ in log:
                arrived.setdefault(tuple(seen["observation"].tolist()), (seen, 0.0))
                arrived[tuple(then["observation"].tolist())] = then, reward
        by_expected = {
            tuple(np.float32(observed(normalizer, "observation", seen)).tolist()): (seen, reward)
            for seen, reward in arrived.values()
        }
        for record in window:
            near = min(
                by_expected, key=lambda e: sum(abs(a - b) for a, b in zip(e, record["observation"]))
            )
            seen, reward = by_expected[near]
            for key in normalizer.observation:
                assert_near(record[key], observed(normalizer, key, seen))
            assert_near(record["reward"], [rewarded(normalizer, reward)])


def test_hindsight_normalises_goals_and_rewards_at_sampling_time():
    collector, told = played("dict")
    achieved = ("next", "achieved_goal")

    def reward(rows: TensorDictBase) -> torch.Tensor:
        return -(rows[achieved] - rows["desired_goal"]).abs().sum(-1, keepdim=True)

    buffer = HindsightReplayBuffer(
        reward, her_ratio=1.0, strategy="final", achieved_goal_key=achieved,
        storage=LazyTensorStorage(60), batch_size=8,
    )  # fmt: skip
    replay, normalizer = ReplayMinibatches(buffer), collector.normalizer
    replay.normalize_by(normalizer)
    for _ in range(5):
        replay.extend(collector.collect())
    for row in drawn(replay):
        step, env = divmod(int(row["index"]), 2)
        log = told[env].log
        last = min(step // 5 * 5 + 4, len(log) - 1)
        goal, then = log[last][1]["achieved_goal"], log[step][1]
        assert_near(row["desired_goal"], observed(normalizer, "desired_goal", goal))
        assert_near(row[achieved], observed(normalizer, "achieved_goal", then))
        raw = -float(np.abs(then["achieved_goal"] - goal).sum())
        assert_near(row["next", "reward"], [rewarded(normalizer, raw)])


# ---------------------------------------------------------------------- collectors
def centred(rows: TensorDictBase) -> TensorDictBase:
    """A policy whose actions depend on nothing, and which keeps what it sees."""
    seen = rows["observation"].clone()
    return rows.set("action", torch.zeros(*rows.shape, dtype=torch.long)).set("acted_on", seen)


class Centred(torch.nn.Module):
    """The same, as a module, of which another process has a copy."""

    in_keys, out_keys = ("observation",), ("action", "acted_on")

    def forward(self, rows: TensorDictBase) -> TensorDictBase:
        """Act."""
        return centred(rows)


def cartpole(**normalized: bool) -> VectorEnv:
    return make_env("CartPole-v1", 2, seed=3, max_episode_steps=4, **normalized)


def in_torch(**normalized: bool) -> VectorEnv:
    settings = {"seed": 3, "max_episode_steps": 4, "vectorization": "tensor"}
    return make_env("CartPole-v1", 2, **settings, **normalized)


COLLECTORS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "vector": (VectorCollector, cartpole, {"steps_per_env": 5}),
    "single": (VectorCollector, cartpole, {"steps_per_env": 1}),
    "episode": (EpisodeCollector, cartpole, {"min_episodes": 2}),
    "tensor": (TensorCollector, in_torch, {"steps_per_env": 5}),
    "async": (AsyncCollector, cartpole, {"steps_per_env": 5, "max_staleness": 0}),
}


@pytest.mark.parametrize("name", COLLECTORS)
def test_collector_delivers_raw_batches_and_acts_on_normalised(name):
    kind, make, counts = COLLECTORS[name]
    settings = {"plain": ({}, True), "normalised": (BOTH, False), "raw": (BOTH, True)}
    found, statistics = {}, []
    steps = {count: number for count, number in counts.items() if count != "max_staleness"}
    for how, (normalized, raw) in settings.items():
        alone = kind is AsyncCollector and how != "raw"  # processes take seconds
        made = (VectorCollector if alone else kind), make(**normalized), Centred()
        collector = made[0](*made[1:], seed=5, **(counts if how == "raw" else steps))
        assert collector.deliver_raw(raw)
        found[how] = [collector.collect().clone() for _ in range(3)]
        episodes = [one.episode_return for one in collector.take_episodes()]
        assert set(episodes) <= {4.0}, "returns are raw"
        if normalized:
            statistics.append(collector.normalizer.state_dict())
        collector.shutdown()
    assert statistics[0] == statistics[1]
    for plain, normalised, raw in zip(*found.values()):
        for key in ("observation", ("next", "observation"), ("next", "reward"), "action"):
            torch.testing.assert_close(raw[key], plain[key], rtol=0, atol=0)
        assert torch.equal(raw["acted_on"], normalised["observation"])
        assert not torch.equal(normalised["observation"], plain["observation"])


def test_env_tensordicts_stay_normalised_when_arrays_are_raw():
    made = []
    for raw in (False, True):
        env = cartpole(**BOTH)
        env.leave_raw(raw)
        steps = [env.reset()]
        for _ in range(3):
            step = env.step(steps[-1].set("action", torch.zeros(2, dtype=torch.long)))
            steps.append(step["next"])
        made.append(torch.stack([TensorDict({"seen": one["observation"]}) for one in steps]))
        made.append(steps[-1]["reward"])
    assert torch.equal(made[0]["seen"], made[2]["seen"])
    assert torch.equal(made[1], made[3])


# ---------------------------------------------------------------------- trainers
def normalised_run(**parts: Any) -> Any:
    plan = off_policy_plan()
    own = sac_parts(plan)
    env = make_env("Pendulum-v1", 1, seed=0, **BOTH)
    own["collector"] = collector_of(plan, env, own["collector"].policy, seed=0)
    return Trainer(plan, **{**own, **parts})


def test_first_rewards_are_scaled_by_current_statistics():
    """They were some hundred times too large: normalised by the first statistics."""
    trainer, plain = normalised_run(), sac_trainer()
    for one in (trainer, plain):
        one.run()
    rewards, raw = (one.buffer.buffer.storage.get(range(8))["next", "reward"]
                    for one in (trainer, plain))  # fmt: skip
    assert torch.equal(rewards, raw), "actions are random until the tenth step"
    normalizer = trainer.collector.normalizer
    for row in next(iter(trainer.buffer.epoch(trainer.plan, 1)))[0]:
        stored = trainer.buffer.buffer.storage.get(int(row["index"]))
        assert_near(row["next", "reward"], [rewarded(normalizer, float(stored["next", "reward"]))])


def test_normalised_run_resumes_with_raw_buffer(tmp_path):
    whole = normalised_run()
    whole.run()
    plan = off_policy_plan()
    half = normalised_run(folder=tmp_path, checkpoint_every=20)
    half.register_op("post_steps", lambda: half.policy_steps == 20 and half.request_stop("here"))
    half.run()
    again = normalised_run(resume_from=half.last_checkpoint)
    again.run()
    assert plan.total_policy_steps == again.policy_steps
    one, other = (t.buffer.buffer.storage.get(range(40)) for t in (whole, again))
    assert torch.equal(one["observation"], other["observation"])
    weights, others = (t.loss_module.state_dict() for t in (whole, again))
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("replay", [make_replay_buffer(9, 2, n_step=2), SequenceReplay(9, 2)])
def test_checkpoint_of_earlier_version_stays_normalised(replay):
    collector, _ = played()
    normalizer = collector.normalizer
    replay.normalize_by(normalizer)
    raw = replay.state_dict()
    replay.load_state_dict(raw)
    assert replay.normalizer is normalizer
    replay.load_state_dict({name: value for name, value in raw.items() if name != "raw"})
    assert replay.normalizer is None
    state = collector.env.full_state()
    collector.env.load_full_state({name: one for name, one in state.items() if name != "raw"})
    assert not collector.env.raw


def test_trainer_rejects_normalising_collector_with_replay():
    env = make_env("Pendulum-v1", 1, **BOTH)
    policy = sac_parts(off_policy_plan())["collector"].policy
    counts = {"frames_per_batch": 1, "total_frames": 40, "init_random_frames": 10}
    with raises_setting("collector"):
        normalised_run(collector=Collector(env, policy, **counts))


@pytest.mark.parametrize(("statistics", "raw"), [(None, True), (object(), True), (None, False)])
def test_async_collector_delivers_raw_only_with_local_normalizer(statistics, raw):
    here: Any = SimpleNamespace(
        normalizer=statistics, normalized_by="Normalizer", _send=lambda _: None,
        _await=lambda _: True,
    )  # fmt: skip
    assert AsyncCollector.deliver_raw(here, raw) == (statistics is not None or not raw)
