"""The conformance suite finds the promise that a collector breaks, and names it."""

from __future__ import annotations

import _thread
import copy
import multiprocessing
import random
import re
import threading
from collections import OrderedDict

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.envs.utils import ExplorationType

from kit.collectors import VectorCollector
from kit.envs.errors import EnvironmentFault
from kit.steps import SettingError
from kit.testing import (
    CARTPOLE,
    COUNTING,
    PROMISES,
    REPEATING,
    BrokenPromise,
    CollectorCase,
    check_collector,
    counter_env,
    counter_policy,
    recurrent_policy,
)
from tests.collectors.kinds import amounts

CASES = (CollectorCase(),)
TRAJ_IDS = ("collector", "traj_ids")


class OneStepShort(VectorCollector):
    """Loses the last step of each batch."""

    def collect(self):
        return super().collect()[:, :-1]


class NoEnd(VectorCollector):
    """Goes on for one batch after the total."""

    def iterator(self):
        yield from super().iterator()
        yield self.collect()


class Miscounts(VectorCollector):
    """Counts an env step too many."""

    def collect(self):
        batch = super().collect()
        self.env_steps += 1
        return batch


class FirstForLast(VectorCollector):
    """Gives the first observation of the next episode as the last one of an episode."""

    def collect(self):
        batch = super().collect()
        done = batch["next", "done"].clone()
        done[:, -1] = False
        following = batch["observation"].roll(-1, 1)
        last = torch.where(done, following, batch["next", "observation"])
        return batch.set(("next", "observation"), last)


class NeverTerminates(VectorCollector):
    """Reports truncations where the environment terminated."""

    def collect(self):
        batch = super().collect()
        batch["next", "truncated"] = batch["next", "done"].clone()
        return batch.set(("next", "terminated"), torch.zeros_like(batch["next", "done"]))


class OneEnd(VectorCollector):
    """Reports the truncation alone of an episode that terminates in the step of its limit."""

    def collect(self):
        batch = super().collect()
        batch["next", "terminated"] &= ~batch["next", "truncated"]
        return batch


class LosesAStep(VectorCollector):
    """Takes a step between batches that no batch has."""

    def collect(self):
        batch = super().collect()
        result = self.env.new_step()
        self.env.step_arrays({"action": batch["action"][:, -1].numpy()}, result)
        return batch


class MixesCopies(VectorCollector):
    """Hands out another copy's steps in every other batch."""

    def collect(self):
        batch = super().collect()
        return batch.flip(0) if self._iter % 2 else batch


class OneTrajectory(VectorCollector):
    """Gives the episodes of a copy the same number."""

    def collect(self):
        batch = super().collect()
        numbers = torch.arange(self.num_envs).unsqueeze(-1).expand(batch.shape)
        return batch.set(("collector", "traj_ids"), numbers)


class NewTrajectories(VectorCollector):
    """Gives an episode another number in each batch."""

    def collect(self):
        batch = super().collect()
        batch["collector", "traj_ids"] += 10_000 * self._iter
        return batch


class ForgetsEpisodes(VectorCollector):
    """Reports the episodes of the last batch alone."""

    def collect(self):
        self.take_episodes()
        return super().collect()


class ReportsTwice(VectorCollector):
    """Does not forget what it has reported."""

    def take_episodes(self):
        self._take_in()
        return list(self._finished)


class OneSeed(VectorCollector):
    """Ignores the seed."""

    def __init__(self, env, policy, *, seed, **kwargs):
        super().__init__(env, policy, seed=0, **kwargs)
        self.set_seed(0)


class NoSeed(VectorCollector):
    """Draws its seed from the system."""

    def __init__(self, env, policy, *, seed, **kwargs):
        super().__init__(env, policy, seed=torch.seed() % 2**32, **kwargs)


class OneSeedForThePolicy(VectorCollector):
    """Seeds the environments alone."""

    def __init__(self, env, policy, *, seed, **kwargs):
        super().__init__(env, policy, seed=0, **kwargs)


