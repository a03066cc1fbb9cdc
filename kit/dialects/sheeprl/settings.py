"""The vocabulary of sheeprl (https://github.com/Eclectic-Sheep/sheeprl).

Its unit is the policy step, as here: one action in one environment of one process. An off-policy
iteration is one vector step, an on-policy one ``rollout_steps`` of them. ``Sheeprl.VERSIONS`` lists
the differences between its versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kit.dialects.base import (
    OFF_POLICY,
    ON_POLICY,
    Acts,
    Count,
    Dialect,
    Natural,
    Refused,
    linear_or_constant,
)
from kit.dialects.sheeprl.defaults import defaults
from kit.steps.errors import SettingError

_DREAMERS = ("dreamer_v1", "dreamer_v2", "dreamer_v3")
_P2E = tuple(f"p2e_dv{n}_{phase}" for n in (1, 2, 3) for phase in ("exploration", "finetuning"))
SEQUENCES = (*_DREAMERS, *_P2E)
DECOUPLED = ("ppo_decoupled", "sac_decoupled")


def _hidden_sizes(value: Any, settings: Any) -> list[int]:
    del value
    return [settings.dense_units] * settings.mlp_layers


@dataclass
class SheeprlSettings(Dialect):
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
        **dict.fromkeys(SEQUENCES, OFF_POLICY),
    }
    MEANS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "rollout_steps": (ON_POLICY,),
        "update_epochs": ("ppo", "ppo_decoupled"),
        "share_data": (ON_POLICY,),
        **dict.fromkeys(("anneal_lr", "lr", "gae_lambda", "ent_coef", "vf_coef"), (ON_POLICY,)),
        **dict.fromkeys(("dense_units", "mlp_layers", "max_grad_norm"), (ON_POLICY,)),
        **dict.fromkeys(
            ("clip_coef", "clip_vloss", "normalize_advantages"), ("ppo", "ppo_decoupled")
        ),
        **dict.fromkeys(("tau", "hidden_size", "alpha"), ("sac", "droq", "sac_decoupled")),
        "learning_starts": (OFF_POLICY,),
        "per_rank_pretrain_steps": (OFF_POLICY,),
        "replay_ratio": (OFF_POLICY,),
        "train_every": (OFF_POLICY,),
        "per_rank_gradient_steps": (OFF_POLICY,),
        "target_network_frequency": (OFF_POLICY,),
        "buffer_checkpoint": (OFF_POLICY,),
        "per_rank_sequence_length": SEQUENCES,
        "exploration_steps": _P2E,
    }
    CARRIED: ClassVar[Mapping[str, Acts | Refused]] = {
        "buffer_size": Acts("buffer_size", family=OFF_POLICY),
        "buffer_checkpoint": Refused("checkpoints have the replay buffer", accepted=(True,)),
        "share_data": Refused("each process trains on what it collected"),
        "target_network_frequency": Refused("targets are updated at every gradient step"),
        "anneal_lr": Acts("anneal", linear_or_constant),
        "lr": Acts("learning_rate"),
        "gamma": Acts("gamma"),
        "gae_lambda": Acts("gae_lambda"),
        "clip_coef": Acts("clip_epsilon"),
        "clip_vloss": Acts("clip_value", lambda value, said: said.clip_coef if value else None),
        "normalize_advantages": Acts("normalize_advantage"),
        "ent_coef": Acts("entropy_coeff"),
        "vf_coef": Acts("critic_coeff"),
        "max_grad_norm": Acts("max_grad_norm", lambda value, _: value or None),
        "tau": Acts("tau"),
        "alpha": Acts("initial_alpha"),
        "dense_units": Acts("hidden_sizes", _hidden_sizes),
        "mlp_layers": Acts("hidden_sizes", _hidden_sizes),
        "hidden_size": Acts("hidden_sizes", lambda value, _: [value, value]),
    }

    SECTIONS: ClassVar[frozenset[str]] = frozenset({"", "algo", "env"})
    PATHS: ClassVar[Mapping[str, str]] = {
        "algo.name": "algo",
        "fabric.devices": "world_size",
        "buffer.size": "buffer_size",
        "buffer.checkpoint": "buffer_checkpoint",
        "buffer.share_data": "share_data",
        "algo.critic.target_network_frequency": "target_network_frequency",
        "algo.optimizer.lr": "lr",
        "algo.alpha.alpha": "alpha",
    }

    total_steps: Natural | None = None
    """policy steps of the run in all processes; what does not fill an iteration is not played."""
    exploration_steps: Natural = 0
    """policy steps during which the exploring agent of Plan2Explore acts; documented, and in the
    code of no version, which uses ``total_steps`` of the exploration run."""
    max_episode_steps: int | None = None
    """policy steps after which an episode is truncated; ``None`` or less than 1: never."""
    learning_starts: Natural | None = None
    """policy steps in all processes with random actions, rounded down to whole iterations; the last
    of these iterations already trains."""
    per_rank_pretrain_steps: Natural | None = None
    """gradient steps of each process in the first training; see the versions."""
    replay_ratio: float | None = None
    """gradient steps of each process per policy step of its own, from the first training on."""
    rollout_steps: Count | None = None
    """policy steps of each environment in one on-policy iteration."""
    per_rank_batch_size: Count | None = None
    """transitions (sequences, for Dreamer) in a minibatch of one process."""
    per_rank_sequence_length: Count | None = None
    """time steps of a sequence."""
    update_epochs: Natural | None = None
    """passes over the collected batch (PPO)."""
    num_envs: Count = 4
    """environments in one process (``env.num_envs``)."""
    world_size: Count = 1
    """processes that train together (``fabric.devices``)."""
    action_repeat: Natural = 1
    """env steps one action is held for; 0 means 1."""
    train_every: Natural | None = None
    """policy steps between trainings, before ``replay_ratio`` (version 0.5.0)."""
    per_rank_gradient_steps: Natural | None = None
    """gradient steps of one training, before ``replay_ratio`` (version 0.5.0)."""
    dry_run: bool = False
    """whether the run ends with its first training, without random actions and pretraining."""
    run_test: bool = True
    """whether one episode is played at the end, on the first process (``algo.run_test``)."""
    share_data: bool = False
    """whether the processes gather what all of them collected and split it; same counts."""
    buffer_size: Count | None = None
    """transitions that the replay buffers of all processes hold (``buffer.size``)."""
    buffer_checkpoint: bool = True
    """whether the replay buffer is in the checkpoint, for a resume (``buffer.checkpoint``)."""
    target_network_frequency: Natural = 1
    """policy steps between target updates (SAC, ``algo.critic.target_network_frequency``)."""
    anneal_lr: bool = False
    """whether the learning rate falls linearly with the iterations, to one iteration's share."""
    lr: float | None = None
    """learning rate of the one optimiser of PPO and A2C (``algo.optimizer.lr``)."""
    gamma: float | None = None
    """discount."""
    gae_lambda: float | None = None
    """weight of longer advantage estimates (PPO, A2C)."""
    clip_coef: float | None = None
    """clipping range of the probability ratio (PPO)."""
    clip_vloss: bool | None = None
    """whether the value is clipped, too, in the same range (PPO)."""
    normalize_advantages: bool | None = None
    """whether advantages get mean 0 and deviation 1 in each minibatch (PPO)."""
    ent_coef: float | None = None
    """weight of the entropy (PPO, A2C)."""
    vf_coef: float | None = None
    """weight of the value loss (PPO, A2C)."""
    max_grad_norm: float | None = None
    """largest norm of the gradient (PPO, A2C); 0: any."""
    dense_units: Count | None = None
    """width of the hidden layers (PPO, A2C)."""
    mlp_layers: Natural | None = None
    """hidden layers (PPO, A2C)."""
    tau: float | None = None
    """Polyak coefficient of the target networks (SAC)."""
    hidden_size: Count | None = None
    """width of both hidden layers (SAC)."""
    alpha: float | None = None
    """entropy coefficient at the beginning (SAC, ``algo.alpha.alpha``)."""
    version: str = field(default="0.8.4", kw_only=True)
    """version to reproduce; see ``VERSIONS``."""

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
        self._check_version()
        algo = {ON_POLICY: "ppo", OFF_POLICY: "sac"}.get(str(self.algo), str(self.algo))
        made = defaults(algo, self.version)
        if algo == "a2c":
            made["per_rank_batch_size"] = self.rollout_steps or made["rollout_steps"]
        return made

    def _check_version(self) -> None:
        """Refuse settings that another version has: ``replay_ratio`` came after February 2024."""
        old = self.version == "0.5.0"
        for name in ("replay_ratio",) if old else ("train_every", "per_rank_gradient_steps"):
            if getattr(self, name) is not None:
                why = f"is no setting of sheeprl {self.version}"
                works = (
                    "use train_every and per_rank_gradient_steps" if old else "say version=0.5.0"
                )
                raise SettingError(name, getattr(self, name), why, works)

    @property
    def processes(self) -> int:
        """Processes that step environments: one, if it collects for the others."""
        return 1 if self.algo in DECOUPLED else self.world_size

    @property
    def policy_steps_per_iteration(self) -> int:
        """Policy steps of one iteration of resolved settings, in all processes."""
        steps = self.rollout_steps if self.family == ON_POLICY else 1
        assert steps is not None
        return self.num_envs * self.processes * steps
