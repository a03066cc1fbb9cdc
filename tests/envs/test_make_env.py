"""Copies of an environment step, end and restart one by one; a reset costs no policy step."""

from __future__ import annotations

import functools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode
from torchrl.envs import GymEnv, GymWrapper, SerialEnv, StepCounter, TransformedEnv

from kit.collectors import VectorCollector
from kit.envs import EnvError, VectorEnv, make_env
from kit.envs.vector_env import env_seeds
from tests.envs.odd_envs import (
    ClosesWhatItNeverOpened,
    CountsFromStart,
    ManySpaces,
    Sampling,
    Steps,
)
from tests.errors import raises_setting
from tests.tiny import Scripted


class Counts(Steps):
    """Shows the number of its episode and the step in it; truncated after ``length`` steps."""

    observation_space = gym.spaces.Box(0, 100, (2,), np.float32)

    def __init__(self, length: int = 3) -> None:
        super().__init__(length)
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.count += 1
        return self._seen(), 1.0, False, self.count >= self.length, {}

    def _seen(self):
        return np.array([self.episode, self.count], np.float32)


def unequal() -> list:
    """Makers of copies with episodes of 2 and 3 steps."""
    return [lambda: Counts(2), lambda: Counts(3)]


def made_by_kit() -> VectorEnv:
    makers = iter(unequal())
    return make_env(lambda: next(makers)(), 2)


def made_by_gymnasium(mode: AutoresetMode) -> VectorEnv:
    return make_env(gym.vector.SyncVectorEnv(unequal(), autoreset_mode=mode))


