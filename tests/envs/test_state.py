"""Environments are captured and restored as they stand, whatever a simulator holds just then."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import random
import shutil
import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box, Dict, Discrete
from torchrl.collectors import Collector
from torchrl.envs import StepCounter, TransformedEnv

from kit.collectors import VectorCollector
from kit.envs import make_env
from kit.envs.plain_values import StateCaptureError
from kit.envs.state import capture, restore
from kit.experiment import EnvConfig, OffPolicySteps, OnPolicySteps
from kit.trainer import Trainer
from recipes import dqn
from recipes.ppo import Config, build
from tests.envs.odd_envs import (
    DrawsFromTheProcess,
    Holds,
    Keeps,
    Part,
)
from tests.tiny import assert_equal, on_policy_plan, ppo_parts, ppo_trainer, weights


def register_once(id: str, kind: type) -> None:
    if id not in gym.registry:
        gym.register(id, kind)


class Kept:
    """An object with a state."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return float(self.count)


NAMES = (
    "clock",
    "window",
    "model",
    "viewer",
    "screen",
    "surf",
    "isopen",
    "spec",
    "metadata",
    "env",
)


class Named(Keeps):
    """Counts in attributes that other environments draw with."""

    def begin(self) -> None:
        for number, name in enumerate(NAMES):
            setattr(self, name, number)

    def next(self) -> float:
        for name in NAMES:
            setattr(self, name, getattr(self, name) * 3 % 101 + 1)
        return float(sum(getattr(self, name) for name in NAMES))


class Calls(Keeps):
    """Counts in a callable object."""

    def begin(self) -> None:
        self.kept = Kept()

    def next(self) -> float:
        return self.kept()


class Encloses(Keeps):
    """Counts in a variable that functions enclose."""

    def begin(self) -> None:
        count, seen = 0, []

        def add() -> float:
            nonlocal count
            count += 1
            seen.append(count)
            return float(sum(seen))

        self.add = add

    def next(self) -> float:
        return self.add()


class Aliases(Keeps):
    """Has two names of one list, of one object and of one array."""

    def begin(self) -> None:
        self.one = [0, [1]]
        self.other, self.inner = self.one, self.one[1]
        self.kept = Kept()
        self.again = self.kept
        self.array = np.zeros((3, 2))
        self.row, self.column = self.array[1], self.array[:, 1]

    def next(self) -> float:
        self.one[0] += 1
        self.inner.append(self.other[0])
        self.array += 1
        self.row *= 2
        return self.kept() + self.again() + len(self.one[1]) + self.other[0] + self.column.sum()


class LastFew(Keeps):
    """Has the last few numbers, by their age."""

    def begin(self) -> None:
        self.few = collections.deque(maxlen=3)
        self.counts = collections.Counter()

    def next(self) -> float:
        self.few.append(self.steps)
        self.counts[self.steps] += 1
        return float(sum(self.few) + 10 * len(self.few) + 100 * self.counts[3])


class Draws(Keeps):
    """Draws from all kinds of generators of its own."""

    def begin(self) -> None:
        self.generator = np.random.Generator(np.random.Philox(1))
        self.legacy, self.python = np.random.RandomState(2), random.Random(3)
        self.draw, self.same = self.generator.random, self.generator
        self.numbers = Dict({"a": Discrete(1000), "b": Box(0, 1, (2,))})
        self.numbers.seed(4)

    def next(self) -> float:
        (child,) = self.generator.bit_generator.seed_seq.spawn(1)
        sampled = self.numbers.sample()
        drawn = [self.draw(), self.same.random(), self.legacy.rand(), self.python.random()]
        return float(sum(drawn) + child.generate_state(1)[0] + sampled["a"] + sampled["b"].sum())


class Phase(enum.Enum):
    UP = 1
    DOWN = 2


class Switches(Keeps):
    """Is in one of two phases, and calls the method of it."""

    def begin(self) -> None:
        self.phase, self.method, self.level = None, self.up, 0

    def up(self) -> None:
        self.phase, self.method = Phase.UP, self.down

    def down(self) -> None:
        self.phase, self.method = Phase.DOWN, self.up

    def next(self) -> float:
        self.method()
        self.level += 1 if self.phase is Phase.UP else 10
        return float(self.level)


