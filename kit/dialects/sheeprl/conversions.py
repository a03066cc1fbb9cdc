"""Conversions of sheeprl settings to recipe settings."""

from __future__ import annotations

import math
from typing import Any

from kit.dialects.fields import linear_or_constant, range_or_none, round_to_envs
from kit.steps.errors import SettingError, one_of

_PRECISIONS = {"32-true": "float32", "32": "float32"}
_PRECISIONS |= dict.fromkeys(("bf16-mixed", "bf16-true", "bf16"), "bfloat16")
_SIZES = {
    "dreamer_v1": {64: "nano", 128: "tiny", 400: "published"},
    "dreamer_v3": {32: "nano", 64: "tiny", 256: "12m", 512: "25m", 640: "50m", 768: "100m"}
    | {1024: "200m"},
    "dreamer_v3_5": {32: "nano", 64: "1m", 256: "12m", 384: "25m", 512: "50m", 768: "100m"}
    | {1024: "200m", 1536: "400m"},
}
"""Network sizes by ``dense_units``. DreamerV3 of 2023 calls them XS, S, M, L and XL."""


def activation(value: Any, settings: Any) -> str:
    """Return the recipes' name of an activation function such as ``torch.nn.Tanh``."""
    return str(value).rpartition(".")[2].lower()


def anneal(value: Any, settings: Any) -> str:
    """Return the learning-rate schedule. A2C in 0.8.4 ignores ``anneal_lr``."""
    ignored = settings.algo == "a2c" and settings.version == "0.8.4"
    return linear_or_constant(value and not ignored, settings)


def capacity(value: Any, settings: Any) -> int:
    """Return the replay capacity of one process, which sheeprl divides by all environments."""
    processes: int = settings.processes
    return round_to_envs(value, settings.num_envs * processes) // processes


def clip_value(value: Any, settings: Any) -> Any:
    """Return the value clip range. Value clipping in versions up to 0.5.7 is not supported."""
    if value and settings.version in ("0.5.7", "0.5.0"):
        reason = f"sheeprl {settings.version} uses only the clipped value loss, unlike recipes"
        raise SettingError("clip_vloss", value, reason, [False], "or version=0.8.4")
    return range_or_none(value, settings)


def continuation(value: Any, settings: Any) -> float:
    """Return the weight of DreamerV1's continuation loss, which is 0 without ``use_continues``."""
    scale = settings.continue_scale_factor
    return float(10 if scale is None else scale) if settings.use_continues else 0.0


def divergence(value: float, settings: Any) -> float:
    """Return the weight of one direction of DreamerV3's KL divergence."""
    return value * float(1 if settings.kl_regularizer is None else settings.kl_regularizer)


def exploration_min(value: float, settings: Any) -> float:
    """Return the least exploration, which has no effect if exploration is constant."""
    return value if settings.expl_decay else 0.0


def hidden_sizes(value: Any, settings: Any) -> list[int]:
    """Return the sizes of all hidden layers."""
    return [settings.dense_units] * settings.mlp_layers


def network_size(value: Any, settings: Any) -> str:
    """Return the name of the Dreamer networks with the nearest number of units."""
    sizes = _SIZES.get(settings.algo, _SIZES["dreamer_v3"])
    return sizes[min(sizes, key=lambda units: abs(math.log(units / value)))]


def norm(value: Any, settings: Any) -> float | None:
    """Return the equivalent maximum gradient norm for the mean of the loss over a batch."""
    rows = settings.num_envs * settings.rollout_steps
    size, accumulates = min(settings.per_rank_batch_size, rows), settings.algo == "a2c"
    reduction = settings.loss_reduction or ("sum" if accumulates else "mean")
    one_of("loss_reduction", reduction, ["mean", "sum"])
    scale = size if reduction == "sum" else 1
    return settings.max_grad_norm / (scale * rows / size if accumulates else scale) or None


def positive_or_none(value: Any, settings: Any) -> Any:
    """Return a number, or ``None`` instead of 0."""
    return value or None


def precision(value: Any, settings: Any) -> str:
    """Return the data type for losses."""
    return _PRECISIONS[one_of("precision", str(value), [*_PRECISIONS])]


def shared_rate(value: float, settings: Any) -> float:
    """Return the learning rate, which the actor shares with critics and temperature."""
    if settings.actor_lr not in (None, value):
        reason = f"The recipe has one learning rate for all networks, here actor_lr={value}"
        raise SettingError("actor_lr", settings.actor_lr, reason, [value])
    return value


def target_period(value: int, settings: Any) -> int:
    """Return the number of iterations between SAC's target updates."""
    each: int = settings.policy_steps_per_iteration
    return value // each + 1
