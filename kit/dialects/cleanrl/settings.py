"""CleanRL (https://github.com/vwxyzjn/cleanrl): each algorithm is a single file.

Its unit is the global step: a policy step in PPO, and a vector step in the off-policy files, which
count from 0 and train strictly after ``learning_starts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kit.dialects.base import (
    OFF_POLICY,
    ON_POLICY,
    Acts,
    Count,
    Dialect,
    Natural,
    Refused,
    linear_or_constant,
)
from kit.steps.errors import SettingError

_PPO: dict[str, Any] = {
    "total_timesteps": 500_000,
    "num_envs": 4,
    "num_steps": 128,
    "num_minibatches": 4,
    "update_epochs": 4,
    "learning_rate": 2.5e-4,
    "anneal_lr": True,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "norm_adv": True,
    "clip_coef": 0.2,
    "clip_vloss": True,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
}
_SAC: dict[str, Any] = {
    "total_timesteps": 1_000_000,
    "num_envs": 1,
    "learning_starts": 5_000,
    "batch_size": 256,
    "buffer_size": 1_000_000,
    "policy_frequency": 2,
    "target_network_frequency": 1,
    "gamma": 0.99,
    "tau": 0.005,
}
_DQN: dict[str, Any] = {
    "total_timesteps": 500_000,
    "num_envs": 1,
    "learning_starts": 10_000,
    "train_frequency": 10,
    "batch_size": 128,
    "buffer_size": 10_000,
    "target_network_frequency": 500,
    "learning_rate": 2.5e-4,
    "gamma": 0.99,
    "tau": 1.0,
    "start_e": 1,
    "end_e": 0.05,
    "exploration_fraction": 0.5,
}
_DEFAULTS = {
    "ppo": _PPO,
    "ppo_continuous_action": _PPO
    | {
        "total_timesteps": 1_000_000,
        "num_envs": 1,
        "num_steps": 2048,
        "num_minibatches": 32,
        "update_epochs": 10,
        "learning_rate": 3e-4,
        "ent_coef": 0.0,
    },
    "ppo_atari": _PPO | {"total_timesteps": 10_000_000, "num_envs": 8, "clip_coef": 0.1},
    "dqn": _DQN,
    "dqn_atari": _DQN
    | {
        "total_timesteps": 10_000_000,
        "learning_starts": 80_000,
        "train_frequency": 4,
        "batch_size": 32,
        "buffer_size": 1_000_000,
        "target_network_frequency": 1_000,
        "learning_rate": 1e-4,
        "end_e": 0.01,
        "exploration_fraction": 0.1,
    },
    "sac_continuous_action": _SAC,
    "td3_continuous_action": _SAC | {"learning_starts": 25_000},
    "ddpg_continuous_action": _SAC | {"learning_starts": 25_000},
}
for _short in ("sac", "td3", "ddpg"):
    _DEFAULTS[_short] = _DEFAULTS[f"{_short}_continuous_action"]
_SACS = ("sac", "sac_continuous_action")


def _target_period(value: Any, args: Any) -> int:
    """Gradient steps between target updates, from steps."""
    every = args.train_frequency or 1
    if value % every:
        why = f"is not a multiple of train_frequency={every}"
        raise SettingError(
            "target_network_frequency", value, why, [value // every * every or every]
        )
    return int(value // every)


@dataclass
class CleanRLSettings(Dialect):
    """``Args`` of CleanRL's files; ``None`` stands for the default of the file."""

    NAME: ClassVar[str] = "cleanrl"
    LIBRARY: ClassVar[str] = "CleanRL"
    VERSIONS: ClassVar[Mapping[str, str]] = {"1.0": "the files as of 2024"}
    ALGORITHMS: ClassVar[Mapping[str, str]] = {
        name: ON_POLICY if name.startswith("ppo") else OFF_POLICY for name in _DEFAULTS
    }
    FACTS: ClassVar[frozenset[str]] = Dialect.FACTS | {"action_repeat", "max_episode_steps"}
    MEANS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("num_steps", "num_minibatches", "update_epochs"), (ON_POLICY,)),
        **dict.fromkeys(("anneal_lr", "gae_lambda", "norm_adv", "clip_coef"), (ON_POLICY,)),
        **dict.fromkeys(("clip_vloss", "ent_coef", "vf_coef"), (ON_POLICY,)),
        **dict.fromkeys(("max_grad_norm", "target_kl"), (ON_POLICY,)),
        **dict.fromkeys(("policy_lr", "q_lr", "alpha", "autotune"), _SACS),
        **dict.fromkeys(("start_e", "end_e", "exploration_fraction"), ("dqn", "dqn_atari")),
        "tau": (OFF_POLICY,),
        **dict.fromkeys(("learning_starts", "batch_size", "buffer_size"), (OFF_POLICY,)),
        "train_frequency": ("dqn", "dqn_atari"),
        "target_network_frequency": (OFF_POLICY,),
        "policy_frequency": tuple(name for name in _DEFAULTS if name[:3] in ("sac", "td3", "ddp")),
    }
    CARRIED: ClassVar[Mapping[str, Acts | Refused]] = {
        "learning_rate": Acts("learning_rate"),
        **dict.fromkeys(("policy_lr", "q_lr"), Refused("use learning_rate: one for all networks")),
        "anneal_lr": Acts("anneal", linear_or_constant),
        "gamma": Acts("gamma"),
        "gae_lambda": Acts("gae_lambda"),
        "norm_adv": Acts("normalize_advantage"),
        "clip_coef": Acts("clip_epsilon"),
        "clip_vloss": Acts("clip_value", lambda value, args: args.clip_coef if value else None),
        "ent_coef": Acts("entropy_coeff"),
        # Its value loss is half a mean of squares.
        "vf_coef": Acts("critic_coeff", lambda value, _: value / 2),
        "max_grad_norm": Acts("max_grad_norm"),
        # It stops beyond the threshold itself, the kit beyond 1.5 times of it.
        "target_kl": Acts("target_kl", lambda value, _: value / 1.5),
        "tau": Acts("tau"),
        "alpha": Refused("the entropy coefficient is learnt: say initial_alpha of the recipe"),
        "autotune": Refused("SAC learns its entropy coefficient", accepted=(True,)),
        "buffer_size": Acts("buffer_size"),
        "policy_frequency": Acts("policy_delay"),
        "target_network_frequency": Acts("target_update_every", _target_period),
        "start_e": Acts("epsilon_start"),
        "end_e": Acts("epsilon_end"),
        "exploration_fraction": Acts("exploration_share"),
    }

    total_timesteps: Natural | None = None
    """policy steps (PPO), rounded down to whole batches; steps of all environments (off-policy)."""
    num_envs: Count | None = None
    """environments; DQN has one."""
    num_steps: Count | None = None
    """policy steps of each environment in one batch (PPO)."""
    num_minibatches: Count | None = None
    """minibatches of a batch (PPO): each has ``num_envs * num_steps // num_minibatches`` steps."""
    update_epochs: Natural | None = None
    """passes over a batch (PPO)."""
    train_frequency: Count | None = None
    """steps between gradient steps (DQN): one at each multiple, counted from 0."""
    learning_starts: Natural | None = None
    """steps with random actions; training begins strictly after them."""
    batch_size: Count | None = None
    """transitions in a minibatch (off-policy)."""
    buffer_size: Count | None = None
    """transitions in the replay buffer."""
    policy_frequency: Count | None = None
    """gradient steps of the critic per visit to the actor (SAC, TD3, DDPG)."""
    target_network_frequency: Count | None = None
    """steps between target updates."""
    learning_rate: float | None = None
    """learning rate (all but SAC)."""
    policy_lr: float | None = None
    """learning rate of the policy (SAC)."""
    q_lr: float | None = None
    """learning rate of critics and entropy coefficient (SAC)."""
    anneal_lr: bool | None = None
    """whether the learning rate falls linearly (PPO), to one iteration's share."""
    gamma: float | None = None
    """discount."""
    gae_lambda: float | None = None
    """weight of longer advantage estimates (PPO)."""
    norm_adv: bool | None = None
    """whether advantages are normalised in each minibatch (PPO)."""
    clip_coef: float | None = None
    """clipping range of the probability ratio (PPO)."""
    clip_vloss: bool | None = None
    """whether the value is clipped, too, in the same range (PPO)."""
    ent_coef: float | None = None
    """weight of the entropy (PPO)."""
    vf_coef: float | None = None
    """weight of the value loss, which is half a mean of squares (PPO)."""
    max_grad_norm: float | None = None
    """largest norm of the gradient (PPO)."""
    target_kl: float | None = None
    """KL divergence beyond which an update stops, asked after each epoch (PPO)."""
    tau: float | None = None
    """Polyak coefficient of the target networks (off-policy)."""
    alpha: float | None = None
    """fixed entropy coefficient (SAC without autotune)."""
    autotune: bool | None = None
    """whether the entropy coefficient is learnt (SAC)."""
    start_e: float | None = None
    """first epsilon (DQN)."""
    end_e: float | None = None
    """last epsilon (DQN)."""
    exploration_fraction: float | None = None
    """share of the run in which epsilon falls (DQN)."""
    action_repeat: Count = field(default=1, kw_only=True)
    """env steps one action is held for; a wrapper's business."""
    max_episode_steps: Count | None = field(default=None, kw_only=True)
    """policy steps after which an episode is truncated; a wrapper's business."""
    version: str = field(default="1.0", kw_only=True)
    """behaviour to reproduce; see ``VERSIONS``."""

    def _guess(self) -> str:
        if self.train_frequency is not None:
            return "dqn"
        off_policy = (self.learning_starts, self.batch_size, self.policy_frequency)
        return "sac" if any(value is not None for value in off_policy) else "ppo"

    def _defaults(self) -> Mapping[str, Any]:
        algo = {ON_POLICY: "ppo", OFF_POLICY: "sac"}.get(str(self.algo), str(self.algo))
        return _DEFAULTS[algo]
