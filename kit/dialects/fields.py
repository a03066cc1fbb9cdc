"""Field declarations of dialects, with the plan or recipe setting that each field sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any


def _identity(value: Any, settings: Any) -> Any:
    return value


def linear_or_constant(value: Any, settings: Any) -> str:
    """Return the schedule for a flag such as ``anneal_lr``."""
    return "linear" if value else "constant"


def range_or_none(value: Any, settings: Any) -> Any:
    """Return the clip range of the value: ``True`` means the policy's range, ``False`` none."""
    return None if value is False else value


def round_to_envs(transitions: int, envs: int) -> int:
    """Round a replay capacity down to the same number of transitions per environment."""
    return max(transitions // envs, 1) * envs


@dataclass(frozen=True)
class Unsupported:
    """Marks a field without a recipe setting, which must keep the library's default."""

    alternative: str
    """Alternative to the field, or the reason why recipes have no such setting."""
    accepted: tuple[Any, ...] = ()
    """Additional accepted values, which match the behaviour of recipes."""


@dataclass(frozen=True)
class MapsTo:
    """Maps a field to a recipe setting."""

    setting: str
    """Name of the recipe setting; dotted in a group: ``env.normalize_reward``."""
    value: Callable[[Any, Any], Any] = _identity
    """Function of the field's value and all library settings that returns the setting's value."""
    family: str | None = None
    """Algorithm family in which the field maps to the setting; ``None``: all families."""
    otherwise: MapsTo | Unsupported | None = None
    """Use of the field in other families; ``None``: the field determines step counts."""
    also: MapsTo | None = None
    """Second recipe setting, which is set unless its value is ``None``."""


def count_field(plan: str = "", default: Any = None, *, only: Any = ()) -> Any:
    """Declare a field that determines step counts of the plan.

    Args:
        plan: plan setting with the same value; empty if the plan is computed from the field.
        default: default of the library; ``None`` if the default depends on the algorithm.
        only: family or algorithms that use the field; empty: all.
    """
    return _field(default, only, plan=plan)


def mapped(
    setting: str,
    default: Any = None,
    value: Callable[[Any, Any], Any] = _identity,
    *,
    only: Any = (),
    family: str | None = None,
    otherwise: MapsTo | Unsupported | None = None,
    also: MapsTo | None = None,
) -> Any:
    """Declare a field that :class:`MapsTo` a recipe setting; see also :func:`count_field`."""
    return _field(default, only, use=MapsTo(setting, value, family, otherwise, also))


def unsupported(
    alternative: str, default: Any = None, *, accepted: Any = (), only: Any = ()
) -> Any:
    """Declare an :class:`Unsupported` field; see also :func:`count_field`."""
    return _field(default, only, use=Unsupported(alternative, accepted))


def extra_field(plan: str = "", default: Any = None, *, only: Any = (), use: Any = None) -> Any:
    """Declare a keyword-only field that the library itself configures elsewhere."""
    return _field(default, only, kw_only=True, plan=plan, **({"use": use} if use else {}))


def _field(default: Any, only: Any, kw_only: bool = False, **metadata: Any) -> Any:
    metadata["only"] = (only,) if isinstance(only, str) else only
    return field(default=default, kw_only=kw_only, metadata=metadata)


@cache
def uses(cls: type[Any]) -> Mapping[str, MapsTo | Unsupported]:
    """Return the mapped and unsupported fields of a dialect, with dotted names in groups."""
    by_name = {f.name: f for f in fields(cls)}
    for group, inner in cls.GROUPS.items():
        by_name |= {f"{group}.{f.name}": f for f in fields(inner)}
    return {name: f.metadata["use"] for name, f in by_name.items() if "use" in f.metadata}
