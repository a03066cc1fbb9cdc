"""The words of sheeprl (https://github.com/Eclectic-Sheep/sheeprl).

Its unit is the policy step, as here: one action of one environment copy of one process. An
off-policy iteration is one step of every copy, an on-policy one ``rollout_steps`` of them. What
its versions count differently is in ``Sheeprl.VERSIONS``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Self

from kit.dialects.base import OFF_POLICY, ON_POLICY, Dialect
from kit.dialects.sheeprl.counting import SheeprlRatio, first_due
from kit.dialects.sheeprl.defaults import defaults
from kit.dialects.sheeprl.notes import notes
from kit.dialects.sheeprl.resume import resumed
from kit.dialects.sheeprl.reverse import algorithms_for, settings_from
from kit.steps.counting import counting_rule
from kit.steps.errors import SettingError, real_number, yes_or_no
from kit.steps.plan import StepPlan
from kit.steps.validation import LARGEST_RATIO

_DREAMERS = ("dreamer_v1", "dreamer_v2", "dreamer_v3")
_P2E = tuple(f"p2e_dv{n}_{phase}" for n in (1, 2, 3) for phase in ("exploration", "finetuning"))
_SEQUENCES = (*_DREAMERS, *_P2E)
_DECOUPLED = ("ppo_decoupled", "sac_decoupled")


@dataclass
class Sheeprl(Dialect):
    """Settings of sheeprl: ``algo.*``, ``env.*``, ``buffer.*`` and ``fabric.devices`` in one place.

    ``None`` stands for the default of the algorithm in that version.
    """

    NAME: ClassVar[str] = "sheeprl"
    LIBRARY: ClassVar[str] = "sheeprl"
    VERSIONS: ClassVar[Mapping[str, str]] = {
        "0.8.4": "the code of 0.8.4; pretraining is added to the first training, and sequence "
        "algorithms wait until a sequence was played",
        "0.5.7": "the code of 0.5.7 (July 2024); SAC makes extra gradient steps at its first "
        "training, and pretraining replaces those due there",
        "0.5.0": "the code of February 2024, before replay_ratio: per_rank_gradient_steps every "
        "train_every policy steps",
        "documented": "howto/work_with_steps.md as it reads: no fraction of a gradient step is "
        "lost, and pretraining is added to the first training",
    }
    ALGORITHMS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("ppo", "a2c", "ppo_decoupled"), ON_POLICY),
        **dict.fromkeys(("sac", "droq", "sac_ae", "sac_decoupled"), OFF_POLICY),
        **dict.fromkeys(_SEQUENCES, OFF_POLICY),
    }
    MEANS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "rollout_steps": (ON_POLICY,),
        "update_epochs": ("ppo", "ppo_decoupled"),
        "share_data": (ON_POLICY,),
        "anneal_lr": (ON_POLICY,),
        "learning_starts": (OFF_POLICY,),
        "per_rank_pretrain_steps": (OFF_POLICY,),
        "replay_ratio": (OFF_POLICY,),
        "train_every": (OFF_POLICY,),
        "per_rank_gradient_steps": (OFF_POLICY,),
        "target_network_frequency": (OFF_POLICY,),
        "buffer_checkpoint": (OFF_POLICY,),
        "per_rank_sequence_length": _SEQUENCES,
        "exploration_steps": _P2E,
    }
    AT_LEAST: ClassVar[Mapping[str, int]] = {
        "total_steps": 0,
        "exploration_steps": 0,
        "learning_starts": 0,
        "per_rank_pretrain_steps": 0,
        "rollout_steps": 1,
        "per_rank_batch_size": 1,
        "per_rank_sequence_length": 1,
        "update_epochs": 0,
        "num_envs": 1,
        "world_size": 1,
        "action_repeat": 0,
        "train_every": 0,
        "per_rank_gradient_steps": 0,
        "buffer_size": 1,
        "target_network_frequency": 0,
    }
    CARRIED: ClassVar[frozenset[str]] = frozenset(
        {"buffer_size", "buffer_checkpoint", "share_data", "anneal_lr", "lr"}
        | {"target_network_frequency"}
    )

    SECTIONS: ClassVar[frozenset[str]] = frozenset({"", "algo", "env"})
    PATHS: ClassVar[Mapping[str, str]] = {
        "algo.name": "algo",
        "fabric.devices": "world_size",
        "buffer.size": "buffer_size",
        "buffer.checkpoint": "buffer_checkpoint",
        "buffer.share_data": "share_data",
        "algo.critic.target_network_frequency": "target_network_frequency",
        "algo.optimizer.lr": "lr",
    }

    total_steps: int | None = None
    """policy steps of the run in all processes; what does not fill an iteration is not played."""
    exploration_steps: int = 0
    """policy steps during which the exploring agent of Plan2Explore acts; documented, and in the
    code of no version, which uses ``total_steps`` of the exploration run."""
    max_episode_steps: int | None = None
    """policy steps after which an episode is truncated; ``None`` or less than 1: never."""
    learning_starts: int | None = None
    """policy steps in all processes with random actions, rounded down to whole iterations; the last
    of these iterations already trains."""
    per_rank_pretrain_steps: int | None = None
    """gradient steps of each process in the first training; see the versions."""
    replay_ratio: float | None = None
    """gradient steps of each process per policy step of its own, from the first training on."""
    rollout_steps: int | None = None
    """policy steps of each copy in one on-policy iteration."""
    per_rank_batch_size: int | None = None
    """transitions (sequences, for Dreamer) in a minibatch of one process."""
    per_rank_sequence_length: int | None = None
    """time steps of a sequence."""
    update_epochs: int | None = None
    """passes over the collected batch (PPO)."""
    num_envs: int = 4
    """environment copies of one process (``env.num_envs``)."""
    world_size: int = 1
    """processes that train together (``fabric.devices``)."""
    action_repeat: int = 1
    """env steps one action is held for; 0 means 1."""
    train_every: int | None = None
    """policy steps between trainings, before ``replay_ratio`` (version 0.5.0)."""
    per_rank_gradient_steps: int | None = None
    """gradient steps of one training, before ``replay_ratio`` (version 0.5.0)."""
    dry_run: bool = False
    """whether the run ends with its first training, without random actions and pretraining."""
    run_test: bool = True
    """whether one episode is played at the end, on the first process (``algo.run_test``)."""
    share_data: bool = False
    """whether the processes gather what all of them collected and split it; same counts."""
    buffer_size: int | None = None
    """transitions that the replay buffers of all processes hold (``buffer.size``)."""
    buffer_checkpoint: bool = True
    """whether the replay buffer is in the checkpoint, for a resume (``buffer.checkpoint``)."""
    target_network_frequency: int = 1
    """policy steps between target updates (SAC, ``algo.critic.target_network_frequency``)."""
    anneal_lr: bool = False
    """whether the learning rate falls linearly with the iterations, to one iteration's share."""
    lr: float = 1e-3
    """learning rate of the one optimiser of PPO and A2C (``algo.optimizer.lr``)."""
    version: str = field(default="0.8.4", kw_only=True)
    """version whose behaviour is meant; see ``VERSIONS``."""

    def _algorithm(self, algo: Any) -> str:
        if algo == "ppo_recurrent":
            raise SettingError(
                "algo",
                algo,
                "cuts each rollout into sequences where its episodes end, and makes as many "
                "gradient steps as they fill minibatches: no plan can foretell them",
                ["ppo"],
            )
        return super()._algorithm(algo)

    def _guess(self) -> str:
        if self.rollout_steps is not None or self.update_epochs is not None:
            return "ppo"
        return "dreamer_v3" if self.per_rank_sequence_length is not None else "sac"

    def _defaults(self) -> Mapping[str, Any]:
        algo = {ON_POLICY: "ppo", OFF_POLICY: "sac"}.get(str(self.algo), str(self.algo))
        made = defaults(algo, self.version)
        if algo == "a2c":
            made["per_rank_batch_size"] = self.rollout_steps or made["rollout_steps"]
        return made

    # ------------------------------------------------------------------ to a plan
    def _plan(self) -> StepPlan:
        for name in ("dry_run", "run_test", "share_data", "anneal_lr", "buffer_checkpoint"):
            yes_or_no(name, getattr(self, name))
        if self.algo in _DECOUPLED:
            self._check_decoupled()
        common: dict[str, Any] = {
            "num_envs": self.num_envs,
            "world_size": self.processes,
            "action_repeat": max(self.action_repeat, 1),
            "max_episode_steps": self._episode_limit(),
            "evaluation_episodes": 1,
            "final_evaluation": self.run_test,
        }
        on_policy = self.family == ON_POLICY
        made = common | (self._on_policy() if on_policy else self._off_policy())
        plan = StepPlan(**made)
        if plan.total_policy_steps != self.total_steps and not self.dry_run:
            plan.asked["total_policy_steps"] = self.total_steps
        return plan

    @property
    def processes(self) -> int:
        """Processes whose copies are stepped: one, if it plays alone for the others."""
        return 1 if self.algo in _DECOUPLED else self.world_size

    @property
    def policy_steps_per_iteration(self) -> int:
        """Policy steps of one iteration of resolved settings, in all processes."""
        steps = self.rollout_steps if self.family == ON_POLICY else 1
        assert steps is not None
        return self.num_envs * self.processes * steps

    def _episode_limit(self) -> int | None:
        limit = self.max_episode_steps
        if limit is not None and real_number("max_episode_steps", limit) < 1:
            return None
        return limit

    def _check_decoupled(self) -> None:
        if self.version == "0.8.4":
            raise SettingError(
                "algo", self.algo, "is gone from sheeprl 0.8.4", ["ppo", "sac"], "or version=0.5.7"
            )
        if self.world_size < 2:
            raise SettingError(
                "world_size", self.world_size, "leaves no process to train: one only plays", [2]
            )

    def _on_policy(self) -> dict[str, Any]:
        assert self.total_steps is not None
        assert self.rollout_steps is not None
        assert self.per_rank_batch_size is not None
        if self.algo == "a2c" and self.anneal_lr and self.version not in ("0.8.4", "documented"):
            raise SettingError(
                "anneal_lr", True, f"is no setting of A2C in sheeprl {self.version}", [False]
            )
        if self.buffer_size not in (None, self.rollout_steps) and self.version != "documented":
            why = "fails on-policy: the buffer holds one rollout"
            raise SettingError("buffer_size", self.buffer_size, why, [self.rollout_steps])
        iterations = self.total_steps // self.policy_steps_per_iteration
        rows = self.num_envs * self.rollout_steps
        size = min(self.per_rank_batch_size, rows)
        if self.algo == "a2c" and self.version in ("0.5.7", "0.5.0"):
            # The rows of these versions are time steps of all copies together.
            size = min(self.per_rank_batch_size, self.rollout_steps) * self.num_envs
        elif self.algo == "ppo_decoupled":
            size = min(self.per_rank_batch_size * (self.world_size - 1), rows)
        accumulates = self.algo == "a2c"
        return {
            "iterations": 1 if self.dry_run else iterations,
            "steps_per_env": self.rollout_steps,
            "update_epochs": 1 if accumulates else self.update_epochs,
            "minibatch_size": size,
            "minibatches_per_gradient_step": None if accumulates else 1,
        }

    def _off_policy(self) -> dict[str, Any]:
        assert self.total_steps is not None
        assert self.learning_starts is not None
        assert self.per_rank_batch_size is not None
        each = self.policy_steps_per_iteration
        random = 0 if self.dry_run else self.learning_starts // each
        first = max(random, 1)
        sequence = self.per_rank_sequence_length if self.algo in _SEQUENCES else None
        if sequence and self.version == "0.8.4":
            first = max(first, sequence)
        iterations = 1 if self.dry_run else self.total_steps // each
        if self.dry_run and self.version == "0.8.4":
            iterations = first
        made: dict[str, Any] = {
            "iterations": iterations,
            "steps_per_env": 1,
            "learning_starts": first * each if first > 1 else 0,
            "random_steps": 0 if "finetuning" in str(self.algo) else min(random, iterations) * each,
            "minibatch_size": self.per_rank_batch_size,
            "sequence_length": sequence,
            "exploration_steps": self.exploration_steps,
        }
        if self.algo == "sac_decoupled":
            made["minibatch_size"] *= self.world_size - 1
        if self.version == "0.5.0":
            return made | self._train_every(random)
        return made | self._replay_ratio(random, first, sequence, iterations)

    def _replay_ratio(
        self, random: int, first: int, sequence: int | None, iterations: int
    ) -> dict[str, Any]:
        ratio = real_number("replay_ratio", self.replay_ratio, 0, LARGEST_RATIO)
        pretrain = self.per_rank_pretrain_steps
        if self.version == "documented":
            if ratio == 0:
                raise SettingError("replay_ratio", 0, "must be greater than zero", [1.0])
            if random * self.policy_steps_per_iteration != self.learning_starts:
                self._refuse_learning_starts(random)
            return {"replay_ratio": ratio, "pretrain_steps": pretrain, "counting": "exact"}
        if self.version == "0.8.4" and self.dry_run:
            pretrain = 0
        counting = self.counting()
        if ratio == 0 and self.version == "0.5.7":  # its pretraining is multiplied by the ratio
            counting, pretrain = "exact", 0
        if self._loses_nothing(ratio, counting, pretrain or 0):
            counting = "exact"
        if sequence and self.version == "0.5.7":
            self._check_sequence(ratio, first, sequence, iterations)
        return {"replay_ratio": ratio, "pretrain_steps": pretrain, "counting": counting}

    def counting(self) -> str:
        """Name of the rule by which the version counts gradient steps from ``replay_ratio``."""
        if self.version == "0.8.4":
            return "sheeprl"
        if self.algo in ("sac", OFF_POLICY):
            return "sheeprl-0.5.7-sac"
        if self.algo == "sac_decoupled":
            return f"sheeprl-0.5.7-decoupled:{self.world_size - 1}"
        return "sheeprl-0.5.7"

    def _loses_nothing(self, ratio: float, counting: str, pretrain: int) -> bool:
        """Whether its float arithmetic counts as exact fractions would.

        It does where the gradient steps of one iteration are a whole number, as a float too: then
        each call returns just them and carries nothing.
        """
        whole = (Fraction(ratio) * self.num_envs).denominator == 1
        return whole and (counting == "sheeprl" or (counting == "sheeprl-0.5.7" and not pretrain))

    def _refuse_learning_starts(self, random: int) -> None:
        each = self.policy_steps_per_iteration
        raise SettingError(
            "learning_starts",
            self.learning_starts,
            f"is not a multiple of the {each} policy steps of one iteration",
            [random * each, (random + 1) * each],
        )

    def _check_sequence(self, ratio: float, first: int, sequence: int, iterations: int) -> None:
        """0.5.7 samples sequences as soon as a gradient step is due, played or not."""
        trains = first + first_due(ratio, self.num_envs)
        if trains <= min(sequence - 1, iterations):
            raise SettingError(
                "learning_starts",
                self.learning_starts,
                f"lets sheeprl 0.5.7 train after {trains} time steps of each copy, where it "
                f"cannot sample a sequence of per_rank_sequence_length={sequence}",
                [sequence * self.policy_steps_per_iteration],
            )

    def _train_every(self, random: int) -> dict[str, Any]:
        """Before ``replay_ratio``: a countdown (Dreamer), or a first training like the prefill."""
        steps, every = self.per_rank_gradient_steps, self.train_every
        assert steps is not None
        assert every is not None
        made: dict[str, Any] = {"gradient_steps_per_iteration": steps}
        if self.algo not in _SEQUENCES:
            return made | {"pretrain_steps": (max(random, 1) - 1) * steps}
        each = self.policy_steps_per_iteration
        countdown = every // each
        first, period = max(random, countdown, 1), max(countdown, 1)
        at_first = self.per_rank_pretrain_steps if first == random else steps
        assert at_first is not None
        made["learning_starts"] = first * each if first > 1 else 0
        if period == 1 and at_first >= steps:
            return made | {"pretrain_steps": at_first - steps}
        return made | {"counting": f"sheeprl-0.5.0:{period},{at_first}"}

    def resumed(self, first: Sheeprl) -> StepPlan:
        """Return the run that resumes ``first`` from its last checkpoint with these settings."""
        return resumed(self, first)

    def ratio(self) -> SheeprlRatio:
        """Return the library's ratio, new, also where the plan can count with exact fractions."""
        rule = counting_rule(self.resolved().counting())(self.to_plan())
        assert isinstance(rule, SheeprlRatio)
        return rule

    def notes(self) -> list[str]:
        """Return what a reader of these settings would not expect, a sentence each."""
        return notes(self.resolved(), self.to_plan())

    # ------------------------------------------------------------------ from a plan
    @classmethod
    def _from(cls, plan: StepPlan, settings: Mapping[str, Any]) -> Self:
        algo = settings.get("algo") or algorithms_for(plan)[0]
        return cls(**settings_from(plan, algo, settings.get("version")))

    @classmethod
    def _algorithms_for(cls, plan: StepPlan, settings: Mapping[str, Any]) -> Iterable[str | None]:
        given = settings.get("algo")
        return [given] if given else algorithms_for(plan)
