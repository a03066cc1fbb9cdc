"""The torch environments as a collector uses them: plain tensors, no host reads, saving."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from kit.envs import make_env
from kit.envs.tensor import (
    TENSOR_ENVS,
    CartPole,
    EpisodeState,
    Pendulum,
    TensorEnv,
    make_tensor_env,
)
from tests.errors import raises_setting

IDS = [id for id in TENSOR_ENVS if "/" not in id]  # without those of kit.testing
every_env = pytest.mark.parametrize("id", IDS)


def random_actions(env, generator):
    if env.num_actions:
        shape = (env.num_envs,)
        return torch.randint(env.num_actions, shape, generator=generator, device=generator.device)
    shape = (env.num_envs, 1)
    return torch.rand(shape, generator=generator, device=generator.device) * 2 - 1


def run(env, num_steps, seed=0):
    """All steps of a run with random actions."""
    generator = torch.Generator(env.device).manual_seed(seed)
    return [env.step_tensors(random_actions(env, generator)) for _ in range(num_steps)]


def assert_equal(ones, others):
    for one, other in zip(ones, others, strict=True):
        for name, a, b in zip(one._fields, one, other, strict=True):
            assert torch.equal(a, b), name


class NoHostReads(TorchDispatchMode):
    """Raises where a tensor's value is read by Python."""

    FORBIDDEN = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "nonzero"})

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        assert name not in self.FORBIDDEN, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


# Plain tensors.


@every_env
def test_step_tensors_returns_expected_shapes_and_dtypes(id):
    env = make_tensor_env(id, 5, seed=0)
    first = env.reset_tensors()
    (step,) = run(env, 1)
    assert first.shape == step.observation.shape == step.next_observation.shape
    assert first.shape == env.observation_spec["observation"].shape
    floats = (step.observation, step.next_observation, step.reward, step.episode_return)
    assert {tensor.dtype for tensor in floats} == {torch.float32}
    assert {tensor.shape for tensor in step[2:]} == {(5,)}
    assert step.terminated.dtype == step.truncated.dtype == torch.bool
    assert step.env_steps.dtype == step.episode_length.dtype == torch.int64


@every_env
@pytest.mark.parametrize("action_repeat", [1, 3])
def test_step_tensors_does_not_read_on_host(id, action_repeat):
    env = make_tensor_env(id, 5, action_repeat=action_repeat, max_episode_steps=4)
    with NoHostReads():
        env.reset_tensors(seed=1)
        run(env, 10)


def test_no_host_reads_guard_detects_item_call():
    with NoHostReads(), pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(()).item()


@every_env
def test_only_finished_envs_reset_and_return_both_observations(id):
    env = make_tensor_env(id, 50, max_episode_steps=20, seed=0)
    observation = env.reset_tensors()
    some_end, total = False, torch.zeros(50)
    for step in run(env, 60):
        done = step.terminated | step.truncated
        assert torch.equal(step.observation[~done], step.next_observation[~done])
        assert (step.observation[done] != step.next_observation[done]).any(-1).all()
        assert not torch.equal(step.next_observation, observation)
        torch.testing.assert_close(total + step.reward, step.episode_return)
        total = torch.where(done, 0.0, step.episode_return)
        assert torch.equal(step.truncated, step.episode_length == 20)
        some_end |= bool(done.any())
        observation = step.observation
    assert some_end


def test_later_steps_leave_returned_tensors_unchanged():
    env = make_tensor_env("CartPole-v1", 5, seed=0)
    first = env.reset_tensors()
    (step,) = run(env, 1)
    kept = [first.clone(), *(tensor.clone() for tensor in step)]
    run(env, 30)
    assert all(torch.equal(a, b) for a, b in zip([first, *step], kept))


def test_env_state_tensors_keep_their_storage():
    env = make_tensor_env("CartPole-v1", 5, max_episode_steps=3)
    where = [tensor.data_ptr() for tensor in env.episodes]
    run(env, 10)
    env.reset_tensors()
    env.rollout(5)
    env.load_state_dict(env.state_dict())
    assert [tensor.data_ptr() for tensor in env.episodes] == where


# Pure functions.