class OneSeedForTheEnvironments(VectorCollector):
    """Seeds the policy alone."""

    def __init__(self, env, policy, **kwargs):
        env.set_seed(0)
        super().__init__(env, policy, **kwargs)


class SeedsThePolicyLater(VectorCollector):
    """Leaves the environments as they were seeded first."""

    def _seed_environments(self, seed):
        pass


class Greedy(VectorCollector):
    """Takes the likeliest action, as TensorDict does where nobody says that it samples."""

    def __init__(self, env, policy, **kwargs):
        mode = ExplorationType.DETERMINISTIC
        super().__init__(env, policy, exploration_type=mode, **kwargs)


class SamplesAgain(VectorCollector):
    """Begins each batch with the same random numbers of the policy."""

    beginning = None

    def collect(self):
        self.beginning = self.beginning or self._random_numbers.state_dict()
        self._random_numbers.load_state_dict(self.beginning)
        self._actor.seeded()
        return super().collect()

    def _seed_environments(self, seed):
        self.beginning = None
        super()._seed_environments(seed)


class SamplesForAll(VectorCollector):
    """Has all environments take the action of the first."""

    def __init__(self, env, policy, **kwargs):
        first = TensorDictModule(lambda one: one[:1].expand_as(one).clone(), ["action"], ["action"])
        super().__init__(env, TensorDictSequential(policy, first), **kwargs)


class FreezesThePolicy(VectorCollector):
    """Computes no gradients of the policy, from then on and everywhere."""

    def __init__(self, env, policy, **kwargs):
        super().__init__(env, policy, **kwargs)
        self.policy.requires_grad_(False)


class LeavesThePolicyEvaluating(VectorCollector):
    """Puts the policy into evaluation mode."""

    def collect(self):
        self.policy.eval()
        return super().collect()


class KeepsTheGraph(VectorCollector):
    """Has log-probabilities that gradients go through."""

    def collect(self):
        batch = super().collect()
        with torch.enable_grad():
            log_prob = self.policy.get_dist(batch.clone()).log_prob(batch["action"])
        return batch.set("action_log_prob", log_prob)


class SavesOnce(VectorCollector):
    """Saves what it has counted itself, not what it has loaded."""

    loaded = 0

    def state_dict(self):
        state = super().state_dict()
        return OrderedDict(state, policy_steps=state["policy_steps"] - self.loaded)

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        super().load_state_dict(state_dict)
        self.loaded = self.policy_steps


class SavesWhatGoesOn(VectorCollector):
    """Hands out a state that goes on with the collector."""

    saved = None

    def collect(self):
        batch = super().collect()
        if self.saved is not None:
            self.saved.update(super().state_dict())
        return batch

    def state_dict(self):
        self.saved = super().state_dict()
        return self.saved


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


class DependsOnRandomNumbers(VectorCollector):
    """Uses everybody's random numbers, and puts them back."""

    def collect(self):
        batch = super().collect()
        state = torch.get_rng_state()
        batch["noise"] = torch.rand(batch.shape)
        torch.set_rng_state(state)
        return batch


