"""Settings of other libraries besides counts, as settings of a recipe.

Each field of a dialect has one of three uses. It *counts*: the plan follows from it. It *acts*: it
sets the recipe's setting of the same meaning, such as ``lr`` of nip the ``learning_rate``. It is
*refused* by name: recipes do it in another way, or not at all.

A field acts if it differs from the library's default. Otherwise the recipe keeps its own default,
and the table of the run lists where the two differ.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from kit.dialects.base import Dialect
from kit.dialects.fields import Acts, Refused, uses
from kit.steps.errors import SettingError, show

Use = Literal["counts", "acts", "refused"]
_MISSING = object()


def use_of(cls: type[Dialect]) -> Iterator[tuple[str, Use, str]]:
    """Each field of a dialect, its use, and the setting it sets or the reason of its refusal.

    Fields of a group have dotted names: ``critic.gamma``.
    """
    for name in flat(cls()):
        use = uses(cls).get(name)
        if use is None:
            yield name, "counts", ""
        else:
            yield name, "acts" if isinstance(use, Acts) else "refused", _described(use)


def _described(use: Acts | Refused) -> str:
    if isinstance(use, Refused):
        return use.why
    if use.family is None:
        return use.setting
    other = "elsewhere it counts" if use.otherwise is None else _described(use.otherwise)
    return f"{use.setting} ({use.family.replace('_', '-')}), {other}"


def flat(settings: Dialect) -> dict[str, Any]:
    """The settings by name, those of a group with dotted names."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in settings.GROUPS and dataclasses.is_dataclass(value):
            inner = vars(value).items()
            found |= {f"{field.name}.{name}": entry for name, entry in inner}
        else:
            found[field.name] = value
    return found


def take(steps: Any, config: Any, algo: str | None = None, family: str | None = None) -> list[str]:
    """Set the recipe's settings that fields of a dialect act as.

    Args:
        steps: settings of another library; anything else changes nothing.
        config: settings of the recipe, changed in place.
        algo: algorithm of the recipe.
        family: its family, for a library that does not have it.

    Returns:
        Lines for the table of the run.

    Raises:
        SettingError: as :func:`carry`.
    """
    if not isinstance(steps, Dialect):
        return []
    values, lines = carry(steps, config, steps.algorithm_for(algo, family))
    for name, value in values.items():
        *groups, last = name.split(".")
        setattr(functools.reduce(getattr, groups, config), last, value)
    return lines


def carry(given: Dialect, config: Any, algo: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """The values that fields of a dialect act as, and the lines for the table of the run.

    Args:
        given: settings of another library.
        config: settings of the recipe, a dataclass of which every field has a default.
        algo: algorithm of the recipe.

    Returns:
        Values by the name of the recipe's setting (dotted in groups: ``env.normalize_reward``),
        and the lines.

    Raises:
        SettingError: if a field contradicts a changed setting of the recipe, or is not at the
            library's default and the recipe has no setting of that meaning.
    """
    said = given.resolved(algo)
    theirs = type(given)(algo=said.algo, version=said.version).resolved()
    default, changed = flat(type(given)()), flat(given)
    own = type(config)()
    values: dict[str, Any] = {}
    kept: list[str] = []
    for name, meaning in uses(type(given)).items():
        use = _use(meaning, said.family)
        if use is None or not given.applies(name, str(said.algo)):
            continue
        if changed[name] == default[name]:
            kept += _kept(name, use, theirs, config)
            continue
        if isinstance(use, Refused):
            if changed[name] in use.accepted:
                continue
            why = f"of {given.LIBRARY} is no setting of a recipe"
            raise SettingError(name, changed[name], why, use.why)
        setting, value = _meant(name, use, said, config)
        ours = _get(config, setting)
        if ours not in (_get(own, setting), value):
            why = f"of {given.LIBRARY} contradicts {setting}={show(ours)}"
            works = f"leave one of them out: both mean {setting}"
            raise SettingError(name, changed[name], why, works)
        values[setting] = value
    return values, _lines(given, values, kept)


def _use(use: Acts | Refused, family: str) -> Acts | Refused | None:
    """The use of a field in a family of algorithms; ``None``: it counts."""
    if isinstance(use, Acts) and use.family not in (None, family):
        return use.otherwise
    return use


def _meant(name: str, use: Acts, said: Dialect, config: Any) -> tuple[str, Any]:
    """The recipe's setting of the same meaning, and its value."""
    value = flat(said)[name]
    if _get(config, use.setting) is _MISSING:
        why = f"of {said.LIBRARY} is {use.setting}, which this recipe does not have"
        raise SettingError(name, value, why, "leave it out, or use a recipe that has it")
    return use.setting, use.value(value, said)


def _kept(name: str, use: Acts | Refused, theirs: Dialect, config: Any) -> list[str]:
    """A default of the library that differs from the recipe's value, as text."""
    value = flat(theirs)[name]
    if isinstance(use, Refused) or value is None:
        return []
    ours = _get(config, use.setting)
    differs = ours is not _MISSING and ours != use.value(value, theirs)
    return [f"{name}={value} (here {use.setting}={ours})"] if differs else []


def _lines(given: Dialect, values: Mapping[str, Any], kept: list[str]) -> list[str]:
    lines = []
    if values:
        told = ", ".join(f"{name}={value}" for name, value in values.items())
        lines.append(f"taken from {given.NAME}: {told}")
    if kept:
        lines.append(f"defaults of {given.NAME} that do not act: {', '.join(kept)}")
    return lines


def _get(config: Any, name: str) -> Any:
    """The setting with a dotted name, or ``_MISSING``."""
    for part in name.split("."):
        config = getattr(config, part, _MISSING)
    return config
