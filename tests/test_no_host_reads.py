"""Between two log points the loop reads no tensor on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.objectives import ClipPPOLoss, SACLoss, SoftUpdate

from kit.advantages import GAE
from kit.buffers import make_replay_buffer
from kit.collectors import TensorCollector, rollout, tensor
from kit.envs import make_env
from kit.losses import KLPENPPOLoss
from kit.modules import make_action_value, make_actor, make_backbone, make_value
from kit.steps import StepPlan
from kit.trainer import Trainer
from kit.trainer.stages import HookError
from kit.update import Update
from tests.host_reads import Reads, host_reads
from tests.tiny import off_policy_plan, on_policy_plan, ppo_parts, sac_parts

WARM = 3
"""Iterations after which everything is traced, and the traces are compared with eager calls."""


# ---------------------------------------------------------------------- trainers
def tensor_collector(plan: StepPlan, env: Any, actor: Any, **changes: Any) -> TensorCollector:
    return TensorCollector(
        env, actor, frames_per_batch=plan.frames_per_batch, total_frames=plan.total_policy_steps,
        init_random_frames=plan.random_steps_until(plan.total_policy_steps), **changes,
    )  # fmt: skip


def ppo(
    loss_class: type = ClipPPOLoss,
    env: str = "CartPole-v1",
    compile: Any = "auto",
    log_every: int = 160,
    recurrent: Any = None,
    **changes: Any,
) -> Trainer:
    """PPO whose environments are written in torch: nothing has to come to the host."""
    plan = on_policy_plan(total_policy_steps=160, **changes)
    env = make_env(env, plan.num_envs, vectorization="tensor", seed=0)
    body = None if recurrent is None else make_backbone(env, (8,), recurrent=recurrent)
    actor, critic = make_actor(env, (8,), body=body), make_value(env, (8,), body=body)
    loss = loss_class(actor, critic, normalize_advantage=True)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3, fused=True)
    return Trainer(
        plan, collector=tensor_collector(plan, env, actor),
        advantage=GAE(gamma=0.99, lmbda=0.95, value_network=critic),
        update=Update(loss, optimizer, max_grad_norm=0.5, compile=compile), log_every=log_every,
    )  # fmt: skip


def sac(compile: Any = "auto", **changes: Any) -> Trainer:
    plan = off_policy_plan(num_envs=2, steps_per_env=2, **changes)
    env = make_env("Pendulum-v1", 2, vectorization="tensor", seed=0)
    actor = make_actor(env, (8,), continuous="tanh_normal", orthogonal=False)
    critic = make_action_value(env, (8,))
    loss = SACLoss(actor, critic, loss_function="l2")
    loss.make_value_estimator(gamma=0.99)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3, fused=True)
    actor = actor.select_out_keys("action")
    return Trainer(
        plan, collector=tensor_collector(plan, env, actor),
        buffer=make_replay_buffer(100, 4), log_every=40,
        update=Update(
            loss, optimizer, compile=compile, target_updater=SoftUpdate(loss, tau=0.01)
        ),
    )  # fmt: skip


def guarded(trainer: Trainer, guard: Callable[[], Any] = host_reads, **when: int) -> Trainer:
    """Guard the iterations after ``first`` and until ``last``, and run."""
    first, last = when.get("first", WARM), when.get("last", trainer.plan.iterations - 1)
    with contextlib.ExitStack() as stack:

        def between_iterations() -> None:
            if trainer.ledger.iterations == first:
                stack.enter_context(guard())
            elif trainer.ledger.iterations == last:
                stack.close()

        trainer.register_op("post_steps", between_iterations)
        trainer.run()
    return trainer


@pytest.fixture
def as_on_a_device(monkeypatch):
    """On the CPU, where it costs nothing, the collector looks for NaN in every batch."""
    monkeypatch.setattr(TensorCollector, "_check_finite", lambda self, memory: None)
    monkeypatch.setattr(TensorCollector, "_check_choices", lambda self: None)
    monkeypatch.setattr("kit.buffers.direct.on_host", lambda tensor: False)
    for collector in (tensor, rollout):
        monkeypatch.setattr(collector, "check_policy", lambda *_: None)


# ---------------------------------------------------------------------- the whole loop
PPO: dict[str, dict[str, Any]] = {
    "one choice": {},
    "continuous actions": {"env": "Pendulum-v1"},
    "accumulated gradients": {"minibatches_per_gradient_step": 2},
    "sequences": {"sequence_length": 4, "minibatch_size": 2},
    "uneven minibatches": {"minibatch_size": 6},
    "an LSTM": {"recurrent": "lstm", "sequence_length": 4, "minibatch_size": 2},
    "a GRU": {"recurrent": "gru", "sequence_length": 4, "minibatch_size": 2},
}


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("name", list(PPO))
def test_ppo_trains_without_host_reads(name):
    trainer = guarded(ppo(**PPO[name]))
    assert trainer.ledger.iterations == 10
    assert trainer.update.plain_reason == ""


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("ratio", [1, "1/4", 2.5])
def test_sac_trains_without_host_reads(ratio):
    trainer = guarded(sac(replay_ratio=ratio), first=6)  # learning starts in the third
    assert trainer.ledger.iterations == 10
    assert trainer.update.plain_reason == ""


@pytest.mark.usefixtures("as_on_a_device")
def test_full_buffer_overwrites_rows_without_host_reads():
    trainer = sac()
    trainer.buffer = make_replay_buffer(10, 4)  # batches of 4: one of them goes over the end
    guarded(trainer, first=6)
    assert trainer.ledger.gradient_steps == trainer.plan.gradient_steps_after(10)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("make", [ppo, sac])
@pytest.mark.parametrize("open_to_hooks", [False, True])
def test_eager_steps_read_host_only_in_torchrl_losses(make, open_to_hooks):
    trainer = make(compile="auto" if open_to_hooks else False)
    if open_to_hooks:
        trainer.register_op("process_loss", lambda minibatch, losses: None)
    watched: list[Reads] = []

    @contextlib.contextmanager
    def watching() -> Iterator[None]:
        with host_reads(forbid=False) as reads:
            yield
        watched.append(reads)

    guarded(trainer, watching, first=6)
    (reads,) = watched
    assert reads.places
    assert {place for place in reads.places if "torchrl" not in Path(place).parts} == set()


@pytest.mark.usefixtures("as_on_a_device")
def test_hook_metrics_stay_on_device_until_row_is_written():
    trainer = ppo()
    metrics: list[Any] = []
    trainer.register_op("post_optim_complete_log", lambda steps, means: metrics.append(means))
    trainer.register_op("post_optim_log", lambda m: {"mean": m["advantage"].mean()})
    guarded(trainer, first=6)
    assert len(metrics) == 10
    assert "mean" in trainer.journal.latest


# ---------------------------------------------------------------------- environments on the host
def run_guarded_from(
    trainer: Trainer, begin: str, end: str, *, first: int = WARM, forbid: bool = True
) -> list[list[str]]:
    """Guard from one stage of the loop to another, in each iteration, and return what was read."""
    seen: list[list[str]] = []
    with contextlib.ExitStack() as stack:

        def enter(*batch: Any) -> None:
            if trainer.ledger.iterations >= first:
                seen.append(stack.enter_context(host_reads(forbid)).seen)

        trainer.register_op(begin, enter)
        trainer.register_op(end, lambda *batch: stack.close())
        trainer.run()
    return seen


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize(
    ("plan", "parts_of", "first"),
    [
        (on_policy_plan(total_policy_steps=160), ppo_parts, 3),
        (off_policy_plan(), sac_parts, 15),
    ],
)
def test_host_env_training_reads_nothing_after_collection(plan, parts_of, first):
    parts = parts_of(plan)
    own = parts["update"]
    optimizer = torch.optim.Adam(own.loss_module.parameters(), fused=True)
    parts["update"] = Update(own.loss_module, optimizer, target_updater=own.target_updater)
    trainer = Trainer(plan, **parts, log_every=plan.total_policy_steps)
    phases = run_guarded_from(trainer, "batch_process", "post_steps", first=first)
    assert len(phases) == plan.iterations - first
    assert trainer.ledger.gradient_steps == plan.gradient_steps_after(plan.iterations)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("exact", [True, False])
def test_collection_reads_only_actions_on_host(exact):
    plan = on_policy_plan(total_policy_steps=160)
    fast = "exact" if exact else "auto"
    trainer = Trainer(plan, **ppo_parts(plan, fast_policy=fast), log_every=160)
    *collections, after_the_last = run_guarded_from(
        trainer, "post_steps", "batch_process", forbid=False
    )
    # NumPy acts: random numbers came with the first batch, for 128 time steps.
    actions = ["Tensor.numpy"] * plan.steps_per_env
    assert collections == [actions if exact else []] * 7
    assert "Tensor.tolist" in after_the_last  # the row


# ---------------------------------------------------------------------- the guard works
SLIPPED_IN: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda loss: loss.item(),
    "float": lambda loss: float(loss),
    "bool": lambda loss: bool(loss > 0),
    "if": lambda loss: 1 if loss > 0 else 0,
    "tolist": lambda loss: loss.tolist(),
    "numpy": lambda loss: loss.detach().numpy(),
    "cpu": lambda loss: loss.cpu(),
    "to cpu": lambda loss: loss.to("cpu"),
    "equal": lambda loss: torch.equal(loss, loss),
    "allclose": lambda loss: torch.allclose(loss, loss),
    "nonzero": lambda loss: loss.reshape(1).nonzero(),
    "mask": lambda loss: loss.reshape(1)[loss.reshape(1) > 0],
    "masked_select": lambda loss: loss.masked_select(loss > 0),
    "unique": lambda loss: loss.unique(),
}


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("how", list(SLIPPED_IN))
def test_host_reads_detects_read_in_hook(how):
    trainer = ppo()
    read = SLIPPED_IN[how]

    def careless() -> None:
        read(trainer.last_metrics["loss_objective"])

    trainer.register_op("post_optim", careless)
    with pytest.raises(HookError, match=r"careless at stage 'post_optim' raised HostReadError"):
        guarded(trainer)
    assert trainer.ledger.iterations == WARM


@pytest.mark.usefixtures("as_on_a_device")
def test_kl_penalty_adapts_without_host_reads():
    trainer = guarded(ppo(KLPENPPOLoss))
    assert not trainer.update.plain_reason
    assert float(trainer.loss_module.beta) != 1.0


def test_host_reads_ignores_device_operations():
    values, index = torch.arange(6.0), torch.tensor([1, 2])
    with host_reads() as reads:
        values[index] = values[index] * 2
        values[values > 3] = 0.0
        torch.where(values > 1, values, 0.0).sum().clamp(max=2)
        values.to(torch.float64).to(values.device)
    assert reads.seen == []
