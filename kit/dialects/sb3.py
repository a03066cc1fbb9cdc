"""The vocabulary of Stable-Baselines3 (https://github.com/DLR-RM/stable-baselines3).

Its unit is the timestep, the policy step here: a vector step of ``n_envs`` environments is that
many. ``n_steps``, ``train_freq`` and ``eval_freq`` count vector steps, and ``gradient_steps`` is
per rollout, not per timestep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import Annotated, Any, ClassVar, Literal, Self

from kit.dialects.base import OFF_POLICY, ON_POLICY, RAW, WrappedDialect, trains
from kit.dialects.fields import Acts, acts, counts, fact, of_each_env, refused
from kit.steps.errors import LARGEST, Limits, SettingError, one_of, real_number, whole_number
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
        "n_steps": 5, "gae_lambda": 1.0, "normalize_advantage": False,
        "learning_rate": 7e-4,
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


def _critic_hidden_sizes(value: Any, settings: Any) -> list[int] | None:
    """``net_arch`` of ``policy_kwargs``: the critics' widths, if they are others."""
    actor, critic = _net_arch(value, settings)
    return None if critic == actor else critic


def _net_arch(value: Any, settings: Any) -> tuple[list[int], list[int]]:
    """Widths of actor and critics: one list, or a list each."""
    sizes = value.get("net_arch") if isinstance(value, Mapping) else value
    of_critic = "vf" if settings.family == ON_POLICY else "qf"
    each: list[Any] = [sizes, sizes]
    if isinstance(sizes, Mapping) and {*sizes} == {"pi", of_critic} and settings.algo != "dqn":
        each = [sizes["pi"], sizes[of_critic]]
    if {*value} != {"net_arch"} or not all(isinstance(one, (list, tuple)) for one in each):
        why = "is more than the widths of hidden layers"
        raise SettingError("policy_kwargs", value, why, "use {net_arch: [64, 64]}")
    return [*each[0]], [*each[1]]


