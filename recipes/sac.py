"""Soft actor-critic (Haarnoja et al. 2018) for continuous actions.

Run it::

    python -m recipes.sac
    python -m recipes.sac preset=mujoco env.id=Hopper-v5 seed=1
    python -m recipes.sac --help
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torchrl.objectives import SoftUpdate

from kit.buffers import make_replay_buffer
from kit.cli.launch import main
from kit.cli.run_folder import Run
from kit.collectors import make_collector
from kit.config.limits import Count, Positive, UnitInterval
from kit.config.settings import EnvConfig, RunConfig, resolve
from kit.envs import make_env
from kit.hooks import Evaluator
from kit.modules import make_action_value, make_actor
from kit.recipe import (
    adapted_env,
    check_continuous,
    collector_name,
    make_plan,
    sampled_transitions,
)
from kit.steps.settings import OffPolicySteps
from kit.trainer import Trainer
from kit.update import Update


@dataclass
class Config(RunConfig):
    """Settings of SAC."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="Pendulum-v1", num_envs=1))
    steps: Any = field(default_factory=OffPolicySteps)
    hidden_sizes: list[int] = field(default_factory=lambda: [64, 64])
    """widths of the hidden layers."""
    activation: str = "relu"
    """between them: tanh, sigmoid_tanh (faster on a CPU), relu, elu, silu, gelu."""
    loss: str = "SACLoss"
    """of torchrl.objectives, or module:Class."""
    critics: Count = 2
    """action-value functions, the least of which is believed."""
    buffer_size: Count = 1_000_000
    """transitions the replay buffer holds."""
    n_step: Count = 1
    """rewards summed before bootstrapping."""
    gamma: UnitInterval = 0.99
    """discount."""
    tau: UnitInterval = 0.005
    """share of the way that target networks go in one gradient step."""
    initial_alpha: Positive = 1.0
    """entropy coefficient at the beginning; it is learnt."""
    target_entropy: float | None = None
    """entropy that it is learnt for; null: minus the number of action dimensions."""
    learning_rate: Positive = 1e-3
    """of Adam, for policy, critics and entropy coefficient."""
    clip_norm: Positive | None = None
    """largest norm of the gradient; null: unclipped."""


def build(
    cfg: Config,
    *,
    loss: type | None = None,
    collector: type | None = None,
    hooks: Iterable[Any] = (),
) -> Trainer:
    """Wire SAC.

    Args:
        cfg: settings.
        loss: class in place of ``cfg.loss``, called with actor and action-value function.
        collector: class in place of ``cfg.collector``, called as the kit's are.
        hooks: added to the trainer; the kit's or TorchRL's.
    """
    run = Run("sac", cfg)
    plan = make_plan(cfg.steps, cfg.env, algo="sac", family="off_policy")
    env_config = adapted_env(cfg.env, plan)
    env = make_env(**env_config, seed=cfg.seed, gamma=cfg.gamma)
    check_continuous(env, "sac")

    shape = {"hidden_sizes": cfg.hidden_sizes, "activation": cfg.activation}
    actor = make_actor(
        env, **shape, continuous="tanh_normal", orthogonal=False, return_log_prob=False
    ).select_out_keys("action")
    critic = make_action_value(env, **shape)

    loss_class = loss or resolve(cfg.loss, "torchrl.objectives")
    actions = env.action_spec.shape[1:].numel()
    loss_module = loss_class(
        actor,
        critic,
        num_qvalue_nets=cfg.critics,
        alpha_init=cfg.initial_alpha,
        target_entropy=-float(actions) if cfg.target_entropy is None else cfg.target_entropy,
        loss_function="l2",
    ).to(cfg.device)
    loss_module.make_value_estimator(gamma=cfg.gamma)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=cfg.learning_rate, fused=True)

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
        buffer=make_replay_buffer(
            cfg.buffer_size,
            sampled_transitions(plan),
            n_step=cfg.n_step,
            gamma=cfg.gamma,
            device=cfg.device,
        ),
        update=Update(
            loss_module,
            optimizer,
            clip_norm=cfg.clip_norm,
            compile=cfg.compile,
            target_updater=SoftUpdate(loss_module, tau=cfg.tau),
        ),
        evaluate=Evaluator(evaluation_env, actor, episodes=plan.evaluation_episodes, seed=cfg.seed),
        logger=run.loggers,
        hooks=[*run.hooks, *hooks],
        folder=run.folder,
        log_every=cfg.log_every,
        checkpoint_every=cfg.checkpoint_every,
        config=run.config,
        resume_from=run.checkpoint,
    )


if __name__ == "__main__":
    main(Config, build, "sac")
