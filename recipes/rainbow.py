"""Rainbow, DQN with six extensions (Hessel et al. 2018). Discrete actions.

Each extension can be disabled.

kit train rainbow head=quantile seed=1
kit train rainbow noisy=false per_alpha=0
kit train rainbow --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tensordict.nn import TensorDictSequential
from torch.optim import Adam
from torchrl.envs.utils import ExplorationType

from kit import Experiment, SettingError, Trainer, Update, main, make_target_updater
from kit.config import FiniteFloat, NonNegativeFloat, NumAtoms, reject_unused
from kit.hooks import AnnealLearningRate, anneal_epsilon
from kit.modules import EpsilonGreedy, make_q_network
from recipes import dqn

LOSSES = {"value": "DQNLoss", "c51": "CategoricalDQNLoss", "quantile": "QuantileDQNLoss"}


@dataclass
class Config(dqn.Config):
    """Settings for Rainbow: the settings for DQN with different defaults, plus extensions."""

    loss: str = "auto"
    """Loss class: a name from torchrl.objectives, or your own as module:Class. auto: the loss in
    kit.losses for the selected head."""
    dueling: bool = True
    """Whether the Q-network is a dueling network: state value plus advantages (Wang et al.
    2016)."""
    noisy: bool = True
    """Whether to explore with noisy weights (Fortunato et al. 2018) instead of epsilon-greedy."""
    head: Literal["value", "c51", "quantile"] = "c51"
    """Output of the Q-network: expected return (value), categorical return distribution (c51,
    Bellemare et al. 2017) or quantiles of the return (quantile, Dabney et al. 2018)."""
    atoms: NumAtoms = 51
    """Number of atoms in each predicted return distribution."""
    support: list[FiniteFloat] = field(default_factory=lambda: [0.0, 100.0])
    """Smallest and largest return that head=c51 can represent."""
    per_alpha: NonNegativeFloat = 0.5


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="rainbow", parts=parts)
    _check_extensions(cfg)
    env = experiment.make_env(actions="discrete")
    shape: dict[str, Any] = {"dueling": cfg.dueling, "noisy": cfg.noisy}
    if cfg.head != "value":
        shape |= {"atoms": cfg.atoms, "support": cfg.support if cfg.head == "c51" else None}
    network = experiment.make_critic(make_q_network, env, cfg.hidden_sizes, cfg.activation, **shape)
    options = {"delay_value": True, "double_dqn": cfg.double_dqn, "loss_function": "smooth_l1"}
    own = f"kit.losses:{LOSSES[cfg.head]}" if cfg.loss == "auto" else cfg.loss
    loss = experiment.make_loss(make_loss or own, network, **options)
    mode = getattr(loss, "deterministic_sampling_mode", None)
    if cfg.noisy and mode == ExplorationType.DETERMINISTIC:
        reason = "The loss disables weight noise, so the noise scales would not be trained"
        raise SettingError("loss", type(loss).__name__, reason, "Use loss=auto or noisy=false")
    optimizer = experiment.make_optimizer(
        Adam, loss.parameters(), lr=cfg.learning_rate, eps=1.5e-4, fused=True
    )
    hooks: list[Any] = [AnnealLearningRate(optimizer, cfg.lr_schedule)]
    policy = TensorDictSequential(network)
    if not cfg.noisy:
        start, end = cfg.epsilon_start, min(cfg.epsilon_start, cfg.epsilon_end)
        explore = EpsilonGreedy(env, eps_init=start, eps_end=end)
        hooks.append(anneal_epsilon(explore, cfg, experiment.plan))
        policy = TensorDictSequential(network, explore)
    limits: dict[str, Any] = {"max_grad_norm": cfg.max_grad_norm, "compile": cfg.compile}
    every = cfg.target_update_every
    targets = make_target_updater(loss, cfg.tau, every)
    update = Update(loss, optimizer, **limits, target_updater=targets, target_update_every=every)
    policy = policy.select_out_keys("action").to(cfg.device)
    buffer = experiment.make_replay_buffer()
    return experiment.trainer(env, policy, buffer=buffer, update=update, hooks=hooks)


def _check_extensions(cfg: Config) -> None:
    """Reject settings of disabled extensions."""
    if cfg.noisy:
        epsilon = ("epsilon_start", "epsilon_end", "epsilon_decay", "exploration_share")
        reject_unused(cfg, epsilon, "noisy=true explores with noisy weights")
    if cfg.head != "c51":
        reject_unused(cfg, ("support",), f"head={cfg.head} does not use a support")
    if cfg.head == "value":
        reject_unused(cfg, ("atoms",), "head=value predicts no return distribution")


if __name__ == "__main__":
    main(Config, build)
