"""What pyrado's dialect says about an observed run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kit.dialects.pyrado import EVALUATION_ROLLOUTS, Pyrado, PyradoGAE
from kit.steps.errors import SettingError
from kit.steps.minibatches import epoch_sizes
from kit.steps.plan import StepPlan
from kit.testing.observed import Expectation
from tests.dialects.recorded.counts import known, listed

_SAMPLES = "samples_per_iteration_[role,rollouts,steps_returned,env_steps_executed]"
_NOTHING: dict[str, Any] = {
    "iterations": 0,
    "algo_sample_count": 0,
    "algo_curr_iter": 0,
    "env_steps_returned_for_training_total": 0,
    "random_action_policy_steps": 0,
    "eval_rollouts_total": 0,
    "eval_iterations": [],
}


def expect(case: Mapping[str, Any]) -> Expectation:
    """The figures of a case; up to the failure, if the library failed."""
    params = dict(case["params"])
    settings = _settings(case, params)
    if settings.rollout_length is None:
        raise SettingError("env_max_steps", None, "is needed to know the counts", "give it")
    evaluates = "patched in" not in str(case.get("how", ""))
    refusal, failed = None, False
    try:
        plans = [settings.to_plan()]
    except SettingError as error:
        if error.field != "batch_size":
            return Expectation(_NOTHING, refusal=str(error))
        refusal, failed = str(error), True
        plans = [_before_failure(settings)]
    if params.get("reset_after"):
        try:
            plans.append(settings.after_reset())
        except SettingError as error:
            refusal = str(error)
    figures = _figures(settings, plans, evaluates, failed)
    _mask_surplus(case["observed"], figures)
    return Expectation(figures, refusal=refusal)


def _settings(case: Mapping[str, Any], params: dict[str, Any]) -> Pyrado:
    critic = {
        name: params[f"critic_{name}"]
        for name in ("num_epoch", "batch_size")
        if params.get(f"critic_{name}") is not None
    }
    length = params.get("terminate_at")
    if length is not None and params.get("env_max_steps") is not None:
        length = min(length, params["env_max_steps"])
    settings = known(Pyrado, params) | {"critic": PyradoGAE(**critic)}
    settings["episode_length"] = length or settings.get("episode_length")
    version = "05cfa26" if "05cfa26" in str(case.get("how", "")) else "7c48d66"
    return Pyrado(**settings | {"algo": str(case.get("algo", "")).lower(), "version": version})


def _before_failure(settings: Pyrado) -> StepPlan:
    """The memory is too small to sample from: the first iteration collects, and then fails."""
    made = settings.resolved()
    able = replace(made, batch_size=1, num_init_memory_steps=made.warm_up_steps, memory_size=10**9)
    return able.to_plan().replace(iterations=1, gradient_steps_per_iteration=0)


def _figures(
    settings: Pyrado, plans: list[StepPlan], evaluates: bool, failed: bool
) -> dict[str, Any]:
    made = settings.resolved()
    samples, optimizers = [], []
    for plan in plans:
        for k in listed(plan):
            samples.append(_sampled(made, plan, k, evaluates))
            optimizers.append({} if failed else _optimizer_steps(made, plan, k))
    total: Counter[str] = Counter()
    for steps in optimizers:
        total.update(steps)
    training = sum(entry[2] for entries in samples for entry in entries if entry[0] != "eval")
    evaluated = [k for k, entries in enumerate(samples) if entries[-1][0] == "eval"]
    last = plans[-1]
    figures: dict[str, Any] = {
        "algo_sample_count": 0 if made.algo == "svpg" else last.total_policy_steps,
        "algo_curr_iter": last.iterations,
        "iterations": len(samples),
        _SAMPLES: samples,
        "env_steps_returned_for_training_total": training,
        "random_action_policy_steps": sum(
            p.random_steps_until(p.total_policy_steps) for p in plans
        ),
        "eval_rollouts_total": EVALUATION_ROLLOUTS * len(evaluated),
        "eval_iterations": evaluated,
        "optimizer_steps_per_iteration": optimizers,
        "optimizer_steps_total": dict(total),
    }
    if last.on_policy:
        return figures | {"minibatch_sizes_first_iteration": _minibatches(made, last)}
    return figures | _memory(made, plans, failed)


def _sampled(made: Pyrado, plan: StepPlan, iteration: int, evaluates: bool) -> list[list[Any]]:
    """Samplings of an iteration: role, rollouts, steps, and env steps executed."""
    length = made.rollout_length
    assert length is not None
    steps = plan.collected(iteration)
    # Filled by the trained policy after a reset, the memory holds training data.
    init = iteration == 1 and plan.prefill_is_iteration and plan.prefill_random
    entries: list[list[Any]] = [["init" if init else "train", steps // length, steps, steps]]
    if plan.evaluations(iteration - 1) and evaluates:
        rollouts = EVALUATION_ROLLOUTS
        entries.append(["eval", rollouts, rollouts * length, rollouts * length])
    return entries * plan.world_size


def _optimizer_steps(made: Pyrado, plan: StepPlan, iteration: int) -> dict[str, int]:
    steps = plan.gradient_steps(iteration)
    if made.algo == "svpg":
        own = {"particle_optim": steps * plan.world_size}
    elif made.algo == "dql":
        own = {"q": steps}
    elif made.algo == "sac":
        own = {"ent_coeff": steps if made.learn_ent_coeff else 0, "q": steps, "policy": steps}
    else:
        critic = made.critic_gradient_steps(plan.collected(iteration))
        own = {"critic": critic, "policy": steps}
    return {name: count for name, count in own.items() if count}


def _minibatches(made: Pyrado, plan: StepPlan) -> list[int]:
    if not plan.iterations:
        return []
    rows, critic = plan.rows(1), made.critic
    size = critic.batch_size
    if made.recurrent and made.rollout_length:
        size = -(-size // made.rollout_length) * made.rollout_length
    first = epoch_sizes(rows, size, "smaller") * (critic.num_epoch if made.algo == "ppo" else 0)
    return first + plan.minibatch_sizes(1) * plan.world_size


def _memory(made: Pyrado, plans: list[StepPlan], failed: bool) -> dict[str, Any]:
    """What the replay memory holds at each update, and when the target is updated."""
    assert made.memory_size is not None
    interval = made.target_update_intvl or 1
    sampled, targets, held = [], [], 0
    for plan in plans:
        held = 0
        for k in listed(plan):
            held = min(held + plan.collected(k), made.memory_size)
            steps = plan.gradient_steps(k)
            updates = range((k - 1) * steps, k * steps)
            hits = sum(update % interval == 0 for update in updates)
            targets.append(hits * (2 if made.algo == "sac" else 1))
            sampled += [[made.batch_size, held]] * (1 if failed else steps)
    return {
        "num_init_memory_steps_effective": made.warm_up_steps,
        "num_batch_updates": made.updates_per_iteration,
        "memory_len_end": held,
        "target_updates_per_iteration": targets,
        "memory_sample_batch_and_len": sampled,
    }


def _mask_surplus(observed: Mapping[str, Any], figures: dict[str, Any]) -> None:
    """Several workers execute rollouts that are dropped, how many depends on their timing."""
    seen = observed.get(_SAMPLES)
    if not isinstance(seen, list) or len(seen) != len(figures[_SAMPLES]):
        return
    for entries, ours in zip(seen, figures[_SAMPLES], strict=True):
        for entry, own in zip(entries, ours, strict=False):
            if len(entry) == len(own) == 4 and entry[:3] == own[:3] and entry[3] > own[3]:
                own[3] = entry[3]
