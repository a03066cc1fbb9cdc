"""World models of any observation and action, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from kit.envs import make_env
from kit.modules.world import SIZES, ActionCode, LatentActor, make_world_model
from tests.errors import raises_setting
from tests.tiny import Scripted

NUMBERS = spaces.Box(-5.0, 5.0, (3,), np.float32)
CHOICE = spaces.Discrete(4)


def pixels(*shape):
    return spaces.Box(0, 255, shape, np.uint8)


def env_of(observation=NUMBERS, action=CHOICE):
    return make_env(lambda: Scripted(observation_space=observation, action_space=action))


@pytest.mark.parametrize(
    "space",
    [
        NUMBERS, CHOICE, pixels(64, 64, 3), pixels(16, 24, 1),
        spaces.Dict({"camera": pixels(16, 16, 3), "joints": NUMBERS, "gear": CHOICE}),
    ],
    ids=str,
)  # fmt: skip
def test_model_encodes_and_predicts_observations(space):
    env = env_of(space)
    model = make_world_model(env, "nano")
    observed = TensorDict({}, [6])
    for leaf in env.observation_leaves:
        drawn = np.stack([leaf.space.sample() for _ in range(6)])
        observed[leaf.key] = torch.from_numpy(drawn)
    observed = observed.reshape(2, 3)
    targets = model.targets(observed)
    embedding = model.encode(targets)
    assert embedding.shape[:2] == (2, 3)
    features = torch.randn(2, 3, model.features, requires_grad=True)
    error = model.reconstruction_error(features, targets)
    assert error.shape == (2, 3)
    error.sum().backward()
    assert all(p.grad is not None for p in [features])


def test_predicted_pixels_are_between_zero_and_one():
    model = make_world_model(env_of(pixels(16, 16, 3)), "nano")
    image = model.image_decoders[0](torch.randn(4, model.features))
    assert image.shape == (4, 16, 16, 3)
    assert 0 <= image.min() <= image.max() <= 1


@pytest.mark.parametrize(
    "space", [spaces.Box(-1, 1, (2, 3), np.float32), pixels(9, 64, 3), pixels(4, 4, 3)], ids=str
)
def test_model_rejects_unsupported_observations(space):
    with raises_setting("observation"):
        make_world_model(env_of(space), "nano")


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([2, 3]),
        spaces.Dict({"a": CHOICE, "b": CHOICE}),
        spaces.Box(0, 1, (2, 2)),
    ],
)
def test_model_rejects_unsupported_actions(space):
    with raises_setting("env.id"):
        make_world_model(env_of(action=space), "nano")


def test_model_rejects_unknown_size():
    with raises_setting("size"):
        make_world_model(env_of(), "small")


def test_published_sizes_match_parameter_counts():
    env = env_of(pixels(64, 64, 3))
    with torch.device("meta"):
        model = make_world_model(env, "12m")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert 8e6 < count < 13e6, "without actor and critic"
    assert SIZES["400m"].deter == 12_288


# ---------------------------------------------------------------------- actions
def test_bounded_actions_are_encoded_from_minus_one_to_one():
    code = ActionCode(env_of(action=spaces.Box(np.float32([0, -2]), np.float32([10, 2]))))
    action = torch.tensor([[0.0, -2.0], [10.0, 2.0], [5.0, 1.0]])
    encoded = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.5]])
    torch.testing.assert_close(code.encode(action), encoded)
    torch.testing.assert_close(code.decode(encoded), action)
    beyond = code.decode(torch.tensor([[-3.0, 7.0]]))
    torch.testing.assert_close(beyond, torch.tensor([[0.0, 2.0]]))


@pytest.mark.parametrize("limit", [np.inf, np.finfo(np.float32).max])
def test_unbounded_actions_stay_unchanged(limit):
    code = ActionCode(env_of(action=spaces.Box(-limit, limit, (2,))))
    action = torch.tensor([[-30.0, 4.5]])
    torch.testing.assert_close(code.encode(action), action)
    torch.testing.assert_close(code.decode(action), action)


def test_action_with_equal_bounds_is_constant():
    code = ActionCode(env_of(action=spaces.Box(np.float32([3, -2]), np.float32([3, 2]))))
    assert torch.equal(code.decode(torch.tensor([[0.7, 0.5]])), torch.tensor([[3.0, 1.0]]))
    assert code.encode(torch.tensor([[3.0, 1.0], [0.0, 0.0]])).isfinite().all(), "nor where none is"


def test_discrete_actions_are_one_hot():
    code = ActionCode(env_of())
    action = torch.arange(4)
    assert torch.equal(code.encode(action), torch.eye(4))
    assert torch.equal(code.decode(torch.eye(4)), action)


@pytest.mark.parametrize("action", [CHOICE, spaces.Box(-2, 2, (2,))], ids=str)
def test_actor_log_prob_and_entropy_match_samples(action):
    torch.manual_seed(0)
    actor = LatentActor(ActionCode(env_of(action=action)), 5, SIZES["nano"])
    columns = actor(torch.randn(1, 5)).expand(20_000, -1)
    log_prob = actor.log_prob(columns, actor.sample(columns))
    estimate, spread = -log_prob.mean(), log_prob.std() / 20_000**0.5
    assert abs(estimate - actor.entropy(columns)[0]) < 5 * spread + 1e-6
    assert (actor.log_prob(columns, actor.mode(columns))[0] >= log_prob - 1e-6).all()


def test_discrete_observations_use_one_hot_and_cross_entropy():
    model = make_world_model(env_of(spaces.Dict({"gear": CHOICE, "joints": NUMBERS})), "nano")
    gear, joints = torch.tensor([1, 3]), torch.tensor([[5.0, 0.0, -1.0], [0.0, 2.0, 0.0]])
    (target,) = targets = model.targets(TensorDict({"gear": gear, "joints": joints}, [2]))
    numbers = joints.sign() * joints.abs().log1p()
    assert torch.equal(target, torch.cat([torch.eye(4)[gear], numbers], -1))
    features = torch.randn(2, model.features)
    logits, predicted = model.decoder(features).split([4, 3], -1)
    of_choice = torch.nn.functional.cross_entropy(logits, gear, reduction="none")
    expected = of_choice + (predicted - numbers).square().sum(-1)
    torch.testing.assert_close(model.reconstruction_error(features, targets), expected)
