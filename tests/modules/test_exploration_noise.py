"""Noise explores within the bounds of actions."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Composite
from torchrl.envs.utils import ExplorationType, set_exploration_type

from kit.envs import make_env
from kit.modules.exploration import GaussianNoise, OrnsteinUhlenbeckNoise, make_noise
from tests.test_off_policy_recipes import built
from tests.tiny import Uneven

LOW, HIGH = torch.tensor([-1.0, 0.0]), torch.tensor([3.0, 0.5])
ACTION = Bounded(LOW, HIGH, (2,))
ROWS = Composite(action=ACTION.expand(64, 2), shape=(64,))


@pytest.mark.parametrize(
    "noise",
    [
        GaussianNoise(ACTION, sigma_init=100.0, sigma_end=100.0),
        OrnsteinUhlenbeckNoise(spec=ROWS, eps_init=100.0, eps_end=100.0),
    ],
    ids=lambda noise: type(noise).__name__,
)
def test_noise_clips_actions_to_bounds(noise):
    torch.manual_seed(0)
    rows = {"action": torch.zeros(64, 2), "is_init": torch.ones(64, 1, dtype=torch.bool)}
    action = noise(TensorDict(rows, [64]))["action"]
    assert torch.equal(action.amin(0), LOW)
    assert torch.equal(action.amax(0), HIGH)


@pytest.mark.parametrize("fast_policy", ["auto", "exact", "module"])
def test_collector_clips_noisy_actions_to_bounds(fast_policy):
    settings = {"exploration_noise": 100.0, "collector_kwargs": {"fast_policy": fast_policy}}
    collector = built("td3", **settings).collector  # in Pendulum-v1, whose bounds are 2
    after_random = [batch["action"].clone() for batch in collector][40:]
    action = torch.cat(after_random)
    assert (action.min(), action.max()) == (-2.0, 2.0)


def test_ou_noise_matches_stable_baselines3_process():
    noise = make_noise(make_env(Uneven, 2, seed=0), "ou", 0.3)
    sigma = 0.3 * torch.tensor(Uneven.HALF_RANGES)
    centre = torch.tensor([1.0, 0.25]).expand(4, 2)  # rows need not be as many as environments
    rows = TensorDict(action=centre, is_init=torch.ones(4, 1, dtype=torch.bool), batch_size=4)
    state = torch.zeros(4, 2)
    for starts in (True, False, False, True):  # the last step starts an episode
        rows["action"], rows["is_init"] = centre, torch.full((4, 1), starts)
        torch.manual_seed(1)
        with set_exploration_type(ExplorationType.RANDOM):
            rows = noise(rows)
        torch.manual_seed(1)
        state = torch.zeros(4, 2) if starts else state
        state = state - 0.15 * state * 0.01 + sigma * 0.1 * torch.randn(4, 2)
        torch.testing.assert_close(rows["action"], centre + state)
