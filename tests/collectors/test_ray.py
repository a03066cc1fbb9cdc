"""RayCollector: workers in lockstep are bitwise collectors in one process, also after deaths.

Tests with Ray are marked by hand, because the CPU seconds of its processes are not recorded.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import kit.collectors.ray as ray_module
from kit.collectors import RayCollector, TensorCollector, make_collector
from kit.collectors.base import PolicyError
from kit.collectors.chunk_worker import LocalTransport
from kit.collectors.chunks import WorkerError
from kit.envs import make_env
from kit.envs.errors import EnvError
from kit.steps import StepPlan
from kit.testing import (
    COLLECTOR_CHECKS,
    CollectorCase,
    check_collector,
    counter_env,
    counter_policy,
)
from recipes import impala
from tests.collectors.kinds import amounts
from tests.collectors.ray_runs import (
    ENVS,
    KINDS,
    NORMALIZED,
    ExitsOnce,
    assert_equal,
    batches_in_one_process,
    batches_of,
    dying,
    ray_collector,
)
from tests.envs.odd_envs import Raises, Returns, Steps
from tests.errors import raises_setting
from tests.waiting import wait_until


@pytest.fixture
def collector_of():
    """Create collectors, and shut them down after the test."""
    made = []

    def make(name="normalized", **how):
        made.append(ray_collector(name, **{"transport": LocalTransport, **how}))
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown()


# ---------------------------------------------------------------------- equal to one process
@pytest.mark.parametrize("name", list(KINDS))
def test_workers_equal_collectors_in_one_process(name, collector_of):
    collector = collector_of(name)
    expected, running = batches_in_one_process(name, 5)
    assert_equal(batches_of(collector, 5), expected)
    assert collector.policy_steps == sum(_steps(batch) for batch in expected)
    if running is not None:
        assert (
            collector.normalizer.state_dict().items()
            >= {
                key: value for key, value in running.state_dict().items() if key != "returns"
            }.items()
        )


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n == "normalized" else pytest.mark.nightly)
        for n in KINDS
    ],
)
def test_ray_workers_equal_collectors_in_one_process(name, collector_of):
    collector = collector_of(name, transport=None)
    assert_equal(batches_of(collector, 5), batches_in_one_process(name, 5)[0])


def _steps(batch):
    mask = batch.get(("collector", "mask"), None)
    return batch.numel() if mask is None else int(mask.sum())


def test_single_worker_equals_vector_collector(collector_of):
    case = CollectorCase(seed=5)
    env = counter_env(case)
    one = RayCollector(
        env, counter_policy(env), workers=1, transport=LocalTransport, **amounts(case)
    )
    vector = make_collector("vector", env, counter_policy(env), _plan(case), seed=5)
    for found, expected in zip(one, vector, strict=True):
        assert_equal([found], [expected])


def _plan(case):
    return StepPlan(
        total_policy_steps=case.total_frames, num_envs=case.num_envs,
        steps_per_env=case.steps_per_env, final_evaluation=False, update_epochs=1,
    )  # fmt: skip


def test_counts_and_trajectory_ids_cover_all_workers(collector_of):
    collector = collector_of("steps")
    batches = batches_of(collector, 12)
    assert (collector.policy_steps, collector.env_steps) == (12 * 60, 12 * 60)
    assert collector.random_policy_steps == ENVS * 12
    episodes = collector.take_episodes()
    assert len(episodes) == collector.episodes > ENVS
    assert {episode.env for episode in episodes} == set(range(ENVS))
    ids = torch.cat([batch["collector", "traj_ids"] for batch in batches], -1)
    assert all(
        set(ids[one].tolist()).isdisjoint(ids[other].tolist())
        for one in range(ENVS)
        for other in range(one)
    )


def test_merged_counts_are_exact_after_many_merges(collector_of):
    env = make_env(Steps, 2, **NORMALIZED)
    collector = RayCollector(env, None, workers=2, frames_per_batch=2, transport=LocalTransport)
    for _ in range(1_000):
        collector.collect()
    counts = [float(moments.count) for _, moments in collector.normalizer.named_moments()]
    assert [round(count - 1e-4, 6) for count in counts] == [2_002, 2_000]  # with two resets


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_batches_have_planned_staleness(max_staleness, collector_of):
    collector = collector_of(max_staleness=max_staleness)
    found = []
    for _ in range(4):
        batches_of(collector, 1)
        found.append(collector.metrics()["collector/staleness"])
    assert found == [min(batch, max_staleness) for batch in range(4)]


# ---------------------------------------------------------------------- recovery
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("name", ["normalized", "episodes", "recurrent"])
@pytest.mark.filterwarnings("ignore:Worker")
def test_deaths_do_not_change_batches(name, max_staleness, collector_of):
    how = {"max_staleness": max_staleness, "state_every": 3}
    places = [(0, 1), (1, 4), (1, 4), (2, 6), (0, 7)]
    collector = collector_of(name, transport=dying(*places), **how)
    undisturbed = collector_of(name, **how)
    assert_equal(batches_of(collector, 8), batches_of(undisturbed, 8))
    assert collector.metrics()["collector/worker_deaths"] == len(places)
    assert collector.metrics()["collector/redone_policy_steps"] > 0
    for counter in collector._COUNTERS:
        assert getattr(collector, counter) == getattr(undisturbed, counter)


KILL = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "terminated": signal.SIGTERM}


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(h, marks=pytest.mark.slow if h == "stopped" else pytest.mark.nightly)
        for h in KILL
    ],
)
def test_ray_worker_is_recovered(how, collector_of):
    settings = {"max_staleness": 1, "state_every": 2}
    collector = collector_of(transport=None, **settings)
    collector._lockstep.timeout = 3.0
    pids = []

    def before(number):
        if number == 5:
            pids.extend(_pids(collector))
            os.kill(pids[1], KILL[how])

    with pytest.warns(UserWarning, match=r"Worker 1 \(.*pid \d+\) was lost in batch \d+: "):
        found = batches_of(collector, 8, before)
    assert_equal(found, batches_of(collector_of(**settings), 8))
    wait_until(lambda: not _runs(pids[1]), "the old process ends")


def _pids(collector):
    hosts = [stream.host for stream in collector._lockstep._streams]
    return [int(host.rpartition(" ")[2]) for host in hosts]


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.nightly
@pytest.mark.usefixtures("local_ray")
def test_ray_worker_that_exits_is_recovered(tmp_path):
    (tmp_path / "once").touch()
    env = make_env(lambda: ExitsOnce(str(tmp_path / "once")), 2)
    collector = RayCollector(env, None, workers=2, frames_per_batch=8)
    with pytest.warns(UserWarning, match="its worker process has died"):
        batches = [collector.collect() for _ in range(2)]
    collector.shutdown()
    assert batches[0]["observation"][..., 0].tolist() == [[0, 1, 2, 0]] * 2
    assert collector.policy_steps == 16


class Opaque(Steps):
    """Holds what cannot be captured."""

    def __init__(self, length=7):
        super().__init__(length)
        self.held = (number for number in ())


def test_uncapturable_envs_begin_new_episodes_after_death():
    env = make_env(Opaque, 4)
    how = {"workers": 2, "frames_per_batch": 16, "state_every": 2, "seed": 0}
    collector = RayCollector(env, None, transport=dying((1, 4)), **how)
    batches = [collector.collect() for _ in range(3)]
    assert collector.continues_episodes
    with pytest.warns(UserWarning, match="not bit-exact"):
        batches.append(collector.collect())
    assert not collector.continues_episodes
    begun = [batch["observation"][2:, 0, 0].tolist() for batch in batches]
    assert begun == [[0, 0], [4, 4], [1, 1], [0, 0]]  # episodes have seven steps
    batches.append(collector.collect())
    assert collector.continues_episodes
    assert collector.policy_steps == collector.env_steps == 5 * 16
    ended = sum(int(batch["next", "done"].sum()) for batch in batches)
    assert collector.episodes == len(collector.take_episodes()) == ended
    earlier = torch.cat([batch["collector", "traj_ids"][2:] for batch in batches[:3]], -1)
    later = torch.cat([batch["collector", "traj_ids"][2:] for batch in batches[3:]], -1)
    assert set(earlier.flatten().tolist()).isdisjoint(later.flatten().tolist())


@pytest.mark.filterwarnings("ignore:Worker")
def test_third_death_ends_run_with_worker_and_batch(collector_of):
    collector = collector_of(transport=dying((1, 2), (1, 2), (1, 2)))
    batches_of(collector, 1)
    with pytest.raises(WorkerError, match=r"Worker 1 .* in batch 1: it dies in a test"):
        collector.collect()


@pytest.mark.nightly
@pytest.mark.usefixtures("local_ray")
@pytest.mark.filterwarnings("ignore:Worker")
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_random_deaths_do_not_change_batches(max_staleness, collector_of):
    draw = random.Random(max_staleness)
    settings = {"max_staleness": max_staleness, "state_every": 3}
    collector = collector_of(transport=None, **settings)
    collector._lockstep.timeout = 3.0
    fatal = draw.sample(range(1, 40), 10)

    def before(number):
        if number in fatal:
            time.sleep(draw.random() * 0.05)
            with contextlib.suppress(ProcessLookupError):  # it was lost shortly before
                os.kill(draw.choice(_pids(collector)), draw.choice([*KILL.values()]))

    found = batches_of(collector, 40, before)
    assert_equal(found, batches_of(collector_of(**settings), 40))
    assert collector.metrics()["collector/worker_deaths"] >= 8


CLUSTER = """
import warnings, ray, torch
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
cluster.wait_for_nodes()
from kit.collectors.chunk_worker import LocalTransport
from tests.collectors.ray_runs import assert_equal, batches_of, ray_collector
how = {"max_staleness": 1, "state_every": 2}
collector = ray_collector("normalized", worker_timeout=60.0, **how)
def before(number):
    if number == 4:
        cluster.remove_node(nodes[1], allow_graceful=False)
        cluster.add_node(num_cpus=2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = batches_of(collector, 7, before)
assert_equal(found, batches_of(ray_collector("normalized", transport=LocalTransport, **how), 7))
print("deaths", int(collector.metrics()["collector/worker_deaths"]))
collector.shutdown()
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.nightly
def test_lost_node_does_not_change_batches():
    pytest.importorskip("ray")
    command = [sys.executable, "-c", CLUSTER]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert int(ran.stdout.rpartition("deaths")[2]) >= 1


# ---------------------------------------------------------------------- errors
@pytest.mark.parametrize("transport", [LocalTransport, pytest.param(None, marks=pytest.mark.slow)])
def test_env_error_names_env_step_and_worker(transport, tmp_path, request):
    if transport is None:
        request.getfixturevalue("local_ray")
    env = make_env(lambda: Returns(reward=float("nan")), 4)
    collector = RayCollector(env, None, workers=2, frames_per_batch=16, transport=transport)
    with pytest.raises(EnvError, match=r"env 0, worker 0, after 1 policy steps: returned NaN"):
        collector.collect()
    assert collector.policy_steps == 0
    collector.shutdown()


def test_env_error_has_index_in_whole_run(tmp_path):
    calls = str(tmp_path / "calls")
    env = make_env(lambda: Raises((5,), calls), 2)  # the second environment's first step
    collector = RayCollector(env, None, workers=2, frames_per_batch=8, transport=LocalTransport)
    with pytest.raises(EnvError, match=r"env 1, worker 1, after 0 policy steps"):
        collector.collect()


def test_policy_error_names_env_step_and_worker(collector_of):
    collector = collector_of("steps", init_random_frames=0)
    collector.collect()
    with torch.no_grad():
        next(collector.policy.parameters()).fill_(torch.nan)
    with pytest.raises(PolicyError, match=r"env 0, worker 0, after 10 policy steps: its output"):
        collector.collect()


@pytest.mark.parametrize(
    ("field", "how"),
    [
        ("workers", {"workers": 4}),
        ("workers", {"workers": 0}),
        ("max_staleness", {"max_staleness": -1}),
        ("state_every", {"state_every": -1}),
        ("frames_per_batch", {"frames_per_batch": 62}),
        ("init_random_frames", {"init_random_frames": 7}),
        ("total_frames", {"total_frames": 100}),
        ("collector", {"collector": TensorCollector}),
        ("collector", {"collector": RayCollector}),
    ],
)
def test_invalid_settings_are_rejected(field, how, collector_of):
    with raises_setting(field):
        collector_of("steps", **how)


def test_workers_error_names_nearest_divisors(collector_of):
    with pytest.raises(ValueError, match=r"does not divide env\.num_envs=6\. Try: 3 or 6"):
        collector_of("steps", workers=5)


@pytest.mark.parametrize(
    ("how", "works"),
    [({"min_episodes": 10}, [9, 12]), ({"min_steps": 100, "episode_length": 20}, [3, 6])],
)
def test_episodes_must_be_divisible_among_workers(how, works, collector_of):
    with raises_setting("min_episodes") as caught:
        collector_of("episodes", **{"min_steps": None, **how})
    assert caught.value.works == works


def test_different_versions_are_rejected(collector_of, monkeypatch):
    monkeypatch.setattr(ray_module, "versions", lambda: {"kit": "0.0", "torch": "9.9"})
    with pytest.raises(ValueError, match=r"kit 0\.0, but worker 0 \(.*\) has kit"):
        collector_of()


def test_missing_ray_is_rejected_with_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"collector='ray': .* pip install 'torchrl-kit\[ray\]'"):
        ray_collector("steps")


