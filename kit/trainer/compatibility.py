"""Whether plan, update, loss, policy, buffer and hooks of a trainer fit together."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import gymnasium as gym
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torchrl.collectors import Collector, MultiCollector
from torchrl.data import HERReplayBuffer
from torchrl.objectives import KLPENPPOLoss, LossModule
from torchrl.objectives.utils import default_value_kwargs
from torchrl.trainers import (
    OptimizationStepper,
    ReplayBufferTrainer,
    RewardNormalizer,
    UpdateWeights,
    ValueEstimatorHook,
)

from kit.buffers import ReplayMinibatches, RolloutMinibatches, SequenceReplay, SequenceSampler
from kit.collectors.asynchronous import AsyncCollector
from kit.collectors.base import KitCollector
from kit.collectors.plan_fit import Refusal
from kit.envs.backends.torchrl_layers import base_env_of
from kit.envs.vector_env import VectorEnv
from kit.hooks.annealing import Anneal
from kit.hooks.evaluation import Evaluator
from kit.hooks.rewards import ScaleReward, SignReward
from kit.steps import StepPlan
from kit.trainer.checkpoint import normalizer_of
from kit.trainer.checks import ADDING, reads_advantage, unestimated
from kit.trainer.stages import Stages, declares
from kit.update import TrustRegion, Update


def in_learning_rates(update: Any, modules: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield hooks that set the learning rate of an idle optimiser."""
    groups = update.groups if isinstance(update, Update) else ()
    stepping = [group.optimizer for group in groups]
    trained = {id(weight) for group in groups for weight in group.parameters}
    for hook in modules.values():
        optimizer = getattr(getattr(hook, "scheduler", None), "optimizer", None)
        owners = [value.owner for value in hook.values] if isinstance(hook, Anneal) else [optimizer]
        for owner in owners:
            # A hook may step its own optimiser, but not with these weights.
            own = owner.param_groups if isinstance(owner, Optimizer) else ()
            weights = {id(weight) for group in own for weight in group["params"]}
            if weights & trained and not any(owner is one for one in stepping):
                why = "sets the learning rate of an optimiser that makes no steps"
                yield "hook", type(hook).__name__, why, "give it the optimiser of the update"


def in_updates(
    plan: StepPlan, update: Any, loss_module: Any, advantage: Any, stages: Stages
) -> Iterator[Refusal]:
    """Gradient steps with other losses or counts than planned, or losses without their input."""
    if not plan.trains:
        return
    if any(type(one) is KLPENPPOLoss for one in _modules_of(loss_module)):
        why = "changes the weight of its penalty before the gradient, which has twice or half of it"
        yield "loss", "KLPENPPOLoss", why, ["kit.losses:KLPENPPOLoss"]
    if isinstance(update, TrustRegion) and plan.on_policy:
        yield from _in_trust_regions(plan)
    if isinstance(update, OptimizationStepper) and not isinstance(update, Update):
        yield from _in_accumulation(plan, update)
    reads = reads_advantage(loss_module) is not None
    if reads and advantage is None and not any(stages[stage] for stage in ADDING):
        why = f"leaves {unestimated(loss_module)}"
        yield "advantage", None, why, "give advantage=GAE(...) or another estimator"
    yield from _in_reward_changes(advantage, loss_module, stages)


def _in_trust_regions(plan: StepPlan) -> Iterator[Refusal]:
    """Several steps from one batch, each of which only bounds the divergence from the last."""
    why = "makes several steps of a trust region from one batch, of which each alone is bounded"
    epochs, size = plan.update_epochs, plan.minibatch_size
    if epochs is not None and epochs > 1:
        yield "update_epochs", epochs, why, [1]
    rows = plan.rows(1) if plan.is_exact else sys.maxsize
    if plan.minibatches_in_epoch(rows) > 1:
        yield "minibatch_size", size, why, [None], "the whole batch"


