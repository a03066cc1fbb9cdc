"""The vocabulary of pyrado, the Python side of SimuRLacra (https://github.com/famura/SimuRLacra).

Its unit is the step or sample, the policy step here, and it collects whole rollouts (episodes)
until its minima are met. A value-based algorithm makes its first iteration with a warm-up of
random actions. ``Pyrado`` has the settings of all its step-based algorithms, whose classes are
A2C, PPO, PPO2, DQL, SAC and SVPG; ``PyradoGAE`` has those of the advantage estimator that a
critic is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import log
from typing import Annotated, Any, ClassVar, Literal

from kit.dialects.base import OFF_POLICY, ON_POLICY, RAW, WrappedDialect
from kit.dialects.fields import Acts, acts, counts, fact, refused
from kit.steps.errors import Limits, SettingError, check_fields, real_number, whole_number
from kit.steps.given import GivenFields
from kit.steps.plan import StepPlan
from kit.steps.schema import NonNegativeInt, PositiveInt

EVALUATION_ROLLOUTS = 100
"""Rollouts of one evaluation of a value-based algorithm."""

_CLIPPED, _JOINT = ("ppo", "ppo2"), ("ppo2", "a2c", "svpg")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "a2c": {"batch_size": 32, "num_epoch": 1, "lr": 5e-4},
    "ppo": {"batch_size": 64, "num_epoch": 3, "lr": 5e-4},
    "ppo2": {"batch_size": 32, "num_epoch": 3, "lr": 5e-4},
    "svpg": {"batch_size": 32, "num_epoch": 1, "lr": 5e-4},
    "dql": {"batch_size": 256, "target_update_intvl": 5, "max_grad_norm": 0.5, "lr": 5e-4},
    "sac": {"batch_size": 256, "target_update_intvl": 1, "max_grad_norm": 5.0, "lr": 3e-4},
}


_ON_POLICY = RAW | {
    "lr_schedule": "constant", "max_grad_norm": None, "critic_loss": "l2", "advantage_norm": "batch",
}  # fmt: skip
_UNSAID: dict[str, dict[str, Any]] = {
    "a2c": _ON_POLICY | {"optimizer": "rmsprop"},
    "ppo": _ON_POLICY | {"entropy_coeff": 0.0, "clip_value": None, "target_kl": None},
    "ppo2": _ON_POLICY | {"clip_value": True, "target_kl": None},
    "dql": RAW
    | {"lr_schedule": "constant", "n_step": 1, "double_dqn": False, "dueling": False, "tau": 1.0},
    "sac": RAW | {"n_step": 1},
}


def _of_critic(name: str) -> Callable[[Any, Any], Any]:
    """The value of a setting of the critic's own updates."""

    def value_of(value: Any, settings: Any) -> Any:
        if settings.algo != "ppo":
            why = f"has no effect in {settings.algo}, whose critic learns with the policy"
            raise SettingError(f"critic.{name}", value, why, "leave it out")
        return value

    return value_of


def _epochs(value: Any, settings: Any) -> int:
    """Passes of the critic's own updates."""
    own = _of_critic("num_epoch")(value, settings)
    return whole_number("critic.num_epoch", own, at_least=1)


def _norm(value: Any, settings: Any) -> Any:
    """The largest norm of gradients.

    Recipes have one for each optimiser: of the critic's own (PPO) it is the policy's, too.
    """
    policy, critic = settings.max_grad_norm, settings.critic.max_grad_norm
    if settings.algo == "ppo" and policy != critic:
        why = f"is the policy's, and critic.max_grad_norm={critic} the critic's: recipes have one"
        raise SettingError("max_grad_norm", policy, why, "give both the same value")
    return value


_CLIPPED_ALONE = {"ppo2": "each network", "a2c": "the policy", "sac": "the policy"}
"""Whose gradients ``max_grad_norm`` clips where these are not those of an optimiser."""


