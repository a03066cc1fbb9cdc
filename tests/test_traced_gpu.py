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
def test_traced_policy_draws_same_random_values_as_eager(executor):
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
def test_update_matches_plain_pytorch(name):
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


def test_cuda_graph_uses_changed_learning_rate():
    loss = make_loss("A2CLoss").cuda()
    optimizer = Adam(loss.parameters(), lr=0.01, fused=True)
    update = Update(loss, optimizer)
    for step in range(6):
        update(minibatch_for("A2CLoss", seed=step).cuda())
    optimizer.param_groups[0]["lr"] = 0.0
    before = [parameter.clone() for parameter in loss.parameters()]
    update(minibatch_for("A2CLoss").cuda())
    assert all(map(torch.equal, before, loss.parameters()))


def called(call, inputs, times=4):
    """What the last of some calls returns."""
    with torch.no_grad():
        for _ in range(times):
            call.refresh()
            outputs = call(inputs)
    return outputs


def test_traced_uses_interpreter_when_call_synchronizes():
    on_host = torch.ones(3)
    call = Traced(lambda given: {"y": given["x"] + on_host.to("cuda")}, name="")
    outputs = called(call, {"x": torch.ones(3, device="cuda")})
    assert outputs["y"].tolist() == [2.0] * 3
    assert (call.replays, call.executor) == (True, "interpreter")
    assert torch.rand(3, device="cuda").shape == (3,)


def test_cuda_graph_draws_normal_values_with_tensor_std():
    mean, deviation = torch.arange(3.0, device="cuda"), torch.rand(5, 3, device="cuda")
    call = Traced(lambda given: {"y": given["x"] + torch.normal(mean, deviation)}, name="")
    inputs = {"x": torch.zeros(5, 3, device="cuda")}
    called(call, inputs)
    torch.manual_seed(0)
    found = call(inputs)["y"]
    torch.manual_seed(0)
    assert torch.equal(found, torch.normal(mean.expand(5, 3), deviation))
    assert (call.replays, call.executor) == (True, "cudagraph")


def test_traced_result_follows_changed_host_tensor():
    setting = torch.tensor(2.0)
    call = Traced(lambda given: {"y": given["x"] * (setting * 3)}, name="")
    inputs = {"x": torch.ones(3, device="cuda")}
    assert called(call, inputs)["y"].tolist() == [6.0] * 3
    assert (call.replays, call.executor) == (True, "cudagraph")
    setting.fill_(5.0)
    assert called(call, inputs)["y"].tolist() == [15.0] * 3
