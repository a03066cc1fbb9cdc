"""Torch version of the counter environment, and its expected transitions."""

from __future__ import annotations

import dataclasses
from collections import deque

import torch
from torch import Tensor

from kit.envs.tensor import TENSOR_ENVS, TensorEnv
from kit.testing.counter import ACTIONS, COUNTER, LIMIT
from kit.testing.trial import CollectorCase, Expected, SuiteEnv


class TensorCounter(TensorEnv):
    """Torch version of :class:`~kit.testing.counter.Counter`."""

    state_size = 3
    uniform_size = 1
    time_limit = LIMIT
    num_actions = ACTIONS
    observation_low = (0.0, 0.0, 0.0)
    observation_high = (float("inf"),) * 3

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Return the initial state: the episode's random number, step count 0 and action 0."""
        return torch.cat((uniform, torch.zeros_like(uniform), torch.zeros_like(uniform)))

    def transition(self, physics: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Count one step."""
        number, count, _ = physics.unbind(0)
        count, action = count + 1, action.to(physics.dtype)
        terminated = count >= 1 + (number * 6).floor()
        return torch.stack((number, count, action)), number + (count + 10 * action), terminated


TENSOR_ENVS[COUNTER] = (TensorCounter, {})


def expected(observation: Tensor, action: Tensor) -> Expected:
    """Compute the expected step results for observations ``[..., 3]`` and actions ``[...]``."""
    number, count = observation[..., 0], observation[..., 1] + 1
    return Expected(
        observation=torch.stack((number, count, action.to(number.dtype)), dim=-1),
        reward=(number + (count + 10 * action)).unsqueeze(-1),
        terminated=(count >= 1 + (number * 6).floor()).unsqueeze(-1),
        truncated=(count >= LIMIT).unsqueeze(-1),
    )


COUNTING = SuiteEnv(
    id=COUNTER,
    limit=LIMIT,
    expected=expected,
    begins=lambda observation: (observation[..., 1:] == 0).all(-1),
    episode=lambda observation: observation[..., 0],
    cases=(
        CollectorCase(),
        CollectorCase(num_envs=1, steps_per_env=1, batches=9),
        CollectorCase(num_envs=2, steps_per_env=13, batches=3),
    ),
)
"""Counter environment for the suite. Batches have odd lengths, and episodes have 1 to 4 steps."""


def expected_of_two(observation: Tensor, action: Tensor) -> Expected:
    """Compute the expected results of policy steps with an action repeat of 2."""
    first = expected(observation, action)
    second, ended = expected(first.observation, action), first.terminated
    return Expected(
        observation=torch.where(ended, first.observation, second.observation),
        reward=torch.where(ended, first.reward, first.reward + second.reward),
        terminated=ended | second.terminated,
        truncated=observation[..., 1:2] + 2 >= 2 * _LIMIT_OF_TWO,
        env_steps=2 - ended.squeeze(-1).long(),
    )


_LIMIT_OF_TWO = 2
"""Number of policy steps (two env steps each) after which an episode is truncated."""
REPEATING = dataclasses.replace(
    COUNTING,
    limit=_LIMIT_OF_TWO,
    expected=expected_of_two,
    action_repeat=2,
    policies=deque(maxlen=1),
)
"""Counter environment with action repeat 2. Episodes may end after one of the two env steps."""
