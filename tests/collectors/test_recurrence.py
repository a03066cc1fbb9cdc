"""Policies that remember: as in a plain loop, across batches, and only within an episode."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer
from torchrl.modules import GRUModule, LSTMModule

from kit.collectors import AsyncCollector, EpisodeCollector, TensorCollector, VectorCollector
from kit.testing import CollectorCase, counter_env
from tests.tiny import assert_same

CASE = CollectorCase(seed=1)


class Cell(TensorDictModuleBase):
    """A recurrence of plain tensor operations; TorchRL's modules ask the host for resets."""

    in_keys = ("observation", "h")
    out_keys = ("features", ("next", "h"))

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, tensordict):
        after = self.cell(tensordict["observation"], tensordict["h"].squeeze(1))
        tensordict["features"], tensordict["next", "h"] = after, after.unsqueeze(1)
        return tensordict

    def make_tensordict_primer(self):
        return TensorDictPrimer({"h": Unbounded((1, 4))}, expand_specs=True)


KINDS = ["lstm", "gru", "cell"]


def recurrent(env, kind="lstm"):
    """A recurrent policy that samples; the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if kind == "lstm":
            keys = {"in_keys": ["observation", "h", "c"]}
            keys["out_keys"] = ["features", ("next", "h"), ("next", "c")]
            memory = LSTMModule(input_size=3, hidden_size=4, **keys)
        elif kind == "cell":
            memory = Cell()
        else:
            keys = {"in_keys": ["observation", "h"], "out_keys": ["features", ("next", "h")]}
            memory = GRUModule(input_size=3, hidden_size=4, **keys)
        logits = TensorDictModule(nn.Linear(4, 3), ["features"], ["logits"])
        choice = TensorDictModule(
            lambda logits: torch.distributions.Categorical(logits=3 * logits).sample(),
            ["logits"],
            ["action"],
        )
    del env
    return TensorDictSequential(memory, logits, choice)


def vector(kind="lstm", **settings):
    env = counter_env(CASE)
    settings = {"steps_per_env": 7, "seed": 2, **settings}
    return VectorCollector(env, recurrent(env, kind), **settings)


def tensor(kind="lstm", **settings):
    env = counter_env(CASE, "tensor")
    settings = {"steps_per_env": 7, "seed": 2, **settings}
    return TensorCollector(env, recurrent(env, kind), **settings)


def whole(collector, count=3):
    return torch.cat([collector.collect().clone() for _ in range(count)], -1)


def replayed(policy, batch, key):
    """What the policy writes in a plain loop over the batch's observations."""
    copies, steps = batch.shape
    memory = {name: torch.zeros(copies, 1, 4) for name in ("h", "c")}
    start = torch.ones(copies, 1, dtype=torch.bool)
    found = []
    for time_step in range(steps):
        now = {"observation": batch["observation"][:, time_step], "is_init": start, **memory}
        with torch.no_grad():
            result = policy[:2](TensorDict(now, [copies]))
        found.append(result[key])
        start = batch["next", "done"][:, time_step]
        memory = {
            name: torch.where(start.unsqueeze(-1), 0.0, result["next", name])
            for name in ("h", "c")
            if ("next", name) in result.keys(True)
        }
    return torch.stack(found, 1)


pytestmark = pytest.mark.filterwarnings("ignore:the policy runs eagerly")


@pytest.mark.parametrize("make", [vector, tensor])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_policy_matches_plain_loop(make, kind):
    collector = make(kind)
    batch = whole(collector)
    wanted = replayed(recurrent(None, kind), batch, "logits")
    assert torch.allclose(batch["logits"], wanted, atol=1e-6)
    assert batch["next", "done"].sum() > 6  # episodes ended within batches


@pytest.mark.parametrize("make", [vector, tensor])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_fast_path_matches_plain_path(make, kind):
    fast, plain = whole(make(kind)), whole(make(kind, fast_policy=False))
    assert set(fast.keys(True, True)) == set(plain.keys(True, True))
    assert [k for k in fast.keys(True, True) if not torch.equal(fast[k], plain[k])] == []


def test_recurrent_cell_of_tensor_ops_uses_fast_path():
    for make in (vector, tensor):
        collector = make("cell")
        whole(collector)
        assert collector._actor.runner.replays


def test_torchrl_gru_runs_as_module_and_warns():
    with pytest.warns(
        UserWarning, match=r"reads a tensor on the host at torchrl/.*is_init.any\(\)"
    ):
        vector("gru").collect()


