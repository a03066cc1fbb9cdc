"""Settings for pyrado, the Python part of SimuRLacra (https://github.com/famura/SimuRLacra).

pyrado counts steps or samples, which are policy steps. It collects whole rollouts (episodes) until
a minimum number of steps or rollouts is reached. The first iteration of value-based algorithms is a
warm-up with random actions. ``Pyrado`` contains the settings for the classes A2C, PPO, PPO2, DQL,
SAC and SVPG. ``PyradoGAE`` contains the settings for pyrado's advantage estimator, which includes
the critic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import log
from typing import Annotated, Any, ClassVar, Literal

from kit.dialects.base import OFF_POLICY, ON_POLICY, RAW, WrappedDialect
from kit.dialects.expressions import Expressions
from kit.dialects.fields import MapsTo, count_field, extra_field, ignored, mapped
from kit.steps.errors import Limits, SettingError, check_fields, real_number, whole_number
from kit.steps.given import GivenFields
from kit.steps.plan import StepPlan
from kit.steps.schema import NonNegativeInt, PositiveInt

EVALUATION_ROLLOUTS = 100
"""Number of rollouts per evaluation in value-based algorithms."""

_CLIPPED, _JOINT = ("ppo", "ppo2"), ("ppo2", "a2c", "svpg")
_WORDS = ("algo", "version", "env_id", "episode_length")
"""Fields with text that is not an expression."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "a2c": {"batch_size": 32, "num_epoch": 1, "lr": 5e-4},
    "ppo": {"batch_size": 64, "num_epoch": 3, "lr": 5e-4},
    "ppo2": {"batch_size": 32, "num_epoch": 3, "lr": 5e-4},
    "svpg": {"batch_size": 32, "num_epoch": 1, "lr": 5e-4, "min_rollouts": 1},
    "dql": {"batch_size": 256, "target_update_intvl": 5, "max_grad_norm": 0.5, "lr": 5e-4},
    "sac": {"batch_size": 256, "target_update_intvl": 1, "max_grad_norm": 5.0, "lr": 3e-4},
}


_ON_POLICY = RAW | {
    "lr_schedule": "constant", "max_grad_norm": None, "critic_loss": "l2",
    "advantage_norm": "batch",
}  # fmt: skip
_IMPLICIT: dict[str, dict[str, Any]] = {
    "a2c": _ON_POLICY | {"optimizer": "rmsprop"},
    "ppo": _ON_POLICY | {"entropy_coeff": 0.0, "clip_value": None, "target_kl": None},
    "ppo2": _ON_POLICY | {"clip_value": True, "target_kl": None},
    "svpg": _ON_POLICY,
    "dql": RAW
    | {"lr_schedule": "constant", "n_step": 1, "double_dqn": False, "dueling": False, "tau": 1.0},
    "sac": RAW | {"n_step": 1},
}


def _schedule(scheduler: Any, arguments: Any, epochs: int, iterations: int, group: str) -> str:
    """Return the recipe's schedule for a learning-rate scheduler of torch.

    Args:
        scheduler: name of the scheduler's class, or ``None``.
        arguments: arguments of the scheduler.
        epochs: scheduler steps per iteration.
        iterations: iterations of the run.
        group: prefix of the field names, such as ``critic.``.
    """
    if scheduler is None:
        return "constant"
    given = dict(arguments or {})
    try:
        if scheduler == "ExponentialLR":
            return _exponential(given["gamma"], Fraction(1, epochs))
        if scheduler == "StepLR":
            return _exponential(given.get("gamma", 0.1), Fraction(given["step_size"], epochs))
        if scheduler == "MultiStepLR":
            gamma = given.get("gamma", 0.1)
            shares = [step / (epochs * iterations) for step in sorted(given["milestones"])]
            words = [f"{share} {gamma**k}" for k, share in enumerate(shares, 1) if share < 1]
            return " ".join(["piecewise", *words]) if words else "constant"
    except KeyError as missing:
        reason = f"{scheduler} needs {missing}"
        raise SettingError(
            f"{group}lr_scheduler_hparam", arguments, reason, f"Add {missing}"
        ) from None
    reason = "Recipes have no such schedule"
    works = ["ExponentialLR", "StepLR", "MultiStepLR"]
    raise SettingError(f"{group}lr_scheduler", scheduler, reason, works)