@every_env
def test_advance_is_pure_and_matches_step(id):
    env = make_tensor_env(id, 20, max_episode_steps=3, action_repeat=2, seed=0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        before = EpisodeState(*(tensor.clone() for tensor in env.episodes))
        drawn = env.generator.get_state()
        action, uniform = random_actions(env, generator), env.draw_uniform()
        after, step = env.advance(env.episodes, action, uniform)
        assert_equal([env.episodes], [before])
        env.generator.set_state(drawn)
        assert_equal([env.step_tensors(action)], [step])
        assert_equal([env.episodes], [after])


@every_env
def test_advance_can_be_traced(id):
    env = make_tensor_env(id, 20, max_episode_steps=3, action_repeat=2, seed=0)
    generator = torch.Generator().manual_seed(0)
    actions = [random_actions(env, generator) for _ in range(6)]
    advance = make_fx(lambda *given: env.advance(*given))
    graph = advance(env.episodes, actions[0], env.draw_uniform())
    assert not any("scalar_dense" in str(node.target) for node in graph.graph.nodes)
    for action in actions:
        uniform, before = env.draw_uniform(), env.episodes
        traced, plain = graph(before, action, uniform), env.advance(before, action, uniform)
        assert_equal(plain, [EpisodeState(*traced[0]), type(plain[1])(*traced[1])])
        env.step_tensors(action)


@pytest.mark.nightly
@every_env
def test_advance_can_be_compiled_as_one_graph(id):
    env = make_tensor_env(id, 20, max_episode_steps=3, action_repeat=2, seed=0)
    compiled = torch.compile(env.advance, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        action, uniform = random_actions(env, generator), env.draw_uniform()
        for one, other in zip(
            compiled(env.episodes, action, uniform), env.advance(env.episodes, action, uniform)
        ):
            torch.testing.assert_close(tuple(one), tuple(other), rtol=1e-4, atol=1e-4)
        env.step_tensors(action)


def test_transition_is_differentiable():
    env = Pendulum(3, dtype=torch.float64, seed=0)
    action = torch.tensor([[0.5], [-0.3], [1.0]], dtype=torch.float64, requires_grad=True)
    physics = env.physics.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda *given: env.transition(*given)[:2], (physics, action))


# Seeds and saving.


@every_env
def test_seed_makes_runs_reproducible_and_envs_distinct(id):
    runs = [run(make_tensor_env(id, 30, max_episode_steps=9, seed=5), 25) for _ in range(2)]
    assert_equal(*runs)
    env = make_tensor_env(id, 30, max_episode_steps=9, seed=0)
    env.reset_tensors(seed=5)
    assert len(env.physics.unique(dim=1).T) == 30
    other = make_tensor_env(id, 30, seed=6)
    assert not torch.equal(env.physics, other.physics)
    first = env.physics.clone()
    env.reset_tensors()
    assert not torch.equal(env.physics, first)
    env.reset_tensors(seed=5)
    assert torch.equal(env.physics, first)


def test_default_seed_comes_from_torch_rng():
    torch.manual_seed(1)
    ones = CartPole(4).physics, CartPole(4).physics
    torch.manual_seed(1)
    others = CartPole(4).physics, CartPole(4).physics
    assert torch.equal(ones[0], others[0])
    assert torch.equal(ones[1], others[1])
    assert not torch.equal(*ones)


@every_env
def test_restored_env_continues_bitwise(id, tmp_path):
    env = make_tensor_env(id, 30, max_episode_steps=7, seed=5)
    run(env, 10)
    torch.save(env.state_dict(), tmp_path / "env.pt")
    saved = env.state_dict()
    expected = run(env, 20, seed=1)
    other = make_tensor_env(id, 30, max_episode_steps=7, seed=0)
    other.load_state_dict(torch.load(tmp_path / "env.pt", weights_only=True))
    assert_equal(run(other, 20, seed=1), expected)
    env.load_state_dict(saved)
    assert_equal(run(env, 20, seed=1), expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_copied_env_continues_independently(duplicate):
    env = make_tensor_env("CartPole-v1", 30, seed=5)
    run(env, 10)
    twin = duplicate(env)
    assert_equal(run(twin, 30), run(env, 30))


@pytest.mark.parametrize(
    ("id", "num_envs", "dtype", "field"),
    [
        ("Acrobot-v1", 4, torch.float32, "environment"),
        ("CartPole-v1", 5, torch.float32, "num_envs"),
        ("CartPole-v1", 4, torch.float64, "dtype"),
    ],
)
def test_load_state_dict_rejects_mismatched_state(id, num_envs, dtype, field):
    env = make_tensor_env("CartPole-v1", 4, seed=0)
    before = env.state_dict()
    with raises_setting(field):
        env.load_state_dict(make_tensor_env(id, num_envs, dtype=dtype).state_dict())
    assert torch.equal(env.physics, before["physics"])
    assert torch.equal(env.generator.get_state(), before["_extra_state"]["generator"])


# Settings.


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"num_envs": 0}, "num_envs"),
        ({"num_envs": 2.5}, "num_envs"),
        ({"num_envs": 2, "action_repeat": 0}, "action_repeat"),
        ({"num_envs": 2, "max_episode_steps": 0}, "max_episode_steps"),
    ],
)
def test_make_tensor_env_rejects_invalid_settings(settings, field):
    with raises_setting(field):
        make_tensor_env("CartPole-v1", **settings)


