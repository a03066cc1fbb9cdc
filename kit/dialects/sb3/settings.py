"""The vocabulary of Stable-Baselines3 (https://github.com/DLR-RM/stable-baselines3).

Its unit is the timestep, the policy step here: a vector step of ``n_envs`` environments is that
many. ``n_steps``, ``train_freq`` and ``eval_freq`` count vector steps, and ``gradient_steps`` is
per rollout, not per timestep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any, ClassVar

from kit.dialects.base import OFF_POLICY, ON_POLICY, Acts, Count, Dialect, Natural, Refused
from kit.steps.errors import LARGEST, SettingError, one_of, whole_number

_ACTOR_CRITIC = {"gamma": 0.99, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5}
_PPO = {"gae_lambda": 0.95, "normalize_advantage": True, "clip_range": 0.2, "learning_rate": 3e-4}
_A2C = {"gae_lambda": 1.0, "normalize_advantage": False, "learning_rate": 7e-4}
_OFF_POLICY: dict[str, Any] = {
    "gamma": 0.99,
    "tau": 0.005,
    "learning_starts": 100,
    "batch_size": 256,
    "train_freq": 1,
    "gradient_steps": 1,
    "buffer_size": 1_000_000,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": {"n_steps": 2048, "batch_size": 64, "n_epochs": 10} | _ACTOR_CRITIC | _PPO,
    "a2c": {"n_steps": 5, "n_epochs": 1} | _ACTOR_CRITIC | _A2C,
    "sac": _OFF_POLICY | {"target_update_interval": 1, "learning_rate": 3e-4, "ent_coef": "auto"},
    "td3": _OFF_POLICY | {"policy_delay": 2, "learning_rate": 1e-3},
    "ddpg": _OFF_POLICY | {"policy_delay": 1, "learning_rate": 1e-3},
    "dqn": _OFF_POLICY
    | {
        "batch_size": 32,
        "train_freq": 4,
        "target_update_interval": 10_000,
        "learning_rate": 1e-4,
        "tau": 1.0,
        "max_grad_norm": 10,
        "exploration_fraction": 0.1,
        "exploration_initial_eps": 1.0,
        "exploration_final_eps": 0.05,
    },
}


def _hidden_sizes(value: Any, settings: Any) -> Any:
    """``net_arch`` of ``policy_kwargs``, as one list for actor and critics."""
    del settings
    others = set(value) - {"net_arch"} if isinstance(value, Mapping) else {"net_arch"}
    sizes = value.get("net_arch") if not others else None
    widths = [*sizes.values()] if isinstance(sizes, Mapping) else [sizes]
    if others or any(width != widths[0] for width in widths):
        why = "is more than the widths of hidden layers, the same for actor and critic"
        raise SettingError("policy_kwargs", value, why, "use {net_arch: [64, 64]}")
    return [*(widths[0] or ())]


def _target_period(value: Any, settings: Any) -> int:
    """Gradient steps between target updates; DQN's interval is in timesteps."""
    if settings.algo != "dqn":
        return int(value)
    every, _ = settings.frequency()
    steps = Fraction(value * settings.gradient_steps, every * settings.n_envs)
    if steps.denominator != 1 or steps < 1:
        why = f"timesteps are {steps} gradient steps"
        raise SettingError("target_update_interval", value, why, [every * settings.n_envs])
    return int(steps)


def _alpha(value: Any, settings: Any) -> float:
    """``auto_0.1``: the first entropy coefficient of SAC, which is learnt."""
    del settings
    name, _, first = str(value).partition("_")
    if name != "auto":
        raise SettingError("ent_coef", value, "is fixed, and SAC learns it here", [f"auto_{value}"])
    return float(first or 1.0)


