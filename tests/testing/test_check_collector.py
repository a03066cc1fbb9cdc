"""The conformance suite finds the promise that a collector breaks, and names it."""

from __future__ import annotations

import copy
import multiprocessing
import re
from collections import OrderedDict

import pytest
import torch

from kit.collectors import VectorCollector
from kit.envs.errors import EnvError
from kit.testing import (
    CARTPOLE,
    COLLECTOR_CHECKS,
    COUNTING,
    REPEATING,
    CollectorCase,
    ConformanceError,
    check_collector,
    counter_env,
    counter_policy,
)
from tests.collectors.kinds import amounts
from tests.errors import raises_setting

CASES = (CollectorCase(),)
TRAJ_IDS = ("collector", "traj_ids")


class OneStepShort(VectorCollector):
    """Loses the last step of each batch."""

    def collect(self):
        return super().collect()[:, :-1]


class FirstForLast(VectorCollector):
    """Gives the first observation of the next episode as the last one of an episode."""

    def collect(self):
        batch = super().collect()
        done = batch["next", "done"].clone()
        done[:, -1] = False
        following = batch["observation"].roll(-1, 1)
        last = torch.where(done, following, batch["next", "observation"])
        return batch.set(("next", "observation"), last)


class LosesAStep(VectorCollector):
    """Takes a step between batches that no batch has."""

    def collect(self):
        batch = super().collect()
        result = self.env.new_step()
        self.env.step_arrays({"action": batch["action"][:, -1].numpy()}, result)
        return batch


class OneTrajectory(VectorCollector):
    """Gives the episodes of a copy the same number."""

    def collect(self):
        batch = super().collect()
        numbers = torch.arange(self.num_envs).unsqueeze(-1).expand(batch.shape)
        return batch.set(("collector", "traj_ids"), numbers)


class ForgetsEpisodes(VectorCollector):
    """Reports the episodes of the last batch alone."""

    def collect(self):
        self.take_episodes()
        return super().collect()


class OneSeed(VectorCollector):
    """Ignores the seed."""

    def __init__(self, env, policy, *, seed, **kwargs):
        super().__init__(env, policy, seed=0, **kwargs)
        self.set_seed(0)


class SavesOnce(VectorCollector):
    """Saves what it has counted itself, not what it has loaded."""

    loaded = 0

    def state_dict(self):
        state = super().state_dict()
        return OrderedDict(state, policy_steps=state["policy_steps"] - self.loaded)

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        super().load_state_dict(state_dict)
        self.loaded = self.policy_steps


class FastRounds(VectorCollector):
    """Rounds on its fast path."""

    def __init__(self, env, policy, *, fast_policy, **kwargs):
        super().__init__(env, policy, fast_policy=fast_policy, **kwargs)
        self.rounds = fast_policy

    def collect(self):
        batch = super().collect()
        if self.rounds:
            batch["action_log_prob"] = self.rounded(batch["action_log_prob"])
        return batch

    def rounded(self, log_prob):
        return log_prob.half().float()


class RoundsALittle(FastRounds):
    """Rounds on its fast path as sums in another order do, and says so."""

    def rounded(self, log_prob):
        return torch.nextafter(log_prob, torch.zeros_like(log_prob))


class SaysItIsExact(RoundsALittle):
    """Rounds a little, and says that its policy is exact."""

    def __init__(self, env, policy, **kwargs):
        super().__init__(env, policy, **kwargs)
        self.exact_policy = True


class DisturbsRandomNumbers(VectorCollector):
    """Draws from everybody's random numbers."""

    def collect(self):
        torch.rand(1)
        return super().collect()


