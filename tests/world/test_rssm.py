"""The recurrent state-space model: filtering, resets, divergences, two-hot numbers."""

from __future__ import annotations

import pytest
import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.objectives import two_hot_cross_entropy
from torchrl.objectives.dreamer_v3 import categorical_kl_terms

from kit.collectors.policy import first_values
from kit.envs import make_env
from kit.modules.world import Latent, LatentActor, Player, make_world_model
from kit.modules.world.layers import Perceptron, TwoHot, sample_one_hot, symexp, symlog


@pytest.fixture
def rssm():
    torch.manual_seed(0)
    return make_world_model(make_env("CartPole-v1"), "nano").rssm


def sequences(rssm, time=6, rows=3):
    """Encoded actions, embeddings, and no beginning but the first."""
    action = torch.nn.functional.one_hot(torch.randint(2, (time, rows)), 2).float()
    first = torch.zeros(time, rows, dtype=torch.bool)
    first[0] = True
    return action, torch.randn(time, rows, rssm.posterior_embedding.in_features), first


def observe(rssm, action, embedding, first, seed=1):
    torch.manual_seed(seed)
    return rssm.observe(rssm.initial(first.shape[1]), action, embedding, first)


def test_latent_does_not_depend_on_future(rssm):
    action, embedding, first = sequences(rssm)
    (before, _), _ = observe(rssm, action, embedding, first)
    embedding[4], action[4] = 0.0, 0.0
    (after, _), _ = observe(rssm, action, embedding, first)
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4], after[4]), "the action before a time step is read in it"
    assert not torch.equal(before[5], after[5])


def test_latent_state_resets_at_episode_start(rssm):
    action, embedding, first = sequences(rssm)
    first[3] = True
    (deter, _), logits = observe(rssm, action, embedding, first)
    action[:4], embedding[:3] = torch.rand(4, 3, 2), torch.randn(3, 3, embedding.shape[-1])
    (changed, _), changed_logits = observe(rssm, action, embedding, first)
    assert torch.equal(deter[3:], changed[3:])
    assert torch.equal(logits[3:], changed_logits[3:])


def test_rssm_scales_large_actions_to_one(rssm):
    scaled = rssm.action(torch.tensor([[3.0, -0.5]]))
    torch.testing.assert_close(scaled, rssm.action(torch.tensor([[1.0, -0.5]])))


def test_divergences_match_torchrl(rssm):
    posterior, prior = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
    latents = [logits.unflatten(-1, (8, 8)) for logits in (posterior, prior)]
    theirs = categorical_kl_terms(*latents, free_nats=0.0)
    for ours, one in zip(rssm.divergence(posterior, prior), theirs):
        torch.testing.assert_close(ours.mean(), one.mean())


def test_one_hot_samples_follow_requested_probabilities():
    torch.manual_seed(0)
    wanted = torch.tensor([0.5, 0.0, 0.2, 0.3])
    drawn = sample_one_hot(wanted.expand(40_000, 4), torch.rand(40_000))
    assert (drawn.sum(-1) == 1).all()
    torch.testing.assert_close(drawn.mean(0), wanted, atol=0.01, rtol=0)
    assert drawn[:, 1].sum() == 0


def test_latent_probabilities_mix_in_one_percent_uniform(rssm):
    certain = torch.zeros(64)
    certain[::8] = 1e4
    least = rssm.probabilities(certain).min()
    torch.testing.assert_close(least, torch.tensor(0.01 / 8))


def test_samples_pass_gradients_straight_through(rssm):
    logits = torch.randn(5, 64, requires_grad=True)
    sampled = rssm.sample(logits, torch.rand(5, 8))
    weight = torch.randn(5, 64)
    (found,) = torch.autograd.grad((sampled * weight).sum(), logits)
    (wanted,) = torch.autograd.grad((rssm.probabilities(logits).flatten(-2) * weight).sum(), logits)
    torch.testing.assert_close(found, wanted)


# ---------------------------------------------------------------------- numbers
def test_symexp_inverts_symlog():
    numbers = torch.tensor([-1e4, -1.0, 0.0, 0.5, 3e3])
    torch.testing.assert_close(symexp(symlog(numbers)), numbers)


