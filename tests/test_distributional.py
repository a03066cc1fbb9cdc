"""Distributional Q-learning takes what n-step replay gives it."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.optim import Adam
from torchrl import objectives
from torchrl.modules import DistributionalQValueActor

from kit.buffers import make_replay_buffer
from kit.losses import DistributionalDQNLoss
from kit.update import Update
from tests.losses import ACTIONS, OBSERVATIONS, net, transitions

ATOMS, GAMMA = 5, 0.5


def make(loss_class: type = DistributionalDQNLoss) -> objectives.DistributionalDQNLoss:
    torch.manual_seed(0)
    network = nn.Sequential(net(OBSERVATIONS, ATOMS * ACTIONS), nn.Unflatten(-1, (ATOMS, ACTIONS)))
    actor = DistributionalQValueActor(
        network, support=torch.linspace(-2, 2, ATOMS), action_space="one_hot"
    )
    return loss_class(actor, gamma=GAMMA, delay_value=True)


def minibatch(seed: int = 0, **entries: torch.Tensor) -> TensorDict:
    return transitions(6, "one_hot", seed).update(entries)


def test_one_step_transitions_have_torchrls_loss():
    expected = make(objectives.DistributionalDQNLoss)(minibatch())["loss"]
    assert torch.equal(make()(minibatch())["loss"], expected)
    ones = minibatch(steps_to_next_obs=torch.ones(6, dtype=torch.long))
    assert torch.equal(make()(ones)["loss"], expected)


def test_each_transition_is_discounted_by_its_own_number_of_steps():
    steps = torch.tensor([1, 2, 3, 1, 2, 3])
    given = minibatch(steps_to_next_obs=steps)
    make()(given)
    for row, count in enumerate(steps.tolist()):
        alone = minibatch()[row : row + 1]
        loss = make(objectives.DistributionalDQNLoss)
        loss.gamma.fill_(GAMMA**count)
        torch.testing.assert_close(given["td_error"][row], loss(alone)["loss"].reshape(1))
    assert torch.equal(given["steps_to_next_obs"], steps)


@pytest.mark.filterwarnings("ignore:DistributionalDQNLoss runs eagerly")
def test_it_trains_from_n_step_replay():
    buffer = make_replay_buffer(100, 6, n_step=3, gamma=GAMMA)
    rollout = torch.stack([transitions(12, "one_hot", seed) for seed in range(2)])
    rollout["next", "truncated"] = torch.zeros_like(rollout["next", "done"])
    buffer.extend(rollout)
    loss = make()
    update = Update(loss, Adam(loss.parameters(), lr=0.01))
    before = [parameter.clone() for parameter in loss.parameters()]
    for _ in range(3):
        drawn = buffer.buffer.sample(6)
        assert drawn["steps_to_next_obs"].shape == (6,)
        assert torch.isfinite(update(drawn)["loss"])
        assert drawn["td_error"].shape == (6, 1)
    assert not all(map(torch.equal, before, loss.parameters()))
    assert "it reads a tensor on the host at torchrl" in update.plain_reason
