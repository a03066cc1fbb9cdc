"""Experiment: the plan, environments, replay buffer, run folder and trainer of a recipe."""

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
from kit.collectors.statistics import estimate_statistics
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
    check_continuous_settings,
    check_dataset,
    check_stacked_frames,
    renamed_errors,
)
from kit.config.loss import RecipeLoss, preserve_state
from kit.config.parts import Replacements, check_parts, check_replaced, check_update
from kit.config.plain import check, differences
from kit.config.plan import AnyConfig, make_plan
from kit.dialects.carried import apply_to_config, caveats
from kit.distributed import Ranks
from kit.envs import VectorEnv, make_env
from kit.envs.backends.base import derived_seed
from kit.envs.errors import EnvError
from kit.envs.state import seed_process
from kit.envs.wrappers import load_wrappers
from kit.hooks import (
    Anneal,
    BestPolicy,
    Evaluator,
    Hook,
    LearningCurve,
    RecordVideo,
    SampleNoise,
    SavePolicy,
    ScaleReward,
    StopWhen,
    TimeLimit,
)
from kit.logging.loggers import RowLogger, make_loggers
from kit.modules import StateDependentExploration, make_actor_critic
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
"""Maximum number of parallel evaluation environments, unless more are used for training."""

Parts = Mapping[str, Any]
"""Parts passed by the caller of ``build`` instead of the recipe's, keyed by argument name."""


