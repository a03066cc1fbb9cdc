"""Everything of an experiment that is not the algorithm."""

from __future__ import annotations

import bisect
import contextlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torchrl import objectives
from torchrl.collectors import BaseCollector

from kit.buffers import ReplayBatches, make_replay_buffer
from kit.buffers.datasets import StoredBatches, read_datasets
from kit.cli.launch import main
from kit.cli.recipe import Recipe
from kit.cli.run_folder import RunFolder
from kit.collectors import make_collector
from kit.collectors.actor import Policy
from kit.config import (
    EnvConfig,
    OfflineConfig,
    OffPolicyConfig,
    OnPolicyConfig,
    ReplayConfig,
    RunConfig,
)
from kit.config.memory import check_memory, memory_of_machine, needs_of
from kit.config.parts import accepts, resolve
from kit.config.plain import check
from kit.dialects import as_plan
from kit.dialects.carried import take
from kit.envs import VectorEnv, make_env
from kit.envs.normalize import Statistics
from kit.hooks import Evaluator, LearningCurve, StopWhen, TimeLimit
from kit.logging.loggers import RowLogger, make_loggers
from kit.modules.shared_body import with_shared_body
from kit.steps import SettingError, StepPlan
from kit.steps.errors import nearest_first, show
from kit.steps.settings import OfflineSteps, OffPolicySteps, OnPolicySteps
from kit.trainer import Trainer
from kit.trainer.process import OwnNumbers

__all__ = [
    "EnvConfig", "Experiment", "OffPolicyConfig", "OffPolicySteps", "OfflineConfig", "OfflineSteps",
    "OnPolicyConfig", "OnPolicySteps", "main",
]  # fmt: skip

EVALUATED_AT_ONCE = 32
"""Environments of an evaluation, at most, where fewer train; they play its episodes in turns."""

AnyConfig = OnPolicyConfig | ReplayConfig | OfflineConfig
Actions = Literal["continuous", "discrete"]
Parts = Mapping[str, Any]
"""Parts of a trainer by the name of its argument, which replace those of a recipe."""


