"""Rainbow (Hessel et al. 2018): DQN with all its extensions, each of which can be left out.

python -m recipes.rainbow head=quantile seed=1
python -m recipes.rainbow noisy=false per_alpha=0
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
    """Settings of Rainbow: those of DQN, with these defaults, and the extensions."""

    loss: str = "auto"
    """Loss of torchrl.objectives, or module:Class; auto: that of kit.losses for the head."""
    dueling: bool = True
    """Whether Q-values are the sum of a state value and advantages (Wang et al. 2016)."""
    noisy: bool = True
    """Whether noise on weights explores (Fortunato et al. 2018), in place of epsilon."""
    head: Literal["value", "c51", "quantile"] = "c51"
    """What is estimated: mean returns or their distribution (Bellemare 2017, Dabney 2018)."""
    atoms: NumAtoms = 51
    """Atoms of each distribution that the Q-networks estimate."""
    support: list[FiniteFloat] = field(default_factory=lambda: [0.0, 100.0])
    """Smallest and largest return of the support of c51."""
    per_alpha: NonNegativeFloat = 0.5


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Wire Rainbow; ``make_loss`` replaces ``cfg.loss``, ``parts`` the parts of the trainer."""
    experiment = Experiment(cfg, algorithm="rainbow", parts=parts)
    _refuse_unused(cfg)
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
        why = "is of weights without their noise, whose deviations would never be learnt"
        raise SettingError("loss", type(loss).__name__, why, ["auto"], "or noisy=false")
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


def _refuse_unused(cfg: Config) -> None:
    """Refuse settings of what is left out."""
    if cfg.noisy:
        epsilon = ("epsilon_start", "epsilon_end", "epsilon_decay", "exploration_share")
        reject_unused(cfg, epsilon, "noise on weights explores")
    if cfg.head != "c51":
        reject_unused(cfg, ("support",), f"head={cfg.head} has none")
    if cfg.head == "value":
        reject_unused(cfg, ("atoms",), "head=value estimates no distribution")


if __name__ == "__main__":
    main(Config, build)
