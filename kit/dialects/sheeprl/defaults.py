"""sheeprl's defaults for each algorithm and version."""

from __future__ import annotations

from typing import Any

from kit.dialects.base import RAW

P2E = tuple(f"p2e_dv{n}_{phase}" for n in (1, 2, 3) for phase in ("exploration", "finetuning"))
SEQUENCES = ("dreamer_v1", "dreamer_v2", "dreamer_v3", "dreamer_v3_5", *P2E)
WITHOUT_RANDOM = ("dreamer_v3_5", *(name for name in P2E if "finetuning" in name))
"""Algorithms whose policy acts from the first step."""

# Most values are from `configs/algo` and `configs/exp` in 0.8.4. Dreamer's `gamma`, `buffer.size`
# and the total steps for fine-tuning are from releases up to July 2024.
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
        "gamma": 0.99, "tau": 0.005, "hidden_size": 256, "alpha": 1.0, "buffer_size": 1_000_000,
    },
    "dreamer_v1": {
        "total_steps": 5_000_000, "learning_starts": 5_000, "replay_ratio": 0.1, "gamma": 0.99,
        "per_rank_batch_size": 50, "per_rank_sequence_length": 50, "per_rank_pretrain_steps": 100,
        "buffer_size": 5_000_000,
    },
    "dreamer_v2": {
        "total_steps": 5_000_000, "learning_starts": 1_000, "replay_ratio": 0.2, "gamma": 0.99,
        "per_rank_batch_size": 16, "per_rank_sequence_length": 50, "per_rank_pretrain_steps": 100,
        "buffer_size": 5_000_000,
    },
    "dreamer_v3": {
        "total_steps": 5_000_000, "learning_starts": 1_024, "replay_ratio": 1.0,
        "gamma": 0.996996996996997,
        "per_rank_batch_size": 16, "per_rank_sequence_length": 64, "per_rank_pretrain_steps": 0,
        "buffer_size": 1_000_000,
    },
}
_DEFAULTS["dreamer_v3_5"] = _DEFAULTS["dreamer_v3"] | {
    "total_steps": 50_000_000, "replay_ratio": 1 / 32, "replay_context": 1,
    "buffer_size": 5_000_000,
}
_DEFAULTS["droq"] = _DEFAULTS["sac"] | {"replay_ratio": 20.0}
_DEFAULTS["sac_ae"] = _DEFAULTS["sac"] | {
    "learning_starts": 1_000, "per_rank_batch_size": 128, "per_rank_pretrain_steps": 1_000,
    "tau": 0.01, "hidden_size": 1_024, "alpha": 0.1,
}
for _n, _starts in ((1, 5_000), (2, 10_000), (3, 16_384)):
    _DEFAULTS[f"p2e_dv{_n}_exploration"] = _DEFAULTS[f"dreamer_v{_n}"]
    _DEFAULTS[f"p2e_dv{_n}_finetuning"] = _DEFAULTS[f"dreamer_v{_n}"] | {
        "total_steps": 1_000_000, "learning_starts": _starts,
    }

_NO_PRETRAINING: dict[str, dict[str, Any]] = {
    name: {"per_rank_pretrain_steps": 0}
    for name in ("sac_ae", "dreamer_v1", "p2e_dv1_exploration", "p2e_dv1_finetuning")
}
_A2C: dict[str, dict[str, Any]] = {"a2c": {"gae_lambda": 1.0, "max_grad_norm": 0.5}}
_COUNTDOWNS: dict[int, dict[str, Any]] = {
    1: {"train_every": 1_000, "per_rank_gradient_steps": 100},
    2: {"train_every": 5, "per_rank_gradient_steps": 1},
    3: {"train_every": 16, "per_rank_gradient_steps": 1, "per_rank_pretrain_steps": 1,
        "learning_starts": 65_536},
}
_CHANGED: dict[str, dict[str, dict[str, Any]]] = {
    "0.5.7": _NO_PRETRAINING | _A2C,
    "0.5.0": _A2C
    | {name: {"per_rank_gradient_steps": 1} for name in ("sac", "sac_ae")}
    | {"droq": {"per_rank_gradient_steps": 20}}
    | {name: _COUNTDOWNS[n] for n in _COUNTDOWNS for name in _DEFAULTS if f"v{n}" in name},
}
"""Defaults that differ in the older tags v0.5.7 and v0.5.4 (February 2024)."""
# fmt: on

DECOUPLED = ("ppo_decoupled", "sac_decoupled")
_PPO = RAW | {"activation": "tanh", "critic_loss": "l2", "target_kl": None}
_SAC = RAW | {"activation": "relu", "n_step": 1, "max_grad_norm": None}
IMPLICIT_DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("ppo", "ppo_decoupled"), _PPO),
    "a2c": RAW | {"activation": "tanh", "normalize_advantage": False, "optimizer": "rmsprop"},
    **dict.fromkeys(("sac", "droq", "sac_decoupled"), _SAC | {"learning_rate": 3e-4}),
    "sac_ae": _SAC,
    **dict.fromkeys(SEQUENCES, RAW | {"imagination_starts": None}),
    **dict.fromkeys(
        ("dreamer_v3", "p2e_dv3_exploration", "p2e_dv3_finetuning"),
        RAW | {"imagination_starts": None, "stored_latents": False, "replay_critic_coeff": 0.0},
    ),
}
"""sheeprl's hard-coded values for recipe settings, keyed by algorithm."""


def defaults(version: str, algo: str) -> dict[str, Any]:
    """Return an algorithm's defaults for the settings that exist in a version."""
    values = _DEFAULTS[algo] | _CHANGED.get(version, {}).get(algo, {})
    # sheeprl uses the values in _ACTOR_CRITIC even if a version has no settings for them.
    missing = absent(version, algo).keys() - _ACTOR_CRITIC.keys()
    return {name: value for name, value in values.items() if name not in missing}


def absent(version: str, algo: str) -> dict[str, str]:
    """Return hints for settings that an algorithm lacks in a version, keyed by field name."""
    if version != "0.5.0":
        absent = dict.fromkeys(("train_every", "per_rank_gradient_steps"), "Use version=0.5.0")
    else:
        absent = {"replay_ratio": "Use train_every and per_rank_gradient_steps"}
        if algo not in SEQUENCES:
            absent["train_every"] = "Omit train_every, because training follows each vector step"
        if algo not in SEQUENCES or "v1" in algo:
            absent["per_rank_pretrain_steps"] = "Omit this field, because there is no pretraining"
    if algo == "a2c" and version in ("0.5.7", "0.5.0"):
        fixed = ["anneal_lr", "ent_coef", "vf_coef", "dense_units", "mlp_layers"]
        fixed += ["normalize_advantages"]
        absent |= dict.fromkeys(fixed, "Omit this field, or use version=0.8.4")
    return absent