BACKENDS = {
    "in process": made_by_kit,
    "gymnasium, same step": lambda: made_by_gymnasium(AutoresetMode.SAME_STEP),
    "gymnasium, disabled": lambda: made_by_gymnasium(AutoresetMode.DISABLED),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_finished_env_resets_within_same_step(backend):
    env = BACKENDS[backend]()
    seen = [env.start()["observation"].tolist()]
    last, ended = [], []
    for _ in range(4):
        step = env.new_step()
        env.step_arrays({"action": np.zeros(2, np.int64)}, step)
        seen.append(step.observation["observation"].tolist())
        last.append(step.next_observation["observation"].tolist())
        ended.append(step.truncated.tolist())
        assert step.env_steps.tolist() == [1, 1]
        assert not step.terminated.any()
    env.close()
    # [episode, step]: no step is lost, and the true last observation is seen.
    assert last == [[[0, 1], [0, 1]], [[0, 2], [0, 2]], [[1, 1], [0, 3]], [[1, 2], [1, 1]]]
    assert ended == [[False, False], [True, False], [False, True], [True, False]]
    assert seen == [
        [[0, 0], [0, 0]], [[0, 1], [0, 1]], [[1, 0], [0, 2]], [[1, 1], [1, 0]], [[2, 0], [1, 1]],
    ]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_torchrl_rollout_resets_within_same_step(backend):
    env = BACKENDS[backend]()
    rollout = env.rollout(4, break_when_any_done=False)
    env.close()
    assert rollout["observation"][0].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert rollout["next", "observation"][0].tolist() == [[0, 1], [0, 2], [1, 1], [1, 2]]
    assert rollout["next", "observation"][1].tolist() == [[0, 1], [0, 2], [0, 3], [1, 1]]
    assert rollout["next", "done"][..., 0].tolist() == [
        [False, True, False, True], [False, False, True, False],
    ]  # fmt: skip


def test_returned_observations_are_not_changed_by_later_steps():
    env = made_by_kit()
    first = env.start()["observation"]
    kept = first.copy()
    steps = []
    for _ in range(3):
        step = env.new_step()
        env.step_arrays({"action": np.zeros(2, np.int64)}, step)
        steps.append((step, step.observation["observation"].copy()))
    assert (first == kept).all()
    assert all((step.observation["observation"] == copy).all() for step, copy in steps)


class CountsInPlace(Counts):
    """Shows all observations of its life in one array."""

    def __init__(self, length: int = 3) -> None:
        super().__init__(length)
        self.shown = np.zeros(2, np.float32)

    def _seen(self):
        self.shown[:] = super()._seen()
        return self.shown


gym.register("CountsInPlace-v0", CountsInPlace)

IN_ONE_ARRAY = {
    "sync": lambda: make_env(CountsInPlace),
    "gymnasium": lambda: make_env(
        gym.vector.SyncVectorEnv([CountsInPlace], autoreset_mode=AutoresetMode.DISABLED)
    ),
    "torchrl": lambda: make_env(GymEnv("CountsInPlace-v0")),
    "torchrl, transformed": lambda: make_env(
        TransformedEnv(GymEnv("CountsInPlace-v0"), StepCounter())
    ),
}


@pytest.mark.parametrize("kind", IN_ONE_ARRAY)
def test_final_observations_survive_in_place_reset(kind):
    batch = VectorCollector(IN_ONE_ARRAY[kind](), None, steps_per_env=6).collect()
    assert batch["next", "observation"][0, :, 1].tolist() == [1, 2, 3, 1, 2, 3]
    assert batch["observation"][0, :, 1].tolist() == [0, 1, 2, 0, 1, 2]


def test_collector_rejects_vector_env_losing_final_observations():
    vector = gym.vector.SyncVectorEnv([CountsInPlace], autoreset_mode=AutoresetMode.SAME_STEP)
    with raises_setting("autoreset_mode"):
        VectorCollector(make_env(vector), None, steps_per_env=6).collect()


def test_make_env_rejects_next_step_autoreset():
    with raises_setting("autoreset_mode"):
        made_by_gymnasium(AutoresetMode.NEXT_STEP)
    env = GymEnv("CartPole-v1", num_envs=2)
    with raises_setting("autoreset_mode"):
        make_env(env)
    env.close()


class Vector(gym.vector.VectorEnv):
    """Two envs whose episodes end in the third step; flags are lists."""

    def __init__(self, mode: AutoresetMode | None) -> None:
        self.num_envs, self.metadata = 2, {"autoreset_mode": mode} if mode else {}
        self.single_observation_space = gym.spaces.Box(0.0, 9.0, (1,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions):
        self.steps += 1
        ended = [self.steps == 3] * 2
        return np.full((2, 1), self.steps, np.float32), np.ones(2), ended, [False] * 2, {}


def test_custom_vector_env_may_return_flags_as_lists():
    env = make_env(Vector(AutoresetMode.DISABLED))
    batch = VectorCollector(env, None, steps_per_env=4).collect()
    assert batch["next", "terminated"][..., 0].tolist() == [[False, False, True, False]] * 2
    assert batch["next", "observation"][..., 0].tolist() == [[1, 2, 3, 1]] * 2


def test_make_env_rejects_vector_env_without_autoreset_mode():
    with raises_setting("autoreset_mode", None):
        make_env(Vector(None))


# ---------------------------------------------------------------------- seeds
def first_observations(seed: int, copies: int = 3, **settings) -> list:
    env = make_env("CartPole-v1", copies, seed=seed, **settings)
    found = env.start()["observation"].copy()
    env.close()
    return found.tolist()


def test_seed_gives_distinct_reproducible_starts_for_each_env():
    zero, one = first_observations(0), first_observations(1)
    assert zero == first_observations(0)
    assert len({tuple(row) for row in zero + one}) == 6
    assert zero[:2] == first_observations(0, copies=2)


def test_env_seeds_of_nearby_runs_are_distinct():
    seeds = [seed for run in range(100) for seed in env_seeds(run, 32)]
    assert len(set(seeds)) == 3_200


@pytest.mark.parametrize("seed", ["1", 1.5, -1, True])
def test_make_env_rejects_invalid_seed(seed):
    with raises_setting("seed"):
        make_env("CartPole-v1", seed=seed)


def test_all_vectorizations_start_identically():
    same = gym.vector.SyncVectorEnv(
        [lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.SAME_STEP
    )
    expected = first_observations(4, copies=2)
    assert make_env(same, seed=4).start()["observation"].tolist() == expected
    assert first_observations(4, copies=2, vectorization="async") == expected


class SamplingVector(gym.vector.VectorEnv):
    """Observes what it draws from its own spaces, of several copies at once."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self, num_envs=2):
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0.0, 1.0, (3,), np.float32)
        self.single_action_space = gym.spaces.Discrete(1000)
        self.observation_space = gym.vector.utils.batch_space(
            self.single_observation_space, num_envs
        )
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        seen = self.observation_space.sample()
        seen[0, 0], seen[1, :2] = (
            self.single_action_space.sample() / 1000,
            self.action_space.sample(),
        )
        return seen, {}

    def step(self, actions):
        zeros = np.zeros(self.num_envs)
        return self.reset()[0], zeros, zeros.astype(bool), zeros.astype(bool), {}


gym.register("kit/Sampling-v0", Sampling, vector_entry_point=SamplingVector)
SAMPLING = {
    "sync": lambda: {"id": Sampling, "num_envs": 2},
    "async": lambda: {"id": Sampling, "num_envs": 2, "vectorization": "async"},
    "native": lambda: {"id": "kit/Sampling-v0", "num_envs": 2, "vectorization": "native"},
    "SyncVectorEnv": lambda: {
        "id": gym.vector.SyncVectorEnv([Sampling] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    },
    "SerialEnv": lambda: {"id": SerialEnv(2, lambda: GymWrapper(Sampling()))},
}


@pytest.mark.parametrize("kind", SAMPLING)
def test_seed_applies_to_sampled_spaces(kind):
    def observed(seed: int) -> list[list[float]]:
        env = make_env(**SAMPLING[kind](), seed=seed)
        seen = env.rollout(5)["observation"]
        env.close()
        return seen.tolist()

    first, second = once = observed(1)
    assert once == observed(1) != observed(2)
    assert first != second


def test_set_seed_reproduces_later_episodes():
    env = make_env("CartPole-v1", 2, seed=3)
    first = env.start()["observation"].tolist()
    second = env.restart()["observation"].tolist()
    env.set_seed(3)
    assert env.start()["observation"].tolist() == first
    assert env.restart()["observation"].tolist() == second
    assert second != first


# ---------------------------------------------------------------------- time limits
@pytest.mark.parametrize(("limit", "length"), [(5, 5), (None, 200), (300, 300)])
def test_max_episode_steps_replaces_registered_limit(limit, length):
    env = make_env("Pendulum-v1", 1, max_episode_steps=limit)
    env.start()
    ended = []
    for _ in range(length):
        step = env.new_step()
        env.step_arrays({"action": np.zeros((1, 1), np.float32)}, step)
        ended.append((bool(step.terminated[0]), bool(step.truncated[0])))
    assert ended == [(False, False)] * (length - 1) + [(False, True)]


def test_episode_can_terminate_and_truncate_in_same_step():
    env = make_env(lambda: Steps(3), 1, max_episode_steps=3)
    env.start()
    for _ in range(3):
        step = env.new_step()
        env.step_arrays({"action": np.zeros(1, np.int64)}, step)
    assert (bool(step.terminated[0]), bool(step.truncated[0])) == (True, True)


# ---------------------------------------------------------------------- what is made
def test_env_id_can_name_registering_module(tmp_path, monkeypatch):
    (tmp_path / "my_envs.py").write_text(
        "import gymnasium as gym\n"
        "gym.register('Mine-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        env = make_env("my_envs:Mine-v0", 2)
        assert env.start()["observation"].shape == (2, 4)
    finally:
        gym.registry.pop("Mine-v0", None)


def test_wrappers_are_applied_in_order_below_action_repeat():
    order = []

    def wrapper(name):
        def wrap(env):
            order.append((name, type(env).__name__))
            return gym.wrappers.RecordEpisodeStatistics(env)

        return wrap

    make_env(lambda: Steps(3), 1, wrappers=[wrapper("in"), wrapper("out")], action_repeat=2,
             action_mask=False)  # fmt: skip
    assert order == [("in", "Steps"), ("out", "RecordEpisodeStatistics")]


def test_env_steps_all_kinds_of_spaces():
    env = make_env(ManySpaces, 3)
    rollout = env.rollout(6, break_when_any_done=False)  # which checks actions in the environment
    assert rollout["camera"].shape == (3, 6, 2, 2)
    assert rollout["body", "position"].shape == (3, 6, 3)
    assert rollout["next", "done"].sum() == 3
    rewards, gears = rollout["next", "reward"], rollout["action", "gear"]
    assert (rewards.flatten() == gears.flatten() + 1).all()  # Discrete(4, start=1)


@pytest.mark.parametrize("stepped", ["sync", "async", "SAME_STEP", "DISABLED"])
@pytest.mark.parametrize("space", [Discrete(4, start=5), MultiDiscrete([4, 4], start=[2, -3])])
def test_discrete_observations_are_zero_based_for_any_start(stepped, space):
    one = functools.partial(CountsFromStart, space)
    if stepped in ("sync", "async"):
        env = make_env(one, 2, vectorization=stepped)
    else:
        vector = gym.vector.SyncVectorEnv([one, one], autoreset_mode=AutoresetMode[stepped])
        env = make_env(vector)
    rollout = env.rollout(4, break_when_any_done=False)
    env.close()
    seen, following = rollout["observation"], rollout["next", "observation"]
    for step, (now, then) in enumerate([(0, 1), (1, 2), (2, 3), (0, 1)]):
        assert (seen[:, step] == now).all()
        assert (following[:, step] == then).all()
    assert env.observation_spec["observation"].is_in(seen[:, 2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "CartPole-v2"}, "env.id"),
        ({"id": "CartPole-v1", "num_envs": 0}, "env.num_envs"),
        ({"id": "CartPole-v1", "max_episode_steps": -3}, "env.max_episode_steps"),
        ({"id": "CartPole-v1", "vectorization": "fast"}, "env.vectorization"),
    ],
)
def test_make_env_rejects_invalid_settings(settings, message):
    with raises_setting(message):
        make_env(**settings)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TypeError("odd"), "Own-v0: creating it raised TypeError: odd"),
        (OSError("no file"), "Own-v0: creating it raised OSError: no file"),
    ],
)
@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_env_creation_error_is_reported_in_one_line(error, message, vectorization, monkeypatch):
    def fails(**_):
        raise error

    spec = gym.envs.registration.EnvSpec("Own-v0", fails, vector_entry_point=fails)
    monkeypatch.setitem(gym.registry, "Own-v0", spec)
    with pytest.raises(EnvError, match=message):
        make_env("Own-v0", 2, vectorization=vectorization)


class Says(Scripted):
    """Observes two numbers, or a dictionary of them, and something else in its second step."""

    def __init__(self, said, several: bool) -> None:
        super().__init__()
        self.said, self.several = said, several
        if several:
            one = self.observation_space
            self.observation_space = gym.spaces.Dict({"one": one, "other": Discrete(2)})

    def reset(self, *, seed=None, options=None):
        seen, info = super().reset(seed=seed)
        return {"one": seen, "other": 1} if self.several else seen, info

    def step(self, action):
        return self.said, *super().step(action)[1:]


@pytest.mark.parametrize(
    ("said", "several", "what"),
    [
        (None, False, "nothing as observation, but its space has shape (2,)"),
        ({"one": 1}, False, "observation of shape () as observation, but its space has shape (2,)"),
        (None, True, "nothing as one, but its space has shape (2,)"),
        (np.zeros(2), True, "nothing as one, but its space has shape (2,)"),
        ({"one": np.zeros(2)}, True, "nothing as other, but its space has shape ()"),
    ],
)
def test_env_error_names_observation_outside_its_space(said, several, what):
    collector = VectorCollector(make_env(lambda: Says(said, several), 1), None, steps_per_env=2)
    with pytest.raises(EnvError) as fault:
        collector.collect()
    assert str(fault.value).endswith(f"env 0, after 0 policy steps: returned {what}")


class Failing(Vector):
    """A vector environment that raises, or returns other flags."""

    def __init__(self, where: str) -> None:
        super().__init__(AutoresetMode.DISABLED)
        self.where = where

    def reset(self, **given):
        if self.where == "reset()":
            raise OSError("no more")
        return super().reset(**given)

    def step(self, actions):
        if self.where == "step()":
            raise OSError("no more")
        seen, reward, ended, _, info = super().step(actions)
        return seen, reward, ended, [0.5, 1.0], info


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("reset()", "environment Failing: reset() raised OSError: no more"),
        ("step()", "environment Failing, after 0 policy steps: step() raised OSError: no more"),
        ("flags", "environment Failing, after 0 policy steps: returned [0.5 1. ] as truncated"),
    ],
)
def test_env_error_names_failing_vector_env(where, what):
    with pytest.raises(EnvError) as fault:
        VectorCollector(make_env(Failing(where)), None, steps_per_env=2).collect()
    assert str(fault.value).partition(" (")[0] == what


def test_make_env_rejects_num_envs_other_than_vector_env():
    vector = Vector(AutoresetMode.DISABLED)
    with raises_setting("env.num_envs"):
        make_env(vector, 3)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_unclosable_env_is_created_with_action_mask(vectorization):
    env = make_env(ClosesWhatItNeverOpened, 2, vectorization=vectorization)
    assert env.start()["action_mask"].tolist() == [[True, False]] * 2
    env.close()


def test_make_env_rejects_limit_above_factory_time_limit():
    made = functools.partial(gym.make, "Pendulum-v1")
    with raises_setting("env.max_episode_steps"):
        make_env(made, 2, max_episode_steps=1_000)
    with raises_setting("env.max_episode_steps"):
        make_env(made, 2, max_episode_steps=101, action_repeat=2)
    assert make_env(made, 2, max_episode_steps=100, action_repeat=2).num_envs == 2
    free = functools.partial(gym.make, "Pendulum-v1", max_episode_steps=-1)
    assert make_env(free, 2, max_episode_steps=1_000).num_envs == 2


def test_stacked_frames_wraps_only_environments_without_stacks():
    env = make_env("CartPole-v1", 2, stacked_frames=3, action_repeat=2)
    first = env.start()["observation"]
    assert first.shape == (2, 3, 4)
    assert (first == first[:, :1]).all()
    wrapper = functools.partial(gym.wrappers.FrameStackObservation, stack_size=3)
    env = make_env("CartPole-v1", 2, stacked_frames=3, wrappers=[wrapper])
    assert env.start()["observation"].shape == (2, 3, 4)
