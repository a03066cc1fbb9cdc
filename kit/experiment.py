"""Everything around an algorithm."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.optim import Optimizer
from torchrl.collectors import BaseCollector
from torchrl.objectives.utils import default_value_kwargs

from kit.buffers import PrioritizedSampler, ReplayMinibatches, make_replay_buffer
from kit.buffers.datasets import (
    DatasetMinibatches,
    cast_to_env_specs,
    dataset_loading_disabled,
    read_datasets,
)
from kit.buffers.given import buffer_settings, check_given, delivering_to, takes_from_host
from kit.buffers.goals import GoalReward
from kit.buffers.records import SequenceReplay
from kit.cli.launch import main
from kit.collectors import COLLECTORS, make_collector
from kit.collectors.policy import Policy, first_values
from kit.config import (
    EnvConfig,
    OfflineConfig,
    OffPolicyConfig,
    OnPolicyConfig,
    checks,
)
from kit.config.devices import usable_device
from kit.config.environment import (
    Actions,
    check_actions,
    check_arguments,
    check_dataset,
    check_deviation,
    check_stacked_frames,
    named_as_in,
)
from kit.config.loss import RecipeLoss, unchanged
from kit.config.parts import Replacements, check_parts, check_replaced, check_update
from kit.config.plain import check, differences
from kit.config.plan import AnyConfig, make_plan
from kit.dialects.carried import caveats, take
from kit.envs import VectorEnv, make_env
from kit.envs.errors import EnvError
from kit.envs.state import seed_process
from kit.hooks import (
    Anneal,
    BestPolicy,
    Evaluator,
    Hook,
    LearningCurve,
    RecordVideo,
    SavePolicy,
    ScaleReward,
    StopWhen,
    TimeLimit,
)
from kit.logging.loggers import RowLogger, make_loggers
from kit.modules import make_actor_critic
from kit.modules.shared_backbone import with_shared_backbone
from kit.runs.init_from import init_from
from kit.runs.recipe import Recipe
from kit.runs.run_folder import SWEEP_JOB, RunFolder
from kit.runs.saved_runs import FREE_TO_DIFFER
from kit.steps import SettingError
from kit.steps.settings import OfflineSteps, OffPolicySteps, OnPolicySteps
from kit.trainer import Trainer
from kit.trainer.rng import IsolatedRNG
from kit.update import autocast_loss

__all__ = [
    "EnvConfig", "Experiment", "OffPolicyConfig", "OffPolicySteps", "OfflineConfig", "OfflineSteps",
    "OnPolicyConfig", "OnPolicySteps", "main",
]  # fmt: skip

EVALUATED_AT_ONCE = 32
"""Environments of an evaluation at most, unless more train; they play its episodes in turns."""

Parts = Mapping[str, Any]
"""Parts of a trainer by the name of its argument, which replace those of a recipe."""


class Experiment:
    """Owns the surroundings of an algorithm: plan, environments, buffer, run folder, trainer.

    Made first in a recipe's ``build``: it checks the settings, seeds all random numbers and sets
    PyTorch's threads. Training and evaluation environments share one normaliser, everything that
    discounts one gamma, everything that holds tensors one device.

    Args:
        cfg: settings of the recipe; those that ``cfg.steps`` of another library sets are changed in
            place. With ``log_dir=None`` nothing is written, as in a notebook.
        algorithm: as other libraries know it, for settings of steps in their words; by default the
            name of the recipe.
        parts: parts of the caller of ``build``, by name. They replace the recipe's; ``hooks`` and
            ``logger`` are added to the recipe's. A ``collector`` may be a name, a class or a
            collector. ``make_actor`` and ``make_critic`` are functions of the environment that
            return a TensorDict module; ``optimizer`` is described in :meth:`make_optimizer`.

    Attributes:
        plan: every count of the run.
        name: of the recipe: that of the module which defines the settings.
        algorithm: as other libraries know it.
        folder: of the run, once its trainer is made; ``None`` if nothing is written.

    Raises:
        SettingError: if a setting is invalid, or contradicts another.
    """

    def __init__(
        self, cfg: AnyConfig, algorithm: str | None = None, parts: Parts | None = None
    ) -> None:
        recipe = Recipe.of(type(cfg))
        self.name = recipe.name
        self.algorithm = algorithm or self.name
        check(cfg)
        differing = differences(cfg, FREE_TO_DIFFER)
        taken = take(cfg.steps, cfg, self.algorithm, cfg.FAMILY)
        check(cfg)
        checks.rows_of_normalization(cfg)
        usable_device(device=cfg.device)
        self.cfg = cfg
        self._parts = dict(parts or {})
        self._replacements = Replacements(self._parts)
        if cfg.log_dir is None and cfg.resume is not None:
            why = "goes on in its run folder, and this run has none"
            raise SettingError(
                "resume", cfg.resume, why, "leave out log_dir=null, or use init_from"
            )
        self._run = None if cfg.log_dir is None else RunFolder(recipe, cfg)
        self.folder: Path | None = None
        self.plan = make_plan(cfg, self.algorithm)
        if self._run is not None:  # another library's settings may say another number
            self._run.config["env"]["num_envs"] = self.plan.num_envs
        self._loss: RecipeLoss | None = None
        self._env: VectorEnv | None = None
        self._sampler: PrioritizedSampler | None = None  # that of the settings
        notes = caveats(cfg.steps, self.algorithm, cfg.FAMILY)
        self.plan.remarks.extend([*differing, *taken, *notes])
        self._outside, self._threads = IsolatedRNG(), torch.get_num_threads()
        if cfg.threads is not None:
            torch.set_num_threads(cfg.threads)
        seed_everything(cfg.seed)

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
            "gamma": getattr(cfg, "gamma", 1.0),  # of rewards, which cloning does not see
            "normalization_steps": None,
        }
        if isinstance(cfg.steps, OnPolicySteps):  # those of nip are part of no total
            settings["normalization_steps"] = cfg.steps.num_normalization_steps or None
        kwargs = settings.pop("kwargs")
        check_arguments(cfg, settings)
        if isinstance(cfg, OfflineConfig):
            settings["normalize_observation"] = cfg.normalize_data
        with named_as_in(cfg):
            env = make_env(**{**settings, **kwargs, **changes})
        if not dataset_loading_disabled():  # a saved run that is only played stores nothing
            checks.memory(plan, cfg, env, _bytes_of_latent(cfg))
        check_stacked_frames(cfg, env)
        check_actions(env, actions, self.name)
        check_deviation(cfg, env)
        self._env = env
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

    def make_evaluator(self, env: VectorEnv, policy: Policy, **changes: Any) -> Evaluator:
        """Make what evaluates a policy, in environments of :meth:`make_evaluation_env`.

        Args:
            env: training environments.
            policy: what is evaluated.
            **changes: arguments of :class:`~kit.hooks.Evaluator` that differ from the settings.
        """
        cfg, episodes = self.cfg, self.plan.evaluation_episodes
        settings = {"episodes": episodes, "seed": cfg.seed, "device": cfg.device}
        settings["max_steps"] = cfg.evaluation_max_steps
        settings["fast_policy"] = cfg.collector_kwargs.get("fast_policy", "auto")
        return Evaluator(self.make_evaluation_env(env), policy, **{**settings, **changes})

    def make_actor(self, make: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        """Create the actor: by the caller's ``make_actor``, or else by the recipe's factory.

        Args:
            make: factory of the recipe.
            *arguments: arguments of ``make``. The first one, the environment, is the only argument
                of the caller's factory.
            **settings: further arguments of ``make``.
        """
        return self._replacements.network("make_actor", make, *arguments, **settings)

    def make_critic(self, make: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        """Create the critic, as :meth:`make_actor` creates the actor."""
        return self._replacements.network("make_critic", make, *arguments, **settings)

    def make_actor_critic(self, env: VectorEnv, **settings: Any) -> tuple[Any, Any]:
        """Create actor and critic, which may share layers; the caller may replace one or both.

        Args:
            env: training environments.
            **settings: further arguments of :func:`~kit.modules.make_actor_critic`.

        Raises:
            SettingError: if the caller replaces one of two networks that share layers.
        """
        return self._replacements.pair(make_actor_critic, env, **settings)

    def make_optimizer(
        self, make: type[Optimizer], parameters: Iterable[Any], **settings: Any
    ) -> Optimizer:
        """Create an optimizer: the caller's ``optimizer``, or else the recipe's.

        A class, or its name in ``torch.optim``, is called with ``parameters`` and the recipe's
        learning rate. A function is called with a list of all parameters alone. An optimizer that
        exists already must hold all parameters.

        Args:
            make: class of the recipe.
            parameters: parameters, or groups of parameters.
            **settings: further arguments of ``make``.

        Raises:
            SettingError: if the optimizer does not hold the parameters.
        """
        return self._replacements.optimizer(make, parameters, **settings)

    def make_loss(
        self, given: str | Callable[..., Any], *networks: nn.Module, **arguments: Any
    ) -> Any:
        """Make the loss module, on the configured device.

        Args:
            given: class or function; or its name, in ``torchrl.objectives`` or as ``module:Class``.
            *networks: actor and critics, in the order of the algorithm's losses. A body that actor
                and critic share runs once: see :class:`~kit.modules.shared_backbone.SharedBackbone`.
            **arguments: further arguments. One that the loss does not take may be left out if it is
                a setting of the recipe at its default.

        Raises:
            SettingError: if there is no such loss, or it does not take what the recipe gives it.

        A loss with a value estimator of TorchRL gets the setting ``gamma``, and ``gae_lambda`` if
        the estimator has a lambda, unless it set an estimator itself.
        """
        self._loss = loss = RecipeLoss(given, self.cfg)
        taken = loss.arguments(arguments)
        for network in networks:  # bounds of actions are no parameters: a loss leaves them
            network.to(self.cfg.device)
        with loss.fitting(), warnings.catch_warnings():
            # TorchRL's BCLoss declares no target networks, which it does not have.
            warnings.filterwarnings("ignore", "The name target_")
            module = with_shared_backbone(loss.make, networks, **taken).to(self.cfg.device)
        self._set_discount(module)
        loss.check(module, networks, taken)
        autocast_loss(module, self.cfg.precision, self.cfg.device)
        return module

    def _set_discount(self, loss: Any) -> None:
        """Set the value estimator of a loss that has none, which would discount by 0.99."""
        kind, cfg = getattr(loss, "default_value_estimator", None), self.cfg
        if kind is None or loss._value_estimator is not None or not hasattr(cfg, "gamma"):
            return
        settings = {"gamma": cfg.gamma}
        if "lmbda" in default_value_kwargs(kind) and hasattr(cfg, "gae_lambda"):
            settings["lmbda"] = cfg.gae_lambda
        loss.make_value_estimator(**settings)

    def make_replay_buffer(self, **changes: Any) -> ReplayMinibatches:
        """Make the replay buffer, with the discount, the device and the priorities of the settings.

        Made after the loss, whose errors are the priorities.

        Args:
            **changes: arguments of :func:`~kit.buffers.make_replay_buffer` that differ.
        """
        cfg, plan = self.cfg, self.plan
        assert isinstance(cfg, OffPolicyConfig), "only off-policy recipes have a replay buffer"
        settings = buffer_settings(cfg, plan)
        if cfg.hindsight is not None:
            reward_fn = GoalReward(self._env, cfg.hindsight)
            settings |= {"strategy": cfg.hindsight, "reward_fn": reward_fn}
        if not cfg.per_alpha:
            checks.reject_unused(cfg, ("per_beta",), "per_alpha=0 draws uniformly")
        elif "sampler" not in changes:
            if plan.sequence_length is not None:
                why = f"draws no sequences, and sequence_length is {plan.sequence_length}"
                raise SettingError("per_alpha", cfg.per_alpha, why, [0.0])
            alpha = cfg.per_alpha / self._exponent_per_alpha
            self._sampler = PrioritizedSampler(cfg.buffer_size, alpha, cfg.per_beta)
            settings["sampler"] = self._sampler
        return make_replay_buffer(**{**settings, **changes})

    def make_dataset(self, env: VectorEnv) -> DatasetMinibatches:
        """Read the data set of the settings; its statistics normalise the environments.

        A saved run that is only played has none: its checkpoint has the statistics.

        Raises:
            SettingError: if it cannot be read, or is of another environment.
        """
        cfg = self.cfg
        assert isinstance(cfg, OfflineConfig), "only offline recipes have a data set"
        if dataset_loading_disabled():
            return DatasetMinibatches(None, self.plan.minibatch_size)
        rows = read_datasets(cfg.dataset)
        check_dataset(env, rows, cfg.dataset)
        rows = cast_to_env_specs(rows, env)
        if env.normalizer is not None:
            env.normalizer.fit(rows["observation"])
        return DatasetMinibatches(rows.to(cfg.device), self.plan.minibatch_size, env.normalizer)

    # ------------------------------------------------------------------ the whole
    def trainer(
        self,
        env: VectorEnv,
        policy: Policy,
        *,
        parts: Parts | None = None,
        start_with_buffer: bool = False,
        **wired: Any,
    ) -> Trainer:
        """Make the trainer.

        Args:
            env: training environments.
            policy: what is trained; the collector and the evaluator act with it.
            parts: parts of the caller of ``build`` that the experiment was not created with.
            start_with_buffer: whether a run that begins with the weights of another one
                (``init_from``) begins with its replay buffer as well.
            **wired: the recipe's parts: ``update``, ``advantage``, ``buffer``, ``hooks``, ...

        Raises:
            SettingError: if parts are unknown or do not fit together.
        """
        try:
            self._parts.update(parts or {})
            check_parts(self._parts)
            check_replaced(self.cfg, self._replacements, self.name)
            used = self._replacements.asked
            given = {name: part for name, part in self._parts.items() if name not in used}
            return self._trainer(env, policy, given, wired, start_with_buffer)
        finally:  # the trainer keeps the seeded random numbers; the process has its own again
            self._outside.restore_global()
            torch.set_num_threads(self._threads)

    def _trainer(
        self,
        env: VectorEnv,
        policy: Policy,
        given: dict[str, Any],
        wired: dict[str, Any],
        start_with_buffer: bool,
    ) -> Trainer:
        cfg = self.cfg
        own, theirs = wired.pop("hooks", ()), given.pop("hooks", ())
        if "buffer" in given:
            self._sampler = None
        hooks = self._hooks(own, theirs)
        loggers = given.pop("logger", ())
        if isinstance(loss := getattr(wired.get("update"), "loss_module", None), nn.Module):
            loss.to(cfg.device)  # with its value estimator, which TorchRL makes on the CPU
        chosen = {**wired, **given}
        if "buffer" in given:
            chosen["buffer"] = delivering_to(cfg.device, given["buffer"])
            check_given(cfg, chosen["buffer"], self._exponent_per_alpha)
        check_update(cfg, wired.get("update") if "update" not in given else None)
        self._try_loss(env, policy, chosen)
        chosen["collector"] = self._collector(env, policy, chosen)
        if "evaluate" not in chosen:
            chosen["evaluate"] = self.make_evaluator(env, policy)
        run = self._run
        with contextlib.nullcontext() if run is None else run.taken() as self.folder:
            trainer = Trainer(self.plan, **{**self._around(hooks, loggers), **chosen})
            start = cfg.init_from if run is None else run.config["init_from"]
            if start is not None and (run is None or run.checkpoint is None):
                folder = init_from(trainer, start, cfg, self.name, start_with_buffer)
                if run is not None:  # "latest" is another one later
                    run.config["init_from"] = str(folder)
        trainer.numbers.threads = cfg.threads
        return trainer

    def _hooks(self, own: Sequence[Any], theirs: Sequence[Any]) -> list[Any]:
        """The hooks of the recipe, those that settings ask for, and those of the caller."""
        cfg, hooks = self.cfg, [*own]
        if isinstance(cfg, OffPolicyConfig) and (cfg.standardize_reward or cfg.reward_scale != 1):
            hooks.append(ScaleReward(cfg.reward_scale, cfg.standardize_reward))
        if self._sampler is not None and self._sampler.beta:
            rises = Anneal(self._sampler, "_beta", "linear", end=1.0, name="per_beta")
            hooks.append(rises)
        if cfg.time_limit is not None:
            hooks.append(TimeLimit(cfg.time_limit))
        if cfg.keep_best and not any(isinstance(hook, BestPolicy) for hook in theirs):
            hooks.append(BestPolicy())
        if cfg.stop_at_return is not None:
            hooks.append(StopWhen("evaluation/return", reached=cfg.stop_at_return))
        return [*hooks, *theirs]

    def _around(self, hooks: Sequence[Any], loggers: Sequence[Any]) -> dict[str, Any]:
        """What surrounds the algorithm: rows, checkpoints, progress, and the run's folder."""
        cfg, run, of_sweep = self.cfg, self._run, SWEEP_JOB.get()
        named = f"{self.name} on {cfg.env.id}"
        title = f"{named}, seed {cfg.seed}"
        title += f", {of_sweep[1]}" if of_sweep and of_sweep[1] else ""
        around: dict[str, Any] = {
            "log_every": cfg.log_every,
            "checkpoint_every": cfg.checkpoint_every,
            "progress": cfg.progress and title,
            "hooks": [*self._written(), *hooks],
            "logger": [*self._loggers(), *loggers],
        }
        if run is not None and self.folder is not None:
            around |= {
                "hooks": [run, LearningCurve(self.folder, named), *around["hooks"]],
                "folder": self.folder,
                "config": run.config,
                "resume_from": run.checkpoint,
            }
        return around

    @property
    def _exponent_per_alpha(self) -> int:
        """Exponent of absolute errors for alpha = 1: 2 where the loss writes their squares."""
        return 2 if self._loss is not None and self._loss.writes_squares else 1

    def _try_loss(self, env: VectorEnv, policy: Policy, parts: dict[str, Any]) -> None:
        """Try a loss that the settings name on a batch of zeros; check that it reads n steps."""
        advantage, buffer = parts.get("advantage"), parts.get("buffer")
        recipe_loss = self._loss
        if recipe_loss is None:
            return
        loss, summed = recipe_loss.module, getattr(buffer, "summed", None)
        if recipe_loss.is_named:
            with recipe_loss.fitting(), unchanged(policy, loss, advantage):
                batch = self._example(env, policy, buffer)
                loss(batch if advantage is None else advantage(batch))
        if summed is not None and summed.steps > 1:
            with unchanged(policy, loss):
                recipe_loss.check_n_step(self._example(env, policy, buffer), summed.steps)

    def _example(self, env: VectorEnv, policy: Policy, buffer: Any) -> TensorDictBase:
        """A batch of zeros."""
        first = first_values(policy, env.num_envs, self.cfg.device)
        batch = policy(env.fake_tensordict().to(self.cfg.device).update(first))
        if isinstance(buffer, SequenceReplay):
            return buffer.example(batch)
        length = self.plan.sequence_length or (1 if self.plan.on_policy else None)
        if length is not None:
            batch = batch.unsqueeze(-1).expand(*batch.shape, length)
        return batch.set("is_init", torch.ones_like(batch["next", "done"]))

    def _collector(
        self, env: VectorEnv, policy: Policy, parts: dict[str, Any]
    ) -> BaseCollector | None:
        cfg, exploration = self.cfg, parts.pop("exploration_policy", None)
        wanted = parts.pop("collector", None) or cfg.collector
        if self.plan.offline:
            why = "nothing is collected (offline)"
            checks.reject_unused(cfg, ["collector", "collector_kwargs"], why)
        if isinstance(wanted, BaseCollector) or self.plan.offline:
            return wanted if isinstance(wanted, BaseCollector) else None
        settings = {"seed": cfg.seed, "device": cfg.device, "exploration_policy": exploration}
        kind = COLLECTORS.get(wanted or "vector", wanted)  # of a class, the class itself
        on_host = getattr(kind, "collects_on_host", False)
        stays = takes_from_host(self.plan, parts.get("buffer"), collects_on_host=on_host)
        if stays and (on_host or not callable(wanted)):
            settings["storing_device"] = "cpu"
        wanted = wanted or ("episode" if self.plan.collects_episodes else "vector")
        kwargs = cfg.collector_kwargs
        field, value = ("collector_kwargs", kwargs) if kwargs else ("collector", wanted)
        why, faults = "cannot be used", (EnvError,)
        with checks.reported_as(field, value, why, unless=faults):
            return make_collector(wanted, env, policy, self.plan, **settings, **kwargs)

    def _written(self) -> list[Hook]:
        """What writes videos and the policy to the run folder, where it is asked for."""
        cfg, hooks = self.cfg, list[Hook]()
        if self.folder is None:
            names = ["video_every", "save_policy"]
            checks.reject_unused(cfg, names, "it needs a run folder (log_dir='runs')")
            return hooks
        if cfg.video_every is not None:
            hooks.append(RecordVideo(self.folder / "videos", cfg.video_every))
        if cfg.save_policy:
            hooks.append(SavePolicy(self.folder / "policy"))
        return hooks

    def _loggers(self) -> list[RowLogger]:
        cfg, one_run = self.cfg, os.environ.get("WANDB_RUN_ID")
        if one_run and SWEEP_JOB.get() and "wandb" in cfg.logger:
            why = "would be the run of W&B of all runs of this sweep"
            raise SettingError("WANDB_RUN_ID", one_run, why, "unset it; WANDB_RUN_GROUP joins runs")
        if self.folder is not None:
            run_name = f"{self.name} {cfg.env.id} s{cfg.seed}"
            return make_loggers(cfg.logger, self.folder, run_name=run_name)
        if cfg.logger != "none":
            checks.reject_unused(cfg, ["logger"], "it needs a run folder (log_dir='runs')")
        return []


def _bytes_of_latent(cfg: AnyConfig) -> int:
    """Bytes that a replay buffer keeps with each record for a world model."""
    if not getattr(cfg, "stored_latents", False):
        return 0
    from kit.modules.world.sizes import size_of

    return size_of(cfg.size, latents=getattr(cfg, "latents", None)).bytes_stored  # type: ignore[union-attr]


def seed_everything(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and PyTorch."""
    seed_process(seed)
    torch.manual_seed(seed)
