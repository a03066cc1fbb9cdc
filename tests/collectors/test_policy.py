"""Policies on the fast path: bit for bit what the TensorDict module does, or the module itself."""

from __future__ import annotations

import warnings
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.envs.utils import ExplorationType

from kit.collectors import VectorCollector
from kit.collectors.policy import PolicyRunner
from kit.envs import make_env
from kit.modules import make_actor
from tests.envs.odd_envs import ManySpaces
from tests.errors import raises_setting
from tests.tiny import Guess

ACTIONS = {
    "discrete": gym.spaces.Discrete(3),
    "multi-discrete": gym.spaces.MultiDiscrete([2, 3]),
    "continuous": gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
    "dict": gym.spaces.Dict(
        {"arm": gym.spaces.Box(-1.0, 1.0, (2,), np.float32), "gear": gym.spaces.Discrete(3)}
    ),
}


def guess(kind="discrete", num_envs=3, dict_observation=False):
    return make_env(lambda: Guess(ACTIONS[kind], dict_observation), num_envs)


def fast_and_plain(env_of, policy_of, **settings):
    """A collector on the fast path and one that is not, otherwise the same."""
    found = []
    for path in ("exact", "module"):
        torch.manual_seed(0)
        env = env_of()
        policy = policy_of(env)
        settings = {"steps_per_env": 5, **settings}
        found.append(VectorCollector(env, policy, fast_policy=path, **settings))
    return found


def assert_same_batches(fast, plain, count=3):
    for _ in range(count):
        one, other = fast.collect(), plain.collect()
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert [key for key in one.keys(True, True) if not torch.equal(one[key], other[key])] == []


def runner_of(collector) -> PolicyRunner:
    return collector._actor.runner


def dropping(env):
    """A policy whose training mode is another one than its evaluation mode."""
    network = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    logits = TensorDictModule(network, ["observation"], ["logits"])
    choice = TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"])
    return TensorDictSequential(logits, choice)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, observation):
        self.calls += 1
        return observation.argmax(-1), self.calls.expand(observation.shape[0]).clone()


def counting(env):
    return TensorDictModule(Counting(), ["observation"], ["action", "calls"])


# ---------------------------------------------------------------------- the same
@pytest.mark.parametrize("kind", list(ACTIONS))
@pytest.mark.parametrize("dict_observation", [False, True])
def test_fast_path_matches_plain_path_for_all_action_kinds(kind, dict_observation):
    fast, plain = fast_and_plain(lambda: guess(kind, 3, dict_observation), make_actor)
    assert_same_batches(fast, plain)
    assert runner_of(fast).replays
    assert not runner_of(plain).replays


def test_fast_path_matches_plain_path_for_squashed_actions():
    def actor(env):
        return make_actor(env, continuous="tanh_normal")

    fast, plain = fast_and_plain(lambda: guess("continuous"), actor)
    assert_same_batches(fast, plain)
    assert runner_of(fast).replays


def test_deterministic_fast_path_takes_most_likely_action():
    deterministic = ExplorationType.DETERMINISTIC
    fast, plain = fast_and_plain(guess, make_actor, exploration_type=deterministic)
    assert_same_batches(fast, plain, 2)
    batch = fast.collect()
    assert torch.equal(batch["action"], batch["logits"].argmax(-1))


def test_fast_path_rounding_is_independent_of_memory_alignment():
    """Three rows of six numbers do so at 72 bytes, where MKL adds in another order than at 64."""
    acrobots = partial(make_env, "Acrobot-v1", 3)
    assert_same_batches(*fast_and_plain(acrobots, lambda env: make_actor(env, (64,))))


def test_in_place_weight_updates_are_applied():
    fast, plain = fast_and_plain(guess, make_actor)
    for _ in range(3):
        assert_same_batches(fast, plain, 1)
        for collector in (fast, plain):
            for parameter in collector.policy.parameters():
                parameter.data.mul_(2.0)
    assert runner_of(fast).replays


def test_replaced_layer_weights_are_applied():
    fast, plain = fast_and_plain(guess, make_actor)
    assert_same_batches(fast, plain, 2)
    for collector in (fast, plain):
        torch.manual_seed(1)
        for module in collector.policy.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(torch.randn_like(module.weight))
    assert_same_batches(fast, plain, 2)
    assert runner_of(fast).replays