class Experiment:
    """Owns what surrounds an algorithm: plan, environments, replay buffer, run folder, trainer.

    Made first in a recipe's ``build``: it checks the settings, seeds all random numbers and sets
    PyTorch's threads. Training and evaluation environments share one normaliser, everything that
    discounts one gamma, everything that holds tensors one device.

    Args:
        cfg: settings of the recipe; those that ``cfg.steps`` of another library sets are changed in
            place. With ``runs=None`` nothing is written, as in a notebook.
        algorithm: as other libraries know it, for settings of steps in their words; by default the
            name of the recipe.

    Attributes:
        plan: every count of the run.
        name: of the recipe: that of the module which defines the settings.
        algorithm: as other libraries know it.
        folder: of the run, once its trainer is made; ``None`` if nothing is written.

    Raises:
        SettingError: if a setting is invalid, or contradicts another.
    """

    def __init__(self, cfg: AnyConfig, algorithm: str | None = None) -> None:
        if not isinstance(cfg, RunConfig):
            works = "use the recipe's Config(...)"
            raise SettingError("cfg", cfg, "is not a configuration of a recipe", works)
        recipe = Recipe.of(type(cfg))
        self.name = recipe.name
        self.algorithm = algorithm or self.name
        check(cfg)
        taken = take(cfg.steps, cfg, self.algorithm, cfg.FAMILY)
        check(cfg)
        _check_device(cfg.device)
        self._outside, self._threads = OwnNumbers(), torch.get_num_threads()
        if cfg.threads is not None:
            torch.set_num_threads(cfg.threads)
        seed_everything(cfg.seed)
        self.cfg = cfg
        with _usable_folder(cfg.runs):
            self._run = None if cfg.runs is None else RunFolder(recipe, cfg)
        self.folder: Path | None = None
        self.plan = make_plan(cfg, self.algorithm)
        self._tried: tuple[str, str, nn.Module] | None = None  # a loss that the settings name
        self.plan.remarks.extend(taken)

    # ------------------------------------------------------------------ parts
    def make_env(self, *, actions: Actions | None = None, **changes: Any) -> VectorEnv:
        """Make the training environments.

        Args:
            actions: kind of actions that the algorithm needs; ``None``: any.
            **changes: arguments of :func:`~kit.envs.make_env` that differ from the settings.

        Raises:
            SettingError: if they cannot be made, or have other actions.
        """
        cfg, plan = self.cfg, self.plan
        settings = {
            **vars(cfg.env),
            "num_envs": plan.num_envs,
            "action_repeat": plan.action_repeat,
            "max_episode_steps": plan.max_episode_steps,
            "seed": cfg.seed,
            "gamma": cfg.gamma,
        }
        if isinstance(cfg, OfflineConfig):
            for name in ("normalize_observation", "normalize_reward"):
                if settings[name]:
                    why = "changes collected batches alone, and this recipe collects none"
                    works = "leave it out; normalize_data=true normalises observations"
                    raise SettingError(f"env.{name}", True, why, works)
            settings["normalize_observation"] = cfg.normalize_data
        kwargs = settings.pop("kwargs")
        for name in {*settings, "device"} & set(kwargs):
            ours = f"env.{name}" if name in vars(cfg.env) else name
            works = f"use {ours}={show(kwargs[name])}"
            raise SettingError(f"env.kwargs.{name}", kwargs[name], f"is {ours} of the kit", works)
        env = make_env(**{**settings, **kwargs, **changes})
        _check_memory(cfg, plan, env)
        if actions is not None:
            _check_actions(env, actions, self.algorithm)
        return env

    def make_evaluation_env(self, env: VectorEnv) -> VectorEnv:
        """Make environments to evaluate in: those of ``env``, with its running normalisation.

        There is one for each episode, but no more than train or :data:`EVALUATED_AT_ONCE`.
        """
        if env.make_again is None:
            works = "give the trainer an Evaluator as the part evaluate=..."
            raise SettingError("env", env.name, "cannot be made a second time, to evaluate", works)
        at_once = max(self.plan.num_envs, EVALUATED_AT_ONCE)
        made = env.make_again(num_envs=min(self.plan.evaluation_episodes, at_once), seed=0)
        made.normalizer = env.normalizer
        return made

    def make_loss(
        self, given: str | Callable[..., Any], *networks: nn.Module, **arguments: Any
    ) -> Any:
        """Make the loss module, on the configured device.

        Args:
            given: class or function; or its name, in ``torchrl.objectives`` or as ``module:Class``.
            *networks: actor and critics, in the order of the algorithm's losses. A body that actor
                and critic share runs once: see :class:`~kit.modules.shared_body.SharedBody`.
            **arguments: further arguments. One that the loss does not take may be left out if it is
                a setting of the recipe at its default.

        Raises:
            SettingError: if there is no such loss, or it does not take what the recipe gives it.
        """
        make = resolve(given, "torchrl.objectives")
        if isinstance(given, str) and not (isinstance(make, type) and issubclass(make, nn.Module)):
            works = "use a loss of torchrl.objectives, or module:Class of your own"
            raise SettingError("loss", given, "is no class of loss modules", works)
        name = getattr(make, "__name__", type(make).__name__)
        defaults = type(self.cfg)()
        own = getattr(defaults, "loss", "the recipe's")
        untaken = [argument for argument in arguments if not accepts(make, argument)]
        for argument in untaken:
            if not hasattr(defaults, argument):
                why = f"is no loss that {self.algorithm} can use: it takes no {argument}"
                raise SettingError("loss", name, why, [own])
            if arguments[argument] != getattr(defaults, argument):
                works = f"leave it out, or use a loss that takes it: {own}"
                why = f"is no argument of {name}"
                raise SettingError(argument, arguments[argument], why, works)
        _check_actor(name, networks)
        taken = {key: value for key, value in arguments.items() if key not in untaken}
        mistakable = isinstance(given, str) and given == getattr(self.cfg, "loss", None) != own
        if not mistakable:
            return with_shared_body(make, networks, **taken).to(self.cfg.device)
        _check_networks(make, own, len(networks))
        with _fitting_loss(str(given), own):
            loss = with_shared_body(make, networks, **taken).to(self.cfg.device)
        self._tried = str(given), own, loss
        return loss

    def make_replay_buffer(self, **changes: Any) -> ReplayBatches:
        """Make the replay buffer, with the discount and the device of the settings.

        Args:
            **changes: arguments of :func:`~kit.buffers.make_replay_buffer` that differ.
        """
        cfg, plan = self.cfg, self.plan
        if not isinstance(cfg, OffPolicyConfig):
            works = "derive its Config from OffPolicyConfig"
            raise SettingError("cfg", self.name, "has no settings of a replay buffer", works)
        settings = {
            "size": cfg.buffer_size,
            "minibatch_size": plan.minibatch_size,
            "sequence_length": plan.sequence_length,
            "n_step": cfg.n_step,
            "gamma": cfg.gamma,
            "device": cfg.device,
        }
        return make_replay_buffer(**{**settings, **changes})

    def make_dataset(self, env: VectorEnv) -> StoredBatches:
        """Read the data set of the settings, whose statistics then normalise the environments.

        Args:
            env: environments of the data set.

        Raises:
            SettingError: if it cannot be read, or is of another environment.
        """
        cfg = self.cfg
        if not isinstance(cfg, OfflineConfig):
            works = "derive its Config from OfflineConfig"
            raise SettingError("cfg", self.name, "has no settings of a data set", works)
        rows = read_datasets(cfg.dataset)
        _check_dataset(env, rows)
        if env.normalizer is not None:
            moments, seen = env.normalizer.observation["observation"], rows["observation"].double()
            moments.mean.copy_(seen.mean(0))
            moments.var.copy_(seen.var(0, correction=0))
            moments.count.fill_(len(seen))
            known = Statistics(moments, None, env.normalizer.returns)
            for part in (rows, rows["next"]):
                part.set("observation", env.normalizer.apply(known, part["observation"]))
        return StoredBatches(rows.to(cfg.device), self.plan.minibatch_size)

    # ------------------------------------------------------------------ the whole
    def trainer(
        self, env: VectorEnv, policy: Policy, *, parts: Parts | None = None, **wired: Any
    ) -> Trainer:
        """Make the trainer.

        Args:
            env: training environments.
            policy: what is trained; the collector and the evaluator act with it.
            parts: of the caller of ``build``: they replace the recipe's; ``hooks`` and ``logger``
                are added to them. A ``collector`` may be a name, a class, or a collector.
            **wired: the recipe's parts: ``update``, ``advantage``, ``buffer``, ``hooks``, ...

        Raises:
            SettingError: if parts are unknown or do not fit together.
        """
        given, cfg = dict(parts or {}), self.cfg
        _check_parts(given)
        hooks, theirs = _listed("hooks", wired), _listed("hooks", given)
        if cfg.time_limit is not None:
            hooks.append(TimeLimit(cfg.time_limit))
        if cfg.stop_at_return is not None:
            hooks.append(StopWhen("evaluation/return", reached=cfg.stop_at_return))
        hooks, loggers = [*hooks, *theirs], _listed("logger", given)
        chosen = {**wired, **given}
        self._try_loss(env, policy, chosen)
        chosen["collector"] = self._collector(env, policy, chosen)
        if "evaluate" not in chosen:
            there: dict[str, Any] = {"seed": cfg.seed, "device": cfg.device}
            episodes = self.plan.evaluation_episodes
            evaluation_env = self.make_evaluation_env(env)
            chosen["evaluate"] = Evaluator(evaluation_env, policy, episodes=episodes, **there)
        around: dict[str, Any] = {
            "log_every": cfg.log_every,
            "checkpoint_every": cfg.checkpoint_every,
            "progress": cfg.progress and f"{self.name} on {cfg.env.id}, seed {cfg.seed}",
        }
        run = self._run
        if run is None:
            around |= {"hooks": hooks, "logger": [*self._loggers(), *loggers]}
            return self._independent(Trainer(self.plan, **{**around, **chosen}))
        with run.taken() as self.folder:
            around |= {
                "hooks": [run, LearningCurve(self.folder), *hooks],
                "logger": [*self._loggers(), *loggers],
                "folder": self.folder,
                "config": run.config,
                "resume_from": run.checkpoint,
            }
            return self._independent(Trainer(self.plan, **{**around, **chosen}))

    def _independent(self, trainer: Trainer) -> Trainer:
        """Leave what was seeded for the build to the trainer; the process goes on as before."""
        trainer.numbers.threads = self.cfg.threads
        self._outside.put_back()
        torch.set_num_threads(self._threads)
        return trainer

    def _try_loss(self, env: VectorEnv, policy: Policy, parts: dict[str, Any]) -> None:
        """Compute a loss that is not the recipe's own once, on a batch of zeros."""
        if self._tried is None:
            return
        name, own, loss = self._tried
        with _fitting_loss(name, own), torch.random.fork_rng(), torch.no_grad():
            batch = policy(env.fake_tensordict().to(self.cfg.device)).unsqueeze(-1)
            batch["is_init"] = torch.ones_like(batch["next", "done"])
            advantage = parts.get("advantage")
            losses = loss(batch if advantage is None else advantage(batch))
            if not any(str(key).startswith("loss") for key in losses.keys()):
                raise KeyError("it returns no entry loss...")

    def _collector(
        self, env: VectorEnv, policy: Policy, parts: dict[str, Any]
    ) -> BaseCollector | None:
        cfg, exploration = self.cfg, parts.pop("exploration_policy", None)
        wanted = parts.pop("collector", None) or cfg.collector
        if self.plan.offline and cfg.collector_kwargs:
            why = "are arguments of a collector, and nothing is collected (offline)"
            raise SettingError("collector_kwargs", cfg.collector_kwargs, why, "leave them out")
        if isinstance(wanted, BaseCollector) or (wanted is None and self.plan.offline):
            return wanted
        if self.plan.offline:
            raise SettingError("collector", wanted, "has no steps to collect (offline)", [None])
        settings = {"seed": cfg.seed, "device": cfg.device, "exploration_policy": exploration}
        wanted = wanted or ("episode" if self.plan.collects_episodes else "vector")
        for name in {*settings, "collector", "env", "policy", "plan", "rank"}:
            if name in cfg.collector_kwargs:
                why, value = "follows from other settings", cfg.collector_kwargs[name]
                raise SettingError(f"collector_kwargs.{name}", value, why, "leave it out")
        try:
            return make_collector(
                wanted, env, policy, self.plan, **settings, **cfg.collector_kwargs
            )
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, SettingError) or not cfg.collector_kwargs:
                raise
            why = f"are refused by the collector: {error}"
            raise SettingError("collector_kwargs", cfg.collector_kwargs, why) from error

    def _loggers(self) -> list[RowLogger]:
        cfg = self.cfg
        if self.folder is not None:
            run_name = f"{self.name} {cfg.env.id} s{cfg.seed}"
            return make_loggers(cfg.logger, self.folder, run_name=run_name)
        if cfg.logger not in ("csv", "none"):
            raise SettingError("logger", cfg.logger, "needs a run folder", "give runs='runs'")
        return []


