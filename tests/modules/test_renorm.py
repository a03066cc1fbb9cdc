"""Batch renormalisation is the paper's, also after its warm-up, and its statistics are kept."""

from __future__ import annotations

import pytest
import torch
from torchrl import objectives
from torchrl.modules import BatchRenorm1d

from kit.losses import DroQLoss
from kit.modules import BatchRenorm
from kit.modules.heads import ClippedTanhNormal
from recipes import crossq
from tests.losses import make_loss, minibatch_for

MOMENTUM, EPS, WARMUP = 0.1, 1e-3, 4


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [3 * torch.randn(16, 5, generator=generator) + 1 for _ in range(count)]


def test_batch_renorm_matches_formula_at_every_step():
    layer = BatchRenorm(5, momentum=MOMENTUM, eps=EPS, warmup_steps=WARMUP, max_r=1.5, max_d=0.2)
    mean, var = torch.zeros(5), torch.ones(5)
    for number, batch in enumerate(batches(4 * WARMUP)):
        batch_mean, batch_std = batch.mean(0), (batch.var(0, correction=0) + EPS).sqrt()
        r = (batch_std / (var + EPS).sqrt()).clamp(1 / 1.5, 1.5)
        d = ((batch_mean - mean) / (var + EPS).sqrt()).clamp(-0.2, 0.2)
        if number < WARMUP:
            r, d = torch.ones(5), torch.zeros(5)
        torch.testing.assert_close(layer(batch), (batch - batch_mean) / batch_std * r + d)
        mean = mean + MOMENTUM * (batch_mean - mean)
        var = var + MOMENTUM * (batch.var(0, correction=0) - var)
    torch.testing.assert_close(layer.running_mean, mean)
    torch.testing.assert_close(layer.running_var, var)
    assert layer.batches == 4 * WARMUP


def test_batch_renorm_matches_torchrl_during_warmup():
    ours = BatchRenorm(5, momentum=MOMENTUM, eps=EPS, warmup_steps=WARMUP)
    theirs = BatchRenorm1d(5, momentum=MOMENTUM, eps=EPS, warmup_steps=WARMUP)
    for batch in batches(WARMUP):
        torch.testing.assert_close(ours(batch), theirs(batch))


def test_batch_renorm_uses_fixed_statistics_in_evaluation():
    layer = BatchRenorm(5)
    for batch in batches(3):
        layer(batch)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.eval()
    (one, *_) = batches(1)
    expected = (one - layer.running_mean) / (layer.running_var + 1e-3).sqrt()
    torch.testing.assert_close(layer(one), expected)
    torch.testing.assert_close(layer(one[:1]), expected[:1])
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


CROSSQ = "CrossQLoss, batch renormalisation"


def statistics(loss, network, name):
    state = loss.state_dict()
    return [v.clone() for key, v in state.items() if key.startswith(network) and name in key]


def test_crossq_updates_each_statistic_once_per_step():
    loss = make_loss(CROSSQ)
    for count in range(1, 4):
        loss(minibatch_for(CROSSQ))
        seen = [value.tolist() for value in statistics(loss, "", "batches")]
        assert seen == [count, [count, count], [count, count]]


@pytest.mark.parametrize("training", [True, False])
def test_crossq_actor_uses_batch_statistics_only_in_actor_loss(training):
    loss, minibatch = make_loss(CROSSQ), minibatch_for(CROSSQ)
    actor, observation = loss.actor_network, minibatch["observation"]
    actor.train(training)
    torch.manual_seed(0)
    value, _ = loss.qvalue_loss(minibatch)
    assert statistics(loss, "actor", "batches") == [0]
    loss.actor_loss(minibatch)
    assert statistics(loss, "actor", "batches") == [1]
    (mean,) = statistics(loss, "actor", "running_mean")
    torch.testing.assert_close(mean, actor.module[0].module[0].momentum * observation.mean(0))
    assert actor.training == training
    layers = [*actor.module[0].module]
    layers[1].train(not training)  # frozen, or not
    loss(minibatch)
    assert [one.training for one in layers[:3]] == [training, not training, training]

    theirs = make_loss(CROSSQ)
    theirs.actor_network.eval()
    torch.manual_seed(0)
    assert value == objectives.CrossQLoss.qvalue_loss(theirs, minibatch)[0]


@pytest.mark.parametrize("authors", [True, False])
def test_renorm_actor_adds_batch_renorm_and_clipped_log_std(authors):
    trainer = crossq.build(crossq.Config(renorm_actor=authors, log_dir=None, progress=False))
    actor = trainer.loss_module.actor_network
    assert any(isinstance(one, BatchRenorm) for one in actor.modules()) == authors
    assert any(isinstance(one, ClippedTanhNormal) for one in actor.modules()) == authors


def test_droq_actor_maximises_mean_of_critics():
    loss = make_loss("DroQLoss")
    assert isinstance(loss, DroQLoss)
    loss.qvalue_network.eval()  # no dropout
    loss.log_alpha.data.fill_(-40.0)
    minibatch = minibatch_for("DroQLoss")
    values = []
    whole = loss.qvalue_network_params.data.clone()
    for critics in ([0, 1], [0, 0], [1, 1]):
        loss.qvalue_network_params.data.copy_(whole[critics])
        torch.manual_seed(0)
        values.append(loss.actor_loss(minibatch)[0])
    torch.testing.assert_close(values[0], (values[1] + values[2]) / 2)
    assert not torch.equal(values[1], values[2])