def _in_accumulation(plan: StepPlan, stepper: OptimizationStepper) -> Iterator[Refusal]:
    """A stepper of TorchRL with other optimiser steps than the plan: it accumulates by itself."""
    own = getattr(stepper, "gradient_accumulation_steps", 1)
    given = plan.minibatches_per_gradient_step
    each, name, works = given or 1, type(stepper).__name__, "or use kit.update.Update"
    if plan.on_policy:
        drawn = plan.minibatches_in_epoch(plan.rows(1) if plan.is_exact else sys.maxsize)
        each = min(given or drawn, drawn)
        if each == own > 1 and not (plan.is_exact and drawn % each == 0):
            why = f"may leave a rest in an epoch, with which {name} would begin its next step"
            yield "minibatches_per_gradient_step", given, why, [1], works
    if each != own:
        why = f"is not what {name} makes a step of"
        yield "minibatches_per_gradient_step", given, why, [own], works


def _in_reward_changes(advantage: Any, loss_module: Any, stages: Stages) -> Iterator[Refusal]:
    """Yield hooks that change rewards of minibatches after advantages were estimated."""
    before = [*map(owner_of, (*stages["batch_process"], *stages["pre_epoch"]))]
    estimated = advantage is not None or any(isinstance(o, ValueEstimatorHook) for o in before)
    if not estimated or reads_advantage(loss_module) is None:
        return
    for hook in map(owner_of, stages["process_optim_batch"]):
        if isinstance(hook, (RewardNormalizer, ScaleReward, SignReward)):
            why = "changes rewards of minibatches, whose advantages were estimated before"
            yield "hook", type(hook).__name__, why, _OF_THE_ENVIRONMENT


_OF_THE_ENVIRONMENT = (
    "change those of the environment: make_env(normalize_reward=True), a transform"
)


def in_networks(
    update: Any, collector: Any, evaluate: Any, advantage: Any, stages: Stages
) -> Iterator[Refusal]:
    """A policy that acts, or a critic that estimates advantages, and is not trained."""
    if not isinstance(update, Update):
        return
    trained = {*update.loss_module.parameters()}.union(*(one.parameters for one in update.groups))
    memory = set(map(_memory_of, trained))
    hooks = map(owner_of, itertools.chain(*stages.values()))
    told = any(isinstance(hook, UpdateWeights) for hook in hooks)  # with weights of elsewhere
    made = [one for one in getattr(collector, "policy_factory", None) or () if one is not None]
    if made and collector.policy is None and not told:
        name = getattr(made[0], "__name__", type(made[0]).__name__)
        why = "makes policies in processes, which would never be given the weights of the loss"
        works = "give the policy of the loss as policy=, or the hook UpdateWeights"
        yield "policy_factory", name, why, works
    kinds = (KitCollector, Evaluator, *(() if told else (Collector, MultiCollector)))
    acting = [part for part in (collector, evaluate) if isinstance(part, kinds)]
    for part, name in (*((part, "policy") for part in acting), (advantage, "value_network")):
        network = getattr(part, name, None)
        weights = [*network.parameters()] if isinstance(network, nn.Module) else []
        # TorchRL's collector acts with a copy, which it is given the weights of, on another device.
        copied = isinstance(part, (Collector, MultiCollector))
        here = {one.device for one in (trained if copied else weights)}
        own = [weight for weight in weights if weight.requires_grad and weight.device in here]
        if own and memory.isdisjoint(map(_memory_of, own)):
            why = f"of {type(part).__name__} has none of the weights of the loss"
            works = f"use that of the loss, or freeze this one: {name}.requires_grad_(False)"
            yield name, type(network).__name__, f"{why}, and would never change", works


def _memory_of(weight: nn.Parameter) -> int:
    """Where a weight is, which another one may show, too; a lazy one is nowhere yet."""
    return id(weight) if is_lazy(weight) else weight.untyped_storage().data_ptr()