def make_plan(cfg: AnyConfig, algorithm: str) -> StepPlan:
    """The plan that the settings of a recipe make.

    Args:
        cfg: settings; the environment's are those of ``cfg.env`` unless another library's settings
            of steps say them.
        algorithm: that will run the plan; settings that mean nothing for it are refused.

    Raises:
        SettingError: if they make no plan, or contradict each other.
    """
    plan = _plan(cfg, algorithm)
    _check_learning(plan, cfg)
    return plan


def _plan(cfg: AnyConfig, algorithm: str) -> StepPlan:
    steps, env = cfg.steps, cfg.env
    limits = {"action_repeat": env.action_repeat, "max_episode_steps": env.max_episode_steps}
    if isinstance(steps, (OnPolicySteps, OffPolicySteps, OfflineSteps)):
        try:
            return steps.to_plan(num_envs=env.num_envs, **limits)
        except SettingError as error:
            group = "steps" if hasattr(steps, error.field) else "env"
            name = f"{group}.{error.field}"
            raise SettingError(name, error.value, error.why, error.works, error.hint) from None
    plan = as_plan(steps, algorithm, cfg.FAMILY)
    _check_family(plan, cfg.FAMILY)
    for field, ours in limits.items():
        theirs, default = getattr(plan, field), getattr(EnvConfig(), field)
        if ours != default and theirs not in (ours, default):
            why = f"contradicts the {theirs} of steps"
            raise SettingError(f"env.{field}", ours, why, "leave one of them out")
    return plan.replace(
        action_repeat=max(plan.action_repeat, env.action_repeat),
        max_episode_steps=plan.max_episode_steps or env.max_episode_steps,
    )