@pytest.mark.parametrize("make", [vector, tensor])
def test_batches_contain_hidden_state_before_and_after_each_step(make):
    batch = whole(make())
    for name in ("h", "c"):
        before, after = batch[name], batch["next", name]
        done = batch["next", "done"].unsqueeze(-1)
        wanted = torch.where(done, 0.0, after)[:, :-1]
        assert torch.equal(before[:, 1:], wanted)  # across the ends of batches, too
        assert before[:, 0].eq(0).all()
        assert after.ne(0).any()


@pytest.mark.parametrize("make", [vector, tensor])
def test_is_init_marks_first_step_of_each_episode(make):
    batch = whole(make())
    starts, done = batch["is_init"], batch["next", "done"]
    assert starts[:, 0].all()
    assert torch.equal(starts[:, 1:], done[:, :-1])


def states_at_the_end(make, collected):
    """Of policies: of a run of 12 batches, and of one resumed before the last of them."""
    never_saved, saved, resumed = make(), make(), make()
    for _ in range(12):
        never_saved.collect()
    for _ in range(12 - collected):
        saved.collect()
    resumed.load_state_dict(saved.state_dict())
    for _ in range(collected):
        resumed.collect()
    return [one.state_dict()["actor"]["runners"] for one in (never_saved, resumed)]


@pytest.mark.parametrize("collected", range(5))
@pytest.mark.parametrize("random_steps", [0, 4])
def test_feedforward_policy_state_is_equal_after_resume(collected, random_steps):
    def make():
        env = counter_env(CASE)
        torch.manual_seed(3)
        policy = TensorDictModule(nn.Linear(3, 3), ["observation"], ["action_value"])
        greedy = TensorDictModule(lambda value: value.argmax(-1), ["action_value"], ["action"])
        return VectorCollector(
            env, TensorDictSequential(policy, greedy), fast_policy="exact", seed=1,
            steps_per_env=1, init_random_frames=random_steps * env.num_envs,
        )  # fmt: skip

    wanted, found = states_at_the_end(make, collected)
    assert found == wanted == [{"hidden": [], "starts": None}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("collected", range(5))
def test_recurrent_policy_state_is_equal_after_resume(collected, kind):
    wanted, found = states_at_the_end(lambda: vector(kind, steps_per_env=1), collected)
    assert_same(found, wanted)


@pytest.mark.parametrize("make", [vector, tensor])
def test_hidden_state_is_zero_after_reset_at_each_iter(make):
    collector = make(reset_at_each_iter=True)
    for _ in range(3):
        batch = collector.collect()
        assert batch["is_init"][:, 0].all()
        assert batch["h"][:, 0].eq(0).all()


@pytest.mark.parametrize("make", [vector, tensor])
def test_hidden_state_is_zero_when_policy_starts_mid_episode(make):
    batch = whole(make(init_random_frames=6))
    assert batch["h"][:, :3].eq(0).all()
    started = batch["next", "done"][:, :2].any(1).squeeze(-1)
    assert batch["is_init"][:, 0].all()
    assert not batch["is_init"][~started, 1:3].any()  # it was not the first step


@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_episode_collector_starts_with_zero_hidden_state(layout):
    env = counter_env(CASE)
    collector = EpisodeCollector(env, recurrent(env), min_episodes=7, seed=2, layout=layout)
    for _ in range(2):
        batch = collector.collect()
        mask = batch["collector", "mask"] if layout == "padded" else slice(None)
        rows = batch[mask]
        starts = rows["observation"][:, 1] == 0
        assert int(starts.sum()) == 7
        assert torch.equal(rows["is_init"].squeeze(-1), starts)
        assert rows["h"][starts].eq(0).all()
        follows = ~starts[1:]
        assert torch.equal(rows["h"][1:][follows], rows["next", "h"][:-1][follows])


def test_async_collector_matches_local_recurrent_policy():
    env = counter_env(CASE)
    settings = {"steps_per_env": 7, "seed": 2, "max_staleness": 0}
    collector = AsyncCollector(env, recurrent(env), **settings)
    found, wanted = whole(collector), whole(vector())
    collector.shutdown()
    for key in ("logits", "h", "action"):
        assert torch.equal(found[key], wanted[key])


def test_recurrent_policy_is_traced_once_with_one_step_batches(monkeypatch):
    policy = recurrent(None, "cell")
    collector = VectorCollector(counter_env(CASE), policy, steps_per_env=1)
    calls, forward = [], type(policy).forward

    def counted(self, *args, **kwargs):
        calls.extend([None] * (self is policy))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(policy), "forward", counted)
    for _ in range(12):
        collector.collect()
    assert collector.policy_path.name == "program"
    assert 0 < len(calls) <= 6  # to know its keys, to record and to verify
