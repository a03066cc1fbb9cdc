"""Actions as a world model reads them."""

from __future__ import annotations

import gymnasium as gym
import numpy as np

from kit.envs import make_env
from kit.modules.world.actions import ActionCode
from tests.errors import raises_setting
from tests.tiny import Scripted


def test_action_code_has_key_of_action_mask():
    class Masked(Scripted):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed)[0], {"action_mask": np.ones(2, np.int8)}

    assert ActionCode(make_env(Masked, 2)).masks == ["action_mask"]
    assert ActionCode(make_env(Masked, 2, action_mask=False)).masks == []


def test_action_code_rejects_integer_box_actions():
    class Levers(Scripted):
        action_space = gym.spaces.Box(-2, 3, (2,), np.int16)

    with raises_setting("env.id"):
        ActionCode(make_env(Levers))