def _critic_norm(value: Any, settings: Any) -> Any:
    return _norm(_of_critic("max_grad_norm")(value, settings), settings)


_EPOCHS = Acts("critic_epochs", lambda _, settings: _epochs(settings.critic.num_epoch, settings))
"""What gives the critic an optimiser of its own in recipes, for settings of it."""

_FLOOR = Acts("epsilon_end", lambda factor, given: given.eps_init if factor == 1 else 0.05)
"""What epsilon approaches: ``eps_final`` of pyrado's exploration, which DQL leaves as it is."""


@dataclass
class PyradoGAE(GivenFields):
    """Settings of pyrado's critic, which has an optimiser of its own (not so in PPO2 and A2C)."""

    gamma: float = acts("gamma", 0.99)
    """discount factor per step."""
    lamda: float = acts("gae_lambda", 0.95)
    """trade-off between bias (0) and variance (1)."""
    num_epoch: NonNegativeInt = acts("critic_epochs", 10, _epochs)
    """passes over the collected rollouts in one update of the critic."""
    batch_size: PositiveInt = acts(
        "critic_minibatch_size", 64, _of_critic("batch_size"), also=_EPOCHS
    )
    """transitions in a minibatch of the critic."""
    standardize_adv: bool = acts(
        "normalize_advantage", True, lambda value, given: value or given.algo == "ppo2"
    )
    """whether advantages get mean 0 and standard deviation 1; in PPO2 they always do."""
    standardizer: Literal["RunningStandardizer"] | None = acts(
        "advantage_norm", None, lambda value, _: "running" if value else None
    )
    """``RunningStandardizer``: of all advantages so far; ``None``: of those of each batch."""
    max_grad_norm: float | None = acts("max_grad_norm", None, _critic_norm, also=_EPOCHS)
    """largest norm of the gradients of the critic's own updates (PPO); ``None``: any."""
    lr: float = acts("critic_learning_rate", 5e-4, _of_critic("lr"), also=_EPOCHS)
    """learning rate."""
    lr_scheduler: str | None = refused("use anneal")
    """learning-rate scheduler, one step per epoch."""
    lr_scheduler_hparam: dict[str, Any] | None = refused("use anneal")
    """settings of the scheduler."""


