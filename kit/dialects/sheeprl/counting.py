"""How sheeprl turns its settings into counts, version by version."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from kit.dialects.base import OFF_POLICY, ON_POLICY
from kit.dialects.sheeprl.rules import SheeprlRatio, first_due
from kit.dialects.sheeprl.settings import DECOUPLED, SEQUENCES, SheeprlSettings
from kit.steps.counting import counting_rule
from kit.steps.errors import SettingError, real_number, yes_or_no
from kit.steps.plan import StepPlan
from kit.steps.validation import LARGEST_RATIO


def to_plan(sheeprl: SheeprlSettings) -> StepPlan:
    """The plan of resolved settings."""
    for name in ("dry_run", "run_test", "share_data", "anneal_lr", "buffer_checkpoint"):
        yes_or_no(name, getattr(sheeprl, name))
    if sheeprl.algo in DECOUPLED:
        _check_decoupled(sheeprl)
    common: dict[str, Any] = {
        "num_envs": sheeprl.num_envs,
        "world_size": sheeprl.processes,
        "action_repeat": max(sheeprl.action_repeat, 1),
        "max_episode_steps": _episode_limit(sheeprl),
        "evaluation_episodes": 1,
        "final_evaluation": sheeprl.run_test,
    }
    on_policy = sheeprl.family == ON_POLICY
    made = common | (_on_policy(sheeprl) if on_policy else _off_policy(sheeprl))
    plan = StepPlan(**made)
    if plan.total_policy_steps != sheeprl.total_steps and not sheeprl.dry_run:
        plan.asked["total_policy_steps"] = sheeprl.total_steps
    return plan


def _episode_limit(sheeprl: SheeprlSettings) -> int | None:
    limit = sheeprl.max_episode_steps
    if limit is not None and real_number("max_episode_steps", limit) < 1:
        return None
    return limit


def _check_decoupled(sheeprl: SheeprlSettings) -> None:
    if sheeprl.version == "0.8.4":
        raise SettingError(
            "algo", sheeprl.algo, "is gone from sheeprl 0.8.4", ["ppo", "sac"], "or version=0.5.7"
        )
    if sheeprl.world_size < 2:
        raise SettingError(
            "world_size", sheeprl.world_size, "leaves no process to train: one only plays", [2]
        )


def _on_policy(sheeprl: SheeprlSettings) -> dict[str, Any]:
    assert sheeprl.total_steps is not None
    assert sheeprl.rollout_steps is not None
    assert sheeprl.per_rank_batch_size is not None
    if (
        sheeprl.algo == "a2c"
        and sheeprl.anneal_lr
        and sheeprl.version not in ("0.8.4", "documented")
    ):
        raise SettingError(
            "anneal_lr", True, f"is no setting of A2C in sheeprl {sheeprl.version}", [False]
        )
    if sheeprl.buffer_size not in (None, sheeprl.rollout_steps) and sheeprl.version != "documented":
        why = "fails on-policy: the buffer holds one rollout"
        raise SettingError("buffer_size", sheeprl.buffer_size, why, [sheeprl.rollout_steps])
    iterations = sheeprl.total_steps // sheeprl.policy_steps_per_iteration
    rows = sheeprl.num_envs * sheeprl.rollout_steps
    size = min(sheeprl.per_rank_batch_size, rows)
    if sheeprl.algo == "a2c" and sheeprl.version in ("0.5.7", "0.5.0"):
        # The rows of these versions are time steps of all environments together.
        size = min(sheeprl.per_rank_batch_size, sheeprl.rollout_steps) * sheeprl.num_envs
    elif sheeprl.algo == "ppo_decoupled":
        size = min(sheeprl.per_rank_batch_size * (sheeprl.world_size - 1), rows)
    accumulates = sheeprl.algo == "a2c"
    return {
        "iterations": 1 if sheeprl.dry_run else iterations,
        "steps_per_env": sheeprl.rollout_steps,
        "update_epochs": 1 if accumulates else sheeprl.update_epochs,
        "minibatch_size": size,
        "minibatches_per_gradient_step": None if accumulates else 1,
    }


def _off_policy(sheeprl: SheeprlSettings) -> dict[str, Any]:
    assert sheeprl.total_steps is not None
    assert sheeprl.learning_starts is not None
    assert sheeprl.per_rank_batch_size is not None
    each = sheeprl.policy_steps_per_iteration
    random = 0 if sheeprl.dry_run else sheeprl.learning_starts // each
    first = max(random, 1)
    sequence = sheeprl.per_rank_sequence_length if sheeprl.algo in SEQUENCES else None
    if sequence and sheeprl.version == "0.8.4":
        first = max(first, sequence)
    iterations = 1 if sheeprl.dry_run else sheeprl.total_steps // each
    if sheeprl.dry_run and sheeprl.version == "0.8.4":
        iterations = first
    made: dict[str, Any] = {
        "iterations": iterations,
        "steps_per_env": 1,
        "learning_starts": first * each if first > 1 else 0,
        "random_steps": 0 if "finetuning" in str(sheeprl.algo) else min(random, iterations) * each,
        "minibatch_size": sheeprl.per_rank_batch_size,
        "sequence_length": sequence,
        "exploration_steps": sheeprl.exploration_steps,
    }
    if sheeprl.algo == "sac_decoupled":
        made["minibatch_size"] *= sheeprl.world_size - 1
    if sheeprl.version == "0.5.0":
        return made | _train_every(sheeprl, random)
    return made | _replay_ratio(sheeprl, random, first, sequence, iterations)


def _replay_ratio(
    sheeprl: SheeprlSettings, random: int, first: int, sequence: int | None, iterations: int
) -> dict[str, Any]:
    ratio = real_number("replay_ratio", sheeprl.replay_ratio, 0, LARGEST_RATIO)
    pretrain = sheeprl.per_rank_pretrain_steps
    if sheeprl.version == "documented":
        if ratio == 0:
            raise SettingError("replay_ratio", 0, "must be greater than zero", [1.0])
        if random * sheeprl.policy_steps_per_iteration != sheeprl.learning_starts:
            _refuse_learning_starts(sheeprl, random)
        return {"replay_ratio": ratio, "pretrain_steps": pretrain, "counting": "exact"}
    if sheeprl.version == "0.8.4" and sheeprl.dry_run:
        pretrain = 0
    counting = rule(sheeprl)
    if ratio == 0 and sheeprl.version == "0.5.7":  # its pretraining is multiplied by the ratio
        counting, pretrain = "exact", 0
    if _loses_nothing(sheeprl, ratio, counting, pretrain or 0):
        counting = "exact"
    if sequence and sheeprl.version == "0.5.7":
        _check_sequence(sheeprl, ratio, first, sequence, iterations)
    return {"replay_ratio": ratio, "pretrain_steps": pretrain, "counting": counting}


def _loses_nothing(sheeprl: SheeprlSettings, ratio: float, counting: str, pretrain: int) -> bool:
    """Whether its float arithmetic counts as exact fractions would.

    It does where the gradient steps of one iteration are a whole number, as a float too: then
    each call returns just them and carries nothing.
    """
    whole = (Fraction(ratio) * sheeprl.num_envs).denominator == 1
    return whole and (counting == "sheeprl" or (counting == "sheeprl-0.5.7" and not pretrain))


def _refuse_learning_starts(sheeprl: SheeprlSettings, random: int) -> None:
    each = sheeprl.policy_steps_per_iteration
    raise SettingError(
        "learning_starts",
        sheeprl.learning_starts,
        f"is not a multiple of the {each} policy steps of one iteration",
        [random * each, (random + 1) * each],
    )


def _check_sequence(
    sheeprl: SheeprlSettings, ratio: float, first: int, sequence: int, iterations: int
) -> None:
    """0.5.7 samples sequences as soon as a gradient step is due, played or not."""
    trains = first + first_due(ratio, sheeprl.num_envs)
    if trains <= min(sequence - 1, iterations):
        raise SettingError(
            "learning_starts",
            sheeprl.learning_starts,
            f"lets sheeprl 0.5.7 train after {trains} time steps of each environment, where it "
            f"cannot sample a sequence of per_rank_sequence_length={sequence}",
            [sequence * sheeprl.policy_steps_per_iteration],
        )


def _train_every(sheeprl: SheeprlSettings, random: int) -> dict[str, Any]:
    """Before ``replay_ratio``: a countdown (Dreamer), or a first training like the prefill."""
    steps, every = sheeprl.per_rank_gradient_steps, sheeprl.train_every
    assert steps is not None
    assert every is not None
    made: dict[str, Any] = {"gradient_steps_per_iteration": steps}
    if sheeprl.algo not in SEQUENCES:
        return made | {"pretrain_steps": (max(random, 1) - 1) * steps}
    each = sheeprl.policy_steps_per_iteration
    countdown = 0 if sheeprl.dry_run else every // each
    first, period = max(random, countdown, 1), max(countdown, 1)
    pretrains = first == random and "v1" not in str(sheeprl.algo)  # DreamerV1 never does
    at_first = sheeprl.per_rank_pretrain_steps if pretrains else steps
    assert at_first is not None
    made["learning_starts"] = first * each if first > 1 else 0
    if period == 1 and at_first >= steps:
        return made | {"pretrain_steps": at_first - steps}
    return made | {"counting": f"sheeprl-0.5.0:{period},{at_first}"}


def rule(sheeprl: SheeprlSettings) -> str:
    """Name of the rule by which the version counts gradient steps from ``replay_ratio``."""
    if sheeprl.version == "0.8.4":
        return "sheeprl"
    if sheeprl.algo in ("sac", OFF_POLICY):
        return "sheeprl-0.5.7-sac"
    if sheeprl.algo == "sac_decoupled":
        return f"sheeprl-0.5.7-decoupled:{sheeprl.world_size - 1}"
    return "sheeprl-0.5.7"


def ratio(sheeprl: SheeprlSettings) -> SheeprlRatio:
    """The library's ratio, new, also where the plan can count with exact fractions."""
    made = counting_rule(rule(sheeprl.resolved()))(sheeprl.to_plan())
    assert isinstance(made, SheeprlRatio)
    return made