@dataclass
class SB3Settings(Dialect):
    """Settings of Stable-Baselines3; ``None`` stands for the default of the algorithm."""

    NAME: ClassVar[str] = "sb3"
    LIBRARY: ClassVar[str] = "Stable-Baselines3"
    VERSIONS: ClassVar[Mapping[str, str]] = {
        "2.9.2": "the code of 2.9.2; training begins strictly after learning_starts",
        "documented": "the docstrings as they read: training begins at learning_starts",
    }
    ALGORITHMS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("ppo", "a2c"), ON_POLICY),
        **dict.fromkeys(("sac", "td3", "ddpg", "dqn"), OFF_POLICY),
    }
    FACTS: ClassVar[frozenset[str]] = Dialect.FACTS | {
        "n_envs",
        "episode_length",
        "action_repeat",
        "max_episode_steps",
    }
    MEANS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "n_epochs": ("ppo",),
        "learning_starts": (OFF_POLICY,),
        "train_freq": (OFF_POLICY,),
        "gradient_steps": (OFF_POLICY,),
        "buffer_size": (OFF_POLICY,),
        **dict.fromkeys(("gae_lambda", "normalize_advantage", "vf_coef"), (ON_POLICY,)),
        **dict.fromkeys(("clip_range", "clip_range_vf", "target_kl"), ("ppo",)),
        "tau": (OFF_POLICY,),
        "ent_coef": (ON_POLICY, "sac"),
        "target_entropy": ("sac",),
        "max_grad_norm": (ON_POLICY, "dqn"),
        "use_sde": (ON_POLICY, "sac"),
        **dict.fromkeys(
            ("exploration_fraction", "exploration_initial_eps", "exploration_final_eps"), ("dqn",)
        ),
        "target_update_interval": ("sac", "dqn"),
        "policy_delay": ("td3", "ddpg"),
    }
    CARRIED: ClassVar[Mapping[str, Acts | Refused]] = {
        "policy": Refused(
            "recipes make their networks from hidden_sizes, as MlpPolicy", accepted=("MlpPolicy",)
        ),
        "policy_kwargs": Acts("hidden_sizes", _hidden_sizes),
        "n_steps": Acts("n_step", family=OFF_POLICY),
        "buffer_size": Acts("buffer_size"),
        "target_update_interval": Acts("target_update_every", _target_period),
        "policy_delay": Acts("policy_delay"),
        "learning_rate": Acts("learning_rate"),
        "gamma": Acts("gamma"),
        "gae_lambda": Acts("gae_lambda"),
        "clip_range": Acts("clip_epsilon"),
        "clip_range_vf": Acts("clip_value"),
        "normalize_advantage": Acts("normalize_advantage"),
        "ent_coef": Acts(
            "entropy_coeff", family=ON_POLICY, otherwise=Acts("initial_alpha", _alpha)
        ),
        "vf_coef": Acts("critic_coeff"),
        "max_grad_norm": Acts("max_grad_norm"),
        "target_kl": Acts("target_kl"),
        "tau": Acts("tau"),
        "target_entropy": Acts(
            "target_entropy", lambda value, _: None if value == "auto" else value
        ),
        "use_sde": Refused("recipes sample each action anew"),
        "exploration_fraction": Acts("exploration_share"),
        "exploration_initial_eps": Acts("epsilon_start"),
        "exploration_final_eps": Acts("epsilon_end"),
    }

    PATHS: ClassVar[Mapping[str, str]] = {"n_timesteps": "total_timesteps"}

    total_timesteps: Natural = 1_000_000
    """timesteps of the run, rounded up to whole rollouts; the argument of ``learn``."""
    n_steps: Count | None = None
    """vector steps of one rollout (PPO, A2C): ``n_steps * n_envs`` timesteps; rewards of an n-step
    return (off-policy)."""
    batch_size: Count | None = None
    """transitions in a minibatch; the last one of an epoch is smaller."""
    n_epochs: Count | None = None
    """passes over a rollout (PPO)."""
    train_freq: Any = None
    """vector steps of one rollout (off-policy), or ``(2, "episode")``: whole episodes."""
    gradient_steps: Annotated[int, -LARGEST] | None = None
    """gradient steps after each rollout, whatever ``n_envs``; less than 0: as many as its
    timesteps."""
    learning_starts: Natural | None = None
    """timesteps with random actions, rounded up to vector steps; training begins at the first
    rollout that ends strictly after them."""
    buffer_size: Count | None = None
    """transitions in the replay buffer."""
    target_update_interval: Count | None = None
    """timesteps (DQN) or gradient steps (SAC) between target updates."""
    policy_delay: Count | None = None
    """gradient steps of the critic per step of the actor (TD3, DDPG)."""
    learning_rate: Any = None
    """learning rate."""
    policy: str | None = None
    """class of networks; ``MlpPolicy`` is what recipes make."""
    policy_kwargs: Mapping[str, Any] | None = None
    """arguments of the networks: ``{net_arch: [64, 64]}``, widths of the hidden layers."""
    gamma: float | None = None
    """discount."""
    gae_lambda: float | None = None
    """weight of longer advantage estimates (PPO, A2C)."""
    clip_range: float | None = None
    """clipping range of the probability ratio (PPO)."""
    clip_range_vf: float | None = None
    """clipping range of the value (PPO); ``None``: not clipped."""
    normalize_advantage: bool | None = None
    """whether advantages get mean 0 and deviation 1 in each minibatch (PPO, A2C)."""
    ent_coef: Any = None
    """weight of the entropy; for SAC ``auto``, or ``auto_0.1`` with its first value."""
    vf_coef: float | None = None
    """weight of the value loss (PPO, A2C)."""
    max_grad_norm: float | None = None
    """largest norm of the gradient (PPO, A2C, DQN)."""
    target_kl: float | None = None
    """KL divergence beyond 1.5 times of which an update stops (PPO); ``None``: never."""
    tau: float | None = None
    """Polyak coefficient of the target networks (off-policy)."""
    target_entropy: Any = None
    """entropy that SAC learns its coefficient for; ``auto``: minus the action dimensions."""
    use_sde: bool = False
    """whether exploration noise depends on the state (gSDE)."""
    exploration_fraction: float | None = None
    """share of the run in which epsilon falls (DQN)."""
    exploration_initial_eps: float | None = None
    """first epsilon (DQN)."""
    exploration_final_eps: float | None = None
    """last epsilon (DQN)."""
    eval_freq: Count | None = None
    """vector steps between evaluations (``EvalCallback``); ``None``: no evaluation."""
    n_eval_episodes: Count = 5
    """episodes of one evaluation."""
    n_envs: Count = field(default=1, kw_only=True)
    """environments."""
    episode_length: Count | None = field(default=None, kw_only=True)
    """timesteps of every episode, where whole episodes are collected."""
    action_repeat: Count = field(default=1, kw_only=True)
    """env steps one action is held for; a wrapper's business."""
    max_episode_steps: Count | None = field(default=None, kw_only=True)
    """policy steps after which an episode is truncated; a wrapper's business."""
    version: str = field(default="2.9.2", kw_only=True)
    """behaviour to reproduce; see ``VERSIONS``."""

    def __post_init__(self) -> None:
        if isinstance(self.train_freq, list):
            self.train_freq = tuple(self.train_freq)

    def _guess(self) -> str:
        off_policy = ("train_freq", "gradient_steps", "learning_starts", "buffer_size")
        if any(getattr(self, name) is not None for name in off_policy):
            return "td3" if self.policy_delay is not None else "sac"
        return "ppo"

    def _defaults(self) -> Mapping[str, Any]:
        algo = {ON_POLICY: "ppo", OFF_POLICY: "sac"}.get(str(self.algo), str(self.algo))
        return _DEFAULTS[algo]

    def frequency(self) -> tuple[int, str]:
        """Return ``train_freq`` as a number and its unit, ``step`` or ``episode``."""
        given = self.train_freq
        if isinstance(given, str):  # "1,episode"
            number, _, unit = given.strip("()[] ").partition(",")
            given = (int(number) if number.strip().isdecimal() else number, unit.strip(" '\""))
        if not isinstance(given, (tuple, Sequence)) or isinstance(given, str):
            return whole_number("train_freq", given, 1), "step"
        if len(given) != 2:
            raise SettingError("train_freq", given, "is no pair of number and unit", [(1, "step")])
        unit = one_of("train_freq", given[1], ("step", "episode"))
        if unit == "episode" and self.n_envs > 1:
            raise SettingError(
                "train_freq", given, "counts episodes, which needs n_envs=1", [(1, "step")]
            )
        return whole_number("train_freq", given[0], 1), unit
