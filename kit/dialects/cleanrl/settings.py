"""The words of CleanRL (https://github.com/vwxyzjn/cleanrl), whose algorithms are single files.

Its unit is the global step: a policy step of one copy in PPO, and one step of all copies in the
off-policy files, which count from 0 and train strictly after ``learning_starts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from kit.dialects.base import OFF_POLICY, ON_POLICY, Dialect
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan

_PPO: dict[str, Any] = {
    "total_timesteps": 500_000,
    "num_envs": 4,
    "num_steps": 128,
    "num_minibatches": 4,
    "update_epochs": 4,
}
_SAC: dict[str, Any] = {
    "total_timesteps": 1_000_000,
    "num_envs": 1,
    "learning_starts": 5_000,
    "batch_size": 256,
    "buffer_size": 1_000_000,
    "policy_frequency": 2,
    "target_network_frequency": 1,
}
_DQN: dict[str, Any] = {
    "total_timesteps": 500_000,
    "num_envs": 1,
    "learning_starts": 10_000,
    "train_frequency": 10,
    "batch_size": 128,
    "buffer_size": 10_000,
    "target_network_frequency": 500,
}
_DEFAULTS = {
    "ppo": _PPO,
    "ppo_continuous_action": _PPO
    | {
        "total_timesteps": 1_000_000,
        "num_envs": 1,
        "num_steps": 2048,
        "num_minibatches": 32,
        "update_epochs": 10,
    },
    "ppo_atari": _PPO | {"total_timesteps": 10_000_000, "num_envs": 8},
    "dqn": _DQN,
    "dqn_atari": _DQN
    | {
        "total_timesteps": 10_000_000,
        "learning_starts": 80_000,
        "train_frequency": 4,
        "batch_size": 32,
        "buffer_size": 1_000_000,
        "target_network_frequency": 1_000,
    },
    "sac_continuous_action": _SAC,
    "td3_continuous_action": _SAC | {"learning_starts": 25_000},
    "ddpg_continuous_action": _SAC | {"learning_starts": 25_000},
}
for _short in ("sac", "td3", "ddpg"):
    _DEFAULTS[_short] = _DEFAULTS[f"{_short}_continuous_action"]


@dataclass
class CleanRL(Dialect):
    """``Args`` of CleanRL's files; ``None`` stands for the default of the file."""

    NAME: ClassVar[str] = "cleanrl"
    LIBRARY: ClassVar[str] = "CleanRL"
    VERSIONS: ClassVar[Mapping[str, str]] = {"1.0": "the files as of 2024"}
    ALGORITHMS: ClassVar[Mapping[str, str]] = {
        name: ON_POLICY if name.startswith("ppo") else OFF_POLICY for name in _DEFAULTS
    }
    FACTS: ClassVar[frozenset[str]] = Dialect.FACTS | {"action_repeat", "max_episode_steps"}
    MEANS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("num_steps", "num_minibatches", "update_epochs"), (ON_POLICY,)),
        "anneal_lr": (ON_POLICY,),
        **dict.fromkeys(("learning_starts", "batch_size", "buffer_size"), (OFF_POLICY,)),
        "train_frequency": ("dqn", "dqn_atari"),
        "target_network_frequency": (OFF_POLICY,),
        "policy_frequency": tuple(name for name in _DEFAULTS if name[:3] in ("sac", "td3", "ddp")),
    }
    AT_LEAST: ClassVar[Mapping[str, int]] = {
        "total_timesteps": 0,
        "num_envs": 1,
        "num_steps": 1,
        "num_minibatches": 1,
        "update_epochs": 0,
        "train_frequency": 1,
        "learning_starts": 0,
        "batch_size": 1,
        "buffer_size": 1,
        "policy_frequency": 1,
        "target_network_frequency": 1,
        "action_repeat": 1,
        "max_episode_steps": 1,
    }
    CARRIED: ClassVar[frozenset[str]] = frozenset(
        {"buffer_size", "policy_frequency", "target_network_frequency", "anneal_lr"}
    )

    total_timesteps: int | None = None
    """policy steps (PPO), rounded down to whole batches; steps of all copies (off-policy)."""
    num_envs: int | None = None
    """environment copies; DQN has one."""
    num_steps: int | None = None
    """policy steps of each copy in one batch (PPO)."""
    num_minibatches: int | None = None
    """minibatches of a batch (PPO): each has ``num_envs * num_steps // num_minibatches`` steps."""
    update_epochs: int | None = None
    """passes over a batch (PPO)."""
    train_frequency: int | None = None
    """steps between gradient steps (DQN): one at each multiple, counted from 0."""
    learning_starts: int | None = None
    """steps with random actions; training begins strictly after them."""
    batch_size: int | None = None
    """transitions in a minibatch (off-policy)."""
    buffer_size: int | None = None
    """transitions in the replay buffer."""
    policy_frequency: int | None = None
    """gradient steps of the critic per visit to the actor (SAC, TD3, DDPG)."""
    target_network_frequency: int | None = None
    """steps between target updates."""
    anneal_lr: bool = True
    """whether the learning rate falls linearly (PPO), to one iteration's share."""
    action_repeat: int = field(default=1, kw_only=True)
    """env steps one action is held for; a wrapper's business."""
    max_episode_steps: int | None = field(default=None, kw_only=True)
    """policy steps after which an episode is truncated; a wrapper's business."""
    version: str = field(default="1.0", kw_only=True)
    """behaviour that is meant; see ``VERSIONS``."""

    def _guess(self) -> str:
        if self.train_frequency is not None:
            return "dqn"
        off_policy = (self.learning_starts, self.batch_size, self.policy_frequency)
        return "sac" if any(value is not None for value in off_policy) else "ppo"

    def _defaults(self) -> Mapping[str, Any]:
        algo = {ON_POLICY: "ppo", OFF_POLICY: "sac"}.get(str(self.algo), str(self.algo))
        return _DEFAULTS[algo]

    # ------------------------------------------------------------------ to a plan
    def _plan(self) -> StepPlan:
        made: dict[str, Any] = {
            "num_envs": self.num_envs,
            "action_repeat": self.action_repeat,
            "max_episode_steps": self.max_episode_steps,
            "final_evaluation": False,
        }
        if self.family == ON_POLICY:
            made |= self._ppo()
        else:
            made |= self._dqn() if str(self.algo).startswith("dqn") else self._sac()
        plan = StepPlan(**made)
        if plan.total_policy_steps != self.total_timesteps:
            plan.asked["total_policy_steps"] = self.total_timesteps
        return plan

    def _ppo(self) -> dict[str, Any]:
        assert self.total_timesteps is not None
        assert self.num_envs is not None
        assert self.num_steps is not None
        assert self.num_minibatches is not None
        batch = self.num_envs * self.num_steps
        if self.num_minibatches > batch:
            raise SettingError(
                "num_minibatches",
                self.num_minibatches,
                f"is more than the {batch} steps of a batch, which CleanRL cannot cut so",
                [batch],
            )
        return {
            "iterations": self.total_timesteps // batch,
            "steps_per_env": self.num_steps,
            "update_epochs": self.update_epochs,
            "minibatch_size": batch // self.num_minibatches,
        }

    def _dqn(self) -> dict[str, Any]:
        """Trains at each multiple of ``train_frequency`` greater than ``learning_starts``.

        Steps are counted from 0, so that the first such multiple is collected as the step after
        it. A ratio that is counted from ``train_frequency - 1`` steps before is due there.
        """
        assert self.learning_starts is not None
        if self.num_envs != 1:
            raise SettingError("num_envs", self.num_envs, "is not supported by CleanRL's DQN", [1])
        every = self.train_frequency or 1
        first = (self.learning_starts // every + 1) * every
        return {
            "iterations": self.total_timesteps,
            "learning_starts": first + 2 - every,
            "random_steps": 0,
            "replay_ratio": f"1/{every}",
            "minibatch_size": self.batch_size,
        }

    def _sac(self) -> dict[str, Any]:
        assert self.total_timesteps is not None
        assert self.num_envs is not None
        assert self.learning_starts is not None
        return {
            "iterations": self.total_timesteps,
            "learning_starts": (self.learning_starts + 2) * self.num_envs,
            "random_steps": min(self.learning_starts, self.total_timesteps) * self.num_envs,
            "gradient_steps_per_iteration": 1,
            "minibatch_size": self.batch_size,
        }

    # ------------------------------------------------------------------ from a plan
    @classmethod
    def _from(cls, plan: StepPlan, settings: Mapping[str, Any]) -> Self:
        if plan.world_size > 1 or plan.collects_episodes:
            name = "min_episodes" if plan.collects_episodes else "world_size"
            raise SettingError(name, getattr(plan, name), "cannot be said of a CleanRL file")
        made: dict[str, Any] = {
            "num_envs": plan.num_envs,
            "action_repeat": plan.action_repeat,
            "max_episode_steps": plan.max_episode_steps,
        }
        if plan.on_policy:
            size = plan.minibatch_size or plan.frames_per_batch
            return cls(
                **made,
                algo=settings.get("algo", "ppo"),
                total_timesteps=plan.total_policy_steps,
                num_steps=plan.steps_per_env,
                num_minibatches=max(plan.frames_per_batch // size, 1),
                update_epochs=plan.update_epochs,
            )
        starts = plan.first_training_iteration
        made |= {
            "total_timesteps": plan.total_policy_steps // plan.num_envs,
            "batch_size": plan.minibatch_size or 256,
        }
        ratio = plan.replay_ratio
        if ratio is not None and ratio.numerator == 1 and plan.num_envs == 1:
            first = starts + ratio.denominator - 2
            algo = settings.get("algo", "sac" if ratio == 1 and plan.random_steps else "dqn")
            if algo.startswith("dqn"):
                every = ratio.denominator
                return cls(
                    **made, algo=algo, train_frequency=every, learning_starts=max(first - 1, 0)
                )
        algo = settings.get("algo", "sac")
        return cls(**made, algo=algo, learning_starts=max(starts - 2, 0))

    def notes(self) -> list[str]:
        """Return what a reader of these settings would not expect, a sentence each."""
        made, plan = self.resolved(), self.to_plan()
        assert made.total_timesteps is not None
        if made.family == ON_POLICY:
            left = made.total_timesteps - plan.total_policy_steps
            found = (
                [f"{left:,} of total_timesteps do not fill a batch: never played."] if left else []
            )
            rows = plan.frames_per_batch
            if rows % (rows // (made.num_minibatches or 1)):
                found.append(
                    f"num_minibatches={made.num_minibatches} does not divide {rows} steps: there "
                    "is one more minibatch, a smaller one."
                )
            if made.anneal_lr:
                found.append("anneal_lr ends at lr / iterations in the last iteration, not at 0.")
            return found
        first = plan.policy_steps_after(plan.first_training_iteration)
        if str(made.algo).startswith("dqn"):
            every = made.train_frequency or 1
            first += every - 1
        found = [f"Training begins strictly after learning_starts: with policy step {first:,}."]
        if made.num_envs and made.num_envs > 1:
            found.append(
                f"total_timesteps and learning_starts count steps of all {made.num_envs} copies at "
                f"once: {plan.total_policy_steps:,} policy steps."
            )
        if str(made.algo).startswith("dqn"):
            found.append("Random actions come from epsilon-greedy exploration and are not counted.")
        return found
