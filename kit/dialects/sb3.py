"""Settings for Stable-Baselines3 (https://github.com/DLR-RM/stable-baselines3).

Stable-Baselines3 counts timesteps, which are policy steps. ``n_steps``, ``train_freq`` and
``eval_freq`` count vector steps, each with ``n_envs`` timesteps. ``gradient_steps`` is the number
of gradient steps per rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd
from typing import Annotated, Any, ClassVar, Literal, Self

from kit.dialects.base import OFF_POLICY, ON_POLICY, RAW, WrappedDialect, trains
from kit.dialects.fields import (
    MapsTo,
    count_field,
    extra_field,
    ignored,
    mapped,
    round_to_envs,
    unsupported,
)
from kit.dialects.rl_zoo import parse_kwargs, split_wrappers
from kit.steps.errors import LARGEST, Limits, SettingError, one_of, real_number, show, whole_number
from kit.steps.plan import StepPlan
from kit.steps.schema import NonNegativeInt, PositiveInt

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
        "n_steps": 5, "gae_lambda": 1.0, "normalize_advantage": False, "use_rms_prop": True,
        "rms_prop_eps": 1e-5, "learning_rate": 7e-4,
    },
    "sac": _OFF_POLICY | {"target_update_interval": 1, "learning_rate": 3e-4, "ent_coef": "auto"},
    "td3": _OFF_POLICY | {
        "policy_delay": 2, "learning_rate": 1e-3, "target_policy_noise": 0.2,
        "target_noise_clip": 0.5,
    },
    "ddpg": _OFF_POLICY | {"learning_rate": 1e-3},
    "dqn": _OFF_POLICY | {
        "batch_size": 32, "train_freq": 4, "target_update_interval": 10_000, "learning_rate": 1e-4,
        "tau": 1.0, "max_grad_norm": 10, "exploration_fraction": 0.1,
        "exploration_initial_eps": 1.0, "exploration_final_eps": 0.05,
    },
}
# fmt: on


_OPTIMIZERS = {"RMSpropTFLike": "rmsprop_tf", "RMSprop": "rmsprop", "Adam": "adam"}
_NOISE = {"normal": "normal", "ornstein-uhlenbeck": "ou"}
_BUFFERS = (None, "ReplayBuffer", "DictReplayBuffer", "HerReplayBuffer")
_NATURE = [[32, 8, 4], [64, 4, 2], [64, 3, 1]]
"""Convolutions of ``CnnPolicy``."""
_CNN_FEATURES = 512
"""Units of the layer that follows the convolutions of ``CnnPolicy``."""
_ACTIVATIONS = ("Tanh", "ReLU", "ELU", "SiLU", "GELU")
_FIXED_KWARGS: dict[str, tuple[Any, ...]] = {
    "n_critics": (2,), "full_std": (True,), "squash_output": (False,), "normalize_images": (True,),
    "share_features_extractor": (True, False), "use_expln": (True, False), "clip_mean": (2.0,),
    "features_extractor_class": ("FlattenExtractor", "NatureCNN", "CombinedExtractor"),
}  # fmt: skip
"""Entries of ``policy_kwargs`` with the values that need no recipe setting."""


def _policy_kwarg(name: str, convert: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a function that converts an entry of ``policy_kwargs``, or returns ``None``."""

    def value(given: Any, settings: Any) -> Any:
        kwargs = _policy_kwargs(given)
        return convert(kwargs[name], settings) if name in kwargs else None

    return value


def _policy_kwargs(given: Any) -> dict[str, Any]:
    """Parse ``policy_kwargs`` and check entries that need no recipe setting."""
    kwargs = parse_kwargs("policy_kwargs", given or {})
    named = ("net_arch", "activation_fn", "log_std_init", "ortho_init", "optimizer_class",
             "optimizer_kwargs")  # fmt: skip
    for name, value in kwargs.items():
        if name not in named and value not in _FIXED_KWARGS.get(name, ()):
            reason = f"Recipes do not support the entry {name}={show(value, text=True)}"
            known = [*named, *_FIXED_KWARGS]
            raise SettingError("policy_kwargs", given, reason, f"Supported: {', '.join(known)}")
    return kwargs


def _hidden_sizes(network: str) -> Callable[[Any, Any], list[int] | None]:
    """Return a function that converts ``net_arch`` to the hidden sizes of actor or critics."""

    def sizes(given: Any, settings: Any) -> list[int] | None:
        pair = _net_arch(given, settings)
        critic = pair[1] if pair[1] != pair[0] else None
        return pair[0] if network == "actor" else critic

    return sizes


