"""The kit's normal distribution is TorchRL's."""

from __future__ import annotations

import pytest
import torch
from torchrl.modules import IndependentNormal

from kit.envs import make_env
from kit.modules import make_actor
from kit.modules.distributions import Normal


@pytest.fixture
def parameters():
    generator = torch.Generator().manual_seed(0)
    loc = torch.randn(5, 3, generator=generator)
    return loc.requires_grad_(), torch.rand(5, 3, generator=generator).add_(0.1).requires_grad_()


def test_samples_match_independent_normal(parameters):
    torch.manual_seed(1)
    ours = Normal(*parameters).sample()
    torch.manual_seed(1)
    theirs = IndependentNormal(*parameters).sample()
    torch.testing.assert_close(ours, theirs)


def test_log_prob_and_gradients_match_independent_normal(parameters):
    action = torch.ones(5, 3)
    values = [kind(*parameters).log_prob(action) for kind in (Normal, IndependentNormal)]
    torch.testing.assert_close(*values)
    gradients = [torch.autograd.grad(value.sum(), parameters) for value in values]
    torch.testing.assert_close(*gradients)


def test_log_prob_of_own_sample_matches_equal_action(parameters):
    with torch.no_grad():
        distribution = Normal(*parameters)
        action = distribution.sample()
        remembered = distribution.log_prob(action)
        computed = distribution.log_prob(action.clone())
    torch.testing.assert_close(remembered, computed)


def test_entropy_and_mode_match_independent_normal(parameters):
    ours, theirs = Normal(*parameters), IndependentNormal(*parameters)
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert torch.equal(ours.deterministic_sample, theirs.deterministic_sample)


def test_make_actor_uses_normal_for_continuous_actions():
    actor = make_actor(make_env("Pendulum-v1", num_envs=2))
    assert actor[-1].distribution_class is Normal
