"""Settings that contradict the plan, the environment, the loss or the machine.

Each function refuses one composition by a :class:`~kit.steps.SettingError`, before anything is
computed.
"""

from __future__ import annotations

import bisect
import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictParams
from torch import nn
from torch.nn.parameter import is_lazy
from torchrl import objectives
from torchrl.collectors import BaseCollector

from kit.config.memory import (
    buffer_need,
    check_memory,
    memory_of_machine,
    rollout_need,
    room_of_disk,
)
from kit.config.parts import Replacements, accepts
from kit.config.settings import ActorCriticConfig, EnvConfig, OfflineConfig, ReplayConfig, RunConfig
from kit.steps import SettingError, StepPlan
from kit.steps.errors import nearest_first, place_of, show
from kit.steps.given import given_fields
from kit.steps.table import plural

Actions = Literal["continuous", "discrete"]


# ---------------------------------------------------------------------- the plan
def family(plan: StepPlan, family: str | None) -> None:
    """Refuse a plan of another family than the recipe's."""
    if family == "on_policy" and plan.replay_ratio is not None:
        why = "is a setting of off-policy algorithms, and this recipe is on-policy"
        raise SettingError("replay_ratio", plan.replay_ratio, why, "use update_epochs")
    if family == "off_policy" and plan.update_epochs is not None:
        why = "is a setting of on-policy algorithms, and this recipe is off-policy"
        raise SettingError("update_epochs", plan.update_epochs, why, "use replay_ratio")
    if family == "offline" and not plan.offline:
        why = "collects policy steps, and this recipe learns from a data set alone"
        raise SettingError("steps_per_env", plan.steps_per_env, why, [0])


def limits(plan: StepPlan, cfg: Any) -> None:
    """Refuse settings of the environment that those of another library contradict."""
    for field in ("num_envs", "action_repeat", "max_episode_steps"):
        ours, theirs = getattr(cfg.env, field), getattr(plan, field)
        defaults = {getattr(env, field) for env in (EnvConfig(), type(cfg)().env)}
        # A library that repeats no actions has no word for it; the number of envs it always says.
        silent = field != "num_envs" and theirs in defaults
        told = ours not in defaults or field in given_fields(cfg.env)
        if told and ours != theirs and not silent:
            why = f"contradicts the {theirs} of steps"
            raise SettingError(f"env.{field}", ours, why, "leave one of them out")


def learning(plan: StepPlan, cfg: Any) -> None:
    """Refuse a run that ends before it learns, or learns before a transition is complete."""
    starts, total = plan.learning_starts, plan.total_policy_steps
    given = getattr(cfg.steps, "learning_starts", ...)  # the word of another library, if any
    name = "learning_starts" if given is ... else "steps.learning_starts"
    works = "train earlier, or longer"
    if plan.trains and starts and total is not None and starts > total:
        why = f"is beyond the {total} policy steps of the run, which would train nothing"
        raise SettingError(name, starts if given in (None, ...) else given, why, works)
    if plan.trains and plan.prefill_steps and plan.iterations == 0:
        why = f"are all {total} policy steps of the run, which would train nothing"
        word = "num_normalization_steps"
        word = f"steps.{word}" if hasattr(cfg.steps, word) else "prefill_steps"
        raise SettingError(word, plan.prefill_steps, why, works)
    if plan.trains and starts and plan.is_exact and starts == total and plan.iterations > 1:
        steps = plural(plan.gradient_steps_after(plan.iterations), "gradient step")
        text = f"{name}={starts} is the length of the run, which makes {steps}, all at its end"
        warnings.warn(text, stacklevel=2)
    if not (isinstance(cfg, ReplayConfig) and plan.is_exact and plan.trains) or plan.offline:
        return
    n_step, length = getattr(cfg, "n_step", 1), plan.sequence_length or 1
    field, value = ("n_step", n_step) if n_step > 1 else ("steps.sequence_length", length)
    needed, envs = value + (field == "n_step"), plan.num_envs * plan.world_size
    if needed == 1:
        return
    # Far iterations are not asked for: rules of floats are followed from the first one on.
    every = range(plan.iterations + 1)
    too_early = every[: bisect.bisect_left(every, needed * envs, key=plan.policy_steps_after)]
    first = bisect.bisect_left(too_early, 1, key=plan.gradient_steps_after)
    if first in too_early:
        have = plan.policy_steps_after(first) // envs
        why = f"needs {needed} policy steps of each environment, and training starts after {have}"
        # The words of another library may have another one for it.
        has_field = hasattr(cfg.steps, "learning_starts")
        hint = f"or steps.learning_starts={needed * envs}" if has_field else "or train later"
        raise SettingError(field, value, why, [max(have - needed + value, 1)], hint)