class Partial(Keeps):
    """Has a partial function of a constant one, and a sampler of its own action space."""

    def begin(self) -> None:
        self.action_space = Discrete(1_000, seed=1)
        self.power = functools.partial(pow, 2)

    def next(self) -> float:
        return float(self.power(self.steps) + self.action_space.sample())


ENVIRONMENTS = [
    Named, Calls, Encloses, Aliases, LastFew, Draws, Switches, Partial,
]  # fmt: skip


def continues_episodes(env: gym.Env, again: gym.Env, before: int = 7, after: int = 13) -> None:
    """An environment is restored within an episode and goes on as the one it was captured from."""
    for number, one in enumerate((env, again)):
        one.reset(seed=number)
    for _ in range(before):
        if env.step(0)[3]:
            env.reset()
    restore(again, capture(env))
    assert capture(again) == capture(env)
    for _ in range(after):
        ours, theirs = env.step(0), again.step(0)
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert ours[1:4] == theirs[1:4]
        if ours[3]:
            np.testing.assert_array_equal(env.reset()[0], again.reset()[0])


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_restored_env_continues_exactly(kind):
    continues_episodes(kind(), kind())
    wrapped = [gym.wrappers.TimeLimit(gym.wrappers.TransformReward(kind(), float), 4) for _ in "ab"]
    continues_episodes(*wrapped)


def test_restore_preserves_aliases_between_wrappers():
    def made() -> gym.Env:
        env = gym.wrappers.TimeLimit(Calls(), 4)
        env.kept = env.unwrapped.kept
        return env

    env, again = made(), made()
    continues_episodes(env, again)
    assert again.kept is again.unwrapped.kept
    assert again.kept is not env.kept


def test_restore_does_not_modify_externally_shared_object():
    shared = Kept()

    class Shares(Calls):
        def begin(self) -> None:
            self.kept = shared

    env, again = Shares(), Shares()
    env.reset()
    state = capture(env)
    shared.count = 50
    restore(again, state)
    assert (shared.count, again.kept.count) == (50, 1)


class Level:
    value = 0


def set_value(shared: Any, value: int) -> None:
    """Change what environments and others hold, whatever it is."""
    if isinstance(shared, Level):
        shared.value = value
    else:
        shared["value" if isinstance(shared, dict) else 0] = value


HELD_BY_OTHERS = {
    "dict": lambda: {"value": 0},
    "list": lambda: [0],
    "array": lambda: np.zeros(1),
    "object": Level,
}


