"""CartPole-v1 of any library: its transitions follow from published equations."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kit.envs.tensor.cartpole import ANGLE_LIMIT, POSITION_LIMIT, CartPole
from kit.testing.trial import CollectorCase, Expected, SuiteEnv

FARTHEST_START = 0.05
"""Each of the four quantities of an observation begins within plus and minus this."""
ROUNDING = 1e-5
"""What a step in float32 may differ by: observations are, and some libraries' physics."""


@functools.cache
def _rules() -> CartPole:
    return CartPole(1, device="cpu", dtype=torch.float64, seed=0)


def expected(observation: Tensor, action: Tensor) -> Expected:
    """The results of steps in float64, of observations ``[..., 4]`` and actions ``[...]``."""
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
    """Whether everything is as near to zero as at a start."""
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
"""CartPole as Gymnasium defines it, made by any library.

The limit is one that most episodes of a random policy reach, some do not, and a few reach in the
step in which they terminate. An observation does not identify its episode: transitions are checked
one by one, and episodes by how steps follow one another. A state within 1e-5 of a bound may
count as beyond it or not.
"""
