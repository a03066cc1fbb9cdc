"""A gradient step is that of plain PyTorch, bit for bit, however it is executed."""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torchrl.objectives import HardUpdate, LossModule, SoftUpdate
from torchrl.trainers.algorithms import DreamerV3Optimizer

from kit.fast.traced import Traced
from kit.logging.metrics import MetricMeans
from kit.losses import losses_due
from kit.steps import SettingError
from kit.trainer import Trainer
from kit.update import Update, make_target_updater
from tests.errors import raises_setting
from tests.losses import (
    LOSSES,
    make_loss,
    minibatch_for,
    soft_update,
)
from tests.plain_steps import (
    OPTIMIZERS,
    READ_ON_THE_HOST,
    assert_same,
    norm_of,
    plain_step,
    programs,
    state_of,
)
from tests.tiny import off_policy_plan, ppo_trainer, sac_parts, sac_trainer, weights

# ---------------------------------------------------------------------- every loss
GUARDS = ("ClipPPOLoss", "SACLoss", "DQNLoss", "TD3Loss", "IQLLoss")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.guard] * (n in GUARDS)) for n in LOSSES]
)
def test_update_matches_plain_pytorch_for_every_loss(name):
    ours, theirs = make_loss(name), make_loss(name)
    optimizers = [Adam(loss.parameters(), lr=0.01, fused=True) for loss in (ours, theirs)]
    targets = [soft_update(loss) for loss in (ours, theirs)]
    update = Update(ours, optimizers[0], max_grad_norm=0.5, target_updater=targets[0])
    for step in range(6):
        mine, other = (minibatch_for(name, seed=step) for _ in range(2))
        torch.manual_seed(step)
        metrics = update(mine)
        numbers = torch.get_rng_state()
        torch.manual_seed(step)
        losses = plain_step(theirs, optimizers[1], other, max_grad_norm=0.5)
        assert torch.equal(numbers, torch.get_rng_state())
        if targets[1] is not None:
            targets[1].step()
        assert_same(state_of(ours, optimizers[0]), state_of(theirs, optimizers[1]))
        for key, value_ in losses.items():
            expected = value_.float().mean() if value_.numel() > 1 else value_.reshape(())
            assert torch.equal(metrics[key], expected), key
        added = set(other.keys()) - set(minibatch_for(name).keys())
        for key in added:
            assert torch.equal(mine[key], other[key]), key
    if name in READ_ON_THE_HOST:
        assert READ_ON_THE_HOST[name] in update.plain_reason
    else:
        assert update.plain_reason == ""
        assert programs(update) == 1
    assert update.optimizer_step_count == 6


@pytest.mark.parametrize("trainer_of", [ppo_trainer, sac_trainer])
def test_trainer_reverifies_with_complete_minibatches(trainer_of, monkeypatch):
    found, sizes = [], []
    verify = Traced._verify

    def verify_again(self, program, inputs, values):
        if program.verified and self.name.endswith("Loss"):
            sizes.append(len(inputs.keys(True, True)))
        return verify(self, program, inputs, values)

    monkeypatch.setattr(Traced, "_verify", verify_again)
    for period in (10**6, 2):
        monkeypatch.setattr("kit.fast.policy.FIRST_CHECK", period)
        monkeypatch.setattr("kit.fast.policy.LAST_CHECK", period)
        trainer = trainer_of()
        trainer.run()
        assert trainer.update.plain_reason == ""
        found.append(weights(trainer))
    assert len(sizes) >= 3
    assert min(sizes) > len(trainer.update.traced_step.traced[(0,), "loss"].keys_read)
    assert_same(*found)


def test_update_runs_eagerly_after_undetected_change(monkeypatch):
    monkeypatch.setattr("kit.fast.policy.FIRST_CHECK", 5)
    scale = np.ones(1)

    class Scaled(type(make_loss("TD3Loss"))):
        def forward(self, minibatch):
            losses = super().forward(minibatch)
            losses["scale"] = torch.ones(()) * float(scale[0])
            return losses

    loss = make_loss("TD3Loss")
    loss.__class__ = Scaled
    critics = [p for name, p in loss.named_parameters() if "qvalue" in name]
    actors = [p for name, p in loss.named_parameters() if "actor" in name]
    optimizers = {"loss_actor": Adam(actors, fused=True), "loss_qvalue": Adam(critics, fused=True)}
    update = Update(loss, optimizers, every={"loss_actor": 2})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(30):
            scale[0] = 1 + (step >= 8)
            found = float(update(minibatch_for("TD3Loss", seed=step))["scale"])
            assert (found == scale[0]) == (step < 8 or step >= 12), step
    assert sum("Scaled runs eagerly" in str(one.message) for one in warned) == 1
    assert "whose change was not detected" in update.plain_reason


# ---------------------------------------------------------------------- every optimiser
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [{}, {"max_grad_norm": 0.1}, {"clip_value": 0.01}])
def test_update_matches_plain_pytorch_for_every_optimizer(optimizer, clip):
    name = "SACLoss"
    ours, theirs = make_loss(name), make_loss(name)
    own, other = (OPTIMIZERS[optimizer](list(loss.parameters())) for loss in (ours, theirs))
    update = Update(ours, own, **clip)
    for step in range(8):
        minibatch = minibatch_for(name, seed=step)
        torch.manual_seed(step)
        update(minibatch.clone())
        torch.manual_seed(step)
        plain_step(theirs, other, minibatch, **clip)
        assert_same(state_of(ours, own), state_of(theirs, other))