def _net_arch(given: Any, settings: Any) -> tuple[list[int], list[int]]:
    """Return hidden sizes for actor and critics, given a shared list or separate lists."""
    each: list[Any] = [given, given]
    if isinstance(given, Mapping) and settings.algo != "dqn":
        of_critic = "vf" if settings.family == ON_POLICY else "qf"
        each = [given.get("pi"), given.get(of_critic)] if {*given} == {"pi", of_critic} else [None]
    if not all(isinstance(s, (list, tuple)) for s in each):
        reason = "Recipes support only hidden layer sizes"
        raise SettingError("policy_kwargs", given, reason, "Use {net_arch: [64, 64]}")
    first = [_CNN_FEATURES] if settings.policy == "CnnPolicy" else []
    return [*first, *each[0]], [*first, *each[1]]


def _activation(given: Any, settings: Any) -> str:
    return str(one_of("policy_kwargs", given, _ACTIVATIONS)).lower()


def _log_std(given: Any, settings: Any) -> float | None:
    """Return the initial log standard deviation, which SAC uses only with gSDE."""
    return (
        None
        if settings.algo == "sac" and not settings.use_sde
        else real_number("policy_kwargs", given)
    )


def _expln(given: Any, settings: Any) -> bool | None:
    """Return whether SAC's gSDE bounds the growth of standard deviations above 1."""
    return bool(given) if settings.algo == "sac" and settings.use_sde else None


def _optimizer(given: Any, settings: Any) -> str | None:
    """Return A2C's optimiser. Other recipes use Adam, as Stable-Baselines3 does."""
    kwargs = _policy_kwargs(given)
    for entry in (kwargs.get("optimizer_kwargs") or {}).items():
        if entry not in (("eps", 1e-5), ("alpha", 0.99)):
            reason = f"Recipes do not support the optimizer_kwargs {entry[0]}={show(entry[1])}"
            raise SettingError("policy_kwargs", given, reason, "Omit it")
    if "optimizer_class" not in kwargs:
        return None
    works = [*_OPTIMIZERS] if settings.algo == "a2c" else ["Adam"]
    name = _OPTIMIZERS[one_of("policy_kwargs", kwargs["optimizer_class"], works)]
    return name if settings.algo == "a2c" else None


def _normalizes(entry: str) -> Callable[[Any, Any], bool]:
    """Return a function that converts ``normalize`` to whether an entry is normalised."""

    def value(given: Any, settings: Any) -> bool:
        if isinstance(given, bool):
            return given
        kwargs = parse_kwargs("normalize", given)
        fixed = {"clip_obs": 10, "clip_reward": 10, "gamma": settings.gamma, "training": True}
        for name, value in kwargs.items():
            if name not in ("norm_obs", "norm_reward") and (name, value) not in fixed.items():
                reason = f"Recipes do not support the entry {name}={show(value)}"
                raise SettingError("normalize", given, reason, ["norm_obs", "norm_reward"])
        return bool(kwargs.get(entry, True))

    return value


def _wrappers(given: Any, settings: Any) -> list[Any] | None:
    """Return the wrappers that are no other recipe setting."""
    wrappers = split_wrappers(given)
    if wrappers.atari and settings.policy != "CnnPolicy":
        reason = "Recipes apply Atari preprocessing only with convolutions"
        raise SettingError("env_wrapper", given, reason, "Use policy=CnnPolicy")
    return wrappers.others or None


def _preprocess(given: Any, settings: Any) -> str | None:
    if given != "CnnPolicy":
        return None
    return "atari" if split_wrappers(settings.env_wrapper).atari else "none"


def _hindsight(given: Any, settings: Any) -> str | None:
    """Return the strategy of ``HerReplayBuffer``, or ``None`` for other replay buffers."""
    cls = settings.replay_buffer_class
    name = cls.__name__ if isinstance(cls, type) else cls
    kwargs = parse_kwargs("replay_buffer_kwargs", settings.replay_buffer_kwargs or {})
    one_of("replay_buffer_class", name, _BUFFERS)
    accepted: dict[str, tuple[Any, ...]] = {"handle_timeout_termination": (True,)}
    if name == "HerReplayBuffer":
        strategies = ("future", "final", "episode")
        accepted |= {"goal_selection_strategy": strategies, "n_sampled_goal": (4,)}
        accepted |= {"copy_info_dict": (True, False)}
    for entry, value in kwargs.items():
        if value not in accepted.get(entry, ()):
            reason = f"Recipes do not support the entry {entry}={show(value)}"
            works = [f"{n}={show(v)}" for n, values in accepted.items() for v in values]
            raise SettingError("replay_buffer_kwargs", kwargs, reason, works)
    return kwargs.get("goal_selection_strategy", "future") if name == "HerReplayBuffer" else None


def _target_period(value: Any, settings: Any) -> int | None:
    """Convert the target update interval to gradient steps."""
    period = _dqn_target_period if settings.algo == "dqn" else _sac_target_period
    return period(value, settings)