def test_two_hot_mean_of_equal_logits_is_exactly_zero():
    assert TwoHot().mean(torch.full((3, 255), 0.7)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("number", [-3e8, -17.0, -0.01, 0.0, 0.3, 5.0, 2e5])
def test_two_hot_optimum_has_target_as_mean(number):
    two_hot, target = TwoHot(), torch.tensor([number])
    logits = torch.zeros(1, 255, requires_grad=True)
    (gradient,) = torch.autograd.grad(two_hot.loss(logits, target).sum(), logits)
    best = torch.full((1, 255), 1 / 255) - gradient  # softmax minus target, at its best the target
    torch.testing.assert_close((best.double() @ two_hot.bins.double()).float(), target)
    assert (best > 1e-6).sum() <= 2


def test_two_hot_loss_matches_torchrl():
    two_hot, logits = TwoHot(), torch.randn(50, 255)
    one, other = 30 * torch.randn(50), torch.randn(50)
    theirs = sum(
        two_hot_cross_entropy(logits, target.unsqueeze(-1), two_hot.bins).reshape(50)
        for target in (one, other)
    )
    torch.testing.assert_close(two_hot.loss(logits, one, other), theirs)


def test_two_hot_head_starts_at_zero():
    two_hot = TwoHot()
    assert two_hot.mean(two_hot.head(4, 8, 1)(torch.randn(5, 4))).tolist() == [0.0] * 5


def test_padding_output_of_head_has_no_effect():
    torch.manual_seed(0)
    two_hot, value, target = TwoHot(), torch.randn(6, 4), torch.randn(6)
    wide = two_hot.head(4, 8, 1)
    narrow = Perceptron(4, 8, 1, 255)
    wide.load_state_dict(narrow.state_dict())
    logits = wide(value)
    assert logits.shape == (6, 256)
    assert (logits[:, -1] == -torch.inf).all()
    found = []
    for head in (wide, narrow):
        loss = two_hot.loss(head(value), target).sum()
        gradients = torch.autograd.grad(loss, [*head.parameters()])
        found.append([loss, two_hot.mean(head(value)), *gradients])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("spread", [1e-3, 0.1, 3.0])
def test_two_hot_mean_matches_exact_probabilities(spread):
    torch.manual_seed(0)
    two_hot, logits = TwoHot(), spread * torch.randn(50, 255)
    exact = logits.softmax(-1).double() @ two_hot.bins.double()
    torch.testing.assert_close(two_hot.mean(logits).double(), exact, rtol=3e-5, atol=0)


def test_two_hot_mean_is_not_rounded_in_autocast():
    two_hot, logits = TwoHot(), torch.full((1, 255), -30.0)
    logits[0, [164, 165]] = 0.0
    with torch.autocast("cpu", torch.bfloat16):
        found = two_hot.mean(logits)
    assert torch.equal(found, two_hot.mean(logits))


# ---------------------------------------------------------------------- acting
def test_player_filters_like_training():
    torch.manual_seed(0)
    env = make_env("CartPole-v1", 2)
    model = make_world_model(env, "nano")
    player = Player(model, LatentActor(model.code, model.features, model.size))
    steps = env.rollout(5, auto_reset=True).transpose(0, 1)
    given = (
        steps[0]
        .select("observation")
        .update({"_deter": torch.zeros(2, 64), "_stoch": torch.zeros(2, 64)})
    )
    actions = [torch.zeros(2, 2)]
    torch.manual_seed(7)
    with set_exploration_type(ExplorationType.DETERMINISTIC):  # so that only latents are drawn
        for step in steps:
            given.set("observation", step["observation"])
            given.set("_previous_action", actions[-1])
            given = player(given)
            given.update(given.pop("next"))
            actions.append(given["_previous_action"])
    first = torch.zeros(5, 2, dtype=torch.bool)
    first[0] = True
    embedding = model.encode(model.targets(steps))
    latents, _ = observe(model.rssm, torch.stack(actions[:-1]), embedding, first, seed=7)
    torch.testing.assert_close(latents.deter[-1], given["_deter"])
    torch.testing.assert_close(latents.stoch[-1], given["_stoch"])


@pytest.mark.parametrize("kind", [kind for kind in ExplorationType if kind.name != "RANDOM"])
def test_player_uses_mode_unless_exploration_is_random(kind):
    env = make_env("Pendulum-v1", 2)
    model = make_world_model(env, "nano")
    actor = LatentActor(model.code, model.features, model.size)
    player = Player(model, actor, exploration_noise=0.3)
    observed = env.reset().update(first_values(player, 2, "cpu"))
    with set_exploration_type(kind):
        following = player(observed)["next"]
    features = Latent(following["_deter"], following["_stoch"]).features
    assert torch.equal(following["_previous_action"], actor.mode(actor(features)))


def test_player_clips_exploration_noise_to_bounds():
    env = make_env("Pendulum-v1", 8)
    model = make_world_model(env, "nano")
    actor = LatentActor(model.code, model.features, model.size)
    player = Player(model, actor, exploration_noise=100.0)
    observed = env.reset().update(first_values(player, 8, "cpu"))
    with set_exploration_type(ExplorationType.RANDOM):
        action = player(observed)["next", "_previous_action"]
    assert action.abs().max() == 1.0


def test_player_takes_random_discrete_actions_with_epsilon():
    env = make_env("CartPole-v1", 1_000)
    model = make_world_model(env, "nano")
    actor = LatentActor(model.code, model.features, model.size)
    torch.nn.init.constant_(actor.network[-1].bias, 0.0)
    with torch.no_grad():
        actor.network[-1].bias[0] = 100.0  # The actor always chooses action 0.
    observed = env.reset()
    for epsilon, share in ((0.0, 0.0), (0.5, 0.25), (1.0, 0.5)):
        player = Player(model, actor, epsilon=epsilon)
        observed.update(first_values(player, 1_000, "cpu"))
        with set_exploration_type(ExplorationType.RANDOM):
            action = player(observed)["action"]
        assert action.float().mean() == pytest.approx(share, abs=0.05)
