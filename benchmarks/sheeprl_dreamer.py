"""DreamerV3 of sheeprl (``dreamer_v3_5``, that of Hafner et al. 2025) with the kit's weights.

Both have the same layers in the same order, so that parameters are paired module by module. Where
they differ by intent, sheeprl is set to what the kit and the authors' code do: no uniform
probability in the actor's choices (``algo.actor.unimix``; sheeprl's default is that of the paper).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hydra
import numpy as np
import torch
from gymnasium import spaces
from lightning.fabric import Fabric
from sheeprl.algos.dreamer_v3_5.agent import build_agent
from sheeprl.algos.dreamer_v3_5.dreamer_v3_5 import train, update_target_critic
from sheeprl.algos.dreamer_v3_5.utils import Moments
from tensordict import TensorDictBase
from torch import Tensor, nn

from kit.losses import DreamerV3Loss
from kit.modules.world import RSSM, Size
from tests.world.reference import parameters


def configuration(size: Size, images: bool, horizon: int, context: int) -> Any:
    """Return sheeprl's configuration of these widths."""
    model = "algo.world_model"
    settings = {
        "exp": "dreamer_v3_5",
        "env.num_envs": 1,
        "algo.mlp_keys.encoder": [] if images else ["observation"],
        "algo.cnn_keys.encoder": ["observation"] if images else [],
        "algo.cnn_stages": [2, 3],
        "algo.cnn_channels_multiplier": size.depth,
        "algo.dense_units": size.units,
        "algo.horizon": horizon,
        "algo.replay_context": context,
        "algo.actor.unimix": 0,
        f"{model}.discrete_size": size.classes,
        f"{model}.stochastic_size": size.stoch,
        f"{model}.recurrent_model.recurrent_state_size": size.deter,
        f"{model}.recurrent_model.hidden_size": size.hidden,
        f"{model}.recurrent_model.blocks": size.blocks,
        f"{model}.observation_model.block_space": size.blocks,
    }
    with hydra.initialize_config_module("sheeprl.configs", version_base=None):
        return hydra.compose("config", [f"{name}={value}" for name, value in settings.items()])


