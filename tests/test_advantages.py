"""Advantages: those of the paper, and TorchRL's numbers without its reads on the host."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn
from torchrl.modules import ValueOperator
from torchrl.objectives import value as torchrl_value
from torchrl.objectives.value.functional import vtrace_advantage_estimate

from kit.advantages import (
    GAE,
    AdvantageNormalizer,
    RewardToGo,
    VTrace,
    discounted_suffix_sums,
    generalized_advantages,
)
from kit.buffers import make_replay_buffer
from kit.envs import make_env
from kit.trainer import Trainer
from tests.errors import raises_setting
from tests.losses import discrete_actor, transitions
from tests.losses import value as critic
from tests.tiny import on_policy_plan, ppo_parts

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 40))


def network(double: bool = False) -> ValueOperator:
    value = ValueOperator(
        nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), ["observation"]
    )
    return value.double() if double else value


def batch_of(num_envs: int, steps: int, seed: int = 0, ends: float = 0.2) -> TensorDict:
    """A batch with terminated and truncated episodes, in double precision."""
    generator = torch.Generator().manual_seed(seed)

    def flags(share: float) -> torch.Tensor:
        return torch.rand(num_envs, steps, 1, generator=generator) < share

    terminated, truncated = flags(ends), flags(ends)
    numbers = torch.randn(2, num_envs, steps, 3, generator=generator, dtype=torch.float64)
    following = {
        "observation": numbers[1], "terminated": terminated, "truncated": truncated & ~terminated,
        "done": terminated | truncated,
        "reward": torch.randn(num_envs, steps, 1, generator=generator, dtype=torch.float64),
    }  # fmt: skip
    return TensorDict({"observation": numbers[0], "next": following}, [num_envs, steps])


def continued(batch: TensorDict) -> TensorDict:
    """The batch with the next observation of each step that of the step after, as collected."""
    ended, following = batch["next", "done"][:, :-1], batch["next", "observation"][:, :-1]
    following.copy_(torch.where(ended, following, batch["observation"][:, 1:]))
    return batch


# ---------------------------------------------------------------------- the recursion
@given(SIZES, st.integers(0, 1000))
@settings(max_examples=50)
def test_suffix_sums_match_recursion(size, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*size, generator=generator, dtype=torch.float64)
    factors = torch.rand(*size, generator=generator, dtype=torch.float64)
    factors[torch.rand(*size, generator=generator) < 0.2] = 0.0
    expected, following = torch.empty_like(values), torch.zeros(size[0], dtype=torch.float64)
    for t in reversed(range(size[1])):
        following = expected[:, t] = values[:, t] + factors[:, t] * following
    torch.testing.assert_close(discounted_suffix_sums(values, factors), expected)


@given(
    SIZES, st.integers(0, 1000), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.8, 1.0])
)
@settings(max_examples=60)
def test_advantages_match_sums_of_paper(size, seed, gamma, lmbda):
    batch = batch_of(*size, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    value, following = torch.randn(2, *size, generator=generator, dtype=torch.float64)
    reward, done, terminated = (
        batch["next", name].squeeze(-1) for name in ("reward", "done", "terminated")
    )
    found = generalized_advantages(reward, value, following, done, terminated, gamma, lmbda)
    for env in range(size[0]):
        for start in range(size[1]):
            total = 0.0
            for t in range(start, size[1]):
                bootstrap = 0.0 if terminated[env, t] else gamma * float(following[env, t])
                delta = float(reward[env, t]) + bootstrap - float(value[env, t])
                total += (gamma * lmbda) ** (t - start) * delta
                if done[env, t]:
                    break
            assert float(found[env, start]) == pytest.approx(total, abs=1e-9)


# ---------------------------------------------------------------------- TorchRL's class
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (4, 32), (3, 33)])
def test_gae_matches_torchrl(shape):
    value = network(double=True)
    settings = {"gamma": 0.97, "lmbda": 0.9, "value_network": value}
    expected = torchrl_value.GAE(**settings)(batch_of(*shape))
    estimator = GAE(**settings)
    for _ in range(3):  # traced, replayed, replayed
        found = estimator(batch_of(*shape))
        for key in ("advantage", "value_target", "state_value", ("next", "state_value")):
            torch.testing.assert_close(found[key], expected[key], rtol=1e-9, atol=1e-11)
            assert not found[key].requires_grad


def test_gae_discounts_n_step_transitions_like_torchrl():
    value, batch = network(double=True), batch_of(2, 5)
    batch["steps_to_next_obs"] = torch.randint(1, 4, batch["next", "reward"].shape)
    settings = {"gamma": 0.9, "lmbda": 0.8, "value_network": value}
    expected = torchrl_value.GAE(**settings)(batch.clone())
    torch.testing.assert_close(GAE(**settings)(batch.clone())["advantage"], expected["advantage"])


def test_replayed_gae_uses_changed_discount_and_weights():
    estimator = GAE(gamma=0.9, lmbda=0.9, value_network=network(double=True))
    for _ in range(3):
        estimator(batch_of(2, 5))
    estimator.gamma.fill_(0.5)
    estimator.lmbda.fill_(0.7)
    linear = estimator.value_network.module[0]
    linear.weight = nn.Parameter(torch.randn_like(linear.weight))
    expected = torchrl_value.GAE(gamma=0.5, lmbda=0.7, value_network=estimator.value_network)
    torch.testing.assert_close(
        estimator(batch_of(2, 5))["advantage"], expected(batch_of(2, 5))["advantage"]
    )


def test_gae_accepts_custom_keys():
    estimator = GAE(gamma=0.9, lmbda=0.9, value_network=network(double=True))
    estimator.set_keys(advantage="a", value_target="target", reward="r", done="d", terminated="t")
    batch, other = batch_of(2, 5), batch_of(2, 5)
    for old, new in (("reward", "r"), ("done", "d"), ("terminated", "t")):
        other.rename_key_(("next", old), ("next", new))
    usual = GAE(gamma=0.9, lmbda=0.9, value_network=estimator.value_network)(batch)
    found = estimator(other)
    assert torch.equal(found["a"], usual["advantage"])
    assert torch.equal(found["target"], usual["value_target"])


def of_agents(count: int, num_envs: int = 2, steps: int = 7) -> tuple[TensorDict, list[TensorDict]]:
    """A batch whose entries are ``[num_envs, steps, agents, ...]``, and that of each agent."""
    alone = [batch_of(num_envs, steps, seed) for seed in range(count)]
    stacked = torch.stack([one.clone() for one in alone], 2)
    stacked.batch_size = stacked["next"].batch_size = [num_envs, steps]
    return stacked, alone


KINDS = {
    "lambda": lambda value: GAE(gamma=0.9, lmbda=0.8, value_network=value),
    "torchrl": lambda value: torchrl_value.GAE(gamma=0.9, lmbda=0.8, value_network=value),
    "n steps": lambda value: GAE(gamma=0.9, n_step=3, value_network=value),
    "no baseline": lambda value: RewardToGo(gamma=0.9),
}


@pytest.mark.parametrize("kind", KINDS)
def test_estimators_use_own_rewards_of_each_agent(kind):
    estimator = KINDS[kind](network(double=True))
    batch, alone = of_agents(3)
    found = estimator(batch)
    for agent, own in enumerate(alone):
        for key in ("advantage", "value_target"):
            torch.testing.assert_close(found[key][:, :, agent], estimator(own)[key])


def test_vtrace_uses_action_ratio_of_each_agent():
    actor, value = discrete_actor(), critic()
    joint, alone = [], []
    for agent in range(3):
        rows = transitions(10, "choice", seed=agent).reshape(2, 5)
        alone.append(VTrace(gamma=0.9, value_network=value, actor_network=actor)(rows))
        joint.append(rows.select("observation", "action", "action_log_prob", "next"))
    batch = torch.stack(joint, 2)
    batch.batch_size = batch["next"].batch_size = [2, 5]
    found = VTrace(gamma=0.9, value_network=value, actor_network=actor)(batch)
    for agent, own in enumerate(alone):
        torch.testing.assert_close(found["advantage"][:, :, agent], own["advantage"])


def test_normalizer_ignores_padding_of_several_agents():
    advantage, mask = torch.randn(2, 5, 3, 1), torch.ones(2, 5, dtype=torch.bool)
    mask[1, 2:] = False
    found = AdvantageNormalizer("batch")(advantage, mask)
    assert not found[1, 2:].any()
    torch.testing.assert_close(found[mask].std(), torch.ones(()))


@pytest.mark.parametrize(
    "make",
    [
        lambda value: GAE(gamma=0.9, lmbda=0.8, value_network=value),
        lambda value: GAE(gamma=0.9, n_step=3, value_network=value, standardize="batch"),
        lambda _: RewardToGo(gamma=0.9),
    ],
)
def test_estimators_use_dimension_named_time(make):
    estimator, batch = make(network(double=True)), batch_of(4, 5)
    batch.names = [None, "time"]
    swapped = batch.transpose(0, 1).contiguous()
    expected = estimator(batch)["advantage"]
    assert torch.allclose(estimator(swapped)["advantage"].transpose(0, 1), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda gamma: GAE(gamma=gamma, value_network=network()),
        lambda gamma: RewardToGo(gamma=gamma),
        lambda gamma: make_replay_buffer(100, 8, n_step=3, gamma=gamma),
        lambda gamma: make_env("CartPole-v1", normalize_reward=True, gamma=gamma),
    ],
)
def test_components_reject_discount_out_of_range(make):
    with raises_setting("gamma"):
        make(99)


# ---------------------------------------------------------------------- batches of one dimension
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (GAE, {"lmbda": 0.9}),
        (GAE, {"n_step": 2}),
        (GAE, {"standardize": "batch"}),
        (RewardToGo, {"standardize": "batch"}),
        (VTrace, {"max_rho": 0.5, "max_c": 0.5}),
        (VTrace, {"standardize": "batch"}),
    ],
)
def test_estimators_treat_flat_batch_as_one_row(kind, settings):
    torch.manual_seed(0)
    if kind is not RewardToGo:
        settings = settings | {"value_network": critic().double()}
    if kind is VTrace:
        settings = settings | {"actor_network": discrete_actor().double()}
    row, estimator = choices_of(1, 17), kind(gamma=0.875, **settings)
    expected = kind(gamma=0.875, **settings)(row.clone())[0]
    for _ in range(3):  # recorded, compared, replayed
        found = estimator(row[0].clone())
        for key in ("advantage", "value_target"):
            torch.testing.assert_close(found[key], expected[key])


def test_gae_keeps_one_program_for_flat_batches_of_any_length():
    estimator = GAE(gamma=0.9, value_network=network(double=True), n_step=2)
    for steps in range(1, 31):
        batch = estimator(batch_of(1, steps)[0])
        assert estimator._traced.programs <= 1
        assert batch["advantage"].shape == (steps, 1)


def test_gae_calls_untraceable_network_eagerly():
    class Deciding(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2.0 if float(x.mean()) > 0 else 1.0)

    value = ValueOperator(Deciding(3, 1).double(), ["observation"])
    estimator = GAE(gamma=0.9, lmbda=0.8, value_network=value)
    for seed in range(4):
        batch = batch_of(2, 5, seed)
        values = [value.module(b["observation"]).squeeze(-1) for b in (batch, batch["next"])]
        ends = [batch["next", name].squeeze(-1) for name in ("reward", "done", "terminated")]
        discounts = (estimator.gamma, estimator.lmbda)
        expected = generalized_advantages(ends[0], *values, *ends[1:], *discounts)
        torch.testing.assert_close(estimator(batch)["advantage"].squeeze(-1), expected)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.GroupNorm(1, 3), nn.Flatten()])
def test_gae_passes_rows_to_layers_that_require_them(layer):
    value = ValueOperator(nn.Sequential(layer, nn.Linear(3, 1)).double(), ["observation"])
    batch = batch_of(4, 3)  # as many steps as features, which nothing would notice
    rows = batch["observation"].flatten(0, 1)
    expected = value.module(rows).unflatten(0, (4, 3))
    found = GAE(gamma=0.9, value_network=value)(batch)["state_value"]
    torch.testing.assert_close(found, expected)


# ---------------------------------------------------------------------- Monte-Carlo returns
def returns_of(batch: TensorDict, gamma: float, following: torch.Tensor | None) -> torch.Tensor:
    """Step by step, in double precision; ``following`` is the value of the next observation."""
    shape = batch.shape
    reward, done, terminated = (
        batch["next", key].reshape(shape) for key in ("reward", "done", "terminated")
    )
    returns = torch.zeros(shape, dtype=torch.float64)
    for env in range(shape[0]):
        for t in reversed(range(shape[1])):
            later = torch.zeros(())
            if not done[env, t] and t + 1 < shape[1]:
                later = returns[env, t + 1]
            elif following is not None and not terminated[env, t]:
                later = following[env, t]
            returns[env, t] = reward[env, t] + gamma * later
    return returns


@given(SIZES, st.integers(0, 1000), st.sampled_from([0.0, 0.875, 1.0]))
@settings(max_examples=50)
def test_reward_to_go_matches_discounted_returns(size, seed, gamma):
    batch = batch_of(*size, seed=seed)
    given = batch.clone()
    RewardToGo(gamma=gamma)(batch)
    expected = returns_of(given, gamma, None).unsqueeze(-1)
    torch.testing.assert_close(batch["advantage"], expected)
    torch.testing.assert_close(batch["value_target"], expected)


@given(SIZES, st.integers(0, 1000), st.sampled_from([0.0, 0.875, 1.0]))
@settings(max_examples=30)
def test_gae_subtracts_baseline_and_bootstraps_truncated_returns(size, seed, gamma):
    torch.manual_seed(seed)
    batch, value = batch_of(*size, seed=seed), network(double=True)
    continued(batch)
    following = value(batch["next"].clone())["state_value"].detach().squeeze(-1)
    expected = returns_of(batch, gamma, following).unsqueeze(-1)
    GAE(gamma=gamma, value_network=value)(batch)
    torch.testing.assert_close(batch["value_target"], expected)
    baseline = value(batch.clone())["state_value"]
    torch.testing.assert_close(batch["advantage"], expected - baseline)
    assert not batch["advantage"].requires_grad


@pytest.mark.parametrize("over", [None, {"standardize": "batch"}])
def test_padding_affects_neither_returns_nor_normalisation(over):
    torch.manual_seed(0)
    lengths, steps = [3, 7, 5], 7
    batch = batch_of(3, steps, ends=0.0)
    mask = torch.arange(steps) < torch.tensor(lengths).unsqueeze(-1)
    for env, length in enumerate(lengths):
        for name in ("done", "terminated"):
            batch["next", name][env, length - 1] = True
    batch["collector", "mask"] = mask
    polluted = batch.clone()
    polluted["next", "reward"][~mask] = 1e6
    if over:
        estimate = GAE(gamma=0.9, value_network=network(double=True), **over)
    else:
        estimate = RewardToGo(gamma=0.9, standardize="batch")
    one, other = estimate(batch)["advantage"][mask], estimate(polluted)["advantage"][mask]
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(one.mean(), torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(one.std(), torch.ones((), dtype=torch.float64))


def test_normalizer_maps_equal_advantages_to_zero():
    batch = batch_of(2, 1)
    batch["next", "reward"].fill_(3.0)
    assert (RewardToGo(gamma=1.0, standardize="batch")(batch)["advantage"] == 0).all()


def test_normalizer_maps_single_advantage_to_zero():
    masks = [None, torch.tensor([[True]]), torch.tensor([[False, True, False]])]
    for mask in masks:
        advantage = torch.full((1, 1 if mask is None else mask.shape[1], 1), 3.0)
        assert (AdvantageNormalizer("batch")(advantage, mask) == 0).all()


# ---------------------------------------------------------------------- n-step returns
@given(SIZES, st.integers(0, 1000), st.integers(1, 45))
@settings(max_examples=40)
def test_n_step_returns_stay_within_episode_and_batch(size, seed, n_step):
    batch, value = batch_of(*size, seed=seed), network(double=True)
    batch = GAE(gamma=0.875, value_network=value, n_step=n_step)(batch)
    reward, done, terminated = (
        batch["next", key].squeeze(-1) for key in ("reward", "done", "terminated")
    )
    following = batch["next", "state_value"].squeeze(-1)
    for env in range(size[0]):
        for start in range(size[1]):
            total = 0.0
            for t in range(start, min(start + n_step, size[1])):
                total += 0.875 ** (t - start) * float(reward[env, t])
                last = t
                if done[env, t]:
                    break
            if not terminated[env, last]:
                total += 0.875 ** (last + 1 - start) * float(following[env, last])
            assert float(batch["value_target"][env, start]) == pytest.approx(total, abs=1e-9)
    torch.testing.assert_close(batch["advantage"], batch["value_target"] - batch["state_value"])


def test_gae_rejects_n_step_with_lambda():
    with raises_setting("n_step"):
        GAE(gamma=0.875, lmbda=0.9, value_network=network(), n_step=5)


# ---------------------------------------------------------------------- V-trace
def choices_of(num_envs: int, steps: int, seed: int = 0) -> TensorDict:
    batch = transitions(num_envs * steps, "choice", seed).reshape(num_envs, steps)
    truncated = torch.rand(num_envs, steps, 1, generator=torch.Generator().manual_seed(seed)) < 0.1
    batch["next", "done"] = batch["next", "terminated"] | truncated
    return batch.apply(lambda entry: entry.double() if entry.is_floating_point() else entry)


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 64)])
@pytest.mark.parametrize(
    ("max_rho", "max_c", "lmbda"), [(1.0, 1.0, 1.0), (1.5, 0.8, 1.0), (1.0, 1.0, 0.7)]
)
def test_vtrace_matches_paper_and_torchrl(shape, max_rho, max_c, lmbda):
    torch.manual_seed(0)
    actor, value = discrete_actor().double(), critic().double()
    settings = {"max_rho": max_rho, "max_c": max_c, "lmbda": lmbda}
    estimator = VTrace(gamma=0.875, value_network=value, actor_network=actor, **settings)
    for _ in range(3):  # recorded, compared, replayed
        found = estimator(choices_of(*shape))
    reward, done, terminated = (
        found["next", key].squeeze(-1) for key in ("reward", "done", "terminated")
    )
    now = actor.get_dist(found.clone()).log_prob(found["action"]).detach()
    ratio = (now - found["action_log_prob"]).exp()
    next_ = found["next"]
    expected = vtrace_advantage_estimate(
        0.875, now.unsqueeze(-1), found["action_log_prob"].unsqueeze(-1), found["state_value"],
        next_["state_value"], next_["reward"], next_["done"], next_["terminated"],
        rho_thresh=max_rho, c_thresh=max_c,
    )  # fmt: skip
    if lmbda == 1.0:  # TorchRL has none
        torch.testing.assert_close((found["advantage"], found["value_target"]), expected)
    values, after = found["state_value"].squeeze(-1), found["next", "state_value"].squeeze(-1)
    for env in range(shape[0]):
        for start in range(shape[1]):
            total, weight = float(values[env, start]), 1.0
            for t in range(start, shape[1]):
                later = 0.0 if terminated[env, t] else 0.875 * float(after[env, t])
                delta = float(reward[env, t]) + later - float(values[env, t])
                total += 0.875 ** (t - start) * weight * min(float(ratio[env, t]), max_rho) * delta
                weight *= lmbda * min(float(ratio[env, t]), max_c)
                if done[env, t]:
                    break
            assert float(found["value_target"][env, start]) == pytest.approx(total, abs=1e-6)


# ---------------------------------------------------------------------- standardisation
def test_running_normalizer_uses_moments_of_all_batches():
    standardizer, seen = AdvantageNormalizer("running"), []
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        advantage = 3 + 2 * torch.randn(4, 7, 1, generator=generator, dtype=torch.float64)
        mask = torch.rand(4, 7, generator=generator) < 0.8
        seen.append(advantage[mask].flatten())
        found = standardizer(advantage, mask)
        every = torch.cat(seen)
        expected = (advantage - every.mean()) / every.std(correction=0)
        torch.testing.assert_close(found[mask], expected[mask])
        assert (found[~mask] == 0).all()


def test_program_and_checkpoint_include_running_normalizer(tmp_path):
    plan = on_policy_plan()

    def trainer() -> Trainer:
        parts = ppo_parts(plan)
        value = parts["advantage"].value_network
        parts["advantage"] = GAE(gamma=0.875, value_network=value, standardize="running")
        return Trainer(plan, **parts, folder=tmp_path)

    first = trainer()
    first.run()
    assert first.advantage._traced.replays
    moments = first.advantage.standardizer.state_dict()
    assert float(moments["count"]) == plan.total_policy_steps
    again = trainer().load(first.last_checkpoint)
    restored = again.advantage.standardizer.state_dict()
    assert all(torch.equal(restored[name], moments[name]) for name in moments)


def test_gae_rejects_unknown_standardization():
    with raises_setting("standardize"):
        GAE(gamma=0.875, value_network=network(), standardize="minibatch")
