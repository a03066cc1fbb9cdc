"""Acrobot: swing up the free end of a double pendulum with a motor in the middle joint."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kit.envs.tensor.base import TensorEnv

GRAVITY = 9.8  # m/s^2
LENGTH = 1.0  # length of each link in m
CENTRE = 0.5  # distance from a link's joint to its centre of mass in m
MASS = 1.0  # mass of each link in kg
INERTIA = 1.0 + MASS * CENTRE**2  # moment of inertia of each link about its joint in kg m^2
COUPLING = MASS * LENGTH * CENTRE  # inertial coupling of the two links in kg m^2
TIME_STEP = 0.2  # s
MAX_SPIN = (4 * math.pi, 9 * math.pi)  # maximum angular velocity of each joint in rad/s


class Acrobot(TensorEnv):
    """Torch implementation of Gymnasium's ``Acrobot-v1``.

    The reward is -1 per step until the free end is one link length above the fixed joint. Physics:
    angle between the first link and the downward vertical and angle between the links [rad], both
    wrapped to [-pi, pi], then both angular velocities [rad/s]. Observation: cosine and sine of each
    angle, then both angular velocities. Actions 0, 1 and 2 apply a torque of -1, 0 and 1 N m. The
    equations of motion (Sutton and Barto 1998, "Reinforcement learning: an introduction", section
    11.3) are integrated with one fourth-order Runge-Kutta step.
    """

    state_size = 4
    uniform_size = 4
    time_limit = 500
    num_actions = 3
    observation_low = (-1.0, -1.0, -1.0, -1.0, -MAX_SPIN[0], -MAX_SPIN[1])
    observation_high = (1.0, 1.0, 1.0, 1.0, *MAX_SPIN)

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Return states that are uniform in [-0.1, 0.1)."""
        return uniform * 0.2 - 0.1

    def transition(self, physics: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the torque for one time step."""
        torque = action.to(physics.dtype) - 1
        first, second, spin_1, spin_2 = _runge_kutta(physics, torque).unbind(0)
        first, second = _wrap(first), _wrap(second)
        spin_1 = spin_1.clamp(-MAX_SPIN[0], MAX_SPIN[0])
        spin_2 = spin_2.clamp(-MAX_SPIN[1], MAX_SPIN[1])
        height = -first.cos() - (first + second).cos()
        terminated = height > LENGTH
        reward = terminated.to(physics.dtype) - 1
        return torch.stack((first, second, spin_1, spin_2)), reward, terminated

    def observe(self, physics: Tensor) -> Tensor:
        """Return the cosines and sines of both angles, then both angular velocities."""
        angles, spins = physics[:2], physics[2:]
        cosines, sines = angles.cos(), angles.sin()
        return torch.cat((cosines[:1], sines[:1], cosines[1:], sines[1:], spins)).T


def _runge_kutta(physics: Tensor, torque: Tensor) -> Tensor:
    """Integrate one time step with the classical fourth-order Runge-Kutta method."""
    k1 = _rates(physics, torque)
    k2 = _rates(torch.add(physics, k1, alpha=TIME_STEP / 2), torque)
    k3 = _rates(torch.add(physics, k2, alpha=TIME_STEP / 2), torque)
    k4 = _rates(torch.add(physics, k3, alpha=TIME_STEP), torque)
    total = torch.add(k1 + k4, k2 + k3, alpha=2)
    return torch.add(physics, total, alpha=TIME_STEP / 6)


def _rates(physics: Tensor, torque: Tensor) -> Tensor:
    """Return the time derivative of ``physics``, ``[4, num_envs]`` (Sutton and Barto's symbols)."""
    first, second, spin_1, spin_2 = physics.unbind(0)
    cosine, pull = second.cos(), COUPLING * second.sin()
    d1 = 2 * COUPLING * cosine + (2 * INERTIA + MASS * LENGTH**2)
    d2 = COUPLING * cosine + INERTIA
    phi2 = (MASS * GRAVITY * CENTRE) * (first + second).sin()
    hanging = torch.add(phi2, first.sin(), alpha=MASS * GRAVITY * (CENTRE + LENGTH))
    coriolis = torch.add(spin_2, spin_1, alpha=2) * spin_2
    phi1 = torch.addcmul(hanging, pull, coriolis, value=-1)
    ratio = d2 / d1
    drive = torch.addcmul(torque - phi2, ratio, phi1)
    drive = torch.addcmul(drive, pull, spin_1 * spin_1, value=-1)
    rate_2 = drive / (INERTIA - d2 * ratio)
    rate_1 = torch.addcmul(phi1, d2, rate_2) / -d1
    return torch.stack((spin_1, spin_2, rate_1, rate_2))


def _wrap(angle: Tensor) -> Tensor:
    """Wrap angles to [-pi, pi]; angles in this range are left unchanged."""
    turns = (angle / (2 * math.pi)).round()
    return torch.add(angle, turns, alpha=-2 * math.pi)