class Shows(Keeps):
    """Observes what others change."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.shared = shared

    def next(self) -> float:
        shared = vars(self.shared) if isinstance(self.shared, Level) else self.shared
        return float(shared.get("value", 0) if isinstance(shared, dict) else shared[0])


@pytest.mark.parametrize("vectorization", ["sync", "a vector environment of Gymnasium"])
@pytest.mark.parametrize("kind", HELD_BY_OTHERS)
def test_resumed_env_keeps_reference_to_shared_object(kind, vectorization):
    def started() -> tuple[Any, Any]:
        shared = HELD_BY_OTHERS[kind]()
        make = functools.partial(Shows, shared)
        if vectorization != "sync":
            how = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
            return shared, make_env(gym.vector.SyncVectorEnv([make, make], **how))
        return shared, make_env(make, 2)

    shared, env = started()
    env.start()
    set_value(shared, 3)
    state = env.full_state()
    theirs, again = started()
    assert again.load_full_state(state)
    collector = VectorCollector(again, None, steps_per_env=1)
    assert collector.collect()["next", "observation"].tolist() == [[[3.0]], [[3.0]]]
    set_value(theirs, 4)
    assert collector.collect()["next", "observation"].tolist() == [[[4.0]], [[4.0]]]


def test_resumed_env_keeps_view_of_shared_array():
    class Window(Keeps):
        def __init__(self, levels: Any) -> None:
            super().__init__()
            self.window, self.levels = levels[1:], levels

        def next(self) -> float:
            return float(self.window[0] + self.levels[1])

    levels, theirs = np.zeros(2), np.zeros(2)
    env, again = make_env(lambda: Window(levels), 1), make_env(lambda: Window(theirs), 1)
    env.start()
    levels[1] = 3.0
    assert again.load_full_state(env.full_state())
    assert theirs.tolist() == [0.0, 3.0]
    theirs[1] = 4.0
    batch = VectorCollector(again, None, steps_per_env=1).collect()
    assert batch["next", "observation"].tolist() == [[[8.0]]]


def test_resumed_envs_still_share_one_generator():
    class Draws(Keeps):
        def __init__(self, generator: np.random.Generator) -> None:
            super().__init__()
            self.generator = generator

        def next(self) -> float:
            return self.generator.random()

    def started() -> Any:
        generator = np.random.default_rng(5)
        return make_env(lambda: Draws(generator), 2)

    env, again = started(), started()
    env.start()
    assert again.load_full_state(env.full_state())
    one, other = (VectorCollector(e, None, steps_per_env=8).collect() for e in (env, again))
    assert torch.equal(one["next", "observation"], other["next", "observation"])


def test_async_vector_env_continues_after_full_state_call():
    makers = [functools.partial(gym.make, "CartPole-v1")] * 2
    how = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    env = make_env(gym.vector.AsyncVectorEnv(makers, **how))
    collector = VectorCollector(env, None, steps_per_env=3)
    collector.collect()
    assert env.full_state()["envs"] is None
    assert collector.collect().shape == (2, 3)
    assert env.not_resumable == "AsyncVectorEnv cannot capture the state of its environments"
    collector.shutdown()


FIRST_GOAL = [1.0]


def test_restore_does_not_modify_initial_object_of_attribute():
    class Moves(Keeps):
        def begin(self) -> None:
            self.goal = FIRST_GOAL

        def next(self) -> float:
            return self.goal[0]

    env, again = (make_env(Moves, 1) for _ in "ab")
    env.start()
    env.backend.envs[0].unwrapped.goal = [7.0]
    assert again.load_full_state(env.full_state())
    assert (FIRST_GOAL, again.backend.envs[0].unwrapped.goal) == ([1.0], [7.0])


UNKNOWN = {
    "a lock": (threading.Lock, r"UnknownEnv\.kept is a lock"),
    "a counter": (itertools.count, r"UnknownEnv\.kept is a count"),
    "an object in a list": (lambda: [Kept()], r"UnknownEnv\.kept\[0\] is a Kept"),
    "an object in a dict": (lambda: {"a": Kept()}, r"UnknownEnv\.kept\['a'\] is a Kept"),
    "an object of another package": (threading.local, r"UnknownEnv\.kept is a _local"),
    "a dict that makes values": (
        lambda: collections.defaultdict(int), r"UnknownEnv\.kept is a defaultdict",
    ),
    "a partial function of an object": (
        lambda: functools.partial(max, Kept()), r"UnknownEnv\.kept is a partial function with",
    ),
    "an array of objects": (lambda: np.array([None]), r"UnknownEnv\.kept is an array of Python"),
    "memory of others": (
        lambda: np.frombuffer(bytearray(8)), r"UnknownEnv\.kept is a view of a memoryview",
    ),
    "what a function encloses": (lambda: (lambda lock: lambda: lock)(threading.Lock()),
                                 r"UnknownEnv\.kept's lock is a lock"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(UNKNOWN))
def test_capture_names_path_of_unsupported_object(what):
    make, message = UNKNOWN[what]

    class UnknownEnv(Keeps):
        def begin(self) -> None:
            self.kept = make()

    with pytest.raises(StateCaptureError, match=f"^{message}"):
        capture(UnknownEnv())


def test_capture_names_objects_whose_class_has_no_module():
    class NoModule(type):
        @property
        def __module__(cls) -> str:
            raise AttributeError  # as the class of Box2D's objects, which SWIG creates

    class SwigPyObject(metaclass=NoModule):
        __slots__ = ("pointer",)

    class BoxEnv(Keeps):
        def begin(self) -> None:
            self.kept = SwigPyObject()

    with pytest.raises(StateCaptureError, match=r"^BoxEnv\.kept is a SwigPyObject"):
        capture(BoxEnv())


def test_restore_rejects_missing_object():
    env, again = Calls(), Calls()
    again.kept = None
    with pytest.raises(StateCaptureError, match="expected a Kept, found a NoneType"):
        restore(again, capture(env))


@pytest.mark.parametrize(
    ("vectorization", "transformed"), [("sync", False), ("sync", True), ("async", False)]
)
def test_collector_starts_new_episodes_when_state_does_not_fit(vectorization, transformed):
    def collector(held: type) -> VectorCollector:
        env = make_env(lambda: Holds(held()), 2, vectorization=vectorization, num_workers=workers)
        env = make_env(TransformedEnv(env, StepCounter(9))) if transformed else env
        return VectorCollector(env, None, steps_per_env=3)

    workers = 1 if vectorization == "async" else None
    before, same, other = collector(Part), collector(Part), collector(str)
    before.collect()
    for after in (same, other):
        after.load_state_dict(before.state_dict())
    assert same.exact_resume
    assert not other.exact_resume
    assert other.env.not_resumable == "expected a Part, found a str"
    batches = [one.collect()["next", "done"][0, :, 0].tolist() for one in (before, same, other)]
    assert batches == [[False, True, False], [False, True, False], [False] * 3]
    for one in (before, same, other):
        one.shutdown()


@pytest.mark.parametrize("name", ["seed", "default_rng", "RandomState", "test"])
def test_restore_creates_only_bit_generators(name):
    env = Draws()
    state = capture(env)
    written = state["layers"][0]["attributes"]["generator"]["generator"]
    written["dict"][0] = ["bit_generator", name]
    with pytest.raises(ValueError, match=f"not a random generator: '{name}'"):
        restore(env, state)


# ---------------------------------------------------------------------- generators of a process
def test_worker_envs_restore_process_rng():
    def seen(env, steps):
        found = []
        for _ in range(steps):
            result = env.new_step()
            env.step_arrays({"action": np.zeros(2, np.int64)}, result)
            found.append(result.observation["observation"].copy())
        return np.array(found)

    made = [make_env(DrawsFromTheProcess, 2, vectorization="async", seed=3) for _ in "abc"]
    env, again, twin = made
    for one in (env, twin):
        one.start()
    np.testing.assert_array_equal(seen(env, 4), seen(twin, 4))  # seeded, as all is
    assert again.load_full_state(env.full_state())
    np.testing.assert_array_equal(seen(env, 7), seen(again, 7))
    for one in made:
        one.close()


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (3, 1)])
def test_state_loads_into_different_number_of_workers(before, after):
    def made(workers):
        return make_env(DrawsFromTheProcess, 3, vectorization="async", num_workers=workers, seed=3)

    env, again = made(before), made(after)
    env.start()
    assert again.load_full_state(env.full_state())
    result = again.new_step()
    again.step_arrays({"action": np.zeros(3, np.int64)}, result)
    assert len({*result.observation["observation"].ravel()}) == 3  # no two draw the same
    for one in (env, again):
        one.close()


@pytest.mark.parametrize("collector", ["vector", "async"])
def test_resumed_run_restores_global_rng_used_by_envs(collector, tmp_path):
    steps = OnPolicySteps(
        total_policy_steps=64, steps_per_env=8, minibatch_size=8, evaluation_every=None
    )

    def run(resume=None):
        register_once("test/Draws-v0", DrawsFromTheProcess)
        config = Config(
            env=EnvConfig(id="test/Draws-v0", num_envs=2), steps=steps, collector=collector,
            hidden_sizes=[4], log_dir=str(tmp_path), progress=False, checkpoint_every=32,
            resume=resume,
        )  # fmt: skip
        trainer = build(config)
        trainer.run()
        return trainer

    whole = run()
    first, last = sorted((whole.folder / "checkpoints").iterdir())
    shutil.rmtree(last)
    assert first.name.endswith("32")
    resumed = run(str(whole.folder))
    assert_equal(weights(whole), weights(resumed))


def test_trainer_warns_about_lost_env_state_at_start_and_resume(tmp_path):
    class Locks(Draws):
        def begin(self) -> None:
            super().begin()
            self.lock = threading.Lock()

        def next(self) -> float:
            return 0.0

    def trainer(**parts):
        return ppo_trainer(on_policy_plan(), Locks, **parts)

    why = (
        "^Checkpoints do not contain the state of the environments: Locks.lock is a lock, "
        "which cannot be captured. "
        "A resumed run ends their open episodes and is not bit-exact.$"
    )
    begun = trainer(folder=tmp_path)
    begun.register_op("log_row", lambda row: None)
    with pytest.warns(UserWarning, match=why) as said:
        begun.run()
    assert len([w for w in said if "heckpoints" in str(w.message)]) == 1
    with pytest.warns(UserWarning, match=why):
        trainer(resume_from=begun.last_checkpoint)


def test_resume_keeps_ends_of_stored_episodes(tmp_path):
    class Locked(CartPoleEnv):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    def trainer(**settings):
        steps = OffPolicySteps(
            120, steps_per_env=None, min_episodes=3, learning_starts=20, minibatch_size=8,
            replay_ratio="1/4", evaluation_every=None,
        )  # fmt: skip
        env = EnvConfig("test/Locked-v0", num_envs=2)
        common = {"hidden_sizes": [4], "log_dir": str(tmp_path), "progress": False, "n_step": 1}
        config = dqn.Config(env=env, steps=steps, **common, **settings)
        return dqn.build(config)

    def ends(one):
        stored = one.buffer.buffer[:]["next"]
        return {name: stored[name].clone() for name in ("terminated", "truncated", "done")}

    register_once("test/Locked-v0", Locked)
    whole = trainer()
    with pytest.warns(UserWarning, match="is a lock"):
        whole.run()
    assert ends(whole)["terminated"].any()
    with pytest.warns(UserWarning, match="is a lock"):
        resumed = trainer(resume=str(whole.folder))
    assert_equal(ends(whole), ends(resumed))


def test_full_state_reports_env_with_slots_as_not_resumable():
    class Counts(Keeps):
        __slots__ = ("count",)

        def next(self) -> float:
            self.count = 1.0
            return self.count

    env = make_env(Counts, 1)
    env.start()
    assert env.full_state()["not_resumable"] == "Counts stores its state in __slots__"


# ---------------------------------------------------------------------- what environments share
COUNTED, DRAWN_FROM, LIMIT = [0], np.random.default_rng(0), 5


def counted() -> int:
    COUNTED[0] += 1
    return COUNTED[0]


class Total:
    count = 0


class CountsInItsClass(Keeps):
    total = 0

    def next(self) -> float:
        type(self).total += 1
        return float(self.total)


class CountsInAListOfItsClass(Keeps):
    seen: list[int] = []  # noqa: RUF012

    def next(self) -> float:
        self.seen.append(1)
        return float(len(self.seen))


class CountsInAGlobal(Keeps):
    def next(self) -> float:
        COUNTED[0] += 1
        return float(COUNTED[0])


class CountsInAFunction(Keeps):
    def next(self) -> float:
        return float(counted())


class DrawsFromAGlobal(Keeps):
    def next(self) -> float:
        return DRAWN_FROM.normal()


def counts_in_what_it_encloses() -> gym.Env:
    total = 0

    class Counts(Keeps):
        def next(self) -> float:
            nonlocal total
            total += 1
            return float(total)

    return Counts()


class CountsInADefault(Keeps):
    def next(self, seen: list[int] = []) -> float:  # noqa: B006
        seen.append(1)
        return float(len(seen))


SHARED = {
    CountsInItsClass: "CountsInItsClass.total",
    CountsInAListOfItsClass: "CountsInAListOfItsClass.seen",
    CountsInAGlobal: f"{__name__}.COUNTED",
    CountsInAFunction: f"{__name__}.COUNTED",
    DrawsFromAGlobal: f"{__name__}.DRAWN_FROM",
    CountsInADefault: "CountsInADefault.next's defaults",
    counts_in_what_it_encloses: "Counts.next",
}


@pytest.mark.parametrize("make", SHARED)
def test_changed_state_shared_by_envs_disables_exact_resume(make):
    env, again = (make_env(make, 2, seed=3) for _ in "ab")
    env.start()
    state = env.full_state()
    why = f"{SHARED[make]} is shared by all environments and has changed"
    assert state["envs"] is None
    assert state["not_resumable"] == why
    assert not again.load_full_state(state)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_full_state_detects_changed_globals_of_script(vectorization):
    script = {"__name__": "of_a_notebook", "Keeps": Keeps, "COUNT": 0}
    exec(
        "class Counts(Keeps):\n"
        "    def next(self):\n"
        "        global COUNT\n"
        "        COUNT += 1\n"
        "        return float(COUNT)\n",
        script,
    )
    env = make_env(script["Counts"], 2, vectorization=vectorization)
    env.start()
    said = "of_a_notebook.COUNT is shared by all environments and has changed"
    assert env.full_state()["not_resumable"] == said
    env.close()


class DrawsFromAPlaceOfItsClass(Keeps):
    """Draws from a space that all environments share, which is seeded as that of each."""

    place = Box(-1, 1, (1,), np.float64)

    def begin(self) -> None:
        self.observation_space = self.place

    def next(self) -> float:
        return float(self.place.sample()[0])


def test_full_state_includes_space_shared_through_env_class():
    env = make_env(DrawsFromAPlaceOfItsClass, 2, seed=3)
    env.start()
    state = env.full_state()
    assert state["not_resumable"] == ""

    def observed() -> list:
        seen = []
        for _ in range(7):
            result = env.new_step()
            env.step_arrays({"action": np.zeros(2, np.int64)}, result)
            seen.append(result.next_observation["observation"].tolist())
        return seen

    went_on = observed()
    env = make_env(DrawsFromAPlaceOfItsClass, 2, seed=4)
    assert env.load_full_state(state)
    assert observed() == went_on


class HoldsConstants(Keeps):
    """Holds much that never changes."""

    limits: dict[str, float] = {"steps": 5.0}  # noqa: RUF012
    lock = threading.Lock()

    def next(self) -> float:
        return float(LIMIT + self.limits["steps"] + Total.count)


def test_unchanged_shared_objects_do_not_prevent_capture():
    COUNTED[0] += 1  # by others: its methods do not name it
    env = make_env(HoldsConstants, 2, seed=3)
    env.start()
    COUNTED[0] += 1
    assert env.full_state()["envs"] is not None


# ---------------------------------------------------------------------- MuJoCo
@pytest.mark.parametrize("id", ["HalfCheetah-v5", "Hopper-v5", "Ant-v5"])
def test_mujoco_env_continues_exactly_from_any_step(id):
    pytest.importorskip("mujoco")
    env, again = gym.make(id), gym.make(id)
    env.reset(seed=0)
    again.reset(seed=1)
    env.action_space.seed(0)
    for _ in range(60):  # in the air, touching the ground, and between the two
        restore(again, capture(env))
        assert capture(again) == capture(env)
        action = env.action_space.sample()
        ours, theirs = env.step(action), again.step(action)
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert ours[1:4] == theirs[1:4]
        if ours[2] or ours[3]:
            env.reset()
    env.close()
    again.close()


def test_restore_includes_modified_mujoco_model():
    pytest.importorskip("mujoco")
    env, again = (gym.make("Hopper-v5") for _ in "ab")
    for one in (env, again):
        one.reset(seed=0)
    env.unwrapped.model.body_mass[2] *= 2
    env.unwrapped.model.opt.timestep *= 0.5
    env.unwrapped.model.opt.gravity[2] = -5
    restore(again, capture(env))
    for _ in range(5):
        np.testing.assert_array_equal(env.step(np.ones(3))[0], again.step(np.ones(3))[0])


FALLS = """
<mujoco><worldbody><body><freejoint/><geom size="0.1" mass="1"/></body></worldbody></mujoco>
"""


@pytest.fixture
def falls():
    mujoco = pytest.importorskip("mujoco")

    class Falls(gym.Env):
        def __init__(self) -> None:
            self.data = mujoco.MjData(mujoco.MjModel.from_xml_string(FALLS))

        def height(self) -> float:
            mujoco.mj_step(self.data.model, self.data, 10)
            return float(self.data.qpos[2])

    return Falls


def test_capture_rejects_list_of_mujoco_arrays(falls):
    env = falls()
    env.parts = [env.data.qpos]
    with pytest.raises(StateCaptureError, match=r"^Falls\.parts\[0\] is a ndarray"):
        capture(env)


def test_restore_includes_mujoco_model_referenced_only_by_data(falls):
    one, other = falls(), falls()
    one.data.model.opt.gravity[2] = -3.0
    restore(other, capture(one))
    assert one.height() == other.height() != falls().height()


class Locked(gym.Wrapper):
    """Holds something that no checkpoint can."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.lock = threading.Lock()