class OneMemory(VectorCollector):
    """All batches are in the same memory."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, reuse=True, **kwargs)


class TwoMemories(VectorCollector):
    """Batches are in two memories by turns."""

    memories = ()

    def collect(self):
        batch = super().collect()
        self.memories = self.memories or (batch.clone(), batch.clone())
        return self.memories[self._iter % 2].update_(batch)


class ForgetsRandomNumbers(VectorCollector):
    """Does not save where its random numbers stand."""

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        own = self._random_numbers.state_dict()
        super().load_state_dict(OrderedDict(state_dict, random_numbers=own))
        self._actor.seeded()  # nor those drawn ahead


class ForgetsRandomSteps(VectorCollector):
    """Does not save how many steps were random."""

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        super().load_state_dict(OrderedDict(state_dict, random_policy_steps=0))


class ForgetsOpenEpisodes(VectorCollector):
    """Does not save what open episodes have earned."""

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        super().load_state_dict(state_dict)
        self._statistics.restart()


class BeginsAnew(VectorCollector):
    """Resumes with new episodes."""

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        super().load_state_dict(state_dict)
        self.env.restart()


class ReportsTheFirstCopy(VectorCollector):
    """Says of every episode that the first env played it."""

    def take_episodes(self):
        return [episode._replace(env=0) for episode in super().take_episodes()]


class CountsAhead(VectorCollector):
    """Collects everything before it hands out the first batch."""

    def iterator(self):
        yield from list(super().iterator())


class EndsAreNumbers(VectorCollector):
    """Gives 0 and 1 for false and true."""

    def collect(self):
        batch = super().collect()
        return batch.set(("next", "done"), batch["next", "done"].long())


class DoubleRewards(VectorCollector):
    """Gives rewards in float64."""

    def collect(self):
        batch = super().collect()
        return batch.set(("next", "reward"), batch["next", "reward"].double())


class EndsTooEarly(VectorCollector):
    """Gives the flags of the end of a step as those before it, too."""

    def collect(self):
        batch = super().collect()
        return batch.set("done", batch["next", "done"].clone())


class CollectsOn(VectorCollector):
    """Collects when it was shut down, too."""

    def collect(self):
        try:
            return super().collect()
        except RuntimeError:
            return None


class BeginsWhereItEnds(VectorCollector):
    """Says of the last step of an episode that it is the first."""

    def collect(self):
        batch = super().collect()
        return batch.set("is_init", batch["next", "done"].clone())


class SeedsNumPy(VectorCollector):
    """Seeds everybody's random numbers, which it does not use."""

    def collect(self):
        np.random.seed(0)
        return super().collect()


class SeedsPython(VectorCollector):
    """Seeds everybody's random numbers, which it does not use."""

    def collect(self):
        random.seed(0)
        return super().collect()


class SeedsWhenItLoads(VectorCollector):
    """Seeds everybody's random numbers when it goes on."""

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        torch.manual_seed(0)
        super().load_state_dict(state_dict)


class ActsOnTheBatch(VectorCollector):
    """Has what it acts on next in the batch that it has handed out."""

    def collect(self):
        batch = super().collect()
        batch["now"] = torch.from_numpy(self.env.start()["observation"].copy()).unsqueeze(1) * (
            torch.ones(*batch.shape, 1)
        )
        self.env.acts_on({"observation": batch["now"][:, -1].numpy()})
        self._left = self.env.start()
        return batch


class OwnWeights(VectorCollector):
    """Acts with the weights that the policy had when the collector was made."""

    def __init__(self, env, policy, **kwargs):
        super().__init__(env, copy.deepcopy(policy), **kwargs)


class ProbabilitiesOfOtherWeights(VectorCollector):
    """Acts with the weights of the beginning; log-probabilities are those of the newest."""

    def __init__(self, env, policy, **kwargs):
        super().__init__(env, copy.deepcopy(policy), **kwargs)
        self.newest = policy

    def collect(self):
        batch = super().collect()
        with torch.no_grad():
            log_prob = self.newest.get_dist(batch.clone()).log_prob(batch["action"])
        return batch.set("action_log_prob", log_prob)


class WrongProbabilitiesInTurn(VectorCollector):
    """Has wrong log-probabilities in every other batch."""

    def collect(self):
        batch = super().collect()
        return batch.set("action_log_prob", batch["action_log_prob"] - self._iter % 2)


class ProbabilitiesOfTheStepBefore(VectorCollector):
    """Has the log-probabilities of other steps."""

    def collect(self):
        batch = super().collect()
        return batch.set("action_log_prob", batch["action_log_prob"].roll(1, 1))


class SavesTheNextStep(VectorCollector):
    """Takes a step when it is saved, which no batch has."""

    def state_dict(self):
        state = copy.deepcopy(super().state_dict())
        self.env.start()
        self.env.step_arrays({"action": np.zeros(self.num_envs, np.int64)}, self.env.new_step())
        return state


