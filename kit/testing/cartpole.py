"""CartPole-v1 as a suite environment. Its transitions follow published equations."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kit.envs.tensor.cartpole import ANGLE_LIMIT, POSITION_LIMIT, CartPole
from kit.testing.trial import CollectorCase, Expected, SuiteEnv

FARTHEST_START = 0.05
"""Largest absolute value of the entries of an initial observation."""
ROUNDING = 1e-5
"""Tolerance for float32 rounding of observations and, in some libraries, of the physics."""


@functools.cache
def _rules() -> CartPole:
    return CartPole(1, device="cpu", dtype=torch.float64, seed=0)


def expected(observation: Tensor, action: Tensor) -> Expected:
    """Compute expected results in float64 for observations ``[..., 4]`` and actions ``[...]``."""
    physics, reward, terminated = _rules().transition(observation.double().movedim(-1, 0), action)
    from_bounds = torch.minimum(
        (physics[0].abs() - POSITION_LIMIT).abs(), (physics[2].abs() - ANGLE_LIMIT).abs()
    )
    return Expected(
        observation=physics.movedim(0, -1),
        reward=reward.unsqueeze(-1),
        terminated=terminated.unsqueeze(-1),
        undecided=(from_bounds < ROUNDING).unsqueeze(-1),
    )


def begins(observation: Tensor) -> Tensor:
    """Return whether all entries of an observation are within the initial bounds."""
    return (observation.abs() <= FARTHEST_START).all(-1)


CARTPOLE = SuiteEnv(
    id="CartPole-v1",
    limit=15,
    expected=expected,
    begins=begins,
    cases=(
        CollectorCase(steps_per_env=100),
        CollectorCase(num_envs=1, steps_per_env=1, batches=40),
        CollectorCase(num_envs=2, steps_per_env=13, batches=7),
    ),
    tolerance=ROUNDING,
)
"""Gymnasium's CartPole, for testing collectors from any library.

A random policy reaches the time limit of 15 steps in most, but not all, episodes. In a few
episodes, the time limit and termination coincide. Observations do not identify their episode.
Within 1e-5 of a termination bound, both outcomes are accepted.
"""
