"""Deprecated setting names, which still work for one minor version."""

from __future__ import annotations

import warnings
from collections.abc import Container, Mapping
from typing import Any

RENAMED = {
    "runs": "log_dir",
    "start_from": "init_from",
    "priority_exponent": "per_alpha",
    "importance_exponent": "per_beta",
    "anneal": "lr_schedule",
    "anneal_clip": "clip_schedule",
    "anneal_entropy": "entropy_schedule",
    "anneal_critic": "critic_schedule",
    "body_lr_factor": "backbone_lr_scale",
    "shared_body": "shared_backbone",
    "normalize_over": "advantage_norm",
}
"""Current names of settings, keyed by their names before version 0.2."""


def current_name(name: str, cls: type, stacklevel: int = 3) -> str:
    """Return the current name of a setting, and warn if ``name`` is deprecated.

    Args:
        name: name of a setting.
        cls: settings class of the recipe. The names of its fields are always current.
        stacklevel: stack level of the warning, as in :func:`warnings.warn`.
    """
    if name not in RENAMED or name in getattr(cls, "__dataclass_fields__", ()):
        return name
    text = f"{name} is deprecated. Use {RENAMED[name]}."
    warnings.warn(text, FutureWarning, stacklevel=stacklevel)
    return RENAMED[name]


def upgraded(saved: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """Return saved settings under their current names.

    Args:
        saved: settings by name.
        known: names of current settings, which stay unchanged.
    """
    return {n if n in known else RENAMED.get(n, n): value for n, value in saved.items()}


class RenamedSettings(type):
    """Metaclass that accepts deprecated setting names in the constructor."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        """Create an instance, and warn about each deprecated name."""
        current: dict[str, Any] = {}
        # dataclasses.replace passes changes first, then all other fields under current names.
        for name, value in settings.items():
            current.setdefault(current_name(name, cls, stacklevel=3), value)
        return super().__call__(*args, **current)