def seed_everything(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# ---------------------------------------------------------------------- what is refused
def _check_family(plan: StepPlan, family: str | None) -> None:
    if family == "on_policy" and plan.replay_ratio is not None:
        why = "is a setting of off-policy algorithms, and this recipe is on-policy"
        raise SettingError("replay_ratio", plan.replay_ratio, why, "use update_epochs")
    if family == "off_policy" and plan.update_epochs is not None:
        why = "is a setting of on-policy algorithms, and this recipe is off-policy"
        raise SettingError("update_epochs", plan.update_epochs, why, "use replay_ratio")
    if family == "offline" and not plan.offline:
        why = "collects policy steps, and this recipe learns from a data set alone"
        raise SettingError("steps_per_env", plan.steps_per_env, why, [0])


def _check_learning(plan: StepPlan, cfg: AnyConfig) -> None:
    """Refuse a run that ends before it learns, or learns before a transition is complete."""
    starts, total = plan.learning_starts, plan.total_policy_steps
    if plan.trains and starts and total is not None and starts > total:
        why = f"is beyond the {total} policy steps of the run, which would train nothing"
        raise SettingError("steps.learning_starts", starts, why, [total])
    if not (isinstance(cfg, ReplayConfig) and plan.is_exact and plan.trains) or plan.offline:
        return
    n_step, length = getattr(cfg, "n_step", 1), plan.sequence_length or 1
    needed = n_step + 1 if n_step > 1 else length
    envs = plan.num_envs * plan.world_size
    steps = range(plan.iterations + 1)
    first = bisect.bisect_left(steps, needed * envs, key=plan.policy_steps_after)
    if needed == 1 or not plan.gradient_steps_after(max(first - 1, 0)):
        return
    training = bisect.bisect_left(steps, 1, key=plan.gradient_steps_after)
    have = plan.policy_steps_after(training) // envs
    why = f"needs {needed} policy steps of each environment, and training starts after {have}"
    field, near = ("n_step", have - 1) if n_step > 1 else ("steps.sequence_length", have)
    hint = f"or steps.learning_starts={needed * envs}"
    raise SettingError(field, n_step if n_step > 1 else length, why, [max(near, 1)], hint)


def _check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # each backend of PyTorch has its own
        reason, works = str(error).splitlines()[0], ["cpu"]
        if device.startswith("gpu"):
            reason = "PyTorch has no device of this name"
            works = [device.replace("gpu", "cuda"), "cpu"]
        raise SettingError("device", device, f"cannot be used: {reason}", works) from None


def _check_memory(cfg: AnyConfig, plan: StepPlan, env: VectorEnv) -> None:
    """Refuse settings that need more memory than the machine has."""
    leaves = [*env.observation_leaves, *env.observation_leaves, *env.action_leaves]
    sizes = [int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves]
    inputs = sum(int(np.prod(leaf.shape)) for leaf in env.observation_leaves)
    row = sum(sizes) + 4 + 3 + 16  # reward, three flags, number of the episode, place in the buffer
    needs = list(needs_of(cfg, plan, row, inputs))
    if torch.device(cfg.device).type == "cuda":
        on_host = {"env.num_envs", "steps.steps_per_env", "steps.min_steps"}
        there = [need for need in needs if need.field not in on_host]
        check_memory(there, torch.cuda.mem_get_info(cfg.device)[1], f"memory of {cfg.device}")
        needs = [need for need in needs if need.field in on_host]
    check_memory(needs, *memory_of_machine())


@contextlib.contextmanager
def _usable_folder(runs: str | None) -> Iterator[None]:
    """Refuse a name of a folder that the system does not take."""
    try:
        yield
    except OSError as error:
        raise SettingError("runs", runs, f"cannot be used: {error.strerror}", ["runs"]) from None


@contextlib.contextmanager
def _fitting_loss(name: str, own: str) -> Iterator[None]:
    """Refuse a loss that raises where a batch of the recipe is given to it."""
    try:
        yield
    except SettingError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SettingError("loss", name, f"does not fit this recipe: {reason}", [own]) from error


def _check_networks(make: Any, name: str, count: int) -> None:
    """Refuse a loss of TorchRL that takes other networks than the recipe's own, another of them."""
    own = getattr(objectives, name, None)
    if own is None or not make.__module__.startswith("torchrl."):
        return
    ours, theirs = ([*inspect.signature(cls).parameters][:count] for cls in (own, make))
    if "args" not in (ours[0], theirs[0]) and ours != theirs:
        why = f"is a loss of {' and '.join(theirs)}, and this recipe has {' and '.join(ours)}"
        raise SettingError("loss", make.__name__, why, [name])


def _check_actions(env: VectorEnv, actions: Actions, algorithm: str) -> None:
    """Refuse an environment whose actions are not one array of real numbers, or one choice."""
    leaves = env.action_leaves
    kind = "f" if actions == "continuous" else "iu"
    if len(leaves) == 1 and leaves[0].dtype.kind in kind:
        return
    kinds = ", ".join(str(leaf.dtype if leaf.space is None else leaf.space) for leaf in leaves)
    space = "Box" if actions == "continuous" else "Discrete"
    if len(leaves) > 1 or leaves[0].dtype.kind not in "fiu":
        others = "recipes.ppo"
    else:
        others = "recipes.dqn or recipes.ppo" if actions == "continuous" else "recipes.sac or td3"
    why = f"has actions that are not {actions} ({kinds}), and {algorithm} chooses only such"
    works = f"use {others}, or an environment with a {space} action space"
    raise SettingError("env.id", env.name, why, works)


def _check_dataset(env: VectorEnv, rows: Any) -> None:
    """Refuse transitions of an environment with other observations or actions."""
    leaves = {"observation": env.observation_leaves, "action": env.action_leaves}
    for key, (leaf, *more) in leaves.items():
        found = tuple(rows[key].shape[1:])
        if more or leaf.shape != found:
            wanted = "several arrays" if more else f"shape {leaf.shape}"
            why = f"holds {key}s of shape {found}, and those of {env.name} have {wanted}"
            raise SettingError("dataset", key, why, "give the environment that was recorded")


CONTINUOUS_LOSSES = {"SACLoss": "DiscreteSACLoss", "DDPGLoss": "DQNLoss", "TD3Loss": "DQNLoss"}
"""Losses of continuous actions, and what to use for discrete ones."""


def _check_actor(loss: str, networks: Sequence[Any]) -> None:
    """Refuse an actor of discrete actions in a loss of continuous ones."""
    spec = getattr(networks[0], "spec", None) if networks else None
    if spec is None or loss not in CONTINUOUS_LOSSES:
        return
    for key in spec.keys(True, True):
        if spec[key] is not None and not spec[key].dtype.is_floating_point:
            kind = type(spec[key]).__name__
            why = f"is for continuous actions, and the actor's are {kind}"
            raise SettingError("loss", loss, why, [CONTINUOUS_LOSSES[loss]])


PARTS = (
    "collector", "update", "buffer", "advantage", "evaluate", "exploration_policy", "hooks",
    "logger", "loss_module", "optimizer",
)  # fmt: skip
"""Parts that the caller of a recipe's ``build`` may give."""


def _check_parts(parts: Parts) -> None:
    for name, part in parts.items():
        if name == "loss":
            works = "use make_loss=... for a class or function, or Config(loss=...) for a name"
            raise SettingError(name, part, "is no part of a trainer", works)
        if name not in PARTS:
            near = nearest_first(name, PARTS)[:3]
            raise SettingError(name, part, "is no part of a trainer", near)


def _listed(name: str, parts: dict[str, Any]) -> list[Any]:
    """Take a list out of the parts."""
    given = parts.pop(name, ())
    if not isinstance(given, Sequence):
        raise SettingError(name, given, "is not a list", f"use {name}=[...]")
    return list(given)
