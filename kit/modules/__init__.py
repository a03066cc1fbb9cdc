"""Networks, policies, critics and action distributions."""

from __future__ import annotations

from kit.modules.actors import make_actor, make_actor_critic
from kit.modules.backbones import make_backbone
from kit.modules.critics import make_action_value, make_q_network, make_value
from kit.modules.distributions import Categorical, MultiDiscrete
from kit.modules.exploration import (
    EpsilonGreedy,
    GaussianNoise,
    OrnsteinUhlenbeckNoise,
    half_range,
    make_noise,
)
from kit.modules.gsde import StateDependentExploration, with_gsde
from kit.modules.heads import action_masks
from kit.modules.images import NATURE
from kit.modules.layers import BatchRenorm, NoisyLinear
from kit.modules.networks import Flatten, FlattenMLP, drop_log_prob, parameter_groups
from kit.modules.particles import Particles, in_one_process, make_particles
from kit.modules.recurrent import Recurrent, check_sequences
from kit.modules.world import (
    Ensemble,
    GaussianWorldModel,
    LatentActor,
    Player,
    TanhActor,
    WorldModel,
    elu_network,
    make_latent_critic,
    make_world_model,
)

__all__ = [
    "NATURE",
    "BatchRenorm",
    "Categorical",
    "Ensemble",
    "EpsilonGreedy",
    "Flatten",
    "FlattenMLP",
    "GaussianNoise",
    "GaussianWorldModel",
    "LatentActor",
    "MultiDiscrete",
    "NoisyLinear",
    "OrnsteinUhlenbeckNoise",
    "Particles",
    "Player",
    "Recurrent",
    "StateDependentExploration",
    "TanhActor",
    "WorldModel",
    "action_masks",
    "check_sequences",
    "drop_log_prob",
    "elu_network",
    "half_range",
    "in_one_process",
    "make_action_value",
    "make_actor",
    "make_actor_critic",
    "make_backbone",
    "make_latent_critic",
    "make_noise",
    "make_particles",
    "make_q_network",
    "make_value",
    "make_world_model",
    "parameter_groups",
    "with_gsde",
]  # fmt: skip