def test_metrics_are_readable_and_minibatch_outputs_writable():
    """Metrics are not copied; errors, which become priorities, are the minibatch's own."""
    loss = make_loss("SACLoss")
    update, means = Update(loss, Adam(loss.parameters(), fused=True)), MetricMeans()
    for step in range(4):
        minibatch = minibatch_for("SACLoss", seed=step)
        before = set(minibatch.keys())
        metrics = update(minibatch)
        means.add(metrics)
        for key in set(minibatch.keys()) - before:
            minibatch[key].mul_(2.0)
    assert metrics["grad_norm"].is_inference()
    assert "td_error" in set(minibatch.keys()) - before
    assert means.take()["grad_norm"] > 0


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("count", [1, 127, 128, 300])
def test_metric_means_use_values_at_time_of_adding(kept, count):
    """Values of inference mode, which cannot change, are added later."""
    numbers = torch.rand(count, generator=torch.Generator().manual_seed(0))
    one, other = MetricMeans(), MetricMeans()
    for number in numbers:
        with torch.inference_mode(kept):
            metrics = {"loss": number.clone()}
        one.add(metrics)
        other.load_state_dict(other.state_dict())  # adds what it has kept
        other.add(metrics)
        if not kept:
            metrics["loss"].zero_()
        metrics["loss"] = torch.zeros(())
    before = one.peek()["loss"]
    found = one.take()["loss"]
    total = torch.zeros(())
    for number in numbers:
        total += number
    assert found == other.take()["loss"] == total.item() / count
    assert before.item() == pytest.approx(found)
    assert one.take() == {}


def test_metrics_of_different_steps_have_separate_means():
    """A policy that is updated more rarely has fewer losses, and one metric is no float32."""
    numbers = torch.rand(300, 2, generator=torch.Generator().manual_seed(0))
    means = MetricMeans()
    for step, (critic, actor) in enumerate(numbers):
        with torch.inference_mode():
            metrics = {"loss_value": critic.clone()}
            if step % 3 == 0:
                metrics["loss_actor"] = actor.clone()
            if step >= 200:
                metrics["count"] = torch.tensor(step)
        means.add(metrics)
    assert means.counts() == {"loss_value": 300, "loss_actor": 100, "count": 100}
    found = means.take()
    assert found["count"] == sum(range(200, 300)) / 100
    assert found["loss_actor"] == pytest.approx(float(numbers[::3, 1].mean()), rel=1e-5)
    assert found["loss_value"] == pytest.approx(float(numbers[:, 0].mean()), rel=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_metric_means_preserve_integers_and_float64(shape):
    means, many = MetricMeans(), 2**24 + 1
    for _ in range(3):
        exact = torch.full(shape, many, dtype=torch.float64)
        means.add({"whole": torch.full(shape, many), "exact": exact, "loss": torch.ones(())})
    other = MetricMeans()
    other.load_state_dict(means.state_dict())
    assert means.take() == other.take() == {"whole": many, "exact": many, "loss": 1.0}


def test_grad_norm_is_measured_before_clipping():
    loss = make_loss("ClipPPOLoss, discrete")
    update = Update(loss, SGD(loss.parameters(), lr=0.0), max_grad_norm=1e-3)
    for step in range(5):
        minibatch = minibatch_for("ClipPPOLoss, discrete", seed=step)
        sum(v for k, v in loss(minibatch.clone()).items() if k.startswith("loss")).backward()
        gradients = [p.grad for p in loss.parameters() if p.grad is not None]
        expected = norm_of(gradients)
        loss.zero_grad()
        assert torch.equal(update(minibatch)["grad_norm"], expected)


def sac_optimizers(loss: LossModule, make: Any = Adam, **settings: Any) -> dict[str, Optimizer]:
    parts = {
        "loss_actor": loss.actor_network_params, "loss_qvalue": loss.qvalue_network_params,
    }  # fmt: skip
    made = {n: make(list(p.parameters()), lr=0.01, **settings) for n, p in parts.items()}
    return made | {"loss_alpha": make([loss.log_alpha], lr=0.01, **settings)}


def test_load_state_dict_rejects_other_optimizers():
    loss = make_loss("SACLoss")
    several = Update(loss, sac_optimizers(loss))
    whole = Update(loss, Adam(loss.parameters()))
    for update, other in ((several, whole), (whole, several)):
        with raises_setting("state_dict"):
            update.load_state_dict(other.state_dict())


def test_empty_optimizer_name_covers_remaining_losses():
    ours, theirs = make_loss("SACLoss"), make_loss("SACLoss")
    own, other = sac_optimizers(ours), sac_optimizers(theirs)
    others = [*parameters(own["loss_qvalue"]), *parameters(own["loss_alpha"])]
    shared = Adam(others, lr=0.01)
    update = Update(ours, {"": shared, "loss_actor": own["loss_actor"]})
    assert {*update.groups[0].losses} == {"loss_qvalue", "loss_alpha"}
    assert [*update.optimizers] == ["optimizer", "actor"]
    for step in range(3):
        minibatch = minibatch_for("SACLoss", seed=step)
        torch.manual_seed(step)
        metrics = update(minibatch.clone())
        torch.manual_seed(step)
        plain_step(theirs, other, minibatch)
        assert_same(state_of(ours), state_of(theirs))
    assert {"grad_norm", "grad_norm_actor"} <= metrics.keys()


def test_update_rejects_empty_name_without_remaining_losses():
    loss = make_loss("SACLoss")
    named = sac_optimizers(loss)
    with raises_setting("optimizer"):
        Update(loss, {"": named["loss_actor"], **named})


def test_optimizer_makes_no_step_when_all_weights_are_frozen():
    """TorchRL's DreamerV3Optimizer raises an error where there is no gradient."""
    loss = make_loss("SACLoss")
    optimizers = sac_optimizers(loss, DreamerV3Optimizer)
    update = Update(loss, optimizers, compile=False)
    update(minibatch_for("SACLoss"))
    frozen = parameters(optimizers["loss_actor"])
    for parameter in frozen:
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in frozen]
    update(minibatch_for("SACLoss"))
    assert all(map(torch.equal, before, frozen))


