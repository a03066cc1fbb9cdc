"""Noise explores within the bounds of actions."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Composite

from kit.modules.exploration import GaussianNoise, OrnsteinUhlenbeckNoise
from tests.test_off_policy_recipes import built

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
