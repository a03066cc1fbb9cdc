"""The vocabulary of Stable-Baselines3 (https://github.com/DLR-RM/stable-baselines3).

Its unit is the timestep, the policy step here: a vector step of ``n_envs`` environments is that
many. ``n_steps``, ``train_freq`` and ``eval_freq`` count vector steps, and ``gradient_steps`` is
per rollout, not per timestep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import Annotated, Any, ClassVar, Literal, Self

from kit.dialects.base import OFF_POLICY, ON_POLICY, WrappedDialect
from kit.dialects.fields import Acts, acts, counts, fact, refused
from kit.steps.errors import (
    LARGEST,
    Count,
    Natural,
    SettingError,
    one_of,
    real_number,
    whole_number,
)

# fmt: off
_ACTOR_CRITIC = {"gamma": 0.99, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5}
_OFF_POLICY: dict[str, Any] = {
    "gamma": 0.99, "tau": 0.005, "learning_starts": 100, "batch_size": 256, "train_freq": 1,
    "gradient_steps": 1, "buffer_size": 1_000_000,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": _ACTOR_CRITIC | {
        "n_steps": 2048, "batch_size": 64, "n_epochs": 10, "gae_lambda": 0.95,
        "normalize_advantage": True, "clip_range": 0.2, "learning_rate": 3e-4,
    },
    "a2c": _ACTOR_CRITIC | {
        "n_steps": 5, "n_epochs": 1, "gae_lambda": 1.0, "normalize_advantage": False,
        "learning_rate": 7e-4,
    },
    "sac": _OFF_POLICY | {"target_update_interval": 1, "learning_rate": 3e-4, "ent_coef": "auto"},
    "td3": _OFF_POLICY | {
        "policy_delay": 2, "learning_rate": 1e-3, "target_policy_noise": 0.2,
        "target_noise_clip": 0.5,
    },
    "ddpg": _OFF_POLICY | {"policy_delay": 1, "learning_rate": 1e-3},
    "dqn": _OFF_POLICY | {
        "batch_size": 32, "train_freq": 4, "target_update_interval": 10_000, "learning_rate": 1e-4,
        "tau": 1.0, "max_grad_norm": 10, "exploration_fraction": 0.1,
        "exploration_initial_eps": 1.0, "exploration_final_eps": 0.05,
    },
}
# fmt: on


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
    envs, rollout, updates = settings.n_envs, settings.rollout(), settings.gradient_steps
    timesteps: int = max(value // envs, 1) * envs  # of whole vector steps
    if updates <= 0:  # one for each timestep, or none at all
        return timesteps
    steps = Fraction(timesteps * updates, rollout)
    if steps.denominator != 1:
        why = f"timesteps are {steps} gradient steps"
        least = rollout // gcd(rollout, updates)
        nearest = max(round(Fraction(value, least)), 1) * least
        raise SettingError("target_update_interval", value, why, [nearest])
    return int(steps)


def _alpha(value: Any, settings: Any) -> float:
    """The entropy coefficient of SAC: its first value where it is learnt, such as ``auto_0.1``."""
    del settings
    coefficient = _first_alpha(value)
    if coefficient <= 0:
        raise SettingError("ent_coef", value, "is not positive", [0.01])
    return coefficient


def _first_alpha(value: Any) -> float:
    name, _, first = str(value).partition("_")
    if name != "auto":
        return real_number("ent_coef", value)
    try:
        return float(first or 1.0)
    except ValueError:
        why = "does not begin with a number after auto_"
        raise SettingError("ent_coef", value, why, ["auto", "auto_0.1"]) from None


def _is_fixed(value: Any, settings: Any) -> bool | None:
    """Whether the entropy coefficient of SAC is a number, and stays as it is."""
    del settings
    return None if str(value).startswith("auto") else True


def _first_of(field: str) -> Callable[[Any, Any], float]:
    """What reads the first value of a field: a number, also of a schedule ``lin_1e-3``."""

    def first(value: Any, settings: Any) -> float:
        del settings
        try:
            return float(str(value).removeprefix("lin_"))
        except ValueError:
            why = "is neither a number nor a linear schedule"
            raise SettingError(field, value, why, [0.001, "lin_0.001"]) from None

    return first


def _schedule(value: Any, settings: Any) -> str | None:
    """Whether it falls; ``None`` for a number."""
    del settings
    return "linear" if str(value).startswith("lin_") else None


_RAW: dict[str, Any] = {
    "env.normalize_observation": False,
    "env.normalize_reward": False,
}
_UNSAID_ACTOR_CRITIC: dict[str, Any] = {**_RAW, "anneal": "constant", "hidden_sizes": [64, 64]}
_CRITICS: dict[str, Any] = {"n_step": 1, "activation": "relu"}
_UNSAID: dict[str, dict[str, Any]] = {
    "ppo": _UNSAID_ACTOR_CRITIC | {"activation": "tanh"},
    "a2c": _UNSAID_ACTOR_CRITIC | {"activation": "tanh"},
    "dqn": _UNSAID_ACTOR_CRITIC | _CRITICS | {"double_dqn": False, "dueling": False},
    "sac": {**_RAW, **_CRITICS, "hidden_sizes": [256, 256]},
    "td3": {**_RAW, **_CRITICS, "hidden_sizes": [400, 300], "exploration_noise": 0.0},
    "ddpg": {**_RAW, **_CRITICS, "hidden_sizes": [400, 300], "exploration_noise": 0.0},
}


@dataclass
class SB3Settings(WrappedDialect):
    """Settings of Stable-Baselines3; ``None`` stands for the default of the algorithm."""

    NAME = "sb3"
    LIBRARY = "Stable-Baselines3"
    VERSIONS: ClassVar = {
        "2.9.2": "the code of 2.9.2; training begins strictly after learning_starts",
        "documented": "the docstrings as they read: training begins at learning_starts",
    }
    ALGORITHMS: ClassVar = {
        **dict.fromkeys(("ppo", "a2c"), ON_POLICY),
        **dict.fromkeys(("sac", "td3", "ddpg", "dqn"), OFF_POLICY),
    }
    IMPLIED: ClassVar = {
        "td3": ("policy_delay",),
        "sac": ("train_freq", "gradient_steps", "learning_starts", "buffer_size"),
    }
    DEFAULTS: ClassVar = _DEFAULTS
    UNSAID: ClassVar = _UNSAID
    TOTAL = "total_timesteps"
    CANNOT: ClassVar = {"world_size": (1, "it has one process")}
    PATHS: ClassVar = {"n_timesteps": "total_timesteps"}

    total_timesteps: Natural = 1_000_000
    """timesteps of the run, rounded up to whole rollouts; the argument of ``learn``."""
    n_steps: Count = acts("n_step", family=OFF_POLICY)
    """vector steps of one rollout (PPO, A2C): ``n_steps * n_envs`` timesteps; rewards of an n-step
    return (off-policy)."""
    batch_size: Count | None = None
    """transitions in a minibatch; the last one of an epoch is smaller."""
    n_epochs: Count = counts(only="ppo")
    """passes over a rollout (PPO)."""
    train_freq: Any = counts(only=OFF_POLICY)
    """vector steps of one rollout (off-policy), or ``(2, "episode")``: whole episodes."""
    gradient_steps: Annotated[int, -LARGEST] = counts(only=OFF_POLICY)
    """gradient steps after each rollout, whatever ``n_envs``; less than 0: as many as its
    timesteps."""
    learning_starts: Natural = counts(only=OFF_POLICY)
    """timesteps with random actions, rounded up to vector steps; training begins at the first
    rollout that ends strictly after them."""
    buffer_size: Count = acts("buffer_size", only=OFF_POLICY)
    """transitions in the replay buffer."""
    target_update_interval: Count = acts(
        "target_update_every", None, _target_period, only=("sac", "dqn")
    )
    """timesteps (DQN) or gradient steps (SAC) between target updates."""
    policy_delay: Count = acts("policy_delay", only=("td3", "ddpg"))
    """gradient steps of the critic per step of the actor (TD3, DDPG)."""
    target_policy_noise: float = acts("policy_noise", only="td3")
    """deviation of the noise on target actions, which are scaled to [-1, 1] (TD3)."""
    target_noise_clip: float = acts("noise_clip", only="td3")
    """largest noise on target actions (TD3)."""
    noise_type: str | None = refused(
        "recipes add normal noise", accepted=("normal",), only=("td3", "ddpg")
    )
    """noise on actions, of RL Zoo: ``normal`` (TD3, DDPG)."""
    noise_std: float | None = acts("exploration_noise", only=("td3", "ddpg"))
    """its deviation, of actions scaled to [-1, 1], of RL Zoo; ``None``: there is no noise."""
    learning_rate: Any = acts(
        "learning_rate", None, _first_of("learning_rate"), also=Acts("anneal", _schedule)
    )
    """learning rate, which is constant; ``lin_1e-3`` (of RL Zoo): falls linearly to zero."""
    policy: Literal["MlpPolicy", "CnnPolicy", "MultiInputPolicy"] | None = refused(
        "recipes make their networks from hidden_sizes, as MlpPolicy", accepted=("MlpPolicy",)
    )
    """class of networks; ``MlpPolicy`` is what recipes make."""
    policy_kwargs: Mapping[str, Any] | None = acts("hidden_sizes", None, _hidden_sizes)
    """arguments of the networks: ``{net_arch: [64, 64]}``, widths of the hidden layers."""
    gamma: float = acts("gamma")
    """discount."""
    gae_lambda: float = acts("gae_lambda", only=ON_POLICY)
    """weight of longer advantage estimates (PPO, A2C)."""
    clip_range: Any = acts(
        "clip_epsilon",
        None,
        _first_of("clip_range"),
        only="ppo",
        also=Acts("anneal_clip", _schedule),
    )
    """clipping range of the probability ratio (PPO), constant; ``lin_0.2``: falls linearly."""
    clip_range_vf: float | None = acts("clip_value", only="ppo")
    """clipping range of the value (PPO); ``None``: not clipped."""
    normalize_advantage: bool = acts("normalize_advantage", only=ON_POLICY)
    """whether advantages get mean 0 and deviation 1 in each minibatch (PPO, A2C)."""
    ent_coef: Any = acts(
        "entropy_coeff",
        only=(ON_POLICY, "sac"),
        family=ON_POLICY,
        otherwise=Acts("initial_alpha", _alpha, also=Acts("fixed_alpha", _is_fixed)),
    )
    """weight of the entropy; for SAC also ``auto``: learnt, from 1, or ``auto_0.1``: from 0.1."""
    vf_coef: float = acts("critic_coeff", only=ON_POLICY)
    """weight of the value loss (PPO, A2C)."""
    max_grad_norm: float = acts("max_grad_norm", only=(ON_POLICY, "dqn"))
    """largest norm of the gradient (PPO, A2C, DQN)."""
    target_kl: float | None = acts("target_kl", only="ppo")
    """KL divergence beyond 1.5 times of which an update stops (PPO); ``None``: never."""
    tau: float = acts("tau", only=OFF_POLICY)
    """Polyak coefficient of the target networks (off-policy)."""
    target_entropy: Any = acts(
        "target_entropy", None, lambda value, _: None if value == "auto" else value, only="sac"
    )
    """entropy that SAC learns its coefficient for, of actions scaled to [-1, 1], in recipes of
    actions in their own units; ``auto``: minus the action dimensions."""
    use_sde: bool = refused("recipes sample each action again", False, only=(ON_POLICY, "sac"))
    """whether exploration noise depends on the state (gSDE)."""
    exploration_fraction: float = acts("exploration_share", only="dqn")
    """share of the run in which epsilon falls (DQN)."""
    exploration_initial_eps: float = acts("epsilon_start", only="dqn")
    """first epsilon (DQN)."""
    exploration_final_eps: float = acts("epsilon_end", only="dqn")
    """last epsilon (DQN)."""
    eval_freq: Count | None = None
    """vector steps between evaluations (``EvalCallback``); ``None``: no evaluation."""
    n_eval_episodes: Count = counts("evaluation_episodes", 5)
    """episodes of one evaluation."""
    n_envs: Count = fact("num_envs", 1)
    """environments."""
    episode_length: Count | None = fact()
    """timesteps of every episode, where whole episodes are collected."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.train_freq, list):
            self.train_freq = tuple(self.train_freq)

    def resolved(self, algo: str | None = None) -> Self:
        """A copy with defaults filled in and every value checked: also schedules and entropies."""
        made = super().resolved(algo)
        for name in ("learning_rate", "clip_range"):
            value = getattr(made, name)
            if value is not None and not callable(value):
                real_number(name, _first_of(name)(value, made))
        if made.ent_coef is not None:
            on_policy = made.family == ON_POLICY
            real_number("ent_coef", made.ent_coef if on_policy else _first_alpha(made.ent_coef))
        if made.target_entropy not in (None, "auto"):
            real_number("target_entropy", made.target_entropy)
        given = made.policy_kwargs
        of_the_zoo = isinstance(given, str) and given.startswith("dict(")  # evaluated there
        if not (of_the_zoo or isinstance(given, Mapping | None)):
            why = "is no mapping of settings"
            raise SettingError("policy_kwargs", given, why, "use {net_arch: [64, 64]}")
        return made

    def frequency(self) -> tuple[int, str]:
        """``train_freq`` as a number and its unit, ``step`` or ``episode``."""
        given = self.train_freq
        if isinstance(given, str):  # "1,episode"
            number, _, unit = given.strip("()[] ").partition(",")
            given = (int(number) if number.strip().isdecimal() else number, unit.strip(" '\""))
        if not isinstance(given, Sequence):
            return whole_number("train_freq", given, 1), "step"
        if len(given) != 2:
            raise SettingError("train_freq", given, "is no pair of number and unit", [(1, "step")])
        unit = one_of("train_freq", given[1], ("step", "episode"))
        if unit == "episode" and self.n_envs > 1:
            why = "counts episodes, which needs n_envs=1"
            raise SettingError("train_freq", given, why, [(1, "step")])
        return whole_number("train_freq", given[0], 1), unit

    def rollout(self) -> int:
        """Timesteps of one rollout of an off-policy algorithm.

        Raises:
            SettingError: if it is of whole episodes of unknown length.
        """
        every, unit = self.frequency()
        if unit == "step":
            return every * self.n_envs
        if self.episode_length is None:
            why = "is needed where train_freq counts episodes, to know the counts beforehand"
            raise SettingError("episode_length", None, why, "give it, or count steps")
        return every * self.episode_length
