"""Checks that a trainer's plan, update, loss, policy, buffer and hooks are compatible."""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import gymnasium as gym
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torchrl.collectors import Collector, MultiCollector
from torchrl.data import HERReplayBuffer
from torchrl.modules import BatchRenorm1d
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
from kit.distributed import Ranks
from kit.envs.backends.torchrl_layers import base_env_of
from kit.envs.vector_env import VectorEnv
from kit.fast.functions import modules_of
from kit.hooks.annealing import Anneal
from kit.hooks.evaluation import Evaluator
from kit.hooks.rewards import ScaleReward, SignReward
from kit.steps import StepPlan
from kit.trainer.checkpoint import normalizer_of
from kit.trainer.checks import ADDING, reads_advantage, unestimated
from kit.trainer.stages import Stages, declares
from kit.update import TrustRegion, Update


def in_learning_rates(update: Any, modules: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield errors for hooks that set the learning rate of an optimiser that never steps."""
    groups = update.groups if isinstance(update, Update) else ()
    stepping = [group.optimizer for group in groups]
    for hook in modules.values():  # such as the critic's own fit
        stepping += getattr(getattr(hook, "update", None), "optimizers", {}).values()
    trained = {id(weight) for group in groups for weight in group.parameters}
    for hook in modules.values():
        optimizer = getattr(getattr(hook, "scheduler", None), "optimizer", None)
        owners = [value.owner for value in hook.values] if isinstance(hook, Anneal) else [optimizer]
        for owner in owners:
            # A hook may step its own optimiser, unless that optimiser has weights of the update.
            stepped = owner.param_groups if isinstance(owner, Optimizer) else ()
            weights = {id(weight) for group in stepped for weight in group["params"]}
            if weights & trained and not any(owner is optimizer for optimizer in stepping):
                reason = "sets the learning rate of an optimiser that takes no steps"
                yield "hook", type(hook).__name__, reason, "pass the update's optimiser to the hook"


def in_updates(
    plan: StepPlan, update: Any, loss_module: Any, advantage: Any, stages: Stages
) -> Iterator[Refusal]:
    """Yield errors if gradient steps would differ from the plan or losses would lack advantages."""
    if not plan.trains:
        return
    if any(type(module) is KLPENPPOLoss for module in _modules_of(loss_module)):
        reason = "updates its KL coefficient before the backward pass, which changes the gradient"
        yield "loss", "KLPENPPOLoss", reason, ["kit.losses:KLPENPPOLoss"]
    if isinstance(update, TrustRegion) and plan.on_policy:
        _warn_about_trust_regions(plan)
    if isinstance(update, OptimizationStepper) and not isinstance(update, Update):
        yield from _in_accumulation(plan, update)
    reads = reads_advantage(loss_module) is not None
    if reads and advantage is None and not any(stages[stage] for stage in ADDING):
        reason = f"leaves {unestimated(loss_module)}"
        yield "advantage", None, reason, "pass advantage=GAE(...) or another estimator"
    yield from _in_reward_changes(advantage, loss_module, stages)


def _warn_about_trust_regions(plan: StepPlan) -> None:
    """Warn if the plan takes several trust region steps per batch, as tianshou's examples do."""
    rows = plan.rows(1) if plan.is_exact else sys.maxsize
    if (plan.update_epochs or 1) > 1 or plan.minibatches_in_epoch(rows) > 1:
        text = "The plan takes several trust region steps per batch, and their total KL divergence "
        text += "is not bounded. Use update_epochs=1 and minibatch_size=None for one step."
        warnings.warn(text, stacklevel=2)


def _in_accumulation(plan: StepPlan, stepper: OptimizationStepper) -> Iterator[Refusal]:
    """Yield errors if a TorchRL stepper accumulates gradients differently from the plan."""
    accumulated = getattr(stepper, "gradient_accumulation_steps", 1)
    planned = plan.minibatches_per_gradient_step
    each, name, hint = planned or 1, type(stepper).__name__, "or use kit.update.Update"
    if plan.on_policy:
        drawn = plan.minibatches_in_epoch(plan.rows(1) if plan.is_exact else sys.maxsize)
        each = min(planned or drawn, drawn)
        if each == accumulated > 1 and not (plan.is_exact and drawn % each == 0):
            reason = f"may not divide the number of minibatches per epoch, which {name} requires"
            yield "minibatches_per_gradient_step", planned, reason, [1], hint
    if each != accumulated:
        reason = f"differs from gradient_accumulation_steps={accumulated} of {name}"
        yield "minibatches_per_gradient_step", planned, reason, [accumulated], hint


def _in_reward_changes(advantage: Any, loss_module: Any, stages: Stages) -> Iterator[Refusal]:
    """Yield errors for hooks that change rewards after advantages have been estimated."""
    before = [*map(owner_of, (*stages["batch_process"], *stages["pre_epoch"]))]
    estimated = advantage is not None or any(isinstance(h, ValueEstimatorHook) for h in before)
    if not estimated or reads_advantage(loss_module) is None:
        return
    for hook in map(owner_of, stages["process_optim_batch"]):
        if isinstance(hook, (RewardNormalizer, ScaleReward, SignReward)):
            reason = "changes rewards in minibatches after advantages have been estimated"
            yield "hook", type(hook).__name__, reason, _CHANGE_ENV_REWARDS


_CHANGE_ENV_REWARDS = (
    "change rewards in the environment, with make_env(normalize_reward=True) or a transform"
)


def in_networks(
    update: Any, collector: Any, evaluate: Any, advantage: Any, stages: Stages
) -> Iterator[Refusal]:
    """Yield errors if the acting policy or the advantage estimator's critic is never trained."""
    if not isinstance(update, Update):
        return
    trained = {*update.loss_module.parameters()}.union(*(g.parameters for g in update.groups))
    memory = set(map(_memory_of, trained))
    hooks = map(owner_of, itertools.chain(*stages.values()))
    sends_weights = any(isinstance(hook, UpdateWeights) for hook in hooks)
    factories = [f for f in getattr(collector, "policy_factory", None) or () if f is not None]
    if factories and collector.policy is None and not sends_weights:
        name = getattr(factories[0], "__name__", type(factories[0]).__name__)
        reason = "builds policies in worker processes that would never receive the trained weights"
        hint = "pass the loss's policy as policy=..., or add the UpdateWeights hook"
        yield "policy_factory", name, reason, hint
    kinds = (KitCollector, Evaluator, *(() if sends_weights else (Collector, MultiCollector)))
    acting = [part for part in (collector, evaluate) if isinstance(part, kinds)]
    for part, name in (*((part, "policy") for part in acting), (advantage, "value_network")):
        network = getattr(part, name, None)
        weights = [*network.parameters()] if isinstance(network, nn.Module) else []
        # On another device, TorchRL's collector acts with a copy of the policy.
        copied = isinstance(part, (Collector, MultiCollector))
        devices = {weight.device for weight in (trained if copied else weights)}
        compared = [w for w in weights if w.requires_grad and w.device in devices]
        if compared and memory.isdisjoint(map(_memory_of, compared)):
            reason = f"of {type(part).__name__} shares no weights with the loss"
            hint = f"use the loss's network, or freeze this one with {name}.requires_grad_(False)"
            yield name, type(network).__name__, f"{reason}, so it is never trained", hint


def _memory_of(weight: nn.Parameter) -> int:
    """Return an ID that all views of a weight share. Each lazy weight has a separate ID."""
    return id(weight) if is_lazy(weight) else weight.untyped_storage().data_ptr()


def in_rewards(buffer: Any, stages: Stages) -> Iterator[Refusal]:
    """Yield errors for reward hooks if the buffer shifts rewards or stores n-step sums."""
    n_step = buffer.summed.steps if isinstance(buffer, ReplayMinibatches) and buffer.summed else 1
    for hook in map(owner_of, stages["process_optim_batch"]):
        if isinstance(hook, (ScaleReward, SignReward)) and isinstance(buffer, SequenceReplay):
            reason = (
                "expects the reward after each action, but sequence buffers store the reward "
                "before each action"
            )
            yield "hook", type(hook).__name__, reason, _CHANGE_ENV_REWARDS
        if isinstance(hook, SignReward) and n_step > 1:
            reason = f"takes the sign of a sum of n_step={n_step} rewards, not of each reward"
            yield "hook", type(hook).__name__, reason, "remove the hook, or use n_step=1"
        if isinstance(hook, ScaleReward) and hook.standardize and n_step > 1:
            reason = f"standardises sums of n_step={n_step} rewards (fewer at episode ends)"
            hint = "use standardize_reward=false (reward_scale alone works), or n_step=1"
            yield "hook", type(hook).__name__, reason, hint


def in_priorities(buffer: Any, loss_module: Any) -> Iterator[Refusal]:
    """Yield an error if the loss ignores importance weights from a prioritized sampler."""
    if not isinstance(buffer, ReplayMinibatches) or not buffer.reads_loss_outputs:
        return
    has_key = hasattr(getattr(loss_module, "tensor_keys", None), "priority_weight")
    reads = getattr(loss_module, "reads_importance_weights", has_key)
    beta = getattr(buffer.buffer.sampler, "beta", 0)
    if beta and isinstance(loss_module, LossModule) and not reads:
        name = type(loss_module).__name__
        reason = f"corrects for priorities with importance weights, which {name} does not read"
        hint = "use per_beta=0 in a recipe, or declare reads_importance_weights=True on the loss"
        yield "beta", beta, reason, [0], hint


def in_discounts(
    loss_module: Any, advantage: Any, normalizer: Any, buffer: Any, stages: Stages
) -> Iterator[Refusal]:
    """Yield errors if components use different discount factors."""
    parts: list[Any] = [advantage]
    for module in _modules_of(loss_module):
        parts += [module] if isinstance(module, LossModule) else []
    hooks = [owner_of(operation) for stage in ADDING for operation in stages[stage]]
    parts += [hook.value_estimator for hook in hooks if isinstance(hook, ValueEstimatorHook)]
    parts += [normalizer] if getattr(normalizer, "reward", None) is not None else []
    parts += [buffer.summed] if isinstance(buffer, ReplayMinibatches) else []
    found = [(type(part).__name__, _discount_of(part, advantage)) for part in parts]
    discounts = [(name, gamma) for name, gamma in found if gamma is not None]
    for name, gamma in discounts[1:]:
        if not math.isclose(gamma, discounts[0][1], rel_tol=1e-6):
            reason = f"of {name} differs from gamma={discounts[0][1]:g} of {discounts[0][0]}"
            hint = "use one gamma everywhere; for losses, call make_value_estimator(gamma=...)"
            yield "gamma", round(gamma, 6), reason, hint


def _discount_of(part: Any, advantage: Any) -> float | None:
    """Return the discount factor of a component, or ``None`` if it does not discount."""
    if isinstance(part, LossModule):
        estimator, kind = part._value_estimator, part.default_value_estimator
        gamma = vars(part).get("gamma", getattr(estimator, "gamma", None))
        # TorchRL creates the value estimator lazily.
        if gamma is None and kind is not None and advantage is None:
            gamma = default_value_kwargs(kind)["gamma"]
    else:
        gamma = getattr(part, "gamma", None)
    return float(gamma) if isinstance(gamma, (float, int, Tensor)) else None


def in_targets(plan: StepPlan, update: Any, loss_module: Any, stages: Stages) -> Iterator[Refusal]:
    """Yield errors for target networks that are never updated.

    Hooks are assumed to update target networks unless they declare ``changes_training = False``. A
    loss that updates its target networks in ``forward`` declares ``updates_targets = True``.
    """
    if not plan.trains or getattr(update, "target_updater", None) is not None:
        return
    functions = [operation.function for operation in itertools.chain(*stages.values())]
    hooks = any(declares(function, "changes_training") for function in functions)
    for module in _modules_of(loss_module):
        if not isinstance(module, LossModule) or getattr(module, "updates_targets", False):
            continue
        for name, has_updater in module._has_update_associated.items():
            if f"target_{name}_params" in module._modules and not (has_updater and hooks):
                reason = f"has target networks (target_{name}_params) that are never updated"
                hint = "pass Update(..., target_updater=SoftUpdate(loss, tau=0.005))"
                yield "loss_module", type(module).__name__, reason, hint


def in_hooks(plan: StepPlan, update: Any, buffer: Any, stages: Stages) -> Iterator[Refusal]:
    """Yield errors for hooks that conflict with the plan, the update or the buffer."""
    if not plan.trains:
        return
    yield from _in_flattened(plan, stages)
    if update is None and not stages["optimizer"]:
        reason = "takes none of the plan's gradient steps"
        yield "update", None, reason, "pass an Update, or register a hook at stage 'optimizer'"
    rollouts = isinstance(buffer, RolloutMinibatches)
    owners = [*map(owner_of, stages["process_optim_batch"])]
    draws = [owner for owner in owners if not isinstance(owner, (ScaleReward, SignReward))]
    if plan.replay_ratio is not None and rollouts and not draws:
        samples = f"replay_ratio={plan.replay_ratio} needs a replay buffer"
        hint = "pass make_replay_buffer(...) or a TorchRL replay buffer"
        yield "buffer", None, f"keeps only the last batch, but {samples}", hint
    for operation in stages["post_backward"] if stages["optimizer"] else ():
        reason = f"never calls {operation.name}, because a hook takes the gradient step"
        yield "stage", "post_backward", reason, "call this function in the hook at 'optimizer'"
    if not isinstance(update, OptimizationStepper) or isinstance(update, Update):
        return
    for stage in ("process_loss", "optimizer", "post_backward"):
        for operation in stages[stage]:
            stepper = f"{type(update).__name__} calls no hooks between the loss and the optimiser"
            reason = f"never calls {operation.name}, because {stepper}"
            yield "stage", stage, reason, "use kit.update.Update, or remove the stepper"


def _in_flattened(plan: StepPlan, stages: Stages) -> Iterator[Refusal]:
    """Yield errors if a hook stores steps of several environments in a buffer as one sequence."""
    for hook in map(owner_of, stages["batch_process"]):
        flattens = isinstance(hook, ReplayBufferTrainer) and hook.flatten_tensordicts
        if not flattens or plan.num_envs == 1 or plan.collects_episodes:
            continue
        for part in (hook.replay_buffer, getattr(hook.replay_buffer, "sampler", None)):
            if isinstance(part, (HERReplayBuffer, SequenceSampler)):
                reason = f"would join steps of {plan.num_envs} environments, because the hook"
                hint = "pass the buffer to the trainer as buffer=..., without the hook"
                name = type(part).__name__
                yield "replay_buffer", name, f"{reason} stores them one after the other", hint


def owner_of(operation: Any) -> Any:
    """Return the hook object that an operation belongs to."""
    return getattr(operation.function, "__self__", operation.function)


def _modules_of(loss_module: Any) -> Iterable[nn.Module]:
    return loss_module.modules() if isinstance(loss_module, nn.Module) else ()


_LOCAL_STATE = (BatchRenorm1d, KLPENPPOLoss)
"""Modules that learn from the rows of one rank, outside gradients."""
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Modules that learn from the rows of one rank in training mode."""


def in_ranks(
    ranks: Ranks | None,
    plan: StepPlan,
    update: Any,
    loss_module: Any,
    stages: Stages,
    collector: Any,
) -> Iterator[Refusal]:
    """Yield errors for components whose weights, state or counts would differ between ranks."""
    if ranks is None or ranks.size == 1:
        return
    alone = "train in one process"
    if isinstance(update, OptimizationStepper) and not isinstance(update, Update):
        hint = alone if isinstance(update, TrustRegion) else f"use kit.update.Update, or {alone}"
        yield "update", type(update).__name__, "does not average gradients over ranks", hint
    for operation in stages["optimizer"]:
        reason = f"has {operation.name}, which takes gradient steps without averaging over ranks"
        yield "stage", "optimizer", reason, "use the stage process_loss or post_backward"
    for module in modules_of(loss_module) if isinstance(loss_module, nn.Module) else ():
        name = type(module).__name__
        if any(kind.__name__ == "DistributedDataParallel" for kind in type(module).__mro__):
            reason = "would average nothing, because the update computes gradients without backward"
            yield (
                "loss_module",
                name,
                reason,
                "pass the module inside, whose gradients are averaged",
            )
        if isinstance(module, _LOCAL_STATE) or (
            isinstance(module, _BATCH_NORM) and module.training
        ):
            reason = "has state that each rank would learn from its own rows only"
            yield "loss_module", name, reason, f"remove this module, or {alone}"
    if plan.collects_episodes:
        reason = "collects whole episodes, so the numbers of steps would differ between ranks"
        yield (
            "min_episodes",
            plan.min_episodes or plan.min_steps,
            reason,
            "set steps_per_env",
        )
    if isinstance(collector, AsyncCollector) and collector.normalized_by:
        reason = "normalises in another process, whose statistics are not merged between ranks"
        yield (
            "collector",
            type(collector).__name__,
            reason,
            "use VectorCollector, or do not normalise",
        )


def in_collection(plan: StepPlan, collector: Any, ranks: int) -> Iterator[Refusal]:
    """Yield errors if ``ranks`` processes would not collect the plan's policy steps."""
    if plan.world_size != ranks:
        reason = f"is the number of processes in the plan, but {ranks} run"
        several = f"start it with torchrun --nproc-per-node {plan.world_size}"
        hint = several if plan.world_size > 1 else "start it without torchrun"
        yield "world_size", plan.world_size, reason, hint
    if collector is None and not plan.offline:
        hint = "pass a collector, or a plan with steps_per_env=0 (offline)"
        yield "collector", None, "collects none of the plan's policy steps", hint


def in_buffer(plan: StepPlan, buffer: Any) -> Iterator[Refusal]:
    """Yield errors if the buffer's minibatch size or capacity does not match the plan."""
    if not isinstance(buffer, ReplayMinibatches):
        return
    size = buffer.buffer.batch_size
    planned = plan.minibatch_size and plan.minibatch_size * (plan.sequence_length or 1)
    if None not in (size, planned) and size != planned:
        reason = f"of the replay buffer differs from the plan's {planned} transitions"
        yield "minibatch_size", size, reason, [planned]
    capacity = buffer.buffer.storage.max_size
    if plan.is_exact and not plan.offline and capacity < plan.frames_per_batch:
        reason = f"is smaller than a batch of {plan.frames_per_batch}, so transitions would be lost"
        yield "buffer_size", capacity, reason, [plan.frames_per_batch]
    if plan.is_exact and plan.on_policy and capacity > plan.frames_per_batch:
        reason = f"is larger than a batch of {plan.frames_per_batch}, so on-policy updates would"
        reason += " also draw from older batches"
        yield "buffer_size", capacity, reason, [plan.frames_per_batch]


def stores_raw(plan: StepPlan, buffer: Any, advantage: Any) -> bool:
    """Return whether a buffer stores raw batches and normalises the minibatches that it draws.

    Advantages are estimated on collected batches, so these batches must already be normalised.
    """
    replays = isinstance(buffer, (ReplayMinibatches, SequenceReplay))
    return replays and advantage is None and not (plan.on_policy or plan.offline)


def in_raw_batches(collector: Any, raw: bool) -> Iterator[Refusal]:
    """Yield an error if the collector must deliver raw batches but cannot."""
    is_kit = isinstance(collector, KitCollector)
    delivered = collector.deliver_raw(raw) if is_kit else normalizer_of(collector) is None
    if raw and not delivered:
        name = type(collector).__name__
        reason = "normalises observations or rewards during collection, so a replay buffer would"
        reason += " mix data on different scales"
        hint = "use VectorCollector(make_env(...), policy), or make_env without normalize_..."
        yield "collector", name, reason, hint


def in_evaluation(plan: StepPlan, evaluate: Any, collector: Any) -> Iterator[Refusal]:
    """Yield an error if the evaluator contradicts the plan or uses training environments."""
    evaluations = plan.evaluation_every or plan.evaluation_every_iterations
    evaluations = evaluations or plan.initial_evaluations or plan.final_evaluation
    if evaluate is None and evaluations:
        hint = "pass an Evaluator, or a StepPlan with evaluation_every=None and "
        hint += "final_evaluation=False"
        yield "evaluate", None, "runs none of the plan's evaluations", hint
    if evaluate is not None and evaluate.episodes != plan.evaluation_episodes:
        reason = "episodes per evaluation differ from the plan"
        yield "evaluate", evaluate.episodes, reason, [plan.evaluation_episodes]
    elsewhere = getattr(collector, "steps_elsewhere", False)
    if not elsewhere and _stepped_by(evaluate) & _stepped_by(collector):
        reason = "plays in the training environments and would interrupt their episodes"
        yield "evaluate", type(evaluate).__name__, reason, "create other environments with make_env"
    running, env = normalizer_of(collector), getattr(evaluate, "env", None)
    normalized = running is not None and bool(running.observation)
    if normalized and isinstance(env, VectorEnv) and env.normalizer is not running:
        reason = "plays without the running normalisation that the policy is trained with"
        hint = "share the normaliser: evaluation_env.normalizer = training_env.normalizer"
        yield "evaluate", type(evaluate).__name__, reason, hint


def _stepped_by(part: Any) -> set[int]:
    """Return the ids of the environments that a collector or evaluator steps in this process."""
    env = getattr(part, "env", None)
    base = base_env_of(env)
    if not isinstance(base, VectorEnv):  # TorchRL's ParallelEnv forwards attributes to its workers
        return {id(base)} - {id(None)}
    backend: Any = base.backend
    single = [env.unwrapped for env in getattr(backend, "envs", ()) if isinstance(env, gym.Env)]
    envs = (base, backend, getattr(backend, "env", None), *single)
    return {id(env) for env in envs if env is not None}
