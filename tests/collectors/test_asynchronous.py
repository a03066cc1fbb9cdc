"""AsyncCollector: staleness is exact, counted and logged, whoever is faster."""

from __future__ import annotations

import time

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from kit.collectors import AsyncCollector, EpisodeCollector
from kit.envs import make_env
from kit.envs.errors import EnvError
from kit.testing.counter import COUNTER
from tests.envs.odd_envs import Raises, Steps
from tests.errors import raises_setting


class Version(nn.Module):
    """Writes its one weight: the number of the update phase it belongs to."""

    def __init__(self):
        super().__init__()
        self.version = nn.Parameter(torch.zeros(()))

    def forward(self, observation):
        count = observation.shape[0]
        return torch.zeros(count, dtype=torch.int64), self.version.expand(count).clone()


def policy():
    return TensorDictModule(Version(), ["observation"], ["action", "version"])


def update(collector):
    """An update phase: the next version of the weights."""
    with torch.no_grad():
        collector.policy.module.version += 1


@pytest.fixture
def asynchronous():
    made = []

    def make(**settings):
        settings = {"frames_per_batch": 4, **settings}
        made.append(AsyncCollector(make_env(Steps, 2), policy(), **settings))
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown()


def versions(collector, count, slow=False):
    """The version of the policy that acted in each of the next batches."""
    found = []
    for _ in range(count):
        (version,) = collector.collect()["version"].unique().tolist()
        found.append(int(version))
        if slow:
            time.sleep(0.2)  # the process could make several batches meanwhile
        update(collector)
    return found


def test_batch_policy_has_exact_staleness(asynchronous):
    max_staleness = 2
    collector = asynchronous(max_staleness=max_staleness)
    found, stale = [], []
    for _ in range(6):
        found += versions(collector, 1)
        stale.append(collector.staleness)
    assert found == [max(batch - max_staleness, 0) for batch in range(6)]
    assert stale == [min(batch, max_staleness) for batch in range(6)]


def test_metrics_report_mean_staleness_since_last_call(asynchronous):
    collector = asynchronous(max_staleness=1)
    # A learner that takes its time gets the same versions as one that does not.
    assert versions(collector, 4, slow=True) == [0, 0, 1, 2]
    assert collector.metrics() == {"collector/staleness": 3 / 4}
    assert collector.metrics() == {}
    versions(collector, 2)
    assert collector.metrics() == {"collector/staleness": 1.0}


def test_update_policy_weights_sends_weights_before_next_collect(asynchronous):
    collector = asynchronous(max_staleness=1)
    versions(collector, 2)  # the second version has been made
    collector.update_policy_weights_()
    update(collector)  # not sent: this batch's weights are
    assert int(collector.collect()["version"].max()) == 1
    assert int(collector.collect()["version"].max()) == 2


def test_update_policy_weights_copies_weights_of_other_policy(asynchronous):
    collector, other = asynchronous(max_staleness=0), policy()
    assert versions(collector, 1) == [0]
    with torch.no_grad():
        other.module.version.fill_(7.0)
    collector.update_policy_weights_(other)
    assert versions(collector, 2) == [7, 8]


def test_async_collector_mirrors_counts_of_worker_collector(asynchronous):
    collector = asynchronous(total_frames=8, init_random_frames=4)
    assert (collector.num_envs, collector.frames_per_batch, len(collector)) == (2, 4, 2)
    batches = list(collector)
    assert [batch.shape for batch in batches] == [(2, 2), (2, 2)]
    assert (collector.policy_steps, collector.random_policy_steps) == (8, 4)
    assert (collector.env_steps, collector.episodes) == (8, 2)
    assert [(e.env, e.length) for e in collector.take_episodes()] == [(0, 3), (1, 3)]


def test_reused_batch_is_view_of_shared_memory(asynchronous):
    collector = asynchronous(max_staleness=0, reuse=True)
    first = collector.collect()
    kept = first["observation"].clone()
    collector.collect()
    assert torch.equal(first["observation"], kept)
    collector.collect()
    assert not torch.equal(first["observation"], kept)


def test_batch_accepts_new_entries(asynchronous):
    collector = asynchronous(max_staleness=0, reuse=True)
    for _ in range(3):
        batch = collector.collect()
        assert "advantage" not in batch.keys()
        batch["advantage"] = torch.zeros(2, 2, 1)


def test_reused_batch_is_stable_until_next_collect(asynchronous):
    collector = asynchronous(max_staleness=0, reuse=True)
    batch = collector.collect()
    kept = batch.clone()
    collector.update_policy_weights_()
    collector.state_dict()  # waits for the next batch, which is made from now on
    assert (batch == kept).all()


def test_resume_with_pending_batches_keeps_weight_versions(asynchronous):
    settings = {"max_staleness": 1, "total_frames": 24}
    saving, going_on = asynchronous(**settings), asynchronous(**settings)
    assert versions(saving, 3) == [0, 0, 1]
    state = saving.state_dict()
    going_on.policy.load_state_dict(saving.policy.state_dict())
    going_on.load_state_dict(state)
    one = [batch for batch in saving.iterator() if update(saving) is None]
    other = [batch for batch in going_on.iterator() if update(going_on) is None]
    assert [int(batch["version"].max()) for batch in one] == [2, 3, 4]
    for a, b in zip(one, other, strict=True):
        for key in ("observation", "version", ("next", "done"), ("collector", "traj_ids")):
            assert torch.equal(a[key], b[key])
    assert going_on.policy_steps == saving.policy_steps == 24


