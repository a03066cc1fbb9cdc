"""Parts of a trainer that contradict its collection, evaluations or checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
from torchrl.collectors import BaseCollector, Collector, MultiAsyncCollector, MultiCollector
from torchrl.data import ImmutableDatasetWriter, ReplayBufferEnsemble
from torchrl.envs import EnvBase

from kit.buffers import ReplayBatches, RolloutBatches
from kit.buffers.records import SequenceReplay
from kit.collectors.asynchronous import AsyncCollector
from kit.collectors.base import KitCollector
from kit.envs.backends.torchrl import TorchRLBackend
from kit.envs.backends.torchrl_layers import base_env_of, frame_skip_of
from kit.envs.vector_env import VectorEnv
from kit.steps import StepLedger, StepPlan
from kit.trainer.batches import acts_at_random
from kit.trainer.checkpoint import normalizer_of, saved_in
from kit.trainer.checks import Refusal


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


def stores_raw(plan: StepPlan, buffer: Any, advantage: Any) -> bool:
    """Whether a buffer stores raw batches and normalises the minibatches that it draws.

    Advantages are estimated on collected batches, which must be normalised by then.
    """
    replays = isinstance(buffer, (ReplayBatches, SequenceReplay))
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
