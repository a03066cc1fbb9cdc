"""The vocabulary of pyrado, the Python side of SimuRLacra (https://github.com/famura/SimuRLacra).

Its unit is the step or sample, the policy step here, and it collects whole rollouts (episodes)
until its minima are met. A value-based algorithm makes its first iteration with a warm-up of
random actions. ``Pyrado`` has the settings of all its step-based algorithms, whose classes are
A2C, PPO, PPO2, DQL, SAC and SVPG; ``GAE`` has those of the advantage estimator that a critic is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import log
from typing import Any, ClassVar

from kit.dialects.base import OFF_POLICY, ON_POLICY, Acts, Count, Dialect, Natural, Refused
from kit.steps.errors import SettingError, nearest_first, real_number, whole_number

EVALUATION_ROLLOUTS = 100
"""Rollouts of one evaluation of a value-based algorithm."""

_ONE = "policy and critic have one optimiser, and its minibatches"
_DEFAULTS: dict[str, dict[str, Any]] = {
    "a2c": {"batch_size": 32, "num_epoch": 1},
    "ppo": {"batch_size": 64, "num_epoch": 3},
    "ppo2": {"batch_size": 32, "num_epoch": 3},
    "svpg": {"batch_size": 32, "num_epoch": 1},
    "dql": {"batch_size": 256, "target_update_intvl": 5, "max_grad_norm": 0.5},
    "sac": {"batch_size": 256, "target_update_intvl": 1, "max_grad_norm": 5.0, "lr": 3e-4},
}


@dataclass
class GAE:
    """Settings of pyrado's critic, which has an optimiser of its own (not so in PPO2 and A2C)."""

    gamma: float = 0.99
    """discount factor per step."""
    lamda: float = 0.95
    """trade-off between bias (0) and variance (1)."""
    num_epoch: int = 10
    """passes over the collected rollouts in one update of the critic."""
    batch_size: int = 64
    """transitions in a minibatch of the critic."""
    standardize_adv: bool = True
    """whether advantages get mean 0 and standard deviation 1."""
    max_grad_norm: float | None = None
    """largest norm of the gradients; ``None``: any."""
    lr: float = 5e-4
    """learning rate."""
    lr_scheduler: str | None = None
    """learning-rate scheduler, one step per epoch."""
    lr_scheduler_hparam: dict[str, Any] | None = None
    """settings of the scheduler."""