def in_rewards(buffer: Any, stages: Stages) -> Iterator[Refusal]:
    """Yield hooks that change rewards which minibatches store elsewhere or as n-step sums."""
    n_step = buffer.summed.steps if isinstance(buffer, ReplayMinibatches) and buffer.summed else 1
    for hook in map(owner_of, stages["process_optim_batch"]):
        if isinstance(hook, (ScaleReward, SignReward)) and isinstance(buffer, SequenceReplay):
            why = "expects the reward after each action, but records store the reward before it"
            yield "hook", type(hook).__name__, why, _OF_THE_ENVIRONMENT
        if isinstance(hook, SignReward) and n_step > 1:
            why = f"takes the sign of sums of n_step={n_step} rewards, not of each reward"
            yield "hook", type(hook).__name__, why, "leave it out, or use n_step=1"
        if isinstance(hook, ScaleReward) and hook.standardize and n_step > 1:
            why = f"standardises sums of n_step={n_step} rewards, shorter ones where episodes end"
            works = "use standardize_reward=false (reward_scale alone is fine), or n_step=1"
            yield "hook", type(hook).__name__, why, works


def in_priorities(buffer: Any, loss_module: Any) -> Iterator[Refusal]:
    """Importance weights of a prioritized sampler that the loss does not read."""
    if not isinstance(buffer, ReplayMinibatches) or not buffer.reads_loss_outputs:
        return
    has_key = hasattr(getattr(loss_module, "tensor_keys", None), "priority_weight")
    reads = getattr(loss_module, "reads_importance_weights", has_key)
    beta = getattr(buffer.buffer.sampler, "beta", 0)
    if beta and isinstance(loss_module, LossModule) and not reads:
        name = type(loss_module).__name__
        why = f"corrects priorities by importance weights, which {name} does not read"
        hint = "in a recipe per_beta=0; or declare reads_importance_weights=True"
        yield "beta", beta, why, [0], hint


def in_discounts(
    loss_module: Any, advantage: Any, normalizer: Any, buffer: Any, stages: Stages
) -> Iterator[Refusal]:
    """Parts that discount rewards by different factors."""
    parts: list[Any] = [advantage]
    for one in _modules_of(loss_module):
        parts += [one] if isinstance(one, LossModule) else []
    hooks = [owner_of(one) for stage in ADDING for one in stages[stage]]
    parts += [one.value_estimator for one in hooks if isinstance(one, ValueEstimatorHook)]
    parts += [normalizer] if getattr(normalizer, "reward", None) is not None else []
    parts += [buffer.summed] if isinstance(buffer, ReplayMinibatches) else []
    found = [(type(one).__name__, _discount_of(one, advantage)) for one in parts]
    known = [(name, gamma) for name, gamma in found if gamma is not None]
    for name, gamma in known[1:]:
        if not math.isclose(gamma, known[0][1], rel_tol=1e-6):
            why = f"of {name} is not the {known[0][1]:g} of {known[0][0]}"
            works = "give all parts the same; a loss by make_value_estimator(gamma=...)"
            yield "gamma", round(gamma, 6), why, works


def _discount_of(part: Any, advantage: Any) -> float | None:
    """The factor by which a part discounts rewards; ``None`` if it discounts none."""
    if isinstance(part, LossModule):
        estimator, kind = part._value_estimator, part.default_value_estimator
        gamma = vars(part).get("gamma", getattr(estimator, "gamma", None))
        if gamma is None and kind is not None and advantage is None:  # TorchRL makes it later
            gamma = default_value_kwargs(kind)["gamma"]
    else:
        gamma = getattr(part, "gamma", None)
    return float(gamma) if isinstance(gamma, (float, int, Tensor)) else None


def in_targets(plan: StepPlan, update: Any, loss_module: Any, stages: Stages) -> Iterator[Refusal]:
    """Target networks that would keep their first weights: nothing updates them.

    A hook that declares no ``changes_training = False`` may call an updater that was created for
    the loss. A loss that updates them in its ``forward`` declares ``updates_targets = True``.
    """
    if not plan.trains or getattr(update, "target_updater", None) is not None:
        return
    functions = [one.function for one in itertools.chain(*stages.values())]
    hooks = any(declares(one, "changes_training") for one in functions)
    for one in _modules_of(loss_module):
        if not isinstance(one, LossModule) or getattr(one, "updates_targets", False):
            continue
        for name, has_updater in one._has_update_associated.items():
            if f"target_{name}_params" in one._modules and not (has_updater and hooks):
                why = f"has target networks (target_{name}_params) that nothing updates"
                works = "give Update(..., target_updater=SoftUpdate(loss, tau=0.005))"
                yield "loss_module", type(one).__name__, why, works


