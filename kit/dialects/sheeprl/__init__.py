"""Settings for sheeprl (https://github.com/Eclectic-Sheep/sheeprl).

Like kit, sheeprl counts policy steps: each action in each environment of each process is one step.
An off-policy iteration is a vector step, and an on-policy iteration has ``rollout_steps`` vector
steps. ``Sheeprl.VERSIONS`` lists the differences between versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
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
    Ignored,
    MapsTo,
    count_field,
    ignored,
    linear_or_constant,
    mapped,
)
from kit.dialects.sheeprl.configs import configuration, experiment_file
from kit.dialects.sheeprl.conversions import (
    activation,
    anneal,
    capacity,
    clip_value,
    continuation,
    divergence,
    exploration_min,
    hidden_sizes,
    network_size,
    norm,
    positive_or_none,
    precision,
    shared_rate,
    target_period,
)
from kit.dialects.sheeprl.defaults import (
    DECOUPLED,
    IMPLICIT_DEFAULTS,
    P2E,
    SEQUENCES,
    WITHOUT_RANDOM,
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


_V3 = ("dreamer_v3", "dreamer_v3_5", "p2e_dv3_exploration", "p2e_dv3_finetuning")
_P2E_V3 = _V3[2:]
_DREAMERS = ("dreamer_v1", *_V3)


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
        "env.id": "env_id",
        "fabric.devices": "world_size",
        "fabric.precision": "precision",
        "buffer.size": "buffer_size",
        "buffer.checkpoint": "buffer_checkpoint",
        "buffer.share_data": "share_data",
        "buffer.online": "online",
        "algo.critic.target_network_frequency": "target_network_frequency",
        "algo.critic.per_rank_target_network_update_freq": "target_network_update_freq",
        "algo.critic.target_network_update_freq": "target_network_update_freq",
        "algo.critic.tau": "tau",
        "algo.critic.n": "num_critics",
        "algo.critic.dropout": "dropout",
        "algo.critic.optimizer.lr": "critic_lr",
        "algo.actor.optimizer.lr": "actor_lr",
        "algo.actor.ent_coef": "ent_coef",
        "algo.actor.expl_amount": "expl_amount",
        "algo.actor.expl_decay": "expl_decay",
        "algo.actor.expl_min": "expl_min",
        "algo.alpha.alpha": "alpha",
        "algo.alpha.optimizer.lr": "alpha_lr",
        "algo.optimizer.lr": "lr",
        "algo.optimizer.agc": "agc",
        "algo.optimizer.warmup": "warmup",
        "algo.world_model.optimizer.lr": "world_model_lr",
        "algo.world_model.clip_gradients": "clip_gradients",
        "algo.world_model.kl_dynamic": "kl_dynamic",
        "algo.world_model.kl_representation": "kl_representation",
        "algo.world_model.kl_regularizer": "kl_regularizer",
        "algo.world_model.kl_free_nats": "kl_free_nats",
        "algo.world_model.use_continues": "use_continues",
        "algo.world_model.continue_scale_factor": "continue_scale_factor",
        "algo.loss_scales.dynamic": "kl_dynamic",
        "algo.loss_scales.representation": "kl_representation",
        "algo.loss_scales.replay_value": "replay_value",
        "algo.ensembles.n": "ensembles",
        "algo.ensembles.optimizer.lr": "ensembles_lr",
        "algo.critics_exploration.intrinsic.weight": "intrinsic_weight",
        "algo.critics_exploration.extrinsic.weight": "extrinsic_weight",
    }
    WITHOUT_EFFECT = (
        "defaults", "checkpoint.", "distribution.", "fabric.", "hydra.", "logger.", "metric.",
        "model_manager.", "exp_name", "root_dir", "run_name", "log_root", "run_benchmarks",
        "algo.compile.", "buffer.memmap", "env.capture_video", "env.sync_env",
    )  # fmt: skip
    RECIPES: ClassVar = {
        "ppo_decoupled": "ppo",
        "sac_decoupled": "sac",
        "dreamer_v1": "dreamerv1",
        **dict.fromkeys(("dreamer_v3", "dreamer_v3_5"), "dreamerv3"),
        **dict.fromkeys(_P2E_V3, "plan2explore"),
    }
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
    replay_context: NonNegativeInt = mapped(
        "stored_latents", None, lambda value, _: value > 0, only="dreamer_v3_5"
    )
    """Time steps before each sequence, from whose stored latent the sequence starts."""
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
    share_data: bool = ignored("each process trains on its own data", False, only=ON_POLICY)
    """Whether processes gather and split the collected data, which does not affect counts."""
    buffer_size: PositiveInt | None = mapped("buffer_size", None, capacity, family=OFF_POLICY)
    """Total replay capacity in transitions (``buffer.size``), rounded down per environment."""
    buffer_checkpoint: bool = ignored(
        "checkpoints contain the replay buffer", True, only=OFF_POLICY
    )
    """Whether checkpoints contain the replay buffer (``buffer.checkpoint``)."""
    online: bool = ignored("batches are sampled uniformly", False, only=OFF_POLICY)
    """Whether batches begin with the newest steps (``buffer.online``)."""
    precision: str = mapped("precision", "32-true", precision)
    """Data type for training (``fabric.precision``)."""
    target_network_frequency: NonNegativeInt = mapped(
        "target_update_every", 1, target_period, only=("sac", "sac_decoupled")
    )
    """Policy steps between target updates (SAC, ``algo.critic.target_network_frequency``)."""
    target_network_update_freq: PositiveInt = mapped("target_update_every", 1, only=_V3)
    """Gradient steps between target updates (DreamerV3)."""
    anneal_lr: bool = mapped("lr_schedule", False, anneal, only=ON_POLICY)
    """Whether the learning rate decreases linearly to ``lr / iterations``."""
    anneal_clip_coef: bool = mapped("clip_schedule", False, linear_or_constant, only=_PPOS)
    """Whether the clip range decreases linearly (PPO)."""
    anneal_ent_coef: bool = mapped("entropy_schedule", False, linear_or_constant, only=_PPOS)
    """Whether the entropy coefficient decreases linearly (PPO)."""
    lr: float = mapped("learning_rate", only=(ON_POLICY, "dreamer_v3_5"))
    """Learning rate for all networks (``algo.optimizer.lr``)."""
    gamma: float = mapped("gamma")
    """Discount factor."""
    gae_lambda: float = mapped("gae_lambda", only=ON_POLICY)
    """Lambda for generalised advantage estimation (PPO, A2C)."""
    clip_coef: float = mapped("clip_epsilon", only=_PPOS)
    """Clip range for the probability ratio (PPO)."""
    clip_vloss: bool = mapped("clip_value", None, clip_value, only=_PPOS)
    """Whether value predictions are also clipped, with range ``clip_coef`` (PPO)."""
    normalize_advantages: bool = mapped("normalize_advantage", only=ON_POLICY)
    """Whether advantages are normalised per minibatch (PPO, A2C)."""
    ent_coef: float = mapped("entropy_coeff", only=(ON_POLICY, *_V3))
    """Entropy coefficient."""
    vf_coef: float = mapped("critic_coeff", only=ON_POLICY)
    """Value loss coefficient (PPO, A2C)."""
    max_grad_norm: float = mapped("max_grad_norm", None, norm, only=ON_POLICY)
    """Maximum gradient norm (PPO, A2C); 0 for no clipping."""
    loss_reduction: str | None = mapped("max_grad_norm", None, norm, only=ON_POLICY)
    """Whether losses are a ``mean`` or a ``sum`` over transitions, to which the norm applies."""
    dense_units: PositiveInt = mapped(
        "hidden_sizes", None, hidden_sizes, only=(ON_POLICY, *_DREAMERS), family=ON_POLICY,
        otherwise=MapsTo("size", network_size),
    )  # fmt: skip
    """Size of the hidden layers. Selects the nearest size of all networks (Dreamer)."""
    mlp_layers: NonNegativeInt = mapped(
        "hidden_sizes", None, hidden_sizes, only=(ON_POLICY, *_DREAMERS), family=ON_POLICY,
        otherwise=Ignored("dense_units selects the size of all networks"),
    )  # fmt: skip
    """Number of hidden layers."""
    dense_act: str | None = mapped(
        "activation", None, activation, only=(ON_POLICY, *_DREAMERS), family=ON_POLICY,
        otherwise=Ignored("recipes use the activations of the papers"),
    )  # fmt: skip
    """Activation function as a class of PyTorch."""
    tau: float = mapped("tau", only=(*_SACS, *_V3))
    """Polyak coefficient of the target networks (SAC, DreamerV3)."""
    hidden_size: PositiveInt = mapped(
        "hidden_sizes", None, lambda value, _: [value, value], only=_SACS
    )
    """Size of both hidden layers (SAC)."""
    alpha: float = mapped("initial_alpha", only=_SACS)
    """Initial entropy coefficient (SAC, ``algo.alpha.alpha``)."""
    num_critics: PositiveInt | None = mapped("num_critics", only=_SACS)
    """Number of Q-networks (SAC, ``algo.critic.n``)."""
    dropout: float | None = mapped("dropout", only="droq")
    """Dropout probability of the Q-networks (DroQ, ``algo.critic.dropout``)."""
    actor_lr: float | None = mapped("learning_rate", only=(*_SACS, *_DREAMERS))
    """Learning rate for the actor (SAC, Dreamer)."""
    critic_lr: float | None = mapped("learning_rate", None, shared_rate, only=(*_SACS, *_DREAMERS))
    """Learning rate for the critics (SAC, Dreamer)."""
    alpha_lr: float | None = mapped("learning_rate", None, shared_rate, only=_SACS)
    """Learning rate for the entropy coefficient (SAC, ``algo.alpha.optimizer.lr``)."""
    world_model_lr: float | None = mapped(
        "model_learning_rate", only=_DREAMERS, family="dreamer_v1",
        otherwise=Ignored("the recipe has one learning rate, here actor_lr"),
    )  # fmt: skip
    """Learning rate for the world model (Dreamer)."""
    clip_gradients: float | None = mapped(
        "max_grad_norm", only=_DREAMERS, family="dreamer_v1",
        otherwise=Ignored("the recipe clips gradients relative to the weights"),
    )  # fmt: skip
    """Maximum gradient norm of the world model (``algo.world_model.clip_gradients``)."""
    horizon: PositiveInt | None = mapped("imagination_horizon", only=_DREAMERS)
    """Policy steps in each imagined rollout (Dreamer)."""
    lmbda: float | None = mapped("lmbda", only=_DREAMERS)
    """Lambda for lambda-returns (Dreamer)."""
    kl_free_nats: float | None = mapped("free_nats", only=_DREAMERS)
    """KL divergence in nats, below which there is no penalty (Dreamer)."""
    kl_regularizer: float | None = mapped(
        "divergence_coeff", only=_DREAMERS, family="dreamer_v1",
        otherwise=Ignored("it scales kl_dynamic and kl_representation"),
    )  # fmt: skip
    """Weight of the KL divergence (Dreamer)."""
    kl_dynamic: float | None = mapped("dynamics_coeff", None, divergence, only=_V3)
    """Weight of the KL divergence that trains the prior (DreamerV3)."""
    kl_representation: float | None = mapped("representation_coeff", None, divergence, only=_V3)
    """Weight of the KL divergence that trains the posterior (DreamerV3)."""
    use_continues: bool = mapped("continuation_coeff", False, continuation, only="dreamer_v1")
    """Whether the world model predicts ends of episodes (DreamerV1)."""
    continue_scale_factor: float | None = mapped(
        "continuation_coeff", None, continuation, only=_DREAMERS, family="dreamer_v1",
        otherwise=Ignored("the weight is 1"),
    )  # fmt: skip
    """Weight of the continuation loss (Dreamer)."""
    expl_amount: float | None = mapped(
        "exploration_noise", only="dreamer_v1", also=MapsTo("exploration_epsilon")
    )
    """Standard deviation of the noise, or probability of random discrete actions (DreamerV1)."""
    expl_decay: float = mapped("exploration_halving", 0.0, positive_or_none, only="dreamer_v1")
    """Policy steps in which ``expl_amount`` halves; 0 if it is constant (DreamerV1)."""
    expl_min: float = mapped("exploration_min", 0.0, exploration_min, only="dreamer_v1")
    """Value below which ``expl_amount`` does not fall (DreamerV1)."""
    agc: float | None = mapped("max_grad_ratio", only="dreamer_v3_5")
    """Maximum gradient norm, relative to the norm of the weights (``algo.optimizer.agc``)."""
    warmup: NonNegativeInt | None = mapped("warmup_gradient_steps", only="dreamer_v3_5")
    """Gradient steps over which the learning rate warms up (``algo.optimizer.warmup``)."""
    replay_value: float | None = mapped("replay_critic_coeff", only="dreamer_v3_5")
    """Weight of the critic loss on replayed steps (``algo.loss_scales.replay_value``)."""
    ensembles: PositiveInt | None = mapped("ensemble", only=_P2E_V3)
    """Number of one-step prediction models (Plan2Explore, ``algo.ensembles.n``)."""
    ensembles_lr: float | None = mapped("ensemble_learning_rate", only=_P2E_V3)
    """Learning rate for the ensemble (Plan2Explore, ``algo.ensembles.optimizer.lr``)."""
    intrinsic_weight: float | None = mapped("intrinsic_weight", only=_P2E_V3)
    """Weight of the intrinsic-reward advantages (Plan2Explore)."""
    extrinsic_weight: float | None = mapped("extrinsic_weight", only=_P2E_V3)
    """Weight of the task-reward advantages (Plan2Explore)."""
    intrinsic_reward_multiplier: float | None = mapped("intrinsic_reward_multiplier", only=_P2E_V3)
    """Factor applied to the intrinsic reward (Plan2Explore)."""

    @classmethod
    def configuration(cls, settings: dict[str, Any], path: Path | None) -> dict[str, Any] | None:
        """Return the configuration of an experiment (``exp``) or of a config file."""
        return configuration(cls, settings, path)

    @classmethod
    def experiment_file(cls, settings: Mapping[str, Any]) -> Path | None:
        """Return the file of the experiment ``exp``, or ``None`` without ``exp``."""
        return experiment_file(settings)

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
        if self.algo == "dreamer_v3_5" and self.version != "0.8.4":
            reason = f"sheeprl {self.version} does not have this algorithm"
            raise SettingError("algo", self.algo, reason, ["dreamer_v3"], "or version=0.8.4")
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
            context = self.replay_context or 0 if self.algo == "dreamer_v3_5" else 0
            first = max(first, sequence + context)
        iterations = 1 if self.dry_run else self.total_steps // each
        if self.dry_run and self.version == "0.8.4":
            iterations = first
        plan: dict[str, Any] = {
            "iterations": iterations,
            "steps_per_env": 1,
            "learning_starts": first * each if first > 1 else 0,
            "random_steps": 0 if self.algo in WITHOUT_RANDOM else min(random, iterations) * each,
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
            return ["dreamer_v3", "p2e_dv3_finetuning", "dreamer_v1", "dreamer_v3_5"]
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
    if algo in WITHOUT_RANDOM:
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
    if algo in WITHOUT_RANDOM and trains(plan):
        starts = plan.first_training_iteration * each
    fields = {"learning_starts": starts, "train_every": period * each}
    if not trains(plan):
        fields["train_every"], at_first = each, 0
    fields["per_rank_gradient_steps"] = steps
    return fields if "v1" in algo else fields | {"per_rank_pretrain_steps": at_first}
