"""Conformance checks that need a single run of a collector."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor

from kit.collectors.base import KitCollector
from kit.testing.batches import ages, integers, rows, sequences, size, whole_episodes
from kit.testing.trial import CollectorUnderTest, Run, take_episodes


def counts(trial: CollectorUnderTest, run: Run) -> None:
    """Check that batch sizes, the total number of steps and all counters match the case."""
    case, collector = trial.case, run.collector
    sizes = [size(batch) for batch in run.batches]
    if run.batches and whole_episodes(run.batches[0]):
        least = case.frames_per_batch
        most = least + case.num_envs * trial.world.limit
        good = all(least <= found < most for found in sizes)
        good &= sum(sizes[:-1]) < case.total_frames <= sum(sizes)
    else:
        good = sizes == [case.frames_per_batch] * case.batches
    trial.demand(good, f"batches have {sizes} policy steps")
    if not isinstance(collector, KitCollector):
        return
    reached = [*itertools.accumulate(sizes)][: len(run.counted)]
    what = f"counted {list(run.counted)} policy steps, but the batches have {reached}"
    trial.demand(reached == list(run.counted), what)
    counted = {name: getattr(collector, name) for name in collector._COUNTERS}
    wanted = {
        "policy_steps": sum(sizes),
        "random_policy_steps": min(case.random_steps, sum(sizes)),
        "env_steps": sum(int(_env_steps(trial, rows(batch)).sum()) for batch in run.batches),
        "episodes": sum(int(batch["next", "done"].sum()) for batch in run.batches),
        "environment_errors": 0,
    }
    trial.demand(counted == wanted, f"counted {counted}, but the batches have {wanted}")


def _env_steps(trial: CollectorUnderTest, steps: TensorDictBase) -> Tensor:
    """Return the number of env steps in each policy step, ``[steps]``."""
    found = trial.world.expected(steps["observation"], integers(steps["action"])).env_steps
    return torch.ones(len(steps), dtype=torch.long) if found is None else found


def transitions(trial: CollectorUnderTest, run: Run) -> None:
    """Check that every transition matches the environment, even at the end of an episode."""
    for batch in run.batches:
        steps = rows(batch)
        types = dict.fromkeys(("done", "terminated", "truncated"), torch.bool)
        for name, wanted in {**types, "reward": torch.float32}.items():
            dtype = steps["next", name].dtype
            trial.demand(dtype == wanted, f"next {name} has type {dtype}")
            ended = name in types and name in steps.keys() and bool(steps[name].any())
            trial.demand(not ended, f"{name} is true before a step")
        outcome = trial.world.expected(steps["observation"], integers(steps["action"]))
        for name in ("terminated", "truncated", "observation", "reward"):
            wanted, found = getattr(outcome, name), steps["next", name]
            if wanted is None:
                continue
            same = found.shape == wanted.shape
            trial.demand(same, f"next {name} has shape {tuple(found.shape)}")
            allowed = trial.world.tolerance if name == "observation" else 0.0
            good = (found.double() - wanted.double()).abs() <= allowed
            if name == "terminated" and outcome.undecided is not None:
                good |= outcome.undecided
            for step in (~good).any(-1).nonzero().flatten().tolist():
                what = f"next {name} is {found[step].tolist()}, not {wanted[step].tolist()}"
                seen, action = steps["observation"][step], steps["action"][step]
                trial.demand(False, f"{what}, after {seen.tolist()} and action {action.tolist()}")
        done = steps["next", "terminated"] | steps["next", "truncated"]
        trial.demand(torch.equal(steps["next", "done"], done), "done is not terminated | truncated")


def continuity(trial: CollectorUnderTest, run: Run) -> None:
    """Check that steps of an episode are consecutive and that time limits and resets are correct.

    For recurrent policies, also check that hidden state is reset between episodes.
    """
    for steps in sequences(run, trial.case.num_envs):
        done = steps["next", "done"].squeeze(-1)
        seen, following = steps["observation"], steps["next", "observation"]
        begins = trial.world.begins(seen)
        follows = (seen[1:] == following[:-1]).all(-1)
        good = bool(torch.where(done[:-1], begins[1:], follows).all() and begins[0])
        trial.demand(good, f"observations are {seen}, which conflicts with done={done}")
        truncated, age = steps["next", "truncated"].squeeze(-1), ages(done)
        good = torch.equal(truncated, age >= trial.world.limit)
        trial.demand(good, f"truncated is {truncated} at episode steps {age}")
        if "is_init" in steps.keys():
            first = steps["is_init"].squeeze(-1)
            trial.demand(torch.equal(first, age == 1), f"is_init is {first} at episode steps {age}")
        if "remembered" in steps.keys():  # recurrent policies only
            kept = steps["remembered"].squeeze(-1)
            trial.demand(torch.equal(kept, age.float()), f"the policy counts {kept} at steps {age}")


def trajectories(trial: CollectorUnderTest, run: Run) -> None:
    """Check that ``("collector", "traj_ids")`` identifies the episode of each step."""
    trial.demand_entry(run, ("collector", "traj_ids"))
    numbers: list[int] = []
    episodes: list[float] = []
    begun = 0
    for steps in sequences(run, trial.case.num_envs):
        numbers += steps["collector", "traj_ids"].tolist()
        if trial.world.episode is not None:
            episodes += trial.world.episode(steps["observation"]).tolist()
        else:
            done = steps["next", "done"].squeeze(-1).long()
            place = begun + done.cumsum(0) - done
            episodes += place.tolist()
            begun = int(place[-1]) + 1
    pairs = set(zip(numbers, episodes))
    good = len(pairs) == len(set(numbers)) == len(set(episodes))
    trial.demand(good, f"trajectory ids and episodes do not match: {sorted(pairs)}")


def reports(trial: CollectorUnderTest, run: Run) -> None:
    """Check that each finished episode in the batches is reported exactly once."""
    numbered = bool(run.batches) and not whole_episodes(run.batches[0])  # row = environment
    reported = sorted(
        (e.length, round(e.episode_return, 3), e.env_steps, e.terminated, e.env if numbered else 0)
        for e in run.episodes
    )
    again = take_episodes(run.collector)
    trial.demand(not again, "episodes are reported twice")
    sums: dict[int, list[tuple[float, int]]] = {}
    ended = []
    names = (("collector", "traj_ids"), *[("next", n) for n in ("reward", "done", "terminated")])
    for batch in run.batches:
        steps = rows(batch)
        columns = [steps[name].flatten().tolist() for name in names]
        columns.append(_env_steps(trial, steps).tolist())
        if numbered:
            columns.append(torch.arange(len(batch)).repeat_interleave(batch.shape[1]).tolist())
        else:
            columns.append([0] * len(steps))
        for number, reward, done, terminated, env_steps, env in zip(*columns):
            sums.setdefault(number, []).append((reward, env_steps))
            if done:
                rewards, counts_of_steps = zip(*sums[number])
                found = round(sum(rewards), 3), sum(counts_of_steps)
                ended.append((len(rewards), *found, terminated, env))
    trial.demand(reported == sorted(ended), f"reported {reported} instead of {sorted(ended)}")


ONE_RUN: dict[str, Callable[[CollectorUnderTest, Run], None]] = {
    check.__name__: check for check in (counts, transitions, continuity, trajectories, reports)
}
"""Conformance checks that need a single run, keyed by name."""
