"""Recurrent modules: PyTorch's numbers, episode by episode, without reading on the host."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import GRUModule, LSTMModule

import kit.testing.envs  # noqa: F401  # registers kit/Recall-v0
import recipes.ppo
import recipes.ppo_recurrent
from kit.advantages import GAE
from kit.collectors import VectorCollector
from kit.envs import make_env
from kit.experiment import EnvConfig, OnPolicySteps
from kit.modules import Recurrent, make_actor_critic
from kit.trainer import Trainer
from tests.errors import raises_setting

both = pytest.mark.parametrize("kind", ["lstm", "gru"])


class Identity(nn.Identity):
    out_features = 3


def module_of(kind: Any, **settings: Any) -> Recurrent:
    torch.manual_seed(0)
    made = Recurrent(["observation"], Identity(), kind, 5, **settings).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def sequences(count: int = 4, steps: int = 9) -> TensorDict:
    generator = torch.Generator().manual_seed(1)
    seen = torch.randn(count, steps, 3, generator=generator, dtype=torch.float64)
    starts = torch.rand(count, steps, 1, generator=generator) < 0.3
    return TensorDict({"observation": seen, "is_init": starts}, [count, steps])


def by_pytorch(module: Recurrent, batch: TensorDict) -> Tensor:
    """Each episode of each sequence alone, by torch.nn."""
    rows = []
    for row in batch.unbind(0):
        starts = [0, *(t for t in range(1, len(row)) if row["is_init"][t]), len(row)]
        parts = [row["observation"][a:b] for a, b in itertools.pairwise(starts)]
        rows.append(torch.cat([module.cell(part.unsqueeze(0))[0].squeeze(0) for part in parts]))
    return torch.stack(rows)


# ---------------------------------------------------------------------- the module
@both
def test_sequences_match_pytorch_with_resets_at_is_init(kind):
    module, batch = module_of(kind), sequences()
    found, expected = module(batch.clone())["features"], by_pytorch(module, batch)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), list(module.parameters())),
        torch.autograd.grad(expected.square().sum(), list(module.parameters())),
    ):
        torch.testing.assert_close(one, other)


@both
def test_stepwise_calls_match_sequence_call(kind):
    module, batch, features = module_of(kind), sequences(), []
    hidden: dict[str, Tensor] = {}
    for step in batch.unbind(1):
        after = module(step.clone().update(hidden))
        features.append(after["features"])
        hidden = {key: after["next", key] for key in module.states}
    torch.testing.assert_close(torch.stack(features, 1), module(batch)["features"])


@both
def test_sequence_starts_with_hidden_state_of_first_row(kind):
    module, batch = module_of(kind), sequences()
    batch["is_init"].fill_(False)
    whole = module(batch.clone())["features"]
    hidden: dict[str, Tensor] = {}
    for step in batch[:, :4].unbind(1):
        after = module(step.clone().update(hidden))
        hidden = {key: after["next", key] for key in module.states}
    rest = batch[:, 4:].clone()
    for key, value in hidden.items():
        rest[key] = value.unsqueeze(1).expand(-1, 5, -1, -1).clone()
        rest[key][:, 1:] = torch.nan
    torch.testing.assert_close(module(rest)["features"], whole[:, 4:])


@both
def test_burn_in_blocks_gradients(kind):
    module, batch = module_of(kind, burn_in=3), sequences()
    batch["is_init"].fill_(False)
    seen = batch["observation"].requires_grad_()
    features = module(batch)["features"]
    (gradient,) = torch.autograd.grad(features[:, 3:].sum(), seen)
    assert (gradient[:, :3] == 0).all()
    assert (gradient[:, 3:] != 0).all()
    torch.testing.assert_close(features, module_of(kind)(batch.detach())["features"])


@both
def test_gae_with_torchrl_recurrent_module_matches_kit_module(kind):
    own, batch = module_of(kind), sequences()
    theirs = (LSTMModule if kind == "lstm" else GRUModule)(
        input_size=3, hidden_size=5, in_key="observation", out_key="features"
    ).double()
    (theirs.lstm if kind == "lstm" else theirs.gru).load_state_dict(own.cell.state_dict())
    flags = torch.zeros(4, 9, 1, dtype=torch.bool)
    batch["next"] = {"reward": flags.double(), "done": flags, "terminated": flags}
    batch["next", "observation"] = batch["observation"].roll(-1, 1)
    for key in own.states:
        batch[key] = torch.randn(4, 9, 1, 5).double()
        batch["next", key] = batch[key].roll(-1, 1)
    head = TensorDictModule(nn.Linear(5, 1).double(), ["features"], ["state_value"])
    found, expected = (
        GAE(gamma=0.9, lmbda=0.8, value_network=TensorDictSequential(body, head))(batch.clone())
        for body in (theirs, own)
    )
    torch.testing.assert_close(found["advantage"], expected["advantage"])


# ---------------------------------------------------------------------- in a run
def trainer_of(total: int = 1_152, **settings: Any) -> Trainer:
    steps = {
        "total_policy_steps": total, "steps_per_env": 36, "sequence_length": 12,
        "minibatch_size": 4, "update_epochs": 2, "evaluation_every": None,
        "evaluation_episodes": 4,
    }  # fmt: skip
    own = {name: settings.pop(name) for name in list(settings) if name in steps}
    cfg = recipes.ppo_recurrent.Config(
        **{
            "env": EnvConfig("kit/Recall-v0", num_envs=4), "hidden_sizes": [8],
            "recurrent_size": 8, "log_dir": None, "progress": False,
            "steps": OnPolicySteps(**{**steps, **own}), **settings,
        }
    )  # fmt: skip
    return recipes.ppo_recurrent.build(cfg)


@both
@pytest.mark.parametrize("burn_in", [0, 4])
def test_recurrent_ppo_trains_on_fast_path(kind, burn_in):
    trainer = trainer_of(recurrent=kind, burn_in=burn_in)
    ledger = trainer.run()
    assert ledger.compare(trainer.plan) == []
    assert ledger.gradient_steps == 8 * 2 * 3
    assert trainer.update.plain_reason == ""
    assert trainer.advantage._traced.replays
    assert trainer.collector.policy_path.name == "program"


@pytest.mark.parametrize("collector", ["vector", "async", "episode", "torchrl"])
def test_collectors_store_hidden_state_of_policy(collector):
    changes: dict[str, Any] = {"collector": collector}
    if collector == "episode":
        changes |= {"steps": OnPolicySteps(
            total_policy_steps=1_008, steps_per_env=None, min_episodes=4, sequence_length=12,
            minibatch_size=4, evaluation_every=None, evaluation_episodes=4,
        )}  # fmt: skip
    trainer = trainer_of(**changes)
    batch = next(iter(trainer.collector))
    trainer.collector.shutdown()
    actor, last = trainer.evaluate.policy, None
    mask = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
    body = actor.module[0][0]
    for t in range(batch.shape[1]):
        row = batch[:, t]
        if last is not None:
            expected = torch.where(row["is_init"].unsqueeze(-1), 0.0, last)
            now = row["recurrent_state_h"]
            torch.testing.assert_close(now[mask[:, t]], expected[mask[:, t]])
        after = body(row.exclude("next", "features").clone())
        last = after["next", "recurrent_state_h"].detach()
        torch.testing.assert_close(
            row["next", "recurrent_state_h"][mask[:, t]], last[mask[:, t]], rtol=1e-5, atol=1e-6
        )


def test_values_match_unrolled_sequence():
    trainer = trainer_of()
    batch = trainer.collector.collect().clone()
    value = trainer.advantage.value_network
    expected = value(batch.exclude("next", "state_value"))["state_value"]
    found = trainer.advantage(batch)
    torch.testing.assert_close(found["state_value"], expected.detach(), rtol=1e-5, atol=1e-6)
    continues_episodes = ~found["next", "done"][:, :-1]
    following = found["next", "state_value"][:, :-1][continues_episodes]
    torch.testing.assert_close(following, found["state_value"][:, 1:][continues_episodes])


def test_collector_records_one_step_policy_once():
    env = make_env("kit/Recall-v0", 2)
    actor, _ = make_actor_critic(env, (4,), shared_backbone=True, recurrent="gru", recurrent_size=4)
    collector = VectorCollector(env, actor, steps_per_env=1)
    programs = set()
    for number in range(30):
        collector.collect()
        traced = collector._actor.runner._traced
        if number >= 3:
            programs.add(tuple(map(id, traced._programs.values())))
    assert traced.replays
    assert len(programs) == 1


@pytest.mark.parametrize("kind", ["lstm", "gru", "gru without primer"])
def test_recurrent_ppo_learns_short_recall(kind, monkeypatch):
    kind, _, without = kind.partition(" without ")
    if without:
        monkeypatch.delattr(Recurrent, "make_tensordict_primer")
    trainer = trainer_of(
        4_608, env=EnvConfig("kit/Recall-v0", 8, kwargs={"delay": 3, "choices": 2}),
        steps_per_env=48, minibatch_size=8, update_epochs=4, recurrent=kind, hidden_sizes=[16],
        recurrent_size=16, learning_rate=5e-3, evaluation_episodes=40,
    )  # fmt: skip
    trainer.run()
    returns = [trainer.evaluate(number)["evaluation/return"] for number in range(4)]
    assert returns == [1.0] * 4


@pytest.mark.nightly
@both
def test_only_recurrent_policy_recalls_cue(kind):
    """Without memory the last observation is always the same: at most 1 in 4 on average."""
    long = {
        "total": 57_600, "steps_per_env": 72, "sequence_length": 18, "minibatch_size": 8,
        "env": EnvConfig("kit/Recall-v0", 8), "hidden_sizes": [64], "recurrent_size": 64,
        "update_epochs": 4, "learning_rate": 3e-3, "evaluation_episodes": 200,
    }  # fmt: skip
    trainer = trainer_of(**long, recurrent=kind)
    trainer.run()
    assert trainer.journal.latest["evaluation/return"] >= 0.95
    steps = OnPolicySteps(total_policy_steps=57_600, steps_per_env=72, evaluation_episodes=200)
    plain = recipes.ppo.Config(env=long["env"], steps=steps, log_dir=None, progress=False)
    without = recipes.ppo.build(plain)
    without.run()
    assert without.journal.latest["evaluation/return"] < 0.4


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_length": None}, "steps.sequence_length"),
        ({"burn_in": 12}, "burn_in"),
        ({"shared_backbone": False}, "shared_backbone"),
        ({"steps_per_env": 40, "total": 1_280}, "steps.sequence_length"),
    ],
)
def test_build_rejects_untrainable_policy(settings, message):
    with raises_setting(message):
        trainer_of(**settings)
