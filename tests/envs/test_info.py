"""What environments say in ``info``: numbers of finished episodes, and masks of actions."""

from __future__ import annotations

import itertools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, MultiDiscrete
from gymnasium.vector import AutoresetMode
from tensordict.nn import TensorDictModule
from torchrl.envs import DoubleToFloat, GymWrapper, SerialEnv, TransformedEnv
from torchrl.envs.gym_like import default_info_dict_reader

from kit.collectors import EpisodeCollector, VectorCollector
from kit.envs import ActionMask, make_env
from kit.hooks import Evaluator
from tests.envs.odd_envs import (
    Allowed,
    Reports,
    Steps,
)

still = TensorDictModule(lambda seen: seen.squeeze(-1).long() * 0, ["observation"], ["action"])


# ---------------------------------------------------------------------- finished episodes
def gymnasium_vector(kind, **kwargs):
    makers = [lambda: Reports(2), lambda: Reports(3)]
    return make_env(kind(makers, autoreset_mode=AutoresetMode.SAME_STEP, **kwargs))


class OfArrays(gym.Wrapper):
    """Values of ``info`` as arrays, which TorchRL's reader asks for."""

    def step(self, action):
        *rest, info = self.env.step(action)
        return *rest, {name: np.float32(info[name]) for name in ("is_success", "number")}


def torchrl(length):
    reader = default_info_dict_reader(["is_success", "number"])
    return GymWrapper(OfArrays(Reports(length))).set_info_dict_reader(reader)


def of_lengths_2_and_3(vectorization):
    lengths = itertools.cycle([2, 3])
    return make_env(lambda: Reports(next(lengths)), 2, vectorization=vectorization, num_workers=1 if
                    vectorization == "async" else None, action_mask=False)  # fmt: skip


HOST = {
    "sync": lambda: of_lengths_2_and_3("sync"),
    "async": lambda: make_env(lambda: Reports(2), 2, vectorization="async"),
    "gymnasium": lambda: gymnasium_vector(gym.vector.SyncVectorEnv),
    "torchrl": lambda: make_env(SerialEnv(2, [lambda: torchrl(2), lambda: torchrl(3)])),
    "torchrl over the kit": lambda: make_env(
        TransformedEnv(of_lengths_2_and_3("sync"), DoubleToFloat())
    ),
}


@pytest.mark.parametrize("kind", HOST)
def test_final_info_values_belong_to_finished_episode(kind):
    env = HOST[kind]()
    collector = VectorCollector(env, None, steps_per_env=3)
    episodes = []
    for _ in range(4):
        collector.collect()
        episodes += collector.take_episodes()
    collector.shutdown()
    for number in range(2):
        infos = [episode.info for episode in episodes if episode.env == number]
        assert len(infos) in (4, 6)  # episodes of 3 and 2 steps in 12
        first = 1 if kind == "torchrl" else 0  # SerialEnv resets once when it is made
        assert infos == [
            {"is_success": float(played % 2), "number": played}
            for played in range(first, first + len(infos))
        ]


class ReportsAtFirst(Reports):
    """Says it of its first 40 episodes alone."""

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, info if self.episodes < 40 else {}