def test_eval_mode_change_is_applied():
    fast, plain = fast_and_plain(guess, dropping)
    assert_same_batches(fast, plain, 2)
    for collector in (fast, plain):
        collector.policy.eval()
    assert_same_batches(fast, plain, 2)
    same = fast.collect()
    asked = same["observation"].argmax(-1)
    for number in range(3):  # without dropout, equal observations have equal logits
        assert len(same["logits"][asked == number].unique(dim=0)) <= 1


def test_policy_buffers_are_updated_once_per_call():
    fast, plain = fast_and_plain(guess, counting)
    assert_same_batches(fast, plain, 2)
    assert fast.collect()["calls"][0].tolist() == [11, 12, 13, 14, 15]


def test_policy_can_be_plain_function():
    def answer(tensordict):
        return tensordict.set("action", tensordict["observation"].argmax(-1))

    collector = VectorCollector(guess(), answer, steps_per_env=4)
    assert collector.collect()["next", "reward"].eq(1).all()
    assert collector.collect()["next", "reward"].eq(1).all()


def test_fast_path_supports_all_kinds_of_spaces():
    class Repeats(ManySpaces):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=7 if seed is None else seed)

    # All copies draw from one space, so one collector has to be done before the other begins.
    fast, plain = fast_and_plain(lambda: make_env(Repeats, 3), make_actor)
    one, other = [[collector.collect() for _ in range(3)] for collector in (fast, plain)]
    for a, b in zip(one, other):
        assert [key for key in a.keys(True, True) if not torch.equal(a[key], b[key])] == []
    assert runner_of(fast).replays


# ---------------------------------------------------------------------- the reason
def deciding(env):
    """A policy that decides on the host."""

    def choose(observation):
        return observation.argmax(-1) if observation.sum() > 0 else observation.argmin(-1)

    return TensorDictModule(choose, ["observation"], ["action"])


