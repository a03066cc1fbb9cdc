"""Observation statistics from random actions before a run."""

from __future__ import annotations

import torch

from kit.envs import VectorEnv
from kit.modules.random_actions import RandomActions
from kit.steps import SettingError


def estimate_statistics(env: VectorEnv, steps: int) -> None:
    """Estimate the observation statistics of ``env`` from random actions in a copy of it.

    Neither the environments nor the global random state change, because the steps are not part of
    the run. The statistics use the observations on which the actions were selected.

    Args:
        env: environments with an observation normaliser.
        steps: policy steps, summed over all environments.

    Raises:
        SettingError: if the environments cannot be created a second time.
    """
    if env.make_again is None:
        reason = "The environment cannot be created a second time for normalisation steps"
        raise SettingError("env", env.name, reason, "Pass an id or a function")
    copy = env.make_again()
    copy.normalizer = env.normalizer
    with torch.random.fork_rng(devices=[]):
        select, observation = RandomActions(copy), copy.start()
        for _ in range(steps // copy.num_envs):
            actions = {key: action.cpu().numpy() for key, action in select(observation).items()}
            result = copy.new_step()
            copy.step_arrays(actions, result, rewards=False)
            observation = result.observation
    copy.close()
