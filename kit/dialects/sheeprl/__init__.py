"""The vocabulary of sheeprl (https://github.com/Eclectic-Sheep/sheeprl).

Its unit is the policy step, as here: one action in one environment of one process. An off-policy
iteration is one vector step, an on-policy one ``rollout_steps`` of them. ``Sheeprl.VERSIONS`` lists
the differences between its versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from kit.dialects.base import (
    COUNTS_AS,
    OFF_POLICY,
    ON_POLICY,
    Dialect,
    ratio_of,
    step_by_step,
    steps_of_training,
    trains,
)
from kit.dialects.fields import (
    acts,
    counts,
    linear_or_constant,
    of_each_env,
    range_or_none,
    refused,
)
from kit.dialects.sheeprl.defaults import (
    CONFIGS,
    DECOUPLED,
    IMPLICIT_DEFAULTS,
    P2E,
    SEQUENCES,
    absent,
    defaults,
)
from kit.dialects.sheeprl.notes import notes
from kit.dialects.sheeprl.resume import resumed
from kit.dialects.sheeprl.rules import SheeprlRatio, first_due
from kit.steps.counting import counting_rule
from kit.steps.counts import LARGEST_RATIO
from kit.steps.errors import SettingError, real_number
from kit.steps.plan import StepPlan
from kit.steps.schema import NonNegativeInt, PositiveInt

_PPOS, _SACS = ("ppo", "ppo_decoupled"), ("sac", "droq", "sac_ae", "sac_decoupled")


def _anneal(value: Any, settings: Any) -> str:
    """The schedule of ``anneal_lr``; A2C of 0.8.4 takes the flag and keeps the rate constant."""
    ignored = settings.algo == "a2c" and settings.version == "0.8.4"
    return linear_or_constant(value and not ignored, settings)


def _clip_value(value: Any, settings: Any) -> Any:
    """The clip range of the value; up to 0.5.7 the loss is not the greater of both."""
    if value and settings.version in ("0.5.7", "0.5.0"):
        why = f"of {settings.version} takes the loss of clipped values alone, recipes the greater"
        raise SettingError("clip_vloss", value, why, [False], "or version=0.8.4")
    return range_or_none(value, settings)


def _norm(value: Any, settings: Any) -> float | None:
    """The largest norm of a mean gradient; A2C sums the losses of all transitions."""
    rows = settings.num_envs * settings.rollout_steps if settings.algo == "a2c" else 1
    return value / rows if value else None


def _hidden_sizes(value: Any, settings: Any) -> list[int]:
    return [settings.dense_units] * settings.mlp_layers


def _capacity(value: Any, settings: Any) -> int:
    """Transitions that the buffers of all environments hold."""
    return of_each_env(value, settings.num_envs * settings.processes)


@dataclass
class Sheeprl(Dialect):
    """Settings of sheeprl: ``algo.*``, ``env.*``, ``buffer.*`` and ``fabric.devices`` in one place.

    ``None`` stands for the default of the algorithm in that version.
    """

    NAME = "sheeprl"
    LIBRARY = "sheeprl"
    VERSIONS: ClassVar = {
        "0.8.4": "the code of 0.8.4; pretraining is added to the first training, and sequence "
        "algorithms wait until a sequence was played",
        "0.5.7": "the code of 0.5.7 (July 2024); SAC makes extra gradient steps at its first "
        "training, and pretraining replaces those due there",
        "0.5.0": "the code of February 2024, before replay_ratio: per_rank_gradient_steps every "
        "train_every policy steps",
    }
    ALGORITHMS: ClassVar = {
        **dict.fromkeys(("ppo", "a2c", "ppo_decoupled"), ON_POLICY),
        **dict.fromkeys(("sac", "droq", "sac_ae", "sac_decoupled"), OFF_POLICY),
        **dict.fromkeys(SEQUENCES, OFF_POLICY),
    }
    IMPLIED: ClassVar = {
        "ppo": ("rollout_steps", "update_epochs"),
        "dreamer_v3": ("per_rank_sequence_length",),
        "sac": (),
    }
    TOTAL = "total_steps"
    SECTIONS = frozenset({"", "algo", "env"})
    PATHS: ClassVar = {
        "algo.name": "algo",
        "fabric.devices": "world_size",
        "buffer.size": "buffer_size",
        "buffer.checkpoint": "buffer_checkpoint",
        "buffer.share_data": "share_data",
        "algo.critic.target_network_frequency": "target_network_frequency",
        "algo.optimizer.lr": "lr",
        "algo.alpha.alpha": "alpha",
    }
    CONFIGS: ClassVar = CONFIGS
    IMPLICIT_DEFAULTS: ClassVar = IMPLICIT_DEFAULTS

    total_steps: NonNegativeInt = counts()
    """policy steps of the run in all processes, rounded down to whole iterations."""
    exploration_steps: NonNegativeInt = counts(default=0, only=P2E)
    """policy steps during which the exploring agent of Plan2Explore acts; documented, and in the
    code of no version. 0: those of the code, all of an exploration run and those of a fine-tuning
    run up to its first training."""
    max_episode_steps: int | None = None
    """policy steps after which an episode is truncated; ``None`` or less than 1: never."""
    learning_starts: NonNegativeInt = counts(only=OFF_POLICY)
    """policy steps in all processes with random actions, rounded down to whole iterations; the last
    of these iterations already trains."""
    per_rank_pretrain_steps: NonNegativeInt = counts(only=OFF_POLICY)
    """gradient steps of each process in the first training; see the versions."""
    replay_ratio: float = counts(only=OFF_POLICY)
    """gradient steps of each process per policy step of its own, from the first training on."""
    rollout_steps: PositiveInt = counts(only=ON_POLICY)
    """policy steps of each environment in one on-policy iteration."""
    per_rank_batch_size: PositiveInt = counts()
    """transitions (sequences, for Dreamer) in a minibatch of one process."""
    per_rank_sequence_length: PositiveInt = counts(only=SEQUENCES)
    """time steps of a sequence."""
    update_epochs: NonNegativeInt = counts(only=_PPOS)
    """passes over the collected batch (PPO)."""
    num_envs: PositiveInt = counts("num_envs", 4)
    """environments in one process (``env.num_envs``)."""
    world_size: PositiveInt = 1
    """processes that train together (``fabric.devices``)."""
    action_repeat: NonNegativeInt = 1
    """env steps one action is held for; 0 means 1."""
    train_every: NonNegativeInt = counts(only=OFF_POLICY)
    """policy steps between trainings, before ``replay_ratio`` (version 0.5.0)."""
    per_rank_gradient_steps: NonNegativeInt = counts(only=OFF_POLICY)
    """gradient steps of one training, before ``replay_ratio`` (version 0.5.0)."""
    dry_run: bool = False
    """whether the run ends with its first training, without random actions and pretraining."""
    run_test: bool = counts("final_evaluation", True)
    """whether one episode is played at the end, on the first process (``algo.run_test``)."""
    share_data: bool = refused("each process trains on what it collected", False, only=ON_POLICY)
    """whether the processes gather what all of them collected and split it; same counts."""
    buffer_size: PositiveInt | None = acts("buffer_size", None, _capacity, family=OFF_POLICY)
    """transitions that the replay buffers of all processes hold (``buffer.size``), rounded down to
    equally many of each environment."""
    buffer_checkpoint: bool = refused(
        "checkpoints have the replay buffer", True, accepted=(True,), only=OFF_POLICY
    )
    """whether the replay buffer is in the checkpoint, for a resume (``buffer.checkpoint``)."""
    target_network_frequency: NonNegativeInt = refused(
        "targets are updated at every gradient step", 1, only=OFF_POLICY
    )
    """policy steps between target updates (SAC, ``algo.critic.target_network_frequency``)."""
    anneal_lr: bool = acts("lr_schedule", False, _anneal, only=ON_POLICY)
    """whether the learning rate falls linearly with the iterations, to one iteration's share."""
    anneal_clip_coef: bool = acts("clip_schedule", False, linear_or_constant, only=_PPOS)
    """whether the clipping range falls linearly with the iterations (PPO)."""
    anneal_ent_coef: bool = acts("entropy_schedule", False, linear_or_constant, only=_PPOS)
    """whether the weight of the entropy does (PPO)."""
    lr: float = acts("learning_rate", only=ON_POLICY)
    """learning rate of the one optimiser of PPO and A2C (``algo.optimizer.lr``)."""
    gamma: float = acts("gamma")
    """discount."""
    gae_lambda: float = acts("gae_lambda", only=ON_POLICY)
    """weight of longer advantage estimates (PPO, A2C)."""
    clip_coef: float = acts("clip_epsilon", only=_PPOS)
    """clipping range of the probability ratio (PPO)."""
    clip_vloss: bool = acts("clip_value", None, _clip_value, only=_PPOS)
    """whether the value is clipped, too, in the same range (PPO)."""
    normalize_advantages: bool = acts("normalize_advantage", only=_PPOS)
    """whether advantages get mean 0 and deviation 1 in each minibatch (PPO)."""
    ent_coef: float = acts("entropy_coeff", only=ON_POLICY)
    """weight of the entropy (PPO, A2C)."""
    vf_coef: float = acts("critic_coeff", only=ON_POLICY)
    """weight of the value loss (PPO, A2C)."""
    max_grad_norm: float = acts("max_grad_norm", None, _norm, only=ON_POLICY)
    """largest norm of the gradient (PPO, A2C), which in A2C is a sum over the transitions of a
    process, not a mean as in recipes; 0: any."""
    dense_units: PositiveInt = acts("hidden_sizes", None, _hidden_sizes, only=ON_POLICY)
    """width of the hidden layers (PPO, A2C)."""
    mlp_layers: NonNegativeInt = acts("hidden_sizes", None, _hidden_sizes, only=ON_POLICY)
    """hidden layers (PPO, A2C)."""
    tau: float = acts("tau", only=_SACS)
    """Polyak coefficient of the target networks (SAC)."""
    hidden_size: PositiveInt = acts(
        "hidden_sizes", None, lambda value, _: [value, value], only=_SACS
    )
    """width of both hidden layers (SAC)."""
    alpha: float = acts("initial_alpha", only=_SACS)
    """entropy coefficient at the beginning (SAC, ``algo.alpha.alpha``)."""

    def _algorithm(self, algo: Any) -> str:
        if algo == "ppo_recurrent":
            why = (
                "cuts each rollout into sequences where its episodes end, and makes as many "
                "gradient steps as they fill minibatches: no plan can foretell them"
            )
            raise SettingError("algo", algo, why, ["ppo"])
        return super()._algorithm(algo)

    def _defaults(self) -> Mapping[str, Any]:
        algo = COUNTS_AS.get(str(self.algo), str(self.algo)).removesuffix("_decoupled")
        for name, works in absent(self.version, algo).items():
            value, of = getattr(self, name), "of A2C in" if algo == "a2c" else "of"
            if value is not None and value is not False:
                why = f"is no setting {of} sheeprl {self.version}"
                raise SettingError(name, value, why, works)
        made = defaults(self.version, algo)
        if algo == "a2c":
            made["per_rank_batch_size"] = self.rollout_steps or made["rollout_steps"]
        return made

    @property
    def processes(self) -> int:
        """Processes that step environments: one, if it collects for the others."""
        return 1 if self.algo in DECOUPLED else self.world_size

    @property
    def policy_steps_per_iteration(self) -> int:
        """Policy steps of one iteration of resolved settings, in all processes."""
        steps = self.rollout_steps if self.family == ON_POLICY else 1
        return self.num_envs * self.processes * steps

    # ------------------------------------------------------------------ to a plan
    def _plan(self) -> dict[str, Any]:
        if self.algo in DECOUPLED and self.version == "0.8.4":
            why = "is gone from sheeprl 0.8.4"
            raise SettingError("algo", self.algo, why, ["ppo", "sac"], "or version=0.5.7")
        limit = self.max_episode_steps or 0
        return {
            "world_size": self.processes,
            "action_repeat": max(self.action_repeat, 1),
            "max_episode_steps": limit if limit > 0 else None,
            "evaluation_episodes": 1,
            **(self._on_policy() if self.family == ON_POLICY else self._off_policy()),
        }

    def _on_policy(self) -> dict[str, Any]:
        old = self.version in ("0.5.7", "0.5.0")
        if self.buffer_size not in (None, self.rollout_steps):
            why = "fails on-policy: the buffer holds one rollout"
            raise SettingError("buffer_size", self.buffer_size, why, [self.rollout_steps])
        iterations = self.total_steps // self.policy_steps_per_iteration
        rows = self.num_envs * self.rollout_steps
        size = min(self.per_rank_batch_size, rows)
        if self.algo == "a2c" and old:
            # The rows of these versions are time steps of all environments together.
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
        each = self.policy_steps_per_iteration
        random = 0 if self.dry_run else self.learning_starts // each
        first = max(random, 1)
        sequence = self.per_rank_sequence_length if self.algo in SEQUENCES else None
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
            "exploration_steps": self._explored(iterations, first),
        }
        if self.algo == "sac_decoupled":
            made["minibatch_size"] *= self.world_size - 1
        if self.version == "0.5.0":
            if self.algo in SEQUENCES:
                return made | self._train_every(random, iterations)
            return made | self._before_ratio(random, iterations)
        return made | self._replay_ratio(first, sequence, iterations)

    def _explored(self, iterations: int, first: int) -> int:
        """Policy steps of the exploring agent.

        They are all of an exploration run, and those up to the first training of a fine-tuning run.
        """
        algo, each = str(self.algo), self.policy_steps_per_iteration
        if self.exploration_steps or "p2e" not in algo:
            return self.exploration_steps
        return min(iterations, first if "finetuning" in algo else iterations) * each

    def _replay_ratio(self, first: int, sequence: int | None, iterations: int) -> dict[str, Any]:
        ratio = real_number("replay_ratio", self.replay_ratio, 0, LARGEST_RATIO)
        pretrain = self.per_rank_pretrain_steps
        if self.version == "0.8.4" and self.dry_run:
            pretrain = 0
        counting = self.rule()
        if ratio == 0 and self.version == "0.5.7":  # its pretraining is multiplied by the ratio
            counting, pretrain = "exact", 0
        if self._loses_nothing(ratio, counting, pretrain):
            counting = "exact"
        if sequence and self.version == "0.5.7":  # it samples once a gradient step is due
            after = first + first_due(ratio, self.num_envs)
            if after <= iterations:
                self._check_sequence(after)
        return {"replay_ratio": ratio, "pretrain_steps": pretrain, "counting": counting}

    def _loses_nothing(self, ratio: float, counting: str, pretrain: int) -> bool:
        """Whether its float arithmetic counts as exact fractions would.

        It does where the gradient steps of one iteration are a whole number, as a float too: then
        each call returns just them and carries nothing.
        """
        whole = (Fraction(ratio) * self.num_envs).denominator == 1
        return whole and (counting == "sheeprl" or (counting == "sheeprl-0.5.7" and not pretrain))

    def _check_sequence(self, after: int) -> None:
        """Before 0.8.4 sequences were sampled, played or not, ``after`` so many time steps."""
        sequence = self.per_rank_sequence_length
        if after < sequence:
            why = (
                f"lets sheeprl {self.version} train after {after} time steps of each environment, "
                f"where it cannot sample a sequence of per_rank_sequence_length={sequence}"
            )
            works = [sequence * self.policy_steps_per_iteration]
            raise SettingError("learning_starts", self.learning_starts, why, works)

    def _before_ratio(self, random: int, iterations: int) -> dict[str, Any]:
        """Before ``replay_ratio``, where each algorithm had a loop of its own.

        DroQ plays no random actions, and trains strictly after ``learning_starts``. SAC makes up
        for them in its first training, SAC-AE one iteration earlier.
        """
        each, steps = self.policy_steps_per_iteration, self.per_rank_gradient_steps
        made: dict[str, Any] = {"gradient_steps_per_iteration": steps}
        if self.algo == "droq":
            starts = (random + 1) * each if random else 0
            return made | {"random_steps": 0, "learning_starts": starts}
        played = max(random - 1, 0) if self.algo == "sac_ae" else random
        return made | {
            "random_steps": min(played, iterations) * each,
            "learning_starts": played * each if played > 1 else 0,
            "pretrain_steps": max(random - 1, 0) * steps,
        }

    def _train_every(self, random: int, iterations: int) -> dict[str, Any]:
        """The countdown of Dreamer; that of DreamerV1 begins strictly after ``learning_starts``."""
        steps, every, algo = self.per_rank_gradient_steps, self.train_every, str(self.algo)
        each = self.policy_steps_per_iteration
        countdown = 0 if self.dry_run and "v3" not in algo else every // each
        starts = random + (algo == "dreamer_v1")
        first, period = max(starts, countdown, 1), max(countdown, 1)
        if steps and first <= iterations:
            self._check_sequence(first)
        pretrains = first == random and "v1" not in algo  # DreamerV1 never does
        at_first = self.per_rank_pretrain_steps if pretrains else steps
        made: dict[str, Any] = {"gradient_steps_per_iteration": steps}
        made["learning_starts"] = first * each if first > 1 else 0
        if period == 1 and at_first >= steps:
            return made | {"pretrain_steps": at_first - steps}
        return made | {"counting": f"sheeprl-0.5.0:{period},{at_first}"}

    def rule(self) -> str:
        """Name of the rule by which the version counts gradient steps from ``replay_ratio``."""
        if self.version == "0.8.4":
            return "sheeprl"
        if self.algo in ("sac", OFF_POLICY):
            return "sheeprl-0.5.7-sac"
        if self.algo == "sac_decoupled":
            return f"sheeprl-0.5.7-decoupled:{self.world_size - 1}"
        return "sheeprl-0.5.7"

    def ratio(self) -> SheeprlRatio:
        """The library's ratio, new, also where the plan can count with exact fractions."""
        made = counting_rule(self.resolved().rule())(self.to_plan())
        assert isinstance(made, SheeprlRatio)
        return made

    def resumed(self, first: Sheeprl) -> StepPlan:
        """The plan of resuming ``first`` from its last checkpoint with these settings.

        Of these settings 0.8.4 takes ``total_steps`` and ``learning_starts``, and all others from
        the checkpoint. With the replay buffer in the checkpoint its ratio continues; without it a
        new buffer is filled with the policy, and then it trains as a new run does. Before 0.8.4 all
        old settings win, so that a run that has ended stays ended.
        """
        return resumed(self, first)

    # ------------------------------------------------------------------ from a plan
    @staticmethod
    def _algorithms_for(plan: StepPlan) -> Iterable[str | None]:
        """Algorithms that may make ``plan``, the likeliest first.

        They count differently, in some versions: SAC, the others without sequences, and those that
        finetune without random actions.
        """
        if plan.on_policy:
            ppo, a2c = ["ppo", "ppo_decoupled"], ["a2c"]
            return ppo + a2c if plan.minibatches_per_gradient_step is not None else a2c + ppo
        if plan.sequence_length:
            return ["dreamer_v3", "p2e_dv3_finetuning", "dreamer_v1"]
        return ["sac", "droq", "sac_ae", "sac_decoupled"]

    @staticmethod
    def _from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Where no version is given, it is the one by whose rule the plan counts."""
        algo, version = settings["algo"], settings.get("version")
        plan = step_by_step(plan)
        if version is None:
            rule, *named = plan.counting.partition(":")[0].split("-")
            version = named[0] if rule == "sheeprl" and named else "0.8.4"
        made: dict[str, Any] = {
            "algo": algo,
            "version": version,
            "total_steps": plan.total_policy_steps,
            "world_size": _processes(plan, algo),
            "action_repeat": plan.action_repeat,
            "max_episode_steps": plan.max_episode_steps,
            "run_test": plan.evaluations_after(plan.iterations) > 0,
        }
        if plan.on_policy:
            return made | _on_policy_from(plan, algo, version)
        each = plan.minibatch_size
        if algo == "sac_decoupled" and each is not None:
            each = max(each // (made["world_size"] - 1), 1)
        made |= {
            "per_rank_sequence_length": plan.sequence_length,
            "per_rank_batch_size": each,
            "exploration_steps": plan.exploration_steps,
        }
        if version == "0.5.0" and algo in SEQUENCES:
            return made | _train_every_from(plan, algo)
        if version == "0.5.0":
            return made | _before_ratio_from(plan, algo)
        return made | _replay_ratio_from(plan, algo)

    def _notes(self, plan: StepPlan) -> Iterator[str]:
        return notes(self, plan)


def _processes(plan: StepPlan, algo: str) -> int:
    """Processes of the plan, and those that train for the one that plays."""
    if not algo.endswith("decoupled") or plan.world_size > 1:
        return plan.world_size
    rule, _, trainers = plan.counting.partition(":")
    return 1 + int(trainers) if rule == "sheeprl-0.5.7-decoupled" else 2


def _on_policy_from(plan: StepPlan, algo: str, version: str) -> dict[str, Any]:
    size = plan.minibatch_size or plan.frames_per_batch
    if algo == "a2c" and version in ("0.5.7", "0.5.0"):  # its rows are those of all environments
        size = max(size // plan.num_envs, 1)
    epochs = {} if algo == "a2c" else {"update_epochs": plan.update_epochs}
    return epochs | {"rollout_steps": plan.steps_per_env, "per_rank_batch_size": size}


def _replay_ratio_from(plan: StepPlan, algo: str) -> dict[str, Any]:
    starts, ratio, pretrain = plan.random_steps, float(ratio_of(plan)), plan.pretrain_steps
    if "finetuning" in algo:  # it plays no random actions
        starts = max(starts, plan.learning_starts)
    if not trains(plan):
        ratio, pretrain = 0.0, 0
    return {"learning_starts": starts, "replay_ratio": ratio, "per_rank_pretrain_steps": pretrain}


def _before_ratio_from(plan: StepPlan, algo: str) -> dict[str, Any]:
    each, starts = plan.policy_steps_per_iteration, plan.random_steps
    if algo == "droq":
        starts = (plan.first_training_iteration - 1) * each
    elif algo == "sac_ae" and starts:
        starts += each
    return {"learning_starts": starts, "per_rank_gradient_steps": steps_of_training(plan)}


def _train_every_from(plan: StepPlan, algo: str) -> dict[str, Any]:
    each, steps = plan.policy_steps_per_iteration, steps_of_training(plan)
    rule, _, numbers = plan.counting.partition(":")
    period, at_first = 1, steps + plan.pretrain_steps
    if rule == "sheeprl-0.5.0":
        period, at_first = map(int, numbers.split(","))
    starts = plan.random_steps
    if "finetuning" in algo and trains(plan):  # it plays no random actions
        starts = plan.first_training_iteration * each
    made = {"learning_starts": starts, "train_every": period * each}
    if not trains(plan):
        made["train_every"], at_first = each, 0
    made["per_rank_gradient_steps"] = steps
    return made if "v1" in algo else made | {"per_rank_pretrain_steps": at_first}