@pytest.mark.parametrize("steps_per_env", [1, 3, 200])
def test_info_values_match_episodes_for_any_batch_length(steps_per_env):
    collector = VectorCollector(
        make_env(lambda: ReportsAtFirst(2), 2), None, steps_per_env=steps_per_env
    )
    for _ in range(600 // steps_per_env):
        collector.collect()
    assert collector.episodes == 600
    episodes = collector.take_episodes()
    for number in range(2):
        told = [episode.info.get("number") for episode in episodes if episode.env == number]
        assert told == [*range(40), *[None] * 260]


def test_episode_collector_and_torchrl_rollout_report_info():
    collector = EpisodeCollector(make_env(lambda: Reports(2), 2), None, min_episodes=4)
    for batch in range(2):
        collector.collect()
        numbers = sorted(episode.info["number"] for episode in collector.take_episodes())
        assert numbers == [2 * batch + 0, 2 * batch, 2 * batch + 1, 2 * batch + 1]
    env = make_env(lambda: Reports(3), 1)
    env.rollout(6, break_when_any_done=False)
    assert [episode.info["is_success"] for episode in env.take_episodes()] == [0.0, 1.0]


def test_info_values_are_correct_after_failed_batch():
    calls = itertools.count(1)

    def interrupted(tensordict):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return still(tensordict)

    env = make_env(lambda: Reports(2), 2)
    collector = EpisodeCollector(env, interrupted, min_episodes=2, fast_policy="module")
    with pytest.raises(KeyboardInterrupt):
        collector.collect()
    collector.collect()
    assert [episode.info["number"] for episode in collector.take_episodes()] == [1, 1]


def test_evaluation_reports_mean_info_values():
    evaluate = Evaluator(make_env(lambda: Reports(2), 2), still, episodes=4)
    assert evaluate(0)["evaluation/is_success"] == 0.5


def test_info_values_of_registered_env_are_reported():
    env = make_env("Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3", 2, max_episode_steps=5)
    collector = VectorCollector(env, None, steps_per_env=5)
    collector.collect()
    assert [episode.info for episode in collector.take_episodes()] == [{"prob": 1.0}] * 2


def test_take_infos_is_empty_without_info():
    env = make_env("CartPole-v1", 2, max_episode_steps=5)
    env.start()
    for _ in range(5):
        env.step_arrays({"action": np.zeros(2, np.int64)}, env.new_step())
    assert env.take_infos() == {}


# ---------------------------------------------------------------------- masks
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_action_mask_in_info_becomes_observation(vectorization):
    env = make_env(lambda: Allowed(7), 2, vectorization=vectorization)
    assert {leaf.key: leaf.shape for leaf in env.observation_leaves} == {
        "observation": (1,),
        "action_mask": (3,),
    }
    obey = TensorDictModule(lambda mask: mask.argmax(-1), ["action_mask"], ["action"])
    collector = VectorCollector(env, obey, steps_per_env=20)
    batch = collector.collect()
    collector.shutdown()
    counts = batch["observation"].squeeze(-1).long() % 3
    assert (batch["action"] == counts).all()
    assert (batch["action_mask"].argmax(-1) == counts).all()
    last = batch["next", "action_mask"][batch["next", "done"].squeeze(-1)]
    assert last.tolist() == [[1, 1, 1]] * 4  # two environments, episodes of 7 steps


def test_action_masks_of_registered_env_match_its_states():
    env = make_env("Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3", 3, seed=1)
    collector = VectorCollector(env, None, steps_per_env=50)
    batch = collector.collect()
    chosen = batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1))
    taxi = gym.make(env.name).unwrapped
    wanted = [[taxi.action_mask(int(state)).tolist() for state in row]
              for row in batch["observation"]]  # fmt: skip
    assert batch["action_mask"].tolist() == wanted
    assert chosen.all()
    assert not batch["action_mask"].all()


def test_env_state_is_captured_with_action_mask():
    class OfItsClass(Allowed):
        observation_space = Box(-np.inf, np.inf, (1,), np.float32)

    env = make_env(OfItsClass, 2)
    env.start()
    assert env.full_state()["not_resumable"] == ""


def test_action_mask_can_be_disabled():
    env = make_env("Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3", 1, action_mask=False)
    assert [leaf.key for leaf in env.observation_leaves] == ["observation"]


def test_multi_discrete_masks_are_concatenated():
    class Two(Steps):
        action_space = MultiDiscrete([2, 3])

        def reset(self, *, seed=None, options=None):
            seen, _ = super().reset(seed=seed, options=options)
            return {"count": seen}, {"action_mask": (np.array([1, 0]), np.array([0, 1, 1]))}

        observation_space = gym.spaces.Dict({"count": Box(-np.inf, np.inf, (1,), np.float32)})

    seen, _ = ActionMask(Two()).reset()
    assert seen["action_mask"].tolist() == [1, 0, 0, 1, 1]
    assert set(seen) == {"count", "action_mask"}


def test_observation_key_is_unchanged_without_masks():
    env = make_env("CartPole-v1", 2)
    assert [leaf.key for leaf in env.observation_leaves] == ["observation"]