def test_host_dependent_policy_runs_as_module_and_warns_once():
    fast, plain = fast_and_plain(guess, deciding)
    with pytest.warns(UserWarning, match="runs eagerly: it reads a tensor on the host at"):
        assert_same_batches(fast, plain, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_batches(fast, plain, 2)
    assert "observation.sum() > 0" in runner_of(fast).plain_reason
    assert not runner_of(fast).replays


def test_host_dependent_plain_module_runs_as_module():
    class Deciding(nn.Module):
        def forward(self, tensordict):
            best = tensordict["observation"].argmax(-1)
            return tensordict.set("action", best if best.sum() > 3 else 2 - best)

    fast, plain = fast_and_plain(guess, lambda env: Deciding())
    with pytest.warns(UserWarning, match="runs eagerly: it reads a tensor on the host at"):
        assert_same_batches(fast, plain, 2)
    assert fast.policy_path.name == "module"


def test_stateful_policy_runs_as_module():
    def changing(env):
        calls = []

        def choose(observation):
            calls.append(None)
            return torch.full((3,), len(calls) % 3)

        return TensorDictModule(choose, ["observation"], ["action"])

    collector = VectorCollector(guess(), changing(None), steps_per_env=8)
    with pytest.warns(UserWarning, match="changes its own attributes"):
        collector.collect()
    numbers = collector.collect()["action"][0]
    assert (numbers[1:] - numbers[:-1]).remainder(3).eq(1).all()


def test_policy_function_uses_current_closure_values():
    chosen = {"action": 0}

    def choose(tensordict):
        numbers = torch.zeros_like(tensordict["observation"][:, 0]).long() + chosen["action"]
        return tensordict.set("action", numbers)

    collector = VectorCollector(guess(), choose, steps_per_env=8)
    for action in (0, 2, 1):
        chosen["action"] = action
        assert collector.collect()["action"].unique().tolist() == [action]
    assert collector.policy_path.name == "program"


def test_policy_with_undeclared_outputs_resumes():
    class Scored(TensorDictModuleBase):
        in_keys, out_keys = ("observation",), ("action",)

        def forward(self, tensordict):
            score = tensordict["observation"].sum(-1)
            return tensordict.set("score", score).set("action", (score > 0.5).long())

    whole, resumed = (VectorCollector(guess(), Scored(), steps_per_env=1) for _ in range(2))
    whole.collect()
    resumed.load_state_dict(whole.state_dict())
    assert_same_batches(resumed, whole)


def test_policy_runs_as_module_without_warning_when_requested():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector = VectorCollector(guess(), deciding(None), steps_per_env=4, fast_policy=False)
        collector.collect()
    assert collector.policy_path == ("module", "fast_policy='module'")


# ---------------------------------------------------------------------- looking without acting
def test_policy_runner_peek_has_no_side_effects():
    env = guess()
    runner = PolicyRunner(make_actor(env), ["observation"], 3)
    seen = {"observation": torch.rand(3, 3)}
    with torch.no_grad():
        before = torch.get_rng_state()
        peeked = runner.peek(seen)
        assert torch.equal(before, torch.get_rng_state())
        for one, other in zip(peeked, runner(seen), strict=True):
            assert torch.equal(one, other)


# ---------------------------------------------------------------------- what is no policy
def test_policy_exception_is_raised_unchanged():
    def fails(tensordict):
        raise RuntimeError("no more film")

    with pytest.raises(RuntimeError, match=r"^no more film$"):
        VectorCollector(guess(), fails, steps_per_env=2).collect()


def test_random_actions_use_module_path():
    path = VectorCollector(guess(), None, steps_per_env=2).policy_path
    assert path == ("module", "actions are random")


def test_collector_rejects_policy_with_observation_out_key():
    env = make_env("CartPole-v1", 2)
    scaled = TensorDictModule(nn.Identity(), in_keys=["observation"], out_keys=["observation"])
    policy = TensorDictSequential(scaled, make_actor(env))
    with raises_setting("policy"):
        VectorCollector(env, policy, steps_per_env=4)


def acting(**written):
    """A policy that does not declare what it writes."""

    def policy(tensordict):
        tensordict["action"] = torch.zeros(tensordict.batch_size, dtype=torch.long)
        for key, value in written.items():
            tensordict[tuple(key.split("_", 1)) if "_" in key else key] = value
        return tensordict

    return policy


@pytest.mark.parametrize(
    "written",
    [
        {"observation": torch.zeros(3, 3)},
        {"next_observation": torch.zeros(3, 3)},
        {"next_reward": torch.zeros(3, 1)},
        {"next_done": torch.ones(3, 1, dtype=torch.bool)},
        {"collector_mask": torch.zeros(3, dtype=torch.bool)},
    ],
)
@pytest.mark.parametrize("declares", [True, False])
def test_collector_rejects_policy_writing_env_entries(written, declares):
    policy = acting(**written)
    if declares:
        names = [tuple(one.split("_", 1)) if "_" in one else one for one in written]
        policy = TensorDictModule(lambda _: (0, *written.values()), [], ["action", *names])
    with raises_setting("policy"):
        VectorCollector(guess(), policy, steps_per_env=2).collect()


def test_collector_rejects_in_place_observation_change():
    def policy(tensordict):
        tensordict["observation"].mul_(2)
        return acting()(tensordict)

    with raises_setting("policy"):
        VectorCollector(guess(), policy, steps_per_env=2).collect()


def test_collector_accepts_bfloat16_log_prob():
    network = nn.Sequential(nn.Linear(3, 2), Coarse())
    action = TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])
    log_prob = TensorDictModule(network, in_keys=["observation"], out_keys=["action_log_prob"])
    policy = TensorDictSequential(action, log_prob)
    batch = VectorCollector(guess("continuous"), policy, steps_per_env=2).collect()
    assert batch["action_log_prob"].dtype is torch.bfloat16


class Coarse(nn.Module):
    def forward(self, x):
        return x.to(torch.bfloat16)


def test_policy_may_write_custom_next_entry():
    batch = VectorCollector(guess(), acting(next_guess=torch.ones(3, 1)), steps_per_env=2).collect()
    assert (batch["next", "guess"] == 1).all()
