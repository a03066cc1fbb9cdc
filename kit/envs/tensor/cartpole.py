"""CartPole: balance a pole on a cart by pushing the cart left or right."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kit.envs.tensor.base import TensorEnv

GRAVITY = 9.8  # m/s^2
POLE_MASS = 0.1  # kg
TOTAL_MASS = 1.0 + POLE_MASS  # mass of cart and pole in kg
HALF_LENGTH = 0.5  # distance from the hinge to the pole's centre of mass in m
FORCE = 10.0  # N
POLE_SHARE = POLE_MASS * HALF_LENGTH / TOTAL_MASS  # in metres; couples the motions of pole and cart
TIME_STEP = 0.02  # s
POSITION_LIMIT = 2.4  # m
ANGLE_LIMIT = math.radians(12.0)


class CartPole(TensorEnv):
    """Torch implementation of Gymnasium's ``CartPole-v1``.

    A pole is hinged to a cart. The episode terminates when the pole tilts too far or the cart moves
    too far. Physics and observation: position [m], velocity [m/s], angle from upright [rad] and
    angular velocity [rad/s]. Action 0 pushes left, action 1 pushes right. The reward is 1 for every
    step, including the last.

    The frictionless equations of motion, (23) and (24) in Florian (2007), "Correct equations for
    the dynamics of the cart-pole system", are integrated with explicit Euler steps.
    """

    state_size = 4
    uniform_size = 4
    time_limit = 500
    num_actions = 2
    observation_low = (-2 * POSITION_LIMIT, -math.inf, -2 * ANGLE_LIMIT, -math.inf)
    observation_high = (2 * POSITION_LIMIT, math.inf, 2 * ANGLE_LIMIT, math.inf)

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Return states that are uniform in [-0.05, 0.05)."""
        return uniform * 0.1 - 0.05

    def transition(self, physics: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Push the cart for one time step. Forces are expressed as accelerations."""
        _, velocity, angle, spin = physics.unbind(0)
        cosine, sine = angle.cos(), angle.sin()
        centrifugal = POLE_SHARE * spin * spin * sine
        side = action.to(physics.dtype) - 0.5
        push = torch.add(centrifugal, side, alpha=2 * FORCE / TOTAL_MASS)
        torque = torch.addcmul(GRAVITY * sine, cosine, push, value=-1)
        inertia = torch.rsub(cosine * cosine, HALF_LENGTH * 4 / 3, alpha=POLE_SHARE)
        spin_rate = torque / inertia
        acceleration = torch.addcmul(push, cosine, spin_rate, value=-POLE_SHARE)
        rates = torch.stack((velocity, acceleration, spin, spin_rate))
        physics = torch.add(physics, rates, alpha=TIME_STEP)
        position, _, angle, _ = physics.unbind(0)
        failed = (position.abs() > POSITION_LIMIT) | (angle.abs() > ANGLE_LIMIT)
        return physics, torch.ones_like(angle), failed


class CartPoleV0(CartPole):
    """CartPole with episodes of at most 200 steps, as in Gymnasium's ``CartPole-v0``."""

    time_limit = 200