def test_inexact_resume_does_not_repeat_first_episodes():
    def made():
        env = make_env("CartPole-v1", 2, seed=5, wrappers=[Locked])
        return VectorCollector(env, None, steps_per_env=30, seed=5)

    def first_of_each(batch):
        starts = batch["observation"][:, 0]
        return {tuple(row) for row in starts.tolist()}

    collector = made()
    begun = [first_of_each(collector.collect())]
    for _ in range(3):  # resumed again and again
        state, collector = collector.state_dict(), made()
        collector.load_state_dict(state)
        assert not collector.exact_resume
        begun.append(first_of_each(collector.collect()))
    assert len(set().union(*begun)) == 8
    again = made()
    again.load_state_dict(state)
    assert first_of_each(again.collect()) == begun[-1]  # the same checkpoint goes on alike


@pytest.mark.parametrize("kind", ["vector", "transformed"])
def test_torchrl_collector_counts_env_steps_and_resumes(kind, tmp_path):
    plan = on_policy_plan(action_repeat=4, num_envs=2)

    def made(**parts):
        env = make_env("CartPole-v1", 2, seed=3, action_repeat=4)
        env = TransformedEnv(env, StepCounter()) if kind == "transformed" else env
        own = ppo_parts(plan)
        actor = own["collector"].policy
        collector = Collector(env, actor, frames_per_batch=16, total_frames=64)
        first = []
        trainer = Trainer(plan, **{**own, "collector": collector}, **parts)
        trainer.register_op("pre_steps_log", lambda batch: first.append(batch["observation"][:, 0]))
        return trainer, env, first

    trainer, env, first = made(folder=tmp_path, checkpoint_every=32)
    trainer.run()
    base = env.base_env if kind == "transformed" else env
    assert trainer.ledger.env_steps == base.env_steps_made < 4 * 64
    halfway = min((tmp_path / "checkpoints").iterdir())
    with pytest.warns(UserWarning, match="not bit-exact"):
        resumed, _, again = made(resume_from=halfway)
    assert resumed.run().policy_steps == 64
    assert not torch.isclose(first[0], again[0]).all(-1).any()


def test_resumed_env_keeps_returns_of_open_episodes():
    def play(env, now, steps):
        for _ in range(steps):
            acted = now.select("observation").set("action", torch.zeros(2, dtype=torch.int64))
            _, now = env.step_and_maybe_reset(acted)
        return now

    env, again = (
        make_env("CartPole-v1", 2, seed=seed, max_episode_steps=7, normalize_reward=True)
        for seed in (0, 1)
    )
    now = play(env, env.reset(), 5)
    assert again.load_full_state(env.full_state())
    for one in (env, again):
        play(one, now, 2)
    episodes = again.take_episodes()
    assert [(one.length, one.episode_return) for one in episodes] == [(7, 7.0)] * 2
    assert episodes == env.take_episodes()
