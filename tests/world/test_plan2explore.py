"""Plan2Explore: what is novel, and what rewards change while it explores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import recipes.plan2explore
from kit.experiment import EnvConfig
from kit.losses import Plan2ExploreLoss
from kit.losses.plan2explore import RunningStd
from kit.losses.records import Records
from kit.modules.world import SIZES, Ensemble
from tests.errors import raises_setting
from tests.world.runs import assert_equal, build
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
def test_rewards_change_features_only_after_exploration(exploring):
    loss = build(recipes.plan2explore).update.loss_module
    with torch.no_grad():  # initial outputs of zero would hide what depends on what
        for parameter in loss.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    loss.exploring, loss.stored_latents = exploring, False
    nothing, much = gradients(loss, 0.0), gradients(loss, 10.0)
    assert all(nothing[name].equal(much[name]) for name in nothing) == exploring


# ---------------------------------------------------------------------- novelty
@pytest.mark.parametrize("members", [2, 5])
def test_novelty_is_sample_variance_of_predictions(members):
    """Sekar et al. 2020, section 3: the sum of squares is divided by K - 1."""
    torch.manual_seed(0)
    ensemble = Ensemble(members, 6, 2, 9, SIZES["nano"])
    seen, action = torch.randn(7, 6), torch.eye(2)[torch.randint(2, (7,))]
    predicted = ensemble(seen, action)
    mean = sum(predicted) / members
    squares = sum((one - mean).square() for one in predicted)
    found = ensemble.disagreement(seen, action)
    torch.testing.assert_close(found, squares.mean(-1) / (members - 1))


def test_novelty_clips_actions_to_bounds():
    """The explorer imagines such actions, the environment clips them, the replay has none."""
    loss = build(recipes.plan2explore, env=EnvConfig("Pendulum-v1", 1)).update.loss_module
    seen = torch.randn(7, loss.world_model.features)
    novelty = [loss.ensemble.disagreement(seen, torch.full((7, 1), a)) for a in (1.0, 2.5, 0.5)]
    assert torch.equal(novelty[0], novelty[1])
    assert not torch.equal(novelty[0], novelty[2])


def test_ensemble_does_not_learn_across_episode_ends():
    """The observation after a reset does not follow from the latent and the action before it."""
    loss, minibatch = build(recipes.plan2explore).update.loss_module, sequences(rows=2, time=6)
    loss.stored_latents = False
    minibatch["is_init"][:, 3] = True
    minibatch["done"][:, 2] = True
    records = Records.of(minibatch, loss.world_model, 0.9)
    _, latents, _ = records.filtered(loss.world_model)
    within = [0, 1, 3, 4]  # time steps whose next latent belongs to the same episode
    features = torch.stack([latents.features[time] for time in within]).flatten(0, 1)
    (encoder,) = loss.fixed_encoders
    embedding = encoder(loss.world_model.targets(records.observations)[0])
    following = torch.stack([embedding[time + 1] for time in within]).flatten(0, 1)
    predicted = loss.ensemble(features, torch.cat([records.action[time] for time in within]))
    squares = (predicted - following).square().mean(-1)
    expected = squares.sum() / (5 * 2)  # the mean is over all pairs of time steps
    torch.testing.assert_close(loss._ensemble_loss(latents, records), expected)


def test_target_embeddings_of_ensemble_stay_fixed():
    trainer = build(recipes.plan2explore, total_policy_steps=72, exploration_steps=72)
    (fixed,), trained = trainer.loss_module.fixed_encoders, trainer.loss_module.world_model.encoder
    before = [parameter.clone() for parameter in trained.parameters()]
    assert trainer.run().gradient_steps
    assert all(map(torch.equal, before, fixed.parameters()))
    assert not all(map(torch.equal, before, trained.parameters()))


def test_ensemble_rejects_single_member():
    with raises_setting("ensemble"):
        Ensemble(1, 6, 2, 9, SIZES["nano"])
    with raises_setting("ensemble"):
        build(recipes.plan2explore, ensemble=1)


# ---------------------------------------------------------------------- the explorer
PENDULUM = EnvConfig("Pendulum-v1", 1)


def explorer_loss(env: EnvConfig | None = None, **settings: Any) -> Plan2ExploreLoss:
    """A loss whose networks return other numbers than zeros."""
    torch.manual_seed(0)
    given = {} if env is None else {"env": env}
    loss = build(recipes.plan2explore, **given, **settings).update.loss_module
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    loss.stored_latents = False
    return loss


def outputs_of(loss: Plan2ExploreLoss, env_id: str = "CartPole-v1") -> TensorDict:
    """Losses of the same minibatch and random numbers each time."""
    torch.manual_seed(1)
    return loss(sequences(env_id))


def test_running_std_matches_exponential_average():
    scale, generator = RunningStd(rate=0.1), torch.Generator().manual_seed(0)
    values = 3.0 + torch.randn(4, 50, generator=generator)
    found = [float(scale(one)) for one in values]
    weight = torch.tensor([0.9**k for k in (3, 2, 1, 0)]).repeat_interleave(50)
    mean = (weight * values.flatten()).sum() / weight.sum()
    variance = (weight * (values.flatten() - mean).square()).sum() / weight.sum()
    assert found[-1] == pytest.approx(float(variance.sqrt()), rel=1e-4)
    assert found[0] == pytest.approx(float(values[0].std(correction=0)), rel=1e-4)


def test_intrinsic_returns_are_invariant_to_disagreement_scale(monkeypatch):
    """Disagreements of 1e-4 would never exceed the smallest scale of returns, which is 1."""
    found = []
    for factor in (1.0, 1e-3):
        loss, own = explorer_loss(), Ensemble.disagreement
        scaled = lambda *given, factor=factor, own=own: factor * own(*given)  # noqa: E731
        monkeypatch.setattr(Ensemble, "disagreement", scaled)
        found.append(outputs_of(loss))
        monkeypatch.setattr(Ensemble, "disagreement", own)
    assert found[1]["disagreement"] < 1e-2 * found[0]["disagreement"]
    for name in ("explorer_imagined_return", "loss_explorer_actor", "loss_explorer_critic"):
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("env", [None, PENDULUM], ids=["discrete", "continuous"])
def test_explorer_advantages_are_weighted_means(env):
    """As in sheeprl: each critic's advantages are divided by the spread of its returns."""
    loss = explorer_loss(env, extrinsic_weight=1.0, entropy_coeff=0.0)
    found = {}
    for weights in ((1.0, 0.0), (0.0, 1.0), (0.1, 1.0)):
        loss.explorer_weights = dict(zip(loss.explorer_weights, weights))
        loss.load_state_dict(state := loss.state_dict())
        before = {name: value.clone() for name, value in state.items()}
        outputs = outputs_of(loss, "CartPole-v1" if env is None else env.id)
        found[weights] = outputs["loss_explorer_actor"].detach()
        loss.load_state_dict(before)
    intrinsic, extrinsic, both = found.values()
    assert intrinsic != extrinsic
    torch.testing.assert_close(both, (0.1 * intrinsic + extrinsic) / 1.1)


