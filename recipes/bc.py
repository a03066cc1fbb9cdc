"""Behaviour cloning from a dataset (Pomerleau 1988). Discrete and continuous actions.

kit train bc env.id=Pendulum-v1 dataset=[datasets/pendulum-mixed-v0] seed=1
kit train bc --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.optim import Adam

from kit import EnvConfig, Experiment, NetworkConfig, OfflineConfig, Trainer, Update, main
from kit.config import HiddenSizes, PositiveFloat
from kit.modules import make_actor

LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "f": ("BCLoss", {"loss_function": "l2"}),
    "i": ("kit.losses:LikelihoodBCLoss", {}),
}
"""Loss and loss arguments, keyed by action dtype: float (``f``) or integer (``i``)."""


@dataclass
class Config(NetworkConfig, OfflineConfig):
    """Settings for behaviour cloning."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="Pendulum-v1", num_envs=1))
    hidden_sizes: HiddenSizes = field(default_factory=lambda: [64, 64])
    """Hidden layer sizes for the actor."""
    loss: str = "auto"
    """Loss class: a name from torchrl.objectives, or your own as module:Class. auto: squared error
    for continuous actions, negative log-likelihood for discrete actions."""
    learning_rate: PositiveFloat = 1e-3
    """Adam learning rate."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="bc", parts=parts)
    env = experiment.make_env()
    buffer = experiment.make_dataset(env)
    shape: dict[str, Any] = {"hidden_sizes": cfg.hidden_sizes, "activation": cfg.activation}
    kind = env.action_leaves[0].dtype.kind
    actor = experiment.make_actor(
        make_actor, env, **shape, continuous="deterministic" if kind == "f" else "normal"
    )
    name, options = LOSSES["f" if kind == "f" else "i"]
    chosen = make_loss or (name if cfg.loss == "auto" else cfg.loss)
    loss = experiment.make_loss(chosen, actor, **options)
    update = Update(
        loss,
        experiment.make_optimizer(Adam, loss.parameters(), lr=cfg.learning_rate, fused=True),
        max_grad_norm=cfg.max_grad_norm,
        compile=cfg.compile,
    )
    return experiment.trainer(env, actor, buffer=buffer, update=update)


if __name__ == "__main__":
    main(Config, build)
