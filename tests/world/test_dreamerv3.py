"""DreamerV3: its losses, whom each of them trains, and its recipe."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives.utils import SoftUpdate

from kit.envs import make_env
from kit.losses import DreamerV3Loss
from kit.losses.dreamerv3 import ReturnScale
from kit.losses.imagination import imagine, lambda_returns
from kit.modules.world import Latent, LatentActor, make_latent_critic, make_world_model


def make_loss(env_id: str = "CartPole-v1", **settings: Any) -> DreamerV3Loss:
    torch.manual_seed(0)
    env = make_env(env_id)
    model = make_world_model(env, "nano")
    actor = LatentActor(model.code, model.features, model.size)
    settings = {"imagination_horizon": 4, **settings}
    loss = DreamerV3Loss(model, actor, make_latent_critic(model), **settings)
    SoftUpdate(loss, tau=0.02)
    with torch.no_grad():  # initial outputs of zero would hide what depends on what
        for parameter in loss.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return loss


def sequences(env_id: str = "CartPole-v1", rows: int = 3, time: int = 6) -> TensorDict:
    steps = make_env(env_id, rows).rollout(time, auto_reset=True)
    flags = {name: torch.zeros(rows, time, 1, dtype=torch.bool) for name in ("done", "terminated")}
    first = torch.zeros(rows, time, 1, dtype=torch.bool)
    first[:, 0] = True
    arrived = {"reward": torch.randn(rows, time, 1), "is_init": first, **flags}
    return TensorDict({**steps.select("observation", "action"), **arrived}, [rows, time])


# ---------------------------------------------------------------------- returns
def test_lambda_returns_match_equation():
    torch.manual_seed(0)
    reward, value = torch.randn(5, 2).double(), torch.randn(5, 2).double()
    going = torch.rand(5, 2).double()
    wanted = torch.empty(4, 2).double()
    following = value[4]
    for t in range(3, -1, -1):
        mixed = (1 - 0.9) * value[t + 1] + 0.9 * following
        wanted[t] = following = reward[t + 1] + going[t + 1] * mixed
    torch.testing.assert_close(lambda_returns(reward[1:], going[1:], value[1:], 0.9), wanted)


def test_lambda_returns_bootstrap_when_episode_is_truncated():
    ones = torch.ones(3)
    last = torch.tensor([0.0, 1.0, 0.0])
    found = lambda_returns(ones, 0.5 * ones, 10 * ones, 1.0 * (1 - last))
    assert found.tolist() == [1 + 0.5 * 6, 1 + 0.5 * 10, 1 + 0.5 * 10]


def test_imagined_weights_are_zero_when_model_predicts_end():
    loss = make_loss()
    head = loss.world_model.continuation_head[-1]
    head.bias.data.fill_(-1e4)
    head.weight.data.zero_()
    start = loss.world_model.rssm.initial(5)
    imagined = imagine(loss.world_model, loss.actor, start, 3)
    assert [len(features) for features in imagined.features] == [5] * 4
    assert not imagined.weight.any(), "nothing counts once nothing continues"
    parts = imagined._replace(features=torch.stack(imagined.features))._asdict()
    assert [name for name, part in parts.items() if part.requires_grad] == ["columns"]


# ---------------------------------------------------------------------- losses
OWNERS = {
    "loss_reconstruction": {"world_model"}, "loss_reward": {"world_model"},
    "loss_continuation": {"world_model"}, "loss_dynamics": {"world_model"},
    "loss_representation": {"world_model"}, "loss_actor": {"actor"},
    "loss_critic": {"critic_network_params"},
    "loss_replay_critic": {"world_model", "critic_network_params"},
}  # fmt: skip


@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_each_loss_trains_expected_networks(name, env_id):
    loss = make_loss(env_id, free_nats=0.0)
    named = dict(loss.named_parameters())
    outputs = loss(sequences(env_id))
    found = torch.autograd.grad(outputs[name], list(named.values()), allow_unused=True)
    reached = {
        parameter.split(".")[0]
        for parameter, gradient in zip(named, found)
        if gradient is not None and gradient.any()
    }
    assert reached == OWNERS[name]


def test_losses_train_every_parameter():
    loss = make_loss(free_nats=0.0)
    outputs = loss(sequences())
    total = sum(outputs[name] for name in OWNERS)
    found = torch.autograd.grad(total, list(loss.parameters()), allow_unused=True)
    assert all(gradient is not None for gradient in found)


def test_prior_and_posterior_train_towards_each_other():
    loss = make_loss(free_nats=0.0)
    rssm = loss.world_model.rssm
    outputs = loss(sequences(time=1))  # later priors depend on earlier posteriors
    prior, posterior = rssm.prior[0].weight, rssm.posterior_out.weight

    def reaches(name, weight):
        (found,) = torch.autograd.grad(outputs[name], weight, retain_graph=True, allow_unused=True)
        return found is not None and bool(found.any())

    assert reaches("loss_dynamics", prior)
    assert not reaches("loss_dynamics", posterior)
    assert reaches("loss_representation", posterior)
    assert not reaches("loss_representation", prior)


def test_free_nats_clip_divergence_losses():
    outputs = make_loss(free_nats=1e4)(sequences())
    assert outputs["loss_dynamics"] == 1e4
    assert outputs["loss_representation"] == 1e3


def test_imagination_starts_limit_time_steps():
    few, all_ = make_loss(imagination_starts=2), make_loss()
    rows = []
    for loss in (few, all_):
        loss.critic_network.register_forward_hook(
            lambda _module, inputs, _out: rows.append(inputs[0].shape[:-1].numel())
        )
        loss(sequences(rows=3, time=6))
    assert max(rows[: len(rows) // 2]) == 3 * 2
    assert max(rows) == 3 * 6


# ---------------------------------------------------------------------- stored latents
def after(minibatch: TensorDict, time: int) -> TensorDict:
    """The time steps from one on, with the record before it."""
    before = minibatch[:, time - 1].clone()
    rest = minibatch[:, time:].clone().exclude("before", "latent")
    return rest.set("before", before.unsqueeze(1).expand(rest.shape))


def continued(minibatch: TensorDict) -> torch.Tensor:
    loss = make_loss(stored_latents=True)
    with patch.object(
        loss.world_model.rssm, "noise", lambda *rows, **_: torch.full((*rows, 8), 0.5)
    ):
        loss(minibatch)
    return minibatch["latent", "deter"].float()


def stored() -> TensorDict:
    """A minibatch with its latents, from zeros on."""
    minibatch, rssm = sequences(), make_loss().world_model.rssm
    zeros = TensorDict(
        {"latent": rssm.packed(rssm.initial(3)), "action": minibatch["action"][:, 0]}, 3
    )
    continued(minibatch.set("before", zeros.unsqueeze(1).expand(3, 6)))
    return minibatch


def test_sequence_continues_from_stored_latent():
    minibatch = stored()
    whole = minibatch["latent", "deter"].float()
    rest = continued(after(minibatch, 3))
    torch.testing.assert_close(rest, whole[:, 3:], atol=2e-3, rtol=0)  # they are kept in 16 bits
    begun = after(minibatch, 3)
    begun["before", "latent", "deter"] = torch.zeros_like(begun["before", "latent", "deter"])
    assert not torch.allclose(continued(begun), whole[:, 3:], atol=2e-2)


def test_stored_latent_does_not_cross_episode_start():
    minibatch = after(stored(), 3)
    minibatch["is_init"][:, 0] = True
    found = continued(minibatch.clone())
    minibatch["before"] = minibatch["before"].apply(torch.zeros_like)
    assert torch.equal(continued(minibatch), found)


def test_packed_latent_is_restored_exactly():
    rssm = make_loss().world_model.rssm
    codes = torch.nn.functional.one_hot(torch.randint(8, (5, 8)), 8).float().flatten(-2)
    latent = Latent(torch.rand(5, 64).half().float(), codes)
    for one, other in zip(rssm.unpacked(rssm.packed(latent)), latent):
        assert torch.equal(one, other)


# ---------------------------------------------------------------------- returns
def test_return_scale_follows_running_percentiles():
    loss = ReturnScale(rate=0.5)
    returns = torch.linspace(0, 100, 101)
    assert loss(returns) == 45.0
    assert loss(returns) == 67.5
    assert ReturnScale()(returns / 1e4) == 1.0, "small returns are not blown up"