def in_hooks(plan: StepPlan, update: Any, buffer: Any, stages: Stages) -> Iterator[Refusal]:
    """What the hooks registered until a run begins leave undone, or mix.

    Gradient steps that are never made, samples that are never held, a stepper of TorchRL, which
    calls no hook between loss and optimiser, or steps of environments that follow one another.
    """
    if not plan.trains:
        return
    yield from _in_flattened(plan, stages)
    if update is None and not stages["optimizer"]:
        why = "leaves the plan's gradient steps undone"
        yield "update", None, why, "give an Update, or register a hook at stage 'optimizer'"
    rollouts = isinstance(buffer, RolloutMinibatches)
    owners = [*map(owner_of, stages["process_optim_batch"])]
    draws = [owner for owner in owners if not isinstance(owner, (ScaleReward, SignReward))]
    if plan.replay_ratio is not None and rollouts and not draws:
        samples = f"replay_ratio={plan.replay_ratio} counts samples of a replay buffer"
        works = "give make_replay_buffer(...) or a TorchRL replay buffer"
        yield "buffer", None, f"keeps the last batch only, where {samples}", works
    for operation in stages["post_backward"] if stages["optimizer"] else ():
        why = f"never runs, so {operation.name} never would: a hook makes the gradient step"
        yield "stage", "post_backward", why, "let the hook at stage 'optimizer' call it"
    if not isinstance(update, OptimizationStepper) or isinstance(update, Update):
        return
    for stage in ("process_loss", "optimizer", "post_backward"):
        for operation in stages[stage]:
            itself = f"{type(update).__name__} calls no hook between loss and optimiser"
            why = f"never runs, so {operation.name} never would: {itself}"
            yield "stage", stage, why, "use kit.update.Update, or leave out the stepper"


def _in_flattened(plan: StepPlan, stages: Stages) -> Iterator[Refusal]:
    """Environments that a hook stores one after the other, where they have to write in turn."""
    for hook in map(owner_of, stages["batch_process"]):
        flattens = isinstance(hook, ReplayBufferTrainer) and hook.flatten_tensordicts
        if not flattens or plan.num_envs == 1 or plan.collects_episodes:
            continue
        for part in (hook.replay_buffer, getattr(hook.replay_buffer, "sampler", None)):
            if isinstance(part, (HERReplayBuffer, SequenceSampler)):
                why = f"would join steps of other environments: the hook stores {plan.num_envs}"
                works = "give it to the trainer, as buffer, without the hook"
                name = type(part).__name__
                yield "replay_buffer", name, f"{why} one after the other", works


def owner_of(operation: Any) -> Any:
    """The hook object that an operation belongs to."""
    return getattr(operation.function, "__self__", operation.function)


def _modules_of(loss_module: Any) -> Iterable[nn.Module]:
    return loss_module.modules() if isinstance(loss_module, nn.Module) else ()


def in_collection(plan: StepPlan, collector: Any) -> Iterator[Refusal]:
    """Yield policy steps of the plan that this process would not collect."""
    if plan.world_size > 1:
        why = "processes train together in the plan, and this is one process"
        yield "world_size", plan.world_size, why, [1]
    if collector is None and not plan.offline:
        works = "give a collector, or a plan with steps_per_env=0 (offline)"
        yield "collector", None, "leaves the policy steps of the plan undone", works


