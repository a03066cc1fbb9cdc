"""Gradients of ranks are averaged in one collective per gradient step, however it is executed."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers import DefaultOptimizationStepper

from kit.collectors.asynchronous import AsyncCollector
from kit.distributed import Ranks
from kit.fast.traced import Traced
from kit.losses import KLPENPPOLoss
from kit.trainer.compatibility import in_ranks
from kit.trainer.stages import Stages
from kit.update import TrustRegion, Update
from tests.distributed.processes import run_ranks
from tests.losses import LOSSES, discrete_actor, make_loss, minibatch_for, net, soft_update, value
from tests.plain_steps import OPTIMIZERS, assert_same, state_of
from tests.tiny import off_policy_plan, on_policy_plan


class TwinRanks(Ranks):
    """Two ranks that always have the same gradients."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.log = []

    def mean(self, vector: Tensor, what: str = "gradients") -> Tensor:
        assert self.log is not None
        self.log.append((what, vector.numel()))
        return vector.add_(vector).div_(2)


# ---------------------------------------------------------------------- the same result
PPO, TD3 = "ClipPPOLoss, discrete", "TD3Loss"
CASES = [
    ("eager", TD3), ("traced", TD3), ("minimize", TD3), ("traced", PPO), ("accumulated", PPO),
]  # fmt: skip
PARTS = {PPO: ("actor", "critic"), TD3: ("actor", "qvalue")}
"""Losses without random numbers in float64, and the networks of their optimisers."""


def make_update(name: str, compile: Any, max_grad_norm: float | None = 0.5) -> Update:
    """An update with two optimisers, of which the actor's takes every second step for TD3."""
    loss = make_loss(name)
    if name == TD3:
        loss.policy_noise = 0.0
    weights = dict(loss.named_parameters())
    first, second = (
        Adam([p for key, p in weights.items() if part in key], lr=0.01, fused=True)
        for part in PARTS[name]
    )
    optimizers = {"loss_actor": first, "loss_qvalue": second}
    if name != TD3:
        optimizers = {"loss_objective": first, "loss_entropy": first, "loss_critic": second}
    return Update(
        loss, optimizers, compile=compile, max_grad_norm=max_grad_norm,
        every={"loss_actor": 2} if name == TD3 else None, target_updater=soft_update(loss),
    )  # fmt: skip


def train(path: str, name: str, rows: slice, ranks: Ranks | None = None) -> dict[str, Tensor]:
    """Return norms and all state after eight float64 steps with these rows of each minibatch."""
    torch.set_default_dtype(torch.float64)
    update = make_update(name, compile=False if path == "eager" else "exact")
    update.ranks = ranks
    for step in range(8):
        minibatches = [minibatch_for(name, 8, seed=step + n)[rows] for n in (0, 100)]
        if path == "minimize":
            metrics = update.minimize(update.losses(minibatches[0]))
        else:
            metrics = update(*minibatches[: 1 + (path == "accumulated")])
    norms = {key: metrics[key].clone() for key in metrics if key.startswith("grad_norm")}
    return state_of(update.loss_module, *update.optimizers.values()) | norms


def train_half(ranks: Ranks) -> dict[Any, dict[str, Tensor]]:
    rows = slice(4 * ranks.rank, 4 * ranks.rank + 4)
    return {(path, name): train(path, name, rows, ranks) for path, name in CASES}


def test_two_ranks_train_like_one_process_with_their_rows():
    for results in zip(*(one.items() for one in run_ranks(train_half, 2))):
        (path, name), found = results[0]
        assert_same(found, results[1][1])
        for key, expected in train(path, name, slice(None)).items():
            torch.testing.assert_close(found[key], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [*LOSSES])
def test_split_step_matches_whole_step_for_every_loss(name):
    losses = make_loss(name), make_loss(name)
    optimizers = [Adam(loss.parameters(), lr=0.01, fused=True) for loss in losses]
    pairs = zip(losses, optimizers)
    updates = [
        Update(*pair, max_grad_norm=0.5, target_updater=soft_update(pair[0])) for pair in pairs
    ]
    updates[1].ranks = ranks = TwinRanks()
    for step in range(6):
        results, minibatches = [], [minibatch_for(name, seed=step) for _ in updates]
        for update, minibatch in zip(updates, minibatches):
            torch.manual_seed(step)
            update.undisturbed = step != 4
            results.append(update(minibatch))
        assert_same(*results)
        assert (minibatches[0] == minibatches[1]).all()
    assert_same(*(state_of(*pair) for pair in zip(losses, optimizers)))
    assert updates[0].keys_read == updates[1].keys_read
    assert updates[0].plain_reason == updates[1].plain_reason
    assert len(set(ranks.log)) == 1
    assert len(ranks.log) == 6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [{}, {"clip_value": 0.01}])