class Agent:
    """sheeprl's agent with the weights of a loss of the kit.

    Args:
        loss: the kit's.
        shape: of an observation, as the environment gives it.
        make_optimizer: of the parameters; the configured one by default.
    """

    def __init__(
        self,
        loss: DreamerV3Loss,
        shape: tuple[int, ...],
        make_optimizer: Callable[..., Any] | None = None,
    ) -> None:
        model = loss.world_model
        self.code, self.images = model.code, len(shape) == 3
        self.context = int(loss.stored_latents)
        self.cfg = configuration(model.size, self.images, loss.imagination_horizon, self.context)
        self.fabric = Fabric(accelerator="cpu", devices=1)
        seen = (shape[-1], *shape[:2]) if self.images else shape
        space = spaces.Dict({"observation": spaces.Box(-np.inf, np.inf, seen, np.float32)})
        self.actions_dim = (self.code.features,)
        parts = build_agent(self.fabric, self.actions_dim, not self.code.discrete, self.cfg, space)
        self.world_model, self.actor, self.critic, self.slow_critic, self.player = parts
        given = dict(parameters(loss))
        for name, weight in self.named(loss, lambda parameter: parameter.data):
            weight.copy_(given[name].detach().reshape(weight.shape))
        modules = (self.world_model, self.actor, self.critic)
        trained = [parameter for module in modules for parameter in module.parameters()]
        make_optimizer = make_optimizer or hydra.utils.instantiate(
            self.cfg.algo.optimizer, _partial_=True
        )
        self.optimizer = self.fabric.setup_optimizers(make_optimizer(trained))
        moments = self.cfg.algo.actor.moments
        ends = moments.percentile
        self.moments = Moments(moments.decay, moments.max, ends.low, ends.high)
        self.metrics: dict[str, Tensor] = {}
        self.disabled = False

    def named(
        self, loss: DreamerV3Loss, of: Callable[[nn.Parameter], Any]
    ) -> Iterator[tuple[str, Any]]:
        """Yield what ``of`` finds of each parameter, by the kit's names."""
        names = [name for name, _ in parameters(loss)]
        for prefix, modules in self._modules().items():
            ours = [name for name in names if name.startswith(f"{prefix}.")]
            theirs = [parameter for module in modules for parameter in module.parameters()]
            yield from zip(ours, map(of, theirs), strict=True)
        yield from self._split(loss.world_model.rssm, of)

    def _split(self, rssm: RSSM, of: Callable[[nn.Parameter], Any]) -> Iterator[tuple[str, Any]]:
        """Yield as :meth:`named` of the layers that are two in the kit."""
        theirs, name = self.world_model.rssm, "world_model.rssm"
        layer, deter = theirs.representation_model.input_layer, rssm.deter
        weight = of(layer.weight)
        yield f"{name}.posterior_deter.weight", weight[:, :deter]
        yield f"{name}.posterior_embedding.weight", weight[:, deter:]
        yield f"{name}.posterior_embedding.bias", of(layer.bias)
        layer, part = theirs.recurrent_model.hidden[0], deter // rssm.size.blocks
        weight = of(layer.weight)
        yield f"{name}.mix", weight[:, :part]
        yield f"{name}.mix_joined.weight", weight[:, part:].transpose(1, 2)
        yield f"{name}.mix_joined.bias", of(layer.bias)

    def _modules(self) -> dict[str, list[Any]]:
        """Modules whose parameters are those of one of the kit, in the same order."""
        model, rssm = self.world_model, self.world_model.rssm
        recurrent, posterior = rssm.recurrent_model, rssm.representation_model.model
        found = {
            "rssm.from_deter": [recurrent.recurrent_projection],
            "rssm.from_stoch": [recurrent.stochastic_projection],
            "rssm.from_action": [recurrent.action_projection],
            "rssm.mix_norm": [recurrent.hidden[1]],
            "rssm.gates": [recurrent.gates],
            "rssm.prior": [rssm.transition_model],
            "rssm.posterior_norm": [posterior[0]],
            "rssm.posterior_out": [posterior[2]],
            "reward_head": [model.reward_model],
            "continuation_head": [model.continue_model],
        }
        if self.images:
            encoder, decoder = model.encoder.cnn_encoder, model.observation_model.cnn_decoder
            projections = [decoder.recurrent_projection, decoder.stochastic_projection]
            found["image_encoders.0"] = [encoder]
            found["image_decoders.0"] = [*projections, decoder.projection_norm, decoder.model]
        else:
            found["encoder"] = [model.encoder.mlp_encoder]
            found["decoder"] = [model.observation_model.mlp_decoder]
        found = {f"world_model.{name}": modules for name, modules in found.items()}
        others = {
            "actor.network": self.actor,
            "critic_network_params": self.critic,
            "slow": self.slow_critic,
        }
        return found | {name: [module] for name, module in others.items()}

    def gradients(self, loss: DreamerV3Loss) -> dict[str, Tensor]:
        """Return the gradients of the last step by the kit's names, in the kit's shapes."""
        trained = dict(loss.named_parameters())
        found = self.named(loss, lambda parameter: parameter.grad)
        return {name: g.reshape(trained[name].shape) for name, g in found if name in trained}

    # ------------------------------------------------------------------ a gradient step
    def step(self, data: dict[str, Tensor]) -> Any:
        """Make a gradient step; its losses are in ``metrics``."""
        parts = (self.world_model, self.actor, self.critic, self.slow_critic)
        everything = (*parts, self.optimizer, self.moments, data, self, self.actions_dim)
        return train(self.fabric, self.cfg, *everything)

    def update(self, name: str, value: Tensor) -> None:
        """Take in a metric, as sheeprl's aggregator does."""
        self.metrics[name] = value

    def move_slow_critic(self) -> None:
        """Update the slow critic, as sheeprl does after each gradient step."""
        update_target_critic(self.critic.module, self.slow_critic.module, self.cfg.algo.critic.tau)

    def data(self, minibatch: TensorDictBase) -> dict[str, Tensor]:
        """Return a minibatch ``[sequences, time]`` of the kit in sheeprl's words, time first."""
        flags = {name: minibatch[name].float() for name in ("terminated", "done", "is_init")}
        observation = minibatch["observation"]
        found = {
            "observation": observation.movedim(-1, 2) if self.images else observation,
            "actions": self.code.encode(minibatch["action"]),
            "rewards": minibatch["reward"],
            "is_first": flags["is_init"],
            "terminated": flags["terminated"],
            "truncated": flags["done"] - flags["terminated"],
        }
        found = {name: value.transpose(0, 1).contiguous() for name, value in found.items()}
        if not self.context:
            return found
        # The record before is a time step of its own, of which the action and the latent are read.
        before = minibatch["before"][:, 0]
        actions = torch.cat([self.code.encode(before["action"]).unsqueeze(0), found["actions"]])
        padded = {name: torch.cat([value[:1], value]) for name, value in found.items()}
        latent = {name: before["latent", name].unsqueeze(0) for name in ("deter", "stoch")}
        return {**padded, **latent, "actions": actions}
