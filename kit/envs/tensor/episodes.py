"""What a step of torch environments reads, writes and gives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class EpisodeState(NamedTuple):
    """Where every copy stands between two policy steps: all that a step reads and writes.

    Attributes:
        physics: the simulator's state, ``[state_size, num_envs]``. A row is one quantity of all
            copies, so that arithmetic on it runs over contiguous memory.
        episode_return: sum of rewards since the episode began, ``[num_envs]``.
        episode_length: policy steps since the episode began, ``[num_envs]``, int64.
    """

    physics: Tensor
    episode_return: Tensor
    episode_length: Tensor


class TensorStep(NamedTuple):
    """What one policy step of every copy gives.

    Attributes:
        observation: what to act on next, ``[num_envs, observation_size]``: the first observation of
            the next episode where this one ended.
        next_observation: what the action led to, of the same shape: the true last observation
            where the episode ended.
        reward: sum over the action repeats, ``[num_envs]``.
        terminated: whether the episode ended by its own rules, ``[num_envs]``, bool.
        truncated: whether the time limit was reached, ``[num_envs]``, bool. Both can be true.
        env_steps: simulator steps really made, ``[num_envs]``, int64: ``action_repeat`` or less.
        episode_return: sum of rewards since the episode began, this step included,
            ``[num_envs]``: the return of the episode where it ended.
        episode_length: policy steps since the episode began, this one included, ``[num_envs]``,
            int64: the length of the episode where it ended.
    """

    observation: Tensor
    next_observation: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    env_steps: Tensor
    episode_return: Tensor
    episode_length: Tensor


def choose(mask: Tensor, chosen: EpisodeState, other: EpisodeState) -> EpisodeState:
    """Take copies from ``chosen`` where ``mask`` is true, else from ``other``."""
    return EpisodeState(*(torch.where(mask, a, b) for a, b in zip(chosen, other)))
