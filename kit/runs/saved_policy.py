"""The policy of a saved run: to evaluate it, to record it, to use it outside of the kit."""

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

from kit.buffers.datasets import datasets_left_unread
from kit.collectors.actor import Actor
from kit.config.devices import usable_device
from kit.config.plain import from_plain
from kit.envs.single_env import with_mask
from kit.envs.spaces import empty
from kit.hooks.annealing import AnnealExploration
from kit.hooks.evaluation import Evaluator
from kit.hooks.video import record_episode
from kit.runs.recipe import Recipe
from kit.runs.saved_runs import read_config
from kit.runs.start_from import check_has_checkpoint
from kit.runs.trust import check_names, check_recipe
from kit.steps import SettingError
from kit.trainer.checkpoint import Checkpoints


class SavedRun:
    """The policy of a run, as its newest checkpoint has it. The run folder is only read.

    Args:
        folder: run folder.
        trust: modules that its settings may import, besides those of the project and the kit.
        how: how to trust a module, for the error.
        best: whether it is the policy of the best evaluation; otherwise the last one.
        device: of its networks; ``None``: that of the run.

    Attributes:
        folder: of the run.
        name: of its recipe.
        trainer: built from the run's settings, with its weights and its frozen normalisation; its
            replay buffer stays empty, which costs no memory, and data sets are not read.
        policy_steps: after which its policy was saved, or was the best.
        gradient_steps: after which its policy was saved, or was the best.
        elsewhere: device of the run that this machine does not have, so that the policy is on the
            CPU; empty if it has it.

    Raises:
        SettingError: if the folder has no checkpoint, its recipe cannot be imported, it names a
            module that is not trusted, or it has no best evaluation.
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
        own = str(config.get("device", "cpu"))
        there = _device_here(own) if device is None else str(device)
        self.elsewhere = own if device is None and there != own else ""
        cfg = from_plain(recipe.Config, {**config, **_ALONE, "env": env, "device": there})
        with datasets_left_unread():  # that of the run need not be on this machine
            self.trainer = recipe.build(cfg)
        read = functools.partial(self.trainer.load_policy, best=best)
        counters = Checkpoints.read_latest(folder / "checkpoints", read)
        assert counters is not None  # a run drops a checkpoint when it has a newer one
        for hook in self.trainer.registered_modules.values():
            if isinstance(hook, AnnealExploration):  # epsilon is no part of a policy
                hook.end()
        self.policy_steps = counters["policy_steps"]
        self.gradient_steps = counters["gradient_steps"]

    def evaluator(self, episodes: int, seed: int, **env: Any) -> Evaluator:
        """Make an evaluator of the policy.

        Args:
            episodes: played in one evaluation.
            seed: of the environments.
            **env: arguments of ``make_env`` that differ; by default there are as many environments
                as episodes, at most 32, or one for each particle.
        """
        own: Evaluator = self.trainer.evaluate
        envs = {"num_envs": min(episodes, max(32, own.particles)), **env}
        return own.again(episodes=episodes, seed=seed, **envs)

    def policy(self, deterministic: bool = True) -> SavedPolicy:
        """The policy as a function of what a Gymnasium environment returns.

        Of several policies that were trained side by side (SVPG's particles) it is the first one.

        Args:
            deterministic: whether actions are no samples; otherwise it acts as in training, with
                epsilon as it is at the end. A world model's latents, from which they follow, are
                samples all the same.
        """
        kind = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
        return SavedPolicy(self.evaluator(1, 0, vectorization="sync"), kind)

    def record(self, video: Path, seed: int) -> dict[str, float]:
        """Play one episode and write it to an MP4 file.

        Raises:
            SettingError: if the environment cannot be drawn or a package is missing.
            NotSaved: if the file cannot be written.
        """
        return record_episode(self.trainer.evaluate, video, seed=seed)

    def close(self) -> None:
        """Close the environments that were made with the trainer."""
        if self.trainer.collector is not None:  # offline there is none
            self.trainer.collector.shutdown(raise_on_error=False)
        self.trainer.evaluate.close()


class SavedPolicy:
    """A saved policy outside of the kit: an observation of Gymnasium goes in, an action comes out.

    Observations are normalised as they were in training, hidden state is kept from call to call,
    and the action is a member of the environment's action space.

    Args:
        evaluator: of one environment, which itself is not stepped.
        exploration_type: whether actions are sampled.
    """

    def __init__(self, evaluator: Evaluator, exploration_type: ExplorationType) -> None:
        self._env, policy = evaluator.env, evaluator.policy
        if isinstance(policy, nn.Module):
            policy.eval()  # of a run that is only played
        self._actor = Actor(
            self._env,
            policy,
            exploration_type=exploration_type,
            device=evaluator.device,
            keeps_outputs=False,
        )

    def make_env(self, **kwargs: Any) -> gym.Env[Any, Any]:
        """Make the environment that it was trained in, with its wrappers.

        Args:
            **kwargs: of the environment that differ: ``render_mode="human"``.
        """
        backend = self._env.make_again(num_envs=1, vectorization="sync", **kwargs).backend
        (env,) = backend.envs
        return env

    def reset(self) -> None:
        """Forget the hidden state: an episode begins."""
        self._actor.restart()

    def __call__(self, observation: Any, info: Mapping[str, Any] | None = None) -> Any:
        """Choose an action.

        Args:
            observation: of one environment, as ``reset`` and ``step`` return it.
            info: where the actions that are allowed are in it (``action_mask``); an environment of
                :meth:`make_env` has them in its observation.

        Raises:
            SettingError: if an entry of the observation is missing or has another shape.
        """
        given = observation
        for leaf in self._env.observation_leaves:
            own = isinstance(observation, Mapping) and "action_mask" in observation
            if leaf.path == ("action_mask",) and not own and info and "action_mask" in info:
                given = with_mask(observation, info["action_mask"], *leaf.shape)
        arrays = empty(self._env.observation_leaves, 1)
        for leaf in self._env.observation_leaves:
            try:
                value = leaf.of(given)
            except (KeyError, TypeError, IndexError):
                value = None
            if value is not None and np.shape(value) == leaf.shape:
                arrays[leaf.key][0] = value
            else:
                works = f"give {leaf.key} of shape {leaf.shape}, as an environment of make_env()"
                raise SettingError("observation", observation, "does not fit", works)
        if self._env.normalizer is not None:
            self._env.normalizer.first(arrays, learn=False)
        self._actor.prepare()
        with torch.no_grad(), self._actor.begin():
            actions = self._actor(arrays)
        return self._env.backend.convert.rows(actions)[0]


def _device_here(name: str) -> str:
    """The device of a run; the CPU where this machine does not have it."""
    try:
        usable_device(device=name)
    except (RuntimeError, AssertionError):  # AssertionError: PyTorch was built without CUDA
        return "cpu"
    return name


_ALONE = {
    "progress": False, "logger": "none", "resume": None, "start_from": None, "runs": None,
    "collector": None, "collector_kwargs": {}, "video_every": None,
    "save_policy": False,
}  # fmt: skip
"""Settings of a trainer that is not run: it writes nothing and starts no process."""
