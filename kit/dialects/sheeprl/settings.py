"""The vocabulary of sheeprl (https://github.com/Eclectic-Sheep/sheeprl).

Its unit is the policy step, as here: one action in one environment of one process. An off-policy
iteration is one vector step, an on-policy one ``rollout_steps`` of them. ``Sheeprl.VERSIONS`` lists
the differences between its versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kit.dialects.base import OFF_POLICY, ON_POLICY, Dialect
from kit.dialects.fields import acts, counts, linear_or_constant, range_or_none, refused
from kit.dialects.sheeprl.defaults import CONFIGS, P2E, SEQUENCES, UNSAID, absent, defaults
from kit.steps.errors import Count, Natural, SettingError

_PPOS, _SACS = ("ppo", "ppo_decoupled"), ("sac", "droq", "sac_ae", "sac_decoupled")
DECOUPLED = ("ppo_decoupled", "sac_decoupled")


def _anneal(value: Any, settings: Any) -> str:
    """The schedule of ``anneal_lr``; A2C of 0.8.4 takes the flag and keeps the rate constant."""
    ignored = settings.algo == "a2c" and settings.version == "0.8.4"
    return linear_or_constant(value and not ignored, settings)


def _hidden_sizes(value: Any, settings: Any) -> list[int]:
    return [settings.dense_units] * settings.mlp_layers


@dataclass
class SheeprlSettings(Dialect):
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
        "documented": "howto/work_with_steps.md as it reads: no fraction of a gradient step is "
        "lost, and pretraining is added to the first training",
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
    UNSAID: ClassVar = UNSAID

    total_steps: Natural = counts()
    """policy steps of the run in all processes, rounded down to whole iterations."""
    exploration_steps: Natural = counts(default=0, only=P2E)
    """policy steps during which the exploring agent of Plan2Explore acts; documented, and in the
    code of no version, which uses ``total_steps`` of the exploration run."""
    max_episode_steps: int | None = None
    """policy steps after which an episode is truncated; ``None`` or less than 1: never."""
    learning_starts: Natural = counts(only=OFF_POLICY)
    """policy steps in all processes with random actions, rounded down to whole iterations; the last
    of these iterations already trains."""
    per_rank_pretrain_steps: Natural = counts(only=OFF_POLICY)
    """gradient steps of each process in the first training; see the versions."""
    replay_ratio: float = counts(only=OFF_POLICY)
    """gradient steps of each process per policy step of its own, from the first training on."""
    rollout_steps: Count = counts(only=ON_POLICY)
    """policy steps of each environment in one on-policy iteration."""
    per_rank_batch_size: Count = counts()
    """transitions (sequences, for Dreamer) in a minibatch of one process."""
    per_rank_sequence_length: Count = counts(only=SEQUENCES)
    """time steps of a sequence."""
    update_epochs: Natural = counts(only=_PPOS)
    """passes over the collected batch (PPO)."""
    num_envs: Count = counts("num_envs", 4)
    """environments in one process (``env.num_envs``)."""
    world_size: Count = 1
    """processes that train together (``fabric.devices``)."""
    action_repeat: Natural = 1
    """env steps one action is held for; 0 means 1."""
    train_every: Natural = counts(only=OFF_POLICY)
    """policy steps between trainings, before ``replay_ratio`` (version 0.5.0)."""
    per_rank_gradient_steps: Natural = counts(only=OFF_POLICY)
    """gradient steps of one training, before ``replay_ratio`` (version 0.5.0)."""
    dry_run: bool = False
    """whether the run ends with its first training, without random actions and pretraining."""
    run_test: bool = counts("final_evaluation", True)
    """whether one episode is played at the end, on the first process (``algo.run_test``)."""
    share_data: bool = refused("each process trains on what it collected", False, only=ON_POLICY)
    """whether the processes gather what all of them collected and split it; same counts."""
    buffer_size: Count | None = acts("buffer_size", family=OFF_POLICY)
    """transitions that the replay buffers of all processes hold (``buffer.size``)."""
    buffer_checkpoint: bool = refused(
        "checkpoints have the replay buffer", True, accepted=(True,), only=OFF_POLICY
    )
    """whether the replay buffer is in the checkpoint, for a resume (``buffer.checkpoint``)."""
    target_network_frequency: Natural = refused(
        "targets are updated at every gradient step", 1, only=OFF_POLICY
    )
    """policy steps between target updates (SAC, ``algo.critic.target_network_frequency``)."""
    anneal_lr: bool = acts("anneal", False, _anneal, only=ON_POLICY)
    """whether the learning rate falls linearly with the iterations, to one iteration's share."""
    anneal_clip_coef: bool = acts("anneal_clip", False, linear_or_constant, only=_PPOS)
    """whether the clipping range falls linearly with the iterations (PPO)."""
    anneal_ent_coef: bool = acts("anneal_entropy", False, linear_or_constant, only=_PPOS)
    """whether the weight of the entropy does (PPO)."""
    lr: float = acts("learning_rate", only=ON_POLICY)
    """learning rate of the one optimiser of PPO and A2C (``algo.optimizer.lr``)."""
    gamma: float = acts("gamma")
    """discount."""
    gae_lambda: float = acts("gae_lambda", only=ON_POLICY)
    """weight of longer advantage estimates (PPO, A2C)."""
    clip_coef: float = acts("clip_epsilon", only=_PPOS)
    """clipping range of the probability ratio (PPO)."""
    clip_vloss: bool = acts("clip_value", None, range_or_none, only=_PPOS)
    """whether the value is clipped, too, in the same range (PPO)."""
    normalize_advantages: bool = acts("normalize_advantage", only=_PPOS)
    """whether advantages get mean 0 and deviation 1 in each minibatch (PPO)."""
    ent_coef: float = acts("entropy_coeff", only=ON_POLICY)
    """weight of the entropy (PPO, A2C)."""
    vf_coef: float = acts("critic_coeff", only=ON_POLICY)
    """weight of the value loss (PPO, A2C)."""
    max_grad_norm: float = acts(
        "max_grad_norm", None, lambda value, _: value or None, only=ON_POLICY
    )
    """largest norm of the gradient (PPO, A2C); 0: any."""
    dense_units: Count = acts("hidden_sizes", None, _hidden_sizes, only=ON_POLICY)
    """width of the hidden layers (PPO, A2C)."""
    mlp_layers: Natural = acts("hidden_sizes", None, _hidden_sizes, only=ON_POLICY)
    """hidden layers (PPO, A2C)."""
    tau: float = acts("tau", only=_SACS)
    """Polyak coefficient of the target networks (SAC)."""
    hidden_size: Count = acts("hidden_sizes", None, lambda value, _: [value, value], only=_SACS)
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
        family = {ON_POLICY: "ppo", OFF_POLICY: "sac"}
        algo = family.get(str(self.algo), str(self.algo)).removesuffix("_decoupled")
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
