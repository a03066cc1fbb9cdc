"""World models of Dreamer: encoder, recurrent state-space model, decoder, heads, and acting."""

from __future__ import annotations

from kit.modules.world.actions import ActionCode
from kit.modules.world.actor import LatentActor
from kit.modules.world.model import Heads, WorldModel, make_critic, make_world_model
from kit.modules.world.player import Player
from kit.modules.world.rssm import RSSM, Latent
from kit.modules.world.sizes import SIZES, Size

__all__ = [
    "RSSM",
    "SIZES",
    "ActionCode",
    "Heads",
    "Latent",
    "LatentActor",
    "Player",
    "Size",
    "WorldModel",
    "make_critic",
    "make_world_model",
]
