"""Dreamer's world models: encoder, recurrent state-space model, decoder, heads and actors."""

from __future__ import annotations

from kit.modules.world.actions import ActionCode, LatentActor
from kit.modules.world.ensemble import Ensemble
from kit.modules.world.gaussian import GaussianWorldModel, TanhActor, elu_network
from kit.modules.world.model import WorldModel, make_latent_critic, make_world_model
from kit.modules.world.player import Player
from kit.modules.world.rssm import RSSM, Latent, StateSpace
from kit.modules.world.sizes import SIZES, Size

__all__ = [
    "RSSM", "SIZES", "ActionCode", "Ensemble", "GaussianWorldModel", "Latent", "LatentActor",
    "Player", "Size", "StateSpace", "TanhActor", "WorldModel", "elu_network", "make_latent_critic",
    "make_world_model",
]  # fmt: skip
