"""On a CUDA device: programs with random numbers are verified, and steps are CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch.optim import Adam

from kit.fast.traced import Traced
from kit.update import Update
from tests.losses import make_loss, minibatch_for, soft_update
from tests.plain_steps import plain_step

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("executor", ["cudagraph", "interpreter", "python"])
def test_a_stochastic_policy_draws_the_random_numbers_of_eager_calls(executor):
    network = torch.nn.Linear(3, 2, device="cuda")

    def policy(given):
        mean = network(given["x"])
        return {"action": mean + torch.randn_like(mean)}

    call = Traced(policy, network, name="the policy", executor=executor)
    with torch.no_grad():
        for seed in range(6):
            given = {"x": torch.randn(4, 3, device="cuda")}
            torch.manual_seed(seed)
            found = call(given)["action"]
            torch.manual_seed(seed)
            assert torch.equal(found, policy(given)["action"])
    assert (call.replays, call.executor) == (True, executor)


@pytest.mark.parametrize("name", ["ClipPPOLoss", "SACLoss", "TD3Loss"])
def test_gradient_steps_are_those_of_plain_pytorch(name):
    ours, theirs = make_loss(name).cuda(), make_loss(name).cuda()
    own, other = (Adam(loss.parameters(), lr=0.01, fused=True) for loss in (ours, theirs))
    targets = soft_update(theirs, tau=0.1)
    update = Update(ours, own, max_grad_norm=0.5, target_updater=soft_update(ours, tau=0.1))
    for step in range(8):
        minibatch = minibatch_for(name, seed=step).cuda()
        torch.manual_seed(step)
        update(minibatch.clone())
        torch.manual_seed(step)
        plain_step(theirs, other, minibatch, max_grad_norm=0.5)
        if targets is not None:
            targets.step()
    for one, two in zip(ours.state_dict().values(), theirs.state_dict().values()):
        torch.testing.assert_close(one, two)
    assert update.plain_reason == ""


def test_a_learning_rate_that_is_set_takes_effect_in_a_cuda_graph():
    loss = make_loss("A2CLoss").cuda()
    optimizer = Adam(loss.parameters(), lr=0.01, fused=True)
    update = Update(loss, optimizer)
    for step in range(6):
        update(minibatch_for("A2CLoss", seed=step).cuda())
    optimizer.param_groups[0]["lr"] = 0.0
    before = [parameter.clone() for parameter in loss.parameters()]
    update(minibatch_for("A2CLoss").cuda())
    assert all(map(torch.equal, before, loss.parameters()))
