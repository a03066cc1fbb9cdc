"""Proximal policy optimisation (Schulman et al. 2017), discrete and continuous.

Run it::

    python -m recipes.ppo
    python -m recipes.ppo env.id=HalfCheetah-v5 env.num_envs=4 seed=1 logger=wandb
    python -m recipes.ppo preset=mujoco
    python -m recipes.ppo --help
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from kit.advantages import GAE
from kit.cli.launch import main
from kit.cli.run_folder import Run
from kit.collectors import make_collector
from kit.config.limits import NotNegative, Positive, UnitInterval
from kit.config.settings import EnvConfig, RunConfig, resolve
from kit.envs import make_env
from kit.hooks import AnnealLearningRate, Evaluator, TargetKL
from kit.modules import make_actor, make_body, make_value
from kit.recipe import adapted_env, collector_name, make_plan, whole_run
from kit.steps import make_schedule
from kit.steps.settings import OnPolicySteps
from kit.trainer import Trainer
from kit.update import Update


@dataclass
class Config(RunConfig):
    """Settings of PPO."""

    env: EnvConfig = field(
        default_factory=lambda: EnvConfig(normalize_observation=True, normalize_reward=True)
    )
    steps: Any = field(default_factory=OnPolicySteps)
    hidden_sizes: list[int] = field(default_factory=lambda: [64, 64])
    """widths of the hidden layers."""
    activation: str = "tanh"
    """between them: tanh, sigmoid_tanh (faster on a CPU), relu, elu, silu, gelu."""
    shared_body: bool = False
    """whether policy and value function share their hidden layers."""
    log_scale: float = 0.0
    """logarithm of the initial deviation of continuous actions."""
    loss: str = "ClipPPOLoss"
    """of torchrl.objectives, or module:Class; ClipPPOLoss, KLPENPPOLoss, PPOLoss."""
    clip_epsilon: Positive = 0.2
    """how far the ratio of probabilities may leave 1; ClipPPOLoss only."""
    entropy_coeff: NotNegative = 0.0
    """weight of the entropy bonus."""
    critic_coeff: NotNegative = 0.5
    """weight of the value loss."""
    normalize_advantage: bool = True
    """whether advantages get mean 0 and deviation 1 in each minibatch."""
    gamma: UnitInterval = 0.99
    """discount."""
    gae_lambda: UnitInterval = 0.95
    """weight of longer advantage estimates."""
    learning_rate: Positive = 1e-3
    """of Adam, at the beginning."""
    anneal: Literal["linear", "cosine", "constant"] = "linear"
    """schedule of the learning rate down to 0."""
    clip_norm: Positive = 0.5
    """largest norm of the gradient."""
    target_kl: Positive | None = None
    """divergence beyond which (times 1.5) the rest of an update phase is skipped; null: never."""


def build(
    cfg: Config,
    *,
    loss: type | None = None,
    collector: type | None = None,
    hooks: Iterable[Any] = (),
) -> Trainer:
    """Wire PPO.

    Args:
        cfg: settings.
        loss: class in place of ``cfg.loss``, called with actor and critic.
        collector: class in place of ``cfg.collector``, called as the kit's are.
        hooks: added to the trainer; the kit's or TorchRL's.
    """
    run = Run("ppo", cfg)
    plan = make_plan(cfg.steps, cfg.env, algo="ppo", family="on_policy")
    env_config = adapted_env(cfg.env, plan)
    env = make_env(**env_config, seed=cfg.seed, gamma=cfg.gamma)

    body = make_body(env, cfg.hidden_sizes, cfg.activation) if cfg.shared_body else None
    shape = {"hidden_sizes": cfg.hidden_sizes, "activation": cfg.activation, "body": body}
    actor = make_actor(env, **shape, log_scale=cfg.log_scale).to(cfg.device)
    critic = make_value(env, **shape).to(cfg.device)

    loss_class = loss or resolve(cfg.loss, "torchrl.objectives")
    clip = {"clip_epsilon": cfg.clip_epsilon} if cfg.loss == "ClipPPOLoss" and not loss else {}
    loss_module = loss_class(
        actor,
        critic,
        entropy_coeff=cfg.entropy_coeff,
        critic_coeff=cfg.critic_coeff,
        normalize_advantage=cfg.normalize_advantage,
        loss_critic_type="l2",
        **clip,
    )
    optimizer = torch.optim.Adam(
        loss_module.parameters(), lr=cfg.learning_rate, eps=1e-5, fused=True
    )
    run_length = whole_run(plan)
    schedule = make_schedule(cfg.anneal, cfg.learning_rate, 0.0, run_length["duration"])
    step_hooks = [AnnealLearningRate(optimizer, schedule, counter=run_length["counter"])]
    if cfg.target_kl is not None:
        step_hooks.append(TargetKL(cfg.target_kl))

    evaluation_env = make_env(**{**env_config, "num_envs": plan.evaluation_episodes})
    evaluation_env.normalizer = env.normalizer
    return Trainer(
        plan,
        collector=make_collector(
            collector or collector_name(cfg.collector, plan),
            env,
            actor,
            plan,
            seed=cfg.seed,
            device=cfg.device,
            **cfg.collector_kwargs,
        ),
        advantage=GAE(gamma=cfg.gamma, lmbda=cfg.gae_lambda, value_network=critic),
        update=Update(loss_module, optimizer, clip_norm=cfg.clip_norm, compile=cfg.compile),
        evaluate=Evaluator(evaluation_env, actor, episodes=plan.evaluation_episodes, seed=cfg.seed),
        logger=run.loggers,
        hooks=[*step_hooks, *run.hooks, *hooks],
        folder=run.folder,
        log_every=cfg.log_every,
        checkpoint_every=cfg.checkpoint_every,
        config=run.config,
        resume_from=run.checkpoint,
    )


if __name__ == "__main__":
    main(Config, build, "ppo")
