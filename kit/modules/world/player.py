"""Acting with a world model: filter what was observed, then choose."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer
from torchrl.envs.utils import ExplorationType, exploration_type

from kit.modules.world.actor import LatentActor
from kit.modules.world.model import WorldModel
from kit.modules.world.rssm import Latent


class Player(TensorDictModuleBase):  # type: ignore[misc, unused-ignore]
    """A recurrent policy: the latent of the world model is its hidden state.

    Reads the observations, the latent and the action of the step before; writes ``action`` and the
    next hidden state (under private keys, which no batch keeps). Actions are sampled unless the
    exploration type is deterministic.

    Args:
        world_model: filters observations.
        actor: chooses.
    """

    DETER, STOCH, ACTION = "_deter", "_stoch", "_previous_action"

    def __init__(self, world_model: WorldModel, actor: LatentActor) -> None:
        super().__init__()
        self.world_model, self.actor = world_model, actor
        hidden = [self.DETER, self.STOCH, self.ACTION]
        self.in_keys = [*world_model.observation_keys, *hidden]
        self.out_keys: list[Any] = [world_model.code.key, *(("next", key) for key in hidden)]

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """The hidden state with which episodes begin: zeros."""
        rssm = self.world_model.rssm
        size = rssm.size
        widths = (size.deter, size.stoch * size.classes, rssm.action_features)
        keys = (self.DETER, self.STOCH, self.ACTION)
        specs = {key: Unbounded((width,)) for key, width in zip(keys, widths)}
        return TensorDictPrimer(specs, expand_specs=True)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action and the hidden state of the next step."""
        model = self.world_model
        before = Latent(tensordict.get(self.DETER), tensordict.get(self.STOCH))
        embedding = model.encode(model.targets(tensordict))
        deter = model.rssm.recur(before, model.rssm.action(tensordict.get(self.ACTION)))
        logits = model.rssm.correct(deter, model.rssm.posterior_embedding(embedding))
        uniform = torch.rand(*logits.shape[:-1], model.size.stoch, device=logits.device)
        latent = Latent(deter, model.rssm.sample(logits, uniform).detach())
        action = self._choose(self.actor(latent.features))
        tensordict.set(model.code.key, model.code.decode(action))
        tensordict.set(("next", self.DETER), latent.deter)
        tensordict.set(("next", self.STOCH), latent.stoch)
        tensordict.set(("next", self.ACTION), action)
        return tensordict

    def _choose(self, columns: Tensor) -> Tensor:
        kind = exploration_type()
        deterministic = kind in (ExplorationType.DETERMINISTIC, ExplorationType.MODE)
        return self.actor.mode(columns) if deterministic else self.actor.sample(columns)
