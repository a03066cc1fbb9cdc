"""Plan2Explore's loss: what rewards change while it explores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import recipes.plan2explore
from kit.losses import Plan2ExploreLoss
from tests.world.runs import build
from tests.world.test_dreamerv3 import sequences


def gradients(loss: Plan2ExploreLoss, reward: float) -> dict[str, Tensor]:
    """Of all losses together, to what the world model is without its head of rewards."""
    torch.manual_seed(1)
    minibatch = sequences()
    minibatch["reward"].fill_(reward)
    outputs = loss(minibatch)
    total = sum(value for name, value in outputs.items() if name.startswith("loss_"))
    owned = loss.world_model.named_parameters()
    named = {name: one for name, one in owned if not name.startswith("reward_head")}
    return dict(zip(named, torch.autograd.grad(total, list(named.values()))))


@pytest.mark.parametrize("exploring", [True, False])
def test_rewards_change_the_features_of_the_world_model_after_exploration_alone(exploring):
    loss = build(recipes.plan2explore).update.loss_module
    with torch.no_grad():  # initial outputs of zero would hide what depends on what
        for parameter in loss.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    loss.exploring, loss.stored_latents = exploring, False
    nothing, much = gradients(loss, 0.0), gradients(loss, 10.0)
    assert all(nothing[name].equal(much[name]) for name in nothing) == exploring
