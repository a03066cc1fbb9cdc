"""Distributional Q-learning: the losses of the papers, of what n-step replay gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl import objectives
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import DistributionalQValueActor

from kit.envs import make_env
from kit.losses import CategoricalDQNLoss, DQNLoss, QuantileDQNLoss
from kit.modules import NoisyLinear, make_q_network
from tests.errors import raises_setting
from tests.losses import transitions

ATOMS, GAMMA, LOW, HIGH = 5, 0.5, -2.0, 2.0


def make(loss_class: Any, **shape: Any) -> Any:
    torch.manual_seed(0)
    network = make_q_network(make_env("CartPole-v1", 1), (8,), **shape)
    loss = loss_class(network, double_dqn=True, delay_value=True)
    loss.make_value_estimator(gamma=GAMMA)
    return loss


def c51() -> CategoricalDQNLoss:
    return make(CategoricalDQNLoss, atoms=ATOMS, support=(LOW, HIGH))


def minibatch(**entries: torch.Tensor) -> TensorDict:
    return transitions(6, "choice").update(entries)


# ---------------------------------------------------------------------- C51
def test_c51_loss_matches_torchrl():
    ours, rows = c51(), minibatch()
    module = ours.value_network.module[0].module  # writes [..., choices, atoms]

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.inner(observation)[1].transpose(-1, -2)

    torch.manual_seed(0)
    network = make_q_network(make_env("CartPole-v1", 1), (8,), atoms=ATOMS, support=(LOW, HIGH))
    module = network.module[0].module
    actor = DistributionalQValueActor(
        Logits(), support=torch.linspace(LOW, HIGH, ATOMS), action_space="categorical"
    )
    theirs = objectives.DistributionalDQNLoss(actor, gamma=GAMMA, delay_value=True)
    expected = theirs(rows.clone())["loss"]
    torch.testing.assert_close(ours(rows)["loss"], expected)
    assert rows["td_error"].shape == (6,)


@pytest.mark.parametrize("make_loss", [c51, lambda: make(QuantileDQNLoss, atoms=ATOMS)])
def test_loss_discounts_each_transition_by_its_step_count(make_loss):
    steps = torch.tensor([1, 2, 3, 1, 2, 3])
    given, loss = minibatch(steps_to_next_obs=steps), make_loss()
    loss(given)
    for row, count in enumerate(steps.tolist()):
        alone = minibatch()[row : row + 1]
        loss.make_value_estimator(gamma=GAMMA**count)
        loss(alone)
        torch.testing.assert_close(given["td_error"][row], alone["td_error"][0])


# ---------------------------------------------------------------------- quantiles
def test_quantile_loss_matches_paper():
    torch.manual_seed(1)
    now, later = torch.randn(3, ATOMS), 3 * torch.randn(3, ATOMS)
    reward, discount = torch.randn(3, 1), torch.rand(3, 1)
    found = make(QuantileDQNLoss, atoms=ATOMS).distance(now, later, reward, discount)
    for row in range(3):
        expected = 0.0
        for i in range(ATOMS):
            for j in range(ATOMS):
                error = float(reward[row] + discount[row] * later[row, j] - now[row, i])
                huber = error**2 / 2 if abs(error) <= 1 else abs(error) - 0.5
                expected += abs((2 * i + 1) / (2 * ATOMS) - (error < 0)) * huber / ATOMS
        assert float(found[row]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("loss_class", "support"), [(QuantileDQNLoss, (LOW, HIGH)), (CategoricalDQNLoss, None)]
)
def test_loss_rejects_network_with_mismatched_atoms(loss_class, support):
    with raises_setting("loss"):
        make(loss_class, atoms=ATOMS, support=support)


# ---------------------------------------------------------------------- values
def test_dqn_loss_writes_absolute_td_error():
    rows, squared = minibatch(), minibatch()
    losses = make(DQNLoss)(rows), make(objectives.DQNLoss)(squared)
    assert torch.equal(losses[0]["loss"], losses[1]["loss"])
    torch.testing.assert_close(rows["td_error"].square(), squared["td_error"])


def test_noisy_linear_draws_noise_except_when_deterministic():
    loss, rows = make(DQNLoss, noisy=True), minibatch()
    assert not torch.equal(loss(rows)["loss"], loss(rows)["loss"])
    loss(rows)["loss"].backward()
    parameters = dict(loss.value_network_params.named_parameters())
    sigma = [p.grad for name, p in parameters.items() if "sigma" in name]
    assert len(sigma) == 4
    assert all(gradient.abs().sum() > 0 for gradient in sigma)
    layer, x = NoisyLinear(3, 2), torch.randn(4, 3)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        expected = nn.functional.linear(x, layer.weight_mu, layer.bias_mu)
        assert torch.equal(layer(x), expected)


def test_noisy_linear_shares_factorised_noise_across_batch():
    layer, x = NoisyLinear(3, 2), torch.randn(4, 3)
    with set_exploration_type(ExplorationType.RANDOM):
        torch.manual_seed(0)
        found = layer(x)
    torch.manual_seed(0)
    noise = torch.randn(5)
    noise = noise.sign() * noise.abs().sqrt()
    weight = layer.weight_mu + layer.weight_sigma * torch.outer(noise[3:], noise[:3])
    bias = layer.bias_mu + layer.bias_sigma * noise[3:]
    torch.testing.assert_close(found, nn.functional.linear(x, weight, bias))


# ---------------------------------------------------------------------- sequences
@pytest.mark.parametrize("loss_class", [CategoricalDQNLoss, QuantileDQNLoss])
def test_loss_treats_sequence_rows_as_transitions(loss_class):
    support = {"support": (LOW, HIGH)} if loss_class is CategoricalDQNLoss else {}
    loss, rows = make(loss_class, atoms=ATOMS, **support), minibatch()
    sequences = rows.clone().reshape(2, 3)
    assert torch.equal(loss(sequences)["loss"], loss(rows)["loss"])
    assert torch.equal(sequences["td_error"].flatten(), rows["td_error"])