class LeavesAThread(VectorCollector):
    """Starts a thread that nobody stops."""

    end = threading.Event()
    daemon = False

    def collect(self):
        threading.Thread(target=self.end.wait, daemon=self.daemon).start()
        return super().collect()


class LeavesADaemon(LeavesAThread):
    """Starts a thread that only ends with the process."""

    end, daemon = threading.Event(), True


class LeavesItsWorkers(VectorCollector):
    """Does not close its environments."""

    def shutdown(self, *args, **kwargs):
        super().shutdown(close_env=False)


class LeavesAThreadOfALibrary(VectorCollector):
    """Starts a thread that Python does not know of."""

    end = threading.Event()

    def collect(self):
        _thread.start_new_thread(self.end.wait, ())
        return super().collect()


def broken(kind: type[VectorCollector], vectorization: str = "sync", world=COUNTING, **kwargs):
    def make(case):
        env = world.env(case, vectorization, **kwargs)
        return kind(env, world.policy(env), **amounts(case))

    return make


def test_a_collector_that_is_right_passes_with_the_names_of_all_promises():
    assert check_collector(broken(VectorCollector), cases=CASES) == list(PROMISES)


def test_a_single_step_that_two_seeds_have_in_common_proves_nothing():
    one = CollectorCase(num_envs=1, steps_per_env=1, batches=1)
    assert check_collector(broken(VectorCollector), cases=[one]) == list(PROMISES)


@pytest.mark.parametrize("world", [COUNTING, CARTPOLE], ids=["counting", "cartpole"])
@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (OneStepShort, "counts"),
        (NoEnd, "counts"),
        (Miscounts, "counts"),
        (FirstForLast, "transitions"),
        (NeverTerminates, "transitions"),
        (OneEnd, "transitions"),
        (LosesAStep, "continuity"),
        (MixesCopies, "continuity"),
        (CountsAhead, "counts"),
        (EndsAreNumbers, "transitions"),
        (DoubleRewards, "transitions"),
        (EndsTooEarly, "transitions"),
        (BeginsWhereItEnds, "continuity"),
        (OneTrajectory, "trajectories"),
        (NewTrajectories, "trajectories"),
        (ForgetsEpisodes, "reports"),
        (ReportsTwice, "reports"),
        (ReportsTheFirstCopy, "reports"),
        (OneSeed, "seeds"),
        (NoSeed, "seeds"),
        (OneSeedForThePolicy, "seeds"),
        (SeedsThePolicyLater, "seeds"),
        (Greedy, "seeds"),
        (SamplesAgain, "seeds"),
        (SamplesForAll, "seeds"),
        (FastRounds, "plain"),
        (SaysItIsExact, "plain"),
        (DisturbsRandomNumbers, "random_numbers"),
        (DependsOnRandomNumbers, "random_numbers"),
        (SeedsNumPy, "random_numbers"),
        (SeedsPython, "random_numbers"),
        (SeedsWhenItLoads, "random_numbers"),
        (OneMemory, "memory"),
        (TwoMemories, "memory"),
        (ActsOnTheBatch, "memory"),
        (KeepsTheGraph, "memory"),
        (OwnWeights, "policy"),
        (ProbabilitiesOfTheStepBefore, "policy"),
        (ProbabilitiesOfOtherWeights, "policy"),
        (WrongProbabilitiesInTurn, "policy"),
        (FreezesThePolicy, "policy"),
        (LeavesThePolicyEvaluating, "policy"),
        (SavesTheNextStep, "checkpoint"),
        (SavesOnce, "checkpoint"),
        (SavesWhatGoesOn, "checkpoint"),
        (ForgetsRandomNumbers, "checkpoint"),
        (ForgetsOpenEpisodes, "checkpoint"),
        (BeginsAnew, "checkpoint"),
        (CollectsOn, "shutdown"),
    ],
)
def test_the_promise_that_is_broken_is_named(kind, promise, world):
    case = world.cases[0]
    with pytest.raises(BrokenPromise, match=rf"^{promise}: ") as caught:
        check_collector(broken(kind, world=world), world=world, cases=[case])
    assert (caught.value.promise, caught.value.case) == (promise, case)
    assert f"num_envs=3, steps_per_env={case.steps_per_env}" in str(caught.value)


