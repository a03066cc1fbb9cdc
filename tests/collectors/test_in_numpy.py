"""Policies in NumPy: the same actions and numbers as PyTorch's but for rounding, or PyTorch's."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.nn import functional
from torchrl.envs.utils import ExplorationType
from torchrl.modules import EGreedyModule, ProbabilisticActor, QValueActor

from kit.collectors import VectorCollector
from kit.collectors.in_numpy import NotInNumpy, NumpyProgram
from kit.collectors.in_numpy.operations import OPERATIONS
from kit.envs import make_env
from kit.fast.old_trace import trace
from kit.modules import make_actor
from tests.collectors.test_policy import ACTIONS, counting, dropping, guess, runner_of
from tests.tiny import Guess

# ---------------------------------------------------------------------- every operation
ROWS, COLUMNS = 3, 4
WEIGHT, BIAS = torch.randn(COLUMNS, 5), torch.randn(5)
COLUMN, SCALE = torch.randn(COLUMNS), torch.rand(COLUMNS) + 0.5

EXAMPLES = {
    "pointwise functions": lambda x: (
        x.tanh() + x.exp() + x.abs().log() - x.neg() + x.abs().sqrt() + x.square() + x.sin()
        + x.cos() + x.expm1() + x.abs().log1p() + x.floor() + x.sign() + x.reciprocal()
    ),
    "with tensors": lambda x: (
        x.add(COLUMN, alpha=2) * x.sub(COLUMN, alpha=2) / SCALE + torch.minimum(x, COLUMN)
        + torch.maximum(x, COLUMN) + torch.rsub(x, COLUMN)
        + torch.addcmul(x, COLUMN, SCALE, value=3)
    ),
    "with numbers": lambda x: torch.rsub(3 * x + 1 - x / 2, 1) + x**2 + x.abs() ** 1.5,
    "a column of fewer dimensions": lambda x: x.sum(-1).unsqueeze(-1) * x + x.sum(0),
    "a vector and a matrix": lambda x: x.t().sum(-1) * x + x.mean(1, keepdim=True),
    "rectifiers": lambda x: (
        x.relu() + functional.elu(x) + functional.silu(x) + functional.softplus(x) + x.sigmoid()
        + functional.hardtanh(x, -0.5, 0.5)
    ),
    "bounds": lambda x: (
        x.clamp(-0.5, 0.5) + x.clamp(min=-COLUMN.abs()) + x.clamp_min(0.1) + x.clamp_max(0.2)
    ),
    "layers": lambda x: torch.addmm(BIAS, x, WEIGHT).mm(WEIGHT.t()),
    "normalised layers": lambda x: functional.layer_norm(x, (COLUMNS,), SCALE, COLUMN),
    "normalised without weights": lambda x: functional.layer_norm(x, (COLUMNS,)),
    "softmax": lambda x: x.softmax(-1) + x.log_softmax(1) + x.logsumexp(-1, keepdim=True),
    "sums": lambda x: x.sum(0) + x.sum() + x.mean((0, 1)) + x.sum((0,), keepdim=True)[0],
    "choices": lambda x: x.gather(1, x.argmax(-1, keepdim=True)).squeeze(1),
    "another dimension": lambda x: x.gather(0, x.argmax(0).unsqueeze(0)).squeeze((0,)),
    "comparisons": lambda x: torch.where(
        ((x > 0) & (x >= COLUMN)) | (x < -1) | ~(x <= -COLUMN), x, -x
    ).masked_fill(x == 0, 7.0),
    "more comparisons": lambda x: (
        ((x < COLUMN).logical_and(x != 0)).logical_or((x > COLUMN).logical_not()).float()
        + ((x <= COLUMN) & (x == COLUMN)).double().float() + (x != COLUMN).long().float()
        + (x >= 1).int().float() + (x <= 1).float() + (x < 1).float() + (x > 1).float()
    ),
    "turned": lambda x: (
        x + x.exp().transpose(0, 1).sum(-1) + (2 * x.permute(1, 0)).sum(-1)
        + x.unsqueeze(0).sin().permute(2, 0, -2).sum(-1).sum(-1)
    ),
    "joining": lambda x: torch.cat((x, -x), -1) + torch.cat((x.exp(), x), 1),
    "stacking": lambda x: torch.stack((x, -x), -1).sum(1) + torch.stack((x, x), 0).sum(-1).t(),
    "parts": lambda x: (
        x[:, :2] + x[..., 1::2] + x.split(2, -1)[1] + x.split([2, 2], 1)[0] + x[:, 3:] + x[:, :1]
    ),
    "rows and columns": lambda x: x[1] + x[:, 2:3] + x.unbind(-1)[1].unsqueeze(-1) + x[-1],
    "shapes": lambda x: (
        x.view(ROWS, 1, 2, 2).squeeze().sum(-1).sum(-1, keepdim=True) + x[:1].expand(ROWS, -1)
        + (x.unsqueeze(0) @ WEIGHT).sum(-1).squeeze(0).unsqueeze(-1) + x.t().clone().t()
    ),
}  # fmt: skip
"""Functions of a matrix, which together make every operation of the table."""


def program_of(function, x):
    with torch.no_grad():
        traced, _ = trace(function, [x.clone()], keep=True)
    return traced, NumpyProgram(traced.recorded, ["x"], {"action": 0})


def run(program, x):
    """Make all steps of ``x``; return actions and outputs."""
    given = np.full_like(x, np.nan)
    program.begin({"x": given}, len(x))
    actions, steps = [], program.steps()
    for number, row in enumerate(x):
        given[number] = row
        actions.append(next(steps)["action"].copy())
    return np.stack(actions), program.finish()


def assert_close(found, wanted):
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_an_operation_gives_what_pytorch_gives_in_its_step_and_for_all_steps_at_once(name):
    function = EXAMPLES[name]
    torch.manual_seed(0)
    x = torch.randn(5, ROWS, COLUMNS)
    wanted = torch.stack([function(row) for row in x]).numpy()
    _, in_step = program_of(lambda row: [function(row)], x[0])
    actions, (outputs,) = run(in_step, x.numpy())
    assert_close(actions, wanted)
    assert_close(outputs, wanted)
    _, at_once = program_of(lambda row: [row + 1, function(row)], x[0])
    actions, (_, outputs) = run(at_once, x.numpy())
    assert_close(actions, (x + 1).numpy())
    assert_close(outputs, wanted)


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_an_operation_on_random_numbers_is_made_ahead_with_pytorchs_numbers(name):
    function = EXAMPLES[name]

    def noisy(row):
        return [row + 1, function(torch.randn_like(row))]

    x = torch.zeros(5, ROWS, COLUMNS)
    _, program = program_of(noisy, x[0])
    torch.manual_seed(1)
    _, (_, outputs) = run(program, x.numpy())
    after = torch.get_rng_state()
    torch.manual_seed(1)
    wanted = torch.stack([noisy(row)[1] for row in x]).numpy()
    assert_close(outputs, wanted)
    assert torch.equal(after, torch.get_rng_state())


def test_the_examples_make_every_operation_of_the_table():
    made = set()
    for function in EXAMPLES.values():
        traced, _ = program_of(lambda row, function=function: [function(row)], torch.randn(3, 4))
        made |= {name.removeprefix("aten.") for name in traced.operations}
    assert set(OPERATIONS) - made == set()


def test_only_what_leads_to_the_action_is_made_in_a_step():
    def policy(x):
        loc = torch.addmm(BIAS, x, WEIGHT)
        noise = torch.randn(ROWS, 5)
        log_prob = -(noise * noise + SCALE.log().sum()).sum(-1)
        return [loc + noise, loc.softmax(-1), log_prob]

    _, program = program_of(policy, torch.randn(ROWS, COLUMNS))
    assert len(program._calls) == 3  # product, bias, noise


# ---------------------------------------------------------------------- policies
def exact_and_numpy(env_of, policy_of, **settings):
    found = []
    for exact in (True, False):
        torch.manual_seed(0)
        env = env_of()
        settings = {"steps_per_env": 5, **settings}
        found.append(VectorCollector(env, policy_of(env), exact_policy=exact, **settings))
    return found


def assert_same_but_for_rounding(exact, other, count=3):
    for _ in range(count):
        wanted, found = exact.collect(), other.collect()
        assert set(wanted.keys(True, True)) == set(found.keys(True, True))
        for key in wanted.keys(True, True):
            assert found[key].dtype == wanted[key].dtype
            if wanted[key].is_floating_point():
                assert torch.allclose(found[key], wanted[key], rtol=1e-4, atol=1e-5), key
            else:
                assert torch.equal(found[key], wanted[key]), key
    assert runner_of(other).in_numpy is not None, runner_of(other).numpy_reason
    assert runner_of(exact).in_numpy is None


@pytest.mark.parametrize("kind", list(ACTIONS))
@pytest.mark.parametrize("dict_observation", [False, True])
def test_policies_for_all_kinds_of_actions_write_the_same(kind, dict_observation):
    pair = exact_and_numpy(lambda: guess(kind, 3, dict_observation), make_actor)
    assert_same_but_for_rounding(*pair)


@pytest.mark.parametrize("activation", ["tanh", "sigmoid_tanh", "relu", "elu", "silu"])
def test_activations(activation):
    pair = exact_and_numpy(guess, lambda env: make_actor(env, activation=activation))
    assert_same_but_for_rounding(*pair)


def test_squashed_actions():
    def actor(env):
        return make_actor(env, continuous="tanh_normal")

    assert_same_but_for_rounding(*exact_and_numpy(lambda: guess("continuous"), actor))


@pytest.mark.parametrize("kind", list(ACTIONS))
def test_the_likeliest_actions(kind):
    settings = {"exploration_type": ExplorationType.DETERMINISTIC}
    assert_same_but_for_rounding(*exact_and_numpy(lambda: guess(kind), make_actor, **settings))


def test_action_values_with_random_actions_now_and_then():
    def policy(env):
        network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
        greedy = QValueActor(network, in_keys=["observation"], action_space="categorical")
        spec = env.full_action_spec_unbatched["action"]
        return TensorDictSequential(greedy, EGreedyModule(spec, eps_init=0.5, eps_end=0.5))

    assert_same_but_for_rounding(*exact_and_numpy(guess, policy))


def test_random_numbers_go_on_as_with_pytorch():
    exact, other = exact_and_numpy(lambda: guess("dict"), make_actor)
    for _ in range(3):
        exact.collect(), other.collect()
        states = [c._random_numbers.state_dict()["state"] for c in (exact, other)]
        assert torch.equal(*states)


def test_the_first_batch_is_rounded_like_the_others():
    one, other = [exact_and_numpy(guess, make_actor)[1] for _ in range(2)]
    one.collect()
    other.load_state_dict(one.state_dict())
    expected, found = one.collect(), other.collect()
    assert [k for k in expected.keys(True, True) if not torch.equal(expected[k], found[k])] == []


def test_tracing_ahead_changes_nothing():
    exact, other = exact_and_numpy(guess, counting)
    for _ in range(2):
        assert torch.equal(exact.collect()["calls"], other.collect()["calls"])


@pytest.mark.parametrize("names", [("weight", "bias"), ("bias",)])
@pytest.mark.parametrize("change", ["in place", "data", "another"])
def test_what_the_learner_changes_is_seen(change, names):
    pair = exact_and_numpy(guess, make_actor)
    for _ in range(3):
        assert_same_but_for_rounding(*pair, count=2)
        for collector in pair:
            for module in collector.policy.modules():
                if isinstance(module, nn.Linear):
                    for name in names:
                        value = getattr(module, name)
                        if change == "in place":
                            value.data.mul_(2.0).add_(0.1)
                        elif change == "data":
                            value.data = value.data * 2.0 + 0.1
                        else:
                            setattr(module, name, nn.Parameter(value.detach() * 2.0 + 0.1))


def test_a_module_that_is_put_into_another_mode_is_noticed():
    pair = exact_and_numpy(guess, dropping)
    for collector in pair:
        collector.collect()
        collector.policy.eval()
    assert_same_but_for_rounding(*pair)


def test_batches_share_no_memory():
    collector = exact_and_numpy(lambda: guess("continuous"), make_actor)[1]
    first = collector.collect()
    kept = first.clone()
    collector.collect()
    assert [key for key in kept.keys(True, True) if not torch.equal(kept[key], first[key])] == []
    places = [value.untyped_storage().data_ptr() for value in first.values(True, True)]
    written = [first[key].untyped_storage().data_ptr() for key in ("loc", "scale", "action")]
    assert all(places.count(place) == 1 for place in written)


# ---------------------------------------------------------------------- where NumPy is not used
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 512), nn.Tanh(), nn.Linear(512, 512))

    def forward(self, observation):
        return self.layers(observation)[..., :3]


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(1, 3, 3)

    def forward(self, observation):
        return self.layer(observation.unsqueeze(1)).squeeze(-1)


REFUSED = {
    "a large product": (Wide(), "product of 3 x 512 x 512 is so large"),
    "another operation": (Convolution(), "convolution.default is not among the operations"),
    "its own random choice": (
        nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1)), "draws what depends on an observation",
    ),
}  # fmt: skip


def test_the_random_numbers_of_pytorchs_categorical_policies_are_drawn_apart():
    def policy(env):
        logits = TensorDictModule(nn.Linear(3, 3), ["observation"], ["logits"])
        return ProbabilisticActor(
            logits,
            ["logits"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )

    assert_same_but_for_rounding(*exact_and_numpy(guess, policy))


@pytest.mark.parametrize("what", list(REFUSED))
def test_a_policy_that_is_not_for_numpy_stays_with_pytorch_bit_by_bit(what):
    module, reason = REFUSED[what]

    def policy(env):
        logits = TensorDictModule(module, ["observation"], ["logits"])
        drawn = what == "its own random choice"
        choose = (lambda p: p.bernoulli().argmax(-1)) if drawn else (lambda p: p.argmax(-1))
        return TensorDictSequential(logits, TensorDictModule(choose, ["logits"], ["action"]))

    exact, other = exact_and_numpy(guess, policy)
    for _ in range(2):
        one, two = exact.collect(), other.collect()
        assert [key for key in one.keys(True, True) if not torch.equal(one[key], two[key])] == []
    assert runner_of(other).in_numpy is None
    assert reason in runner_of(other).numpy_reason
    assert runner_of(other).replays


def test_a_policy_that_is_not_for_numpy_is_tried_once(monkeypatch):
    tried = []

    def refuse(*arguments):
        tried.append(arguments)
        raise NotInNumpy("not today")

    monkeypatch.setattr("kit.collectors.policy.NumpyProgram", refuse)
    collector = VectorCollector(guess(), make_actor(guess()), steps_per_env=3)
    for _ in range(3):
        collector.collect()
    assert len(tried) == 1
    assert runner_of(collector).numpy_reason == "not today"


def test_an_operation_that_gives_something_else_is_found_out(monkeypatch):
    wrong = {**OPERATIONS, "tanh.default": OPERATIONS["exp.default"]}
    monkeypatch.setattr("kit.collectors.in_numpy.operations.OPERATIONS", wrong)
    with pytest.raises(NotInNumpy, match="other results"):
        program_of(lambda x: [x.tanh()], torch.randn(3, 4))


def test_copies_in_worker_processes_are_acted_in_by_numpy_too():
    space = gym.spaces.Discrete(3)
    env = make_env(Guess, 2, vectorization="async", num_workers=1, action_space=space)
    collector = VectorCollector(env, make_actor(env), steps_per_env=3)
    collector.collect()
    assert runner_of(collector).in_numpy is not None
    collector.shutdown()


def test_tracing_ahead_leaves_plain_attributes_as_they_were():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.number = 0

        def forward(self, observation):
            self.number += 1
            return observation.argmax(-1)

    policy = TensorDictModule(Counting(), ["observation"], ["action"])
    collector = VectorCollector(guess(), policy, steps_per_env=4)
    collector.collect()
    assert runner_of(collector).in_numpy is not None
    assert policy.module.number == 0
