"""CleanRL (https://github.com/vwxyzjn/cleanrl): each algorithm is a single file.

Its unit is the global step: a policy step in PPO, and a vector step in the off-policy files, which
count from 0 and train strictly after ``learning_starts``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kit.dialects.base import OFF_POLICY, ON_POLICY, RAW, WrappedDialect
from kit.dialects.fields import (
    acts,
    counts,
    linear_or_constant,
    of_each_env,
    range_or_none,
    refused,
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
_TD3: dict[str, Any] = {  # its targets follow the policy
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
_OF_CRITICS: dict[str, Any] = {**RAW, "n_step": 1, "max_grad_norm": None, "activation": "relu"}
_OF_DQN = {**_OF_CRITICS, "double_dqn": False, "dueling": False, "lr_schedule": "constant"}
_UNSAID: dict[str, dict[str, Any]] = {
    "ppo": RAW | _NETWORKS,
    "ppo_continuous_action": dict.fromkeys(RAW, True) | _NETWORKS,
    "ppo_atari": RAW | {"hidden_sizes": [512], "activation": "relu"},
    "dqn": _OF_DQN | {"hidden_sizes": [120, 84]},
    "dqn_atari": _OF_DQN | {"hidden_sizes": [512]},
} | {name: _OF_CRITICS | {"hidden_sizes": [256, 256]} for name in _DELAYED}


def _target_period(value: Any, args: Any) -> int:
    """Gradient steps between target updates, from steps."""
    every = args.train_frequency or 1
    if value % every:
        why, works = f"is not a multiple of train_frequency={every}", max(value // every, 1) * every
        raise SettingError("target_network_frequency", value, why, [works])
    return int(value // every)


def _fixed_alpha(value: Any, args: Any) -> Any:
    """The entropy coefficient, which CleanRL reads where it is not learnt."""
    if args.autotune is not False:
        raise SettingError("alpha", value, "is learnt, from 1", "use autotune=false as well")
    return value


@dataclass
class CleanRL(WrappedDialect):
    """``Args`` of CleanRL's files; ``None`` stands for the default of the file."""

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
    IMPLICIT_DEFAULTS: ClassVar = _UNSAID
    TOTAL = "total_timesteps"
    CANNOT: ClassVar = {
        "world_size": (1, "each file is one process"),
        "collects_episodes": (False, "it collects steps"),
    }

    total_timesteps: NonNegativeInt = counts()
    """policy steps (PPO), rounded down to whole batches; steps of all environments (off-policy)."""
    num_envs: PositiveInt = counts("num_envs")
    """environments; DQN and DDPG have one."""
    num_steps: PositiveInt = counts("steps_per_env", only=ON_POLICY)
    """policy steps of each environment in one batch (PPO)."""
    num_minibatches: PositiveInt = counts(only=ON_POLICY)
    """minibatches of a batch (PPO): each has ``num_envs * num_steps // num_minibatches`` steps."""
    update_epochs: NonNegativeInt = counts("update_epochs", only=ON_POLICY)
    """passes over a batch (PPO)."""
    train_frequency: PositiveInt = counts(only=_DQNS)
    """steps between gradient steps (DQN): one at each multiple, counted from 0."""
    learning_starts: NonNegativeInt = counts(only=OFF_POLICY)
    """steps with random actions; training begins strictly after them."""
    batch_size: PositiveInt = counts("minibatch_size", only=OFF_POLICY)
    """transitions in a minibatch (off-policy)."""
    buffer_size: PositiveInt = acts(
        "buffer_size", None, lambda value, args: of_each_env(value, args.num_envs), only=OFF_POLICY
    )
    """transitions in the replay buffer, rounded down to equally many of each environment."""
    policy_frequency: PositiveInt = acts("policy_delay", only=_DELAYED)
    """gradient steps of the critic per visit to the actor (SAC, TD3, DDPG)."""
    exploration_noise: float = acts("exploration_noise", only=(*_TD3S, *_DDPGS))
    """deviation of the noise on actions, in units of half their range (TD3, DDPG)."""
    policy_noise: float = acts("policy_noise", only=_TD3S)
    """deviation of the noise on target actions, in these units (TD3)."""
    noise_clip: float = acts("noise_clip", only=_TD3S)
    """largest noise on target actions, in these units (TD3)."""
    target_network_frequency: PositiveInt = acts(
        "target_update_every", None, _target_period, only=(*_DQNS, *_SACS)
    )
    """steps between target updates (DQN, SAC); those of TD3 and DDPG follow the actor's."""
    learning_rate: float = acts("learning_rate", only=_ONE_RATE)
    """learning rate (all but SAC)."""
    policy_lr: float = refused("use learning_rate: one for all networks", only=_SACS)
    """learning rate of the policy (SAC)."""
    q_lr: float = refused("use learning_rate: one for all networks", only=_SACS)
    """learning rate of critics and entropy coefficient (SAC)."""
    anneal_lr: bool = acts("lr_schedule", None, linear_or_constant, only=ON_POLICY)
    """whether the learning rate falls linearly (PPO), to one iteration's share."""
    gamma: float = acts("gamma")
    """discount."""
    gae_lambda: float = acts("gae_lambda", only=ON_POLICY)
    """weight of longer advantage estimates (PPO)."""
    norm_adv: bool = acts("normalize_advantage", only=ON_POLICY)
    """whether advantages are normalised in each minibatch (PPO)."""
    clip_coef: float = acts("clip_epsilon", only=ON_POLICY)
    """clipping range of the probability ratio (PPO)."""
    clip_vloss: bool = acts("clip_value", None, range_or_none, only=ON_POLICY)
    """whether the value is clipped, too, in the same range (PPO)."""
    ent_coef: float = acts("entropy_coeff", only=ON_POLICY)
    """weight of the entropy (PPO)."""
    vf_coef: float = acts("critic_coeff", None, lambda value, _: value / 2, only=ON_POLICY)
    """weight of the value loss, which is half a mean of squares (PPO)."""
    max_grad_norm: float = acts("max_grad_norm", only=ON_POLICY)
    """largest norm of the gradient (PPO)."""
    target_kl: float | None = acts("target_kl", None, lambda value, _: value / 1.5, only=ON_POLICY)
    """KL divergence beyond which, not 1.5 times of it as in the kit, an update stops, asked after
    each epoch (PPO)."""
    tau: float = acts("tau", only=OFF_POLICY)
    """Polyak coefficient of the target networks (off-policy)."""
    alpha: float = acts("initial_alpha", None, _fixed_alpha, only=_SACS)
    """fixed entropy coefficient (SAC without autotune)."""
    autotune: bool = acts("fixed_alpha", None, lambda learnt, _: not learnt, only=_SACS)
    """whether the entropy coefficient is learnt (SAC)."""
    start_e: float = acts("epsilon_start", only=_DQNS)
    """first epsilon (DQN)."""
    end_e: float = acts("epsilon_end", only=_DQNS)
    """last epsilon (DQN)."""
    exploration_fraction: float = acts("exploration_share", only=_DQNS)
    """share of the run in which epsilon falls (DQN)."""

    def _plan(self) -> dict[str, Any]:
        if self.family == ON_POLICY:
            return self._ppo()
        if self.num_envs != 1 and self.algo in (*_DQNS, *_DDPGS):
            name = str(self.algo).partition("_")[0].upper()
            why = f"is not supported by CleanRL's {name}"
            raise SettingError("num_envs", self.num_envs, why, [1])
        return self._dqn() if self.algo in _DQNS else self._sac()

    def _ppo(self) -> dict[str, Any]:
        batch = self.num_envs * self.num_steps
        size = batch // self.num_minibatches
        return {"iterations": self.total_timesteps // batch, "minibatch_size": size}

    def _dqn(self) -> dict[str, Any]:
        """Trains at each multiple of ``train_frequency`` greater than ``learning_starts``.

        Steps are counted from 0, so that the first such multiple is collected as the step after
        it. A ratio that is counted from ``train_frequency - 1`` steps before is due there.
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
    def _from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        if plan.on_policy:
            size = plan.minibatch_size or plan.frames_per_batch
            return {
                "algo": settings.get("algo", "ppo"),
                "total_timesteps": plan.total_policy_steps,
                "num_minibatches": max(plan.frames_per_batch // size, 1),
            }
        made = {
            "total_timesteps": plan.total_policy_steps // plan.num_envs,
            "batch_size": plan.minibatch_size or 256,
        }
        starts, ratio, algo = plan.first_training_iteration, plan.replay_ratio, settings.get("algo")
        if ratio is not None and ratio.numerator == 1 and plan.num_envs == 1:
            algo = algo or ("sac" if ratio == 1 and plan.random_steps else "dqn")
            if algo.startswith("dqn"):
                every = ratio.denominator
                first = max(starts + every - 3, 0)
                return made | {"algo": algo, "train_frequency": every, "learning_starts": first}
        return made | {"algo": algo or "sac", "learning_starts": max(starts - 2, 0)}

    def _notes(self, plan: StepPlan) -> Iterator[str]:
        if self.family == ON_POLICY:
            left = self.total_timesteps - plan.total_policy_steps
            if left:
                yield f"{left:,} of total_timesteps do not fill a batch: never played."
            rows = plan.frames_per_batch
            if rows % (rows // self.num_minibatches):
                yield f"num_minibatches does not divide {rows} steps: a smaller minibatch is added."
            if self.anneal_lr:
                yield "anneal_lr ends at lr / iterations in the last iteration, not at 0."
            return
        dqn = self.algo in _DQNS
        first = plan.policy_steps_after(plan.first_training_iteration)
        first += self.train_frequency - 1 if dqn else 0
        yield f"Training begins strictly after learning_starts: with policy step {first:,}."
        if self.num_envs > 1:
            yield f"Steps are vector steps: the run has {plan.total_policy_steps:,} policy steps."
        yield from self._target_notes(first - 1, self.train_frequency if dqn else 1)
        if dqn:
            yield "Random actions come from epsilon-greedy exploration and are not counted."
            yield "Its loss is the mean of squared errors, that of recipes the Huber loss."

    def _target_notes(self, first: int, every: int) -> Iterator[str]:
        """When recipes first update targets, if they differ; from global step ``first`` on."""
        period = self.target_network_frequency
        if period is None or period % every:  # a recipe says so
            return
        updated = first // self.num_envs + period - every
        if updated % period:
            yield (
                f"target_network_frequency: recipes count the {period // every:,} gradient steps, "
                f"and update the targets first at global step {updated:,}, not at a multiple of "
                f"{period:,}."
            )