@pytest.mark.parametrize(("id", "shape"), [("CartPole-v1", (3, 1)), ("Pendulum-v1", (3,))])
def test_step_tensors_rejects_wrong_action_shape(id, shape):
    env = make_tensor_env(id, 3)
    with raises_setting("action.shape"):
        env.step_tensors(torch.zeros(shape, dtype=torch.int64))


@every_env
def test_env_ignores_torch_default_dtype(id):
    expected = run(make_tensor_env(id, 5, seed=0), 5)
    env = make_tensor_env(id, 5, seed=0)
    torch.set_default_dtype(torch.float64)
    try:
        for step, other in zip(run(env, 5), expected):
            assert [tensor.dtype for tensor in step] == [tensor.dtype for tensor in other]
            if env.num_actions:
                assert_equal([step], [other])
    finally:
        torch.set_default_dtype(torch.float32)


def test_unknown_id_error_lists_available_envs():
    with raises_setting("id") as error:
        make_tensor_env("cartpole-v1", 2)
    assert set(error.value.works) == set(TENSOR_ENVS)


def test_time_limit_defaults_to_registered_limit():
    assert make_tensor_env("CartPole-v0", 2).max_episode_steps == 200
    assert make_tensor_env("CartPole-v0", 2, max_episode_steps=None).max_episode_steps == 200
    assert make_tensor_env("CartPole-v1", 2, max_episode_steps=7).max_episode_steps == 7
    assert CartPole(2).max_episode_steps == 500


@pytest.mark.parametrize(("limit", "env_steps"), [(None, [3] * 66 + [2]), (7, [3] * 7)])
def test_only_registered_limit_counts_repeated_env_steps(limit, env_steps):
    """As in environments that are stepped one by one."""
    ends = []
    for vectorization in ("tensor", "sync"):
        env = make_env(
            "Pendulum-v1", 1, vectorization=vectorization, action_repeat=3, max_episode_steps=limit
        )
        state, made = env.reset(), []
        while not made or not state["done"]:
            state = env.step(env.rand_action(state))["next"]
            made += env.env_steps.tolist()
        assert state["truncated"].all()
        assert not state["terminated"].any()
        ends.append(made)
    assert ends == [env_steps, env_steps]


def test_repeated_action_has_no_effect_beyond_registered_limit():
    env = make_tensor_env("CartPole-v0", 1, action_repeat=3)
    env.episode_length.fill_(66)  # 198 env steps
    env.physics.copy_(torch.tensor([[2.35], [1.0], [0.0], [0.0]]))  # beyond the end in three steps
    step = env.step_tensors(torch.tensor([1]))
    assert (step.env_steps.item(), step.reward.item()) == (2, 2.0)
    assert (step.terminated.item(), step.truncated.item()) == (False, True)
    alone = make_tensor_env("CartPole-v0", 1, action_repeat=3)
    alone.physics.copy_(torch.tensor([[2.35], [1.0], [0.0], [0.0]]))
    assert alone.step_tensors(torch.tensor([1])).terminated.item()


class Written(TensorEnv):
    """A count, in which one function at a time is wrong."""

    state_size, uniform_size, time_limit, num_actions = 2, 1, 5, 2
    observation_low, observation_high = (0.0, 0.0), (9.0, 9.0)

    def initial_state(self, uniform):
        return torch.cat((uniform, torch.zeros_like(uniform)))

    def transition(self, physics, action):
        count = physics[1] + 1
        return torch.stack((physics[0], count)), count, count >= 4


class InPlace(Written):
    def transition(self, physics, action):
        physics[1] += 1
        return physics, physics[1].clone(), physics[1] >= 4


class RewardsInColumns(Written):
    def transition(self, physics, action):
        later, reward, terminated = super().transition(physics, action)
        return later, reward.unsqueeze(-1), terminated


class EndsAreNumbers(Written):
    def transition(self, physics, action):
        later, reward, terminated = super().transition(physics, action)
        return later, reward, terminated.float()


class Transposed(Written):
    def transition(self, physics, action):
        later, reward, terminated = super().transition(physics, action)
        return later.T, reward, terminated


class OneStart(Written):
    def initial_state(self, uniform):
        return torch.zeros(2)


class ShowsMore(Written):
    def observe(self, physics):
        return torch.cat((physics, physics[:1])).T


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (InPlace, "physics"),
        (RewardsInColumns, "RewardsInColumns.transition reward"),
        (Transposed, "Transposed.transition physics"),
        (EndsAreNumbers, "EndsAreNumbers.transition terminated"),
        (OneStart, "OneStart.initial_state"),
        (ShowsMore, "ShowsMore.observe"),
    ],
)
def test_env_rejects_invalid_function_outputs(environment, message):
    Written(3).step_tensors(torch.zeros(3, dtype=torch.int64))
    with raises_setting(message):
        environment(3)