def test_explorer_weights_are_configurable():
    loss = build(recipes.plan2explore, intrinsic_weight=0.1, extrinsic_weight=1.0)
    assert [*loss.update.loss_module.explorer_weights.values()] == [0.1, 1.0]
    alone = build(recipes.plan2explore).update.loss_module
    assert not any("extrinsic" in name for name in alone.state_dict())


@pytest.mark.parametrize("env", [None, PENDULUM], ids=["discrete", "continuous"])
def test_only_continuous_explorer_learns_through_dynamics(env):
    loss = explorer_loss(env)
    outputs = outputs_of(loss, "CartPole-v1" if env is None else env.id)
    networks = loss.world_model.rssm, loss.ensemble, loss.explorer
    parameters = [list(network.parameters()) for network in networks]
    total = outputs["loss_explorer_actor"]
    found = [
        torch.autograd.grad(total, of, retain_graph=True, allow_unused=True) for of in parameters
    ]
    reached = [any(one is not None and one.any() for one in gradients) for gradients in found]
    assert reached == [env is not None, env is not None, True]
    critic = torch.autograd.grad(outputs["loss_explorer_critic"], parameters[2], allow_unused=True)
    assert all(one is None for one in critic)


@pytest.mark.parametrize("env", [None, PENDULUM], ids=["discrete", "continuous"])
def test_explorer_and_ensemble_have_separate_optimizers(env):
    """So what trains the explorer through the dynamics changes neither these nor the ensemble."""
    settings = {} if env is None else {"env": env}
    update = build(recipes.plan2explore, ensemble_learning_rate=0.02, **settings).update
    shared, ensemble, explorer = update.groups
    loss = update.loss_module
    assert (ensemble.losses, explorer.losses) == (("loss_ensemble",), ("loss_explorer_actor",))
    assert not {*ensemble.losses, *explorer.losses} & {*shared.losses}
    assert ensemble.optimizer.param_groups[0]["lr"] == 0.02
    assert {*map(id, ensemble.parameters)} == {*map(id, loss.ensemble.parameters())}
    assert {*map(id, explorer.parameters)} == {*map(id, loss.explorer.parameters())}
    assert [*update.optimizers] == ["optimizer", "ensemble", "explorer_actor"]


def test_traced_gradients_of_continuous_explorer_match_eager():
    short = {"env": PENDULUM, "total_policy_steps": 72, "sequence_length": 3}
    one, other = (build(recipes.plan2explore, compile=how, **short) for how in ("auto", False))
    one.run()
    assert other.run().gradient_steps == 3
    assert one.update.plain_reason == ""
    assert_equal(one, other)
