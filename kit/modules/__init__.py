"""Networks, actors, critics and action distributions."""

from __future__ import annotations

from kit.modules.actors import make_action_value, make_actor, make_body, make_q_network, make_value
from kit.modules.distributions import Categorical, MultiDiscrete
from kit.modules.networks import Flatten, FlattenMLP
from kit.modules.noisy import NoisyLinear
from kit.modules.renorm import BatchRenorm

__all__ = [
    "BatchRenorm",
    "Categorical",
    "Flatten",
    "FlattenMLP",
    "MultiDiscrete",
    "NoisyLinear",
    "make_action_value",
    "make_actor",
    "make_body",
    "make_q_network",
    "make_value",
]