def test_split_step_matches_whole_step_for_every_optimizer(optimizer, clip):
    losses = make_loss("A2CLoss"), make_loss("A2CLoss")
    optimizers = [OPTIMIZERS[optimizer](list(loss.parameters())) for loss in losses]
    updates = [Update(*pair, **clip) for pair in zip(losses, optimizers)]
    updates[1].ranks = TwinRanks()
    for step in range(8):
        for update in updates:
            update(minibatch_for("A2CLoss", seed=step))
    assert_same(*(state_of(*pair) for pair in zip(losses, optimizers)))
    fused = optimizer.endswith(("fused", "amsgrad", "kit's", "momentum"))
    assert len(updates[1].traced_step.traced) == 1 + fused


def test_hooks_and_clipping_see_mean_gradient():
    class Halving(TwinRanks):
        def mean(self, vector: Tensor, what: str = "gradients") -> Tensor:
            return vector.div_(2)  # the other rank's gradient is zero

    seen: list[Tensor] = []
    loss = make_loss("A2CLoss")
    weights = [*loss.parameters()]

    def change(parameters: Any, gradients: Any) -> Any:
        seen.append(gradients[0].clone())
        return gradients

    for ranks in (None, Halving()):
        update = Update(loss, Adam(weights, lr=0.0), gradients=change)
        update.ranks = ranks
        update.post_backward = lambda: seen.append(weights[0].grad.clone())
        seen.append(update(minibatch_for("A2CLoss"))["grad_norm"])
    for alone, mean in zip(seen[:3], seen[3:]):
        torch.testing.assert_close(mean, alone / 2)


# ---------------------------------------------------------------------- one collective
def train_unlike(ranks: Ranks, name: str) -> Any:
    """Take 50 steps that are traced, eager or traced for new sizes, depending on the rank."""
    update = make_update(name, compile=False if ranks.rank == 1 else "auto")
    update.ranks = ranks
    for step in range(50):
        rows = 4 + (step % 5 if ranks.rank == 2 else 0)
        update(minibatch_for(name, rows, seed=100 * ranks.rank + step))
    replays = sorted(traced.replays for traced in update.traced_step.traced.values())
    return ranks.log, state_of(update.loss_module, *update.optimizers.values()), replays


@pytest.mark.parametrize("name", [pytest.param(TD3, marks=pytest.mark.guard), PPO])
def test_ranks_agree_bitwise_when_they_trace_differently(name):
    results = run_ranks(train_unlike, 3, name)
    log, state, replays = results[0]
    assert [what for what, _ in log] == ["gradients"] * 50
    assert all(replays)
    for other, others_state, _ in results[1:]:
        assert other == log
        assert_same(others_state, state)
    assert results[1][2] == []


