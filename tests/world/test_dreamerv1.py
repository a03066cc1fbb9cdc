"""The first Dreamer's loss: where imagination begins."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import recipes.dreamerv1
from tests.world.runs import build
from tests.world.test_dreamerv3 import sequences

BEHAVIOUR = ("loss_actor", "loss_critic")


def losses(minibatch: TensorDict, **settings) -> TensorDict:
    torch.manual_seed(0)
    loss = build(recipes.dreamerv1, **settings).update.loss_module
    torch.manual_seed(1)
    return loss(minibatch)


@pytest.mark.parametrize("starts", [2, 6])
def test_nothing_is_learnt_in_imagination_that_begins_where_an_episode_terminated(starts):
    minibatch = sequences(time=6)
    minibatch["terminated"][:, -starts:] = True
    found = losses(minibatch, imagination_starts=starts)
    assert [float(found[name]) for name in BEHAVIOUR] == [0.0, 0.0]


@pytest.mark.parametrize("terminated", [True, False])
def test_a_start_that_terminated_is_left_out_alone(terminated):
    minibatch = sequences(rows=3, time=6)
    minibatch["terminated"][1] = terminated
    found = losses(minibatch)
    minibatch["observation"][1] += 1.0
    moved = losses(minibatch)
    for name in BEHAVIOUR:
        assert found[name] != 0
        assert torch.equal(found[name], moved[name]) == terminated


def test_a_discount_of_zero_ends_no_imagination_at_its_start():
    found = losses(sequences(), gamma=0.0)
    assert all(found[name] != 0 for name in BEHAVIOUR)