class Experiment:
    """Creates everything around an algorithm: plan, environments, buffer, run folder and trainer.

    Create the experiment first in a recipe's ``build``. The constructor checks the settings, seeds
    all random number generators and sets the number of PyTorch threads. Training and evaluation
    environments share one normaliser, and all parts use the same discount factor and device.

    Args:
        cfg: recipe settings. Another library's step settings (``cfg.steps``) may change
            other settings in place. With ``log_dir=None``, nothing is written to disk.
        algorithm: name of the algorithm in other libraries, used to interpret their step settings.
            Default: the name of the recipe.
        parts: parts passed to ``build``, by name. They replace the recipe's parts, except
            ``hooks`` and ``logger``, which are added. ``collector`` is a name, a class or a
            collector. ``make_actor`` and ``make_critic`` are functions that take the environment
            and return a TensorDict module. See :meth:`make_optimizer` for ``optimizer``.

    Attributes:
        plan: step plan of the run.
        name: name of the recipe, which is the name of its module.
        algorithm: name of the algorithm in other libraries.
        ranks: processes that train together, started by torchrun.
        folder: run folder, set when the trainer is created. ``None`` if nothing is written.

    Raises:
        SettingError: if settings are invalid or contradict each other.
    """

    def __init__(
        self, cfg: AnyConfig, algorithm: str | None = None, parts: Parts | None = None
    ) -> None:
        recipe = Recipe.of(type(cfg))
        self.name = recipe.name
        self.algorithm = algorithm or self.name
        check(cfg)
        differing = differences(cfg, FREE_TO_DIFFER)
        applied = apply_to_config(cfg.steps, cfg, self.algorithm, cfg.FAMILY)
        check(cfg)
        checks.check_advantage_norm(cfg)
        usable_device(device=cfg.device)
        self.cfg = cfg
        self.ranks = Ranks.from_environment(cfg.device, cfg.rank_timeout)
        if (interrupted := self.ranks.recall("folder")) and cfg.log_dir is not None:
            cfg.resume = interrupted  # torchrun has restarted this process
        self._parts = dict(parts or {})
        self._replacements = Replacements(self._parts)
        if cfg.log_dir is None and cfg.resume is not None:
            reason = "A resumed run needs its run folder, but log_dir=null disables run folders"
            raise SettingError(
                "resume", cfg.resume, reason, "Remove log_dir=null, or use init_from"
            )
        self._run = None if cfg.log_dir is None else RunFolder(recipe, cfg)
        self.folder: Path | None = None
        ranks = None if dataset_loading_disabled() else self.ranks.size
        self.plan = make_plan(cfg, self.algorithm, ranks)
        if self._run is not None:  # another library's step settings may set num_envs
            self._run.config["env"]["num_envs"] = self.plan.num_envs
        self._loss: RecipeLoss | None = None
        self._env: VectorEnv | None = None
        self._sampler: PrioritizedSampler | None = None  # created from the settings
        notes = caveats(cfg.steps, self.algorithm, cfg.FAMILY)
        self.plan.remarks.extend([*differing, *applied, *notes])
        self._outside, self._threads = IsolatedRNG(), torch.get_num_threads()
        if cfg.threads is not None:
            torch.set_num_threads(cfg.threads)
        seed_everything(cfg.seed)

    # ------------------------------------------------------------------ parts
    def make_env(self, *, actions: Actions | None = None, **changes: Any) -> VectorEnv:
        """Create the training environments.

        Args:
            actions: kind of actions that the algorithm needs. ``None``: any actions.
            **changes: arguments for :func:`~kit.envs.make_env` that override the settings.

        Raises:
            SettingError: if the environments cannot be created, or have the wrong kind of actions.
        """
        cfg, plan = self.cfg, self.plan
        settings = {
            **vars(cfg.env),
            "num_envs": plan.num_envs,
            "action_repeat": plan.action_repeat,
            "max_episode_steps": plan.max_episode_steps,
            "seed": self._seed,
            "gamma": getattr(cfg, "gamma", 1.0),  # behaviour cloning has no discount factor
            "normalization_steps": None,
        }
        if isinstance(cfg, OffPolicyConfig):
            settings["stacked_frames"] = cfg.stacked_frames
        if isinstance(cfg.steps, OnPolicySteps):
            settings["normalization_steps"] = cfg.steps.num_normalization_steps or None
        elif plan.normalization_steps:  # the observations of the first reset are the first step's
            settings["normalization_steps"] = plan.normalization_steps - plan.num_envs
        kwargs = dict(settings.pop("kwargs"))
        check_arguments(cfg, settings)
        wrappers = load_wrappers(cfg.env.wrappers)
        wrappers += [*kwargs.pop("wrappers", ()), *changes.pop("wrappers", ())]
        if isinstance(cfg, OfflineConfig):
            settings["normalize_observation"] = cfg.normalize_data
        with renamed_errors(cfg):
            env = make_env(**{**settings, **kwargs, **changes, "wrappers": wrappers})
            if plan.normalization_steps:
                estimate_statistics(env, plan.normalization_steps)
        if not dataset_loading_disabled():  # evaluation-only runs store no transitions
            checks.check_run_memory(plan, cfg, env, _bytes_of_latent(cfg))
        check_stacked_frames(cfg, env)
        check_actions(env, actions, self.name)
        check_continuous_settings(cfg, env)
        self._env = env
        return env

    @property
    def _seed(self) -> int:
        """Seed for what differs between ranks: environments, exploration and sampling."""
        rank = self.ranks.rank
        return derived_seed(self.cfg.seed, rank) if rank else self.cfg.seed

    def make_evaluation_env(self, env: VectorEnv) -> VectorEnv:
        """Create evaluation environments that share the normaliser of ``env``.

        There is one environment per episode, but at most the number of training environments or
        :data:`EVALUATED_AT_ONCE`, whichever is larger.
        """
        if env.make_again is None:
            reason = "The environment cannot be created a second time for evaluations"
            raise SettingError("env", env.name, reason, "Pass evaluate=Evaluator(...)")
        limit = max(self.plan.num_envs, EVALUATED_AT_ONCE)
        copy = env.make_again(num_envs=min(self.plan.evaluation_episodes, limit), seed=0)
        copy.normalizer = env.normalizer
        return copy

    def make_evaluator(self, env: VectorEnv, policy: Policy, **changes: Any) -> Evaluator:
        """Create an evaluator for ``policy`` in environments from :meth:`make_evaluation_env`.

        Args:
            env: training environments.
            policy: policy to evaluate.
            **changes: arguments for :class:`~kit.hooks.Evaluator` that override the settings.
        """
        cfg, episodes = self.cfg, self.plan.evaluation_episodes
        seed = cfg.seed if cfg.evaluation_seed is None else cfg.evaluation_seed
        settings = {"episodes": episodes, "seed": seed, "device": cfg.device}
        settings["max_steps"] = cfg.evaluation_max_steps
        settings["fast_policy"] = cfg.collector_kwargs.get("fast_policy", "auto")
        return Evaluator(self.make_evaluation_env(env), policy, **{**settings, **changes})

    def make_actor(self, make: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        """Create the actor with the part ``make_actor`` if passed, else with the recipe's factory.

        Args:
            make: factory of the recipe.
            *arguments: arguments for ``make``. The part ``make_actor`` gets only the first
                argument, the environment.
            **settings: keyword arguments for ``make``.
        """
        return self._replacements.network("make_actor", make, *arguments, **settings)

    def make_critic(self, make: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        """Create the critic, with the same arguments as for :meth:`make_actor`."""
        return self._replacements.network("make_critic", make, *arguments, **settings)

    def make_actor_critic(self, env: VectorEnv, **settings: Any) -> tuple[Any, Any]:
        """Create the actor and the critic, unless ``make_actor`` or ``make_critic`` replaces them.

        Args:
            env: training environments.
            **settings: keyword arguments for :func:`~kit.modules.make_actor_critic`.

        Raises:
            SettingError: if a part replaces only one of two networks that share layers.
        """
        return self._replacements.pair(make_actor_critic, env, **settings)

    def make_optimizer(
        self, make: type[Optimizer], parameters: Iterable[Any], **settings: Any
    ) -> Optimizer:
        """Create an optimizer from the part ``optimizer`` if passed, else from the recipe's class.

        The part may be an optimizer class, or its name in ``torch.optim``. The class is called with
        the parameters and the learning rate of the recipe. The part may also be a function that
        takes a list of all parameters, or an optimizer that contains all parameters.

        Args:
            make: optimizer class of the recipe.
            parameters: parameters, or parameter groups.
            **settings: keyword arguments for ``make``.

        Raises:
            SettingError: if the optimizer lacks some of the parameters.
        """
        return self._replacements.optimizer(make, parameters, **settings)

    def make_loss(
        self, loss: str | Callable[..., Any], *networks: nn.Module, **arguments: Any
    ) -> Any:
        """Create the loss module on the configured device.

        A TorchRL loss without a value estimator gets an estimator that uses the settings ``gamma``
        and, if the estimator has a lambda, ``gae_lambda``.

        Args:
            loss: class or function, or its name in ``torchrl.objectives``, or ``module:Class``.
            *networks: actor and critics, in the order of the loss's arguments. Shared layers
                are evaluated once; see :class:`~kit.modules.shared_backbone.SharedBackbone`.
            **arguments: keyword arguments for the loss. Settings with their default value are
                omitted if the loss does not accept them.

        Raises:
            SettingError: if there is no such loss, or it rejects the networks or arguments.
        """
        self._loss = recipe_loss = RecipeLoss(loss, self.cfg)
        accepted = recipe_loss.arguments(arguments)
        for network in networks:  # loss.to() does not move buffers, such as action bounds
            network.to(self.cfg.device)
        with recipe_loss.reraising(), warnings.catch_warnings():
            # TorchRL's BCLoss warns about target networks although it has none.
            warnings.filterwarnings("ignore", "The name target_")
            module = with_shared_backbone(recipe_loss.make, networks, **accepted).to(
                self.cfg.device
            )
        self._set_discount(module)
        recipe_loss.check(module, networks, accepted)
        autocast_loss(module, self.cfg.precision, self.cfg.device)
        return module

    def _set_discount(self, loss: Any) -> None:
        """Create the value estimator if the loss has none. The default would use gamma=0.99."""
        kind, cfg = getattr(loss, "default_value_estimator", None), self.cfg
        if kind is None or loss._value_estimator is not None or not hasattr(cfg, "gamma"):
            return
        settings = {"gamma": cfg.gamma}
        if "lmbda" in default_value_kwargs(kind) and hasattr(cfg, "gae_lambda"):
            settings["lmbda"] = cfg.gae_lambda
        loss.make_value_estimator(**settings)

    def make_replay_buffer(self, **changes: Any) -> ReplayMinibatches:
        """Create the replay buffer from the settings.

        Create the buffer after the loss, because the loss determines the unit of priorities.

        Args:
            **changes: arguments for :func:`~kit.buffers.make_replay_buffer` that override the
                settings.

        Raises:
            SettingError: if buffer settings contradict each other.
        """
        cfg, plan = self.cfg, self.plan
        assert isinstance(cfg, OffPolicyConfig), "only off-policy recipes have a replay buffer"
        settings = buffer_settings(cfg, plan)
        if not cfg.observation_storage and (
            cfg.stacked_frames > 1 or not cfg.store_next_observation
        ):
            remark = f"The buffer stores whole observations, which n_step={cfg.n_step} needs."
            plan.remarks.append(remark)
        if cfg.hindsight is not None:
            reward_fn = GoalReward(self._env, cfg.hindsight)
            settings |= {"strategy": cfg.hindsight, "reward_fn": reward_fn}
        if not cfg.per_alpha:
            checks.reject_unused(cfg, ("per_beta",), "per_alpha=0 disables prioritised replay")
        elif "sampler" not in changes:
            if plan.sequence_length is not None:
                reason = "Prioritised replay does not support steps.sequence_length"
                raise SettingError("per_alpha", cfg.per_alpha, reason, [0.0])
            alpha = cfg.per_alpha / self._exponent_per_alpha
            self._sampler = PrioritizedSampler(cfg.buffer_size, alpha, cfg.per_beta)
            settings["sampler"] = self._sampler
        return make_replay_buffer(**{**settings, **changes})

    def make_dataset(self, env: VectorEnv) -> DatasetMinibatches:
        """Load the configured dataset, and fit the observation normaliser to the dataset.

        A run that is only evaluated loads no dataset, because its checkpoint has the statistics.

        Raises:
            SettingError: if the dataset cannot be read, or does not match the environment.
        """
        cfg = self.cfg
        assert isinstance(cfg, OfflineConfig), "only offline recipes have a dataset"
        if dataset_loading_disabled():
            return DatasetMinibatches(None, self.plan.minibatch_size)
        rows = read_datasets(cfg.dataset)
        check_dataset(env, rows, cfg.dataset)
        rows = cast_to_env_specs(rows, env)
        if env.normalizer is not None:
            env.normalizer.fit(rows["observation"])
        return DatasetMinibatches(rows.to(cfg.device), self.plan.minibatch_size, env.normalizer)

    # ------------------------------------------------------------------ trainer
    def trainer(
        self,
        env: VectorEnv,
        policy: Policy,
        *,
        parts: Parts | None = None,
        start_with_buffer: bool = False,
        **wired: Any,
    ) -> Trainer:
        """Create the trainer.

        Args:
            env: training environments.
            policy: policy to train. The collector and the evaluator also use it.
            parts: further parts passed to ``build``.
            start_with_buffer: whether ``init_from`` also loads the replay buffer.
            **wired: parts of the recipe: ``update``, ``advantage``, ``buffer``, ``hooks``, ...

        Raises:
            SettingError: if parts are unknown or incompatible with each other.
        """
        try:
            self._parts.update(parts or {})
            check_parts(self._parts)
            check_replaced(self.cfg, self._replacements, self.name)
            used = self._replacements.requested
            replaced = {name: part for name, part in self._parts.items() if name not in used}
            return self._trainer(env, policy, replaced, wired, start_with_buffer)
        finally:  # the trainer keeps the seeded RNG state, so the previous state is restored
            self._outside.restore_global()
            torch.set_num_threads(self._threads)

    def _trainer(
        self,
        env: VectorEnv,
        policy: Policy,
        replaced: dict[str, Any],
        wired: dict[str, Any],
        start_with_buffer: bool,
    ) -> Trainer:
        cfg = self.cfg
        if "buffer" in replaced:
            self._sampler = None
        hooks = self._hooks(wired.pop("hooks", ()), replaced.pop("hooks", ()))
        hooks += [SampleNoise(policy)] if isinstance(policy, StateDependentExploration) else []
        loggers = replaced.pop("logger", ())
        if isinstance(loss := getattr(wired.get("update"), "loss_module", None), nn.Module):
            loss.to(cfg.device)  # TorchRL creates the loss's value estimator on the CPU
        chosen = {**wired, **replaced}
        if "buffer" in replaced:
            chosen["buffer"] = delivering_to(cfg.device, replaced["buffer"])
            check_given(cfg, chosen["buffer"], self._exponent_per_alpha)
        check_update(cfg, wired.get("update") if "update" not in replaced else None)
        self._try_loss(env, policy, chosen)
        if self.ranks.rank:  # the networks were created with the same seed on all ranks
            seed_everything(self._seed)
        chosen["collector"] = self._collector(env, policy, chosen)
        if "evaluate" not in chosen:
            chosen["evaluate"] = self.make_evaluator(env, policy)
        run = self._run
        with contextlib.nullcontext() if run is None else run.shared(self.ranks) as self.folder:
            parts = {**self._run_parts(hooks, loggers), **chosen}
            trainer = Trainer(self.plan, ranks=self.ranks, **parts)
            start = cfg.init_from if run is None else run.config["init_from"]
            if start is not None and (run is None or run.checkpoint is None):
                folder = init_from(trainer, start, cfg, self.name, start_with_buffer)
                if run is not None:  # store the folder, because "latest" will later be another run
                    run.config["init_from"] = str(folder)
        trainer.numbers.threads = cfg.threads
        return trainer

    def _hooks(self, recipe_hooks: Sequence[Any], caller_hooks: Sequence[Any]) -> list[Any]:
        """Return the hooks from the recipe, the settings and the caller."""
        cfg, hooks = self.cfg, [*recipe_hooks]
        if isinstance(cfg, OffPolicyConfig) and (cfg.standardize_reward or cfg.reward_scale != 1):
            hooks.append(ScaleReward(cfg.reward_scale, cfg.standardize_reward))
        if self._sampler is not None and self._sampler.beta:
            beta = Anneal(self._sampler, "_beta", "linear", end=1.0, name="per_beta")
            hooks.append(beta)
        if cfg.time_limit is not None:
            hooks.append(TimeLimit(cfg.time_limit))
        if cfg.keep_best and not any(isinstance(hook, BestPolicy) for hook in caller_hooks):
            hooks.append(BestPolicy())
        if cfg.stop_at_return is not None:
            hooks.append(StopWhen("evaluation/return", reached=cfg.stop_at_return))
        return [*hooks, *caller_hooks]

    def _run_parts(self, hooks: Sequence[Any], loggers: Sequence[Any]) -> dict[str, Any]:
        """Return the trainer arguments for logging, checkpoints, progress and the run folder."""
        cfg, run, job = self.cfg, self._run, SWEEP_JOB.get()
        task = f"{self.name} on {cfg.env.id}"
        title = f"{task}, seed {cfg.seed}"
        title += f", {job[1]}" if job and job[1] else ""
        parts: dict[str, Any] = {
            "log_every": cfg.log_every,
            "checkpoint_every": cfg.checkpoint_every,
            "progress": cfg.progress and title,
            "hooks": [*self._saving_hooks(), *hooks],
            "logger": [*self._loggers(), *loggers],
        }
        if run is not None and self.folder is not None:
            parts |= {
                "hooks": [run, LearningCurve(self.folder, task), *parts["hooks"]],
                "folder": self.folder,
                "config": run.config,
                "resume_from": run.checkpoint,
            }
        return parts

    @property
    def _exponent_per_alpha(self) -> int:
        """Exponent of absolute TD errors for alpha=1: 2 if the loss squares TD errors, else 1."""
        return 2 if self._loss is not None and self._loss.writes_squares else 1

    def _try_loss(self, env: VectorEnv, policy: Policy, parts: dict[str, Any]) -> None:
        """Test a custom loss on an example batch. Check that the loss supports n-step returns."""
        advantage, buffer = parts.get("advantage"), parts.get("buffer")
        recipe_loss = self._loss
        if recipe_loss is None:
            return
        loss, summed = recipe_loss.module, getattr(buffer, "summed", None)
        if recipe_loss.is_custom:
            with recipe_loss.reraising(), preserve_state(policy, loss, advantage):
                batch = self._example(env, policy, buffer)
                loss(batch if advantage is None else advantage(batch))
        if summed is not None and summed.steps > 1:
            with preserve_state(policy, loss):
                recipe_loss.check_n_step(self._example(env, policy, buffer), summed.steps)

    def _example(self, env: VectorEnv, policy: Policy, buffer: Any) -> TensorDictBase:
        """Return an example batch of zeros."""
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
            checks.reject_unused(
                cfg, ["collector", "collector_kwargs"], "an offline run collects no data"
            )
        if isinstance(wanted, BaseCollector) or self.plan.offline:
            return wanted if isinstance(wanted, BaseCollector) else None
        settings = {"seed": cfg.seed, "device": cfg.device, "exploration_policy": exploration}
        kind = COLLECTORS.get(wanted or "vector", wanted)  # `wanted` may be a class
        on_host = getattr(kind, "collects_on_host", False)
        stays = takes_from_host(self.plan, parts.get("buffer"), collects_on_host=on_host)
        if stays and (on_host or not callable(wanted)):
            settings["storing_device"] = "cpu"
        wanted = wanted or ("episode" if self.plan.collects_episodes else "vector")
        kwargs = cfg.collector_kwargs
        field, value = ("collector_kwargs", kwargs) if kwargs else ("collector", wanted)
        reason, faults = "The collector cannot be created", (EnvError,)
        with checks.reraise_as_setting_error(field, value, reason, exclude=faults):
            rank = self.ranks.rank
            return make_collector(wanted, env, policy, self.plan, rank=rank, **settings, **kwargs)

    def _saving_hooks(self) -> list[Hook]:
        """Return the hooks that write videos and the policy to the run folder."""
        cfg, hooks = self.cfg, list[Hook]()
        if self.folder is None:
            names = ["video_every", "save_policy"]
            checks.reject_unused(cfg, names, "the run has no folder (log_dir=null)")
            return hooks
        if not self.ranks.is_first:
            return hooks
        if cfg.video_every is not None:
            hooks.append(RecordVideo(self.folder / "videos", cfg.video_every))
        if cfg.save_policy:
            hooks.append(SavePolicy(self.folder / "policy"))
        return hooks

    def _loggers(self) -> list[RowLogger]:
        cfg, run_id = self.cfg, os.environ.get("WANDB_RUN_ID")
        if run_id and SWEEP_JOB.get() and "wandb" in cfg.logger:
            reason = "All runs in this sweep would log to the same W&B run"
            advice = "Unset WANDB_RUN_ID, or group runs with WANDB_RUN_GROUP"
            raise SettingError("WANDB_RUN_ID", run_id, reason, advice)
        if not self.ranks.is_first:
            return []
        if self.folder is not None:
            run_name = f"{self.name} {cfg.env.id} s{cfg.seed}"
            return make_loggers(cfg.logger, self.folder, run_name=run_name)
        if cfg.logger != "none":
            checks.reject_unused(cfg, ["logger"], "the run has no folder (log_dir=null)")
        return []


def _bytes_of_latent(cfg: AnyConfig) -> int:
    """Return the number of bytes per replay buffer record for stored latents."""
    if not getattr(cfg, "stored_latents", False):
        return 0
    from kit.modules.world.sizes import size_of

    return size_of(cfg.size, latents=getattr(cfg, "latents", None)).bytes_stored  # type: ignore[union-attr]


def seed_everything(seed: int) -> None:
    """Seed the random number generators of Python, NumPy and PyTorch."""
    seed_process(seed)
    torch.manual_seed(seed)
