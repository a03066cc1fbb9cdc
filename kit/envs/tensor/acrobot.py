"""Acrobot: swing the free end of a double pendulum up with a motor in its middle joint."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kit.envs.tensor.base import TensorEnv

GRAVITY = 9.8  # m/s^2
LENGTH = 1.0  # m, of each link
CENTRE = 0.5  # m, from a link's joint to its centre of mass
MASS = 1.0  # kg, of each link
INERTIA = 1.0  # kg m^2, of each link
TIME_STEP = 0.2  # s
MAX_SPIN = (4 * math.pi, 9 * math.pi)  # rad/s, of the two joints


class Acrobot(TensorEnv):
    """Two links hanging from a joint; every step costs 1 until the end is a link's length above it.

    Physics: angle of the first link from hanging down and of the second from the first [rad], both
    wrapped to plus or minus pi, and their angular velocities [rad/s]. Observation: cosine and sine
    of both angles, both angular velocities. Actions 0, 1 and 2 give a torque of -1, 0 and 1 N m.

    Equations of motion: Sutton and Barto (1998), "Reinforcement learning: an introduction",
    section 11.3; one Runge-Kutta step of order 4. Reference: Gymnasium's ``Acrobot-v1``.
    """

    state_size = 4
    uniform_size = 4
    time_limit = 500
    num_actions = 3
    observation_low = (-1.0, -1.0, -1.0, -1.0, -MAX_SPIN[0], -MAX_SPIN[1])
    observation_high = (1.0, 1.0, 1.0, 1.0, *MAX_SPIN)

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Return everything uniform in [-0.1, 0.1)."""
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
        """Return cosine and sine of both angles, and both angular velocities."""
        angles, spins = physics[:2], physics[2:]
        cosines, sines = angles.cos(), angles.sin()
        return torch.cat((cosines[:1], sines[:1], cosines[1:], sines[1:], spins)).T


def _runge_kutta(physics: Tensor, torque: Tensor) -> Tensor:
    """Integrate one time step by the classical method of order 4."""
    k1 = _rates(physics, torque)
    k2 = _rates(physics + TIME_STEP / 2 * k1, torque)
    k3 = _rates(physics + TIME_STEP / 2 * k2, torque)
    k4 = _rates(physics + TIME_STEP * k3, torque)
    return physics + TIME_STEP / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def _rates(physics: Tensor, torque: Tensor) -> Tensor:
    """Return the time derivative of the physics, ``[4, num_envs]``."""
    first, second, spin_1, spin_2 = physics.unbind(0)
    coupling = MASS * LENGTH * CENTRE
    cosine, pull = coupling * second.cos(), coupling * second.sin()
    inertia = INERTIA + MASS * CENTRE**2  # of a link around its joint
    d1 = 2 * inertia + MASS * LENGTH**2 + 2 * cosine
    d2 = inertia + cosine
    phi_2 = MASS * CENTRE * GRAVITY * (first + second).sin()
    phi_1 = (
        MASS * (CENTRE + LENGTH) * GRAVITY * first.sin()
        - pull * spin_2 * (spin_2 + 2 * spin_1)
        + phi_2
    )
    ratio = d2 / d1
    rate_2 = (torque + ratio * phi_1 - pull * spin_1.square() - phi_2) / (inertia - d2 * ratio)
    rate_1 = -(d2 * rate_2 + phi_1) / d1
    return torch.stack((spin_1, spin_2, rate_1, rate_2))


def _wrap(angle: Tensor) -> Tensor:
    """Bring angles into [-pi, pi], and leave those alone that are there."""
    turns = (angle / (2 * math.pi)).round()
    return angle - 2 * math.pi * turns