def in_buffer(plan: StepPlan, buffer: Any) -> Iterator[Refusal]:
    """Yield a replay buffer with another minibatch size than the plan, or of an unsuitable size."""
    if not isinstance(buffer, ReplayMinibatches):
        return
    size = buffer.buffer.batch_size
    planned = plan.minibatch_size and plan.minibatch_size * (plan.sequence_length or 1)
    if None not in (size, planned) and size != planned:
        why = f"of the replay buffer is not the plan's {planned} transitions"
        yield "minibatch_size", size, why, [planned]
    holds = buffer.buffer.storage.max_size
    if plan.is_exact and not plan.offline and holds < plan.frames_per_batch:
        why = f"is less than one batch of {plan.frames_per_batch}, of which the rest would be lost"
        yield "buffer_size", holds, why, [plan.frames_per_batch]
    if plan.is_exact and plan.on_policy and holds > plan.frames_per_batch:
        why = f"is more than one batch of {plan.frames_per_batch}: updates of this plan pass over"
        why += " the last batch, and would be drawn from older ones as well"
        yield "buffer_size", holds, why, [plan.frames_per_batch]


def stores_raw(plan: StepPlan, buffer: Any, advantage: Any) -> bool:
    """Whether a buffer stores raw batches and normalises the minibatches that it draws.

    Advantages are estimated on collected batches, which must be normalised by then.
    """
    replays = isinstance(buffer, (ReplayMinibatches, SequenceReplay))
    return replays and advantage is None and not (plan.on_policy or plan.offline)


def in_raw_batches(collector: Any, raw: bool) -> Iterator[Refusal]:
    """Reject a collector that cannot deliver raw batches, or normalised ones, as required."""
    own = isinstance(collector, KitCollector)
    delivered = collector.deliver_raw(raw) if own else normalizer_of(collector) is None
    if raw and not delivered:
        name = type(collector).__name__
        why = "delivers observations or rewards that are normalised when they are collected, and "
        why += "a replay buffer would keep early ones on other scales"
        works = "use VectorCollector(make_env(...), policy), or make_env without normalize_..."
        yield "collector", name, why, works


def in_evaluation(plan: StepPlan, evaluate: Any, collector: Any) -> Iterator[Refusal]:
    """An evaluator that disturbs training, leaves evaluations undone, or plays something else."""
    evaluations = plan.evaluation_every or plan.evaluation_every_iterations
    evaluations = evaluations or plan.initial_evaluations or plan.final_evaluation
    if evaluate is None and evaluations:
        works = "give an Evaluator, or a StepPlan without (evaluation_every=None, "
        works += "final_evaluation=False)"
        yield "evaluate", None, "leaves the evaluations of the plan undone", works
    if evaluate is not None and evaluate.episodes != plan.evaluation_episodes:
        why = "episodes are not those of the plan"
        yield "evaluate", evaluate.episodes, why, [plan.evaluation_episodes]
    elsewhere = isinstance(collector, AsyncCollector)  # its environments are another process's
    if not elsewhere and _stepped_by(evaluate) & _stepped_by(collector):
        why = "plays in the environments that training steps, whose episodes it would cut"
        yield "evaluate", type(evaluate).__name__, why, "make others for it: make_env(...)"
    running, env = normalizer_of(collector), getattr(evaluate, "env", None)
    normalized = running is not None and bool(running.observation)
    if normalized and isinstance(env, VectorEnv) and env.normalizer is not running:
        why = "plays without the running normalisation with which its policy is trained"
        works = "share it: evaluation_env.normalizer = training_env.normalizer"
        yield "evaluate", type(evaluate).__name__, why, works


def _stepped_by(part: Any) -> set[int]:
    """Identities of the environments that a collector or an evaluator steps in this process."""
    env = getattr(part, "env", None)
    base = base_env_of(env)
    if not isinstance(base, VectorEnv):  # TorchRL's ParallelEnv asks its processes for anything
        return {id(base)} - {id(None)}
    backend: Any = base.backend
    single = [one.unwrapped for one in getattr(backend, "envs", ()) if isinstance(one, gym.Env)]
    found = (base, backend, getattr(backend, "env", None), *single)
    return {id(one) for one in found if one is not None}
