"""The counts of sheeprl, version by version: from its settings to a plan, and back."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from kit.dialects.base import OFF_POLICY, ON_POLICY, ratio_of, step_by_step, trains
from kit.dialects.sheeprl.defaults import SEQUENCES
from kit.dialects.sheeprl.rules import SheeprlRatio, first_due
from kit.dialects.sheeprl.settings import DECOUPLED, SheeprlSettings
from kit.steps.counting import counting_rule
from kit.steps.errors import SettingError, real_number
from kit.steps.plan import StepPlan
from kit.steps.validation import LARGEST_RATIO


# ---------------------------------------------------------------------- to a plan
def to_plan(sheeprl: SheeprlSettings) -> dict[str, Any]:
    """The plan's settings."""
    if sheeprl.algo in DECOUPLED:
        _check_decoupled(sheeprl)
    limit = sheeprl.max_episode_steps
    if limit is not None and real_number("max_episode_steps", limit) < 1:
        limit = None
    return {
        "world_size": sheeprl.processes,
        "action_repeat": max(sheeprl.action_repeat, 1),
        "max_episode_steps": limit,
        "evaluation_episodes": 1,
        **(_on_policy if sheeprl.family == ON_POLICY else _off_policy)(sheeprl),
    }


def _check_decoupled(sheeprl: SheeprlSettings) -> None:
    if sheeprl.version == "0.8.4":
        why, works = "is gone from sheeprl 0.8.4", ["ppo", "sac"]
        raise SettingError("algo", sheeprl.algo, why, works, "or version=0.5.7")
    if sheeprl.world_size < 2:
        why = "leaves no process to train: one only plays"
        raise SettingError("world_size", sheeprl.world_size, why, [2])


def _on_policy(sheeprl: SheeprlSettings) -> dict[str, Any]:
    old = sheeprl.version in ("0.5.7", "0.5.0")
    if sheeprl.buffer_size not in (None, sheeprl.rollout_steps) and sheeprl.version != "documented":
        why = "fails on-policy: the buffer holds one rollout"
        raise SettingError("buffer_size", sheeprl.buffer_size, why, [sheeprl.rollout_steps])
    iterations = sheeprl.total_steps // sheeprl.policy_steps_per_iteration
    rows = sheeprl.num_envs * sheeprl.rollout_steps
    size = min(sheeprl.per_rank_batch_size, rows)
    if sheeprl.algo == "a2c" and old:
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
        if sheeprl.algo in SEQUENCES:
            return made | _train_every(sheeprl, random, iterations)
        return made | _before_ratio(sheeprl, random, iterations)
    return made | _replay_ratio(sheeprl, random, first, sequence, iterations)


def _replay_ratio(
    sheeprl: SheeprlSettings, random: int, first: int, sequence: int | None, iterations: int
) -> dict[str, Any]:
    ratio = real_number("replay_ratio", sheeprl.replay_ratio, 0, LARGEST_RATIO)
    pretrain = sheeprl.per_rank_pretrain_steps
    if sheeprl.version == "documented":
        if ratio == 0:
            raise SettingError("replay_ratio", 0, "must be greater than zero", [1.0])
        each = sheeprl.policy_steps_per_iteration
        if random * each != sheeprl.learning_starts:
            why = f"is not a multiple of the {each} policy steps of one iteration"
            works = [random * each, (random + 1) * each]
            raise SettingError("learning_starts", sheeprl.learning_starts, why, works)
        return {"replay_ratio": ratio, "pretrain_steps": pretrain, "counting": "exact"}
    if sheeprl.version == "0.8.4" and sheeprl.dry_run:
        pretrain = 0
    counting = rule(sheeprl)
    if ratio == 0 and sheeprl.version == "0.5.7":  # its pretraining is multiplied by the ratio
        counting, pretrain = "exact", 0
    if _loses_nothing(sheeprl, ratio, counting, pretrain):
        counting = "exact"
    if sequence and sheeprl.version == "0.5.7":  # it samples once a gradient step is due
        after = first + first_due(ratio, sheeprl.num_envs)
        if after <= iterations:
            _check_sequence(sheeprl, after)
    return {"replay_ratio": ratio, "pretrain_steps": pretrain, "counting": counting}