def _exponential(factor: float, every: Fraction) -> str:
    return f"exponential {factor}" if every == 1 else f"exponential {factor} {every}"


def _policy_schedule(_: Any, settings: Any) -> str:
    epochs = settings.num_epoch if settings.algo in _CLIPPED else 1
    return _schedule(
        settings.lr_scheduler, settings.lr_scheduler_hparam, epochs, settings.iterations, ""
    )


def _critic_schedule(_: Any, settings: Any) -> str:
    critic = settings.critic
    return _schedule(
        critic.lr_scheduler, critic.lr_scheduler_hparam, critic.num_epoch, settings.iterations,
        "critic.",
    )  # fmt: skip


_CLIPPED_ALONE = {"ppo2": "each network", "a2c": "the policy", "sac": "the policy"}
"""Networks whose gradients pyrado clips, for algorithms in which recipes clip differently."""


_FLOOR = MapsTo("epsilon_end", lambda decay, settings: settings.eps_init if decay == 1 else 0.05)
"""Final epsilon. DQL always uses the default ``eps_final`` of pyrado's exploration strategy."""


def _standardizes(value: Any, settings: Any) -> bool:
    return bool(value) or settings.algo == "ppo2"


def _statistics(value: Any, settings: Any) -> str | None:
    """Return the recipe's ``advantage_norm`` if advantages are not standardised."""
    if _standardizes(settings.critic.standardize_adv, settings):
        return None
    return "batch" if settings.algo == "svpg" else "minibatch"


@dataclass
class PyradoGAE(GivenFields):
    """Settings for pyrado's critic. Only PPO fits it with an optimiser of its own."""

    gamma: float = mapped("gamma", 0.99)
    """Discount factor per step."""
    lamda: float = mapped("gae_lambda", 0.95)
    """Lambda for generalised advantage estimation, from 0 (most bias) to 1 (most variance)."""
    num_epoch: PositiveInt = mapped("critic_epochs", 10, only="ppo")
    """Passes over the collected rollouts per critic update."""
    batch_size: PositiveInt = mapped("critic_minibatch_size", 64, only="ppo")
    """Transitions per critic minibatch."""
    standardize_adv: bool = mapped(
        "normalize_advantage", True, _standardizes, also=MapsTo("advantage_norm", _statistics)
    )
    """Whether to standardise advantages. PPO2 always standardises advantages."""
    standardizer: Literal["RunningStandardizer"] | None = mapped(
        "advantage_norm",
        None,
        lambda value, pyrado: "running" if value else _statistics(None, pyrado) or "batch",
    )
    """``RunningStandardizer`` for running statistics, or ``None`` for batch statistics."""
    max_grad_norm: float | None = mapped("critic_max_grad_norm", only="ppo")
    """Maximum gradient norm for the separate critic updates (PPO); ``None`` for no clipping."""
    lr: float = mapped("critic_learning_rate", 5e-4, only="ppo")
    """Learning rate of the critic."""
    lr_scheduler: str | None = mapped("critic_lr_schedule", None, _critic_schedule, only="ppo")
    """Learning-rate scheduler, stepped once per epoch."""
    lr_scheduler_hparam: dict[str, Any] | None = mapped(
        "critic_lr_schedule", None, _critic_schedule, only="ppo"
    )
    """Arguments of the learning-rate scheduler."""