@dataclass
class Pyrado(WrappedDialect):
    """Settings of pyrado's step-based algorithms; ``None`` stands for the algorithm's default."""

    NAME = "pyrado"
    LIBRARY = "pyrado"
    VERSIONS: ClassVar = {
        "7c48d66": "the code of July 2021 (fork fdamken/SimuRLacra)",
        "05cfa26": "the code of famura/SimuRLacra with use_trained_policy_for_refill",
    }
    ALGORITHMS: ClassVar = {
        **dict.fromkeys(("ppo", "ppo2", "a2c", "svpg"), ON_POLICY),
        **dict.fromkeys(("dql", "sac"), OFF_POLICY),
    }
    ALIASES: ClassVar = {"dqn": "dql"}
    IMPLIED: ClassVar = {"sac": ("memory_size", "num_init_memory_steps", "num_updates_per_step")}
    DEFAULTS: ClassVar = _DEFAULTS
    CANNOT: ClassVar = {"collects_episodes": (True, "it collects rollouts")}
    GROUPS: ClassVar = {"critic": PyradoGAE}
    IMPLICIT_DEFAULTS: ClassVar = _UNSAID

    max_iter: int = 1
    """iterations, each a collection and an update phase; 0 and less train nothing."""
    min_rollouts: PositiveInt | None = counts("min_episodes")
    """whole rollouts of one collection, at least."""
    min_steps: PositiveInt | None = counts("min_steps")
    """steps of one collection of whole rollouts, at least; with ``min_rollouts`` both hold."""
    num_epoch: NonNegativeInt = counts(only=_CLIPPED)
    """passes over the collected rollouts in one update of the policy (PPO, PPO2)."""
    batch_size: PositiveInt = counts()
    """transitions in a minibatch; the last one of a pass is smaller."""
    critic: PyradoGAE = field(default_factory=PyradoGAE, metadata={"only": (ON_POLICY,)})
    """settings of the critic."""
    memory_size: PositiveInt | None = acts("buffer_size", only=OFF_POLICY)
    """transitions in the replay memory; the newest are kept."""
    num_init_memory_steps: NonNegativeInt | None = counts(only=OFF_POLICY)
    """steps of the warm-up with random actions, in whole rollouts; ``None``: ``memory_size``."""
    num_updates_per_step: NonNegativeInt | None = counts(only=OFF_POLICY)
    """gradient steps of one iteration; ``None``: ``ceil(min_steps / env_max_steps)``, or
    ``min_rollouts`` without ``min_steps``."""
    target_update_intvl: PositiveInt = acts("target_update_every", only=OFF_POLICY)
    """gradient steps between target updates; pyrado also makes one after the first."""
    eval_intvl: PositiveInt = counts(default=100, only=OFF_POLICY)
    """iterations between evaluations of 100 rollouts, before the update, the first one included;
    ignored if a logger is passed."""
    use_trained_policy_for_refill: bool = counts(default=False, only=OFF_POLICY)
    """whether the memory is filled by the exploring policy, not at random, after a reset."""
    num_workers: PositiveInt = refused("it changes no sample: use env.vectorization=async", 4)
    """processes that sample; samples are the same for any number."""
    num_particles: PositiveInt = counts(default=1, only="svpg")
    """particles (SVPG), each an A2C of its own."""
    horizon: int | None = refused("pyrado does not use it", only="svpg")
    """steps of a particle (SVPG); unused."""
    temperature: float | None = refused("recipes.svpg has it, without whole rollouts", only="svpg")
    """temperature of SVPG."""
    gamma: float = acts("gamma", 0.99, only=OFF_POLICY)
    """discount factor of value-based algorithms, per step."""
    tau: float = acts(
        "tau", 0.995, lambda value, _: round(1 - real_number("tau", value), 12), only="sac"
    )
    """share of the target that a soft target update keeps (SAC)."""
    ent_coeff_init: float = acts("initial_alpha", 0.2, only="sac")
    """first weight of the entropy (SAC)."""
    learn_ent_coeff: bool = acts("fixed_alpha", True, lambda learn, _: not learn, only="sac")
    """whether that weight is learnt, by an optimiser of its own (SAC)."""
    standardize_rew: bool = acts("standardize_reward", True, only="sac")
    """whether rewards get mean 0 and standard deviation 1 (SAC)."""
    rew_scale: float = acts("reward_scale", 1.0, only="sac")
    """factor of the rewards (SAC)."""
    eps_init: float = acts("epsilon_start", 1.0, only="dql")
    """first probability of a random action (DQL)."""
    eps_schedule_gamma: float | None = acts("epsilon_decay", only="dql", also=_FLOOR)
    """factor per iteration of what that probability has above 0.05 (DQL), which pyrado asks for;
    ``None``: the recipe's schedule."""
    eps_clip: float = acts("clip_epsilon", 0.1, only=_CLIPPED)
    """clip range of the probability ratio (PPO, PPO2)."""
    vfcn_coeff: float = acts("critic_coeff", 0.5, lambda value, _: value / 2, only=_JOINT)
    """weight of the value loss, which is half a mean of squares (PPO2, A2C)."""
    entropy_coeff: float = acts("entropy_coeff", 1e-3, only=_JOINT)
    """weight of the entropy (PPO2, A2C)."""
    std_init: Annotated[float, Limits(0, open=True)] = acts(
        "initial_log_std", 1.0, lambda value, _: log(value), only=ON_POLICY
    )
    """first standard deviation of the actions."""
    max_grad_norm: float | None = acts("max_grad_norm", None, _norm)
    """largest norm of the policy's gradients, in PPO2 also of the critic's; ``None``: the
    algorithm's default, or any."""
    lr: float = acts("learning_rate")
    """learning rate."""
    lr_scheduler: str | None = refused("use anneal")
    """learning-rate scheduler: one step per epoch (PPO, PPO2) or per iteration (the others)."""
    lr_scheduler_hparam: dict[str, Any] | None = refused("use anneal")
    """settings of the scheduler."""
    logger_print_intvl: PositiveInt | None = fact(only=OFF_POLICY)
    """``print_intvl`` of the logger, if one is passed: value-based algorithms evaluate whenever it
    prints, in place of every ``eval_intvl`` iterations."""
    env_max_steps: PositiveInt | None = fact()
    """``env.max_steps``: steps after which a rollout is cut."""
    episode_length: PositiveInt | None = fact()
    """steps of every rollout; ``None``: ``env_max_steps``, or unknown."""
    recurrent: bool = fact(default=False)
    """whether the networks are recurrent: minibatches are then whole rollouts (on-policy)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.critic, Mapping):
            check_fields(self.critic, PyradoGAE, "is not a setting", "critic.")
            self.critic = PyradoGAE(**self.critic)

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
        if self.num_init_memory_steps is None:
            return self.memory_size
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
            why = "is needed to guess num_updates_per_step"
            raise SettingError("env_max_steps", None, why, "give either")
        return -(-self.min_steps // self.env_max_steps)

    def critic_gradient_steps(self, rows: int) -> int:
        """Gradient steps of the critic's own optimiser in an iteration of ``rows`` transitions."""
        if self.resolved().algo != "ppo":
            return 0
        return self.critic.num_epoch * -(-rows // self.critic.batch_size)

    def after_reset(self) -> StepPlan:
        """The run that follows a ``reset()``: the emptied memory is filled once more."""
        plan = self.to_plan()
        if plan.on_policy:
            return plan
        return plan.replace(prefill_random=not self.use_trained_policy_for_refill)

    # ------------------------------------------------------------------ to a plan
    def _plan(self) -> dict[str, Any]:
        if self.min_rollouts is None and self.min_steps is None:
            why = "leaves open what to collect"
            raise SettingError("min_steps", None, why, [1], "or give min_rollouts")
        made = {
            "iterations": self.iterations,
            "episode_length": self.rollout_length,
            "max_episode_steps": self.env_max_steps,
        }
        return made | (self._on_policy() if self.family == ON_POLICY else self._value_based())

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
        """It samples without replacement from all but two of the transitions it holds."""
        assert self.memory_size is not None
        length, held = self.rollout_length, self.memory_size
        if length is not None:
            held = min(held, -(-warm_up // length) * length)
        if self.updates_per_iteration and self.iterations and self.batch_size > held - 2:
            why = (
                f"is more than the memory can sample: it holds {held} transitions at its first "
                "update, and the last two are never sampled"
            )
            works = [held - 2] if held > 2 else "use a larger memory_size and num_init_memory_steps"
            raise SettingError("batch_size", self.batch_size, why, works)

    # ------------------------------------------------------------------ from a plan
    @staticmethod
    def _from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {
            "max_iter": plan.iterations,
            "batch_size": plan.minibatch_size,
            "env_max_steps": plan.max_episode_steps,
            "episode_length": plan.episode_length,
        }
        if plan.on_policy:
            accumulates = plan.minibatches_per_gradient_step is None
            algo = "svpg" if plan.world_size > 1 or accumulates else "ppo"
            made |= {"num_epoch": plan.update_epochs, "algo": settings.get("algo", algo)}
            return made | {"num_particles": plan.world_size}
        every = plan.evaluation_every_iterations
        return made | {
            "algo": settings.get("algo", "sac"),
            "memory_size": max(plan.prefill_steps, 10**6),
            "num_init_memory_steps": plan.prefill_steps,
            "num_updates_per_step": plan.gradient_steps_per_iteration or 0,
            "eval_intvl": every if every is not None else max(plan.iterations, 1),
        }

    # ------------------------------------------------------------------ caveats
    def _notes(self, plan: StepPlan) -> Iterator[str]:
        if plan.iterations == 0:
            yield f"max_iter={self.max_iter} is accepted and trains nothing."
        if self.algo in _JOINT:
            yield "Targets of the critic are sums of rewards to the end, whatever critic.lamda."
        if self.max_grad_norm is not None and self.algo in _CLIPPED_ALONE:
            yield (
                f"max_grad_norm={self.max_grad_norm:g} clips the gradients of "
                f"{_CLIPPED_ALONE[self.algo]} alone, that of recipes those of each optimiser."
            )
        if self.min_steps is not None and self.min_rollouts is not None:
            yield "min_steps and min_rollouts must both be met."
        if self.rollout_length is None:
            yield "Without the length of a rollout its counts are known only as they come."
        elif self.min_steps is not None and plan.frames_per_batch != self.min_steps:
            yield f"A collection is {plan.frames_per_batch} steps: whole rollouts."
        if self.num_workers > 1 and self.min_steps != 1:
            yield "Several workers drop surplus rollouts: there are more env steps than counted."
        yield from (self._on_policy_notes if plan.on_policy else self._value_based_notes)(plan)
        if self.env_max_steps is not None:
            yield "A rollout cut after env_max_steps counts as terminated; in recipes it does not."

    def _on_policy_notes(self, plan: StepPlan) -> Iterator[str]:
        if self.algo == "ppo":
            own = self.critic_gradient_steps(plan.frames_per_batch) if plan.is_exact else 0
            count = f" {own}" if own else ""
            yield f"The critic makes{count} gradient steps of its own in each iteration, first."
            if self.critic.standardize_adv:
                yield (
                    "Targets of the critic are its values plus standardised advantages; those of "
                    "recipes are not standardised."
                )
            if self.critic.standardizer:
                yield (
                    "RunningStandardizer takes mean and variance of the means of batches and "
                    "leaves the first as it is; recipes take those of all advantages."
                )
        elif self.algo == "ppo2":
            yield "One optimiser trains both networks; the critic's epochs and batches are unused."
        elif self.algo == "svpg":
            yield (
                f"The gradients of a pass are averaged into one gradient step of each of "
                f"{self.num_particles} particles, which the plan counts as processes; horizon is "
                "unused."
            )
        else:
            yield "A2C makes one pass over the rollouts, and each minibatch is a gradient step."

    def _value_based_notes(self, plan: StepPlan) -> Iterator[str]:
        asked, least = self.num_init_memory_steps, self.warm_up_steps
        if asked is not None and asked != least:
            yield f"num_init_memory_steps={asked} becomes {least}: at least one batch."
        if plan.is_exact and plan.local_prefill_steps != least:
            yield f"The warm-up is {plan.local_prefill_steps} steps, in whole rollouts."
        yield "The first iteration is the warm-up with random actions, and already trains."
        if self.num_updates_per_step is None and self.min_steps is not None:
            yield f"num_updates_per_step={self.updates_per_iteration} follows from env_max_steps."
        period = self.target_update_intvl
        counted = f"target_update_intvl={period} counts gradient steps, not iterations"
        if period > 1:
            there, here = f"1, {period + 1:,}, {2 * period + 1:,}", f"{period:,}, {2 * period:,}"
            counted += f": pyrado's targets follow gradient steps {there}, ..., kit's {here}, ..."
        yield counted + "."
        yield (
            "Each evaluation is 100 rollouts before the update; a logger that is passed makes them "
            "whenever it prints, and eval_intvl is ignored: say logger_print_intvl."
        )
        if self.algo == "dql":
            yield "Its optimiser is RMSprop, that of recipes is Adam."
        if self.algo == "sac":
            own = 3 if self.learn_ent_coeff else 2
            yield f"One gradient step of SAC is a step of each of {own} optimisers."
