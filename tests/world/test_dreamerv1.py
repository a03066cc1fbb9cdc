"""The first Dreamer's losses: those of the paper, whom they train, where imagination begins."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributions import Bernoulli, Normal, kl_divergence

import recipes.dreamerv1
from kit.experiment import EnvConfig
from kit.losses import DreamerV1Loss
from kit.losses.imagination import Imagined, imagine
from kit.losses.records import Records
from tests.world.runs import build
from tests.world.test_dreamerv3 import sequences

BEHAVIOUR = ("loss_actor", "loss_critic")


def losses(minibatch: TensorDict, **settings) -> TensorDict:
    torch.manual_seed(0)
    loss = build(recipes.dreamerv1, **settings).update.loss_module
    torch.manual_seed(1)
    return loss(minibatch)


@pytest.mark.parametrize("starts", [2, 6])
def test_imagination_from_terminated_states_has_zero_loss(starts):
    minibatch = sequences(time=6)
    minibatch["terminated"][:, -starts:] = True
    found = losses(minibatch, imagination_starts=starts)
    assert [float(found[name]) for name in BEHAVIOUR] == [0.0, 0.0]


@pytest.mark.parametrize("terminated", [True, False])
def test_behaviour_losses_exclude_only_terminated_starts(terminated):
    minibatch = sequences(rows=3, time=6)
    minibatch["terminated"][1] = terminated
    found = losses(minibatch)
    minibatch["observation"][1] += 1.0
    moved = losses(minibatch)
    for name in BEHAVIOUR:
        assert found[name] != 0
        assert torch.equal(found[name], moved[name]) == terminated


def test_zero_discount_does_not_mask_imagination_starts():
    found = losses(sequences(), gamma=0.0)
    assert all(found[name] != 0 for name in BEHAVIOUR)


# ---------------------------------------------------------------------- the paper
GAMMA, LMBDA, HORIZON = 0.9, 0.8, 3


def published(env_id: str = "CartPole-v1", **settings) -> tuple[DreamerV1Loss, TensorDict]:
    """A loss none of whose weights is zero, and sequences in which an episode terminates."""
    torch.manual_seed(0)
    changes = {"gamma": GAMMA, "lmbda": LMBDA, "imagination_starts": None, **settings}
    env = EnvConfig(env_id, num_envs=1)
    loss = build(recipes.dreamerv1, env=env, **changes).update.loss_module
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    minibatch = sequences(env_id, rows=2, time=5)
    minibatch["terminated"][0, 2] = minibatch["done"][0, 2] = minibatch["is_init"][0, 3] = True
    return loss, minibatch


def imagined(loss: DreamerV1Loss, records: Records) -> Imagined:
    """What is imagined from all time steps, from the random numbers of seed 1."""
    torch.manual_seed(1)
    _, latents, _ = records.filtered(loss.world_model)
    starts = latents.newest(0)
    return imagine(loss.world_model, loss.actor, starts, HORIZON, gradients=True)


def lambda_return(reward: Tensor, going: Tensor, value: Tensor, start: int) -> Tensor:
    """Equations 5 and 6 as they are written: a mean of n-step returns."""
    total, share = torch.zeros_like(value[0]), 1.0
    for steps in range(1, HORIZON - start + 1):
        several, reached = torch.zeros_like(total), torch.ones_like(total)
        for step in range(start, start + steps):
            several = several + reached * reward[step]
            reached = reached * going[step + 1]
        several = several + reached * value[start + steps]
        is_last = start + steps == HORIZON
        total = total + share * (1.0 if is_last else 1 - LMBDA) * several
        share *= LMBDA
    return total


@pytest.mark.parametrize("continuation_coeff", [0.0, 10.0])
def test_actor_and_critic_losses_match_paper_returns(continuation_coeff):
    loss, minibatch = published(continuation_coeff=continuation_coeff)
    records = Records.of(minibatch, loss.world_model, GAMMA)
    seen = imagined(loss, records)
    value = torch.stack([loss.critic(features).squeeze(-1) for features in seen.features])
    going = seen.continuation if continuation_coeff else torch.full_like(value, GAMMA)
    returns = [lambda_return(seen.reward, going, value, start) for start in range(HORIZON)]
    weight = (~records.terminated).float().flatten()
    actor, critic = [], []
    for start, wanted in enumerate(returns):
        weight = weight * (going[start] if start else 1.0)
        actor.append(-(weight * wanted).mean())
        critic.append((weight * (value[start] - wanted).square() / 2).mean())
    torch.manual_seed(1)
    found = loss(minibatch)
    torch.testing.assert_close(found["loss_actor"], sum(actor) / HORIZON)
    torch.testing.assert_close(found["loss_critic"], sum(critic) / HORIZON)


@pytest.mark.parametrize("free_nats", [0.0, 60.0, 1e3])
def test_world_model_loss_matches_paper_likelihoods(free_nats):
    settings = {"free_nats": free_nats, "divergence_coeff": 0.5, "continuation_coeff": 2.0}
    loss, minibatch = published(**settings)
    model, records = loss.world_model, Records.of(minibatch, loss.world_model, GAMMA)
    torch.manual_seed(1)
    (observed,), latents, posterior = records.filtered(model)
    features = latents.features

    def normal(parameters: Tensor) -> Normal:
        mean, raw = parameters.chunk(2, -1)
        return Normal(mean, torch.nn.functional.softplus(raw) + 0.1)

    divergence = kl_divergence(normal(posterior), normal(model.rssm.prior(latents.deter)))
    divergence = divergence.sum(-1).mean().clamp(min=free_nats)
    unit, logits = Normal(0.0, 1.0), model.continuation_head(features).squeeze(-1)
    constant = unit.log_prob(torch.zeros(()))
    off = unit.log_prob(model.decoder(features) - observed) - constant
    off_reward = unit.log_prob(model.reward(features) - records.reward) - constant
    going = (~records.terminated).float() * GAMMA
    likely = Bernoulli(logits=logits, validate_args=False).log_prob(going)
    wanted = 0.5 * divergence - off.sum(-1).mean() - off_reward.mean() - 2.0 * likely.mean()
    torch.manual_seed(1)
    torch.testing.assert_close(loss(minibatch)["loss_model"], wanted)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_each_loss_trains_expected_networks(env_id):
    loss, minibatch = published(env_id)
    named = dict(loss.named_parameters())
    reached = {}
    for name in loss.out_keys:
        outputs = loss(minibatch)
        found = torch.autograd.grad(outputs[name], list(named.values()), allow_unused=True)
        reached[name] = {
            parameter.split(".")[0]
            for parameter, gradient in zip(named, found)
            if gradient is not None and gradient.any()
        }
    # The actor's optimiser takes the gradients of the actor alone.
    assert reached.pop("loss_actor") == {"actor", "world_model", "critic"}
    assert reached == {"loss_model": {"world_model"}, "loss_critic": {"critic"}}
