"""Double DQN with n-step returns (van Hasselt et al. 2016). Discrete actions.

kit train dqn env.id=Acrobot-v1 steps.total_policy_steps=100_000 seed=1
kit train dqn --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tensordict.nn import TensorDictSequential
from torch.optim import Adam

from kit import EnvConfig, Experiment, OffPolicyConfig, OffPolicySteps, Trainer, Update, main
from kit.config import (
    HiddenSizes,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    ScheduleName,
    UnitInterval,
)
from kit.hooks import AnnealLearningRate, anneal_epsilon
from kit.modules import EpsilonGreedy, make_q_network
from kit.update import make_target_updater


@dataclass
class Config(OffPolicyConfig):
    """Settings for DQN."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(num_envs=1))
    steps: OffPolicySteps = field(
        default_factory=lambda: OffPolicySteps(
            total_policy_steps=50_000, steps_per_env=250, replay_ratio="1/2", minibatch_size=128
        )
    )
    hidden_sizes: HiddenSizes = field(default_factory=lambda: [128, 128])
    """Hidden layer sizes for the Q-network."""
    activation: str = "relu"
    """Activation function: tanh, sigmoid_tanh (tanh, faster on CPUs), relu, elu, silu or gelu."""
    dueling: bool = False
    """Whether the Q-network is a dueling network: state value plus advantages (Wang et al.
    2016)."""
    loss: str = "DQNLoss"
    """Loss class: a name from torchrl.objectives, or your own as module:Class."""
    double_dqn: bool = True
    """Whether the online network selects the next action and the target network evaluates it
    (double DQN)."""
    epsilon_start: UnitInterval = 1.0
    """Initial probability of a random action."""
    epsilon_end: UnitInterval = 0.04
    """Final probability of a random action. With epsilon_decay, epsilon only approaches this
    value."""
    exploration_share: PositiveFraction = 0.16
    """Fraction of the run over which epsilon decreases linearly."""
    epsilon_decay: UnitInterval | None = None
    """Factor by which the difference between epsilon and epsilon_end is multiplied in each
    iteration. null: epsilon decreases linearly."""
    tau: UnitInterval | None = None
    """Polyak coefficient: weight of the online network in each target update (1: full copy). null:
    0.005 if target_update_every is 1, otherwise 1."""
    target_update_every: PositiveInt = 1
    """Gradient steps between target network updates."""
    n_step: PositiveInt = 3
    """Number of rewards summed before bootstrapping (n-step returns)."""
    learning_rate: PositiveFloat = 2e-3
    """Initial Adam learning rate."""
    lr_schedule: ScheduleName = "linear"
    """Learning-rate schedule: constant; linear or cosine (decay to 0); "piecewise 0.5 0.1"
    (multiplied by 0.1 halfway through the run); or "exponential 0.99" (multiplied by 0.99 after
    each iteration)."""
    max_grad_norm: PositiveFloat | None = 10.0
    """Maximum gradient norm. null: no clipping."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="dqn", parts=parts)
    env = experiment.make_env(actions="discrete")
    network = experiment.make_critic(
        make_q_network, env, cfg.hidden_sizes, cfg.activation, dueling=cfg.dueling
    )
    options = {"delay_value": True, "double_dqn": cfg.double_dqn, "loss_function": "smooth_l1"}
    loss = experiment.make_loss(make_loss or cfg.loss, network, **options)
    start, end = cfg.epsilon_start, min(cfg.epsilon_start, cfg.epsilon_end)
    explore = EpsilonGreedy(env, eps_init=start, eps_end=end)
    policy = TensorDictSequential(network, explore).select_out_keys("action").to(cfg.device)
    optimizer = experiment.make_optimizer(Adam, loss.parameters(), lr=cfg.learning_rate, fused=True)
    every = cfg.target_update_every
    limits: dict[str, Any] = {"max_grad_norm": cfg.max_grad_norm, "compile": cfg.compile}
    targets = make_target_updater(loss, cfg.tau, every)
    update = Update(loss, optimizer, **limits, target_updater=targets, target_update_every=every)
    epsilon = anneal_epsilon(explore, cfg, experiment.plan)
    hooks = [AnnealLearningRate(optimizer, cfg.lr_schedule), epsilon]
    buffer = experiment.make_replay_buffer()
    return experiment.trainer(env, policy, buffer=buffer, update=update, hooks=hooks)


if __name__ == "__main__":
    main(Config, build)
