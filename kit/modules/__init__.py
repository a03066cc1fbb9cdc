"""Networks, policies, critics and action distributions."""

from __future__ import annotations

from kit.modules.actors import make_actor, make_actor_critic
from kit.modules.backbones import make_backbone
from kit.modules.critics import make_action_value, make_q_network, make_value
from kit.modules.distributions import Categorical, MultiDiscrete
from kit.modules.images import NATURE
from kit.modules.layers import BatchRenorm, NoisyLinear
from kit.modules.networks import Flatten, FlattenMLP, drop_log_prob, parameter_groups
from kit.modules.particles import Particles, make_particles
from kit.modules.recurrent import Recurrent

__all__ = [
    "NATURE",
    "BatchRenorm",
    "Categorical",
    "Flatten",
    "FlattenMLP",
    "MultiDiscrete",
    "NoisyLinear",
    "Particles",
    "Recurrent",
    "drop_log_prob",
    "make_action_value",
    "make_actor",
    "make_actor_critic",
    "make_backbone",
    "make_particles",
    "make_q_network",
    "make_value",
    "parameter_groups",
]  # fmt: skip
