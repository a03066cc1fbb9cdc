"""Settings for sheeprl (https://github.com/Eclectic-Sheep/sheeprl).

Like kit, sheeprl counts policy steps: each action in each environment of each process is one step.
An off-policy iteration is a vector step, and an on-policy iteration has ``rollout_steps`` vector
steps. ``Sheeprl.VERSIONS`` lists the differences between versions.
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
    count_field,
    linear_or_constant,
    mapped,
    range_or_none,
    round_to_envs,
    unsupported,
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
    """Return the learning-rate schedule. A2C in 0.8.4 ignores ``anneal_lr``."""
    ignored = settings.algo == "a2c" and settings.version == "0.8.4"
    return linear_or_constant(value and not ignored, settings)


def _clip_value(value: Any, settings: Any) -> Any:
    """Return the value clip range. Value clipping in versions up to 0.5.7 is not supported."""
    if value and settings.version in ("0.5.7", "0.5.0"):
        reason = f"sheeprl {settings.version} uses only the clipped value loss, unlike recipes"
        raise SettingError("clip_vloss", value, reason, [False], "or version=0.8.4")
    return range_or_none(value, settings)


def _norm(value: Any, settings: Any) -> float | None:
    """Return the equivalent maximum gradient norm for a mean loss; sheeprl's A2C uses a sum."""
    rows = settings.num_envs * settings.rollout_steps if settings.algo == "a2c" else 1
    return value / rows if value else None


def _hidden_sizes(value: Any, settings: Any) -> list[int]:
    return [settings.dense_units] * settings.mlp_layers


def _capacity(value: Any, settings: Any) -> int:
    """Return the total replay capacity for all environments."""
    return round_to_envs(value, settings.num_envs * settings.processes)