@dataclass
class PyradoSettings(Dialect):
    """Settings of pyrado's step-based algorithms; ``None`` stands for the algorithm's default."""

    NAME: ClassVar[str] = "pyrado"
    LIBRARY: ClassVar[str] = "pyrado"
    VERSIONS: ClassVar[Mapping[str, str]] = {
        "7c48d66": "the code of July 2021 (fork fdamken/SimuRLacra)",
        "05cfa26": "the code of famura/SimuRLacra with use_trained_policy_for_refill",
        "documented": "the docstrings as they read: num_init_memory_steps is neither raised to the "
        "batch size nor lowered to the memory size",
    }
    ALGORITHMS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("ppo", "ppo2", "a2c", "svpg"), ON_POLICY),
        **dict.fromkeys(("dql", "sac"), OFF_POLICY),
    }
    FACTS: ClassVar[frozenset[str]] = Dialect.FACTS | {
        "logger_print_intvl",
        "env_max_steps",
        "episode_length",
        "action_repeat",
        "max_episode_steps",
        "recurrent",
    }
    MEANS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "num_epoch": ("ppo", "ppo2"),
        "critic": ("ppo", "ppo2", "a2c", "svpg"),
        "num_particles": ("svpg",),
        "horizon": ("svpg",),
        "temperature": ("svpg",),
        "eps_clip": ("ppo", "ppo2"),
        "vfcn_coeff": ("ppo2", "a2c", "svpg"),
        "entropy_coeff": ("ppo2", "a2c", "svpg"),
        "std_init": (ON_POLICY,),
        "memory_size": (OFF_POLICY,),
        "num_init_memory_steps": (OFF_POLICY,),
        "num_updates_per_step": (OFF_POLICY,),
        "target_update_intvl": (OFF_POLICY,),
        "eval_intvl": (OFF_POLICY,),
        "logger_print_intvl": (OFF_POLICY,),
        "use_trained_policy_for_refill": (OFF_POLICY,),
        "gamma": (OFF_POLICY,),
        "eps_init": ("dql",),
        "eps_schedule_gamma": ("dql",),
        **dict.fromkeys(("tau", "ent_coeff_init", "learn_ent_coeff"), ("sac",)),
        **dict.fromkeys(("standardize_rew", "rew_scale"), ("sac",)),
    }
    CARRIED: ClassVar[Mapping[str, Acts | Refused]] = {
        "critic.gamma": Acts("gamma"),
        "critic.lamda": Acts("gae_lambda"),
        "critic.standardize_adv": Acts("normalize_advantage"),
        **dict.fromkeys(("critic.num_epoch", "critic.batch_size", "critic.lr"), Refused(_ONE)),
        "critic.max_grad_norm": Refused(_ONE),
        "critic.lr_scheduler": Refused("use anneal"),
        "critic.lr_scheduler_hparam": Refused("use anneal"),
        "memory_size": Acts("buffer_size"),
        "num_workers": Refused("it changes no sample: use env.vectorization=async"),
        "target_update_intvl": Acts("target_update_every"),
        "max_grad_norm": Acts("max_grad_norm"),
        "lr": Acts("learning_rate"),
        "lr_scheduler": Refused("use anneal"),
        "lr_scheduler_hparam": Refused("use anneal"),
        "gamma": Acts("gamma"),
        "eps_clip": Acts("clip_epsilon"),
        "vfcn_coeff": Acts("critic_coeff"),
        "entropy_coeff": Acts("entropy_coeff"),
        "std_init": Acts("initial_log_std", lambda value, _: log(real_number("std_init", value))),
        "horizon": Refused("pyrado does not use it"),
        "temperature": Refused("no recipe is SVPG"),
        "eps_init": Acts("epsilon_start"),
        "eps_schedule_gamma": Refused("use epsilon_end and exploration_share"),
        # It is the share of the target that a soft update keeps.
        "tau": Acts("tau", lambda value, _: round(1 - real_number("tau", value), 12)),
        "ent_coeff_init": Acts("initial_alpha"),
        "learn_ent_coeff": Refused("SAC learns its entropy coefficient"),
        "standardize_rew": Refused("use env.normalize_reward"),
        "rew_scale": Refused("scale the rewards in the environment"),
    }

    NESTED: ClassVar[frozenset[str]] = frozenset({"critic"})

    max_iter: int = 1
    """iterations, each a collection and an update phase; 0 and less train nothing."""
    min_rollouts: Count | None = None
    """whole rollouts of one collection, at least."""
    min_steps: Count | None = None
    """steps of one collection of whole rollouts, at least; with ``min_rollouts`` both hold."""
    num_epoch: Natural | None = None
    """passes over the collected rollouts in one update of the policy (PPO, PPO2)."""
    batch_size: Count | None = None
    """transitions in a minibatch; the last one of a pass is smaller."""
    critic: GAE = field(default_factory=GAE)
    """settings of the critic."""
    memory_size: Count | None = None
    """transitions in the replay memory; the newest are kept."""
    num_init_memory_steps: Natural | None = None
    """steps of the warm-up with random actions, in whole rollouts; ``None``: ``memory_size``."""
    num_updates_per_step: Natural | None = None
    """gradient steps of one iteration; ``None``: ``ceil(min_steps / env_max_steps)``, or
    ``min_rollouts`` without ``min_steps``."""
    target_update_intvl: Count | None = None
    """gradient steps between target updates, the first one included."""
    eval_intvl: Count = 100
    """iterations between evaluations of 100 rollouts, before the update, the first one included;
    ignored if a logger is passed."""
    use_trained_policy_for_refill: bool = False
    """whether the memory is filled by the exploring policy, not at random, after a reset."""
    num_workers: Count = 4
    """processes that sample; what they sample is the same for any number."""
    num_particles: Count = 1
    """particles (SVPG), each an A2C of its own."""
    horizon: int | None = None
    """steps of a particle (SVPG); unused."""
    temperature: float | None = None
    """temperature of SVPG."""
    gamma: float = 0.99
    """discount factor of value-based algorithms, per step."""
    tau: float = 0.995
    """share of the target that a soft target update keeps (SAC)."""
    ent_coeff_init: float = 0.2
    """first weight of the entropy (SAC)."""
    learn_ent_coeff: bool = True
    """whether that weight is learnt, by an optimiser of its own (SAC)."""
    standardize_rew: bool = True
    """whether rewards get mean 0 and standard deviation 1 (SAC)."""
    rew_scale: float = 1.0
    """factor of the rewards (SAC)."""
    eps_init: float = 1.0
    """first probability of a random action (DQL)."""
    eps_schedule_gamma: float = 1.0
    """factor of that probability per iteration (DQL)."""
    eps_clip: float = 0.1
    """clip range of the probability ratio (PPO, PPO2)."""
    vfcn_coeff: float = 0.5
    """weight of the value loss (PPO2, A2C)."""
    entropy_coeff: float = 1e-3
    """weight of the entropy (PPO2, A2C)."""
    std_init: float = 1.0
    """first standard deviation of the actions."""
    max_grad_norm: float | None = None
    """largest norm of the gradients; ``None``: the algorithm's default, or any."""
    lr: float = 5e-4
    """learning rate."""
    lr_scheduler: str | None = None
    """learning-rate scheduler: one step per epoch (PPO, PPO2) or per iteration (the others)."""
    lr_scheduler_hparam: dict[str, Any] | None = None
    """settings of the scheduler."""
    logger_print_intvl: Count | None = field(default=None, kw_only=True)
    """``print_intvl`` of the logger, if one is passed: value-based algorithms evaluate whenever it
    prints, in place of every ``eval_intvl`` iterations."""
    env_max_steps: Count | None = field(default=None, kw_only=True)
    """``env.max_steps``: steps after which a rollout is cut."""
    episode_length: Count | None = field(default=None, kw_only=True)
    """steps of every rollout; ``None``: ``env_max_steps``, or unknown."""
    action_repeat: Count = field(default=1, kw_only=True)
    """env steps one action is held for; the environment's business."""
    max_episode_steps: Count | None = field(default=None, kw_only=True)
    """policy steps after which the kit truncates an episode."""
    recurrent: bool = field(default=False, kw_only=True)
    """whether the networks are recurrent: minibatches are then whole rollouts (on-policy)."""
    version: str = field(default="7c48d66", kw_only=True)
    """behaviour to reproduce; see ``VERSIONS``."""

    def __post_init__(self) -> None:
        if isinstance(self.critic, Mapping):
            self.critic = _critic(self.critic)

    def _guess(self) -> str:
        value_based = ("memory_size", "num_init_memory_steps", "num_updates_per_step")
        given = any(getattr(self, name) is not None for name in value_based)
        return "sac" if given else "ppo"

    def _defaults(self) -> Mapping[str, Any]:
        algo = {ON_POLICY: "ppo", OFF_POLICY: "sac"}.get(str(self.algo), str(self.algo))
        return _DEFAULTS[algo]

    # ------------------------------------------------------------------ what follows from them
    @property
    def iterations(self) -> int:
        """Iterations that are made."""
        if isinstance(self.max_iter, int) and self.max_iter < 0:
            return 0
        return whole_number("max_iter", self.max_iter)

    @property
    def rollout_length(self) -> int | None:
        """Steps of every rollout, if they are known."""
        return self.episode_length or self.env_max_steps

    @property
    def warm_up_steps(self) -> int:
        """Steps of the warm-up, at least; it consists of whole rollouts."""
        if self.memory_size is None:
            raise SettingError("memory_size", None, "is needed by value-based algorithms", [10**6])
        assert self.batch_size is not None
        if self.num_init_memory_steps is None:
            return self.memory_size
        if self.version == "documented":
            return max(self.num_init_memory_steps, 1)
        return max(min(self.num_init_memory_steps, self.memory_size), self.batch_size)

    @property
    def updates_per_iteration(self) -> int:
        """Gradient steps of one iteration of a value-based algorithm."""
        if self.num_updates_per_step is not None:
            return self.num_updates_per_step
        if self.min_steps is None:
            assert self.min_rollouts is not None
            return self.min_rollouts
        if self.env_max_steps is None:
            raise SettingError(
                "env_max_steps", None, "is needed to guess num_updates_per_step", "give either"
            )
        return -(-self.min_steps // self.env_max_steps)

    def critic_gradient_steps(self, rows: int) -> int:
        """Gradient steps of the critic's own optimiser in an iteration of ``rows`` transitions."""
        if self.resolved().algo != "ppo":
            return 0
        return self.critic.num_epoch * -(-rows // self.critic.batch_size)


def _critic(settings: Mapping[str, Any]) -> GAE:
    known = [f.name for f in fields(GAE)]
    for name in settings:
        if name not in known:
            raise SettingError(
                f"critic.{name}", settings[name], "is not a setting", nearest_first(name, known)[:3]
            )
    return GAE(**settings)
