"""Random plans, and a simulation of them that shares nothing with how they count."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import strategies as st

from kit.steps import StepPlan

RATIOS = ["1/3", 0.3, 0.0625, 2.5, 0, 1, 0.5, "7/11"]


@st.composite
def step_plans(draw) -> StepPlan:
    """Plans that collect a number of steps, on-policy and off-policy."""
    num_envs, world_size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    steps_per_env = draw(st.integers(1, 6))
    vector_step = num_envs * world_size
    settings = {
        "iterations": draw(st.integers(0, 14)),
        "num_envs": num_envs,
        "world_size": world_size,
        "steps_per_env": steps_per_env,
        "learning_starts": draw(st.integers(0, 12)) * vector_step,
        "pretrain_steps": draw(st.integers(0, 3)),
        "evaluation_every": draw(st.none() | st.integers(1, 60)),
        "initial_evaluations": draw(st.integers(0, 2)),
        "final_evaluation": draw(st.booleans()),
    }
    if draw(st.booleans()):
        settings["prefill_steps"] = draw(st.integers(1, 8)) * vector_step
        settings["prefill_is_iteration"] = draw(st.booleans())
        settings["prefill_random"] = draw(st.booleans())
    kind = draw(st.sampled_from(["epochs", "ratio", "fixed", "none"]))
    if kind == "epochs":
        settings |= draw(on_policy_updates(num_envs * steps_per_env))
    elif kind == "ratio":
        settings |= {"replay_ratio": draw(st.sampled_from(RATIOS)), "minibatch_size": 8}
    elif kind == "fixed":
        settings |= {"gradient_steps_per_iteration": draw(st.integers(0, 5)), "minibatch_size": 8}
    return StepPlan(**settings)


@st.composite
def on_policy_updates(draw, rows: int) -> dict:
    """Passes over a batch of ``rows`` transitions."""
    accumulated = draw(st.sampled_from([1, 1, 2, None]))
    return {
        "update_epochs": draw(st.integers(0, 4)),
        "pretrain_steps": 0,
        "minibatch_size": draw(st.none() | st.integers(1, rows)),
        "last_minibatch": draw(st.sampled_from(["smaller", "merge", "drop"])),
        "minibatches_per_gradient_step": accumulated,
        "minibatches_per_epoch": draw(st.none() | st.integers(1, 4)),
    }


@st.composite
def episode_plans(draw) -> StepPlan:
    """Plans that collect whole episodes of known length."""
    settings = {
        "iterations": draw(st.integers(0, 10)),
        "episode_length": draw(st.integers(1, 9)),
        "min_episodes": draw(st.none() | st.integers(1, 3)),
        "min_steps": draw(st.integers(1, 30)),
        "gradient_steps_per_iteration": draw(st.integers(0, 4)),
        "minibatch_size": 8,
        "evaluation_every_iterations": draw(st.none() | st.integers(1, 4)),
    }
    if settings["evaluation_every_iterations"]:
        settings["evaluation_before_update"] = draw(st.booleans())
    if draw(st.booleans()):
        settings["prefill_steps"] = draw(st.integers(1, 30))
        settings["prefill_is_iteration"] = draw(st.booleans())
    return StepPlan(**settings)


def simulate(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """Follow a plan one policy step at a time.

    Returns:
        Policy steps, random ones, gradient steps of one process and evaluations, each in total,
        at the start and at the end of each iteration.
    """
    played = random = updates = 0
    debt = Fraction(0)
    learning = False
    prefill = _whole(plan, plan.prefill_steps // plan.world_size) if plan.prefill_steps else 0

    def play(steps: int, all_random: bool) -> None:
        nonlocal played, random
        for _ in range(steps * plan.world_size):
            random += all_random or played < plan.random_steps
            played += 1

    if prefill and not plan.prefill_is_iteration:
        play(prefill, plan.prefill_random)
    evaluated = plan.initial_evaluations
    if plan.evaluation_before_update and plan.iterations:
        evaluated += 1
    if plan.iterations == 0 and plan.final_evaluation:
        evaluated += 1
    story = [(played, random, updates, evaluated)]
    for iteration in range(1, plan.iterations + 1):
        is_prefill = iteration == 1 and plan.prefill_is_iteration
        rows = prefill if is_prefill else _batch(plan)
        before = played
        play(rows, is_prefill and plan.prefill_random)
        if played >= plan.learning_starts:
            updates += 0 if learning else plan.pretrain_steps
            learning = True
            debt += _due(plan, rows)
            updates += debt.numerator // debt.denominator
            debt -= debt.numerator // debt.denominator
        due = _evaluates(plan, iteration, before, played)
        if iteration == plan.iterations and plan.final_evaluation:
            due = True
        evaluated += due
        story.append((played, random, updates, evaluated))
    return story


def _whole(plan: StepPlan, steps: int) -> int:
    """Steps of one process, in whole episodes where episodes are collected."""
    if plan.episode_length is None:
        return steps
    played = 0
    while played < max(steps, 1):
        played += plan.episode_length
    return played


def _batch(plan: StepPlan) -> int:
    if plan.episode_length is None:
        return plan.num_envs * plan.steps_per_env
    played = episodes = 0
    while played < (plan.min_steps or 0) or episodes < (plan.min_episodes or 1):
        played, episodes = played + plan.episode_length, episodes + 1
    return played


def _due(plan: StepPlan, rows: int) -> Fraction:
    if plan.replay_ratio is not None:
        return plan.replay_ratio * rows
    if plan.update_epochs is None:
        return Fraction(plan.gradient_steps_per_iteration or 0)
    minibatches = len(cut(rows, plan.minibatch_size or rows, plan.last_minibatch))
    minibatches = min(minibatches, plan.minibatches_per_epoch or minibatches)
    group = plan.minibatches_per_gradient_step or max(minibatches, 1)
    return Fraction(plan.update_epochs * -(-minibatches // group))


def cut(rows: int, size: int, last: str) -> list[list[int]]:
    """Cut ``rows`` into minibatches, row by row."""
    minibatches: list[list[int]] = []
    for row in range(rows):
        if row % size == 0:
            minibatches.append([])
        minibatches[-1].append(row)
    if minibatches and len(minibatches[-1]) < size:
        if last == "drop":
            minibatches.pop()
        elif last == "merge" and len(minibatches) > 1:
            rest = minibatches.pop()
            minibatches[-1] += rest
    return minibatches


def _evaluates(plan: StepPlan, iteration: int, before: int, after: int) -> bool:
    if plan.evaluation_every is not None:
        return any(step % plan.evaluation_every == 0 for step in range(before + 1, after + 1))
    period = plan.evaluation_every_iterations
    if period is None or iteration % period:
        return False
    return not plan.evaluation_before_update or iteration < plan.iterations
