"""The words of pyrado, the Python side of SimuRLacra (https://github.com/famura/SimuRLacra).

Its unit is the step or sample, the policy step here, and it collects whole rollouts (episodes)
until its minima are met. A value-based algorithm makes its first iteration with a warm-up of
random actions. ``Pyrado`` has the settings of all its step-based algorithms, whose classes are
A2C, PPO, PPO2, DQL, SAC and SVPG; ``GAE`` has those of the advantage estimator that a critic is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from kit.dialects.base import OFF_POLICY, ON_POLICY, Dialect
from kit.steps.errors import SettingError, nearest_first, whole_number, yes_or_no
from kit.steps.plan import StepPlan

EVALUATION_ROLLOUTS = 100
"""Rollouts of one evaluation of a value-based algorithm."""

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
class Pyrado(Dialect):
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
        "use_trained_policy_for_refill": (OFF_POLICY,),
        "gamma": (OFF_POLICY,),
        "eps_init": ("dql",),
        "eps_schedule_gamma": ("dql",),
        **dict.fromkeys(("tau", "ent_coeff_init", "learn_ent_coeff"), ("sac",)),
        **dict.fromkeys(("standardize_rew", "rew_scale"), ("sac",)),
    }
    AT_LEAST: ClassVar[Mapping[str, int]] = {
        "min_rollouts": 1,
        "min_steps": 1,
        "num_epoch": 0,
        "batch_size": 1,
        "memory_size": 1,
        "num_init_memory_steps": 0,
        "num_updates_per_step": 0,
        "target_update_intvl": 1,
        "eval_intvl": 1,
        "num_workers": 1,
        "num_particles": 1,
        "env_max_steps": 1,
        "episode_length": 1,
        "action_repeat": 1,
        "max_episode_steps": 1,
    }
    CARRIED: ClassVar[frozenset[str]] = frozenset(
        {"memory_size", "num_workers", "target_update_intvl", "use_trained_policy_for_refill"}
        | {"max_grad_norm", "lr", "lr_scheduler", "lr_scheduler_hparam", "gamma", "critic"}
        | {"eps_clip", "vfcn_coeff", "entropy_coeff", "std_init", "horizon", "temperature"}
        | {"eps_init", "eps_schedule_gamma", "tau", "ent_coeff_init", "learn_ent_coeff"}
        | {"standardize_rew", "rew_scale"}
    )

    NESTED: ClassVar[frozenset[str]] = frozenset({"critic"})

    max_iter: int = 1
    """iterations, each a collection and an update phase; 0 and less train nothing."""
    min_rollouts: int | None = None
    """whole rollouts of one collection, at least."""
    min_steps: int | None = None
    """steps of one collection of whole rollouts, at least; with ``min_rollouts`` both hold."""
    num_epoch: int | None = None
    """passes over the collected rollouts in one update of the policy (PPO, PPO2)."""
    batch_size: int | None = None
    """transitions in a minibatch; the last one of a pass is smaller."""
    critic: GAE = field(default_factory=GAE)
    """settings of the critic."""
    memory_size: int | None = None
    """transitions in the replay memory; the newest are kept."""
    num_init_memory_steps: int | None = None
    """steps of the warm-up with random actions, in whole rollouts; ``None``: ``memory_size``."""
    num_updates_per_step: int | None = None
    """gradient steps of one iteration; ``None``: ``ceil(min_steps / env_max_steps)``, or
    ``min_rollouts`` without ``min_steps``."""
    target_update_intvl: int | None = None
    """gradient steps between target updates, the first one included."""
    eval_intvl: int = 100
    """iterations between evaluations of 100 rollouts, before the update, the first one included;
    ignored if a logger is passed."""
    use_trained_policy_for_refill: bool = False
    """whether the memory is filled by the exploring policy, not at random, after a reset."""
    num_workers: int = 4
    """processes that sample; what they sample is the same for any number."""
    num_particles: int = 1
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
    env_max_steps: int | None = field(default=None, kw_only=True)
    """``env.max_steps``: steps after which a rollout is cut."""
    episode_length: int | None = field(default=None, kw_only=True)
    """steps of every rollout; ``None``: ``env_max_steps``, or unknown."""
    action_repeat: int = field(default=1, kw_only=True)
    """env steps one action is held for; the environment's business."""
    max_episode_steps: int | None = field(default=None, kw_only=True)
    """policy steps after which the kit truncates an episode."""
    recurrent: bool = field(default=False, kw_only=True)
    """whether the networks are recurrent: minibatches are then whole rollouts (on-policy)."""
    version: str = field(default="7c48d66", kw_only=True)
    """behaviour that is meant; see ``VERSIONS``."""

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

    # ------------------------------------------------------------------ to a plan
    def _plan(self) -> StepPlan:
        for name in ("recurrent", "learn_ent_coeff", "use_trained_policy_for_refill"):
            yes_or_no(name, getattr(self, name))
        if self.min_rollouts is None and self.min_steps is None:
            raise SettingError(
                "min_steps", None, "leaves open what to collect", [1], "or give min_rollouts"
            )
        made: dict[str, Any] = {
            "iterations": self.iterations,
            "min_steps": self.min_steps,
            "min_episodes": self.min_rollouts,
            "episode_length": self.rollout_length,
            "action_repeat": self.action_repeat,
            "max_episode_steps": self.max_episode_steps,
            "final_evaluation": False,
        }
        on_policy = self.family == ON_POLICY
        return StepPlan(**made | (self._on_policy() if on_policy else self._value_based()))

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

    def _on_policy(self) -> dict[str, Any]:
        assert self.batch_size is not None
        size, length = self.batch_size, self.rollout_length
        if self.recurrent and length is not None:
            size = -(-size // length) * length
        if not isinstance(self.critic, GAE):
            raise SettingError("critic", self.critic, "is no GAE", "use GAE(num_epoch=10)")
        whole_number("critic.num_epoch", self.critic.num_epoch)
        whole_number("critic.batch_size", self.critic.batch_size, 1)
        particles = self.algo == "svpg"
        return {
            "update_epochs": 1 if self.algo in ("a2c", "svpg") else self.num_epoch,
            "minibatch_size": size,
            "minibatches_per_gradient_step": None if particles else 1,
            "world_size": self.num_particles if particles else 1,
        }

    def _value_based(self) -> dict[str, Any]:
        warm_up = self.warm_up_steps
        self._check_memory(warm_up)
        return {
            "prefill_steps": warm_up,
            "prefill_is_iteration": True,
            "random_steps": 0,
            "gradient_steps_per_iteration": self.updates_per_iteration,
            "minibatch_size": self.batch_size,
            "evaluation_every_iterations": self.eval_intvl,
            "evaluation_before_update": True,
            "evaluation_episodes": EVALUATION_ROLLOUTS,
        }

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

    def _check_memory(self, warm_up: int) -> None:
        """It samples without replacement from all but two of the transitions it holds."""
        assert self.memory_size is not None
        assert self.batch_size is not None
        length = self.rollout_length
        held = self.memory_size
        if length is not None:
            held = min(held, -(-warm_up // length) * length)
        if self.updates_per_iteration and self.iterations and self.batch_size > held - 2:
            raise SettingError(
                "batch_size",
                self.batch_size,
                f"is more than the memory can sample: it holds {held} transitions at its first "
                "update, and the last two are never sampled",
                [held - 2] if held > 2 else "use a larger memory_size and num_init_memory_steps",
            )

    def after_reset(self) -> StepPlan:
        """Return the run that follows a ``reset()``: the emptied memory is filled once more.

        Raises:
            SettingError: for DQL in version 7c48d66, whose ``reset`` fails.
        """
        plan = self.to_plan()
        if plan.on_policy:
            return plan
        if self.resolved().algo == "dql" and self.version == "7c48d66":
            raise SettingError(
                "algo", "dql", "cannot be reset: its exploration has no reset_expl_params", ["sac"]
            )
        return plan.replace(prefill_random=not self.use_trained_policy_for_refill)

    def critic_gradient_steps(self, rows: int) -> int:
        """Gradient steps of the critic's own optimiser in an iteration of ``rows`` transitions."""
        if self.resolved().algo != "ppo":
            return 0
        return self.critic.num_epoch * -(-rows // self.critic.batch_size)

    # ------------------------------------------------------------------ from a plan
    @classmethod
    def _from(cls, plan: StepPlan, settings: Mapping[str, Any]) -> Self:
        if not plan.collects_episodes:
            raise SettingError(
                "steps_per_env",
                plan.steps_per_env,
                "cannot be said in pyrado: it collects rollouts",
            )
        every = plan.evaluation_every_iterations
        made: dict[str, Any] = {
            "max_iter": plan.iterations,
            "min_steps": plan.min_steps,
            "min_rollouts": plan.min_episodes,
            "batch_size": plan.minibatch_size,
            "env_max_steps": plan.episode_length,
            "episode_length": plan.episode_length,
            "action_repeat": plan.action_repeat,
            "max_episode_steps": plan.max_episode_steps,
        }
        if plan.on_policy:
            accumulates = plan.minibatches_per_gradient_step is None
            algo = "svpg" if plan.world_size > 1 or accumulates else "ppo"
            made |= {"num_epoch": plan.update_epochs, "algo": settings.get("algo", algo)}
            return cls(**made, num_particles=plan.world_size)
        return cls(
            **made,
            algo=settings.get("algo", "sac"),
            memory_size=max(plan.prefill_steps, 10**6),
            num_init_memory_steps=plan.prefill_steps,
            num_updates_per_step=plan.gradient_steps_per_iteration or 0,
            eval_intvl=every if every is not None else max(plan.iterations, 1),
        )

    def notes(self) -> list[str]:
        """Return what a reader of these settings would not expect, a sentence each."""
        from kit.dialects.pyrado.notes import notes

        return notes(self.resolved(), self.to_plan())


def _critic(settings: Mapping[str, Any]) -> GAE:
    known = [f.name for f in fields(GAE)]
    for name in settings:
        if name not in known:
            raise SettingError(
                f"critic.{name}", settings[name], "is not a setting", nearest_first(name, known)[:3]
            )
    return GAE(**settings)
