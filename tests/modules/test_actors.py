"""Q-networks and deterministic actors for TorchRL's losses, refused where actions do not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.objectives import DQNLoss, TD3Loss

from kit.envs import make_env
from kit.modules import (
    make_action_value,
    make_actor,
    make_actor_critic,
    make_backbone,
    make_q_network,
    make_value,
)
from kit.modules.images import Convolutions
from tests.errors import raises_setting
from tests.tiny import Guess, Scripted


def observed(env, rows: int = 5) -> TensorDict:
    return TensorDict(
        {"observation": torch.randn(rows, *env.observation_spec["observation"].shape[1:])}, [rows]
    )


# ---------------------------------------------------------------------- Q-networks
@pytest.mark.parametrize("dueling", [False, True])
def test_q_network_selects_greedy_action(dueling):
    env = make_env("Acrobot-v1", 2)
    found = make_q_network(env, (8,), dueling=dueling)(observed(env))
    assert found["action_value"].shape == (5, 3)
    assert torch.equal(found["action"], found["action_value"].argmax(-1))
    assert torch.equal(found["chosen_action_value"].squeeze(-1), found["action_value"].amax(-1))


def test_dueling_values_are_state_value_plus_centred_advantages():
    env = make_env("Acrobot-v1")
    network = make_q_network(env, (8,), dueling=True)
    given = observed(env)
    columns = network.module[0].module[0](given["observation"])
    values = network(given)["action_value"]
    torch.testing.assert_close(values.mean(-1), columns[:, 0])
    torch.testing.assert_close(values.diff(dim=-1), columns[:, 1:].diff(dim=-1))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"dueling": True}, {"dueling": True, "atoms": 5}], ids=str
)
def test_q_network_reads_several_observations(settings, masked):
    space = spaces.Dict({name: spaces.Box(-1, 1, (2,), np.float32) for name in ("a", "b")})
    if masked:
        space["action_mask"] = spaces.MultiBinary(4)
    choices = spaces.Discrete(4)
    env = make_env(lambda: Scripted(observation_space=space, action_space=choices), 2)
    found = make_q_network(env, (8,), **settings)(env.fake_tensordict())
    assert found["action_value"].shape == (2, 4)


def test_q_network_selects_only_allowed_actions():
    box = spaces.Box(-1, 1, (2,), np.float32)
    mask = spaces.MultiBinary(4)
    space = spaces.Dict({"position": box, "action_mask": mask})
    env = make_env(lambda: Scripted(observation_space=space, action_space=spaces.Discrete(4)))
    network = make_q_network(env, (8,))
    allowed = torch.eye(4, dtype=torch.bool)
    given = TensorDict({"position": torch.randn(4, 2), "action_mask": allowed}, [4])
    first = next(module for module in network.modules() if isinstance(module, torch.nn.Linear))
    assert first.in_features == 2, "the mask is no observation to learn from"
    assert network(given)["action"].tolist() == [0, 1, 2, 3]


def test_dqn_loss_trains_q_network():
    env = make_env("CartPole-v1", 2)
    loss = DQNLoss(make_q_network(env, (8,)), delay_value=True, double_dqn=True)
    batch = env.rollout(3, auto_reset=True).reshape(-1)
    loss(batch)["loss"].backward()
    assert all(parameter.grad is not None for parameter in loss.parameters())


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2,), np.float32), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3),
        spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)}),
    ],
)  # fmt: skip
def test_make_q_network_rejects_unsupported_action_spaces(space):
    with raises_setting("action_space"):
        make_q_network(make_env(lambda: Guess(space)))


# ---------------------------------------------------------------------- deterministic actors
@pytest.mark.parametrize("shape", [(1,), (2,), (2, 3)])
def test_deterministic_actor_scales_actions_to_bounds(shape):
    space = spaces.Box(np.float32(-3.0), np.float32(1.0), shape, np.float32)
    env = make_env(lambda: Guess(space), 2)
    actor = make_actor(env, (8,), "relu", continuous="deterministic", orthogonal=False)
    given = observed(env)
    given["observation"] *= 1e6
    action = actor(given)["action"]
    assert action.shape == (5, *space.shape)
    assert torch.equal(action, actor(given)["action"])
    assert {float(action.min()), float(action.max())} <= {-3.0, 1.0}
    zeroed = actor.module.network.layers[-1]
    torch.nn.init.zeros_(zeroed.weight)
    torch.nn.init.zeros_(zeroed.bias)
    assert (actor(given)["action"] == -1.0).all()


def test_td3_loss_trains_deterministic_actor():
    env = make_env("Pendulum-v1", 2)
    actor = make_actor(env, (8,), continuous="deterministic")
    loss = TD3Loss(actor, make_action_value(env, (8,)), action_spec=env.action_spec[0])
    losses = loss(env.rollout(3, auto_reset=True).reshape(-1))
    (losses["loss_actor"] + losses["loss_qvalue"]).backward()
    assert all(parameter.grad is not None for parameter in loss.parameters())


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3), spaces.Box(-np.inf, np.inf, (2,), np.float32),
        spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (1,), np.float32)}),
    ],
)  # fmt: skip
def test_deterministic_actor_rejects_unsupported_action_spaces(space):
    with raises_setting("action_space"):
        make_actor(make_env(lambda: Guess(space)), continuous="deterministic")


@pytest.mark.parametrize(
    ("continuous", "log_deviation"),
    [
        ("tanh_normal", lambda raw: -1.5 + 3.5 * raw.tanh()),
        ("clipped_tanh_normal", lambda raw: raw.clamp(-20.0, 2.0)),
    ],
)
def test_squashed_actor_limits_standard_deviation(continuous, log_deviation):
    actor = make_actor(make_env("Pendulum-v1"), continuous=continuous)
    head = actor.module[0].module.heads[0]
    columns = torch.stack([torch.arange(7.0), torch.linspace(-30.0, 5.0, 7)], -1)
    loc, scale = head(columns)
    assert torch.equal(loc, columns[:, :1])
    torch.testing.assert_close(scale, log_deviation(columns[:, 1:]).exp())
    assert actor.get_dist(TensorDict({"observation": torch.zeros(1, 3)}, [1])).low == -2


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("continuous", ["normal", "gsde"])
def test_actor_critic_initialises_all_layers_as_requested(continuous, shared, orthogonal):
    settings = {"continuous": continuous, "shared_backbone": shared, "orthogonal": orthogonal}
    env = make_env("Pendulum-v1", 1, seed=0)
    for network in make_actor_critic(env, (8,), **settings):
        biases = [p for name, p in network.named_parameters() if name.endswith("bias")]
        assert len(biases) == 2
        assert all((bias == 0).all() == orthogonal for bias in biases)


def test_actor_and_critic_share_custom_backbone():
    env = make_env("CartPole-v1", 2)
    network = torch.nn.Linear(4, 7)
    body = TensorDictModule(network, in_keys=["observation"], out_keys=["features"])
    actor, critic = make_actor(env, body=body), make_value(env, body=body)
    found = critic(actor(observed(env)))
    assert found["features"].shape == (5, 7)
    assert (found["logits"].shape, found["state_value"].shape) == ((5, 2), (5, 1))
    assert {id(p) for p in network.parameters()} <= {id(p) for p in critic.parameters()}


@pytest.mark.parametrize("shared", [False, True])
def test_make_actor_rejects_observation_named_like_its_output(shared):
    # SAC's loss hides what its actor writes from batches, and its critics would read it.
    name = "features" if shared else "scale"
    space = spaces.Dict({name: spaces.Box(-1, 1, (2,)), "place": spaces.Box(-1, 1, (2,))})
    action = spaces.Box(-1, 1, (2,), np.float32)
    env = make_env(lambda: Scripted(observation_space=space, action_space=action), 2)
    with raises_setting("observation_space"):
        make_actor(env, continuous="tanh_normal", body=make_backbone(env) if shared else None)


def test_make_actor_rejects_unknown_continuous_distribution():
    with raises_setting("continuous"):
        make_actor(make_env("Pendulum-v1"), continuous="gaussian")


def test_make_actor_rejects_body_for_deterministic_actor():
    env = make_env("Pendulum-v1")
    with raises_setting("body"):
        make_actor(env, continuous="deterministic", body=make_backbone(env))


def test_convolutions_do_not_modify_float_images():
    image = torch.full((2, 5, 8, 8), 255.0).to(memory_format=torch.channels_last)
    Convolutions((5, 8, 8), [[4, 3, 1]])(image)
    assert (image == 255.0).all()


@pytest.mark.parametrize("frames", [(), (5,)])
def test_convolutions_accept_channels_first_or_last(frames):
    image = torch.randint(256, (2, *frames, 3, 8, 9), dtype=torch.uint8)
    last = image.movedim(-3, -1)
    networks = [Convolutions(one.shape[1:], [[4, 3, 1], [4, 3, 2]]) for one in (image, last)]
    networks[1].load_state_dict(networks[0].state_dict())
    assert torch.equal(networks[0](image), networks[1](last))