@dataclass
class Pyrado(WrappedDialect):
    """Settings for pyrado's step-based algorithms. ``None`` means the algorithm's default.

    Values may be Python expressions, as in pyrado's scripts: ``"30 * env.max_steps"``.
    """

    __slots__ = ("_conditional",)

    NAME = "pyrado"
    LIBRARY = "pyrado"
    VERSIONS: ClassVar = {
        "7c48d66": "code of July 2021 (fork fdamken/SimuRLacra)",
        "05cfa26": "code of famura/SimuRLacra with use_trained_policy_for_refill",
    }
    ALGORITHMS: ClassVar = {
        **dict.fromkeys(("ppo", "ppo2", "a2c", "svpg"), ON_POLICY),
        **dict.fromkeys(("dql", "sac"), OFF_POLICY),
    }
    ALIASES: ClassVar = {"dqn": "dql"}
    IMPLIED: ClassVar = {"sac": ("memory_size", "num_init_memory_steps", "num_updates_per_step")}
    RECIPES: ClassVar = {"ppo2": "ppo", "dql": "dqn"}
    DEFAULTS: ClassVar = _DEFAULTS
    CANNOT: ClassVar = {"collects_episodes": (True, "it collects whole rollouts")}
    GROUPS: ClassVar = {"critic": PyradoGAE}
    SECTIONS: ClassVar = frozenset({"", "algo", "particle"})
    PATHS: ClassVar = {"algo_name": "algo", "env.max_steps": "env_max_steps"}
    IMPLICIT_DEFAULTS: ClassVar = _IMPLICIT

    max_iter: int = 1
    """Number of iterations, each with a collection and an update; 0 or less for no training."""
    min_rollouts: PositiveInt | None = count_field("min_episodes")
    """Minimum number of whole rollouts per collection."""
    min_steps: PositiveInt | None = count_field("min_steps")
    """Minimum number of steps per collection. If ``min_rollouts`` is set, both minimums apply."""
    num_epoch: NonNegativeInt = count_field(only=_CLIPPED)
    """Passes over the collected rollouts per policy update (PPO, PPO2)."""
    batch_size: PositiveInt = count_field()
    """Transitions per minibatch. The last minibatch of a pass may be smaller."""
    critic: PyradoGAE = field(default_factory=PyradoGAE, metadata={"only": (ON_POLICY,)})
    """Settings for the critic."""
    memory_size: PositiveInt | None = mapped("buffer_size", only=OFF_POLICY)
    """Capacity of the replay memory in transitions. The oldest transitions are dropped first."""
    num_init_memory_steps: NonNegativeInt | None = count_field(only=OFF_POLICY)
    """Random warm-up steps, rounded up to whole rollouts; defaults to ``memory_size``."""
    num_updates_per_step: NonNegativeInt | None = count_field(only=OFF_POLICY)
    """Gradient steps per iteration; if ``None``, derived from ``min_steps`` or ``min_rollouts``."""
    target_update_intvl: PositiveInt = mapped("target_update_every", only=OFF_POLICY)
    """Gradient steps between target updates, the first of which follows the first gradient step."""
    eval_intvl: PositiveInt = count_field(default=100, only=OFF_POLICY)
    """Iterations between evaluations with 100 rollouts each; ignored with a custom logger."""
    use_trained_policy_for_refill: bool = count_field(default=False, only=OFF_POLICY)
    """Whether the policy, not random actions, refills the replay memory after a reset."""
    num_workers: PositiveInt = ignored("it does not affect the samples", 4)
    """Number of sampling processes, which does not affect the samples."""
    num_particles: PositiveInt = mapped("num_particles", 1, only="svpg")
    """Number of particles (SVPG). Each particle is an A2C agent."""
    horizon: int | None = ignored("pyrado does not use it", only="svpg")
    """Steps per particle (SVPG); unused."""
    temperature: float | None = mapped("temperature", only="svpg")
    """Temperature (SVPG)."""
    gamma: float = mapped("gamma", 0.99, only=OFF_POLICY)
    """Discount factor per step (value-based algorithms)."""
    tau: float = mapped(
        "tau", 0.995, lambda value, _: round(1 - real_number("tau", value), 12), only="sac"
    )
    """Weight of the old target parameters in a soft update (SAC)."""
    ent_coeff_init: float = mapped("initial_alpha", 0.2, only="sac")
    """Initial entropy coefficient (SAC)."""
    learn_ent_coeff: bool = mapped("fixed_alpha", True, lambda learn, _: not learn, only="sac")
    """Whether the entropy coefficient is trained with a separate optimiser (SAC)."""
    standardize_rew: bool = mapped("standardize_reward", True, only="sac")
    """Whether rewards are standardised (SAC)."""
    rew_scale: float = mapped("reward_scale", 1.0, only="sac")
    """Reward scale (SAC)."""
    eps_init: float = mapped("epsilon_start", 1.0, only="dql")
    """Initial probability of a random action (DQL)."""
    eps_schedule_gamma: float | None = mapped("epsilon_decay", only="dql", also=_FLOOR)
    """Decay factor per iteration for ``epsilon - 0.05`` (DQL); defaults to the recipe's decay."""
    eps_clip: float = mapped("clip_epsilon", 0.1, only=_CLIPPED)
    """Clip range for the probability ratio (PPO, PPO2)."""
    vfcn_coeff: float = mapped("critic_coeff", 0.5, lambda value, _: value / 2, only=_JOINT)
    """Coefficient of the value loss, which is half the mean squared error (PPO2, A2C)."""
    entropy_coeff: float = mapped("entropy_coeff", 1e-3, only=_JOINT)
    """Entropy coefficient (PPO2, A2C)."""
    std_init: Annotated[float, Limits(0, open=True)] = mapped(
        "initial_log_std", 1.0, lambda value, _: log(value), only=ON_POLICY
    )
    """Initial standard deviation of the actions."""
    max_grad_norm: float | None = mapped("max_grad_norm")
    """Maximum gradient norm for the policy and PPO2's critic; ``None`` for the default."""
    lr: float = mapped("learning_rate")
    """Learning rate."""
    lr_scheduler: str | None = mapped("lr_schedule", None, _policy_schedule)
    """Learning-rate scheduler, stepped once per epoch (PPO, PPO2) or iteration (others)."""
    lr_scheduler_hparam: dict[str, Any] | None = mapped("lr_schedule", None, _policy_schedule)
    """Arguments of the learning-rate scheduler."""
    logger_print_intvl: PositiveInt | None = extra_field(only=OFF_POLICY)
    """``print_intvl`` of a custom logger, which replaces ``eval_intvl``."""
    env_max_steps: PositiveInt | None = extra_field()
    """Maximum rollout length in steps (``env.max_steps``)."""
    episode_length: PositiveInt | Literal["varies"] | None = extra_field()
    """Fixed rollout length in steps, or ``varies``; defaults to ``env_max_steps``."""
    recurrent: bool = extra_field(default=False)
    """Whether the networks are recurrent. On-policy minibatches then contain whole rollouts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.critic, Mapping):
            check_fields(self.critic, PyradoGAE, "is not a setting", "critic.")
            self.critic = PyradoGAE(**self.critic)
        expressions = Expressions({"env.max_steps": self._max_steps})
        for prefix, group in {"": self, "critic.": self.critic}.items():
            if not isinstance(group, GivenFields):
                continue
            texts = {n: v for n, v in vars(group).items() if isinstance(v, str) and n not in _WORDS}
            for name in sorted(texts, key="env_max_steps".__ne__):  # others depend on it
                setattr(group, name, expressions.value_of(f"{prefix}{name}", texts[name]))
        self._conditional = expressions.conditional

    def _max_steps(self, text: str) -> int:
        """Return the value of ``env.max_steps`` in an expression."""
        if self.env_max_steps is None:
            reason = f"{text!r} needs the maximum rollout length"
            raise SettingError("env_max_steps", None, reason, "Set env_max_steps")
        return whole_number("env_max_steps", self.env_max_steps, at_least=1)

    def fixed_values(self) -> dict[str, Any]:
        """Return what defines PPO (its critic), PPO2 (clipped values) and SVPG (particles)."""
        if self.algo == "ppo2":
            return {"clip_value": True}
        if self.algo == "svpg":
            return {"num_particles": self.num_particles}
        if self.algo != "ppo":
            return {}
        norm = self.critic.max_grad_norm
        return {"critic_epochs": self.critic.num_epoch, "critic_max_grad_norm": norm}

    # ------------------------------------------------------------------ derived counts
    @property
    def iterations(self) -> int:
        """Number of iterations."""
        if isinstance(self.max_iter, int) and self.max_iter < 0:
            return 0
        return whole_number("max_iter", self.max_iter)

    @property
    def rollout_length(self) -> int | None:
        """Fixed rollout length in steps, or ``None`` if the length is unknown."""
        if self.episode_length == "varies":
            return None
        return self.episode_length or self.env_max_steps

    @property
    def warm_up_steps(self) -> int:
        """Minimum number of warm-up steps, which are collected in whole rollouts."""
        if self.memory_size is None:
            raise SettingError(
                "memory_size", None, "Value-based algorithms need a replay memory", [10**6]
            )
        if self.num_init_memory_steps is None:
            return self.memory_size
        return max(min(self.num_init_memory_steps, self.memory_size), self.batch_size)

    @property
    def updates_per_iteration(self) -> int:
        """Number of gradient steps per iteration in a value-based algorithm."""
        if self.num_updates_per_step is not None:
            return self.num_updates_per_step
        if self.min_steps is None:
            assert self.min_rollouts is not None
            return self.min_rollouts
        if self.env_max_steps is None:
            reason = "The default of num_updates_per_step depends on env_max_steps"
            hint = "Set env_max_steps or num_updates_per_step"
            raise SettingError("env_max_steps", None, reason, hint)
        return -(-self.min_steps // self.env_max_steps)

    def critic_gradient_steps(self, rows: int) -> int:
        """Return the number of separate critic gradient steps on ``rows`` transitions."""
        if self.resolved().algo != "ppo":
            return 0
        return self.critic.num_epoch * -(-rows // self.critic.batch_size)

    def after_reset(self) -> StepPlan:
        """Return the plan for a run after ``reset()``, which refills the replay memory."""
        plan = self.to_plan()
        if plan.on_policy:
            return plan
        return plan.replace(prefill_random=not self.use_trained_policy_for_refill)

    # ------------------------------------------------------------------ to a plan
    def _plan(self) -> dict[str, Any]:
        if self.min_rollouts is None and self.min_steps is None:
            reason = "A collection needs a minimum number of steps or rollouts"
            raise SettingError("min_steps", None, reason, [1], "or set min_rollouts")
        plan: dict[str, Any] = {
            "iterations": self.iterations,
            "episode_length": self.rollout_length,
            "max_episode_steps": self.env_max_steps,
        }
        return plan | (self._on_policy() if self.family == ON_POLICY else self._value_based())

    def _on_policy(self) -> dict[str, Any]:
        size, length = self.batch_size, self.rollout_length
        if self.recurrent and length is not None:
            size = -(-size // length) * length
        particles = self.algo == "svpg"
        return {
            "update_epochs": 1 if self.algo in ("a2c", "svpg") else self.num_epoch,
            "minibatch_size": size,
            "minibatches_per_gradient_step": None if particles else 1,
            "world_size": self.num_particles if particles else 1,
        }

    def _value_based(self) -> dict[str, Any]:
        self._check_memory(self.warm_up_steps)
        return {
            "prefill_steps": self.warm_up_steps,
            "prefill_is_iteration": True,
            "random_steps": 0,
            "gradient_steps_per_iteration": self.updates_per_iteration,
            "minibatch_size": self.batch_size,
            "evaluation_every_iterations": self.logger_print_intvl or self.eval_intvl,
            "evaluation_before_update": True,
            "evaluation_episodes": EVALUATION_ROLLOUTS,
        }

    def _check_memory(self, warm_up: int) -> None:
        """Check the size of the replay memory. pyrado never samples the last two transitions."""
        assert self.memory_size is not None
        length, stored = self.rollout_length, self.memory_size
        if length is not None:
            stored = min(stored, -(-warm_up // length) * length)
        if self.updates_per_iteration and self.iterations and self.batch_size > stored - 2:
            reason = (
                f"The memory has {stored} transitions at the first update, and pyrado never "
                "samples the last two"
            )
            hint = "Increase memory_size and num_init_memory_steps"
            works = [stored - 2] if stored > 2 else hint
            raise SettingError("batch_size", self.batch_size, reason, works)

    # ------------------------------------------------------------------ from a plan
    @staticmethod
    def _fields_for(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "max_iter": plan.iterations,
            "batch_size": plan.minibatch_size,
            "env_max_steps": plan.max_episode_steps,
            "episode_length": plan.episode_length,
        }
        if plan.on_policy:
            accumulates = plan.minibatches_per_gradient_step is None
            algo = "svpg" if plan.world_size > 1 or accumulates else "ppo"
            fields |= {"num_epoch": plan.update_epochs, "algo": settings.get("algo", algo)}
            return fields | {"num_particles": plan.world_size}
        every = plan.evaluation_every_iterations
        return fields | {
            "algo": settings.get("algo", "sac"),
            "memory_size": max(plan.prefill_steps, 10**6),
            "num_init_memory_steps": plan.prefill_steps,
            "num_updates_per_step": plan.gradient_steps_per_iteration or 0,
            "eval_intvl": every if every is not None else max(plan.iterations, 1),
        }

    # ------------------------------------------------------------------ caveats
    def _notes(self, plan: StepPlan) -> Iterator[str]:
        if plan.iterations == 0:
            yield f"max_iter={self.max_iter} is valid, but trains nothing."
        if self.algo in _JOINT:
            yield "Critic targets are Monte Carlo returns, regardless of critic.lamda."
        if self.max_grad_norm is not None and self.algo in _CLIPPED_ALONE:
            yield (
                f"max_grad_norm={self.max_grad_norm:g} clips the gradients of "
                f"{_CLIPPED_ALONE[self.algo]} alone; recipes clip the gradients of each optimiser."
            )
        yield from self._script_notes(plan)
        if self.min_steps is not None and (self.min_rollouts or 1) > 1:
            yield "A collection satisfies both min_steps and min_rollouts."
        if self.rollout_length is None:
            yield "Counts cannot be planned without a fixed episode_length or env_max_steps."
        elif self.min_steps is not None and plan.frames_per_batch != self.min_steps:
            yield f"A collection of whole rollouts has {plan.frames_per_batch} steps."
        if self.num_workers > 1 and self.min_steps != 1:
            yield "With several workers, surplus rollouts are discarded and not counted."
        yield from (self._on_policy_notes if plan.on_policy else self._value_based_notes)(plan)
        if self.env_max_steps is not None:
            yield "Rollouts of env_max_steps are terminated in pyrado and truncated in recipes."

    def _script_notes(self, plan: StepPlan) -> Iterator[str]:
        for name, condition in self._conditional.items():
            yield f"{name} is the value that holds if {condition}."
        steps = [self.lr_scheduler, self.critic.lr_scheduler if self.algo == "ppo" else None]
        if self.algo in _CLIPPED and any(steps):
            yield "Schedulers step once per epoch; recipes apply the steps between iterations."

    def _on_policy_notes(self, plan: StepPlan) -> Iterator[str]:
        if self.algo == "ppo":
            steps = self.critic_gradient_steps(plan.frames_per_batch) if plan.is_exact else 0
            count = f"{steps} " if steps else ""
            yield f"Each iteration starts with {count}separate gradient steps of the critic."
            if self.critic.standardize_adv:
                yield (
                    "Critic targets are values plus standardised advantages; recipes do not "
                    "standardise the advantages of critic targets."
                )
            if self.critic.standardizer:
                yield (
                    "RunningStandardizer uses the mean and variance of the means of batches and "
                    "does not standardise the first batch; recipes use all advantages."
                )
        elif self.algo == "ppo2":
            yield "One optimiser trains both networks; the critic's epochs and batches are unused."
        elif self.algo == "svpg":
            yield (
                f"Each of {self.num_particles} particles takes one gradient step with the mean "
                "gradient of a pass. The plan counts particles as processes. A run trains them in "
                "one process, where each gradient step is one step of every particle."
            )
            if self.min_steps is None and self.min_rollouts == 1:
                yield "Each particle collects one rollout per iteration unless min_steps is set."
        else:
            yield "A2C makes one pass over the rollouts with one gradient step per minibatch."

    def _value_based_notes(self, plan: StepPlan) -> Iterator[str]:
        requested, minimum = self.num_init_memory_steps, self.warm_up_steps
        if requested is not None and requested != minimum:
            yield f"num_init_memory_steps={requested} is changed to {minimum}."
        if plan.is_exact and plan.local_prefill_steps != minimum:
            yield f"The warm-up has {plan.local_prefill_steps} steps in whole rollouts."
        yield "The first iteration is the warm-up with random actions and also trains."
        if self.num_updates_per_step is None and self.min_steps is not None:
            yield f"num_updates_per_step={self.updates_per_iteration} follows from env_max_steps."
        period = self.target_update_intvl
        counted = f"target_update_intvl={period} counts gradient steps, not iterations"
        if period > 1:
            theirs, ours = f"1, {period + 1:,}, {2 * period + 1:,}", f"{period:,}, {2 * period:,}"
            counted += f": pyrado updates after steps {theirs}, ..., the kit after {ours}, ..."
        yield counted + "."
        yield (
            "An evaluation runs 100 rollouts before the update. A custom logger evaluates whenever "
            "it prints and ignores eval_intvl; set logger_print_intvl in this case."
        )
        if self.algo == "dql":
            yield "DQL uses RMSprop; recipes use Adam."
        if self.algo == "sac":
            if self.lr_scheduler is not None:
                yield "lr_scheduler spares the rate of the entropy coefficient; here it does not."
            optimizers = 3 if self.learn_ent_coeff else 2
            yield f"A gradient step of SAC includes one step of each of {optimizers} optimisers."
