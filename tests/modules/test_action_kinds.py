"""Every kind of action can be chosen, and a policy of it be trained, without leaving its space."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from gymnasium import spaces
from torch import nn

from kit.envs import make_env
from kit.modules import make_actor, make_backbone
from tests.errors import raises_setting
from tests.tiny import Guess, on_policy_plan, ppo_trainer

KINDS = {
    "discrete": spaces.Discrete(3),
    "discrete from 5": spaces.Discrete(3, start=5),
    "multi-discrete": spaces.MultiDiscrete([3, 4]),
    "multi-binary": spaces.MultiBinary(3),
    "box": spaces.Box(-0.5, 0.5, (2,), np.float32),
    "dict": spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-0.5, 0.5, (1,), np.float32)}),
}


class Strict(Guess):
    """Refuses actions outside its space."""

    def step(self, action):
        if isinstance(self.action_space, spaces.Discrete):
            action = np.int64(action)
        assert self.action_space.contains(action), action
        return super().step(action)


@pytest.mark.parametrize("kind", KINDS)
def test_policy_trains_on_fast_path_for_each_action_kind(kind):
    plan = on_policy_plan()
    trainer = ppo_trainer(plan, lambda: Strict(KINDS[kind]))
    losses = []
    trainer.register_op(
        "post_optim", lambda: losses.append(trainer.last_metrics["loss_objective"].isfinite())
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(runs eagerly|not on the fast path).*")
        ledger = trainer.run()
    assert ledger.gradient_steps == len(losses) == 16
    assert all(losses)


def test_composite_action_logs_entropy_of_each_part():
    trainer = ppo_trainer(on_policy_plan(), lambda: Strict(KINDS["dict"]))
    rows: list[dict] = []
    trainer.register_op("log_row", rows.append)
    trainer.run()
    names = {name for name in rows[-1] if name.startswith("train/") and "entropy" in name}
    assert len([name for name in names if name.endswith(("a_entropy", "b_entropy"))]) == 2


def test_make_actor_rejects_integer_box():
    env = make_env(lambda: Guess(spaces.Box(0, 3, (2,), np.int64)))
    with raises_setting("action_space"):
        make_actor(env)


@pytest.mark.parametrize("continuous", ["tanh_normal", "clipped_tanh_normal", "deterministic"])
@pytest.mark.parametrize("high", [np.inf, 3e38])
def test_make_actor_rejects_squashing_to_infinite_range(continuous, high):
    env = make_env(lambda: Guess(spaces.Box(-high, high, (1,))))
    with raises_setting("action_space"):
        make_actor(env, continuous=continuous)


@pytest.mark.parametrize("continuous", ["tanh_normal", "deterministic"])
def test_after_layers_follow_inputs_and_activations(continuous):
    env = make_env("Pendulum-v1")
    how = {"continuous": continuous, "after": lambda width: [nn.LayerNorm(width)]}
    widths = [one.normalized_shape for one in make_actor(env, (5, 6), **how).modules()
              if isinstance(one, nn.LayerNorm)]  # fmt: skip
    assert widths == [(3,), (5,), (6,)]


def test_make_actor_rejects_after_layers_with_body():
    env = make_env("CartPole-v1")
    with raises_setting("after"):
        make_actor(env, body=make_backbone(env, (4,)), after=lambda width: [nn.LayerNorm(width)])
