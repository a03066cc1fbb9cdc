"""The words of Stable-Baselines3 (https://github.com/DLR-RM/stable-baselines3).

Its unit is the timestep, the policy step here: one vector step of ``n_envs`` copies is ``n_envs``
timesteps. But ``n_steps``, ``train_freq`` and ``eval_freq`` count vector steps, and
``gradient_steps`` is per rollout, not per timestep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from kit.dialects.base import OFF_POLICY, ON_POLICY, Dialect
from kit.steps.errors import LARGEST, SettingError, one_of, whole_number
from kit.steps.plan import StepPlan

_OFF_POLICY: dict[str, Any] = {
    "learning_starts": 100,
    "batch_size": 256,
    "train_freq": 1,
    "gradient_steps": 1,
    "buffer_size": 1_000_000,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": {"n_steps": 2048, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4},
    "a2c": {"n_steps": 5, "n_epochs": 1, "learning_rate": 7e-4},
    "sac": _OFF_POLICY | {"target_update_interval": 1, "learning_rate": 3e-4},
    "td3": _OFF_POLICY | {"policy_delay": 2, "learning_rate": 1e-3},
    "ddpg": _OFF_POLICY | {"policy_delay": 1, "learning_rate": 1e-3},
    "dqn": _OFF_POLICY
    | {
        "batch_size": 32,
        "train_freq": 4,
        "target_update_interval": 10_000,
        "learning_rate": 1e-4,
    },
}


@dataclass
class SB3(Dialect):
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
        "n_steps": (ON_POLICY,),
        "target_update_interval": ("sac", "dqn"),
        "policy_delay": ("td3", "ddpg"),
    }
    AT_LEAST: ClassVar[Mapping[str, int]] = {
        "total_timesteps": 0,
        "n_steps": 1,
        "batch_size": 1,
        "n_epochs": 1,
        "learning_starts": 0,
        "gradient_steps": -LARGEST,
        "buffer_size": 1,
        "target_update_interval": 1,
        "policy_delay": 1,
        "eval_freq": 1,
        "n_eval_episodes": 1,
        "n_envs": 1,
        "episode_length": 1,
        "action_repeat": 1,
        "max_episode_steps": 1,
    }
    CARRIED: ClassVar[frozenset[str]] = frozenset(
        {"buffer_size", "target_update_interval", "policy_delay", "learning_rate"}
    )

    PATHS: ClassVar[Mapping[str, str]] = {"n_timesteps": "total_timesteps"}

    total_timesteps: int = 1_000_000
    """timesteps of the run, rounded up to whole rollouts; the argument of ``learn``."""
    n_steps: int | None = None
    """vector steps of one rollout (PPO, A2C): ``n_steps * n_envs`` timesteps. For the off-policy
    algorithms it is the length of n-step returns, which no count here depends on."""
    batch_size: int | None = None
    """transitions in a minibatch; the last one of an epoch is smaller."""
    n_epochs: int | None = None
    """passes over a rollout (PPO)."""
    train_freq: Any = None
    """vector steps of one rollout (off-policy), or ``(2, "episode")``: whole episodes."""
    gradient_steps: int | None = None
    """gradient steps after each rollout, whatever ``n_envs``; less than 0: as many as its
    timesteps."""
    learning_starts: int | None = None
    """timesteps with random actions, rounded up to vector steps; training begins at the first
    rollout that ends strictly after them."""
    buffer_size: int | None = None
    """transitions in the replay buffer."""
    target_update_interval: int | None = None
    """timesteps (DQN) or gradient steps (SAC) between target updates."""
    policy_delay: int | None = None
    """gradient steps of the critic per step of the actor (TD3, DDPG)."""
    learning_rate: Any = None
    """learning rate, or a function of the remaining progress."""
    eval_freq: int | None = None
    """vector steps between evaluations (``EvalCallback``); ``None``: no evaluation."""
    n_eval_episodes: int = 5
    """episodes of one evaluation."""
    n_envs: int = field(default=1, kw_only=True)
    """environment copies."""
    episode_length: int | None = field(default=None, kw_only=True)
    """timesteps of every episode, where whole episodes are collected."""
    action_repeat: int = field(default=1, kw_only=True)
    """env steps one action is held for; a wrapper's business."""
    max_episode_steps: int | None = field(default=None, kw_only=True)
    """policy steps after which an episode is truncated; a wrapper's business."""
    version: str = field(default="2.9.2", kw_only=True)
    """behaviour that is meant; see ``VERSIONS``."""

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

    # ------------------------------------------------------------------ to a plan
    def _plan(self) -> StepPlan:
        made: dict[str, Any] = {
            "num_envs": self.n_envs,
            "action_repeat": self.action_repeat,
            "max_episode_steps": self.max_episode_steps,
            "final_evaluation": False,
            "evaluation_episodes": self.n_eval_episodes,
        }
        if self.eval_freq is not None:
            made["evaluation_every"] = self.eval_freq * self.n_envs
        made |= self._on_policy() if self.family == ON_POLICY else self._off_policy()
        plan = StepPlan(**made)
        if plan.is_exact and plan.total_policy_steps != self.total_timesteps:
            plan.asked["total_policy_steps"] = self.total_timesteps
        return plan

    def _on_policy(self) -> dict[str, Any]:
        assert self.n_steps is not None
        rollout = self.n_steps * self.n_envs
        size = None if self.algo == "a2c" or self.batch_size is None else self.batch_size
        if self.algo == "ppo" and rollout < 2:
            raise SettingError("n_steps", self.n_steps, "makes a rollout of one timestep", [2])
        if self.algo == "ppo" and size == 1:
            raise SettingError("batch_size", 1, "leaves nothing to normalise advantages over", [2])
        return {
            "iterations": -(-self.total_timesteps // rollout),
            "steps_per_env": self.n_steps,
            "update_epochs": self.n_epochs,
            "minibatch_size": None if size is None else min(size, rollout),
        }

    def _off_policy(self) -> dict[str, Any]:
        assert self.learning_starts is not None
        assert self.batch_size is not None
        every, unit = self.frequency()
        random = -(-self.learning_starts // self.n_envs) * self.n_envs
        made: dict[str, Any] = {"minibatch_size": self.batch_size}
        if unit == "episode":
            if self.episode_length is None:
                raise SettingError(
                    "episode_length",
                    None,
                    "is needed where train_freq counts episodes, to know the counts beforehand",
                    "give it, or count steps",
                )
            rollout = every * self.episode_length
            made |= {"min_episodes": every, "episode_length": self.episode_length}
        else:
            rollout = every * self.n_envs
            made |= {"steps_per_env": every}
        iterations = -(-self.total_timesteps // rollout)
        trains = max(self._first_training(rollout), 1)
        made |= {
            "iterations": iterations,
            "learning_starts": trains * rollout if trains > 1 else 0,
            "random_steps": min(random, iterations * rollout),
        }
        assert self.gradient_steps is not None
        if self.gradient_steps < 0:
            return made | {"replay_ratio": 1}
        return made | {"gradient_steps_per_iteration": self.gradient_steps}

    def frequency(self) -> tuple[int, str]:
        """Return ``train_freq`` as a number and its unit, ``step`` or ``episode``."""
        given = self.train_freq
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

    def _first_training(self, rollout: int) -> int:
        """The first rollout that ends strictly after ``learning_starts``."""
        assert self.learning_starts is not None
        if self.version == "documented":
            return -(-self.learning_starts // rollout)
        return self.learning_starts // rollout + 1

    # ------------------------------------------------------------------ from a plan
    @classmethod
    def _algorithms_for(cls, plan: StepPlan, settings: Mapping[str, Any]) -> Iterable[str | None]:
        """What is documented of PPO refuses some rollouts of others."""
        given = settings.get("algo")
        return [given] if given or not plan.on_policy else [None, "a2c", ON_POLICY]

    @classmethod
    def _from(cls, plan: StepPlan, settings: Mapping[str, Any]) -> Self:
        if plan.world_size > 1:
            raise SettingError(
                "world_size", plan.world_size, "cannot be said: Stable-Baselines3 has one", [1]
            )
        made: dict[str, Any] = {
            "total_timesteps": plan.total_policy_steps,
            "n_envs": plan.num_envs,
            "action_repeat": plan.action_repeat,
            "max_episode_steps": plan.max_episode_steps,
            "n_eval_episodes": plan.evaluation_episodes,
        }
        every = plan.evaluation_every
        if plan.evaluation_every_iterations:
            every = plan.evaluation_every_iterations * plan.frames_per_batch
        if every:
            made["eval_freq"] = -(-every // plan.num_envs)
        if plan.on_policy:
            return cls(**made, **_on_policy_from(plan, settings.get("algo")))
        off_policy = _off_policy_from(plan, settings.get("algo"))
        if settings.get("version") == "documented":  # training begins at learning_starts
            off_policy["learning_starts"] = _between(plan, after=1)
        return cls(**made, **off_policy)

    def notes(self) -> list[str]:
        """Return what a reader of these settings would not expect, a sentence each."""
        from kit.dialects.sb3.notes import notes

        return notes(self.resolved(), self.to_plan())


def _on_policy_from(plan: StepPlan, algo: str | None) -> dict[str, Any]:
    if plan.collects_episodes:
        raise SettingError(
            "min_episodes", plan.min_episodes, "cannot be said of an on-policy rollout", [None]
        )
    whole = plan.minibatch_size in (None, plan.frames_per_batch)
    name = algo or ("a2c" if whole and plan.update_epochs == 1 else "ppo")
    return {
        "algo": name,
        "n_steps": plan.steps_per_env,
        "n_epochs": plan.update_epochs,
        "batch_size": plan.minibatch_size or plan.frames_per_batch,
    }


def _off_policy_from(plan: StepPlan, algo: str | None) -> dict[str, Any]:
    rollout = plan.frames_per_batch
    made: dict[str, Any] = {"algo": algo or "sac", "batch_size": plan.minibatch_size or 256}
    if plan.collects_episodes:
        length = plan.episode_length
        assert length is not None
        made |= {"train_freq": (rollout // length, "episode"), "episode_length": length}
    else:
        made["train_freq"] = plan.steps_per_env or 1
    steps = plan.gradient_steps_per_iteration
    if plan.replay_ratio is not None:
        each = plan.replay_ratio * rollout
        steps = -1 if plan.replay_ratio == 1 else round(each)
    made["gradient_steps"] = steps or 0
    made["learning_starts"] = _between(plan)
    return made


def _between(plan: StepPlan, after: int = 0) -> int:
    """``learning_starts`` that makes the random steps, if the plan's rollout is to train first.

    Args:
        plan: what is to be said.
        after: 0 if training begins strictly after ``learning_starts``, 1 if at them.
    """
    rollout, starts = plan.frames_per_batch, plan.first_training_iteration
    low = (starts - 1) * rollout + (after if starts > 1 else 0)
    return min(max(plan.random_steps, low), starts * rollout - 1 + after)