def test_ray_that_cannot_start_is_tried_three_times(monkeypatch):
    ray = pytest.importorskip("ray")
    tried = []

    def fail(*args, **kwargs):
        tried.append(args)
        raise RuntimeError("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ValueError, match="did not start in 3 attempts: The current node timed"):
        ray_collector("steps")
    assert len(tried) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_too_few_cpus_and_too_little_memory_are_rejected(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ray_module, "_SECONDS_FOR_CPUS", 0.0)
        with raises_setting("workers", 6):
            ray_collector("steps", workers=6)
    with pytest.raises(
        ValueError, match=r"need at least 144,000,000 bytes, but Ray's object store"
    ):
        ray_collector("steps", frames_per_batch=ENVS * 10**6)


# ---------------------------------------------------------------------- every promise
def lockstep(case, transport=LocalTransport, **changes):
    env = counter_env(case)
    settings = {"workers": case.num_envs, **amounts(case), **changes}
    return RayCollector(env, counter_policy(env), transport=transport, **settings)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_ray_collector_passes_all_checks_in_one_process(max_staleness):
    promises = [name for name in COLLECTOR_CHECKS if name != "random_numbers"]

    def make(case):
        random = {"init_random_frames": case.random_steps}
        return lockstep(case, max_staleness=max_staleness, **random)

    assert check_collector(make, promises=promises) == promises


@pytest.mark.nightly
@pytest.mark.usefixtures("local_ray")
def test_ray_collector_passes_all_checks():
    def make(case):
        return lockstep(case, transport=None, workers=1)  # a check has three collectors at a time

    cases = (CollectorCase(batches=3),)
    assert check_collector(make, cases=cases) == list(COLLECTOR_CHECKS)


@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_loaded_state_continues_bit_for_bit(name, max_staleness, collector_of):
    saving = collector_of(name, max_staleness=max_staleness)
    batches_of(saving, 3)
    state = saving.state_dict()
    going_on = collector_of(name, max_staleness=max_staleness, seed=9)
    going_on.policy.load_state_dict(saving.policy.state_dict())
    going_on.load_state_dict(state)
    assert going_on.exact_resume
    assert_equal(batches_of(going_on, 4), batches_of(saving, 4))
    assert going_on.policy_steps == saving.policy_steps
    if saving.normalizer is not None:
        assert going_on.normalizer.state_dict() == saving.normalizer.state_dict()


def test_begin_again_repeats_run(collector_of):
    collector = collector_of("steps", seed=3)
    first = batches_of(collector, 2)
    for weight in collector.policy.parameters():
        weight.data /= 0.97**2
    collector.begin_again(3, ENVS * 12)
    assert collector.policy_steps == 0
    again = batches_of(collector, 2)
    assert torch.equal(first[0]["action"], again[0]["action"])
    assert collector.random_policy_steps == ENVS * 12


# ---------------------------------------------------------------------- in runs
COMMAND = [
    "-m", "recipes.ppo", "collector=ray", "collector_kwargs.workers=2", "env.num_envs=4",
    "steps.steps_per_env=32", "steps.minibatch_size=32", "steps.evaluation_episodes=2",
    "steps.evaluation_every=null",
]  # fmt: skip


def _ray_processes(pid):
    """Return the processes that belong to the Ray of a process."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True)
    lines = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
    family, grown = {pid}, True
    while grown:
        new = {int(p) for p, parent, _ in lines if int(parent) in family} - family
        grown, family = bool(new), family | new
    return family - {pid}


@pytest.mark.slow
def test_command_line_run_counts_as_planned_and_ends_ray(tmp_path):
    pytest.importorskip("ray")
    command = [sys.executable, *COMMAND, f"log_dir={tmp_path}", "steps.total_policy_steps=512"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    children = set()
    while process.poll() is None:
        children |= _ray_processes(process.pid)
        time.sleep(0.5)
    output = process.stdout.read()
    assert process.returncode == 0, output[-2000:]
    rows = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    last = dict(zip(rows[0].split(","), rows[-1].split(",")))
    assert (last["policy_steps"], last["env_steps"]) == ("512", "512")
    assert last["collector/worker_deaths"] == "0.0"
    assert children
    wait_until(lambda: not any(map(_runs, children)), "the processes of Ray end")


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_driver(number, tmp_path):
    pytest.importorskip("ray")
    command = [sys.executable, *COMMAND, f"log_dir={tmp_path}", "steps.total_policy_steps=1000000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: _has_rows(tmp_path), "the first row")
    children = _ray_processes(process.pid)
    workers = [
        pid for pid in children if b"ChunkWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(workers) == 2
    process.send_signal(number)
    process.wait(60)
    began = time.monotonic()
    wait_until(lambda: not any(map(_runs, workers)), "the workers end")
    assert time.monotonic() - began < 30
    wait_until(lambda: not any(map(_runs, children)), "the other processes of Ray end")
    checkpoints = [*tmp_path.rglob("checkpoint-*")]
    assert bool(checkpoints) or number == signal.SIGKILL


def _has_rows(folder):
    return any(len(path.read_text().splitlines()) > 1 for path in folder.rglob("metrics.csv"))


@pytest.mark.nightly
@pytest.mark.usefixtures("local_ray")
def test_impala_solves_cartpole_with_staleness_4(tmp_path):
    stale = {"workers": 2, "max_staleness": 4}
    config = impala.Config(
        collector="ray", collector_kwargs=stale, log_dir=str(tmp_path), progress=False
    )
    trainer = impala.build(config)
    trainer.run()
    assert trainer.collector.staleness == 4
    last = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    assert float(dict(zip(last[0].split(","), last[-1].split(",")))["evaluation/return"]) >= 475


@pytest.mark.slow
def test_recipes_can_be_imported_without_ray():
    code = "import sys; sys.modules['ray'] = None; import recipes.ppo"  # TorchRL imports it itself
    subprocess.run([sys.executable, "-c", code], check=True)
