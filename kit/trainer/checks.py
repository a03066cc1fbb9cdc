"""Parts of a trainer that contradict each other or the plan, found before anything runs."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torchrl.collectors import BaseCollector, Collector, MultiAsyncCollector, MultiCollector
from torchrl.data import HERReplayBuffer, ImmutableDatasetWriter, ReplayBufferEnsemble
from torchrl.envs import EnvBase
from torchrl.objectives import KLPENPPOLoss
from torchrl.trainers import (
    OptimizationStepper,
    ReplayBufferTrainer,
    RewardNormalizer,
    UpdateWeights,
    ValueEstimatorHook,
)

from kit.buffers import ReplayBatches, RolloutBatches, SequenceReplay, SequenceSampler
from kit.collectors.asynchronous import AsyncCollector
from kit.collectors.base import KitCollector
from kit.envs.backends.torchrl import TorchRLBackend
from kit.envs.backends.torchrl_layers import base_env_of, frame_skip_of
from kit.envs.spaces import path_of
from kit.envs.vector_env import VectorEnv
from kit.fast.nested import entry, leaves
from kit.hooks.annealing import Anneal
from kit.hooks.evaluation import Evaluator
from kit.hooks.rewards import ScaleReward, SignReward
from kit.steps import SettingError, StepLedger, StepPlan
from kit.trainer.batches import acts_at_random, size_of
from kit.trainer.checkpoint import normalizer_of, saved_in
from kit.trainer.stages import Stages
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


# ---------------------------------------------------------------------- collection
def in_collection(plan: StepPlan, collector: Any, buffer: Any, advantage: Any) -> Iterator[Refusal]:
    """A collector or an environment that does not make the batches of the plan."""
    if plan.world_size > 1:
        why = "processes train together in the plan, and this is one process"
        yield "world_size", plan.world_size, why, [1]
    yield from _in_buffer(plan, buffer)
    if plan.offline:
        nothing = "the plan collects nothing (steps_per_env=0)"
        if collector is not None:
            yield "collector", type(collector).__name__, f"never runs: {nothing}", [None]
        if isinstance(buffer, RolloutBatches):
            works = "give a filled replay buffer"
            yield "buffer", None, "holds nothing to train on offline", works
        if advantage is not None:
            why = f"is estimated on collected batches, and {nothing}"
            yield "advantage", type(advantage).__name__, why, [None]
    elif collector is None:
        works = "give a collector, or a plan with steps_per_env=0 (offline)"
        yield "collector", None, "leaves the policy steps of the plan undone", works
    elif not isinstance(collector, BaseCollector):
        works = (
            "give one of the kit or of TorchRL, as VectorCollector(env, policy, steps_per_env=8)"
        )
        yield "collector", type(collector).__name__, "is no collector", works
    else:
        if getattr(collector, "replay_buffer", None) is not None:
            why = "of the collector takes the batches, of which the trainer gets none"
            name = type(collector.replay_buffer).__name__
            yield "replay_buffer", name, why, "give it to the trainer, as buffer"
        if isinstance(buffer, ReplayBatches):
            writer = buffer.buffer.writer
            if isinstance(writer, ImmutableDatasetWriter):
                why = "allows no writing, and the collector gives batches"
                works = "use TensorDictRoundRobinWriter, or a plan with steps_per_env=0 (offline)"
                yield "writer", type(writer).__name__, why, works
        yield from _in_restarts(plan, collector, buffer)
        yield from _in_goals(normalizer_of(collector), buffer)
        yield from _in_environment(plan, collector)


def _in_buffer(plan: StepPlan, buffer: Any) -> Iterator[Refusal]:
    """A replay buffer that says another size of minibatches than the plan."""
    size = buffer.buffer.batch_size if isinstance(buffer, ReplayBatches) else None
    planned = plan.minibatch_size and plan.minibatch_size * (plan.sequence_length or 1)
    if None not in (size, planned) and size != planned:
        why = f"of the replay buffer is not the plan's {planned} transitions"
        yield "minibatch_size", size, why, [planned]
    holds = buffer.buffer.storage.max_size if isinstance(buffer, ReplayBatches) else None
    if holds is not None and plan.is_exact and not plan.offline and holds < plan.frames_per_batch:
        why = f"is less than one batch of {plan.frames_per_batch}, of which the rest would be lost"
        yield "buffer_size", holds, why, [plan.frames_per_batch]
    if holds is not None and plan.is_exact and plan.on_policy and holds > plan.frames_per_batch:
        why = f"is more than one batch of {plan.frames_per_batch}: updates of this plan pass over"
        why += " the last batch, and would be drawn from older ones as well"
        yield "buffer_size", holds, why, [plan.frames_per_batch]


def in_checkpoints(folder: Any, buffer: Any) -> Iterator[Refusal]:
    """Parts of a replay buffer whose state no checkpoint could hold."""
    if folder is None or not isinstance(buffer, ReplayBatches):
        return
    if isinstance(buffer.buffer, ReplayBufferEnsemble):
        why = "keeps rows in several storages, which no checkpoint holds"
        works = "use one and let a hook mix the minibatches, or folder=None (in a recipe runs=null)"
        yield "buffer", type(buffer.buffer).__name__, why, works
    for field in ("writer", "sampler"):
        part = getattr(buffer.buffer, field)
        try:
            part.state_dict()
        except NotImplementedError:
            why = "gives no state, which checkpoints need"
            works = f"use another {field}, or folder=None (in a recipe runs=null): no checkpoints"
            yield field, type(part).__name__, why, works


def in_folder(folder: Path | None, last_checkpoint: Any) -> Iterator[Refusal]:
    """A folder with checkpoints of an earlier run, which those of a new one would replace."""
    if folder is None or last_checkpoint is not None:
        return
    if saved_in(folder / "checkpoints"):
        why = "has checkpoints of an earlier run, which would be lost"
        yield "folder", str(folder), why, "give another folder, or resume_from one of them"


def _in_restarts(plan: StepPlan, collector: Any, buffer: Any) -> Iterator[Refusal]:
    """Episodes that do not go on in the next batch, where they are taken for going on; or do."""
    joins = getattr(buffer, "joins_steps", False)
    if joins and isinstance(collector, MultiAsyncCollector) and collector.num_workers > 1:
        why = "gives batches of its workers in any order, and the memory joins each to the last"
        yield "collector", type(collector).__name__, why, "use MultiSyncCollector, or one worker"
    restarts = getattr(collector, "reset_at_each_iter", False)
    ends = getattr(collector, "set_truncated", False)
    if joins and restarts and not ends:
        why = "leaves episodes without an end, and the memory joins steps until an episode ends"
        works = "leave it out, or truncate episodes with env.max_episode_steps"
        yield "reset_at_each_iter", True, why, works
    if ends and not restarts:
        why = "ends episodes that go on in the next batch, which would be counted as two"
        yield "set_truncated", True, why, "leave it out, or give reset_at_each_iter=True, too"
    if plan.on_policy and getattr(collector, "split_trajs", False) and not ends:
        why = "pads pieces of episodes, whose advantages would read the padding"
        yield "split_trajs", True, why, "leave it out: they do not pass the end of an episode"


def _in_goals(normalizer: Any, buffer: Any) -> Iterator[Refusal]:
    """Normalisation by which goals that hindsight exchanges, or their rewards, do not compare."""
    hindsight = buffer.buffer if isinstance(buffer, ReplayBatches) else None
    if normalizer is None or not isinstance(hindsight, HERReplayBuffer):
        return
    keys = (path_of(key) for key in (hindsight.achieved_goal_key, hindsight.goal_key))
    goals = [path[path[0] == "next" :] for path in keys]
    if {*goals} & {path_of(key) for key in normalizer.observation}:
        both = " and ".join(".".join(path) for path in goals)
        why = f"puts {both} on scales of their own, and hindsight puts one in the other's place"
        yield "env.normalize_observation", True, why, [False]
    if normalizer.reward is not None:
        why = "does not reach the rewards of goals that hindsight puts in"
        yield "env.normalize_reward", True, why, [False]


def _in_environment(plan: StepPlan, collector: Any) -> Iterator[Refusal]:
    several = isinstance(collector, MultiCollector)  # of others, which join their batches
    with _env_of(collector) as env:
        base: Any = base_env_of(env)
        again = base.make_again if isinstance(base, VectorEnv) else None
        made = getattr(again, "keywords", {})  # arguments of make_env
        rows = None if several else getattr(base, "num_envs", None)
        found = {
            "num_envs": getattr(collector, "num_envs", rows),
            "action_repeat": made.get("action_repeat") or _frame_skip_of(env, base),
        }
    if plan.max_episode_steps is not None and made:
        found["max_episode_steps"] = made.get("max_episode_steps") or "the registered one"
    for field, value in found.items():
        planned = getattr(plan, field)
        if value is not None and value != planned:
            why = f"of the collector contradicts the plan's {field}={planned}"
            yield f"env.{field}", value, why, [planned], "or change the plan"
    frames = getattr(collector, "requested_frames_per_batch", None)
    steps = plan.is_exact and not plan.collects_episodes
    if steps and isinstance(frames, int) and frames > 0 and frames != plan.frames_per_batch:
        why = "policy steps in a batch are not those of the plan"
        yield "collector", frames, why, [plan.frames_per_batch]
    if plan.collects_episodes:
        yield from _in_episodes(plan, collector)
    yield from _in_random_actions(plan, collector)


def _in_episodes(plan: StepPlan, collector: Any) -> Iterator[Refusal]:
    """A collector of steps, or of other episodes than planned."""
    of_torchrl = isinstance(collector, (Collector, MultiCollector))
    whole = getattr(collector, "trajs_per_batch", None)
    if not whole and (of_torchrl or getattr(collector, "frames_per_batch", -1) > 0):
        why = "collects steps, where the plan has whole episodes"
        works = "give an EpisodeCollector, or a plan with steps_per_env"
        yield "collector", type(collector).__name__, why, works
    found = {name: getattr(collector, name, None) for name in ("min_episodes", "min_steps")}
    found["min_episodes"] = found["min_episodes"] or whole
    for field, value in found.items():
        planned = getattr(plan, field)
        if value is not None and value != (planned or 1):
            why = f"of the collector contradicts the plan's {field}={planned}"
            yield field, value, why, [planned or 1], "or change the plan"


@contextlib.contextmanager
def _env_of(collector: Any) -> Iterator[Any]:
    """What a collector steps; of those in processes one more is made."""
    if not isinstance(collector, MultiCollector):
        yield getattr(collector, "env", None)
        return
    make, arguments = collector.create_env_fn[0], collector.create_env_kwargs[0]
    env = make if isinstance(make, EnvBase) else make(**arguments)
    try:
        yield env
    finally:
        if env is not make:
            env.close(raise_if_closed=False)


def _in_random_actions(plan: StepPlan, collector: Any) -> Iterator[Refusal]:
    """Another number of random actions than planned."""
    asked = getattr(collector, "init_random_frames", None) or 0
    of_torchrl, always = not isinstance(collector, KitCollector), acts_at_random(collector)
    policies = [getattr(collector, name, None) for name in ("policy", "policy_factory")]
    if not plan.is_exact or (policies == [None, None] and not always):
        return
    total = plan.policy_steps_after(plan.iterations)
    random, frames = plan.random_steps_until(total), plan.frames_per_batch
    if asked and isinstance(collector, MultiAsyncCollector) and not always:
        why = "end with batches that other workers have begun by then, so they cannot be counted"
        yield "init_random_frames", asked, why, [0], "or another collector"
    taken = -(-asked // frames) * frames if of_torchrl else asked  # by whole batches
    if always and random != total:
        why = f"has no policy: it takes {total} policy steps at random, and the plan has {random}"
        works = f"give it the policy, or random_steps={total} in the plan"
        yield "collector", type(collector).__name__, why, works
    elif not always and min(taken, total) != random:
        why = f"of the collector are not the plan's {random} policy steps with random actions"
        also = f"or random_steps={min(taken, total)} in the plan"
        yield "init_random_frames", asked, why, [random], *([also] if of_torchrl else [])


def _frame_skip_of(env: Any, base: Any) -> int | None:
    """Env steps of one policy step in an environment of TorchRL; ``None`` where it is not known."""
    found = frame_skip_of(env) if isinstance(env, EnvBase) else 1
    if isinstance(base, VectorEnv):
        return base.backend.action_repeat if isinstance(base.backend, TorchRLBackend) else None
    return None if found == 1 else found  # it may hold actions in a way of its own


def in_counts(collector: Any, ledger: StepLedger) -> Iterator[Refusal]:
    """A collector that has collected what the run does not know of."""
    collected = collector.policy_steps if isinstance(collector, KitCollector) else 0
    if collected > ledger.local_policy_steps:
        why = f"has collected {collected:,} policy steps before, which are not in this run"
        yield "collector", type(collector).__name__, why, "make another one"


def in_random_steps(plan: StepPlan, ledger: StepLedger, collector: Any) -> Iterator[Refusal]:
    """Other steps with random actions than planned until now, which the end would show."""
    if not plan.is_exact or plan.collects_episodes or collector is None:
        return
    steps, found = ledger.policy_steps, ledger.random_policy_steps
    if found != (planned := plan.random_steps_until(steps)):
        why = f"took {found:,} policy steps at random, and the plan has {planned:,} of the first"
        works = "let it act at random until init_random_frames, and count random_policy_steps"
        yield "collector", type(collector).__name__, f"{why} {steps:,}", works


def in_ended(released: bool, ledger: StepLedger, checkpoint: Any) -> Iterator[Refusal]:
    """A run that would go on after its environments were closed."""
    if released:
        why = f"has ended after {ledger.policy_steps:,} policy steps and closed its environments"
        again = "" if checkpoint is None else f" with resume_from={str(checkpoint)!r}"
        yield "trainer", "Trainer", why, f"build another one{again}"


def in_resumed(plan: StepPlan, ledger: StepLedger, checkpoint: Any) -> Iterator[Refusal]:
    """A checkpoint of a run that had other counts by now than the plan would have."""
    found = [one for one in ledger.compare(plan) if one.name != "env_steps"]
    if found:
        why = f"was written under another plan: {', '.join(map(str, found))}"
        yield "resume_from", str(checkpoint), why, "resume with the settings that it had"


def in_saving(iteration: int, ledger: StepLedger) -> Iterator[Refusal]:
    """A checkpoint within an iteration, whose batch is collected and in no checkpoint."""
    if iteration != ledger.iterations:
        why = "has begun and not ended, and no checkpoint goes on within it"
        works = "trainer.request_checkpoint() saves after it"
        yield "iteration", iteration, why, works


def in_evaluation(plan: StepPlan, evaluate: Any, collector: Any) -> Iterator[Refusal]:
    """An evaluator that disturbs training, leaves evaluations undone, or plays something else."""
    evaluations = plan.evaluation_every or plan.evaluation_every_iterations
    evaluations = evaluations or plan.initial_evaluations or plan.final_evaluation
    if evaluate is None and evaluations:
        works = "give an Evaluator, or a StepPlan without (evaluation_every=None, "
        works += "final_evaluation=False)"
        yield "evaluate", None, "leaves the evaluations of the plan undone", works
    if evaluate is not None and not hasattr(evaluate, "episodes"):
        yield "evaluate", evaluate, "is no evaluator", "give an Evaluator(env, policy)"
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


def in_saved_policies(collector: Any) -> Iterator[Refusal]:
    """Statistics in other processes, without which a saved policy would act otherwise."""
    name = ""
    if isinstance(collector, AsyncCollector) and collector.env is None:
        name = collector.normalized_by
    elif isinstance(collector, MultiCollector):
        states = [one for one in collector.state_dict().values() if isinstance(one, dict)]
        running = [key for one in states for key in one.get("env_state_dict", ()) if _EXTRA in key]
        name = "VecNorm" if running else ""
    if name:
        why = f"has statistics in the processes of {type(collector).__name__}, of which a saved"
        works = "normalise in this process: by another collector, or an environment of make_env(id)"
        yield "environment", name, f"{why} policy would have none", works


_EXTRA = "_extra_state"
"""Where TorchRL's transforms with running statistics have them."""


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


# ---------------------------------------------------------------------- gradient steps
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
    known = kind.__module__.startswith(("torchrl.", "kit."))
    unread = known and not hasattr(keys, "priority_weight")
    beta = getattr(buffer.buffer.sampler, "beta", 0)
    if unread and beta:
        why = f"corrects priorities by importance weights, which {kind.__name__} does not read"
        yield "beta", beta, why, [0], "or sample uniformly, or use another loss"


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
    if not isinstance(update, OptimizationStepper) or isinstance(update, Update):
        return
    for stage in ("process_loss", "optimizer"):
        for operation in stages[stage]:
            itself = f"{type(update).__name__} goes from loss to optimiser by itself"
            why = f"never runs, so {operation.name} never would: {itself}"
            yield "stage", stage, why, "use kit.update.Update, or leave out the stepper"
