"""MountainCar: swing an underpowered car back and forth until it drives out of a valley."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kit.envs.tensor.base import TensorEnv

GRAVITY = 0.0025  # per step^2
LEFT_WALL = -1.2
RIGHT_END = 0.6
MAX_SPEED = 0.07  # per step


class _Valley(TensorEnv):
    """Dynamics of a car in a valley with height sin(3 * position)."""

    state_size = 2
    uniform_size = 1
    observation_low = (LEFT_WALL, -MAX_SPEED)
    observation_high = (RIGHT_END, MAX_SPEED)
    goal: ClassVar[float]
    """Goal position. The goal only counts as reached if the car does not move backwards."""

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Return cars at rest near the bottom, with position uniform in [-0.6, -0.4)."""
        position = uniform[0] * 0.2 - 0.6
        return torch.stack((position, torch.zeros_like(position)))

    def drive(self, physics: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
        """Perform one step. The left wall stops the car.

        Dynamics from Moore (1990), "Efficient memory-based learning for robot control", as restated
        in Sutton and Barto (2018), "Reinforcement learning: an introduction", example 10.1.

        Args:
            physics: position and velocity, ``[2, num_envs]``.
            push: acceleration due to the motor, ``[num_envs]``.

        Returns:
            The next physics, and whether the goal is reached, ``[num_envs]``.
        """
        position, velocity = physics.unbind(0)
        velocity = velocity + (push - GRAVITY * (3 * position).cos())
        velocity = velocity.clamp(-MAX_SPEED, MAX_SPEED)
        position = (position + velocity).clamp(LEFT_WALL, RIGHT_END)
        velocity = velocity.masked_fill((position <= LEFT_WALL) & (velocity < 0), 0.0)
        reached = (position >= self.goal) & (velocity >= 0)
        return torch.stack((position, velocity)), reached


class MountainCar(_Valley):
    """Torch implementation of Gymnasium's ``MountainCar-v0``.

    The reward is -1 per step until the goal is reached. Physics and observation: position and
    velocity (per step). Action 0 pushes left, 1 does not push and 2 pushes right.
    """

    time_limit = 200
    num_actions = 3
    goal = 0.5

    def transition(self, physics: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Drive for one step."""
        push = (action.to(physics.dtype) - 1) * 0.001
        physics, reached = self.drive(physics, push)
        return physics, -torch.ones_like(push), reached


class MountainCarContinuous(_Valley):
    """Torch implementation of Gymnasium's ``MountainCarContinuous-v0``.

    The reward is 100 at the goal, minus 0.1 times the squared action. Physics and observation:
    position and velocity (per step). Action: throttle. The motor clips the throttle to [-1, 1], but
    the reward does not.
    """

    time_limit = 999
    action_limit = 1.0
    goal = 0.45

    def transition(self, physics: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Drive for one step."""
        throttle = action.squeeze(-1).to(physics.dtype)
        physics, reached = self.drive(physics, throttle.clamp(-1, 1) * 0.0015)
        reward = 100.0 * reached.to(physics.dtype) - 0.1 * throttle.square()
        return physics, reward, reached
