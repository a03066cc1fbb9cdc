"""What environments say in ``info``: numbers of finished episodes, and masks of actions."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from tensordict.nn import TensorDictModule

from kit.collectors import VectorCollector
from kit.envs import ActionMask, make_env
from kit.steps import SettingError
from tests.envs.odd_envs import Steps


class Allowed(Steps):
    """Allows one of three actions, another one after each step, and says so in ``info``."""

    action_space = Discrete(3)

    def reset(self, *, seed=None, options=None):
        seen, _ = super().reset(seed=seed, options=options)
        return seen, {"action_mask": self._mask()}

    def step(self, action):
        assert action == self.count % 3, "a forbidden action"
        seen, reward, terminated, truncated, _ = super().step(action)
        # As in many environments, there is nothing to choose after the last step.
        return seen, reward, terminated, truncated, {} if terminated else {
            "action_mask": self._mask()
        }  # fmt: skip

    def _mask(self):
        return np.arange(3) == self.count % 3


# ---------------------------------------------------------------------- masks
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_mask_in_info_is_an_observation_of_the_policy(vectorization):
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


def test_masks_of_a_registered_environment_are_those_of_its_states():
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


def test_a_mask_can_be_left_out():
    env = make_env("Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3", 1, action_mask=False)
    assert [leaf.key for leaf in env.observation_leaves] == ["observation"]


def test_masks_of_several_choices_are_one_array():
    class Two(Steps):
        action_space = MultiDiscrete([2, 3])

        def reset(self, *, seed=None, options=None):
            seen, _ = super().reset(seed=seed, options=options)
            return {"count": seen}, {"action_mask": (np.array([1, 0]), np.array([0, 1, 1]))}

        observation_space = gym.spaces.Dict({"count": Box(-np.inf, np.inf, (1,), np.float32)})

    seen, _ = ActionMask(Two()).reset()
    assert seen["action_mask"].tolist() == [1, 0, 0, 1, 1]
    assert set(seen) == {"count", "action_mask"}


def test_a_mask_of_continuous_actions_is_refused():
    with pytest.raises(SettingError, match=r"env\.action_mask=True masks no actions of Box"):
        make_env("Pendulum-v1", action_mask=True)


def test_without_masks_the_observation_has_the_key_it_had():
    env = make_env("CartPole-v1", 2)
    assert [leaf.key for leaf in env.observation_leaves] == ["observation"]
