"""Wording of errors, by example. Other tests check only which setting an error names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kit.buffers import make_replay_buffer
from kit.config.plain import from_plain
from kit.envs import make_env
from kit.steps import SettingError
from kit.steps.settings import OffPolicySteps, OnPolicySteps
from recipes.ppo import Config

EXAMPLES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: OnPolicySteps(500, steps_per_env=16, rounding="error").to_plan(num_envs=8),
        "total_policy_steps=500 is not a multiple of the 128 policy steps per iteration. "
        "Try: 384 or 512, or rounding=up or down.",
    ),
    (
        lambda: OffPolicySteps(total_policy_steps=100, replay_ratio="half").to_plan(num_envs=1),
        "replay_ratio='half' is not a finite number >= 0. Use a number such as 0.5 or '1/3'.",
    ),
    (
        lambda: from_plain(Config, {"gamma": 2}),
        "gamma=2.0: The value must be at least 0 and at most 1.",
    ),
    (
        lambda: from_plain(Config, {"seed": "x"}),
        "seed='x' is not a whole number.",
    ),
    (
        lambda: from_plain(Config, {"steps": {"rounding": "upp"}}),
        "steps.rounding='upp' is not a valid choice. Try: up, error or down.",
    ),
    (
        lambda: from_plain(Config, {"learning_rat": 1}),
        "learning_rat=1 is not a setting of Config. Try: learning_rate or critic_learning_rate.",
    ),
    (
        lambda: make_env("Pendulum-v1", num_envs=0),
        "env.num_envs=0: The value must be at least 1.",
    ),
    (
        lambda: make_env("Pendulum-v1", num_envs=1, normalize_reward="no"),
        "env.normalize_reward='no' is neither true nor false. Try: True or False.",
    ),
    (lambda: make_replay_buffer(0, 4), "buffer_size=0: The value must be at least 1."),
]


@pytest.mark.parametrize(("fail", "message"), EXAMPLES)
def test_error_names_setting_reason_and_fix(fail: Callable[[], Any], message: str) -> None:
    with pytest.raises(SettingError) as raised:
        fail()
    assert str(raised.value) == message
