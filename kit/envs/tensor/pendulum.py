"""Pendulum: swing up a pendulum with a weak motor and balance it upright."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kit.envs.tensor.base import TensorEnv

GRAVITY = 10.0  # m/s^2
MASS = 1.0  # kg
LENGTH = 1.0  # m
INERTIA = MASS * LENGTH**2 / 3  # moment of inertia of a uniform rod about its end in kg m^2
TIME_STEP = 0.05  # s
MAX_TORQUE = 2.0  # N m
MAX_SPIN = 8.0  # rad/s


class Pendulum(TensorEnv):
    """Torch implementation of Gymnasium's ``Pendulum-v1``.

    A motor drives a rod on a hinge. The cost grows with angle, speed and torque. Physics: angle
    from upright [rad], not wrapped, and angular velocity [rad/s]. Observation: cosine and sine of
    the angle, angular velocity. Action: torque [N m], clipped to [-2, 2]. Episodes never terminate.

    The rod is uniform. Its motion is integrated with semi-implicit Euler steps.
    """

    state_size = 2
    uniform_size = 2
    time_limit = 200
    action_limit = MAX_TORQUE
    observation_low = (-1.0, -1.0, -MAX_SPIN)
    observation_high = (1.0, 1.0, MAX_SPIN)

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Return angles uniform in [-pi, pi) and angular velocities uniform in [-1, 1)."""
        angle, spin = uniform.unbind(0)
        return torch.stack((angle * (2 * math.pi) - math.pi, spin * 2 - 1))

    def transition(self, physics: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the torque for one time step."""
        angle, spin = physics.unbind(0)
        torque = action.squeeze(-1).to(physics.dtype).clamp(-MAX_TORQUE, MAX_TORQUE)
        from_upright = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = torch.addcmul(from_upright * from_upright, spin, spin, value=0.1)
        cost = torch.addcmul(cost, torque, torque, value=0.001)
        weight = (MASS * GRAVITY * LENGTH / 2) * angle.sin()
        spin = torch.add(spin, weight + torque, alpha=TIME_STEP / INERTIA)
        spin = spin.clamp(-MAX_SPIN, MAX_SPIN)
        physics = torch.stack((torch.add(angle, spin, alpha=TIME_STEP), spin))
        return physics, -cost, torch.zeros_like(angle, dtype=torch.bool)

    def observe(self, physics: Tensor) -> Tensor:
        """Return the cosine and sine of the angle, and the angular velocity."""
        angle, spin = physics.unbind(0)
        return torch.stack((angle.cos(), angle.sin(), spin)).T