def parameters(optimizer: Optimizer) -> list[Tensor]:
    return optimizer.param_groups[0]["params"]


# ---------------------------------------------------------------------- gradients
class Shared(nn.Module):
    """Two parameters whose gradients are one and the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
        self.c = nn.Parameter(torch.ones(3))

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        seen = minibatch["x"]
        return TensorDict({"loss": ((self.a + self.b + self.c.view(3)) * seen).pow(2).sum()})


@pytest.mark.parametrize("compile", ["auto", False])
@pytest.mark.parametrize("clip", [{"max_grad_norm": 0.1}, {"clip_value": 0.2}])
def test_shared_gradient_tensor_is_clipped_once(clip, compile):
    ours, theirs = Shared(), Shared()
    own, other = (SGD(loss.parameters(), lr=0.1) for loss in (ours, theirs))
    update = Update(ours, own, compile=compile, **clip)
    for step in range(5):
        minibatch = TensorDict({"x": torch.full((3,), 1.0 + step)})
        update(minibatch.clone())
        plain_step(theirs, other, minibatch, **clip)
        assert_same(state_of(ours), state_of(theirs))


class Transposed(nn.Module):
    """A parameter that is not contiguous, and one that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        return TensorDict({"loss": (minibatch["x"] @ self.weight).tanh().sum()})


@pytest.mark.parametrize("optimizer", ["Adam", "Adam, fused", "SGD, momentum"])
def test_update_accepts_transposed_and_unused_parameters(optimizer):
    ours, theirs = Transposed(), Transposed()
    own, other = (OPTIMIZERS[optimizer](list(loss.parameters())) for loss in (ours, theirs))
    update = Update(ours, own, max_grad_norm=0.5)
    for step in range(6):
        minibatch = TensorDict({"x": torch.full((4, 3), 0.1 + step)}, [4])
        update(minibatch.clone())
        plain_step(theirs, other, minibatch, max_grad_norm=0.5)
        assert_same(state_of(ours, own), state_of(theirs, other))
    assert torch.equal(ours.unused, torch.ones(2))


def test_update_leaves_no_gradients():
    loss = make_loss("SACLoss")
    update = Update(loss, Adam(loss.parameters(), fused=True))
    for step in range(4):
        update(minibatch_for("SACLoss", seed=step))
        assert all(parameter.grad is None for parameter in loss.parameters())


