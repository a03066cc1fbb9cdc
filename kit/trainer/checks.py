"""Parts of a trainer that contradict each other or the plan, found before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl.envs import TransformedEnv
from torchrl.trainers import OptimizationStepper

from kit.buffers import RolloutBatches
from kit.hooks.annealing import Anneal
from kit.steps import SettingError, StepPlan
from kit.trainer.stages import Stages
from kit.update import Update


def check_hooks_argument(hooks: Any) -> list[Any]:
    """The hooks as a list.

    Raises:
        SettingError: if one hook is given in place of a list of them.
    """
    if callable(getattr(hooks, "register", None)) or isinstance(hooks, (str, dict)):
        name = type(hooks).__name__
        raise SettingError("hooks", hooks, "is not a list of hooks", f"hooks=[{name}(...)]")
    return list(hooks)


def check_learning_rates(modules: Mapping[str, Any]) -> None:
    """Refuse a scheduler of PyTorch whose learning rates another hook sets.

    Args:
        modules: registered hooks by name.

    Raises:
        SettingError: if there is one.
    """
    for hook in modules.values():
        optimizer = getattr(getattr(hook, "scheduler", None), "optimizer", None)
        if optimizer is None:
            continue
        for name, other in modules.items():
            if isinstance(other, Anneal) and other.sets(optimizer, "lr"):
                raise SettingError(
                    "hook",
                    type(hook).__name__,
                    f"sets the learning rate that {name} sets too",
                    "leave one of the two out; recipes leave theirs out with anneal=constant",
                )


# ---------------------------------------------------------------------- collection
def check_collection(plan: StepPlan, collector: Any, buffer: Any, advantage: Any) -> None:
    """Refuse a collector or an environment that does not make the batches of the plan.

    Raises:
        SettingError: at the first difference.
    """
    if plan.world_size > 1:
        raise SettingError(
            "world_size",
            plan.world_size,
            "processes train together in the plan, and this is one process",
            [1],
        )
    if plan.offline:
        _check_offline(collector, buffer, advantage)
    elif collector is None:
        raise SettingError(
            "collector",
            None,
            "leaves the policy steps of the plan undone",
            "give a collector, or a plan with steps_per_env=0 (offline)",
        )
    else:
        _check_environment(plan, collector)


def _check_offline(collector: Any, buffer: Any, advantage: Any) -> None:
    if collector is not None:
        raise SettingError(
            "collector",
            type(collector).__name__,
            "never runs: the plan collects nothing (steps_per_env=0)",
            [None],
        )
    if isinstance(buffer, RolloutBatches):
        raise SettingError(
            "buffer", None, "holds nothing to train on offline", "give a filled replay buffer"
        )
    if advantage is not None:
        raise SettingError(
            "advantage",
            type(advantage).__name__,
            "is estimated on collected batches, and the plan collects nothing (steps_per_env=0)",
            [None],
        )


def _check_environment(plan: StepPlan, collector: Any) -> None:
    env = getattr(collector, "env", None)
    base: Any = env.base_env if isinstance(env, TransformedEnv) else env
    made = getattr(getattr(base, "make_again", None), "keywords", {})  # arguments of make_env
    frames = getattr(collector, "requested_frames_per_batch", None)
    found = {
        "num_envs": getattr(collector, "num_envs", getattr(base, "num_envs", None)),
        "action_repeat": made.get("action_repeat"),
    }
    if plan.max_episode_steps is not None and made:
        found["max_episode_steps"] = made.get("max_episode_steps") or "the registered one"
    for field, value in found.items():
        planned = getattr(plan, field)
        if value is not None and value != planned:
            raise SettingError(
                f"env.{field}",
                value,
                f"of the collector contradicts the plan's {field}={planned}",
                [planned],
                "or change the plan",
            )
    steps = plan.is_exact and not plan.collects_episodes
    if steps and isinstance(frames, int) and frames > 0 and frames != plan.frames_per_batch:
        raise SettingError(
            "collector",
            frames,
            "policy steps in a batch are not those of the plan",
            [plan.frames_per_batch],
        )


# ---------------------------------------------------------------------- evaluation
def check_evaluation(plan: StepPlan, evaluate: Any) -> None:
    """Refuse an evaluator that leaves the plan's evaluations undone.

    Raises:
        SettingError: if there is none, or it plays another number of episodes.
    """
    evaluations = plan.evaluation_every or plan.evaluation_every_iterations
    evaluations = evaluations or plan.initial_evaluations or plan.final_evaluation
    if evaluate is None and evaluations:
        raise SettingError(
            "evaluate",
            None,
            "leaves the evaluations of the plan undone",
            "give an Evaluator, or a plan with evaluation_every=None and final_evaluation=False",
        )
    if evaluate is not None and evaluate.episodes != plan.evaluation_episodes:
        raise SettingError(
            "evaluate",
            evaluate.episodes,
            "episodes are not those of the plan",
            [plan.evaluation_episodes],
        )


# ---------------------------------------------------------------------- gradient steps
def check_updates(
    plan: StepPlan, *, update: Any, loss_module: Any, advantage: Any, stages: Stages
) -> None:
    """Refuse gradient steps that are never made, or whose loss lacks its input.

    Raises:
        SettingError: at the first contradiction.
    """
    if not plan.trains:
        return
    if update is None and loss_module is None:
        raise SettingError(
            "update",
            None,
            "leaves the plan's gradient steps undone",
            "give an Update, or a loss_module and a hook at stage 'optimizer'",
        )
    keys = getattr(loss_module, "tensor_keys", None)
    # Losses of action values name an advantage too, for estimators, and do not read it.
    reads = hasattr(keys, "advantage") and not hasattr(keys, "action_value")
    adds = ("batch_process", "pre_epoch", "process_optim_batch")
    if reads and advantage is None and not any(stages[stage] for stage in adds):
        raise SettingError(
            "advantage",
            None,
            f"leaves {type(loss_module).__name__} without advantages, which it would estimate from "
            "shuffled minibatches",
            "give advantage=GAE(...) or another estimator",
        )
    if advantage is not None and not plan.on_policy:
        _check_rollouts(plan)


def _check_rollouts(plan: StepPlan) -> None:
    """Refuse rules of replay buffers where batches with advantages are trained on."""
    if plan.replay_ratio is not None:
        raise SettingError(
            "replay_ratio",
            str(plan.replay_ratio),
            "counts samples of a replay buffer, and advantages belong to the last batch",
            [None],
            "give update_epochs, as OnPolicySteps does",
        )
    size = plan.minibatch_size
    if plan.is_exact and size is not None and size > plan.frames_per_batch:
        raise SettingError(
            "minibatch_size",
            size,
            f"is larger than the {plan.frames_per_batch} policy steps of one batch, whose "
            "advantages it needs",
            [plan.frames_per_batch],
        )


def check_hooks(plan: StepPlan, *, update: Any, buffer: Any, stages: Stages) -> None:
    """Refuse, when a run begins, what the hooks registered until then leave undone.

    Raises:
        SettingError: if gradient steps are never made or samples never held, or if a stepper of
            TorchRL makes the gradient steps, which calls no hook between loss and optimiser.
    """
    if not plan.trains:
        return
    if update is None and not stages["optimizer"]:
        raise SettingError(
            "update",
            None,
            "leaves the plan's gradient steps undone",
            "give an Update, or register a hook at stage 'optimizer'",
        )
    rollouts = isinstance(buffer, RolloutBatches)
    if plan.replay_ratio is not None and rollouts and not stages["process_optim_batch"]:
        raise SettingError(
            "buffer",
            None,
            f"keeps the last batch only, where replay_ratio={plan.replay_ratio} counts samples of "
            "a replay buffer",
            "give make_replay_buffer(...) or a TorchRL replay buffer",
        )
    if not isinstance(update, OptimizationStepper) or isinstance(update, Update):
        return
    for stage in ("process_loss", "optimizer"):
        for operation in stages[stage]:
            raise SettingError(
                "stage",
                stage,
                f"never runs, so {operation.name} never would: {type(update).__name__} goes from "
                "loss to optimiser by itself",
                "use kit.update.Update, or leave out the stepper",
            )