@pytest.mark.parametrize("world", [COUNTING, CARTPOLE], ids=["counting", "cartpole"])
def test_a_policy_that_is_not_said_to_be_exact_may_round_a_little(world):
    make = broken(RoundsALittle, world=world)
    assert check_collector(make, world=world, promises=["plain"]) == ["plain"]


def test_environments_that_no_seed_reaches_are_found():
    with pytest.raises(BrokenPromise, match=r"^seeds: another seed gives the same episodes"):
        check_collector(broken(OneSeedForTheEnvironments), cases=CASES)


def test_a_greedy_collector_is_found_by_its_actions():
    with pytest.raises(BrokenPromise, match=r"^policy: actions are the likeliest ones"):
        check_collector(broken(Greedy), cases=CASES, promises=["policy"])


class NeverAtRandom(VectorCollector):
    """Leaves the random steps to the policy, and says nothing of it."""

    def __init__(self, env, policy, *, init_random_frames, **kwargs):
        super().__init__(env, policy, **kwargs)


class SaysItIsRandom(NeverAtRandom):
    """Leaves the random steps to the policy, and counts them as random."""

    def __init__(self, env, policy, *, init_random_frames, **kwargs):
        super().__init__(env, policy, init_random_frames=0, **kwargs)
        self.said = init_random_frames

    def collect(self):
        batch = super().collect()
        self.random_policy_steps = min(self.policy_steps, self.said)
        return batch


class RandomForTooLong(VectorCollector):
    """Goes on at random, and counts the random steps that were asked for."""

    def __init__(self, env, policy, *, init_random_frames, **kwargs):
        super().__init__(env, policy, init_random_frames=3_000, **kwargs)
        self.said = init_random_frames

    def collect(self):
        batch = super().collect()
        self.random_policy_steps = min(self.policy_steps, self.said)
        return batch


class OneRandomAction(VectorCollector):
    """Takes the first action as a random one."""

    def __init__(self, env, policy, **kwargs):
        super().__init__(env, policy, **kwargs)
        none = {"action": torch.zeros(self.num_envs, dtype=torch.long)}
        self._actor._random._draw = lambda steps: [none] * steps


class CountsWholeBatches(VectorCollector):
    """Counts the batch in which random steps end as random."""

    def collect(self):
        before = self.random_policy_steps
        batch = super().collect()
        if self.random_policy_steps > before:
            self.random_policy_steps = self.policy_steps
        return batch


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (VectorCollector, None),
        (NeverAtRandom, "counts"),
        (CountsWholeBatches, "counts"),
        (SaysItIsRandom, "random_actions"),
        (OneRandomAction, "random_actions"),
        (RandomForTooLong, "random_actions"),
    ],
)
@pytest.mark.parametrize("steps", [3, 21, 60])
def test_random_steps_are_random_and_counted(kind, promise, steps):
    def make(case):
        env, random = counter_env(case), {"init_random_frames": case.random_steps}
        return kind(env, counter_policy(env), **amounts(case), **random)

    case = CollectorCase(random_steps=steps)
    if promise is None or (kind in (CountsWholeBatches, RandomForTooLong) and steps == 60):
        assert check_collector(make, cases=[case], promises=["counts", "random_actions"])
        return
    with pytest.raises(BrokenPromise, match=rf"^{promise}: "):
        check_collector(make, cases=[case], promises=["counts", "random_actions"])


def test_random_steps_are_counted_on_in_a_run_that_goes_on():
    def make(case):
        env, random = counter_env(case), {"init_random_frames": case.random_steps}
        return ForgetsRandomSteps(env, counter_policy(env), **amounts(case), **random)

    with pytest.raises(BrokenPromise, match=r"^checkpoint: random_policy_steps are"):
        check_collector(make, cases=[CollectorCase(random_steps=6)])


