"""Plan2Explore: what is novel, and what rewards change while it explores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import recipes.plan2explore
from kit.experiment import EnvConfig
from kit.losses import Plan2ExploreLoss
from kit.losses.records import Records
from kit.modules.world import SIZES, Ensemble
from kit.steps import SettingError
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


# ---------------------------------------------------------------------- novelty
@pytest.mark.parametrize("members", [2, 5])
def test_novelty_is_the_variance_of_a_sample_of_predictions(members):
    """Sekar et al. 2020, section 3: the sum of squares is divided by K - 1."""
    torch.manual_seed(0)
    ensemble = Ensemble(members, 6, 2, SIZES["nano"])
    seen, action = torch.randn(7, 6), torch.eye(2)[torch.randint(2, (7,))]
    predicted = ensemble(seen, action)
    mean = sum(predicted) / members
    squares = sum((one - mean).square() for one in predicted)
    found = ensemble.disagreement(seen, action)
    torch.testing.assert_close(found, squares.mean(-1) / (members - 1))


def test_an_action_beyond_its_bounds_is_as_novel_as_the_bound():
    """The explorer imagines such actions, the environment clips them, the replay has none."""
    loss = build(recipes.plan2explore, env=EnvConfig("Pendulum-v1", 1)).update.loss_module
    seen = torch.randn(7, loss.world_model.features)
    novelty = [loss.ensemble.disagreement(seen, torch.full((7, 1), a)) for a in (1.0, 2.5, 0.5)]
    assert torch.equal(novelty[0], novelty[1])
    assert not torch.equal(novelty[0], novelty[2])


def test_ensemble_does_not_learn_across_episode_ends():
    """The latent after a reset does not follow from the latent and the action before it."""
    loss, minibatch = build(recipes.plan2explore).update.loss_module, sequences(rows=2, time=6)
    loss.stored_latents = False
    minibatch["is_init"][:, 3] = True
    minibatch["done"][:, 2] = True
    records = Records.of(minibatch, loss.world_model, 0.9)
    _, latents, _ = records.filtered(loss.world_model)
    within = [0, 1, 3, 4]  # time steps whose next latent belongs to the same episode
    features = torch.stack([latents.features[time] for time in within]).flatten(0, 1)
    following = torch.stack([latents.stoch[time + 1] for time in within]).flatten(0, 1)
    predicted = loss.ensemble(features, torch.cat([records.action[time] for time in within]))
    squares = (predicted - following).square().mean(-1)
    expected = squares.sum() / (5 * 2)  # the mean is over all pairs of time steps
    torch.testing.assert_close(loss._ensemble_loss(latents, records), expected)


def test_one_model_alone_disagrees_with_nobody():
    with pytest.raises(SettingError, match="ensemble=1 is less than 2"):
        Ensemble(1, 6, 2, SIZES["nano"])
    with pytest.raises(SettingError, match="ensemble=1 is less than 2"):
        build(recipes.plan2explore, ensemble=1)
