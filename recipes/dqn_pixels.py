"""DQN from pixels (Mnih et al. 2015). Atari and other image observations.

kit train dqn_pixels preset=atari env.id=ale_py:BreakoutNoFrameskip-v4
kit train dqn_pixels env.id=CarRacing-v3 env.kwargs.continuous=false preprocess=none
kit train dqn_pixels --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tensordict.nn import TensorDictSequential
from torch.optim import Adam

from kit import EnvConfig, Experiment, OffPolicySteps, SettingError, Trainer, Update, main
from kit.config import (
    HiddenSizes,
    NumFrames,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    UnitInterval,
)
from kit.envs import pixel_wrappers
from kit.hooks import AnnealLearningRate, SignReward, anneal_epsilon
from kit.modules import NATURE, EpsilonGreedy, make_q_network
from kit.update import make_target_updater
from recipes import dqn


@dataclass
class Config(dqn.Config):
    """Settings for DQN from pixels: the settings for DQN with different defaults."""

    env: EnvConfig = field(
        default_factory=lambda: EnvConfig(id="ale_py:PongNoFrameskip-v4", num_envs=1)
    )
    steps: OffPolicySteps = field(
        default_factory=lambda: OffPolicySteps(
            total_policy_steps=1_000_000,
            steps_per_env=4,
            learning_starts=20_000,
            replay_ratio="1/4",
            minibatch_size=32,
            evaluation_every=100_000,
        )
    )
    preprocess: Literal["atari", "none"] = "atari"
    """Preprocessing: atari (84 x 84 greyscale, frame skip 4) or none."""
    stacked_frames: NumFrames = 4
    """Number of frames stacked into one observation. The buffer stores only the newest frame of
    each observation."""
    clip_reward: bool = True
    """Whether to train on the sign of each reward."""
    convolutions: list[list[int]] = field(default_factory=lambda: [list(n) for n in NATURE])
    """Channels, kernel size and stride of each convolution."""
    hidden_sizes: HiddenSizes = field(default_factory=lambda: [512])
    buffer_size: PositiveInt = 100_000
    n_step: PositiveInt = 1
    exploration_share: PositiveFraction = 0.1
    epsilon_end: UnitInterval = 0.01
    target_update_every: PositiveInt = 250
    learning_rate: PositiveFloat = 1e-4
    lr_schedule: Literal["linear", "cosine", "constant"] = "constant"


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="dqn", parts=parts)
    wrappers = pixel_wrappers(cfg.preprocess, cfg.stacked_frames)
    env = experiment.make_env(actions="discrete", wrappers=wrappers)
    body: dict[str, Any] = {"dueling": cfg.dueling, "convolutions": cfg.convolutions}
    network = experiment.make_critic(make_q_network, env, cfg.hidden_sizes, cfg.activation, **body)
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
    hooks: list[Any] = [AnnealLearningRate(optimizer, cfg.lr_schedule), epsilon]
    buffer = experiment.make_replay_buffer()
    if cfg.clip_reward and cfg.n_step > 1:
        reason = f"It would clip the sum of n_step={cfg.n_step} rewards instead of each reward"
        raise SettingError("clip_reward", True, reason, "Use clip_reward=false or n_step=1")
    if cfg.clip_reward and cfg.env.normalize_reward:
        reason = "It has no effect because clip_reward=true trains on the sign of rewards"
        advice = "Use env.normalize_reward=false or clip_reward=false"
        raise SettingError("env.normalize_reward", True, reason, advice)
    if cfg.clip_reward:
        hooks.append(SignReward())
    return experiment.trainer(env, policy, buffer=buffer, update=update, hooks=hooks)


if __name__ == "__main__":
    main(Config, build)
