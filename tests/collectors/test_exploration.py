"""Who acts when: random actions, noise, an exploration policy; to the step, and resumable."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import EGreedyModule

from kit.collectors import EpisodeCollector, TensorCollector, VectorCollector
from kit.envs import make_env
from kit.modules.exploration import GaussianNoise, OrnsteinUhlenbeckNoise
from tests.envs.odd_envs import Steps
from tests.errors import raises_setting


def always(value):
    """A policy of one discrete action, that says who it is."""

    def choose(observation):
        action = torch.full(observation.shape[:-1], value, dtype=torch.int64)
        return action, torch.full(observation.shape[:-1], 10.0 + value)

    return TensorDictModule(choose, ["observation"], ["action", "who"])


KINDS = {
    "vector": lambda **s: VectorCollector(make_env(Steps, 2), **s),
    "tensor": lambda **s: TensorCollector(make_env("CartPole-v1", 2, vectorization="tensor"), **s),
}


@pytest.fixture(params=list(KINDS))
def kind(request):
    return KINDS[request.param]


def whole(collector):
    return torch.cat([batch.clone() for batch in collector], -1)


# ---------------------------------------------------------------------- who acts
def test_actions_are_random_until_init_random_frames(kind):
    collector = kind(policy=always(1), init_random_frames=14, frames_per_batch=8, total_frames=32)
    who = whole(collector)["who"]
    assert who.tolist() == [[0.0] * 7 + [11.0] * 9] * 2
    assert (collector.policy_steps, collector.random_policy_steps) == (32, 14)


def test_random_actions_cover_action_space(kind):
    batch = kind(policy=always(1), init_random_frames=64, frames_per_batch=64).collect()
    assert set(batch["action"].flatten().tolist()) == {0, 1}


def test_exploration_policy_acts_after_random_and_before_policy(kind):
    collector = kind(
        policy=always(1),
        exploration_policy=always(0),
        init_random_frames=4,
        exploration_frames=14,
        frames_per_batch=8,
        total_frames=24,
    )
    who = whole(collector)["who"]
    assert who.tolist() == [[0.0] * 2 + [10.0] * 5 + [11.0] * 5] * 2
    assert collector.random_policy_steps == 4


def test_prefill_can_be_entirely_random(kind):
    collector = kind(
        policy=always(1),
        prefill_frames=10,
        init_random_frames=10,
        frames_per_batch=6,
        total_frames=22,
    )
    batches = [batch["who"].clone() for batch in collector]
    assert [batch.shape[1] for batch in batches] == [5, 3, 3]
    assert [batch.unique().tolist() for batch in batches] == [[0.0], [11.0], [11.0]]


def test_actions_are_random_without_policy(kind):
    collector = kind(frames_per_batch=8, total_frames=16)
    assert whole(collector)["action"].shape == (2, 8)
    assert collector.random_policy_steps == 16


def test_episode_prefill_is_random_until_last_episode_ends():
    env = make_env(lambda: Steps(5), 2)
    collector = EpisodeCollector(
        env, always(1), min_episodes=2, prefill_frames=12, prefill_random=True
    )
    filled, later = collector.collect(), collector.collect()
    assert filled["who"].unique().tolist() == [0.0]
    assert (len(filled), collector.random_policy_steps) == (3, 15)
    assert later["who"].unique().tolist() == [11.0]


def test_episode_collector_counts_random_steps_exactly():
    env = make_env(lambda: Steps(5), 2)
    collector = EpisodeCollector(env, always(1), min_episodes=2, init_random_frames=7)
    batch = collector.collect()
    # Both copies act at random three times, then the first one once more.
    assert batch["who"].tolist() == [[0, 0, 0, 0, 11], [0, 0, 0, 11, 11]]
    assert (collector.policy_steps, collector.random_policy_steps) == (10, 7)


def test_episode_collector_supports_exploration_policy():
    env = make_env(lambda: Steps(4), 2)
    collector = EpisodeCollector(
        env, always(1), exploration_policy=always(0), exploration_frames=4, min_episodes=2
    )
    assert collector.collect()["who"].tolist() == [[10, 10, 11, 11]] * 2


@pytest.mark.parametrize("settings", [{"exploration_frames": 4}, {"exploration_policy": always(0)}])
def test_exploration_policy_and_frames_require_each_other(settings):
    with raises_setting("exploration_frames"):
        VectorCollector(make_env(Steps, 2), always(1), frames_per_batch=4, **settings)


def test_exploration_phases_continue_after_resume(kind):
    def make():
        return kind(
            policy=always(1),
            exploration_policy=always(0),
            init_random_frames=6,
            exploration_frames=14,
            frames_per_batch=8,
            total_frames=24,
        )

    wanted = whole(make())
    saving, going_on = make(), make()
    first = saving.collect().clone()
    going_on.load_state_dict(saving.state_dict())
    found = torch.cat([first, whole(going_on)], -1)
    for key in ("action", "who", "observation"):
        assert torch.equal(found[key], wanted[key])
    assert going_on.random_policy_steps == 6


# ---------------------------------------------------------------------- noise
def greedy(env, eps):
    """Epsilon-greedy over a policy that always takes action 1."""
    module = TensorDictModule(
        lambda observation: torch.ones(observation.shape[:-1], dtype=torch.int64),
        ["observation"],
        ["action"],
    )
    noise = EGreedyModule(spec=env.action_spec, eps_init=eps, eps_end=eps)
    return TensorDictSequential(module, noise)


@pytest.mark.filterwarnings("ignore:the policy runs eagerly")
@pytest.mark.parametrize(("eps", "zeros"), [(0.0, (0, 0)), (1.0, (70, 130)), (0.5, (30, 70))])
def test_epsilon_greedy_random_action_rate_matches_epsilon(eps, zeros):
    env = make_env(Steps, 4)
    actions = VectorCollector(env, greedy(env, eps), frames_per_batch=200).collect()["action"]
    least, most = zeros
    assert least <= int((actions == 0).sum()) <= most


@pytest.mark.filterwarnings("ignore:the policy runs eagerly")
def test_next_batch_uses_annealed_epsilon():
    env = make_env(Steps, 4)
    policy = greedy(env, 1.0)
    collector = VectorCollector(env, policy, frames_per_batch=80)
    assert (collector.collect()["action"] == 0).any()
    policy[1].eps.fill_(0.0)
    assert (collector.collect()["action"] == 1).all()


def still(env):
    """A policy that never moves, for noise to be seen alone."""
    network = nn.Linear(3, 1)
    nn.init.zeros_(network.weight)
    nn.init.zeros_(network.bias)
    return TensorDictModule(network, ["observation"], ["action"])


def noisy(noise, fast=True, **settings):
    env = make_env("Pendulum-v1", 2, max_episode_steps=10)
    spec = env.full_action_spec
    policy = TensorDictSequential(still(env), noise(spec=spec))
    settings = {"frames_per_batch": 50, **settings}
    return VectorCollector(env, policy, fast_policy=fast, **settings)


def gaussian(spec):
    return GaussianNoise(spec=spec, sigma_init=0.5, sigma_end=0.5)


def ornstein_uhlenbeck(spec):
    return OrnsteinUhlenbeckNoise(spec=spec, eps_init=1.0, eps_end=1.0, theta=0.15, sigma=0.2)


NOISES = [gaussian, ornstein_uhlenbeck]


@pytest.mark.parametrize("noise", NOISES)
def test_noise_on_fast_path_matches_plain_path(noise):
    fast, plain = noisy(noise), noisy(noise, fast=False)
    for _ in range(3):
        assert torch.equal(fast.collect()["action"], plain.collect()["action"])
    assert fast.policy_path.name == "program"


@pytest.mark.parametrize("noise", NOISES)
def test_noise_continues_after_resume(noise):
    wanted = noisy(noise)
    wanted.collect()
    saving, going_on = noisy(noise), noisy(noise, seed=9)
    saving.collect()
    going_on.load_state_dict(saving.state_dict())
    for _ in range(2):
        assert torch.equal(wanted.collect()["action"], going_on.collect()["action"])


def test_ornstein_uhlenbeck_noise_resets_at_episode_start():
    batch = noisy(ornstein_uhlenbeck, frames_per_batch=40).collect()
    actions = batch["action"].squeeze(-1)
    # A process that has just begun is one step away from 0; later ones are further on average.
    first, later = actions[:, [0, 10]].abs(), actions[:, [9, 19]].abs()
    assert first.mean() < later.mean()