# ---------------------------------------------------------------------- accumulation
@pytest.mark.parametrize("sizes", [(8, 8), (5, 2, 9), (16,)])
@pytest.mark.parametrize("compile", ["auto", False])
def test_accumulated_minibatches_match_single_minibatch(sizes, compile):
    ours, theirs = make_loss("A2CLoss"), make_loss("A2CLoss")
    own, other = (SGD(loss.parameters(), lr=0.1) for loss in (ours, theirs))
    update = Update(ours, own, max_grad_norm=0.5, compile=compile)
    for step in range(5):
        whole = minibatch_for("A2CLoss", 16, seed=step)
        metrics = update(*[part.clone() for part in whole.split(list(sizes))])
        losses = plain_step(theirs, other, whole, max_grad_norm=0.5)
        torch.testing.assert_close(metrics["loss_critic"], losses["loss_critic"])
        for one, two in zip(ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    assert update.optimizer_step_count == 5


@pytest.mark.parametrize("compile", [False, "auto"])
def test_gradient_transform_runs_once_per_accumulated_step(compile):
    rows, steadied = minibatch_for("A2CLoss", rows=8), [Steadied(), Steadied()]
    losses = [make_loss("A2CLoss"), make_loss("A2CLoss")]
    for minibatches, loss, gradients in zip(([rows], rows.split([6, 2])), losses, steadied):
        optimizer = SGD(loss.parameters(), lr=0.1, fused=True)
        update = Update(loss, optimizer, gradients=gradients, compile=compile)
        for _ in range(3):
            update(*[one.clone() for one in minibatches])
    torch.testing.assert_close(steadied[0].length, steadied[1].length)
    for one, other in zip(*(loss.parameters() for loss in losses)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------- a period for each loss
def td3(**settings: Any) -> tuple[LossModule, dict[str, Optimizer]]:
    loss = make_loss("TD3Loss")
    parts = {"loss_qvalue": loss.qvalue_network_params, "loss_actor": loss.actor_network_params}
    return loss, {n: Adam(list(p.parameters()), lr=0.01, **settings) for n, p in parts.items()}


@pytest.mark.parametrize("compile", ["auto", False])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("every", "last"), [(2, 12), (3, 14)])
def test_policy_delay_matches_td3_paper(every, last, fused, compile):
    (ours, own), (theirs, other) = td3(fused=fused), td3(fused=fused)
    targets = soft_update(theirs, tau=0.1)
    update = Update(
        ours, own, every={"loss_actor": every}, max_grad_norm=0.5, compile=compile,
        target_updater=soft_update(ours, tau=0.1), target_update_every=every,
    )  # fmt: skip
    for step in range(1, last + 1):
        minibatch = minibatch_for("TD3Loss", seed=step)
        torch.manual_seed(step)
        metrics = update(minibatch.clone())
        torch.manual_seed(step)
        due = other if step % every == 0 else {"loss_qvalue": other["loss_qvalue"]}
        plain_step(theirs, due, minibatch, max_grad_norm=0.5)
        if step % every == 0:
            targets.step()
        assert_same(state_of(ours, *own.values()), state_of(theirs, *other.values()))
        for name in ("grad_norm_actor", "loss_actor", "state_action_value_actor"):
            assert (name in metrics.keys()) == (step % every == 0)
    assert update.optimizer_steps == {"qvalue": last, "actor": last // every}
    assert (update.plain_reason == "") == (compile == "auto")
    if compile == "auto" and fused:
        assert programs(update) == 2  # with and without the actor


DELAYED = [
    "TD3Loss", "TD3Loss, one critic", "TD3BCLoss", "CrossQLoss", "SACLoss", "DroQLoss",
    "CrossQLoss, batch renormalisation",
]  # fmt: skip


@pytest.mark.parametrize("name", DELAYED)
def test_critic_losses_match_those_of_complete_loss(name):
    loss, other = make_loss(name), make_loss(name)
    minibatch, whole = (minibatch_for(name) for _ in range(2))
    before = set(minibatch.keys())
    torch.manual_seed(0)
    critics = losses_due(loss, minibatch, {"loss_qvalue"})
    torch.manual_seed(0)
    expected = other(whole)
    assert "loss_qvalue" in critics.keys()
    assert set(critics.keys()) < set(expected.keys())
    for key in critics.keys():
        assert torch.equal(critics[key], expected[key]), key
    written = set(minibatch.keys()) - before
    assert "td_error" in written
    for key in written:
        assert torch.equal(minibatch[key], whole[key]), key


def test_td3_actor_gradient_uses_only_first_critic():
    ours, theirs = make_loss("TD3Loss, one critic"), make_loss("TD3Loss")
    theirs.load_state_dict(ours.state_dict())
    found = []
    for loss in (ours, theirs):
        torch.manual_seed(0)
        losses = loss(minibatch_for("TD3Loss"))
        losses["loss_actor"].backward()
        actor = loss.actor_network_params.flatten_keys(".")
        found.append(
            [losses["loss_actor"], losses["loss_qvalue"], *[p.grad for p in actor.values()]]
        )
        critics = loss.qvalue_network_params.flatten_keys(".")
        assert all(parameter.grad is None for parameter in critics.values())
    torch.testing.assert_close(*found)


def test_update_rejects_post_accumulate_grad_hook():
    loss = make_loss("TD3Loss")
    update = Update(loss, Adam(loss.parameters(), lr=0.01, fused=True))
    for _ in range(3):
        update(minibatch_for("TD3Loss"))
    hook = next(loss.qvalue_network_params.parameters()).register_post_accumulate_grad_hook(print)
    with raises_setting("hook"):
        update(minibatch_for("TD3Loss"))
    hook.remove()
    update(minibatch_for("TD3Loss"))


@pytest.mark.parametrize("changed", ["hooked", "replaced", "another class", "actor due"])
def test_losses_due_returns_all_for_changed_loss_or_due_actor(changed):
    loss, due = make_loss("TD3Loss"), {"loss_qvalue"}
    if changed == "hooked":
        loss.register_forward_hook(lambda *_: None)
    elif changed == "replaced":
        loss.forward = loss.forward
    elif changed == "another class":
        loss.__class__ = type("Own", (type(loss),), {})
    else:
        due.add("loss_actor")
    returned = losses_due(loss, minibatch_for("TD3Loss"), due)
    assert {"loss_actor", "loss_qvalue"} <= set(returned.keys())


def test_update_matches_pytorch_for_every_set_of_due_losses():
    periods = {"loss_actor": 2, "loss_alpha": 3}
    ours, theirs = make_loss("SACLoss"), make_loss("SACLoss")
    own, other = sac_optimizers(ours, fused=True), sac_optimizers(theirs, fused=True)
    update = Update(ours, own, every=periods)
    for step in range(1, 25):
        minibatch = minibatch_for("SACLoss", seed=step)
        torch.manual_seed(step)
        update(minibatch.clone())
        torch.manual_seed(step)
        plain_step(
            theirs, {n: o for n, o in other.items() if step % periods.get(n, 1) == 0}, minibatch
        )
        assert_same(state_of(ours, *own.values()), state_of(theirs, *other.values()))
    assert update.optimizer_steps == {"actor": 12, "qvalue": 24, "alpha": 8}
    assert programs(update) == 4


def test_update_detects_changes_between_undisturbed_phases():
    ours, theirs = make_loss("SACLoss"), make_loss("SACLoss")
    own, other = (Adam(loss.parameters(), lr=0.01, fused=True) for loss in (ours, theirs))
    update = Update(ours, own)
    for step in range(12):
        for loss, optimizer in ((ours, own), (theirs, other)):
            optimizer.param_groups[0]["lr"] = 0.01 / (step // 4 + 1)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * (step > 7)
            loss.target_entropy_buffer.fill_(-float(step > 3))
        update.undisturbed = True
        assert update.keys_read or step < 4 or step in (8, 9)
        torch.manual_seed(step)
        update(minibatch_for("SACLoss", seed=step))
        update.undisturbed = False
        torch.manual_seed(step)
        plain_step(theirs, other, minibatch_for("SACLoss", seed=step))
        assert_same(state_of(ours, own), state_of(theirs, other))


def test_accumulated_and_manual_steps_respect_periods():
    loss, optimizers = td3()
    update = Update(loss, optimizers, every={"loss_actor": 2})
    whole = minibatch_for("TD3Loss", 8)
    for step in range(1, 5):
        if step % 2:
            update(*whole.split(4))
        else:
            update.minimize(update.losses(whole.clone()))
    assert update.optimizer_steps == {"qvalue": 4, "actor": 2}
    (state,) = {int(s["step"]) for s in optimizers["loss_actor"].state.values()}
    assert state == 2


def test_update_rejects_invalid_loss_periods():
    loss, optimizers = td3()
    with raises_setting("every"):
        Update(loss, optimizers, every={"loss_policy": 2})
    with raises_setting("every"):
        Update(loss, Adam(loss.parameters()), every={"loss_actor": 2})
    with raises_setting("every.loss_actor"):
        Update(loss, optimizers, every={"loss_actor": 0})
    shared = Adam(loss.parameters())
    with raises_setting("every"):
        Update(loss, {"loss_actor": shared, "loss_qvalue": shared}, every={"loss_actor": 2})


# ---------------------------------------------------------------------- targets
def test_jump_over_periods_makes_all_soft_updates():
    losses = make_loss("DDPGLoss"), make_loss("DDPGLoss")
    updates = [
        Update(
            loss, SGD(loss.parameters(), lr=0.1), target_updater=soft_update(loss, tau=0.1),
            target_update_every="1_000 policy steps",
        )
        for loss in losses
    ]  # fmt: skip
    for update, jumps in zip(updates, ([3_500, 6_000], range(100, 6_001, 100))):
        update(minibatch_for("DDPGLoss"))
        for policy_steps in jumps:
            update.advance(policy_steps)
    assert_same(state_of(losses[0]), state_of(losses[1]))


def test_state_dict_saves_steps_until_target_update():
    def make() -> tuple[LossModule, Update]:
        loss = make_loss("DDPGLoss")
        return loss, Update(
            loss, SGD(loss.parameters(), lr=0.1), target_updater=soft_update(loss, tau=0.1),
            target_update_every="10 policy steps",
        )  # fmt: skip

    whole, resumed = make(), make()
    for policy_steps in range(4, 60, 4):
        if policy_steps == 24:
            saved = through_a_file((resumed[0].state_dict(), resumed[1].state_dict()))
            resumed = make()
            resumed[0].load_state_dict(saved[0])
            resumed[1].load_state_dict(saved[1])
        for _, update in (whole, resumed):
            update(minibatch_for("DDPGLoss", seed=policy_steps))
            update.advance(policy_steps)
        assert_same(state_of(whole[0]), state_of(resumed[0]))


@pytest.mark.parametrize(("every", "updates"), [("6 policy steps", 6), ("6 gradient steps", 5)])
def test_target_period_counts_policy_or_gradient_steps(every, updates):
    made = []

    class Noted(HardUpdate):
        def step(self) -> None:
            made.append(trainer.policy_steps)

    plan = off_policy_plan()  # 40 policy steps, of which the last 31 have a gradient step each
    parts = sac_parts(plan)
    loss = parts["update"].loss_module
    target = Noted(loss, value_network_update_interval=0)
    parts["update"] = Update(
        loss, Adam(loss.parameters()), target_updater=target, target_update_every=every
    )
    trainer = Trainer(plan, **parts)
    trainer.run()
    assert len(made) == updates
    if "policy" in every:
        assert made == [6, 12, 18, 24, 30, 36]


@pytest.mark.parametrize("wrong", ["5 env steps", "often", "policy steps", "1.5 policy steps"])
def test_update_rejects_unreadable_target_period(wrong):
    loss = make_loss("DDPGLoss")
    with raises_setting("target_update_every"):
        Update(loss, Adam(loss.parameters()), target_update_every=wrong)


def test_target_update_runs_eagerly_when_it_reads_on_host():
    class Careful(SoftUpdate):
        def _step(self, source, target):
            if float(next(iter(source.values(True, True))).sum()) < 1e6:
                super()._step(source, target)

    ours, theirs = make_loss("DDPGLoss"), make_loss("DDPGLoss")
    update = Update(ours, SGD(ours.parameters(), lr=0.1), target_updater=Careful(ours, tau=0.1))
    other, targets = SGD(theirs.parameters(), lr=0.1), soft_update(theirs, tau=0.1)
    with pytest.warns(UserWarning, match="Careful runs eagerly: it reads a tensor on the host"):
        update(minibatch_for("DDPGLoss"))
    plain_step(theirs, other, minibatch_for("DDPGLoss"))
    targets.step()
    assert_same(state_of(ours), state_of(theirs))


@pytest.mark.parametrize("fused", [False, True])
def test_new_target_updater_replaces_previous_one(fused):
    ours, theirs = make_loss("DDPGLoss"), make_loss("DDPGLoss")
    own, other = (Adam(loss.parameters(), lr=0.1, fused=fused) for loss in (ours, theirs))
    update = Update(ours, own, target_updater=soft_update(ours, tau=0.1))
    for step in range(9):
        if step in (0, 3, 6):  # the last copies
            tau = 0.1 + step / 10
            targets = (
                make_target_updater(theirs, 1.0) if step == 6 else soft_update(theirs, tau=tau)
            )
            update.target_updater = (
                make_target_updater(ours, 1.0) if step == 6 else soft_update(ours, tau=tau)
            )
        minibatch = minibatch_for("DDPGLoss", seed=step)
        update(minibatch.clone())
        plain_step(theirs, other, minibatch)
        targets.step()
        assert_same(state_of(ours), state_of(theirs))


def test_loss_and_optimizers_of_update_are_read_only():
    loss = make_loss("DDPGLoss")
    update = Update(loss, Adam(loss.parameters()))
    (group,) = update.groups
    for part, name in ((update, "loss_module"), (update, "groups"), (group, "optimizer")):
        with pytest.raises(AttributeError):
            setattr(part, name, None)
    assert update.loss_module is loss
    assert isinstance(update.optimizers["optimizer"], Adam)


def test_hard_update_counts_and_saves_its_own_steps():
    def make() -> tuple[LossModule, Update]:
        loss = make_loss("DQNLoss")
        hard = HardUpdate(loss, value_network_update_interval=3)
        return loss, Update(loss, Adam(loss.parameters(), lr=0.01), target_updater=hard)

    theirs = make_loss("DQNLoss")
    other, targets = Adam(theirs.parameters(), lr=0.01), None
    targets = HardUpdate(theirs, value_network_update_interval=3)
    ours, update = make()
    for step in range(12):
        if step == 5:  # in the middle of the hard update's interval
            saved = through_a_file((ours.state_dict(), update.state_dict()))
            ours, update = make()
            ours.load_state_dict(saved[0])
            update.load_state_dict(saved[1])
        minibatch = minibatch_for("DQNLoss", seed=step)
        update(minibatch.clone())
        plain_step(theirs, other, minibatch)
        targets.step()
        assert_same(state_of(ours), state_of(theirs))


@pytest.mark.parametrize("interval", [10.5, -1])
def test_update_rejects_hard_update_that_never_copies(interval):
    loss = sac_parts(off_policy_plan())["update"].loss_module
    hard = HardUpdate(loss, value_network_update_interval=interval)
    with raises_setting("value_network_update_interval"):
        Update(loss, torch.optim.Adam(loss.parameters()), target_updater=hard)


def test_update_rejects_second_interval_for_hard_update():
    loss = make_loss("DQNLoss")
    optimizer = Adam(loss.parameters(), lr=0.01)
    for every in (5, "5 policy steps"):
        with raises_setting("target_update_every"):
            Update(loss, optimizer, target_updater=HardUpdate(loss), target_update_every=every)
    hard = HardUpdate(loss, value_network_update_interval=0)
    update = Update(loss, optimizer, target_updater=hard, target_update_every=2)
    changed = []
    for step in range(1, 7):
        before = loss.target_value_network_params.clone()
        update(minibatch_for("DQNLoss", seed=step))
        changed += [step] if (loss.target_value_network_params != before).any() else []
    assert changed == [2, 4, 6]


@pytest.mark.parametrize(("tau", "every", "share"), [
    (None, 1, 0.005), (None, 2, 1.0), (0.25, 2, 0.25), (1.0, 1, 1.0), (1, 3, 1.0),
])  # fmt: skip
def test_targets_move_by_tau_at_requested_interval(tau, every, share):
    loss = make_loss("DQNLoss")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        targets = make_target_updater(loss, tau, every)
    optimizer = Adam(loss.parameters(), lr=0.01)
    update = Update(loss, optimizer, target_updater=targets, target_update_every=every)
    for step in range(1, 7):
        before = loss.target_value_network_params.clone()
        update(minibatch_for("DQNLoss", seed=step))
        online = loss.value_network_params.data
        expected = before.lerp(online, share) if step % every == 0 else before
        assert (loss.target_value_network_params == expected).all()


# ---------------------------------------------------------------------- in and out
def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("where", [1, 3])
def test_restored_update_continues_bitwise(optimizer, where):
    def make() -> tuple[LossModule, Update]:
        loss = make_loss("SACLoss")
        return loss, Update(
            loss, OPTIMIZERS[optimizer](list(loss.parameters())), max_grad_norm=1.0,
            target_updater=soft_update(loss), target_update_every=2,
        )  # fmt: skip

    whole, resumed = make(), make()
    for step in range(6):
        if step == where:
            saved = through_a_file((resumed[0].state_dict(), resumed[1].state_dict()))
            resumed = make()
            resumed[0].load_state_dict(saved[0])
            resumed[1].load_state_dict(saved[1])
        for _, update in (whole, resumed):
            torch.manual_seed(step)
            update(minibatch_for("SACLoss", seed=step))
    own, other = (u.optimizers["optimizer"] for _, u in (whole, resumed))
    assert_same(state_of(whole[0], own), state_of(resumed[0], other))
    assert resumed[1].optimizer_step_count == 6


class Steadied(nn.Module):
    """Makes gradients no longer than they have been on average."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("length", torch.zeros(()))

    def forward(self, parameters, gradients):
        length = torch.cat([one.flatten() for one in gradients]).norm()
        self.length.mul_(0.9).add_(length, alpha=0.1)
        return [one * (self.length / length).clamp(max=1.0) for one in gradients]


@pytest.mark.parametrize("of", [lambda steadied: steadied, lambda steadied: steadied.forward])
def test_state_dict_saves_gradient_transform(of):
    loss, steadied = make_loss("A2CLoss"), Steadied()
    update = Update(loss, SGD(loss.parameters(), lr=0.01), gradients=of(steadied))
    for step in range(4):
        update(minibatch_for("A2CLoss", seed=step))
    saved, length = through_a_file(update.state_dict()), float(steadied.length)
    update(minibatch_for("A2CLoss", seed=4))
    update.load_state_dict(saved)
    assert float(steadied.length) == length != 0


# ---------------------------------------------------------------------- bad settings
def test_update_rejects_contradictory_or_invalid_settings():
    loss = make_loss("A2CLoss")
    optimizer = Adam(loss.parameters())
    with raises_setting("clip_value"):
        Update(loss, optimizer, max_grad_norm=1.0, clip_value=0.5)
    for wrong in (0.0, -1.0, math.nan):
        with raises_setting("max_grad_norm"):
            Update(loss, optimizer, max_grad_norm=wrong)
    with raises_setting("target_update_every"):
        Update(loss, optimizer, target_update_every=0)
    with raises_setting("compile"):
        Update(loss, optimizer, compile="fast")


def test_update_rejects_loss_without_optimizer_when_built():
    loss = make_loss("SACLoss")
    optimizers = sac_optimizers(loss)
    del optimizers["loss_alpha"]
    with raises_setting("optimizer"):
        Update(loss, optimizers)


class Parts(nn.Module):
    """A loss that does not say what it returns."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.unrelated, self.result = nn.Parameter(torch.ones(3)), result

    def forward(self, minibatch: TensorDictBase) -> Any:
        losses = {"loss_a": (self.a * minibatch["x"]).sum(), "loss_b": self.b.pow(2).sum()}
        return TensorDict(losses) if self.result is None else self.result(self.a)


def refused(loss: nn.Module, optimizer: Any, message: str, **settings: Any) -> None:
    """Refused before any optimiser has stepped, however the loss runs."""
    weights = [parameter.clone() for parameter in loss.parameters()]
    for compile in ("auto", False):
        update = Update(loss, optimizer, compile=compile, **settings)
        for _ in range(2):
            with pytest.raises(SettingError, match=message) as error:
                update(TensorDict({"x": torch.ones(3)}, [3]))
            assert "\n" not in str(error.value)
        assert update.optimizer_step_count == 0
    assert all(map(torch.equal, weights, loss.parameters()))


def test_first_step_rejects_loss_without_optimizer():
    loss = Parts()
    message = r"optimizer=\['loss_a'\].* No optimiser minimises loss_b"
    refused(loss, {"loss_a": SGD([loss.a], lr=1.0)}, message)


def test_first_step_rejects_optimizer_unrelated_to_losses():
    loss = Parts()
    refused(loss, Adam([loss.unrelated]), "optimizer='Adam'.* do not affect loss_a and loss_b")
    named = {"loss_a": SGD([loss.a], lr=1.0), "loss_b": SGD([loss.a], lr=1.0)}
    refused(loss, named, "optimizer='b'.* do not affect loss_b")
    delayed = {"loss_a": SGD([loss.a], lr=1.0), "loss_b": SGD([loss.unrelated], lr=1.0)}
    refused(loss, delayed, "do not affect loss_b", every={"loss_b": 10})


class CutOff(Parts):
    """Of two losses one is detached, or not called a loss."""

    name = "loss_b"

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        losses = super().forward(minibatch)
        second = losses.pop("loss_b")
        return losses.set(self.name, second.detach() if self.name == "loss_b" else second)


def test_first_step_rejects_untrained_shared_optimizer_weights():
    loss = CutOff()
    message = r"'CutOff'.* loss_b has no gradient, so b would never change"
    refused(loss, SGD([loss.a, loss.b], lr=1.0), message)
    loss.name = "error"
    message = r"'CutOff'.* Only error depends on b, but error is not minimised"
    refused(loss, SGD([loss.a, loss.b], lr=1.0), message)
    loss.b.requires_grad_(False)
    Update(loss, SGD([loss.a, loss.b], lr=1.0))(TensorDict({"x": torch.ones(3)}, [3]))


def test_first_step_rejects_trainable_weights_without_optimizer():
    loss = Parts()
    message = r"optimizer='SGD'.* No optimiser updates b, but the losses depend on it"
    refused(loss, SGD([loss.a], lr=1.0), message)
    loss.b.requires_grad_(False)
    before = loss.b.clone()
    Update(loss, SGD([loss.a], lr=1.0))(TensorDict({"x": torch.ones(3)}, [3]))
    assert torch.equal(loss.b, before)


@pytest.mark.parametrize("compile", ["auto", False])
def test_later_step_rejects_unfrozen_weights_without_optimizer(compile):
    loss = Parts()
    loss.b.requires_grad_(False)
    update = Update(loss, SGD([loss.a], lr=1.0), compile=compile)
    for _ in range(4):
        update(TensorDict({"x": torch.ones(3)}, [3]))
    loss.b.requires_grad_(True)
    with raises_setting("optimizer"):
        update(TensorDict({"x": torch.ones(3)}, [3]))


@pytest.mark.parametrize("named", [True, False])
def test_update_names_loss_missing_from_later_step(named):
    loss = Parts()
    learning = {"loss_a": SGD([loss.a], lr=1.0), "loss_b": SGD([loss.b], lr=1.0)}
    update = Update(loss, learning if named else SGD([loss.a, loss.b], lr=1.0))
    minibatch = TensorDict({"x": torch.ones(3)}, [3])
    update(minibatch)
    loss.result = lambda a: TensorDict({"value": a.sum()})
    with pytest.raises(KeyError, match='key "loss'):
        update(minibatch)
    assert update.optimizer_step_count == 1


@pytest.mark.parametrize("compile", ["auto", False])
def test_parameter_frozen_during_run_stays_unchanged(compile):
    ours, theirs = make_loss("SACLoss"), make_loss("SACLoss")
    own, other = (Adam(loss.parameters(), lr=0.01) for loss in (ours, theirs))
    update = Update(ours, own, compile=compile)
    for step in range(8):
        if step == 4:
            frozen, _ = (next(loss.parameters()).requires_grad_(False) for loss in (ours, theirs))
            before = frozen.clone()
        mine, expected = (minibatch_for("SACLoss", seed=step) for _ in range(2))
        torch.manual_seed(step)
        update(mine)
        torch.manual_seed(step)
        plain_step(theirs, other, expected)
    assert torch.equal(frozen, before)
    assert_same(state_of(ours, own), state_of(theirs, other))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("later", ["freed", "added to the optimiser"])
def test_parameter_trains_when_unfrozen_or_added_during_run(later, fused):
    ours, theirs = make_loss("A2CLoss"), make_loss("A2CLoss")
    (first, *_), (their_first, *_) = pairs = [[*loss.parameters()] for loss in (ours, theirs)]
    before = first.clone()
    for waiting in (first, their_first):
        waiting.requires_grad_(False)
    begin = 0 if later == "freed" else 1
    own, other = (Adam(parameters[begin:], lr=0.01, fused=fused) for parameters in pairs)
    update = Update(ours, own)
    for step in range(10):
        if step == 5:
            assert torch.equal(first, before)
            for optimizer, waiting in ((own, first), (other, their_first)):
                waiting.requires_grad_(True)
                if begin:
                    optimizer.add_param_group({"params": [waiting]})
        mine, expected = (minibatch_for("A2CLoss", seed=step) for _ in range(2))
        update(mine)
        plain_step(theirs, other, expected)
    assert not torch.equal(first, before)
    assert_same(state_of(ours, own), state_of(theirs, other))


@pytest.mark.parametrize("compile", ["auto", False])
@pytest.mark.parametrize("named", [True, False])
def test_optimizer_may_start_with_all_weights_frozen(named, compile):
    loss, minibatch = Parts(), TensorDict({"x": torch.ones(3)}, [3])
    waiting = [loss.a] if named else [loss.a, loss.b]
    for one in waiting:
        one.requires_grad_(False)
    before = [one.clone() for one in waiting]
    optimizer = Adam([loss.a, loss.b], fused=True)
    several = {"loss_a": Adam([loss.a], fused=True), "loss_b": Adam([loss.b], fused=True)}
    update = Update(loss, several if named else optimizer, compile=compile)
    for _ in range(4):
        update(minibatch)
    assert all(map(torch.equal, waiting, before))
    for one in waiting:
        one.requires_grad_(True)
    for _ in range(4):
        update(minibatch)
    assert not any(map(torch.equal, waiting, before))


@pytest.mark.parametrize(("minibatch_size", "vary"), [(4, False), (None, True)])
def test_shapes_vary_when_minibatch_is_complete_growing_buffer(minibatch_size, vary):
    plan = off_policy_plan(minibatch_size=minibatch_size)
    trainer = Trainer(plan, **sac_parts(plan))
    assert trainer.update.shapes_vary == vary
    trainer.run()
