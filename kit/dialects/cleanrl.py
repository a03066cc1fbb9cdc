"""Settings for CleanRL (https://github.com/vwxyzjn/cleanrl), where each algorithm is a single file.

CleanRL counts global steps, which are policy steps in PPO and vector steps in the off-policy files.
The off-policy files count from 0 and train strictly after ``learning_starts``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kit.dialects.base import OFF_POLICY, ON_POLICY, RAW, WrappedDialect
from kit.dialects.fields import (
    count_field,
    linear_or_constant,
    mapped,
    range_or_none,
    round_to_envs,
    unsupported,
)
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan
from kit.steps.schema import NonNegativeInt, PositiveInt

# fmt: off
_PPO: dict[str, Any] = {
    "total_timesteps": 500_000, "num_envs": 4, "num_steps": 128, "num_minibatches": 4,
    "update_epochs": 4, "learning_rate": 2.5e-4, "anneal_lr": True, "gamma": 0.99,
    "gae_lambda": 0.95, "norm_adv": True, "clip_coef": 0.2, "clip_vloss": True, "ent_coef": 0.01,
    "vf_coef": 0.5, "max_grad_norm": 0.5,
}
_SAC: dict[str, Any] = {
    "total_timesteps": 1_000_000, "num_envs": 1, "learning_starts": 5_000, "batch_size": 256,
    "buffer_size": 1_000_000, "policy_frequency": 2, "target_network_frequency": 1, "gamma": 0.99,
    "tau": 0.005,
}
_DQN: dict[str, Any] = {
    "total_timesteps": 500_000, "num_envs": 1, "learning_starts": 10_000, "train_frequency": 10,
    "batch_size": 128, "buffer_size": 10_000, "target_network_frequency": 500,
    "learning_rate": 2.5e-4, "gamma": 0.99, "tau": 1.0, "start_e": 1, "end_e": 0.05,
    "exploration_fraction": 0.5,
}
_TD3: dict[str, Any] = {  # Target networks are updated together with the policy.
    name: value for name, value in _SAC.items() if name != "target_network_frequency"
} | {"learning_starts": 25_000, "learning_rate": 3e-4, "exploration_noise": 0.1}
_DEFAULTS = {
    "ppo": _PPO,
    "ppo_continuous_action": _PPO | {
        "total_timesteps": 1_000_000, "num_envs": 1, "num_steps": 2048, "num_minibatches": 32,
        "update_epochs": 10, "learning_rate": 3e-4, "ent_coef": 0.0,
    },
    "ppo_atari": _PPO | {"total_timesteps": 10_000_000, "num_envs": 8, "clip_coef": 0.1},
    "dqn": _DQN,
    "dqn_atari": _DQN | {
        "total_timesteps": 10_000_000, "learning_starts": 80_000, "train_frequency": 4,
        "batch_size": 32, "buffer_size": 1_000_000, "target_network_frequency": 1_000,
        "learning_rate": 1e-4, "end_e": 0.01, "exploration_fraction": 0.1,
    },
    "sac_continuous_action": _SAC,
    "td3_continuous_action": _TD3 | {"policy_noise": 0.2, "noise_clip": 0.5},
    "ddpg_continuous_action": _TD3,
}
# fmt: on
for _short in ("sac", "td3", "ddpg"):
    _DEFAULTS[_short] = _DEFAULTS[f"{_short}_continuous_action"]
_DQNS, _SACS = ("dqn", "dqn_atari"), ("sac", "sac_continuous_action")
_DELAYED = tuple(name for name in _DEFAULTS if name.startswith(("sac", "td3", "ddpg")))
_TD3S, _DDPGS = ("td3", "td3_continuous_action"), ("ddpg", "ddpg_continuous_action")
_ONE_RATE = (ON_POLICY, *_DQNS, *(name for name in _DELAYED if name not in _SACS))


_NETWORKS: dict[str, Any] = {"hidden_sizes": [64, 64], "activation": "tanh"}
_CRITICS: dict[str, Any] = {**RAW, "n_step": 1, "max_grad_norm": None, "activation": "relu"}
_DQN_IMPLICIT = {**_CRITICS, "double_dqn": False, "dueling": False, "lr_schedule": "constant"}
_IMPLICIT: dict[str, dict[str, Any]] = {
    "ppo": RAW | _NETWORKS,
    "ppo_continuous_action": dict.fromkeys(RAW, True) | _NETWORKS,
    "ppo_atari": RAW | {"hidden_sizes": [512], "activation": "relu"},
    "dqn": _DQN_IMPLICIT | {"hidden_sizes": [120, 84]},
    "dqn_atari": _DQN_IMPLICIT | {"hidden_sizes": [512]},
} | {name: _CRITICS | {"hidden_sizes": [256, 256]} for name in _DELAYED}


def _target_period(value: Any, args: Any) -> int:
    """Convert the interval between target updates from global steps to gradient steps."""
    every = args.train_frequency or 1
    if value % every:
        reason = f"The value must be a multiple of train_frequency={every}"
        multiple = max(value // every, 1) * every
        raise SettingError("target_network_frequency", value, reason, [multiple])
    return int(value // every)


def _fixed_alpha(value: Any, args: Any) -> Any:
    """Return the fixed entropy coefficient, which CleanRL ignores if ``autotune`` is set."""
    if args.autotune is not False:
        reason = "With autotune=true, alpha is trained and always starts at 1"
        raise SettingError("alpha", value, reason, "Also set autotune=false")
    return value


@dataclass
class CleanRL(WrappedDialect):
    """Equivalent of ``Args`` in CleanRL's files. ``None`` means the file's default."""

    NAME = "cleanrl"
    LIBRARY = "CleanRL"
    VERSIONS: ClassVar = {"1.0": "the files as of 2024"}
    ALGORITHMS: ClassVar = {
        name: ON_POLICY if name.startswith("ppo") else OFF_POLICY for name in _DEFAULTS
    }
    IMPLIED: ClassVar = {
        "dqn": ("train_frequency",),
        "sac": ("learning_starts", "batch_size", "policy_frequency"),
    }
    DEFAULTS: ClassVar = _DEFAULTS
    IMPLICIT_DEFAULTS: ClassVar = _IMPLICIT
    TOTAL = "total_timesteps"
    CANNOT: ClassVar = {
        "world_size": (1, "each file runs in a single process"),
        "collects_episodes": (False, "it collects steps instead of whole episodes"),
    }

    total_timesteps: NonNegativeInt = count_field()
    """Total steps: policy steps rounded down to whole batches (PPO), or vector steps (others)."""
    num_envs: PositiveInt = count_field("num_envs")
    """Number of environments; DQN and DDPG support only one."""
    num_steps: PositiveInt = count_field("steps_per_env", only=ON_POLICY)
    """Policy steps per environment in a batch (PPO)."""
    num_minibatches: PositiveInt = count_field(only=ON_POLICY)
    """Minibatches per batch (PPO), with ``num_envs * num_steps // num_minibatches`` steps each."""
    update_epochs: NonNegativeInt = count_field("update_epochs", only=ON_POLICY)
    """Passes over a batch (PPO)."""
    train_frequency: PositiveInt = count_field(only=_DQNS)
    """Steps per gradient step (DQN). Training occurs at multiples of this number."""
    learning_starts: NonNegativeInt = count_field(only=OFF_POLICY)
    """Steps after which training begins. Before that, SAC, TD3 and DDPG take random actions."""
    batch_size: PositiveInt = count_field("minibatch_size", only=OFF_POLICY)
    """Transitions per minibatch (off-policy)."""
    buffer_size: PositiveInt = mapped(
        "buffer_size", None, lambda size, args: round_to_envs(size, args.num_envs), only=OFF_POLICY
    )
    """Capacity of the replay buffer in transitions, rounded down to a multiple of ``num_envs``."""
    policy_frequency: PositiveInt = mapped("policy_delay", only=_DELAYED)
    """Critic gradient steps per policy update (SAC, TD3, DDPG)."""
    exploration_noise: float = mapped("exploration_noise", only=(*_TD3S, *_DDPGS))
    """Standard deviation of the action noise in units of half the action range (TD3, DDPG)."""
    policy_noise: float = mapped("policy_noise", only=_TD3S)
    """Standard deviation of the target action noise in units of half the action range (TD3)."""
    noise_clip: float = mapped("noise_clip", only=_TD3S)
    """Bound of the target action noise in units of half the action range (TD3)."""
    target_network_frequency: PositiveInt = mapped(
        "target_update_every", None, _target_period, only=(*_DQNS, *_SACS)
    )
    """Steps between target updates (DQN, SAC). TD3 and DDPG update targets with the policy."""
    learning_rate: float = mapped("learning_rate", only=_ONE_RATE)
    """Learning rate (all algorithms except SAC)."""
    policy_lr: float = unsupported("Use learning_rate, which applies to all networks", only=_SACS)
    """Learning rate of the policy (SAC)."""
    q_lr: float = unsupported("Use learning_rate, which applies to all networks", only=_SACS)
    """Learning rate of the critics and the entropy coefficient (SAC)."""
    anneal_lr: bool = mapped("lr_schedule", None, linear_or_constant, only=ON_POLICY)
    """Whether the learning rate decreases linearly to ``learning_rate / iterations`` (PPO)."""
    gamma: float = mapped("gamma")
    """Discount factor."""
    gae_lambda: float = mapped("gae_lambda", only=ON_POLICY)
    """Lambda for generalised advantage estimation (PPO)."""
    norm_adv: bool = mapped("normalize_advantage", only=ON_POLICY)
    """Whether advantages are normalised per minibatch (PPO)."""
    clip_coef: float = mapped("clip_epsilon", only=ON_POLICY)
    """Clip range for the probability ratio (PPO)."""
    clip_vloss: bool = mapped("clip_value", None, range_or_none, only=ON_POLICY)
    """Whether value predictions are also clipped, with range ``clip_coef`` (PPO)."""
    ent_coef: float = mapped("entropy_coeff", only=ON_POLICY)
    """Entropy coefficient (PPO)."""
    vf_coef: float = mapped("critic_coeff", None, lambda value, _: value / 2, only=ON_POLICY)
    """Coefficient of the value loss, which is half the mean squared error (PPO)."""
    max_grad_norm: float = mapped("max_grad_norm", only=ON_POLICY)
    """Maximum gradient norm (PPO)."""
    target_kl: float | None = mapped("target_kl", None, lambda kl, _: kl / 1.5, only=ON_POLICY)
    """KL divergence above which an update stops at the end of an epoch (PPO)."""
    tau: float = mapped("tau", only=OFF_POLICY)
    """Polyak coefficient of the target networks (off-policy)."""
    alpha: float = mapped("initial_alpha", None, _fixed_alpha, only=_SACS)
    """Fixed entropy coefficient (SAC without ``autotune``)."""
    autotune: bool = mapped("fixed_alpha", None, lambda autotune, _: not autotune, only=_SACS)
    """Whether the entropy coefficient is trained (SAC)."""
    start_e: float = mapped("epsilon_start", only=_DQNS)
    """Initial epsilon (DQN)."""
    end_e: float = mapped("epsilon_end", only=_DQNS)
    """Final epsilon (DQN)."""
    exploration_fraction: float = mapped("exploration_share", only=_DQNS)
    """Fraction of the run over which epsilon decreases (DQN)."""

    def _plan(self) -> dict[str, Any]:
        if self.family == ON_POLICY:
            return self._ppo()
        if self.num_envs != 1 and self.algo in (*_DQNS, *_DDPGS):
            name = str(self.algo).partition("_")[0].upper()
            reason = f"CleanRL's {name} supports only a single environment"
            raise SettingError("num_envs", self.num_envs, reason, [1])
        return self._dqn() if self.algo in _DQNS else self._sac()

    def _ppo(self) -> dict[str, Any]:
        batch = self.num_envs * self.num_steps
        size = batch // self.num_minibatches
        return {"iterations": self.total_timesteps // batch, "minibatch_size": size}

    def _dqn(self) -> dict[str, Any]:
        """Return plan settings for training at multiples of ``train_frequency``.

        CleanRL counts steps from 0, so its step ``n`` is policy step ``n + 1`` of the plan. The
        plan's replay ratio starts to count ``train_frequency - 1`` steps before the first gradient
        step, because a gradient step is due once ``train_frequency`` steps have been counted.
        """
        every = self.train_frequency
        first = (self.learning_starts // every + 1) * every
        return {
            "iterations": self.total_timesteps,
            "learning_starts": first + 2 - every,
            "random_steps": 0,
            "replay_ratio": f"1/{every}",
        }

    def _sac(self) -> dict[str, Any]:
        return {
            "iterations": self.total_timesteps,
            "learning_starts": (self.learning_starts + 2) * self.num_envs,
            "random_steps": min(self.learning_starts, self.total_timesteps) * self.num_envs,
            "gradient_steps_per_iteration": 1,
        }

    @staticmethod
    def _fields_for(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        if plan.on_policy:
            size = plan.minibatch_size or plan.frames_per_batch
            return {
                "algo": settings.get("algo", "ppo"),
                "total_timesteps": plan.total_policy_steps,
                "num_minibatches": max(plan.frames_per_batch // size, 1),
            }
        fields = {
            "total_timesteps": plan.total_policy_steps // plan.num_envs,
            "batch_size": plan.minibatch_size or 256,
        }
        starts, ratio, algo = plan.first_training_iteration, plan.replay_ratio, settings.get("algo")
        if ratio is not None and ratio.numerator == 1 and plan.num_envs == 1:
            algo = algo or ("sac" if ratio == 1 and plan.random_steps else "dqn")
            if algo.startswith("dqn"):
                every = ratio.denominator
                first = max(starts + every - 3, 0)
                return fields | {"algo": algo, "train_frequency": every, "learning_starts": first}
        return fields | {"algo": algo or "sac", "learning_starts": max(starts - 2, 0)}

    def _notes(self, plan: StepPlan) -> Iterator[str]:
        if self.family == ON_POLICY:
            left = self.total_timesteps - plan.total_policy_steps
            if left:
                yield f"The last {left:,} timesteps do not fill a batch and are not collected."
            rows = plan.frames_per_batch
            if rows % (rows // self.num_minibatches):
                yield f"num_minibatches does not divide {rows} steps. The rest is a new minibatch."
            if self.anneal_lr:
                yield "anneal_lr ends at lr / iterations in the last iteration, not at 0."
            return
        dqn = self.algo in _DQNS
        first = plan.policy_steps_after(plan.first_training_iteration)
        first += self.train_frequency - 1 if dqn else 0
        yield f"Training begins strictly after learning_starts, at policy step {first:,}."
        if self.num_envs > 1:
            yield f"Steps are vector steps: the run has {plan.total_policy_steps:,} policy steps."
        yield from self._target_notes(first - 1, self.train_frequency if dqn else 1)
        if dqn:
            yield "Random actions of epsilon-greedy exploration are not counted."
            yield "CleanRL uses the mean of squared errors as its loss; recipes use the Huber loss."

    def _target_notes(self, first: int, every: int) -> Iterator[str]:
        """Yield a note if recipes make their first target update at a different step."""
        period = self.target_network_frequency
        if period is None or period % every:  # Recipes reject these intervals.
            return
        updated = first // self.num_envs + period - every
        if updated % period:
            yield (
                f"target_network_frequency: recipes count {period // every:,} gradient steps and "
                f"update the targets first at global step {updated:,}, not at a multiple of "
                f"{period:,}."
            )
