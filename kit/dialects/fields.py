"""Declarations of dialect fields and the plan or recipe settings that they map to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any


def _identity(value: Any, settings: Any) -> Any:
    return value


def linear_or_constant(value: Any, settings: Any) -> str:
    """Return the schedule name for a flag such as ``anneal_lr``."""
    return "linear" if value else "constant"


def range_or_none(value: Any, settings: Any) -> Any:
    """Return the value clip range, or ``None`` if the field is ``False`` (no clipping)."""
    return None if value is False else value


def round_to_envs(transitions: int, envs: int) -> int:
    """Round a replay capacity down to a multiple of the number of environments."""
    return max(transitions // envs, 1) * envs


@dataclass(frozen=True)
class Unsupported:
    """Marks a field that recipes do not support and that must keep the library's default."""

    alternative: str
    """Alternative to the field, or the reason why recipes do not support it."""
    accepted: tuple[Any, ...] = ()
    """Other accepted values, which match the behaviour of recipes."""


@dataclass(frozen=True)
class Ignored:
    """Marks a field that runs accept and list as having no effect."""

    reason: str
    """Why the field has no effect on training."""


@dataclass(frozen=True)
class MapsTo:
    """Maps a field to a recipe setting."""

    setting: str
    """Name of the recipe setting, which may be dotted: ``env.normalize_reward``."""
    value: Callable[[Any, Any], Any] = _identity
    """Function that computes the recipe setting from the field's value and all other settings."""
    family: str | None = None
    """Family or algorithm for which the field maps to the setting; ``None`` for all."""
    otherwise: Use | None = None
    """How other algorithms use the field; ``None`` if it only affects their step counts."""
    also: MapsTo | None = None
    """Mapping to a second recipe setting, which is skipped if its value is ``None``."""
    optional: bool = False
    """Whether this setting is also skipped if its value is ``None``."""


Use = MapsTo | Unsupported | Ignored
"""What a recipe does with a field that determines no step counts."""


def count_field(plan: str = "", default: Any = None, *, only: Any = ()) -> Any:
    """Declare a field that determines step counts.

    Args:
        plan: plan setting with the same value; empty if plan settings are computed from the field.
        default: library default; ``None`` if the default depends on the algorithm.
        only: family or algorithms that use the field; empty for all algorithms.
    """
    return _field(default, only, plan=plan)


def mapped(
    setting: str,
    default: Any = None,
    value: Callable[[Any, Any], Any] = _identity,
    *,
    only: Any = (),
    family: str | None = None,
    otherwise: Use | None = None,
    also: MapsTo | None = None,
    optional: bool = False,
) -> Any:
    """Declare a field that maps to a recipe setting; see :class:`MapsTo`, :func:`count_field`."""
    return _field(default, only, use=MapsTo(setting, value, family, otherwise, also, optional))


def unsupported(
    alternative: str, default: Any = None, *, accepted: Any = (), only: Any = ()
) -> Any:
    """Declare a field that recipes do not support; see :class:`Unsupported`."""
    return _field(default, only, use=Unsupported(alternative, accepted))


def ignored(reason: str, default: Any = None, *, only: Any = (), kw_only: bool = False) -> Any:
    """Declare a field that runs accept and list as having no effect; see :class:`Ignored`."""
    return _field(default, only, kw_only=kw_only, use=Ignored(reason))


def extra_field(plan: str = "", default: Any = None, *, only: Any = (), use: Any = None) -> Any:
    """Declare a keyword-only field for information that the library configures elsewhere."""
    return _field(default, only, kw_only=True, plan=plan, **({"use": use} if use else {}))


def _field(default: Any, only: Any, kw_only: bool = False, **metadata: Any) -> Any:
    metadata["only"] = (only,) if isinstance(only, str) else only
    return field(default=default, kw_only=kw_only, metadata=metadata)


@cache
def uses(cls: type[Any]) -> Mapping[str, Use]:
    """Return the uses of fields that affect no counts, keyed by name (dotted in groups)."""
    by_name = {f.name: f for f in fields(cls)}
    for group, inner in cls.GROUPS.items():
        by_name |= {f"{group}.{f.name}": f for f in fields(inner)}
    return {name: f.metadata["use"] for name, f in by_name.items() if "use" in f.metadata}


def flat(settings: Any) -> dict[str, Any]:
    """Return the settings of a dialect keyed by name, with dotted names for settings in a group."""
    values: dict[str, Any] = {}
    for one in fields(settings):
        value = getattr(settings, one.name)
        if one.name in settings.GROUPS and is_dataclass(value):
            inner = [f.name for f in fields(value)]
            values |= {f"{one.name}.{name}": getattr(value, name) for name in inner}
        else:
            values[one.name] = value
    return values
