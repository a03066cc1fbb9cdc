"""Defaults of sheeprl's algorithms: `configs/algo` and `configs/exp` of 0.8.4 and 0.5.7."""

from __future__ import annotations

from typing import Any

# fmt: off
_ACTOR_CRITIC = {
    "lr": 1e-3, "gamma": 0.99, "gae_lambda": 0.95, "ent_coef": 0.0, "vf_coef": 1.0,
    "max_grad_norm": 0.0, "dense_units": 64, "mlp_layers": 2,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": {
        "total_steps": 65_536, "rollout_steps": 128, "per_rank_batch_size": 64, "update_epochs": 10,
        "clip_coef": 0.2, "clip_vloss": False, "normalize_advantages": False, **_ACTOR_CRITIC,
    },
    "a2c": {"total_steps": 25_000, "rollout_steps": 5, "update_epochs": 1, **_ACTOR_CRITIC},
    "sac": {
        "total_steps": 1_000_000, "learning_starts": 100, "replay_ratio": 1.0,
        "per_rank_batch_size": 256, "per_rank_pretrain_steps": 0,
        "gamma": 0.99, "tau": 0.005, "hidden_size": 256, "alpha": 1.0,
    },
    "dreamer_v1": {
        "total_steps": 5_000_000, "learning_starts": 5_000, "replay_ratio": 0.1,
        "per_rank_batch_size": 50, "per_rank_sequence_length": 50, "per_rank_pretrain_steps": 100,
    },
    "dreamer_v2": {
        "total_steps": 5_000_000, "learning_starts": 1_000, "replay_ratio": 0.2,
        "per_rank_batch_size": 16, "per_rank_sequence_length": 50, "per_rank_pretrain_steps": 100,
    },
    "dreamer_v3": {
        "total_steps": 5_000_000, "learning_starts": 1_024, "replay_ratio": 1.0,
        "per_rank_batch_size": 16, "per_rank_sequence_length": 64, "per_rank_pretrain_steps": 0,
    },
}
_DEFAULTS["droq"] = _DEFAULTS["sac"] | {"replay_ratio": 20.0}
_DEFAULTS["sac_ae"] = _DEFAULTS["sac"] | {
    "learning_starts": 1_000, "per_rank_batch_size": 128, "per_rank_pretrain_steps": 1_000,
}
# fmt: on


def defaults(algo: str, version: str) -> dict[str, Any]:
    """The defaults of an algorithm, by field."""
    name = algo.removesuffix("_decoupled")
    if name.startswith("p2e_dv"):
        name = f"dreamer_v{name[6]}"
    made = dict(_DEFAULTS[name])
    if version != "0.8.4" and name in ("sac_ae", "dreamer_v1"):  # later versions changed it
        made["per_rank_pretrain_steps"] = 0
    if version == "0.5.0":
        made |= {"train_every": 16, "per_rank_gradient_steps": 1}
    return made