def _loses_nothing(sheeprl: SheeprlSettings, ratio: float, counting: str, pretrain: int) -> bool:
    """Whether its float arithmetic counts as exact fractions would.

    It does where the gradient steps of one iteration are a whole number, as a float too: then
    each call returns just them and carries nothing.
    """
    whole = (Fraction(ratio) * sheeprl.num_envs).denominator == 1
    return whole and (counting == "sheeprl" or (counting == "sheeprl-0.5.7" and not pretrain))


def _check_sequence(sheeprl: SheeprlSettings, after: int) -> None:
    """Before 0.8.4 sequences were sampled, played or not, ``after`` so many time steps."""
    sequence = sheeprl.per_rank_sequence_length
    if after < sequence:
        why = (
            f"lets sheeprl {sheeprl.version} train after {after} time steps of each environment, "
            f"where it cannot sample a sequence of per_rank_sequence_length={sequence}"
        )
        works = [sequence * sheeprl.policy_steps_per_iteration]
        raise SettingError("learning_starts", sheeprl.learning_starts, why, works)


def _before_ratio(sheeprl: SheeprlSettings, random: int, iterations: int) -> dict[str, Any]:
    """Before ``replay_ratio``, where each algorithm had a loop of its own.

    DroQ plays no random actions, and trains strictly after ``learning_starts``. SAC makes up for
    them in its first training, SAC-AE one iteration earlier.
    """
    each, steps = sheeprl.policy_steps_per_iteration, sheeprl.per_rank_gradient_steps
    made: dict[str, Any] = {"gradient_steps_per_iteration": steps}
    if sheeprl.algo == "droq":
        starts = (random + 1) * each if random else 0
        return made | {"random_steps": 0, "learning_starts": starts}
    played = max(random - 1, 0) if sheeprl.algo == "sac_ae" else random
    return made | {
        "random_steps": min(played, iterations) * each,
        "learning_starts": played * each if played > 1 else 0,
        "pretrain_steps": max(random - 1, 0) * steps,
    }


def _train_every(sheeprl: SheeprlSettings, random: int, iterations: int) -> dict[str, Any]:
    """The countdown of Dreamer; that of DreamerV1 begins strictly after ``learning_starts``."""
    steps, every, algo = sheeprl.per_rank_gradient_steps, sheeprl.train_every, str(sheeprl.algo)
    each = sheeprl.policy_steps_per_iteration
    countdown = 0 if sheeprl.dry_run and "v3" not in algo else every // each
    starts = random + (algo == "dreamer_v1")
    first, period = max(starts, countdown, 1), max(countdown, 1)
    if steps and first <= iterations:
        _check_sequence(sheeprl, first)
    pretrains = first == random and "v1" not in algo  # DreamerV1 never does
    at_first = sheeprl.per_rank_pretrain_steps if pretrains else steps
    made: dict[str, Any] = {"gradient_steps_per_iteration": steps}
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


# ---------------------------------------------------------------------- from a plan
def algorithms_for(plan: StepPlan) -> list[str]:
    """Algorithms that may make ``plan``, the likeliest first.

    They count differently, in some versions: SAC, the others without sequences, and those that
    finetune without random actions.
    """
    if plan.on_policy:
        ppo, a2c = ["ppo", "ppo_decoupled"], ["a2c"]
        return ppo + a2c if plan.minibatches_per_gradient_step is not None else a2c + ppo
    if plan.sequence_length:
        return ["dreamer_v3", "p2e_dv3_finetuning", "dreamer_v1"]
    return ["sac", "droq", "sac_ae", "sac_decoupled"]


