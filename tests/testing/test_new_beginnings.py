"""Collectors that go on from a saved state with new episodes, and what the suite asks of them."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from kit.collectors import EpisodeCollector, VectorCollector
from kit.envs.plain_values import StateCaptureError
from kit.testing import CARTPOLE, COLLECTOR_CHECKS, COUNTING, ConformanceError, check_collector
from tests.collectors.kinds import amounts, episodes

WORLDS = pytest.mark.parametrize("world", [COUNTING, CARTPOLE], ids=["counting", "cartpole"])


def without_state(env):
    """The same environment, which does not give its state."""

    def refuse():
        raise StateCaptureError("the state is secret")

    env.backend.full_states = refuse
    return env


def check(kind, world, exact_resume=False):
    def make(case):
        env = without_state(world.env(case))
        return kind(env, world.policy(env), **amounts(case))

    check_collector(make, world=world, promises=["checkpoint"], exact_resume=exact_resume)


class ClaimsToBeExact(VectorCollector):
    """Says that it goes on exactly where it was, which it cannot."""

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        super().load_state_dict(state_dict)
        self.exact_resume = True


class KeepsReturns(VectorCollector):
    """Adds what open episodes had earned to new ones."""

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        super().load_state_dict(state_dict)
        self._statistics.load_state_dict(state_dict["statistics"])


class KeepsNumbers(VectorCollector):
    """Gives new episodes the numbers of those that were open."""

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        super().load_state_dict(state_dict)
        self._episode_ids.present[...] = state_dict["episode_ids"]


class ForgetsTheTotal(VectorCollector):
    """Begins counting anew as well."""

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        super().load_state_dict(state_dict)
        self.policy_steps = 0


class CountsTheOpenEpisodes(VectorCollector):
    """Counts episodes that ended in no batch."""

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        super().load_state_dict(state_dict)
        self.episodes += self.num_envs


class ForgetsReports(VectorCollector):
    """Does not report what had ended before and nobody had asked for."""

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        super().load_state_dict(state_dict)
        self._finished = []


class TakesAStepFirst(VectorCollector):
    """Takes a step in the new episodes that no batch has."""

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        super().load_state_dict(state_dict)
        self.env.step(self.env.rand_action(self.env.reset()))
        self._left = self.env.start()  # and hides it


@WORLDS
@pytest.mark.parametrize("exact_resume", [False, True])
def test_check_detects_false_claim_of_exact_resume(world, exact_resume):
    with pytest.raises(
        ConformanceError, match=r"^checkpoint: batches differ after loading a saved state"
    ):
        check(ClaimsToBeExact, world, exact_resume)


@WORLDS
def test_check_allows_restart_only_without_exact_resume(world):
    check(VectorCollector, world, exact_resume=False)
    with pytest.raises(ConformanceError, match=r"^checkpoint: does not resume exactly"):
        check(VectorCollector, world, exact_resume=True)


@WORLDS
@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (ForgetsTheTotal, "counts"),
        (CountsTheOpenEpisodes, "counts"),
        (TakesAStepFirst, "continuity"),
        (KeepsNumbers, "trajectories"),
        (KeepsReturns, "reports"),
        (ForgetsReports, "reports"),
    ],
)
def test_error_names_broken_promise_after_restart(kind, promise, world):
    with pytest.raises(ConformanceError, match=f"^checkpoint: after a restart, {promise}: "):
        check(kind, world)


def test_check_requires_restart_when_collector_is_inexact():
    class SaysNo(VectorCollector):
        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            self.exact_resume = False

    def make(case):
        env = COUNTING.env(case)
        return SaysNo(env, COUNTING.policy(env), **amounts(case))

    with pytest.raises(ConformanceError, match="after a restart, continuity"):
        check_collector(make, exact_resume=False)


@WORLDS
def test_episode_collector_passes_when_env_state_is_unavailable(world):
    def make(case) -> EpisodeCollector:
        return episodes(case, without_state(world.env(case)))

    assert check_collector(make, world=world, exact_resume=False) == list(COLLECTOR_CHECKS)
