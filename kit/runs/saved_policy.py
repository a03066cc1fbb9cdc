"""Policies from saved runs, for evaluation, recording and use in other code."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torchrl.envs.utils import ExplorationType

from kit.buffers.datasets import without_dataset_loading
from kit.collectors.actor import ActionSelector
from kit.config.devices import usable_device
from kit.config.plain import from_plain
from kit.envs.single_env import with_mask
from kit.envs.spaces import empty
from kit.hooks.annealing import AnnealExploration
from kit.hooks.evaluation import Evaluator
from kit.hooks.video import record_episode
from kit.runs.init_from import check_has_checkpoint
from kit.runs.recipe import Recipe
from kit.runs.saved_runs import read_config
from kit.runs.trust import check_names, check_recipe
from kit.steps import SettingError
from kit.trainer.checkpoint import Checkpoints


class SavedRun:
    """A saved run with the policy from its newest checkpoint. The run folder is not modified.

    Args:
        folder: run folder.
        trust: modules that the run may import in addition to modules from kit and the project.
        how: argument prefix for trusting a module, shown in error messages.
        best: whether to load the policy of the best evaluation instead of the last one.
        device: device of the networks; ``None``: the run's device.

    Attributes:
        folder: run folder.
        name: name of the recipe.
        trainer: trainer built from the settings of the run, with its weights and frozen
            normalisation. Its replay buffer is empty, and datasets are not loaded.
        policy_steps: number of policy steps of the run when the policy was saved.
        gradient_steps: number of gradient steps of the run when the policy was saved.
        elsewhere: device of the run, if this machine lacks it and the policy is on the CPU; empty
            otherwise.

    Raises:
        SettingError: if the folder has no checkpoint or no best evaluation, its recipe cannot be
            imported, or its settings name a module that is not trusted.
    """

    def __init__(
        self,
        folder: Path | str,
        trust: Collection[str] | str = (),
        how: str = "trust=",
        best: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        folder, trust = Path(folder), [trust] if isinstance(trust, str) else trust
        self.folder, config = folder, read_config(folder)
        check_has_checkpoint(folder, "run")
        source = str(config.pop("recipe"))
        check_recipe(source, folder, trust, how)
        recipe, self.name = Recipe(source).load(), Recipe(source).name
        check_names(config, folder, trust, how, Path(recipe.__file__ or ""))
        env = dict(config.get("env", {}))
        if env.get("vectorization") == "async":
            env["vectorization"], env["step_timeout"] = "sync", None
            env["kwargs"] = {k: v for k, v in env["kwargs"].items() if k != "num_workers"}
        saved = str(config.get("device", "cpu"))
        used = _device_or_cpu(saved) if device is None else str(device)
        self.elsewhere = saved if device is None and used != saved else ""
        cfg = from_plain(recipe.Config, {**config, **_WITHOUT_RUN, "env": env, "device": used})
        with without_dataset_loading():  # the dataset may not exist on this machine
            self.trainer = recipe.build(cfg)
        read = functools.partial(self.trainer.load_policy, best=best)
        counters = Checkpoints.read_latest(folder / "checkpoints", read)
        assert counters is not None  # a checkpoint is only removed after a newer one is saved
        for hook in self.trainer.registered_modules.values():
            if isinstance(hook, AnnealExploration):  # epsilon is not saved with the policy
                hook.end()
        self.policy_steps = counters["policy_steps"]
        self.gradient_steps = counters["gradient_steps"]

    def evaluator(self, episodes: int, seed: int, **env: Any) -> Evaluator:
        """Create an evaluator for the policy.

        Args:
            episodes: number of episodes per evaluation.
            seed: seed of the environments.
            **env: overrides for the arguments of ``make_env``. By default, there is one environment
                per episode, up to a maximum of 32 or the number of particles, whichever is larger.
        """
        evaluator: Evaluator = self.trainer.evaluate
        envs = {"num_envs": min(episodes, max(32, evaluator.particles)), **env}
        return evaluator.again(episodes=episodes, seed=seed, **envs)

    def policy(self, deterministic: bool = True) -> SavedPolicy:
        """Return the policy as a function of observations. For SVPG, return the first particle.

        Args:
            deterministic: whether actions are deterministic. Otherwise, the policy explores as at
                the end of training. Latents of a world model are always sampled.
        """
        kind = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
        return SavedPolicy(self.evaluator(1, 0, vectorization="sync"), kind)

    def record(self, video: Path, seed: int) -> dict[str, float]:
        """Play one episode and write it to an MP4 file.

        Raises:
            SettingError: if the environment cannot be rendered or a package is missing.
            WriteError: if the file cannot be written.
        """
        return record_episode(self.trainer.evaluate, video, seed=seed)

    def close(self) -> None:
        """Close the environments of the trainer."""
        if self.trainer.collector is not None:  # offline runs have no collector
            self.trainer.collector.shutdown(raise_on_error=False)
        self.trainer.evaluate.close()


class SavedPolicy:
    """Saved policy that maps a Gymnasium observation to an action.

    Observations are normalised as in training. The hidden state persists between calls.

    Args:
        evaluator: evaluator with a single environment, which is not stepped.
        exploration_type: exploration type, such as deterministic or random.
    """

    def __init__(self, evaluator: Evaluator, exploration_type: ExplorationType) -> None:
        self._env, policy = evaluator.env, evaluator.policy
        if isinstance(policy, nn.Module):
            policy.eval()  # the run is not trained further
        self._actor = ActionSelector(
            self._env,
            policy,
            exploration_type=exploration_type,
            device=evaluator.device,
            keeps_outputs=False,
        )

    def make_env(self, **kwargs: Any) -> gym.Env[Any, Any]:
        """Create the training environment, with its wrappers.

        Args:
            **kwargs: overrides for the environment's arguments, such as ``render_mode="human"``.
        """
        backend = self._env.make_again(num_envs=1, vectorization="sync", **kwargs).backend
        (env,) = backend.envs
        return env

    def reset(self) -> None:
        """Reset the hidden state at the start of an episode."""
        self._actor.restart()

    def __call__(self, observation: Any, info: Mapping[str, Any] | None = None) -> Any:
        """Select an action.

        Args:
            observation: observation from ``reset`` or ``step`` of one environment.
            info: info from the environment; needed if it contains the ``action_mask``. In
                environments from :meth:`make_env`, the mask is part of the observation.

        Raises:
            SettingError: if an entry of the observation is missing or has another shape.
        """
        complete = observation
        for leaf in self._env.observation_leaves:
            has_mask = isinstance(observation, Mapping) and "action_mask" in observation
            if leaf.path == ("action_mask",) and not has_mask and info and "action_mask" in info:
                complete = with_mask(observation, info["action_mask"], *leaf.shape)
        arrays = empty(self._env.observation_leaves, 1)
        for leaf in self._env.observation_leaves:
            try:
                value = leaf.of(complete)
            except (KeyError, TypeError, IndexError):
                value = None
            if value is not None and np.shape(value) == leaf.shape:
                arrays[leaf.key][0] = value
            else:
                reason = f"It needs an entry {leaf.key} of shape {leaf.shape}"
                advice = "Pass observations from an environment created by make_env()"
                raise SettingError("observation", observation, reason, advice)
        if self._env.normalizer is not None:
            self._env.normalizer.first(arrays, learn=False)
        self._actor.prepare()
        with torch.no_grad(), self._actor.begin():
            actions = self._actor(arrays)
        return self._env.backend.convert.rows(actions)[0]


def _device_or_cpu(name: str) -> str:
    """Return a device name, or ``cpu`` if this machine lacks the device."""
    try:
        usable_device(device=name)
    except SettingError:
        return "cpu"
    return name


_WITHOUT_RUN = {
    "progress": False, "logger": "none", "resume": None, "init_from": None, "log_dir": None,
    "collector": None, "collector_kwargs": {}, "video_every": None,
    "save_policy": False,
}  # fmt: skip
"""Settings for a trainer that never runs, writes nothing and starts no processes."""