@pytest.mark.parametrize("early", [False, True])
def test_resume_with_larger_total_uses_unconsumed_weights(asynchronous, early):
    ended, longer = (asynchronous(max_staleness=2, total_frames=n) for n in (16, 32))
    assert versions(ended, 4) == [0, 0, 0, 1]
    if early:
        ended.update_policy_weights_()
    state = ended.state_dict()
    longer.policy.load_state_dict(ended.policy.state_dict())
    longer.load_state_dict(state)
    assert versions(longer, 4) == [2, 3, 4, 5]


class Opaque(Steps):
    """Holds what cannot be captured."""

    def __init__(self):
        super().__init__()
        self.held = (number for number in ())


def test_pending_batches_end_old_episodes_after_inexact_resume():
    saving, going_on = (
        AsyncCollector(make_env(Opaque, 2), policy(), frames_per_batch=4) for _ in range(2)
    )
    versions(saving, 1)
    going_on.load_state_dict(saving.state_dict())
    assert not going_on.exact_resume
    found = [
        (going_on.collect()["observation"][0].tolist(), going_on.continues_episodes)
        for _ in range(3)
    ]
    assert found == [([[2], [0]], True), ([[0], [1]], False), ([[2], [0]], True)]
    saving.shutdown()
    going_on.shutdown()


def test_load_rejects_larger_max_staleness(asynchronous):
    saving, going_on = asynchronous(max_staleness=1), asynchronous(max_staleness=2)
    versions(saving, 3)
    with raises_setting("max_staleness"):
        going_on.load_state_dict(saving.state_dict())


def test_set_seed_applies_after_pending_batches(asynchronous):
    found = []
    for wait in (0.0, 0.3):
        collector = asynchronous(max_staleness=2)
        versions(collector, 1)
        collector.update_policy_weights_()
        time.sleep(wait)  # the process makes the next batches meanwhile
        collector.set_seed(3)
        found.append([collector.collect()["observation"][0].tolist() for _ in range(4)])
    assert found == [[[[2], [0]], [[1], [2]], [[0], [1]], [[0], [1]]]] * 2  # episodes have 3 steps


def test_shared_memory_transfers_episodes_of_different_lengths():
    def make(kind, **settings):
        env = make_env(COUNTER, 2, seed=3)
        return kind(env, None, min_episodes=3, total_frames=30, seed=1, **settings)

    collector = make(AsyncCollector, collector=EpisodeCollector)
    found, wanted = list(collector), list(make(EpisodeCollector))
    collector.shutdown()
    assert len({batch.shape for batch in wanted}) > 1
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one["observation"], other["observation"])


# ---------------------------------------------------------------------- what is refused
def test_async_collector_rejects_negative_max_staleness():
    with raises_setting("max_staleness"):
        AsyncCollector(make_env(Steps, 2), None, frames_per_batch=4, max_staleness=-1)


def test_async_collector_forwards_setting_errors():
    with raises_setting("frames_per_batch") as caught:
        AsyncCollector(make_env(Steps, 2), None, frames_per_batch=5)
    assert caught.value.field == "frames_per_batch"


def no_environment():
    raise KeyError("nothing of this name")


def test_worker_failure_is_raised_with_traceback():
    message = r"^the collector's process failed: 'nothing of this name'\nTraceback (.|\n)*Key"
    with pytest.raises(RuntimeError, match=message):
        AsyncCollector(no_environment, None, frames_per_batch=4)


class Shifted(nn.Module):
    """A policy with a plain number that a hook anneals."""

    def __init__(self):
        super().__init__()
        self.shift = 0.0

    def forward(self, observation):
        count = observation.shape[0]
        return torch.zeros(count, dtype=torch.int64), torch.full((count,), self.shift)


def test_non_tensor_policy_attributes_have_weight_staleness():
    module = TensorDictModule(Shifted(), ["observation"], ["action", "shift"])
    collector = AsyncCollector(make_env(Steps, 2), module, frames_per_batch=4, max_staleness=2)
    found = []
    for _ in range(6):
        found += collector.collect()["shift"].unique().tolist()
        module.module.shift += 1.0
    collector.shutdown()
    assert found == [max(float(k - 2), 0.0) for k in range(6)]


def test_exploration_policy_has_same_staleness_as_policy(asynchronous):
    exploring = policy()
    collector = asynchronous(exploration_policy=exploring, exploration_frames=16, max_staleness=1)
    found = []
    for _ in range(6):
        found += collector.collect()["version"].unique().tolist()
        with torch.no_grad():
            exploring.module.version -= 1
            collector.policy.module.version += 1
    assert found == [0, 0, -1, -2, 3, 4]


def test_collect_rejects_policy_with_changed_parameter_count():
    network = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 2), nn.Flatten(), nn.Tanh())
    choice = nn.Sequential(network, nn.Softmax(-1))
    module = TensorDictSequential(
        TensorDictModule(choice, ["observation"], ["logits"]),
        TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"]),
    )
    collector = AsyncCollector(make_env(Steps, 2), module, frames_per_batch=4, max_staleness=0)
    collector.collect()
    network[2].bias = None
    with pytest.raises(ValueError, match="zip"):
        collector.collect()
    collector.shutdown()


def test_replaced_parameters_are_sent_to_worker(asynchronous):
    collector = asynchronous(max_staleness=0)
    collector.collect()
    collector.policy.module.version = nn.Parameter(torch.tensor(5.0))
    assert versions(collector, 1) == [5]


def test_keyboard_interrupt_in_worker_raises_env_error(tmp_path):
    def make():
        return make_env(lambda: Raises((1,), str(tmp_path / "calls"), how="interrupt"), 1)

    collector = AsyncCollector(make, None, steps_per_env=2)
    with pytest.raises(EnvError, match="raised KeyboardInterrupt in the collector's"):
        collector.collect()
    collector.shutdown()