def stop(plan: StepPlan, cfg: RunConfig) -> None:
    """Refuse a return to stop at where nothing is evaluated before the end of the run."""
    evaluates = plan.evaluation_every or plan.evaluation_every_iterations
    if cfg.stop_at_return is not None and not evaluates:
        why = "has no effect: nothing is evaluated before the end of the run"
        works = "use steps.evaluation_every, or another library's word for it"
        raise SettingError("stop_at_return", cfg.stop_at_return, why, works)


def imagination(plan: StepPlan, cfg: Any) -> None:
    """Refuse more starts of imagination than sequences have time steps, but for the default."""
    length, starts = plan.sequence_length, getattr(cfg, "imagination_starts", None)
    if length and starts and starts > max(length, type(cfg)().imagination_starts or 0):
        why = f"is more than the {length} time steps of a sequence"
        raise SettingError("imagination_starts", starts, why, [length, None])


# ---------------------------------------------------------------------- the machine
def default_type() -> None:
    """Refuse networks of another type than observations and rewards, which are float32."""
    if (given := torch.get_default_dtype()) is not torch.float32:
        why = "would be the type of networks, and observations and rewards are float32"
        raise SettingError("default dtype", given, why, "torch.set_default_dtype(torch.float32)")


def memory(plan: StepPlan, cfg: RunConfig, env: Any, latent: int = 0) -> None:
    """Refuse a replay buffer or a rollout that the machine, its device or a disk has no room for.

    Of each record a replay buffer keeps ``latent`` bytes more for a world model.
    """
    seen, acted = (
        sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
        for leaves in (env.observation_leaves, env.action_leaves)
    )
    rest = acted + 4 + 3 + 16  # reward, three flags, number of the episode, place in the buffer
    needs = [rollout_need(plan, 2 * seen + rest)]
    if hasattr(cfg, "buffer_size"):
        frames = getattr(cfg, "stacked_frames", 1)
        both = getattr(cfg, "store_next_observation", True) and frames == 1
        buffer = buffer_need(cfg, rest + latent + (2 * seen if both else seen // frames))
        if (folder := getattr(cfg, "buffer_folder", None)) is not None:
            check_memory([buffer], *room_of_disk(folder))
        elif both and torch.device(cfg.device).type == "cuda":
            available = torch.cuda.mem_get_info(cfg.device)[1]
            check_memory([buffer], available, f"memory of {cfg.device}")
        else:
            needs.append(buffer)
    check_memory(needs, *memory_of_machine())


@contextlib.contextmanager
def usable_folder(runs: str | None) -> Iterator[None]:
    """Refuse a name of a folder that is empty, or that the system does not take."""
    if runs == "":
        raise SettingError("runs", runs, "is no name of a folder", ["runs", ".", None])
    try:
        yield
    except OSError as error:
        raise SettingError("runs", runs, f"cannot be used: {error.strerror}", ["runs"]) from None


def unused(cfg: RunConfig, names: Sequence[str], why: str) -> None:
    """Refuse settings that have no effect beside others, if they are not at their defaults."""
    for name in names:
        value, default = getattr(cfg, name), getattr(type(cfg)(), name)
        if value != default:
            raise SettingError(name, value, f"has no effect: {why}", [default])


def rows_of_normalization(cfg: RunConfig) -> None:
    """Refuse rows over which advantages are normalised where they are not."""
    if isinstance(cfg, ActorCriticConfig) and not cfg.normalize_advantage:
        unused(cfg, ("normalize_over",), "normalize_advantage=false")


def deviation(cfg: RunConfig, env: Any) -> None:
    """Refuse settings of continuous actions where all actions are choices."""
    if isinstance(cfg, ActorCriticConfig) and all(x.dtype.kind != "f" for x in env.action_leaves):
        names = [name for name in ("initial_log_std", "squash_actions") if hasattr(cfg, name)]
        unused(cfg, names, f"{env.name} has no continuous actions")
    if getattr(cfg, "squash_actions", False):
        why = "squash_actions=true learns a standard deviation for each state"
        unused(cfg, ["initial_log_std"], why)


# ---------------------------------------------------------------------- the environment
def env_arguments(cfg: RunConfig, settings: Mapping[str, Any]) -> None:
    """Refuse arguments of the environment that are settings, or change nothing offline."""
    for name in ("normalize_observation", "normalize_reward"):
        if isinstance(cfg, OfflineConfig) and getattr(cfg.env, name):
            why = "changes collected batches alone, and this recipe collects none"
            works = "leave it out; normalize_data=true normalises observations"
            raise SettingError(f"env.{name}", True, why, works)
    steps = settings.get("normalization_steps")
    if steps and not cfg.env.normalize_observation:
        why, works = "make statistics that nothing uses", "or use env.normalize_observation=true"
        raise SettingError("steps.num_normalization_steps", steps, why, [0], works)
    kwargs = cfg.env.kwargs
    for name in {*settings, "device"} & set(kwargs):
        ours = f"env.{name}" if hasattr(cfg.env, name) else name
        works = f"use {ours}={show(kwargs[name])}"
        raise SettingError(f"env.kwargs.{name}", kwargs[name], f"is {ours} of the kit", works)


@contextlib.contextmanager
def named_as_in(cfg: RunConfig) -> Iterator[None]:
    """Name the setting of an offline recipe in errors of the argument that it becomes."""
    try:
        yield
    except SettingError as error:
        if error.field != "env.normalize_observation" or not isinstance(cfg, OfflineConfig):
            raise
        raise SettingError("normalize_data", error.value, error.why, error.works) from None


def stacked_frames(cfg: RunConfig, env: Any) -> None:
    """Refuse a number of frames that observations are no stacks of."""
    frames = getattr(cfg, "stacked_frames", 1)
    for leaf in env.observation_leaves if frames > 1 else ():
        stacked = leaf.shape[0] if len(leaf.shape) > 1 else 1
        if stacked != frames:
            key = leaf.key if isinstance(leaf.key, str) else ".".join(leaf.key)
            why = f"are not in {key} of shape {leaf.shape}"
            raise SettingError("stacked_frames", frames, why, [stacked])


def actions(env: Any, wanted: Actions | None, algorithm: str) -> None:
    """Refuse an environment whose actions are not one array of real numbers, or one choice."""
    leaves, continuous = env.action_leaves, wanted == "continuous"
    kinds = [leaf.dtype.kind for leaf in leaves]
    one = len(leaves) == 1 and (continuous or leaves[0].shape == ())
    if wanted is None or (one and kinds[0] in ("f" if continuous else "iu")):
        return
    others = "recipes.ppo"
    if len(kinds) == 1 and kinds[0] in "fiu" and continuous != (kinds[0] == "f"):
        others = "recipes.dqn or recipes.ppo" if continuous else "recipes.sac or td3"
    spaces = ", ".join(str(leaf.dtype if leaf.space is None else leaf.space) for leaf in leaves)
    why = f"has actions that are not {wanted} ({spaces}), and {algorithm} chooses only such"
    works = f"an environment with a {'Box' if continuous else 'Discrete'} action space"
    if any(isinstance(leaf.space, gym.spaces.Box) and leaf.dtype.kind != "f" for leaf in leaves):
        works = f"use {works} of real numbers" if continuous else f"use {works}"
    else:
        works = f"use {others}, or {works}"
    raise SettingError("env.id", env.name, why, works)


def dataset(env: Any, rows: Any, names: Sequence[str]) -> None:
    """Refuse ``rows`` ``[transitions]`` of data sets with other observations or actions."""
    leaves = {"observation": env.observation_leaves, "action": env.action_leaves}
    for key, (leaf, *more) in leaves.items():
        parts = (rows, rows["next"]) if key == "observation" else (rows,)
        for found, wanted in _differences([part[key] for part in parts], leaf, bool(more)):
            why = f"holds {key}s {found}, and those of {env.name} {wanted}"
            raise SettingError("dataset", [*names], why, "give the environment that was recorded")
    action, space = rows["action"], env.action_leaves[0].space
    if isinstance(space, gym.spaces.Box):
        most, least = (end(0).double().numpy() for end in (action.amax, action.amin))
        low, high = (bound.astype(np.float64) for bound in (space.low, space.high))
        beyond = (most - high).max(), (low - least).max()
        if max(beyond) > 1e-3 * (high - low).min():  # less than that is rounding
            why = f"holds actions {max(beyond):.3g} beyond the bounds of those of {env.name}"
            works = (
                "give the environment that was recorded, or store the actions as it clipped them"
            )
            raise SettingError("dataset", [*names], why, works)


def _differences(parts: Sequence[Any], leaf: Any, several: bool) -> Iterator[tuple[str, str]]:
    """Yield what a data set has, and what the environment has in its place."""
    shape = tuple(parts[0].shape[1:])
    if several or leaf.path or leaf.shape != shape:
        named = several or leaf.path
        yield f"of shape {shape}", "have names" if named else f"have shape {leaf.shape}"
    dtype = np.dtype(str(parts[0].dtype).removeprefix("torch."))
    if _kind(dtype, leaf) != _kind(leaf.dtype, leaf):
        yield f"of type {dtype}", f"have type {leaf.dtype}"
    choices = _choices(leaf)
    if choices is None:
        return
    low = np.zeros(leaf.shape, np.int64) if leaf.start is None else leaf.start
    high = low + choices - 1
    for values in parts:
        least, most = values.amin(0).numpy(), values.amax(0).numpy()
        if (least < low).any() or (most > high).any():
            yield f"{least.tolist()} to {most.tolist()}", f"are {low.tolist()} to {high.tolist()}"


def _kind(dtype: np.dtype[Any], leaf: Any) -> str:
    """Real numbers, whole ones, or the bytes of pictures; a choice may be kept in a byte."""
    if dtype == np.uint8 and _choices(leaf) is None:
        return "bytes"
    return "real" if dtype.kind == "f" else "whole"


def _choices(leaf: Any) -> Any:
    """How many values each number of a space of choices has; ``None``: it is no such space."""
    if isinstance(leaf.space, gym.spaces.MultiBinary):
        return 2
    return getattr(leaf.space, "n", getattr(leaf.space, "nvec", None))


# ---------------------------------------------------------------------- the loss
_CONTINUOUS = {"SACLoss": "DiscreteSACLoss", "DDPGLoss": "DQNLoss", "TD3Loss": "DQNLoss"}
"""Losses of continuous actions, and their counterparts for discrete ones."""
_DISCRETE = {f"Discrete{name}": name for name in ("SACLoss", "IQLLoss", "CQLLoss")}
"""Losses of discrete actions, and their counterparts for continuous ones."""


def loss_class(given: Any, make: Callable[..., Any]) -> None:
    """Refuse a name of something else than a class of loss modules."""
    if isinstance(given, nn.Module):
        why = "is a loss that was made already, and the recipe makes its own"
        works = "give its class, or a function of the networks that returns it"
        raise SettingError("make_loss", type(given).__name__, why, works)
    if isinstance(given, str) and not (isinstance(make, type) and issubclass(make, nn.Module)):
        works = "use a loss of torchrl.objectives, or module:Class of your own"
        raise SettingError("loss", given, "is no class of loss modules", works)


def loss_of_actions(make: Callable[..., Any], networks: Sequence[Any]) -> None:
    """Refuse an actor of discrete actions in a loss of continuous ones, and the other way round."""
    name, spec = loss_name(make), getattr(networks[0], "spec", None) if networks else None
    works, is_discrete = {**_CONTINUOUS, **_DISCRETE}.get(name), name in _DISCRETE
    if spec is None or works is None:
        return
    for key in spec.keys(True, True):
        if spec[key] is not None and spec[key].dtype.is_floating_point == is_discrete:
            kind, given = "discrete" if is_discrete else "continuous", type(spec[key]).__name__
            why = f"is for {kind} actions, and the actor's are {given}"
            raise SettingError("loss", name, why, [works])


def one_action_loss(make: Callable[..., Any], networks: Sequence[Any]) -> None:
    """Refuse an actor of several actions in losses of TorchRL's that fail with it."""
    keys = getattr(networks[0], "dist_sample_keys", ()) if networks else ()
    of_one = (objectives.A2CLoss, objectives.ReinforceLoss)
    if len(keys) > 1 and isinstance(make, type) and issubclass(make, of_one):
        why = f"is for one action, and the environment has several: {[*keys]}"
        works = "use recipes.ppo and its losses, or an environment whose action is one array"
        raise SettingError("loss", loss_name(make), why, works)


_OF_SQUARES = (
    "DQNLoss", "DDPGLoss", "TD3Loss", "TD3BCLoss", "REDQLoss", "IQLLoss", "DiscreteIQLLoss",
    "CQLLoss", "DiscreteCQLLoss",
)  # fmt: skip
"""Losses of TorchRL that write the squares of errors."""


def writes_squares(loss: nn.Module) -> bool:
    """Whether the ``td_error`` of a loss, from which priorities come, is the error's square."""
    known = (k for k in type(loss).__mro__ if k.__module__.startswith(("torchrl.", "kit.")))
    writes: type = next(known, object)  # it is the one that has written it
    return writes.__module__.startswith("torchrl.") and writes.__name__ in _OF_SQUARES


def loss_name(make: Callable[..., Any]) -> str:
    """The name of a class or function in messages."""
    return str(getattr(make, "__name__", type(make).__name__))


def taken_arguments(
    make: Callable[..., Any], arguments: Mapping[str, Any], cfg: RunConfig, algorithm: str
) -> dict[str, Any]:
    """The arguments that a loss takes; others are left out at their default, else refused.

    A loss of TorchRL that cannot leave out its critic is refused where none learns with the policy.
    """
    defaults = type(cfg)()
    name, own = loss_name(make), getattr(defaults, "loss", "the recipe's")
    untaken = [argument for argument in arguments if not accepts(make, argument)]
    for argument in untaken:
        if not hasattr(defaults, argument):
            why = f"is no loss that {algorithm} can use: it takes no {argument}"
            raise SettingError("loss", name, why, [own])
        alone = argument == "critic_coeff" and not arguments[argument]
        if alone and make.__module__.startswith("torchrl."):
            why = "takes no critic_coeff, by which the critic would be left out of it here"
            raise SettingError("loss", name, why, [own])
        given = getattr(cfg, argument)  # its argument may be in another unit
        if given != getattr(defaults, argument):
            works = f"leave it out, or use a loss that takes it: {own}"
            raise SettingError(argument, given, f"is no argument of {name}", works)
    return {key: value for key, value in arguments.items() if key not in untaken}


def networks_of(make: Callable[..., Any], own: str, count: int) -> None:
    """Refuse a loss of TorchRL that takes other networks than the recipe's own, another of them."""
    known = getattr(objectives, own, None)
    if known is None or not make.__module__.startswith("torchrl."):
        return
    if make.__module__.startswith("torchrl.objectives.multiagent."):
        why = "is a loss of several agents, and this recipe has one"
        raise SettingError("loss", loss_name(make), why, [own])
    ours, theirs = ([*inspect.signature(cls).parameters][:count] for cls in (known, make))
    if "args" not in (ours[0], theirs[0]) and ours != theirs:
        why = f"is a loss of {' and '.join(theirs)}, and this recipe has {' and '.join(ours)}"
        raise SettingError("loss", loss_name(make), why, [own])


def temperature(loss: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse a temperature beyond the bounds that a loss of TorchRL keeps it in."""
    initial = given.get("alpha_init")
    bounds: list[Any] = [getattr(loss, f"{end}_log_alpha", None) for end in ("min", "max")]
    if initial is None or None in bounds:
        return
    low, high = (round(math.exp(bound), 6) for bound in bounds)
    if not low <= initial <= high:
        why = f"is outside of {low:g} to {high:g}, in which {type(loss).__name__} keeps it"
        raise SettingError("initial_alpha", initial, why, [low if initial < low else high])


def target_networks(loss: Any, make: Callable[..., Any], own: str, updated: bool) -> None:
    """Refuse a loss without target networks that are updated, and one with some that are not."""
    there = target_networks_of(loss)
    known = make.__module__.startswith(("torchrl.", "kit."))
    if updated and not there:
        why = "has no target networks, which this recipe updates"
        how = "convert_to_functional(..., create_target_params=True) of a LossModule makes them"
        raise SettingError("loss", loss_name(make), why, [own] if known else how)
    if there and not updated and known:  # others may by themselves
        why = "has target networks, which this recipe does not update"
        raise SettingError("loss", loss_name(make), why, [own])


def target_networks_of(loss: nn.Module) -> list[str]:
    """Names of the target networks of a loss, which are found as TorchRL's ``SoftUpdate`` does."""
    names = [name for name, _ in loss.named_children()]
    return [name for name in names if name.startswith("target_") and name.endswith("_params")]


def shared_weights(
    loss: nn.Module, make: Callable[..., Any], networks: Sequence[nn.Module]
) -> None:
    """Refuse a loss that gives critics copies of the weights that they share with the actor.

    TorchRL's do, of several critics, unless they are told to have separate losses.
    """
    held = [
        {one.data_ptr() for one in part.values(True, True) if not is_lazy(one)}
        for name, part in loss.named_children()
        if isinstance(part, TensorDictParams) and not name.startswith("target_")
    ]
    given = [
        {one.data_ptr() for one in network.parameters() if not is_lazy(one)} for network in networks
    ]
    shared = set.intersection(*given) if len(given) == len(held) == 2 else set()
    if any(sum(one in part for part in held) == 1 for one in shared):
        why = "gives critics copies of the weights that they share with the actor: none is shared"
        works = "give it separate_losses=True, which trains them by the loss of the actor alone"
        hint = "or take another network for the critics, or a LossModule of your own"
        raise SettingError("make_loss", loss_name(make), why, works, hint)


@contextlib.contextmanager
def fitting_loss(name: str, own: str) -> Iterator[None]:
    """Refuse a loss that raises where a batch of the recipe is given to it."""
    try:
        yield
    except SettingError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}{place_of(error)}"
        raise SettingError("loss", name, f"does not fit this recipe: {reason}", [own]) from error


def n_step_loss(loss: nn.Module, batch: TensorDictBase, cfg: Any) -> None:
    """Refuse a loss to which it makes no difference how many steps a transition joins."""
    batch = batch.set("steps_to_next_obs", torch.full(batch.shape, torch.nan, device=batch.device))
    try:
        found = [value for name, value in loss(batch).items() if str(name).startswith("loss")]
    except Exception:  # it may not take what is not a number, or not this batch
        return
    if found and all(bool(value.isfinite().all()) for value in found):
        why = f"joins steps, and {type(loss).__name__} does not read how many: steps_to_next_obs"
        works = "discount by gamma ** steps_to_next_obs, as TorchRL's value estimators do, or use 1"
        raise SettingError("n_step", cfg.n_step, why, works)


@contextlib.contextmanager
def tried(*modules: object) -> Iterator[None]:
    """Leave random numbers and the modules' buffers (running moments, say) as they were.

    A module may have put another tensor in the place of one.
    """
    given = [module for module in modules if isinstance(module, nn.Module)]
    before = [(buffer, buffer.clone()) for module in given for buffer in module.buffers()]
    places = [(one._buffers, {**one._buffers}) for module in given for one in module.modules()]
    with torch.random.fork_rng(), torch.no_grad():
        yield
        for buffers, kept in places:
            buffers.update(kept)
        for buffer, value in before:
            buffer.copy_(value)


# ---------------------------------------------------------------------- parts and the collector
REPLACED = ("make_actor", "make_critic", "optimizer")
"""Parts that a recipe asks for while it makes networks and optimizers."""
PARTS = (
    "collector", "update", "buffer", "advantage", "evaluate", "exploration_policy", "hooks",
    "logger", "loss_module", *REPLACED,
)  # fmt: skip
"""Parts that the caller of a recipe's ``build`` may give."""


def parts(given: Mapping[str, Any]) -> None:
    """Refuse parts that no trainer has."""
    for name, part in given.items():
        if name == "loss":
            works = "use make_loss=... for a class or function, or Config(loss=...) for a name"
            raise SettingError(name, part, "is no part of a trainer", works)
        if name not in PARTS:
            near = nearest_first(name, PARTS)[:3]
            raise SettingError(name, part, "is no part of a trainer", near)


def replaced(cfg: RunConfig, parts: Replacements, algorithm: str) -> None:
    """Reject parts that the recipe does not use, and settings that replaced parts ignore."""
    asked, update = {*parts.asked}, parts.given.get("update", ...)
    if update is not ... and not hasattr(update, "optimizers"):
        asked |= {"loss_module", "optimizer"}  # TorchRL's steppers find both in the trainer
    for name in ("loss_module", *REPLACED):
        if name in parts.given and name not in asked:
            works: Any = [one for one in REPLACED if one in asked and one not in parts.given]
            works = "pass make_loss=..., a class or a function" if name == "loss_module" else works
            why = f"replaces nothing in {algorithm}" + ", given update" * (update is not ...)
            raise SettingError(name, loss_name(parts.given[name]), why, works)
    for name, part in parts.without_effect.items():
        if hasattr(cfg, name):
            unused(cfg, (name,), f"{part} replaces the part that it changes")


def update(cfg: RunConfig, made: Any) -> None:
    """Refuse settings that the update of a recipe, or its loss, was not made with."""
    own, loss = getattr(made, "compile", cfg.compile), getattr(made, "loss_module", None)
    if cfg.compile != "auto" and own != cfg.compile:
        why = f"is not that of the recipe's update, {own}"
        raise SettingError("compile", cfg.compile, why, "give Update(..., compile=cfg.compile)")
    if cfg.precision != "float32" and loss is not None and "forward" not in vars(loss):
        why = f"is not that of the recipe's loss, {type(loss).__name__}"
        works = "make it by experiment.make_loss(...)"
        raise SettingError("precision", cfg.precision, why, works)


def listed(name: str, given: Any) -> list[Any]:
    """The entries of a part that is a list; anything else is refused."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise SettingError(name, given, "is not a list", f"use {name}=[...]")
    return list(given)


def collector(plan: StepPlan, wanted: Any, kwargs: Mapping[str, Any], taken: set[str]) -> None:
    """Refuse a collector of an offline run, and arguments of one that are settings."""
    if plan.offline and kwargs:
        why = "are arguments of a collector, and nothing is collected (offline)"
        raise SettingError("collector_kwargs", kwargs, why, "leave them out")
    if plan.offline and not (wanted is None or isinstance(wanted, BaseCollector)):
        raise SettingError("collector", wanted, "has no steps to collect (offline)", [None])
    others = {"collector", "env", "policy", "plan", "rank", "storing_device"}
    for name in (others | taken) & set(kwargs):
        why = "follows from other settings"
        raise SettingError(f"collector_kwargs.{name}", kwargs[name], why, "leave it out")


@contextlib.contextmanager
def collector_arguments(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Refuse arguments that the collector does not take."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, SettingError) or not kwargs:
            raise
        why = f"are refused by the collector: {error}"
        raise SettingError("collector_kwargs", dict(kwargs), why) from error