class SometimesDeep(nn.Module):
    """A loss that reaches ``deep`` only for positive rows, and never reaches ``unused``."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("wide", "deep", "unused"):
            self.register_parameter(name, nn.Parameter(torch.ones(3)))

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        rows = minibatch["x"]
        total = (rows @ self.wide).square().sum()
        if bool((rows > 0).all()):
            total = total + (rows @ self.deep).sum()
        return TensorDict({"loss": total / len(rows)})


def train_sometimes(rows: Tensor, ranks: Ranks | None = None) -> dict[str, Tensor]:
    loss = SometimesDeep()
    update = Update(loss, AdamW(loss.parameters(), lr=0.1, weight_decay=0.1, fused=True))
    update.ranks = ranks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            update(TensorDict({"x": rows}, [len(rows)]))
    return state_of(loss)


def train_sometimes_in_ranks(ranks: Ranks) -> dict[str, Tensor]:
    return train_sometimes(torch.full((1, 3), 1.0 - 2 * ranks.rank), ranks)


def test_parameter_is_updated_if_any_rank_has_its_gradient():
    first, second = run_ranks(train_sometimes_in_ranks, 2)
    assert_same(first, second)
    assert torch.equal(first["unused"], torch.ones(3))
    assert not torch.equal(first["deep"], torch.ones(3))


# ---------------------------------------------------------------------- traces
def set_for_all(update: Update, **settings: float) -> None:
    for optimizer in update.optimizers.values():
        optimizer.param_groups[0].update(settings)


CHANGES: dict[str, Any] = {
    "learning rate": lambda update: set_for_all(update, lr=0.1),
    "optimiser": lambda update: set_for_all(update, eps=0.1),
    "clipping": lambda update: setattr(update, "max_grad_norm", 0.1),
    "loss": lambda update: setattr(update.loss_module, "policy_noise", 1.0),
    "frozen weight": lambda update: next(update.loss_module.parameters()).requires_grad_(False),
    "target updater": lambda update: setattr(update.target_updater, "tau", 0.5),
    "compile": lambda update: setattr(update, "compile", False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_update_follows_change_between_split_steps(change):
    updates = [make_update(TD3, "auto", max_grad_norm=None) for _ in "ab"]
    updates[1].ranks = TwinRanks()
    for step in range(16):
        for update in updates:
            if step == 10:
                update.undisturbed = False
                CHANGES[change](update)
            if step in (0, 10):
                update.undisturbed = True
            torch.manual_seed(step)
            update(minibatch_for(TD3, seed=step))
    assert_same(*(state_of(u.loss_module, *u.optimizers.values()) for u in updates))


def test_update_drops_traces_when_ranks_are_set():
    update = make_update(PPO, "auto")
    for ranks in (None, TwinRanks(), None):
        update.ranks = ranks
        assert update.keys_read == []
        for step in range(4):
            update(minibatch_for(PPO, seed=step))
        assert (((0, 1), "step") in update.traced_step.traced) == (ranks is None)
    update.ranks = Ranks()
    assert update.keys_read != []


def test_frozen_update_makes_no_collective():
    loss = make_loss("A2CLoss").requires_grad_(False)
    update = Update(loss, Adam(loss.parameters()))
    update.ranks = TwinRanks()
    update(minibatch_for("A2CLoss"))
    assert update.ranks.log == []


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduced(inputs: Any) -> dict[str, Tensor]:
    total = inputs["x"].clone()
    dist.all_reduce(total)
    return {"y": total * 2}


def functionally_reduced(inputs: Any) -> dict[str, Tensor]:
    operations, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    return {"y": operations.wait_tensor(operations.all_reduce(inputs["x"], "sum", name)) * 2}


@pytest.mark.parametrize("function", [reduced, functionally_reduced])
def test_function_with_collective_runs_eagerly(group, function):
    traced = Traced(function, name="")
    with torch.no_grad():
        for step in range(5):
            found = traced({"x": torch.full((3,), float(step))})
            assert torch.equal(found["y"], torch.full((3,), 2.0 * step))
    assert "exchanges tensors with other processes" in traced.reason


# ---------------------------------------------------------------------- refusals
def refusals(
    plan: Any = None,
    update: Any = None,
    loss: Any = None,
    stages: Any = None,
    collector: Any = None,
) -> list[str]:
    """Return the rejected settings with two ranks, and check that one rank is accepted."""
    parts = (plan or on_policy_plan(), update, loss, stages or Stages(), collector)
    assert [*in_ranks(None, *parts)] == [*in_ranks(Ranks(), *parts)] == []
    found = [*in_ranks(Ranks(0, 2), *parts)]
    assert all(reason and hint for _, _, reason, hint in found)
    return [field for field, *_ in found]


def test_ranks_accept_updates_of_common_losses():
    for name in ("ClipPPOLoss", "SACLoss", "TD3Loss", "DQNLoss"):
        loss = make_loss(name)
        assert refusals(off_policy_plan(), Update(loss, Adam(loss.parameters())), loss) == []


def test_ranks_reject_steppers_that_average_nothing():
    loss = make_loss(PPO)
    assert refusals(update=TrustRegion(loss, discrete_actor())) == ["update"]
    assert refusals(update=DefaultOptimizationStepper()) == ["update"]


def test_ranks_reject_hooks_that_take_gradient_steps():
    stages = Stages()
    stages.register("optimizer", lambda *_: None)
    assert refusals(stages=stages) == ["stage"]


def test_ranks_reject_distributed_data_parallel(group):
    network = DistributedDataParallel(net(4, 1))
    loss = ClipPPOLoss(
        discrete_actor(), TensorDictModule(network, ["observation"], ["state_value"])
    )
    assert refusals(loss=loss) == ["loss_module"]


def test_ranks_reject_state_learned_from_rows_of_one_rank():
    assert refusals(loss=KLPENPPOLoss(discrete_actor(), value())) == ["loss_module"]
    norm = nn.BatchNorm1d(3)
    assert refusals(loss=nn.Sequential(norm)) == ["loss_module"]
    assert refusals(loss=nn.Sequential(norm.eval())) == []


def test_ranks_reject_whole_episodes():
    plan = SimpleNamespace(collects_episodes=True, min_episodes=2, min_steps=None)
    assert refusals(plan) == ["min_episodes"]


@pytest.mark.parametrize("normalized_by", ["", "Normalizer"])
def test_ranks_reject_async_collector_with_normalisation(normalized_by):
    collector = AsyncCollector.__new__(AsyncCollector)
    collector.normalized_by = normalized_by
    assert refusals(collector=collector) == ["collector"] * bool(normalized_by)