class OneMemory(VectorCollector):
    """All batches are in the same memory."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, reuse=True, **kwargs)


class ForgetsRandomSteps(VectorCollector):
    """Does not save how many steps were random."""

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        super().load_state_dict(OrderedDict(state_dict, random_policy_steps=0))


class CollectsOn(VectorCollector):
    """Collects when it was shut down, too."""

    def collect(self):
        try:
            return super().collect()
        except RuntimeError:
            return None


class OwnWeights(VectorCollector):
    """Acts with the weights that the policy had when the collector was made."""

    def __init__(self, env, policy, **kwargs):
        super().__init__(env, copy.deepcopy(policy), **kwargs)


class LeavesItsWorkers(VectorCollector):
    """Does not close its environments."""

    def shutdown(self, *args, **kwargs):
        super().shutdown(close_env=False)


def broken(kind: type[VectorCollector], vectorization: str = "sync", world=COUNTING, **kwargs):
    def make(case):
        env = world.env(case, vectorization, **kwargs)
        return kind(env, world.policy(env), **amounts(case))

    return make


def test_correct_collector_passes_all_checks():
    assert check_collector(broken(VectorCollector), cases=CASES) == list(COLLECTOR_CHECKS)


def test_check_allows_seeds_to_share_single_step():
    one = CollectorCase(num_envs=1, steps_per_env=1, batches=1)
    assert check_collector(broken(VectorCollector), cases=[one]) == list(COLLECTOR_CHECKS)


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (OneStepShort, "counts"),
        (FirstForLast, "transitions"),
        (LosesAStep, "continuity"),
        (OneTrajectory, "trajectories"),
        (ForgetsEpisodes, "reports"),
        (OneSeed, "seeds"),
        (SaysItIsExact, "plain"),
        (DisturbsRandomNumbers, "random_numbers"),
        (OneMemory, "memory"),
        (OwnWeights, "policy"),
        (SavesOnce, "checkpoint"),
        (CollectsOn, "shutdown"),
    ],
)
def test_error_names_broken_promise(kind, promise):
    case = COUNTING.cases[0]
    with pytest.raises(ConformanceError, match=rf"^{promise}: ") as caught:
        check_collector(broken(kind), cases=[case])
    assert (caught.value.promise, caught.value.case) == (promise, case)
    assert f"num_envs=3, steps_per_env={case.steps_per_env}" in str(caught.value)


@pytest.mark.parametrize("world", [COUNTING, CARTPOLE], ids=["counting", "cartpole"])
def test_check_allows_rounding_of_inexact_policy(world):
    make = broken(RoundsALittle, world=world)
    assert check_collector(make, world=world, promises=["plain"]) == ["plain"]


class SaysItIsRandom(VectorCollector):
    """Leaves the random steps to the policy, and counts them as random."""

    def __init__(self, env, policy, *, init_random_frames, **kwargs):
        super().__init__(env, policy, **kwargs)
        self.said = init_random_frames

    def collect(self):
        batch = super().collect()
        self.random_policy_steps = min(self.policy_steps, self.said)
        return batch


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (VectorCollector, None),
        (SaysItIsRandom, "random_actions"),
    ],
)
@pytest.mark.parametrize("steps", [3, 21, 60])
def test_check_verifies_that_random_steps_are_random(kind, promise, steps):
    def make(case):
        env, random = counter_env(case), {"init_random_frames": case.random_steps}
        return kind(env, counter_policy(env), **amounts(case), **random)

    case = CollectorCase(random_steps=steps)
    if promise is None:
        assert check_collector(make, cases=[case], promises=["counts", "random_actions"])
        return
    with pytest.raises(ConformanceError, match=rf"^{promise}: "):
        check_collector(make, cases=[case], promises=["counts", "random_actions"])


def test_check_detects_random_step_count_lost_on_resume():
    def make(case):
        env, random = counter_env(case), {"init_random_frames": case.random_steps}
        return ForgetsRandomSteps(env, counter_policy(env), **amounts(case), **random)

    with pytest.raises(ConformanceError, match=r"^checkpoint: random_policy_steps are"):
        check_collector(make, cases=[CollectorCase(random_steps=6)])


def test_check_detects_process_left_after_shutdown():
    before = set(multiprocessing.active_children())
    try:
        with pytest.raises(ConformanceError, match=r"^shutdown: processes are left"):
            check_collector(
                broken(LeavesItsWorkers, "async"),
                cases=[CollectorCase(num_envs=1)],
                promises=["shutdown"],
            )
    finally:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
            process.join()


class CountsPolicySteps(VectorCollector):
    """Takes every policy step for one env step."""

    def collect(self):
        batch = super().collect()
        self.env_steps += self.policy_steps - self.env_steps
        return batch


def test_check_detects_wrong_env_steps_with_action_repeat():
    check_collector(broken(CountsPolicySteps), promises=["counts"])
    with pytest.raises(ConformanceError, match=r"^counts: counted .*'env_steps'"):
        check_collector(broken(CountsPolicySteps, world=REPEATING), world=REPEATING)


@pytest.mark.parametrize(
    ("entry", "promise"),
    [("action", "counts"), (("next", "truncated"), "counts"), (TRAJ_IDS, "trajectories")],
)
def test_error_names_missing_entry(entry, promise):
    class Incomplete(VectorCollector):
        def collect(self):
            return super().collect().exclude(entry)

    with pytest.raises(
        ConformanceError, match=rf"^{promise}: batches have no {re.escape(str(entry))}"
    ):
        check_collector(broken(Incomplete), cases=CASES)


def test_check_runs_only_requested_promises():
    assert check_collector(broken(OneMemory), promises=["seeds"], cases=CASES) == ["seeds"]


def test_check_rejects_unknown_promise():
    with raises_setting("promises"):
        check_collector(broken(VectorCollector), promises=["count"])


def test_check_propagates_collector_errors():
    class Raises(VectorCollector):
        def collect(self):
            raise EnvError("env", 1, "fell over")

    with pytest.raises(EnvError, match="fell over"):
        check_collector(broken(Raises), cases=CASES)