class RemembersOtherEpisodes(VectorCollector):
    """Begins episodes with the memory that the one before has left."""

    def collect(self):
        batch = super().collect()
        steps = torch.arange(1.0, batch.shape[1] + 1).expand(len(batch), -1)
        return batch.set("remembered", steps.unsqueeze(-1) + self.policy_steps // self.num_envs)


@pytest.mark.parametrize("kind", [VectorCollector, RemembersOtherEpisodes])
def test_a_memory_that_goes_on_in_another_episode_is_found(kind):
    def make(case):
        env = counter_env(case)
        return kind(env, recurrent_policy(env), **amounts(case))

    if kind is VectorCollector:
        assert check_collector(make, cases=CASES) == list(PROMISES)
    else:
        with pytest.raises(BrokenPromise, match=r"^continuity: the policy remembers"):
            check_collector(make, cases=CASES)


@pytest.mark.parametrize("kind", [LeavesAThread, LeavesADaemon])
def test_a_thread_that_is_left_is_found(kind, monkeypatch):
    monkeypatch.setattr("kit.testing.collectors._SECONDS_TO_END", 0.1)
    try:
        with pytest.raises(BrokenPromise, match=r"^shutdown: threads are left: "):
            check_collector(broken(kind), cases=CASES, promises=["shutdown"])
    finally:
        kind.end.set()


def test_a_thread_that_is_left_and_not_pythons_is_found(monkeypatch):
    monkeypatch.setattr("kit.testing.collectors._SECONDS_TO_END", 0.1)
    make = broken(LeavesAThreadOfALibrary)
    try:
        with pytest.raises(BrokenPromise, match=r"^shutdown: threads are left that are not Python"):
            check_collector(make, cases=CASES, promises=["shutdown"])
    finally:
        LeavesAThreadOfALibrary.end.set()


def test_a_process_that_is_left_is_found():
    before = set(multiprocessing.active_children())
    try:
        with pytest.raises(BrokenPromise, match=r"^shutdown: processes are left"):
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


def test_env_steps_are_counted_where_actions_are_repeated():
    check_collector(broken(CountsPolicySteps), promises=["counts"])
    with pytest.raises(BrokenPromise, match=r"^counts: counted .*'env_steps'"):
        check_collector(broken(CountsPolicySteps, world=REPEATING), world=REPEATING)


@pytest.mark.parametrize("limit", [1, 3])
def test_a_limit_is_in_policy_steps_where_actions_are_repeated(limit):
    make = broken(VectorCollector, world=REPEATING, max_episode_steps=limit)
    with pytest.raises(BrokenPromise, match=r"^transitions: next truncated"):
        check_collector(make, world=REPEATING)


@pytest.mark.parametrize(
    ("entry", "promise"),
    [("action", "counts"), (("next", "truncated"), "counts"), (TRAJ_IDS, "trajectories")],
)
def test_an_entry_that_is_in_no_batch_is_named(entry, promise):
    class Incomplete(VectorCollector):
        def collect(self):
            return super().collect().exclude(entry)

    with pytest.raises(
        BrokenPromise, match=rf"^{promise}: batches have no {re.escape(str(entry))}"
    ):
        check_collector(broken(Incomplete), cases=CASES)


def test_only_the_promises_that_are_asked_for_are_checked():
    assert check_collector(broken(OneMemory), promises=["seeds"], cases=CASES) == ["seeds"]


def test_a_promise_that_nobody_makes_is_refused_with_those_that_there_are():
    with pytest.raises(SettingError, match="what works: counts or transitions"):
        check_collector(broken(VectorCollector), promises=["count"])


def test_what_goes_wrong_in_a_collector_is_passed_on():
    class Raises(VectorCollector):
        def collect(self):
            raise EnvironmentFault("env", 1, "fell over")

    with pytest.raises(EnvironmentFault, match="fell over"):
        check_collector(broken(Raises), cases=CASES)