def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings nearest to ``plan``; in no given version, that whose rule the plan counts by."""
    algo, version = settings.get("algo") or algorithms_for(plan)[0], settings.get("version")
    plan = step_by_step(plan)
    if version is None:
        rule, *named = plan.counting.partition(":")[0].split("-")
        version = named[0] if rule == "sheeprl" and named else "0.8.4"
    made: dict[str, Any] = {
        "algo": algo,
        "version": version,
        "total_steps": plan.total_policy_steps,
        "world_size": _processes(plan, algo),
        "action_repeat": plan.action_repeat,
        "max_episode_steps": plan.max_episode_steps,
        "run_test": plan.evaluations_after(plan.iterations) > 0,
    }
    if plan.on_policy:
        return made | _on_policy_from(plan, algo, version)
    each = plan.minibatch_size
    if algo == "sac_decoupled" and each is not None:
        each = max(each // (made["world_size"] - 1), 1)
    made |= {
        "per_rank_sequence_length": plan.sequence_length,
        "per_rank_batch_size": each,
        "exploration_steps": plan.exploration_steps,
    }
    if version == "0.5.0" and algo in SEQUENCES:
        return made | _train_every_from(plan, algo)
    if version == "0.5.0":
        return made | _before_ratio_from(plan, algo)
    return made | _replay_ratio_from(plan, algo, version)


def _processes(plan: StepPlan, algo: str) -> int:
    """Processes of the plan, and those that train for the one that plays."""
    if not algo.endswith("decoupled") or plan.world_size > 1:
        return plan.world_size
    rule, _, trainers = plan.counting.partition(":")
    return 1 + int(trainers) if rule == "sheeprl-0.5.7-decoupled" else 2


def _on_policy_from(plan: StepPlan, algo: str, version: str) -> dict[str, Any]:
    size = plan.minibatch_size or plan.frames_per_batch
    if algo == "a2c" and version in ("0.5.7", "0.5.0"):  # its rows are those of all environments
        size = max(size // plan.num_envs, 1)
    epochs = {} if algo == "a2c" else {"update_epochs": plan.update_epochs}
    return epochs | {"rollout_steps": plan.steps_per_env, "per_rank_batch_size": size}


def _replay_ratio_from(plan: StepPlan, algo: str, version: str) -> dict[str, Any]:
    starts, ratio, pretrain = plan.random_steps, float(ratio_of(plan)), plan.pretrain_steps
    if "finetuning" in algo:  # it plays no random actions
        starts = max(starts, plan.learning_starts)
    if not trains(plan):
        ratio, pretrain = 0.0, 0
        if version == "documented":  # 0 is none there, but a run may end before it learns
            starts, ratio = (plan.iterations + 1) * plan.policy_steps_per_iteration, 1.0
    return {"learning_starts": starts, "replay_ratio": ratio, "per_rank_pretrain_steps": pretrain}


def _before_ratio_from(plan: StepPlan, algo: str) -> dict[str, Any]:
    each, starts = plan.policy_steps_per_iteration, plan.random_steps
    if algo == "droq":
        starts = (plan.first_training_iteration - 1) * each
    elif algo == "sac_ae" and starts:
        starts += each
    return {"learning_starts": starts, "per_rank_gradient_steps": _steps_of_training(plan)}


def _steps_of_training(plan: StepPlan) -> int:
    if not trains(plan):
        return 0
    if plan.gradient_steps_per_iteration is not None:
        return plan.gradient_steps_per_iteration
    return round((plan.replay_ratio or 0) * plan.frames_per_batch)


def _train_every_from(plan: StepPlan, algo: str) -> dict[str, Any]:
    each, steps = plan.policy_steps_per_iteration, _steps_of_training(plan)
    rule, _, numbers = plan.counting.partition(":")
    period, at_first = 1, steps + plan.pretrain_steps
    if rule == "sheeprl-0.5.0":
        period, at_first = map(int, numbers.split(","))
    starts = plan.random_steps
    if "finetuning" in algo and trains(plan):  # it plays no random actions
        starts = plan.first_training_iteration * each
    made = {"learning_starts": starts, "train_every": period * each}
    if not trains(plan):
        made["train_every"], at_first = each, 0
    made["per_rank_gradient_steps"] = steps
    return made if "v1" in algo else made | {"per_rank_pretrain_steps": at_first}
