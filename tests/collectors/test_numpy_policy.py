"""Policies whose actions NumPy computes: which they are, and that they do what the module does."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torchrl.envs.utils import ExplorationType

from kit.collectors import VectorCollector
from kit.envs import make_env
from kit.modules import Categorical, make_actor, make_backbone, make_q_network
from kit.modules.exploration import EpsilonGreedy, GaussianNoise, half_range
from kit.modules.heads import Parameters
from kit.modules.networks import Flatten, FlattenMLP
from kit.modules.numpy_policy import MOST_PRODUCTS
from kit.modules.numpy_samplers import EpsilonGreedySampler
from tests.tiny import Uneven

ACTORS = {
    "categorical": ("CartPole-v1", {}),
    "normal": ("Pendulum-v1", {}),
    "tanh-normal": ("Pendulum-v1", {"continuous": "tanh_normal"}),
    "action alone": ("Pendulum-v1", {"continuous": "tanh_normal", "return_log_prob": False}),
    "relu": ("CartPole-v1", {"activation": "relu"}),
}


def greedy(env, **noise):
    network = make_q_network(env, (16, 16))
    explore = EpsilonGreedy(env, eps_init=0.5, eps_end=0.1, **noise)
    return TensorDictSequential(network, explore).select_out_keys("action")


def noisy(env, sigma=0.7):  # some of the actions are clipped
    actor = make_actor(env, (16, 16), "relu", continuous="deterministic", orthogonal=False)
    noise = GaussianNoise(spec=env.full_action_spec, sigma_init=sigma, sigma_end=0.1)
    return TensorDictSequential(actor, noise)


def unevenly_noisy(env):
    actor = make_actor(env, (16, 16), "relu", continuous="deterministic", orthogonal=False)
    unit = half_range(env)
    assert tuple(unit.tolist()) == Uneven.HALF_RANGES
    spec = env.full_action_spec
    return TensorDictSequential(actor, GaussianNoise(spec=spec, sigma_init=0.7, std=unit))


EXPLORING = {
    "epsilon-greedy": ("CartPole-v1", greedy),
    "deterministic with noise": ("Pendulum-v1", noisy),
    "noise in units of each dimension": (Uneven, unevenly_noisy),
    "deterministic": (
        "Pendulum-v1",
        lambda env: make_actor(env, (16,), "relu", continuous="deterministic"),
    ),
}


def pair(kind, num_envs=3, make=VectorCollector, **settings):
    """A collector whose policy NumPy computes, and one whose policy is exact."""
    id, shape = {**ACTORS, **EXPLORING}[kind]
    found = []
    for fast_policy in ("auto", "exact"):
        torch.manual_seed(0)
        env = make_env(id, num_envs, seed=1, max_episode_steps=30)
        if callable(shape):
            actor = shape(env)
        else:
            actor = make_actor(env, (16, 16), **{"activation": "tanh", **shape})
        if kind == "action alone":
            actor = actor.select_out_keys("action")
        found.append(make(env, actor, seed=2, fast_policy=fast_policy, **settings))
    return found


def assert_close(one, other):
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        assert one[key].dtype == other[key].dtype
        torch.testing.assert_close(one[key], other[key], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- the same numbers
@pytest.mark.parametrize("kind", [*ACTORS, *EXPLORING])
@pytest.mark.parametrize("steps_per_env", [1, 32])
def test_numpy_batches_match_module_up_to_rounding(kind, steps_per_env):
    ours, exact = pair(kind, steps_per_env=steps_per_env)
    for _ in range(128 // steps_per_env):  # random numbers are drawn for 128 time steps
        assert_close(ours.collect(), exact.collect())
    assert ours.policy_path == ("numpy", "")
    assert exact.policy_path.name == "program"
    numbers = [c.state_dict()["random_numbers"]["state"] for c in (ours, exact)]
    assert torch.equal(*numbers)


@pytest.mark.parametrize("num_envs", [1, 3, 40])
@pytest.mark.parametrize("kind", list(EXPLORING))
def test_exploration_matches_module_for_any_num_envs(kind, num_envs):
    ours, exact = pair(kind, num_envs=num_envs, steps_per_env=7)
    for _ in range(3):
        assert_close(ours.collect(), exact.collect())
    assert ours.policy_path.name == "numpy"


@pytest.mark.parametrize(
    ("kind", "name"), [("epsilon-greedy", "eps"), ("deterministic with noise", "sigma")]
)
def test_annealed_exploration_is_applied(kind, name):
    ours, exact = pair(kind, steps_per_env=16)
    for value in (0.5, 0.0, 1.0, 0.2):
        for collector in (ours, exact):
            getattr(collector.policy.module[1], name).fill_(value)
        assert_close(ours.collect(), exact.collect())


@pytest.mark.parametrize("choices", [2, 3, 18])
@pytest.mark.parametrize("num_envs", [1, 3, 16])
def test_epsilon_greedy_noise_matches_step_by_step_draws(num_envs, choices):
    sampler = EpsilonGreedySampler(None, num_envs, choices)
    torch.manual_seed(choices)
    drawn = torch.from_numpy(sampler.noise(50))
    after = torch.get_rng_state()
    torch.manual_seed(choices)
    for chances, chosen in drawn:
        assert torch.equal(chances, torch.empty(num_envs).uniform_())
        wanted = torch.empty(num_envs, dtype=torch.long).random_(choices)
        assert torch.equal(chosen.long(), wanted)
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["categorical", "normal", "tanh-normal", *EXPLORING])
def test_deterministic_actions_match_module(kind):
    ours, exact = pair(kind, steps_per_env=8, exploration_type=ExplorationType.DETERMINISTIC)
    assert_close(ours.collect(), exact.collect())
    assert ours.policy_path.name == "numpy"


def test_initial_random_actions_keep_rng_aligned_with_module():
    ours, exact = pair("normal", steps_per_env=8, init_random_frames=15)
    for _ in range(3):
        assert_close(ours.collect(), exact.collect())
    assert ours.random_policy_steps == exact.random_policy_steps == 15


def test_many_envs_draw_same_noise_as_pytorch():
    ours, exact = pair("normal", num_envs=40, steps_per_env=3)  # PyTorch draws 16 and more at once
    assert_close(ours.collect(), exact.collect())


# ---------------------------------------------------------------------- the learner
def test_in_place_weight_updates_are_applied():
    ours, exact = pair("categorical", steps_per_env=6)
    for _ in range(3):
        for collector in (ours, exact):
            for parameter in collector.policy.parameters():
                parameter.data.mul_(1.5)
        assert_close(ours.collect(), exact.collect())
    assert ours.policy_path.name == "numpy"


def test_replaced_parameters_are_applied():
    ours, exact = pair("categorical", steps_per_env=6)
    assert_close(ours.collect(), exact.collect())
    for collector in (ours, exact):
        torch.manual_seed(1)
        for module in collector.policy.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(torch.randn_like(module.weight))
                module.bias.data = torch.randn_like(module.bias)
    assert_close(ours.collect(), exact.collect())
    assert ours.policy_path.name == "numpy"


def first_action_always(policy):
    """A forward that is replaced."""
    network = policy.module[0].module.network
    forward = network.forward
    network.forward = lambda *seen: forward(*seen) * 0 + torch.tensor([50.0, 0.0])


@pytest.mark.parametrize("batches", [0, 1])
def test_replaced_forward_is_called(batches):
    ours, _ = pair("categorical", steps_per_env=6)
    for _ in range(batches):
        ours.collect()
    assert ours.policy_path.name == "numpy"
    first_action_always(ours.policy)
    assert ours.collect()["action"].tolist() == [[0] * 6] * 3
    assert ours.policy_path.reason == "FlattenMLP.forward was replaced"


def test_forward_replaced_before_construction_is_called():
    env = make_env("CartPole-v1", 3)
    actor = make_actor(env, (8,))
    first_action_always(actor)
    collector = VectorCollector(env, actor, steps_per_env=6)
    assert collector.collect()["action"].tolist() == [[0] * 6] * 3


def test_global_module_forward_hooks_are_called():
    ours, _ = pair("categorical", steps_per_env=6)
    ours.collect()
    certain = torch.tensor([50.0, 0.0])
    hook = register_module_forward_hook(
        lambda module, _, out: out * 0 + certain if isinstance(module, FlattenMLP) else out
    )
    try:
        assert ours.collect()["action"].tolist() == [[0] * 6] * 3
    finally:
        hook.remove()


def test_integer_observations_use_pytorch_path():
    class Counting(gym.Env):
        observation_space = gym.spaces.Box(0, 9, (2,), np.int64)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.array([0, 9]), {}

        def step(self, action):
            return np.array([1, 2]), 1.0, False, False, {}

    env = make_env(Counting, 2)
    collector = VectorCollector(env, make_actor(env, (8,)), steps_per_env=3)
    assert collector.collect()["observation"][0].tolist() == [[0, 9], [1, 2], [1, 2]]
    assert "not a single floating-point vector" in collector.policy_path.reason


@pytest.mark.parametrize("kind", ["tanh-normal", *EXPLORING])
def test_resumed_run_is_bitwise_equal_to_uninterrupted_run(kind):
    whole, _ = pair(kind, steps_per_env=1, init_random_frames=6)
    saving, _ = pair(kind, steps_per_env=1, init_random_frames=6)
    resumed, _ = pair(kind, steps_per_env=1, init_random_frames=6)
    wanted = [whole.collect() for _ in range(6)]
    found = [saving.collect()]  # with random actions drawn ahead
    resumed.load_state_dict(saving.state_dict())
    found += [resumed.collect() for _ in range(5)]
    for one, other in zip(found, wanted):
        assert [k for k in one.keys(True, True) if not torch.equal(one[k], other[k])] == []


# ---------------------------------------------------------------------- other policies
def wide(env):
    hidden = MOST_PRODUCTS // 4
    return make_actor(env, (hidden,))


def with_layers(env, *layers):
    """An actor with other layers after the hidden one."""
    actor = make_actor(env, (8,))
    network = actor.module[0].module.network
    network.layers = nn.Sequential(network.layers[0], *layers)
    return actor


class Doubled(nn.Module):
    out_features = 4

    def forward(self, observation):
        return 2 * observation


class DoubledVector(Flatten):
    def forward(self, *inputs):
        return 2 * super().forward(*inputs)


def joined(env, join):
    """An actor that changes its observation first."""
    actor = make_actor(env, (8,))
    actor.module[0].module.network.flatten = join
    return actor


class Sharper(Categorical):
    def __init__(self, logits):
        super().__init__(logits=9 * logits)


def sharper(env):
    actor = make_actor(env, (8,))
    actor.module[1].distribution_class = Sharper
    return actor


class OwnHead(Parameters):
    def forward(self, columns):
        return (-columns,)


def of_own_head(env):
    actor = make_actor(env, (8,))
    actor.module[0].module.heads[0] = OwnHead(2)
    return actor


OTHERS = {
    "outputs that pass an activation": lambda env: with_layers(
        env, nn.Tanh(), nn.Linear(8, 2), nn.Tanh()
    ),
    "two activations": lambda env: with_layers(env, nn.ReLU(), nn.Tanh(), nn.Linear(8, 2)),
    "a layer without a bias": lambda env: with_layers(env, nn.Linear(8, 2, bias=False)),
    "another distribution": sharper,
    "an observation that is changed": lambda env: joined(env, Doubled()),
    "a vector that is changed": lambda env: joined(
        env, DoubledVector([env.full_observation_spec["observation"]])
    ),
    "another head": of_own_head,
    "another module": lambda env: TensorDictModule(
        lambda observation: observation[..., 0].long() * 0, ["observation"], ["action"]
    ),
    "a body that is shared": lambda env: make_actor(env, body=make_backbone(env, (8,))),
    "another activation": lambda env: make_actor(env, (8,), "silu"),
    "a wide network": wide,
    "a dueling network": lambda env: make_q_network(env, (8,), dueling=True).select_out_keys(
        "action"
    ),
    "a Q-network with its values": lambda env: make_q_network(env, (8,)),
    "an action that a module changes": lambda env: TensorDictSequential(
        make_q_network(env, (8,)),
        TensorDictModule(lambda action: 1 - action, ["action"], ["action"]),
    ).select_out_keys("action"),
    "another noise": lambda env: TensorDictSequential(
        make_q_network(env, (8,)),
        EpsilonGreedy(env, eps_init=0.5),
        EpsilonGreedy(env, eps_init=0.5),
    ).select_out_keys("action"),
}


@pytest.mark.parametrize("exploration_type", ["RANDOM", "DETERMINISTIC"])
@pytest.mark.parametrize("kind", list(OTHERS))
def test_unsupported_policies_use_pytorch_and_report_reason(kind, exploration_type):
    env = make_env("CartPole-v1", 2)
    how = ExplorationType[exploration_type]
    collector = VectorCollector(env, OTHERS[kind](env), steps_per_env=4, exploration_type=how)
    collector.collect()
    assert collector.policy_path.name == "program"
    assert collector.policy_path.reason


def test_clipped_standard_deviations_use_pytorch():
    env = make_env("Pendulum-v1", 2)
    collector = VectorCollector(env, make_actor(env, continuous="clipped_tanh_normal"))
    collector.collect()
    assert collector.policy_path == ("program", "the policy's log standard deviations are clipped")


def test_one_step_batches_are_never_overwritten():
    ours, _ = pair("normal", steps_per_env=1)
    batches = [ours.collect() for _ in range(140)]  # more than one allocation
    kept = [batch.clone() for batch in batches]
    for _ in range(140):
        ours.collect()
    for batch, copy in zip(batches, kept):
        assert (batch == copy).all()
    assert np.unique([b["observation"].data_ptr() for b in batches]).size == 140
