"""Policy that filters observations with a world model and acts on the latent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer
from torchrl.envs.utils import ExplorationType, exploration_type

from kit.modules.heads import masked
from kit.modules.networks import one_hot
from kit.modules.world.actions import Behaviour
from kit.modules.world.model import WorldModel
from kit.modules.world.rssm import Latent


class Player(TensorDictModuleBase):  # type: ignore[misc, unused-ignore]
    """A recurrent policy whose hidden state is the latent of a world model.

    Reads the observations and the hidden state, which also includes the previous action. Writes
    ``action`` and the next hidden state. The hidden state has private keys, which batches omit.
    Actions are sampled if the exploration type is random; otherwise, the mean or the most probable
    action is used. Masked actions are never chosen.

    Args:
        world_model: world model that filters observations.
        actor: actor that reads the latent's features.
        exploration_noise: standard deviation of the noise added to sampled continuous actions. The
            noise is added to actions that are scaled to [-1, 1], and the sum is clipped.
        epsilon: probability of a random action, if actions are discrete and sampled.
        stored_latents: whether to also write the latent under ``"latent"``, for replay.

    Attributes:
        stored: replay-buffer entries for an unknown latent, keyed by name; empty if latents are not
            stored.
    """

    DETER, STOCH, ACTION = "_deter", "_stoch", "_previous_action"
    HIDDEN = (DETER, STOCH, ACTION)

    def __init__(
        self,
        world_model: WorldModel,
        actor: Behaviour,
        exploration_noise: float = 0.0,
        stored_latents: bool = False,
        *,
        epsilon: float = 0.0,
    ) -> None:
        super().__init__()
        self.exploration_noise, self.epsilon = exploration_noise, epsilon
        self.world_model, self.actor = world_model, actor
        self.in_keys = [*world_model.observation_keys, *self.HIDDEN]
        self.out_keys: list[Any] = [world_model.code.key, *(("next", key) for key in self.HIDDEN)]
        initial = world_model.rssm.packed(world_model.rssm.initial(1)) if stored_latents else {}
        self.stored = {name: torch.zeros_like(value[0]) for name, value in initial.items()}
        self.out_keys += [("latent", name) for name in self.stored]

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Return the transform that initialises each episode's hidden state to zeros."""
        rssm = self.world_model.rssm
        widths = (rssm.deter, rssm.stoch, rssm.action_features)
        specs = {key: Unbounded((width,)) for key, width in zip(self.HIDDEN, widths)}
        return TensorDictPrimer(specs, expand_specs=True)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action and the next hidden state."""
        model = self.world_model
        before = Latent(tensordict.get(self.DETER), tensordict.get(self.STOCH))
        embedding = model.encode(model.targets(tensordict))
        deter = model.rssm.recur(before, model.rssm.action(tensordict.get(self.ACTION)))
        parameters = model.rssm.correct(deter, model.rssm.posterior_embedding(embedding))
        noise = model.rssm.noise(*deter.shape[:-1], device=deter.device)
        latent = Latent(deter, model.rssm.sample(parameters, noise).detach())
        masks = [tensordict.get(key) for key in model.code.masks]
        action = self._choose(self.actor(latent.features), masks)
        tensordict.set(model.code.key, model.code.decode(action))
        tensordict.set(("next", self.DETER), latent.deter)
        tensordict.set(("next", self.STOCH), latent.stoch)
        tensordict.set(("next", self.ACTION), action)
        if self.stored:
            for name, value in model.rssm.packed(latent).items():
                tensordict.set(("latent", name), value)
        return tensordict

    def remember(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Store the action in the TensorDict as the next step's previous action."""
        code = self.world_model.code
        return tensordict.set(("next", self.ACTION), code.encode(tensordict.get(code.key)))

    def _choose(self, columns: Tensor, masks: Sequence[Tensor] = ()) -> Tensor:
        for mask in masks:
            columns = masked(columns, mask)
        if exploration_type() not in (ExplorationType.RANDOM, None):
            return self.actor.mode(columns)
        action = (_drawn(columns) if masks else self.actor.sample(columns)).detach()
        if self.exploration_noise and not self.actor.code.discrete:
            noise = self.exploration_noise * torch.randn_like(action)
            action = (action + noise).clamp(-1.0, 1.0)
        if self.epsilon and self.actor.code.discrete:
            uniform = torch.zeros_like(action)
            for mask in masks:
                uniform = masked(uniform, mask)
            explores = torch.rand_like(action[..., :1]) < self.epsilon
            action = torch.where(explores, _drawn(uniform), action)
        return action


def _drawn(logits: Tensor) -> Tensor:
    """Return one-hot samples (Gumbel-max), which never are classes with a very low logit."""
    gumbel = -(-torch.rand_like(logits).log()).log()
    return one_hot((logits + gumbel).argmax(-1), logits.shape[-1])
