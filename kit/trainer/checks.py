"""Parts of a trainer that contradict its gradient steps, found before anything runs."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
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

from kit.buffers import ReplayBatches, RolloutBatches, SequenceReplay, SequenceSampler
from kit.collectors.base import KitCollector
from kit.envs.spaces import path_of
from kit.fast.nested import entry, leaves
from kit.hooks.annealing import Anneal
from kit.hooks.evaluation import Evaluator
from kit.hooks.rewards import ScaleReward, SignReward
from kit.steps import SettingError, StepPlan
from kit.trainer.batches import size_of
from kit.trainer.stages import Stages, is_of_the_kit
from kit.update import TrustRegion, Update

Refusal = tuple[Any, ...]
"""Arguments of a ``SettingError``."""


def refuse(*refusals: Iterator[Refusal]) -> None:
    """Raise the first refusal, if there is one.

    Raises:
        SettingError: with its field, value, reason and what works.
    """
    for refusal in itertools.chain(*refusals):
        raise SettingError(*refusal)


def hooks_as_list(hooks: Any) -> list[Any]:
    """The hooks as a list.

    Raises:
        SettingError: if one hook is given in place of a list of them.
    """
    one = callable(getattr(hooks, "register", None)) or isinstance(hooks, (str, dict))
    if one or not isinstance(hooks, Iterable):
        works = "hooks=[...], and register_op(stage, f) of the trainer for a function f"
        works = f"hooks=[{type(hooks).__name__}(...)]" if one else works
        raise SettingError("hooks", hooks, "is not a list of hooks", works)
    return list(hooks)


_LOGS = ("start", "log_row", "log_text", "log_config", "state_dict", "load_state_dict", "close")


def loggers_as_list(loggers: Any) -> list[Any]:
    """The loggers as a list.

    Raises:
        SettingError: if one does not log rows.
    """
    several = isinstance(loggers, Sequence) and not isinstance(loggers, str)
    for one in (found := list(loggers) if several else [loggers]):
        if not all(callable(getattr(one, name, None)) for name in _LOGS):
            given = one if isinstance(one, str) else type(one).__name__
            works = "a subclass of kit.logging.RowLogger, or TorchRLLogger(one of TorchRL's)"
            raise SettingError("logger", given, "does not log rows", works)
    return found


def in_learning_rates(update: Any, modules: Mapping[str, Any]) -> Iterator[Refusal]:
    """Hooks that set a learning rate that another sets, or that of an idle optimiser."""
    groups = update.groups if isinstance(update, Update) else ()
    stepping = [group.optimizer for group in groups]
    trained = {id(weight) for group in groups for weight in group.parameters}
    for hook in modules.values():
        optimizer = getattr(getattr(hook, "scheduler", None), "optimizer", None)
        owners = [value.owner for value in hook.values] if isinstance(hook, Anneal) else [optimizer]
        for owner in owners:
            # A hook may step one of its own, but not with these weights.
            own = owner.param_groups if isinstance(owner, Optimizer) else ()
            weights = {id(weight) for group in own for weight in group["params"]}
            if weights & trained and not any(owner is one for one in stepping):
                why = "is of an optimiser that steps nothing: that of the update has its weights"
                yield "hook", type(hook).__name__, why, "give it the optimiser of the update"
        for name, other in modules.items():
            if optimizer and isinstance(other, Anneal) and other.sets(optimizer, "lr"):
                why = f"sets the learning rate that {name} sets too"
                works = "leave one of the two out; recipes leave theirs out with anneal=constant"
                yield "hook", type(hook).__name__, why, works


_UNDONE = "leaves the plan's gradient steps undone"


def in_updates(
    plan: StepPlan, update: Any, loss_module: Any, advantage: Any, stages: Stages
) -> Iterator[Refusal]:
    """Gradient steps that are never made, or losses without their input."""
    if not (update is None or isinstance(update, OptimizationStepper)):
        why = "makes no gradient steps of a loss"
        yield "update", type(update).__name__, why, "give an Update(loss, optimizer)"
    if not plan.trains:
        return
    if update is None and loss_module is None:
        works = "give an Update, or a loss_module and a hook at stage 'optimizer'"
        yield "update", None, _UNDONE, works
    if any(type(one) is KLPENPPOLoss for one in _modules_of(loss_module)):
        why = "changes the weight of its penalty before the gradient, which has twice or half of it"
        yield "loss", "KLPENPPOLoss", why, ["kit.losses:KLPENPPOLoss"]
    if isinstance(update, TrustRegion) and plan.on_policy:
        yield from _in_trust_regions(plan)
    if isinstance(update, OptimizationStepper) and not isinstance(update, Update):
        yield from _in_accumulation(plan, update)
    reads = _reads_advantage(loss_module) is not None
    if reads and advantage is None and not any(stages[stage] for stage in _ADDING):
        why = f"leaves {_unestimated(loss_module)}"
        yield "advantage", None, why, "give advantage=GAE(...) or another estimator"
    yield from _in_reward_changes(advantage, loss_module, stages)
    if advantage is None or plan.on_policy:
        return
    if plan.replay_ratio is not None:
        why = "counts samples of a replay buffer, and advantages belong to the last batch"
        works = "give update_epochs, as OnPolicySteps does"
        yield "replay_ratio", str(plan.replay_ratio), why, [None], works
    size = plan.minibatch_size
    if plan.is_exact and size is not None and size > plan.frames_per_batch:
        batch = f"the {plan.frames_per_batch} policy steps of one batch"
        why = f"is larger than {batch}, whose advantages it needs"
        yield "minibatch_size", size, why, [plan.frames_per_batch]


def in_networks(
    update: Any, collector: Any, evaluate: Any, advantage: Any, stages: Stages
) -> Iterator[Refusal]:
    """A policy that acts, or a critic that estimates advantages, and is not trained."""
    if not isinstance(update, Update):
        return
    trained = {*update.loss_module.parameters()}.union(*(one.parameters for one in update.groups))
    memory = set(map(_memory_of, trained))
    hooks = map(_owner_of, itertools.chain(*stages.values()))
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


def _in_reward_changes(advantage: Any, loss_module: Any, stages: Stages) -> Iterator[Refusal]:
    """Hooks that change the rewards of minibatches, where none is read any more."""
    before = [*map(_owner_of, (*stages["batch_process"], *stages["pre_epoch"]))]
    estimated = advantage is not None or any(isinstance(o, ValueEstimatorHook) for o in before)
    if not estimated or _reads_advantage(loss_module) is None:
        return
    for hook in map(_owner_of, stages["process_optim_batch"]):
        if isinstance(hook, (RewardNormalizer, ScaleReward, SignReward)):
            why = "changes rewards of minibatches, whose advantages were estimated before"
            yield "hook", type(hook).__name__, why, _OF_THE_ENVIRONMENT


_OF_THE_ENVIRONMENT = (
    "change those of the environment: make_env(normalize_reward=True), a transform"
)


def in_rewards(buffer: Any, stages: Stages) -> Iterator[Refusal]:
    """Hooks that change the rewards of minibatches, where these have none or sums of them."""
    n_step = buffer.summed.steps if isinstance(buffer, ReplayBatches) and buffer.summed else 1
    for hook in map(_owner_of, stages["process_optim_batch"]):
        if isinstance(hook, (ScaleReward, SignReward)) and isinstance(buffer, SequenceReplay):
            why = "changes rewards after actions, and records have those of their observations"
            yield "hook", type(hook).__name__, why, _OF_THE_ENVIRONMENT
        if isinstance(hook, SignReward) and n_step > 1:
            why = f"takes the sign of sums of n_step={n_step} rewards, not of each reward"
            yield "hook", type(hook).__name__, why, "leave it out, or use n_step=1"
        if isinstance(hook, ScaleReward) and hook.standardize and n_step > 1:
            why = f"standardises sums of n_step={n_step} rewards, shorter ones where episodes end"
            works = "use standardize_reward=false (reward_scale alone is fine), or n_step=1"
            yield "hook", type(hook).__name__, why, works


def _owner_of(operation: Any) -> Any:
    """The hook object that an operation belongs to."""
    return getattr(operation.function, "__self__", operation.function)


def _modules_of(loss_module: Any) -> Iterable[nn.Module]:
    return loss_module.modules() if isinstance(loss_module, nn.Module) else ()


def in_priorities(buffer: Any, loss_module: Any) -> Iterator[Refusal]:
    """Importance weights of a sampler by priority that a known loss does not read."""
    if not isinstance(buffer, ReplayBatches) or not buffer.reads_loss_outputs:
        return
    kind, keys = type(loss_module), getattr(loss_module, "tensor_keys", None)
    known = kind.__module__.startswith(_KNOWN)
    unread = known and not hasattr(keys, "priority_weight")
    beta = getattr(buffer.buffer.sampler, "beta", 0)
    if unread and beta:
        why = f"corrects priorities by importance weights, which {kind.__name__} does not read"
        hint = "in a recipe importance_exponent=0; or sample uniformly, or use another loss"
        yield "beta", beta, why, [0], hint


_ADDING = ("batch_process", "pre_epoch", "process_optim_batch")
"""Stages whose hooks may add advantages."""


def _reads_advantage(loss_module: Any) -> Any:
    """The key of the advantages that a loss reads; ``None`` if it reads none."""
    keys = getattr(loss_module, "tensor_keys", None)
    # Losses of action values name an advantage too, for estimators, and do not read it.
    return None if hasattr(keys, "action_value") else getattr(keys, "advantage", None)


def _unestimated(loss_module: Any) -> str:
    name = type(loss_module).__name__
    return f"{name} without advantages, which it would estimate from shuffled minibatches"


def in_estimated(
    batch: Any, before: TensorDictBase, advantage: Any, loss_module: Any, stages: Stages
) -> Iterator[Refusal]:
    """What an estimator of advantages has made of a batch: nothing that can be trained on."""
    name = getattr(advantage, "__name__", type(advantage).__name__)
    if not isinstance(batch, TensorDictBase):
        why = f"returned a {type(batch).__name__}, not a TensorDict"
        yield "advantage", name, why, "return the batch, with its advantages"
        return
    if batch.numel() != before.numel():
        why = f"returned {batch.numel()} of the {before.numel()} transitions of a batch"
        yield "advantage", name, why, "return all of them, which the plan trains on"
    key = _reads_advantage(loss_module)
    adds = any(stages[stage] for stage in _ADDING)
    if key is not None and not adds and entry(batch, key) is None:
        why = f"wrote no {key!r} and leaves {_unestimated(loss_module)}"
        yield "advantage", name, why, "write it, or name it: loss.set_keys(advantage=...)"


def in_processed(
    stage: str, before: int, paths: Iterable[Any], batch: TensorDictBase, trainer: Any
) -> Iterator[Refusal]:
    """What hooks have made of a batch: other transitions than planned, or without what is read.

    Of update epochs over more or fewer as many gradient steps would be made, and so other epochs.

    Args:
        stage: of the hooks.
        before: transitions that they were given.
        paths: of the entries that they were given.
        batch: that they returned.
        trainer: its plan, advantage, loss and stages.
    """
    if trainer.plan.on_policy and (after := size_of(batch)) != before:
        why = f"has hooks that returned {after} transitions for the {before} of a batch"
        yield "stage", stage, why, "return as many: update epochs are planned for all of them"
    yield from in_left_out(stage, paths, batch, trainer)


def in_left_out(
    stage: str, paths: Iterable[Any], batch: TensorDictBase, trainer: Any
) -> Iterator[Refusal]:
    """Entries that hooks have left out of a batch or minibatch, and that something reads.

    Args:
        stage: of the hooks.
        paths: of the entries that they were given.
        batch: that they returned.
        trainer: its advantage, buffer, loss and stages.
    """
    if lost := {*paths}.difference(leaves(batch)):
        for part, read in _read_after(stage, trainer):
            if missing := [key for key in read if path_of(key) in lost]:
                why = f"has hooks that returned a batch without {missing[0]!r}"
                works = "leave it in the batch"
                yield "stage", stage, f"{why}, which {type(part).__name__} reads", works


def _read_after(stage: str, trainer: Any) -> Iterator[tuple[Any, list[Any]]]:
    """What reads a batch after hooks have changed it, with the keys that it says it reads."""
    loss, later = trainer.loss_module, _ADDING[_ADDING.index(stage) + 1 :]
    if later:  # minibatches are stored no more
        yield trainer.buffer, _keys_of(trainer.buffer)
    if trainer.advantage is not None and stage == "batch_process":
        yield trainer.advantage, _keys_of(trainer.advantage)
    if not any(trainer.stages[one] for one in later):  # whose hooks may add it
        read, estimated = _keys_of(loss), _reads_advantage(loss)
        if estimated is not None:  # before: estimators alone read what is next
            value_target = getattr(loss.tensor_keys, "value_target", None)
            read = [estimated, value_target, *(key for key in read if key[0] != "next")]
        yield loss, read


def _keys_of(part: Any) -> list[Any]:
    try:
        return [*getattr(part, "in_keys", ())]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # a property of TorchRL
        return []


def in_discounts(
    loss_module: Any, advantage: Any, normalizer: Any, buffer: Any, stages: Stages
) -> Iterator[Refusal]:
    """Parts that discount rewards by different factors."""
    parts: list[Any] = [advantage]
    for one in _modules_of(loss_module):
        parts += [one] if isinstance(one, LossModule) else []
    hooks = [_owner_of(one) for stage in _ADDING for one in stages[stage]]
    parts += [one.value_estimator for one in hooks if isinstance(one, ValueEstimatorHook)]
    parts += [normalizer] if getattr(normalizer, "reward", None) is not None else []
    parts += [buffer.summed] if isinstance(buffer, ReplayBatches) else []
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


def in_places(drawn: Tensor, told: Tensor | None) -> Iterator[Refusal]:
    """Rows that a hook has put into a minibatch from elsewhere, with their places there.

    They would set priorities of other rows, and of some that were never written.
    """
    if told is None or not told.is_cpu:  # a GPU is not asked
        return
    if not (torch.isin(told, drawn) | (told < 0)).all():
        why = "has hooks that returned rows of elsewhere with places that were not drawn"
        works = "give these rows an index of -1: they have no priority in this buffer"
        yield "stage", "process_optim_batch", why, works


def _in_trust_regions(plan: StepPlan) -> Iterator[Refusal]:
    """Several steps from one batch, each of which only bounds the divergence from the last."""
    why = "makes several steps of a trust region from one batch, of which each alone is bounded"
    epochs, size = plan.update_epochs, plan.minibatch_size
    if epochs is not None and epochs > 1:
        yield "update_epochs", epochs, why, [1]
    rows = plan.rows(1) if plan.is_exact else sys.maxsize
    if plan.minibatches_in_epoch(rows) > 1:
        yield "minibatch_size", size, why, [None], "the whole batch"


def _in_flattened(plan: StepPlan, stages: Stages) -> Iterator[Refusal]:
    """Environments that a hook stores one after the other, where they have to write in turn."""
    for hook in map(_owner_of, stages["batch_process"]):
        flattens = isinstance(hook, ReplayBufferTrainer) and hook.flatten_tensordicts
        if not flattens or plan.num_envs == 1 or plan.collects_episodes:
            continue
        for part in (hook.replay_buffer, getattr(hook.replay_buffer, "sampler", None)):
            if isinstance(part, (HERReplayBuffer, SequenceSampler)):
                why = f"would join steps of other environments: the hook stores {plan.num_envs}"
                works = "give it to the trainer, as buffer, without the hook"
                name = type(part).__name__
                yield "replay_buffer", name, f"{why} one after the other", works


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


def in_targets(plan: StepPlan, update: Any, loss_module: Any, stages: Stages) -> Iterator[Refusal]:
    """Target networks that would keep their first weights: nothing updates them.

    Third-party hooks may call an updater that was created for the loss. A loss that derives from
    ``LossModule`` alone may update its target networks itself.
    """
    if not plan.trains or getattr(update, "target_updater", None) is not None:
        return
    hooks = any(not is_of_the_kit(one.function) for one in itertools.chain(*stages.values()))
    for one in _modules_of(loss_module):
        known = [kind for kind in type(one).__mro__ if kind.__module__.startswith(_KNOWN)]
        if not isinstance(one, LossModule) or known[0] is LossModule:
            continue
        for name, has_updater in one._has_update_associated.items():
            if f"target_{name}_params" in one._modules and not (has_updater and hooks):
                why = f"has target networks (target_{name}_params) that nothing updates"
                works = "give Update(..., target_updater=SoftUpdate(loss, tau=0.005))"
                yield "loss_module", type(one).__name__, why, works


_KNOWN = ("torchrl.", "kit.")


def in_hooks(plan: StepPlan, update: Any, buffer: Any, stages: Stages) -> Iterator[Refusal]:
    """What the hooks registered until a run begins leave undone, or mix.

    Gradient steps that are never made, samples that are never held, a stepper of TorchRL, which
    calls no hook between loss and optimiser, or steps of environments that follow one another.
    """
    if not plan.trains:
        return
    yield from _in_flattened(plan, stages)
    if update is None and not stages["optimizer"]:
        yield "update", None, _UNDONE, "give an Update, or register a hook at stage 'optimizer'"
    rollouts = isinstance(buffer, RolloutBatches)
    owners = [*map(_owner_of, stages["process_optim_batch"])]
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
            itself = f"{type(update).__name__} goes from loss to optimiser by itself"
            why = f"never runs, so {operation.name} never would: {itself}"
            yield "stage", stage, why, "use kit.update.Update, or leave out the stepper"