@dataclass
class Sheeprl(Dialect):
    """sheeprl settings from ``algo.*``, ``env.*``, ``buffer.*`` and ``fabric.devices``.

    ``None`` means the algorithm's default in the selected version.
    """

    NAME = "sheeprl"
    LIBRARY = "sheeprl"
    VERSIONS: ClassVar = {
        "0.8.4": "code of 0.8.4; pretraining is added to the first training, and sequence "
        "algorithms wait for a whole sequence",
        "0.5.7": "code of 0.5.7 (July 2024); SAC has extra gradient steps in the first training, "
        "and pretraining replaces the due gradient steps",
        "0.5.0": "code of February 2024 without replay_ratio: per_rank_gradient_steps every "
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

    total_steps: NonNegativeInt = count_field()
    """Total policy steps across all processes, rounded down to whole iterations."""
    exploration_steps: NonNegativeInt = count_field(default=0, only=P2E)
    """Policy steps taken by Plan2Explore's exploration agent; if 0, computed as in sheeprl."""
    max_episode_steps: int | None = None
    """Policy steps after which an episode is truncated; ``None`` or less than 1 for no limit."""
    learning_starts: NonNegativeInt = count_field(only=OFF_POLICY)
    """Random policy steps across all processes. The last random iteration also trains."""
    per_rank_pretrain_steps: NonNegativeInt = count_field(only=OFF_POLICY)
    """Pretraining steps per process in the first training iteration (version-dependent)."""
    replay_ratio: float = count_field(only=OFF_POLICY)
    """Gradient steps per policy step in each process, once training has begun."""
    rollout_steps: PositiveInt = count_field(only=ON_POLICY)
    """Policy steps per environment in an on-policy iteration."""
    per_rank_batch_size: PositiveInt = count_field()
    """Transitions (for Dreamer, sequences) per minibatch in each process."""
    per_rank_sequence_length: PositiveInt = count_field(only=SEQUENCES)
    """Time steps per sequence."""
    update_epochs: NonNegativeInt = count_field(only=_PPOS)
    """Passes over the collected batch (PPO)."""
    num_envs: PositiveInt = count_field("num_envs", 4)
    """Environments per process (``env.num_envs``)."""
    world_size: PositiveInt = 1
    """Number of processes (``fabric.devices``)."""
    action_repeat: NonNegativeInt = 1
    """Env steps per action; 0 is treated as 1."""
    train_every: NonNegativeInt = count_field(only=OFF_POLICY)
    """Policy steps between training iterations (only in 0.5.0, instead of ``replay_ratio``)."""
    per_rank_gradient_steps: NonNegativeInt = count_field(only=OFF_POLICY)
    """Gradient steps per training iteration (only in 0.5.0, instead of ``replay_ratio``)."""
    dry_run: bool = False
    """Whether to stop after the first training iteration and skip random steps and pretraining."""
    run_test: bool = count_field("final_evaluation", True)
    """Whether the first process plays one test episode after training (``algo.run_test``)."""
    share_data: bool = unsupported("Each process trains on its own data", False, only=ON_POLICY)
    """Whether processes gather and split the collected data, which does not affect counts."""
    buffer_size: PositiveInt | None = mapped("buffer_size", None, _capacity, family=OFF_POLICY)
    """Total replay capacity in transitions (``buffer.size``), rounded down per environment."""
    buffer_checkpoint: bool = unsupported(
        "Checkpoints contain the replay buffer", True, accepted=(True,), only=OFF_POLICY
    )
    """Whether checkpoints contain the replay buffer (``buffer.checkpoint``)."""
    target_network_frequency: NonNegativeInt = unsupported(
        "Recipes update targets after every gradient step", 1, only=OFF_POLICY
    )
    """Policy steps between target updates (SAC, ``algo.critic.target_network_frequency``)."""
    anneal_lr: bool = mapped("lr_schedule", False, _anneal, only=ON_POLICY)
    """Whether the learning rate decreases linearly to ``lr / iterations``."""
    anneal_clip_coef: bool = mapped("clip_schedule", False, linear_or_constant, only=_PPOS)
    """Whether the clip range decreases linearly (PPO)."""
    anneal_ent_coef: bool = mapped("entropy_schedule", False, linear_or_constant, only=_PPOS)
    """Whether the entropy coefficient decreases linearly (PPO)."""
    lr: float = mapped("learning_rate", only=ON_POLICY)
    """Learning rate for PPO and A2C (``algo.optimizer.lr``)."""
    gamma: float = mapped("gamma")
    """Discount factor."""
    gae_lambda: float = mapped("gae_lambda", only=ON_POLICY)
    """Lambda for generalised advantage estimation (PPO, A2C)."""
    clip_coef: float = mapped("clip_epsilon", only=_PPOS)
    """Clip range for the probability ratio (PPO)."""
    clip_vloss: bool = mapped("clip_value", None, _clip_value, only=_PPOS)
    """Whether value predictions are also clipped, with range ``clip_coef`` (PPO)."""
    normalize_advantages: bool = mapped("normalize_advantage", only=_PPOS)
    """Whether advantages are normalised per minibatch (PPO)."""
    ent_coef: float = mapped("entropy_coeff", only=ON_POLICY)
    """Entropy coefficient (PPO, A2C)."""
    vf_coef: float = mapped("critic_coeff", only=ON_POLICY)
    """Value loss coefficient (PPO, A2C)."""
    max_grad_norm: float = mapped("max_grad_norm", None, _norm, only=ON_POLICY)
    """Maximum gradient norm (PPO, A2C); 0 for no clipping. A2C's loss is a sum, not a mean."""
    dense_units: PositiveInt = mapped("hidden_sizes", None, _hidden_sizes, only=ON_POLICY)
    """Size of the hidden layers (PPO, A2C)."""
    mlp_layers: NonNegativeInt = mapped("hidden_sizes", None, _hidden_sizes, only=ON_POLICY)
    """Number of hidden layers (PPO, A2C)."""
    tau: float = mapped("tau", only=_SACS)
    """Polyak coefficient of the target networks (SAC)."""
    hidden_size: PositiveInt = mapped(
        "hidden_sizes", None, lambda value, _: [value, value], only=_SACS
    )
    """Size of both hidden layers (SAC)."""
    alpha: float = mapped("initial_alpha", only=_SACS)
    """Initial entropy coefficient (SAC, ``algo.alpha.alpha``)."""

    def _algorithm(self, algo: Any) -> str:
        if algo == "ppo_recurrent":
            reason = (
                "Recurrent PPO splits rollouts at episode ends, so the number of minibatches "
                "cannot be planned"
            )
            raise SettingError("algo", algo, reason, ["ppo"])
        return super()._algorithm(algo)

    def _defaults(self) -> Mapping[str, Any]:
        algo = COUNTS_AS.get(str(self.algo), str(self.algo)).removesuffix("_decoupled")
        for name, hint in absent(self.version, algo).items():
            value, owner = getattr(self, name), "A2C of sheeprl" if algo == "a2c" else "sheeprl"
            if value is not None and value is not False:
                reason = f"{owner} {self.version} has no such setting"
                raise SettingError(name, value, reason, hint)
        values = defaults(self.version, algo)
        if algo == "a2c":
            values["per_rank_batch_size"] = self.rollout_steps or values["rollout_steps"]
        return values

    @property
    def processes(self) -> int:
        """Number of processes that step environments, which is 1 for decoupled algorithms."""
        return 1 if self.algo in DECOUPLED else self.world_size

    @property
    def policy_steps_per_iteration(self) -> int:
        """Policy steps per iteration across all processes. The settings must be resolved."""
        steps = self.rollout_steps if self.family == ON_POLICY else 1
        return self.num_envs * self.processes * steps

    # ------------------------------------------------------------------ to a plan
    def _plan(self) -> dict[str, Any]:
        if self.algo in DECOUPLED and self.version == "0.8.4":
            reason = "sheeprl 0.8.4 has no decoupled algorithms"
            raise SettingError("algo", self.algo, reason, ["ppo", "sac"], "or version=0.5.7")
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
            reason = "An on-policy buffer must have the size of one rollout"
            raise SettingError("buffer_size", self.buffer_size, reason, [self.rollout_steps])
        iterations = self.total_steps // self.policy_steps_per_iteration
        rows = self.num_envs * self.rollout_steps
        size = min(self.per_rank_batch_size, rows)
        if self.algo == "a2c" and old:
            # In versions 0.5.7 and 0.5.0, A2C's batch size counts vector steps.
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
        plan: dict[str, Any] = {
            "iterations": iterations,
            "steps_per_env": 1,
            "learning_starts": first * each if first > 1 else 0,
            "random_steps": 0 if "finetuning" in str(self.algo) else min(random, iterations) * each,
            "minibatch_size": self.per_rank_batch_size,
            "sequence_length": sequence,
            "exploration_steps": self._count_exploration_steps(iterations, first),
        }
        if self.algo == "sac_decoupled":
            plan["minibatch_size"] *= self.world_size - 1
        if self.version == "0.5.0":
            if self.algo in SEQUENCES:
                return plan | self._train_every(random, iterations)
            return plan | self._before_ratio(random, iterations)
        return plan | self._replay_ratio(first, sequence, iterations)

    def _count_exploration_steps(self, iterations: int, first: int) -> int:
        """Return the number of policy steps taken by the exploration agent.

        The exploration agent acts throughout an exploration run, but only until the first training
        iteration in a fine-tuning run.
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
        if ratio == 0 and self.version == "0.5.7":  # A ratio of 0 also disables pretraining.
            counting, pretrain = "exact", 0
        if self._is_exact(ratio, counting, pretrain):
            counting = "exact"
        if sequence and self.version == "0.5.7":  # Sampling starts with the first gradient step.
            after = first + first_due(ratio, self.num_envs)
            if after <= iterations:
                self._check_sequence(after)
        return {"replay_ratio": ratio, "pretrain_steps": pretrain, "counting": counting}

    def _is_exact(self, ratio: float, counting: str, pretrain: int) -> bool:
        """Return whether sheeprl's float arithmetic gives the same counts as exact fractions.

        The counts agree if the float ratio gives an integer number of gradient steps per iteration.
        """
        is_integer = (Fraction(ratio) * self.num_envs).denominator == 1
        return is_integer and (
            counting == "sheeprl" or (counting == "sheeprl-0.5.7" and not pretrain)
        )

    def _check_sequence(self, after: int) -> None:
        """Check that a sequence fits into the first ``after`` steps of each environment."""
        sequence = self.per_rank_sequence_length
        if after < sequence:
            reason = (
                f"sheeprl {self.version} would train after {after} time steps per environment and "
                f"cannot sample sequences of per_rank_sequence_length={sequence}"
            )
            minimum = sequence * self.policy_steps_per_iteration
            raise SettingError("learning_starts", self.learning_starts, reason, [minimum])

    def _before_ratio(self, random: int, iterations: int) -> dict[str, Any]:
        """Return plan settings for 0.5.0, in which each algorithm has a separate training loop.

        DroQ takes no random actions and trains strictly after ``learning_starts``. SAC's first
        training iteration includes gradient steps for the random actions. SAC-AE begins to train
        one iteration earlier than SAC.
        """
        each, steps = self.policy_steps_per_iteration, self.per_rank_gradient_steps
        plan: dict[str, Any] = {"gradient_steps_per_iteration": steps}
        if self.algo == "droq":
            starts = (random + 1) * each if random else 0
            return plan | {"random_steps": 0, "learning_starts": starts}
        collected = max(random - 1, 0) if self.algo == "sac_ae" else random
        return plan | {
            "random_steps": min(collected, iterations) * each,
            "learning_starts": collected * each if collected > 1 else 0,
            "pretrain_steps": max(random - 1, 0) * steps,
        }

    def _train_every(self, random: int, iterations: int) -> dict[str, Any]:
        """Return plan settings for Dreamer in 0.5.0, which trains when a countdown reaches 0."""
        steps, every, algo = self.per_rank_gradient_steps, self.train_every, str(self.algo)
        each = self.policy_steps_per_iteration
        countdown = 0 if self.dry_run and "v3" not in algo else every // each
        starts = random + (algo == "dreamer_v1")
        first, period = max(starts, countdown, 1), max(countdown, 1)
        if steps and first <= iterations:
            self._check_sequence(first)
        pretrains = first == random and "v1" not in algo  # DreamerV1 does not pretrain.
        at_first = self.per_rank_pretrain_steps if pretrains else steps
        plan: dict[str, Any] = {"gradient_steps_per_iteration": steps}
        plan["learning_starts"] = first * each if first > 1 else 0
        if period == 1 and at_first >= steps:
            return plan | {"pretrain_steps": at_first - steps}
        return plan | {"counting": f"sheeprl-0.5.0:{period},{at_first}"}

    def rule(self) -> str:
        """Return the name of the counting rule for ``replay_ratio`` in this version."""
        if self.version == "0.8.4":
            return "sheeprl"
        if self.algo in ("sac", OFF_POLICY):
            return "sheeprl-0.5.7-sac"
        if self.algo == "sac_decoupled":
            return f"sheeprl-0.5.7-decoupled:{self.world_size - 1}"
        return "sheeprl-0.5.7"

    def ratio(self) -> SheeprlRatio:
        """Return a new instance of the counting rule for ``replay_ratio``."""
        ratio = counting_rule(self.resolved().rule())(self.to_plan())
        assert isinstance(ratio, SheeprlRatio)
        return ratio

    def resumed(self, first: Sheeprl) -> StepPlan:
        """Return the plan for resuming ``first`` from its last checkpoint with these settings.

        0.8.4 takes ``total_steps`` and ``learning_starts`` from these settings, and all other
        settings from the checkpoint. If the checkpoint contains the replay buffer, the replay ratio
        continues from its saved state. Otherwise the policy fills a new buffer, and training starts
        as in a new run. Older versions take all settings from the checkpoint, so a finished run
        cannot be extended.
        """
        return resumed(self, first)

    # ------------------------------------------------------------------ from a plan
    @staticmethod
    def _algorithms_for(plan: StepPlan) -> Iterable[str | None]:
        """Return candidate algorithms for ``plan``, most likely first.

        In some versions, step counts differ between SAC and other algorithms without sequences, and
        between training and fine-tuning.
        """
        if plan.on_policy:
            ppo, a2c = ["ppo", "ppo_decoupled"], ["a2c"]
            return ppo + a2c if plan.minibatches_per_gradient_step is not None else a2c + ppo
        if plan.sequence_length:
            return ["dreamer_v3", "p2e_dv3_finetuning", "dreamer_v1"]
        return ["sac", "droq", "sac_ae", "sac_decoupled"]

    @staticmethod
    def _fields_for(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields for ``plan``. The default version depends on the plan's counting rule."""
        algo, version = settings["algo"], settings.get("version")
        plan = step_by_step(plan)
        if version is None:
            rule, *suffixes = plan.counting.partition(":")[0].split("-")
            version = suffixes[0] if rule == "sheeprl" and suffixes else "0.8.4"
        fields: dict[str, Any] = {
            "algo": algo,
            "version": version,
            "total_steps": plan.total_policy_steps,
            "world_size": _processes(plan, algo),
            "action_repeat": plan.action_repeat,
            "max_episode_steps": plan.max_episode_steps,
            "run_test": plan.evaluations_after(plan.iterations) > 0,
        }
        if plan.on_policy:
            return fields | _on_policy_from(plan, algo, version)
        each = plan.minibatch_size
        if algo == "sac_decoupled" and each is not None:
            each = max(each // (fields["world_size"] - 1), 1)
        fields |= {
            "per_rank_sequence_length": plan.sequence_length,
            "per_rank_batch_size": each,
            "exploration_steps": plan.exploration_steps,
        }
        if version == "0.5.0" and algo in SEQUENCES:
            return fields | _train_every_from(plan, algo)
        if version == "0.5.0":
            return fields | _before_ratio_from(plan, algo)
        return fields | _replay_ratio_from(plan, algo)

    def _notes(self, plan: StepPlan) -> Iterator[str]:
        return notes(self, plan)


def _processes(plan: StepPlan, algo: str) -> int:
    """Return the number of processes, including the trainer processes of decoupled algorithms."""
    if not algo.endswith("decoupled") or plan.world_size > 1:
        return plan.world_size
    rule, _, trainers = plan.counting.partition(":")
    return 1 + int(trainers) if rule == "sheeprl-0.5.7-decoupled" else 2


def _on_policy_from(plan: StepPlan, algo: str, version: str) -> dict[str, Any]:
    size = plan.minibatch_size or plan.frames_per_batch
    if algo == "a2c" and version in ("0.5.7", "0.5.0"):  # The batch size counts vector steps.
        size = max(size // plan.num_envs, 1)
    epochs = {} if algo == "a2c" else {"update_epochs": plan.update_epochs}
    return epochs | {"rollout_steps": plan.steps_per_env, "per_rank_batch_size": size}


def _replay_ratio_from(plan: StepPlan, algo: str) -> dict[str, Any]:
    starts, ratio, pretrain = plan.random_steps, float(ratio_of(plan)), plan.pretrain_steps
    if "finetuning" in algo:  # Fine-tuning has no random actions.
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
    if "finetuning" in algo and trains(plan):  # Fine-tuning has no random actions.
        starts = plan.first_training_iteration * each
    fields = {"learning_starts": starts, "train_every": period * each}
    if not trains(plan):
        fields["train_every"], at_first = each, 0
    fields["per_rank_gradient_steps"] = steps
    return fields if "v1" in algo else fields | {"per_rank_pretrain_steps": at_first}
