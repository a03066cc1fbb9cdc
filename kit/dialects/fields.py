"""The fields of a dialect: each counts, acts as a setting of the recipe, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any


def _as_it_is(value: Any, settings: Any) -> Any:
    return value


def linear_or_constant(value: Any, settings: Any) -> str:
    """The schedule of a flag such as ``anneal_lr``."""
    return "linear" if value else "constant"


def range_or_none(value: Any, settings: Any) -> Any:
    """The clip range of the value: ``True`` is the policy's, as in recipes, ``False`` none."""
    return None if value is False else value


def of_each_env(transitions: int, envs: int) -> int:
    """Transitions that a replay buffer holds which has equally many of each environment."""
    return max(transitions // envs, 1) * envs


@dataclass(frozen=True)
class Refused:
    """The use of a field without a setting in recipes: only the library's default is accepted."""

    why: str
    """the alternative to use."""
    accepted: tuple[Any, ...] = ()
    """further accepted values: those of recipes."""


@dataclass(frozen=True)
class Acts:
    """The use of a field that sets a recipe's setting."""

    setting: str
    """name of the recipe's setting; dotted in a group: ``env.normalize_reward``."""
    value: Callable[[Any, Any], Any] = _as_it_is
    """its value, from that of the field and all settings of the library."""
    family: str | None = None
    """family of algorithms in which it acts; ``None``: all."""
    otherwise: Acts | Refused | None = None
    """its use in other families; ``None``: it counts."""
    also: Acts | None = None
    """a second setting that it sets, where its value for that is not ``None``."""


def counts(plan: str = "", default: Any = None, *, only: Any = ()) -> Any:
    """A field that counts.

    Args:
        plan: the plan's setting that it is as it is, both ways; none, if the plan follows in
            another way.
        default: of the library; ``None`` where the algorithm decides.
        only: family or algorithms in which it has an effect; none: all.
    """
    return _field(default, only, plan=plan)


def acts(
    setting: str,
    default: Any = None,
    value: Callable[[Any, Any], Any] = _as_it_is,
    *,
    only: Any = (),
    family: str | None = None,
    otherwise: Acts | Refused | None = None,
    also: Acts | None = None,
) -> Any:
    """A field that :class:`Acts`; ``default`` and ``only`` as for :func:`counts`."""
    return _field(default, only, use=Acts(setting, value, family, otherwise, also))


def refused(why: str, default: Any = None, *, accepted: Any = (), only: Any = ()) -> Any:
    """A field that is :class:`Refused`; ``default`` and ``only`` as for :func:`counts`."""
    return _field(default, only, use=Refused(why, accepted))


def fact(plan: str = "", default: Any = None, *, only: Any = (), use: Any = None) -> Any:
    """A field that a plan needs and that the library has from elsewhere; else as :func:`counts`."""
    return _field(default, only, kw_only=True, plan=plan, **({"use": use} if use else {}))


def _field(default: Any, only: Any, kw_only: bool = False, **meaning: Any) -> Any:
    meaning["only"] = (only,) if isinstance(only, str) else only
    return field(default=default, kw_only=kw_only, metadata=meaning)


@cache
def uses(cls: type[Any]) -> Mapping[str, Acts | Refused]:
    """The fields of a dialect that act or are refused, with dotted names in groups."""
    named = {f.name: f for f in fields(cls)}
    for group, inner in cls.GROUPS.items():
        named |= {f"{group}.{f.name}": f for f in fields(inner)}
    return {name: f.metadata["use"] for name, f in named.items() if "use" in f.metadata}