def _target_period(value: Any, settings: Any) -> int:
    """Gradient steps between target updates; DQN's interval is in timesteps."""
    envs, rollout, updates = settings.n_envs, settings.rollout(), settings.gradient_steps
    if settings.algo != "dqn":  # counted anew in each call of train(), whose first step updates
        steps = rollout if updates < 0 else max(updates, 1)
        if value < steps and steps % value:
            why = f"counts anew in each rollout, and does not divide its {steps} gradient steps"
            raise SettingError("target_update_interval", value, why, [gcd(value, steps), steps])
        return int(min(value, steps))
    timesteps: int = max(value // envs, 1) * envs  # of whole vector steps
    if settings.tau == 1:  # copies between two trainings are of the same weights
        timesteps = max(timesteps, rollout)
    if updates <= 0:  # one for each timestep, or none at all
        return timesteps
    steps = Fraction(timesteps * updates, rollout)
    if steps.denominator != 1:
        why = f"timesteps are {steps} gradient steps"
        least = rollout // gcd(rollout, updates)
        nearest = max(round(Fraction(value, least)), 1) * least
        raise SettingError("target_update_interval", value, why, [nearest])
    return int(steps)


def _alpha(value: Any, settings: Any = None) -> float:
    """The entropy coefficient of SAC: its first value where it is learnt, such as ``auto_0.1``."""
    name, _, first = str(value).partition("_")
    if name != "auto":
        return real_number("ent_coef", value)
    return _read("ent_coef", value, first or "1", "auto_0.1")


def _first_of(field: str) -> Callable[[Any, Any], float]:
    """What reads the first value of a field: a number, also of a schedule ``lin_1e-3``."""

    def first(value: Any, settings: Any) -> float:
        return _read(field, value, str(value).removeprefix("lin_"), "lin_0.001")

    return first


def _read(field: str, value: Any, number: str, example: str) -> float:
    """The number in the text of a setting."""
    try:
        return float(number)
    except ValueError:
        why = "is neither a number nor a text with one"
        raise SettingError(field, value, why, [0.001, example]) from None


def _schedule(value: Any, settings: Any) -> str | None:
    """Whether it falls; ``None`` for a number."""
    return "linear" if str(value).startswith("lin_") else None


_FIXED = Acts("fixed_alpha", lambda value, _: None if str(value).startswith("auto") else True)
_UNSAID_ACTOR_CRITIC: dict[str, Any] = {**RAW, "lr_schedule": "constant", "hidden_sizes": [64, 64]}
_CRITICS: dict[str, Any] = {"n_step": 1, "activation": "relu"}
_UNSAID: dict[str, dict[str, Any]] = {
    "ppo": _UNSAID_ACTOR_CRITIC | {"activation": "tanh"},
    "a2c": _UNSAID_ACTOR_CRITIC | {"activation": "tanh"},
    "dqn": _UNSAID_ACTOR_CRITIC | _CRITICS | {"double_dqn": False, "dueling": False},
    "sac": {**RAW, **_CRITICS, "hidden_sizes": [256, 256]},
    "td3": {**RAW, **_CRITICS, "hidden_sizes": [400, 300], "exploration_noise": 0.0},
    "ddpg": {**RAW, **_CRITICS, "hidden_sizes": [400, 300], "exploration_noise": 0.0},
}
_UNSAID |= {  # of CnnPolicy, as CleanRL names it
    f"{name}_atari": _UNSAID[name] | {"hidden_sizes": [512], "activation": "relu"}
    for name in ("ppo", "a2c", "dqn")
}


@dataclass
class SB3(WrappedDialect):
    """Settings of Stable-Baselines3; ``None`` stands for the default of the algorithm."""

    NAME = "sb3"
    LIBRARY = "Stable-Baselines3"
    VERSIONS: ClassVar = {
        "2.9.2": "the code of 2.9.2; training begins strictly after learning_starts",
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
    IMPLICIT_DEFAULTS: ClassVar = _UNSAID
    TOTAL = "total_timesteps"
    CANNOT: ClassVar = {"world_size": (1, "it has one process")}
    PATHS: ClassVar = {"n_timesteps": "total_timesteps"}

    total_timesteps: NonNegativeInt = 1_000_000
    """timesteps of the run, rounded up to whole rollouts; the argument of ``learn``."""
    n_steps: PositiveInt = acts("n_step", family=OFF_POLICY)
    """vector steps of one rollout (PPO, A2C): ``n_steps * n_envs`` timesteps; rewards of an n-step
    return (off-policy)."""
    batch_size: PositiveInt = counts(only=("ppo", OFF_POLICY))
    """transitions in a minibatch (not A2C); the last one of an epoch is smaller."""
    n_epochs: PositiveInt = counts(only="ppo")
    """passes over a rollout (PPO)."""
    train_freq: Any = counts(only=OFF_POLICY)
    """vector steps of one rollout (off-policy), or ``(2, "episode")``: whole episodes."""
    gradient_steps: Annotated[int, Limits(-LARGEST, LARGEST)] = counts(only=OFF_POLICY)
    """gradient steps after each rollout, whatever ``n_envs``; less than 0: as many as its
    timesteps."""
    learning_starts: NonNegativeInt = counts(only=OFF_POLICY)
    """timesteps with random actions, rounded up to vector steps; training begins at the first
    rollout that ends strictly after them."""
    buffer_size: PositiveInt = acts(
        "buffer_size", None, lambda value, given: of_each_env(value, given.n_envs), only=OFF_POLICY
    )
    """transitions in the replay buffer, rounded down to equally many of each environment."""
    target_update_interval: PositiveInt = acts(
        "target_update_every", None, _target_period, only=("sac", "dqn")
    )
    """timesteps (DQN), or gradient steps of one call of ``train()`` (SAC), between target
    updates."""
    policy_delay: PositiveInt = acts("policy_delay", only="td3")
    """gradient steps of the critic per step of the actor (TD3)."""
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
        "learning_rate", None, _first_of("learning_rate"), also=Acts("lr_schedule", _schedule)
    )
    """learning rate, which is constant; ``lin_1e-3`` (of RL Zoo): falls linearly to zero."""
    policy: Literal["MlpPolicy", "CnnPolicy", "MultiInputPolicy"] | None = refused(
        "recipes make their networks from hidden_sizes, as MlpPolicy", accepted=("MlpPolicy",)
    )
    """class of networks; ``MlpPolicy`` is what recipes make."""
    policy_kwargs: Mapping[str, Any] | str | None = acts(
        "hidden_sizes",
        None,
        lambda value, given: _net_arch(value, given)[0],
        also=Acts("critic_hidden_sizes", _critic_hidden_sizes),
    )
    """arguments of the networks: ``{net_arch: [64, 64]}``, widths of the hidden layers; a text such
    as ``dict(...)`` of RL Zoo counts nothing, and is refused in a run."""
    gamma: float = acts("gamma")
    """discount."""
    gae_lambda: float = acts("gae_lambda", only=ON_POLICY)
    """weight of longer advantage estimates (PPO, A2C)."""
    clip_range: Any = acts(
        "clip_epsilon",
        None,
        _first_of("clip_range"),
        only="ppo",
        also=Acts("clip_schedule", _schedule),
    )
    """clipping range of the probability ratio (PPO), constant; ``lin_0.2``: falls linearly."""
    clip_range_vf: float | None = refused(
        "its value loss is of clipped values alone, that of clip_value the greater of both",
        only="ppo",
    )
    """clipping range of the value (PPO); ``None``: not clipped."""
    normalize_advantage: bool = acts("normalize_advantage", only=ON_POLICY)
    """whether advantages get mean 0 and deviation 1 in each minibatch (PPO, A2C)."""
    ent_coef: Any = acts(
        "entropy_coeff",
        only=(ON_POLICY, "sac"),
        family=ON_POLICY,
        otherwise=Acts("initial_alpha", _alpha, also=_FIXED),
    )
    """weight of the entropy; for SAC also ``auto``: learnt, from 1, or ``auto_0.1``: from 0.1."""
    vf_coef: float = acts("critic_coeff", only=ON_POLICY)
    """weight of the value loss (PPO, A2C)."""
    max_grad_norm: float = acts("max_grad_norm", only=(ON_POLICY, "dqn"))
    """largest norm of the gradient (PPO, A2C, DQN)."""
    target_kl: float | None = acts("target_kl", only="ppo")
    """KL divergence beyond 1.5 times of which an update stops (PPO), asked before each gradient
    step, and in recipes after each epoch; ``None``: never."""
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
    eval_freq: PositiveInt | None = None
    """vector steps between evaluations (``EvalCallback``); ``None``: no evaluation."""
    n_eval_episodes: PositiveInt = counts("evaluation_episodes", 5)
    """episodes of one evaluation."""
    n_envs: PositiveInt = fact("num_envs", 1)
    """environments."""
    episode_length: PositiveInt | None = fact()
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
            real_number("ent_coef", made.ent_coef if on_policy else _alpha(made.ent_coef))
        if made.target_entropy not in (None, "auto"):
            real_number("target_entropy", made.target_entropy)
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

    # ------------------------------------------------------------------ to a plan
    def _plan(self) -> dict[str, Any]:
        made = self._on_policy() if self.family == ON_POLICY else self._off_policy()
        if self.eval_freq is not None:
            made["evaluation_every"] = self.eval_freq * self.n_envs
        return made

    def _on_policy(self) -> dict[str, Any]:
        rollout = self.n_steps * self.n_envs
        a2c = self.algo == "a2c"  # one gradient step, on all of a rollout
        size = None if a2c else self.batch_size
        for name, value, rows in ("n_steps", self.n_steps, rollout), ("batch_size", size, size):
            if self.algo == "ppo" and self.normalize_advantage and rows == 1:
                why = "leaves one timestep, over which advantages cannot be normalised"
                raise SettingError(name, value, why, [2], "or normalize_advantage=False")
        return {
            "iterations": -(-self.total_timesteps // rollout),
            "steps_per_env": self.n_steps,
            "update_epochs": 1 if a2c else self.n_epochs,
            "minibatch_size": None if size is None else min(size, rollout),
        }

    def _off_policy(self) -> dict[str, Any]:
        (every, unit), rollout = self.frequency(), self.rollout()
        made: dict[str, Any] = {"minibatch_size": self.batch_size}
        if unit == "episode":
            made |= {"min_episodes": every, "episode_length": self.episode_length}
        else:
            made["steps_per_env"] = every
        iterations = -(-self.total_timesteps // rollout)
        # Training begins with the first rollout that ends strictly after learning_starts.
        first = self.learning_starts // rollout + 1
        random = -(-self.learning_starts // self.n_envs) * self.n_envs
        made |= {
            "iterations": iterations,
            "learning_starts": first * rollout if first > 1 else 0,
            "random_steps": min(random, iterations * rollout),
        }
        if self.gradient_steps < 0:
            return made | {"replay_ratio": 1}
        return made | {"gradient_steps_per_iteration": self.gradient_steps}

    # ------------------------------------------------------------------ from a plan
    @staticmethod
    def _from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {"total_timesteps": plan.total_policy_steps}
        every = plan.evaluation_every
        if plan.evaluation_every_iterations:
            every = plan.evaluation_every_iterations * plan.frames_per_batch
        if every:
            made["eval_freq"] = -(-every // plan.num_envs)
        if plan.on_policy:
            return made | _on_policy_from(plan, settings.get("algo"))
        return made | _off_policy_from(plan, settings.get("algo"))

    # ------------------------------------------------------------------ caveats
    def _notes(self, plan: StepPlan) -> Iterator[str]:
        asked = self.total_timesteps
        over = plan.total_policy_steps - asked
        if over:
            yield (
                f"The run overshoots total_timesteps={asked:,} by {over:,}: whole rollouts of "
                f"{plan.frames_per_batch:,}."
            )
        yield from self._schedule_notes(plan)
        if self.eval_freq is not None and self.n_envs > 1:
            yield f"eval_freq counts vector steps: {self.eval_freq * self.n_envs:,} timesteps."
        if self.eval_freq is not None and trains(plan):
            yield "Stable-Baselines3 makes evaluations before gradient steps; here they follow."
        yield from self._evaluations(plan)
        yield from (self._on_policy_notes if plan.on_policy else self._off_policy_notes)(plan)

    def _schedule_notes(self, plan: StepPlan) -> Iterator[str]:
        asked, each, total = self.total_timesteps, plan.frames_per_batch, plan.total_policy_steps
        if not asked or not trains(plan):
            return
        end = f"{1 - total / asked:.3g} at the last update"
        if total > asked:
            yield f"A schedule of the remaining progress would end below zero: progress is {end}."
        names = ("learning_rate", "clip_range")
        falls = [name for name in names if _schedule(getattr(self, name), self)]
        if falls and 100 * each > asked:
            yield (
                f"{' and '.join(falls)}: its schedule is asked once a rollout has ended, and has "
                f"{1 - each / asked:.3g} of the first value after the first, {end}; that of "
                f"recipes is a rollout behind, and has 1 and {each / total:.3g}."
            )

    def _evaluations(self, plan: StepPlan) -> Iterator[str]:
        if self.eval_freq is None or not plan.is_exact:
            return
        theirs = plan.total_policy_steps // self.n_envs // self.eval_freq
        ours = plan.after(plan.iterations).evaluations - plan.initial_evaluations
        if theirs != ours:
            yield (
                f"Stable-Baselines3 evaluates {theirs:,} times: within rollouts, too, several "
                f"times with the same weights; here one evaluation follows a rollout: {ours:,}."
            )

    def _on_policy_notes(self, plan: StepPlan) -> Iterator[str]:
        rollout, size = plan.frames_per_batch, self.batch_size
        yield f"n_steps={self.n_steps} is per environment: a rollout is {rollout:,} timesteps."
        if self.algo == "a2c":
            yield "A2C makes one gradient step per rollout, on all of it."
        elif self.algo == "ppo" and size is not None and size > rollout:
            yield f"batch_size={size} is more than a rollout, which makes one minibatch."
        elif self.algo == "ppo" and size is not None and rollout % size:
            yield f"The last minibatch of each epoch has {rollout % size} transitions, not {size}."
        if self.target_kl is not None:
            yield "target_kl is asked before each gradient step; recipes ask it after each epoch."

    def _off_policy_notes(self, plan: StepPlan) -> Iterator[str]:
        every, unit = self.frequency()
        steps, starts = self.gradient_steps, self.learning_starts
        if steps < 0:
            yield f"gradient_steps={steps} makes as many gradient steps as timesteps: ratio 1."
        elif unit == "step":
            ratio = Fraction(steps, plan.frames_per_batch)
            unscaled = ": it is not scaled by n_envs" if self.n_envs > 1 else ""
            yield (
                f"gradient_steps={steps} after train_freq={every} vector steps of n_envs="
                f"{self.n_envs} environments is a replay ratio of {ratio}{unscaled}."
            )
        if steps == 0:
            yield "gradient_steps=0 never trains."
        if starts % self.n_envs:
            yield f"learning_starts is rounded up to {plan.random_steps} timesteps: vector steps."
        if trains(plan) and starts and steps:
            first = plan.policy_steps_after(plan.first_training_iteration)
            yield f"Training begins strictly after learning_starts: at {first:,} timesteps."
        if self.algo == "dqn":
            calls = max(self.target_update_interval // self.n_envs, 1)
            yield (
                f"The target network is updated every {calls:,} vector steps, before the gradient "
                "steps that follow them, and also before training begins."
            )
            yield from self._target_notes(plan)
            rollout, fall = plan.frames_per_batch, self.exploration_fraction * self.total_timesteps
            if self.n_envs < rollout and 100 * rollout > fall > 0:
                yield (
                    "Epsilon falls with each vector step; recipes hold it for a rollout of "
                    f"{rollout:,} timesteps, at what it is before."
                )
        elif self.algo == "sac" and self.target_update_interval > 1:
            yield (
                "target_update_interval restarts in each call of train(), whose first gradient "
                "step updates the targets."
            )

    def _target_notes(self, plan: StepPlan) -> Iterator[str]:
        """When recipes first update DQN's target, where that is not when the library does."""
        interval, steps = self.target_update_interval, self.gradient_steps
        try:
            period = _target_period(interval, self)
        except SettingError:  # a recipe says so
            return
        if not (steps and trains(plan)):
            return
        each = plan.frames_per_batch if steps < 0 else steps
        first = plan.policy_steps_after(plan.first_training_iteration - 1 + -(-period // each))
        every = max(interval // self.n_envs, 1) * self.n_envs
        if self.tau != 1 and every < plan.frames_per_batch:
            yield (
                "Its updates within a rollout come before all gradient steps of that rollout; "
                f"recipes make one after every {period:,}."
            )
        elif first % every:
            yield (
                f"Recipes count gradient steps: they update it after every {period:,}, and first "
                f"at {first:,} timesteps, not at a multiple of {every:,}."
            )


def _on_policy_from(plan: StepPlan, algo: str | None) -> dict[str, Any]:
    size = plan.minibatch_size or plan.frames_per_batch
    whole = size == plan.frames_per_batch
    algo = algo or ("a2c" if whole and plan.update_epochs == 1 else "ppo")
    made = {"algo": algo, "n_steps": plan.steps_per_env}
    if algo == "a2c":
        return made
    normalize = False if size == 1 else None
    return made | {
        "n_epochs": plan.update_epochs,
        "batch_size": size,
        "normalize_advantage": normalize,
    }


def _off_policy_from(plan: StepPlan, algo: str | None) -> dict[str, Any]:
    rollout, starts = plan.frames_per_batch, plan.first_training_iteration
    made: dict[str, Any] = {"algo": algo or "sac", "batch_size": plan.minibatch_size or 256}
    if plan.collects_episodes:
        length = plan.episode_length
        assert length is not None
        made |= {"train_freq": (rollout // length, "episode"), "episode_length": length}
    else:
        made["train_freq"] = plan.steps_per_env or 1
    steps = plan.gradient_steps_per_iteration
    if plan.replay_ratio is not None:
        steps = -1 if plan.replay_ratio == 1 else round(plan.replay_ratio * rollout)
    made["gradient_steps"] = steps or 0
    # The random steps, as far as the plan's first rollout to train is the first after them.
    low = (starts - 1) * rollout
    made["learning_starts"] = min(max(plan.random_steps, low), starts * rollout - 1)
    return made