def _dqn_target_period(value: int, settings: Any) -> int:
    """Convert DQN's interval in timesteps to the nearest number of gradient steps."""
    envs, updates = settings.n_envs, settings.gradient_steps
    timesteps: int = max(value // envs, 1) * envs  # whole vector steps
    if updates < 0 and settings.rollout_length() is None:  # one gradient step per timestep
        return timesteps
    rollout = settings.rollout()
    if settings.tau == 1:  # Copying unchanged weights again has no effect.
        timesteps = max(timesteps, rollout)
    if updates <= 0:  # The run takes one gradient step per timestep or never trains.
        return timesteps
    return max(round(Fraction(timesteps * updates, rollout)), 1)


def _sac_target_period(value: int, settings: Any) -> int | None:
    """Return SAC's interval, or ``None`` for 1. Each ``train()`` starts with a target update."""
    updates = settings.gradient_steps
    if value == 1:
        return None
    steps = settings.rollout() if updates < 0 else max(updates, 1)
    if value < steps and steps % value:
        reason = f"The interval must divide the {steps} gradient steps per rollout"
        raise SettingError("target_update_interval", value, reason, [gcd(value, steps), steps])
    return min(value, steps) if steps > 1 else None


def _alpha(value: Any, settings: Any = None) -> float:
    """Return SAC's fixed or initial entropy coefficient: 0.1 for ``0.1`` and ``auto_0.1``."""
    name, _, first = str(value).partition("_")
    if name != "auto":
        return real_number("ent_coef", value)
    return _parse_number("ent_coef", value, first or "1", "auto_0.1")


def _start_value(field: str) -> Callable[[Any, Any], float]:
    """Return a function that converts a number or a schedule (``lin_1e-3``) to its first value."""

    def first(value: Any, settings: Any) -> float:
        return _parse_number(field, value, str(value).removeprefix("lin_"), "lin_0.001")

    return first


def _parse_number(field: str, value: Any, number: str, example: str) -> float:
    """Parse the number in a setting such as ``auto_0.1``."""
    try:
        return float(number)
    except ValueError:
        reason = f"The value is neither a number nor a string such as {example}"
        raise SettingError(field, value, reason, [0.001, example]) from None


def _schedule(value: Any, settings: Any) -> str | None:
    """Return ``linear`` for a string such as ``lin_1e-3``, or ``None`` for a number."""
    return "linear" if str(value).startswith("lin_") else None


def _chain(first: MapsTo, *rest: MapsTo) -> MapsTo:
    """Link mappings of the same field."""
    return replace(first, also=_chain(*rest) if rest else None)


_FIXED = MapsTo("fixed_alpha", lambda value, _: None if str(value).startswith("auto") else True)
_MLP: dict[str, Any] = {**RAW, "lr_schedule": "constant", "hidden_sizes": [64, 64]}
_CRITICS: dict[str, Any] = {"n_step": 1, "activation": "relu"}
_IMPLICIT: dict[str, dict[str, Any]] = {
    "ppo": _MLP | {"activation": "tanh"},
    "a2c": _MLP | {"activation": "tanh"},
    "dqn": _MLP | _CRITICS | {"double_dqn": False, "dueling": False},
    "sac": {**RAW, **_CRITICS, "hidden_sizes": [256, 256]},
    "td3": {**RAW, **_CRITICS, "hidden_sizes": [400, 300], "exploration_noise": 0.0},
    "ddpg": {**RAW, **_CRITICS, "hidden_sizes": [400, 300], "exploration_noise": 0.0},
}
_IMPLICIT |= {  # defaults with CnnPolicy
    f"{name}_atari": _IMPLICIT[name] | {"hidden_sizes": [512], "activation": "relu"}
    for name in ("ppo", "a2c", "dqn")
}


@dataclass
class SB3(WrappedDialect):
    """Settings for Stable-Baselines3. ``None`` means the algorithm's default."""

    NAME = "sb3"
    LIBRARY = "Stable-Baselines3"
    VERSIONS: ClassVar = {
        "2.9.2": "code of 2.9.2; training begins strictly after learning_starts",
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
    IMPLICIT_DEFAULTS: ClassVar = _IMPLICIT
    TOTAL = "total_timesteps"
    CANNOT: ClassVar = {"world_size": (1, "it runs in a single process")}
    PATHS: ClassVar = {"n_timesteps": "total_timesteps", "env": "env_id"}

    total_timesteps: NonNegativeInt = 1_000_000
    """Timesteps in the run (argument of ``learn``), rounded up to whole rollouts."""
    n_steps: PositiveInt = mapped("n_step", family=OFF_POLICY)
    """Vector steps per rollout (PPO, A2C), or steps in an n-step return (off-policy)."""
    batch_size: PositiveInt = count_field(only=("ppo", OFF_POLICY))
    """Transitions per minibatch (except A2C). The last minibatch of an epoch may be smaller."""
    n_epochs: PositiveInt = count_field(only="ppo")
    """Passes over a rollout (PPO)."""
    train_freq: Any = count_field(only=OFF_POLICY)
    """Vector steps or, as in ``(2, "episode")``, episodes per rollout (off-policy)."""
    gradient_steps: Annotated[int, Limits(-LARGEST, LARGEST)] = count_field(only=OFF_POLICY)
    """Gradient steps per rollout, not scaled by ``n_envs``. Negative values: one per timestep."""
    learning_starts: NonNegativeInt = count_field(only=OFF_POLICY)
    """Initial timesteps with random actions. Training begins strictly after these timesteps."""
    buffer_size: PositiveInt = mapped(
        "buffer_size", None, lambda value, sb3: round_to_envs(value, sb3.n_envs), only=OFF_POLICY
    )
    """Capacity of the replay buffer in transitions, rounded down to a multiple of ``n_envs``."""
    target_update_interval: PositiveInt = mapped(
        "target_update_every", None, _target_period, only=("sac", "dqn"), optional=True
    )
    """Target update interval in timesteps (DQN) or gradient steps of a ``train()`` call (SAC)."""
    policy_delay: PositiveInt = mapped("policy_delay", only="td3")
    """Critic gradient steps per policy update (TD3)."""
    target_policy_noise: float = mapped("policy_noise", only="td3")
    """Standard deviation of the target action noise for actions in [-1, 1] (TD3)."""
    target_noise_clip: float = mapped("noise_clip", only="td3")
    """Bound of the target action noise (TD3)."""
    noise_type: Literal["normal", "ornstein-uhlenbeck"] | None = mapped(
        "noise_type",
        None,
        lambda value, _: _NOISE.get(value),
        only=("sac", "td3", "ddpg"),
        optional=True,
    )
    """Type of action noise in RL Zoo: ``normal`` or ``ornstein-uhlenbeck`` (TD3, DDPG)."""
    noise_std: float | None = mapped("exploration_noise", only=("sac", "td3", "ddpg"))
    """Standard deviation of RL Zoo's action noise for actions in [-1, 1]; ``None`` for no noise."""
    learning_rate: Any = mapped(
        "learning_rate", None, _start_value("learning_rate"), also=MapsTo("lr_schedule", _schedule)
    )
    """Learning rate. With ``lin_1e-3`` (RL Zoo), it decreases linearly from 0.001 to zero."""
    policy: Literal["MlpPolicy", "CnnPolicy", "MultiInputPolicy"] | None = mapped(
        "convolutions",
        None,
        lambda value, _: _NATURE if value == "CnnPolicy" else None,
        also=MapsTo("preprocess", _preprocess),
        optional=True,
    )
    """Policy class. ``CnnPolicy`` needs a recipe with convolutions."""
    use_rms_prop: bool = mapped(
        "optimizer", None, lambda value, _: "rmsprop" if value else "adam", only="a2c"
    )
    """Whether A2C uses RMSprop instead of Adam."""
    rms_prop_eps: float = unsupported("Recipes use eps=1e-5", None, accepted=(1e-5,), only="a2c")
    """RMSprop's constant in the denominator (A2C)."""
    policy_kwargs: Mapping[str, Any] | str | None = mapped(
        "hidden_sizes",
        None,
        _policy_kwarg("net_arch", _hidden_sizes("actor")),
        also=_chain(
            MapsTo("critic_hidden_sizes", _policy_kwarg("net_arch", _hidden_sizes("critic"))),
            MapsTo("activation", _policy_kwarg("activation_fn", _activation)),
            MapsTo("initial_log_std", _policy_kwarg("log_std_init", _log_std)),
            MapsTo("gsde_expln", _policy_kwarg("use_expln", _expln)),
            MapsTo("orthogonal", _policy_kwarg("ortho_init", lambda value, _: bool(value))),
            MapsTo("optimizer", _optimizer),
        ),
        optional=True,
    )
    """Network settings: a mapping, or RL Zoo's string such as ``dict(net_arch=[64, 64])``."""
    gamma: float = mapped("gamma")
    """Discount factor."""
    gae_lambda: float = mapped("gae_lambda", only=ON_POLICY)
    """Lambda for generalised advantage estimation (PPO, A2C)."""
    clip_range: Any = mapped(
        "clip_epsilon",
        None,
        _start_value("clip_range"),
        only="ppo",
        also=MapsTo("clip_schedule", _schedule),
    )
    """Clip range for the probability ratio (PPO). With ``lin_0.2``, it decreases linearly."""
    clip_range_vf: float | None = unsupported(
        "Use clip_value, which takes the maximum of clipped and unclipped loss",
        only="ppo",
    )
    """Clip range for value predictions (PPO); ``None`` for no clipping."""
    normalize_advantage: bool = mapped("normalize_advantage", only=ON_POLICY)
    """Whether advantages are normalised per minibatch (PPO, A2C)."""
    ent_coef: Any = mapped(
        "entropy_coeff",
        only=(ON_POLICY, "sac"),
        family=ON_POLICY,
        otherwise=MapsTo("initial_alpha", _alpha, also=_FIXED),
    )
    """Entropy coefficient. SAC trains it with ``auto`` (starting at 1) or ``auto_0.1`` (at 0.1)."""
    vf_coef: float = mapped("critic_coeff", only=ON_POLICY)
    """Value loss coefficient (PPO, A2C)."""
    max_grad_norm: float = mapped("max_grad_norm", only=(ON_POLICY, "dqn"))
    """Maximum gradient norm (PPO, A2C, DQN)."""
    target_kl: float | None = mapped("target_kl", only="ppo")
    """Target KL divergence (PPO). Updates stop at 1.5 times this value; ``None`` for no limit."""
    tau: float = mapped("tau", only=OFF_POLICY)
    """Polyak coefficient of the target networks (off-policy)."""
    target_entropy: Any = mapped(
        "target_entropy", None, lambda value, _: None if value == "auto" else value, only="sac"
    )
    """Target entropy for actions in [-1, 1] (SAC). ``auto`` is minus the action dimension."""
    use_sde: bool = mapped("gsde", False, only=(ON_POLICY, "sac"))
    """Whether exploration noise depends on the state (gSDE)."""
    sde_sample_freq: int = mapped(
        "gsde_sample_freq",
        -1,
        lambda v, sb3: v if sb3.use_sde else None,
        only=(ON_POLICY, "sac"),
        optional=True,
    )
    """Steps between samples of gSDE's noise matrix; -1: only at the start of a rollout."""
    use_sde_at_warmup: bool = mapped(
        "gsde_at_warmup",
        False,
        lambda v, sb3: v if sb3.use_sde else None,
        only="sac",
        optional=True,
    )
    """Whether gSDE replaces random actions before ``learning_starts`` (SAC)."""
    action_noise: Any = unsupported("Use noise_type and noise_std", only=("sac", "td3", "ddpg"))
    """Object that generates action noise (SAC, TD3, DDPG)."""
    replay_buffer_class: Any = mapped("hindsight", None, _hindsight, only=OFF_POLICY, optional=True)
    """Replay buffer, such as ``HerReplayBuffer`` for hindsight relabelling (off-policy)."""
    replay_buffer_kwargs: Mapping[str, Any] | str | None = mapped(
        "hindsight", None, _hindsight, only=OFF_POLICY, optional=True
    )
    """Arguments for ``replay_buffer_class``. Recipes support only 4 sampled goals (off-policy)."""
    optimize_memory_usage: bool = mapped(
        "store_next_observation", False, lambda value, _: not value, only=OFF_POLICY
    )
    """Whether the replay buffer stores each observation only once (off-policy)."""
    rollout_buffer_class: Any = unsupported(
        "Pass buffer= to build",
        accepted=("RolloutBuffer", "DictRolloutBuffer"),
        only=ON_POLICY,
    )
    """Rollout buffer (PPO, A2C)."""
    rollout_buffer_kwargs: Any = unsupported(
        "Pass buffer= to build", accepted=({},), only=ON_POLICY
    )
    """Arguments for ``rollout_buffer_class`` (PPO, A2C)."""
    exploration_fraction: float = mapped("exploration_share", only="dqn")
    """Fraction of the run over which epsilon decreases (DQN)."""
    exploration_initial_eps: float = mapped("epsilon_start", only="dqn")
    """Initial epsilon (DQN)."""
    exploration_final_eps: float = mapped("epsilon_end", only="dqn")
    """Final epsilon (DQN)."""
    eval_freq: PositiveInt | None = None
    """Vector steps between evaluations (``EvalCallback``); ``None`` for no evaluations."""
    n_eval_episodes: PositiveInt = count_field("evaluation_episodes", 5)
    """Episodes per evaluation."""
    normalize: Any = mapped(
        "env.normalize_observation",
        None,
        _normalizes("norm_obs"),
        also=MapsTo("env.normalize_reward", _normalizes("norm_reward")),
    )
    """Whether RL Zoo normalises observations and rewards, or arguments for ``VecNormalize``."""
    env_wrapper: Any = mapped("env.wrappers", None, _wrappers, optional=True)
    """RL Zoo's wrappers: ``module.Class``, or a mapping of it to arguments, or a list of these."""
    frame_stack: PositiveInt | None = mapped(
        "frame_stack", family=ON_POLICY, otherwise=MapsTo("stacked_frames")
    )
    """Number of stacked frames in RL Zoo."""
    env_kwargs: Mapping[str, Any] | str | None = mapped(
        "env.kwargs", None, lambda value, _: parse_kwargs("env_kwargs", value or {})
    )
    """Keyword arguments for the environment in RL Zoo."""
    vec_env_wrapper: Any = unsupported("Use env_wrapper")
    """Wrappers for vector environments in RL Zoo."""
    callback: Any = unsupported("Pass hooks= to build")
    """Callbacks in RL Zoo."""
    seed: NonNegativeInt | None = mapped("seed", optional=True)
    """Seed."""
    device: str | None = mapped(
        "device", None, lambda value, _: None if value == "auto" else value, optional=True
    )
    """Device. ``auto`` keeps the recipe's device."""
    monitor_kwargs: Any = ignored("Recipes record episodes themselves")
    """Arguments for ``Monitor`` in RL Zoo."""
    stats_window_size: PositiveInt = ignored("It only affects logging", 100)
    """Number of episodes over which statistics are averaged."""
    tensorboard_log: str | None = ignored("Use logger=tensorboard")
    """Folder for TensorBoard logs."""
    verbose: int = ignored("Use progress", 0)
    """Verbosity."""
    n_envs: PositiveInt = extra_field("num_envs", 1)
    """Number of environments."""
    episode_length: PositiveInt | None = extra_field()
    """Fixed number of timesteps per episode, needed if ``train_freq`` is in episodes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.train_freq, list):
            self.train_freq = tuple(self.train_freq)

    def resolved(self, algo: str | None = None) -> Self:
        """Return a copy with defaults filled in and all values validated, including schedules."""
        resolved = super().resolved(algo)
        wrappers = split_wrappers(resolved.env_wrapper)
        if resolved.action_repeat == 1:
            resolved.action_repeat = wrappers.action_repeat or 1
        if resolved.max_episode_steps is None:
            resolved.max_episode_steps = wrappers.max_episode_steps
        for name in ("learning_rate", "clip_range"):
            value = getattr(resolved, name)
            if value is not None and not callable(value):
                real_number(name, _start_value(name)(value, resolved))
        if resolved.ent_coef is not None:
            on_policy = resolved.family == ON_POLICY
            real_number("ent_coef", resolved.ent_coef if on_policy else _alpha(resolved.ent_coef))
        if resolved.target_entropy not in (None, "auto"):
            real_number("target_entropy", resolved.target_entropy)
        return resolved

    def recipe(self) -> str:
        """Return the name of the recipe for these settings, which depends on the policy."""
        name = super().recipe()
        has_pixels = self.policy == "CnnPolicy" and name in ("ppo", "dqn")
        return f"{name}_pixels" if has_pixels else name

    def frequency(self) -> tuple[int, str]:
        """Return ``train_freq`` as a number and a unit, which is ``step`` or ``episode``."""
        given = self.train_freq
        if isinstance(given, str):  # "1,episode"
            number, _, unit = given.strip("()[] ").partition(",")
            given = (int(number) if number.strip().isdecimal() else number, unit.strip(" '\""))
        if not isinstance(given, Sequence):
            return whole_number("train_freq", given, 1), "step"
        if len(given) != 2:
            reason = "The value must be a (number, unit) pair"
            raise SettingError("train_freq", given, reason, [(1, "step")])
        unit = one_of("train_freq", given[1], ("step", "episode"))
        if unit == "episode" and self.n_envs > 1:
            reason = "Training after whole episodes needs n_envs=1"
            raise SettingError("train_freq", given, reason, [(1, "step")])
        return whole_number("train_freq", given[0], 1), unit

    def rollout_length(self) -> int | None:
        """Return the number of timesteps per off-policy rollout, or ``None`` if it is unknown."""
        every, unit = self.frequency()
        if unit == "step":
            return every * self.n_envs
        return None if self.episode_length is None else every * self.episode_length

    def rollout(self) -> int:
        """Return the number of timesteps per off-policy rollout.

        Raises:
            SettingError: if a rollout consists of whole episodes and ``episode_length`` is unknown.
        """
        length = self.rollout_length()
        if length is None:
            reason = "If train_freq is in episodes, this setting needs the episode length"
            hint = "Set episode_length, or use train_freq in steps"
            raise SettingError("episode_length", None, reason, hint)
        return length

    # ------------------------------------------------------------------ to a plan
    def _plan(self) -> dict[str, Any]:
        plan = self._on_policy() if self.family == ON_POLICY else self._off_policy()
        if self.eval_freq is not None:
            plan["evaluation_every"] = self.eval_freq * self.n_envs
            plan["evaluate_each_multiple"] = True
        return plan

    def _on_policy(self) -> dict[str, Any]:
        rollout = self.n_steps * self.n_envs
        a2c = self.algo == "a2c"  # A2C takes one gradient step on the whole rollout.
        size = None if a2c else self.batch_size
        for name, value, rows in ("n_steps", self.n_steps, rollout), ("batch_size", size, size):
            if self.algo == "ppo" and self.normalize_advantage and rows == 1:
                reason = "Advantages of a single timestep cannot be normalised"
                raise SettingError(name, value, reason, [2], "or normalize_advantage=False")
        return {
            "iterations": -(-self.total_timesteps // rollout),
            "steps_per_env": self.n_steps,
            "update_epochs": 1 if a2c else self.n_epochs,
            "minibatch_size": None if size is None else min(size, rollout),
        }

    def _off_policy(self) -> dict[str, Any]:
        (every, unit), rollout = self.frequency(), self.rollout_length()
        plan: dict[str, Any] = {"minibatch_size": self.batch_size}
        if unit == "episode":
            plan |= {"min_episodes": every, "episode_length": self.episode_length}
        else:
            plan["steps_per_env"] = every
        plan |= (
            {"replay_ratio": 1}
            if self.gradient_steps < 0
            else {"gradient_steps_per_iteration": self.gradient_steps}
        )
        at_random = 0 if self.use_sde and self.use_sde_at_warmup else self.learning_starts
        if rollout is None:  # The run ends after the episode that reaches total_timesteps.
            return plan | {
                "total_policy_steps": self.total_timesteps,
                "learning_starts": self.learning_starts + 1,
                "random_steps": at_random,
            }
        iterations = -(-self.total_timesteps // rollout)
        # Training begins after the first rollout that ends strictly after learning_starts.
        first = self.learning_starts // rollout + 1
        random = -(-at_random // self.n_envs) * self.n_envs
        return plan | {
            "iterations": iterations,
            "learning_starts": first * rollout if first > 1 else 0,
            "random_steps": min(random, iterations * rollout),
        }

    # ------------------------------------------------------------------ from a plan
    @staticmethod
    def _fields_for(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {"total_timesteps": plan.total_policy_steps}
        every = plan.evaluation_every
        if plan.evaluation_every_iterations:
            every = plan.evaluation_every_iterations * plan.frames_per_batch
        if every:
            if not plan.evaluate_each_multiple:  # at most one evaluation per rollout
                every = max(every, plan.frames_per_batch)
            fields["eval_freq"] = -(-every // plan.num_envs)
        if plan.on_policy:
            return fields | _on_policy_from(plan, settings.get("algo"))
        return fields | _off_policy_from(plan, settings.get("algo"))

    # ------------------------------------------------------------------ caveats
    def _notes(self, plan: StepPlan) -> Iterator[str]:
        yield from self._zoo_notes()
        if not plan.is_exact:
            yield (
                "Episode lengths are unknown, so counts are not planned. The run ends after the "
                "episode that reaches total_timesteps, as in Stable-Baselines3."
            )
            return
        requested = self.total_timesteps
        over = plan.total_policy_steps - requested
        if over:
            yield (
                f"The run exceeds total_timesteps={requested:,} by {over:,}, because rollouts have "
                f"{plan.frames_per_batch:,} timesteps."
            )
        yield from self._schedule_notes(plan)
        if self.eval_freq is not None and self.n_envs > 1:
            yield f"eval_freq counts vector steps of {self.n_envs} timesteps each."
        if self.eval_freq is not None and trains(plan):
            yield (
                "Stable-Baselines3 evaluates during a rollout, before gradient steps. The kit "
                "evaluates after them, equally often."
            )
        yield from (self._on_policy_notes if plan.on_policy else self._off_policy_notes)(plan)

    def _zoo_notes(self) -> Iterator[str]:
        """Yield notes on settings of RL Zoo that have a different effect in recipes, or none."""
        kwargs, idle = _policy_kwargs(self.policy_kwargs), []
        if not self.use_sde:
            idle = [
                name
                for name in ("sde_sample_freq", "use_sde_at_warmup")
                if getattr(self, name) != getattr(SB3(), name)
            ]
            if self.algo == "sac":
                idle += [name for name in ("log_std_init", "use_expln") if name in kwargs]
        if idle:
            yield f"Without use_sde, {' and '.join(idle)} has no effect."
        if kwargs.get("use_expln") and self.use_sde and self.algo != "sac":
            yield (
                "use_expln limits standard deviations above 1; this recipe always uses the "
                "exponential function."
            )
        if self.policy == "CnnPolicy" and "net_arch" in kwargs:
            yield (
                f"The layer of {_CNN_FEATURES} units after the convolutions belongs to "
                "hidden_sizes, and has the same activation function."
            )
        if split_wrappers(self.env_wrapper).atari:
            yield (
                "AtariWrapper also ends an episode when a life is lost, presses FIRE after a reset "
                "and clips rewards to their sign. Recipes do not end episodes at lost lives."
            )

    def _schedule_notes(self, plan: StepPlan) -> Iterator[str]:
        requested, total = self.total_timesteps, plan.total_policy_steps
        if not requested or not trains(plan):
            return
        each, end = plan.frames_per_batch, 1 - total / requested
        if total > requested:
            yield f"The remaining progress of schedules is {end:.3g} at the last update."
        names = ("learning_rate", "clip_range")
        linear = [name for name in names if _schedule(getattr(self, name), self)]
        if linear and 100 * each > requested:
            yield (
                f"{' and '.join(linear)}: Stable-Baselines3 updates schedules after each rollout, "
                f"so they decrease from {1 - each / requested:.3g} to {end:.3g} of the initial "
                f"value. Recipes decrease them from 1 to {each / total:.3g}."
            )

    def _on_policy_notes(self, plan: StepPlan) -> Iterator[str]:
        rollout, size = plan.frames_per_batch, self.batch_size
        yield f"n_steps={self.n_steps} is per environment: a rollout has {rollout:,} timesteps."
        if self.algo == "a2c":
            yield "A2C takes one gradient step per rollout on all timesteps."
        elif self.algo == "ppo" and size is not None and size > rollout:
            yield f"batch_size={size} exceeds a rollout, so an epoch has a single minibatch."
        elif self.algo == "ppo" and size is not None and rollout % size:
            yield f"The last minibatch of each epoch has {rollout % size} transitions, not {size}."
        if self.target_kl is not None:
            yield "target_kl is checked before each gradient step; recipes check after each epoch."

    def _off_policy_notes(self, plan: StepPlan) -> Iterator[str]:
        every, unit = self.frequency()
        steps, starts = self.gradient_steps, self.learning_starts
        if steps < 0:
            yield f"gradient_steps={steps} means one gradient step per timestep."
        elif unit == "step":
            ratio = Fraction(steps, plan.frames_per_batch)
            unscaled = " gradient_steps is not scaled by n_envs." if self.n_envs > 1 else ""
            yield (
                f"gradient_steps={steps} with train_freq={every} and n_envs={self.n_envs} is a "
                f"replay ratio of {ratio}.{unscaled}"
            )
        if steps == 0:
            yield "gradient_steps=0 never trains."
        if starts % self.n_envs:
            yield f"learning_starts is rounded up to {plan.random_steps} timesteps in vector steps."
        if trains(plan) and starts and steps:
            first = plan.policy_steps_after(plan.first_training_iteration)
            yield f"Training begins strictly after learning_starts: at {first:,} timesteps."
        if self.algo == "dqn":
            calls = max(self.target_update_interval // self.n_envs, 1)
            yield (
                f"The target network is updated every {calls:,} vector steps before the gradient "
                "steps, and also before training begins."
            )
            yield from self._target_notes(plan)
            rollout = plan.frames_per_batch
            decay_steps = self.exploration_fraction * self.total_timesteps
            if self.n_envs < rollout and 100 * rollout > decay_steps > 0:
                yield (
                    "Epsilon decreases with each vector step; recipes keep epsilon constant for a "
                    f"rollout of {rollout:,} timesteps."
                )
        elif self.algo == "sac" and self.target_update_interval > 1:
            yield (
                "target_update_interval restarts in each call to train(), and the first gradient "
                "step of a call updates the targets."
            )

    def _target_notes(self, plan: StepPlan) -> Iterator[str]:
        """Yield a note if recipes and Stable-Baselines3 update DQN's targets at different times."""
        interval, steps = self.target_update_interval, self.gradient_steps
        if not (steps and trains(plan)):
            return
        rollout, period = plan.frames_per_batch, _dqn_target_period(interval, self)
        each = rollout if steps < 0 else steps
        first = plan.policy_steps_after(plan.first_training_iteration - 1 + -(-period // each))
        every = max(interval // self.n_envs, 1) * self.n_envs
        if self.tau != 1 and every < rollout:
            yield (
                "Target updates within a rollout come before all gradient steps of the rollout; "
                f"recipes update the targets after every {period:,} gradient steps."
            )
        elif first % every or period * rollout != max(every, rollout) * each:
            yield (
                f"Recipes count gradient steps and update the targets after every {period:,}, the "
                f"first at {first:,} timesteps, not at a multiple of {every:,}."
            )


def _on_policy_from(plan: StepPlan, algo: str | None) -> dict[str, Any]:
    size = plan.minibatch_size or plan.frames_per_batch
    is_full = size == plan.frames_per_batch
    algo = algo or ("a2c" if is_full and plan.update_epochs == 1 else "ppo")
    fields = {"algo": algo, "n_steps": plan.steps_per_env}
    if algo == "a2c":
        return fields
    normalize = False if size == 1 else None
    return fields | {
        "n_epochs": plan.update_epochs,
        "batch_size": size,
        "normalize_advantage": normalize,
    }


def _off_policy_from(plan: StepPlan, algo: str | None) -> dict[str, Any]:
    rollout, starts = plan.frames_per_batch, plan.first_training_iteration
    fields: dict[str, Any] = {"algo": algo or "sac", "batch_size": plan.minibatch_size or 256}
    if plan.collects_episodes:
        length = plan.episode_length
        assert length is not None
        fields |= {"train_freq": (rollout // length, "episode"), "episode_length": length}
    else:
        fields["train_freq"] = plan.steps_per_env or 1
    steps = plan.gradient_steps_per_iteration
    if plan.replay_ratio is not None:
        steps = -1 if plan.replay_ratio == 1 else round(plan.replay_ratio * rollout)
    fields["gradient_steps"] = steps or 0
    # Limit the random steps so that training begins with the plan's first training rollout.
    low = (starts - 1) * rollout
    fields["learning_starts"] = min(max(plan.random_steps, low), starts * rollout - 1)
    return fields
