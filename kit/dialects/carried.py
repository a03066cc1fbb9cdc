"""Settings of other libraries besides counts, as settings of a recipe.

Each field of a dialect has one of three uses. It *counts*: the plan follows from it. It *acts*: it
sets the recipe's setting of the same meaning, such as ``lr`` of nip the ``learning_rate``. It is
*refused* by name: recipes do it in another way, or not at all.

A field acts if it was given or differs from the library's default. Otherwise the recipe keeps its
own default, and the table of the run lists where the two differ, also in settings that the library
has no field for. With ``library_defaults`` the recipe takes all of these over, unless its own
setting was given.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Collection, Iterator
from textwrap import wrap
from typing import Any, Literal

from kit.dialects.base import COUNTS_AS, Dialect
from kit.dialects.fields import Acts, Refused, uses
from kit.steps.errors import SettingError, show
from kit.steps.given import given_fields
from kit.steps.values import same_value

Use = Literal["counts", "acts", "refused"]

_WIDTH, _MOST_LINES = 100, 5
"""Of caveats in the table of a run."""


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
        return use.setting if use.also is None else f"{use.setting}, {use.also.setting}"
    other = "elsewhere it counts" if use.otherwise is None else _described(use.otherwise)
    return f"{use.setting} ({use.family.replace('_', '-')}), {other}"


def flat(settings: Dialect) -> dict[str, Any]:
    """The settings by name, those of a group with dotted names."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in settings.GROUPS and dataclasses.is_dataclass(value):
            inner = [f.name for f in dataclasses.fields(value)]
            found |= {f"{field.name}.{name}": getattr(value, name) for name in inner}
        else:
            found[field.name] = value
    return found


def changed(settings: Dialect) -> dict[str, Any]:
    """The settings that differ from the library's defaults; those of a group with dotted names."""
    default = flat(settings.unchanged())
    return {
        name: value
        for name, value in flat(settings).items()
        if name != "version" and not same_value(value, default.get(name, ...))
    }


def typed(settings: Dialect) -> set[str]:
    """Return the names of the fields that were given; those of a group are dotted.

    If every field was passed, as in a saved run, it is unknown which ones a user gave.
    """
    groups = {f"{name}.": getattr(settings, name) for name in settings.GROUPS}
    found = set()
    for path, group in {"": settings, **groups}.items():
        known = {f.name for f in dataclasses.fields(group)}
        found |= {f"{path}{name}" for name in given_fields(group) if given_fields(group) < known}
    return found


def take(steps: Any, config: Any, algo: str | None = None, family: str | None = None) -> list[str]:
    """Set the recipe's settings by :func:`carry`; return the lines for the table of the run."""
    if not isinstance(steps, Dialect):
        return []
    values, lines = carry(steps, config, steps.algorithm_for(algo, family))
    for name, value in values.items():
        *groups, last = name.split(".")
        setattr(functools.reduce(getattr, groups, config), last, value)
    return lines


def caveats(steps: Any, algo: str | None = None, family: str | None = None) -> list[str]:
    """Caveats of another library's settings as lines for the table of the run.

    Where they are long it is one line, with the command that shows them.
    """
    if not isinstance(steps, Dialect):
        return []
    meant = steps.algorithm_for(algo, family)
    notes = [f"{steps.NAME}: {note}" for note in steps.notes(meant)]
    if sum(len(wrap(note, _WIDTH)) for note in notes) <= _MOST_LINES:
        return notes
    given = {"version": steps.version, "algo": meant, **changed(steps)}
    words = [shlex.quote(f"{name}={value}") for name, value in given.items() if value is not None]
    command = " ".join(["kit steps explain", steps.NAME, *words])
    return [f"({len(notes)} caveats of these settings: {command})"]


def carry(given: Dialect, config: Any, algo: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """The values that fields of a dialect act as, and the lines for the table of the run.

    Values are by the name of the recipe's setting, dotted in groups: ``env.normalize_reward``.

    Raises:
        SettingError: if a field contradicts a setting of the recipe that was given or changed, or
            the recipe has no setting of that meaning; or if defaults are asked for of an algorithm
            that the library does not have.
    """
    said, differing = given.resolved(algo), changed(given)
    own = typed(given) | differing.keys()
    stand_in = COUNTS_AS.get(str(said.algo))
    lacking = stand_in in said.ALGORITHMS
    if lacking and said.library_defaults:
        why = f"asks for those of this recipe's algorithm, which {said.LIBRARY} does not have"
        near = " or ".join(name for name, of in said.ALGORITHMS.items() if of == said.algo)
        raise SettingError("library_defaults", True, why, f"name one as well: algo={near}")
    unchanged = type(config)() if said.library_defaults else None
    values: dict[str, Any] = {}
    of_typed: dict[str, Any] = {}  # those that are the library's defaults
    for name, use in _uses_for(said).items():
        if name in differing:
            values |= _taken(name, differing[name], use, said, config)
        elif name in own and _can_act(name, use, said, config):
            of_typed |= _taken(name, flat(given)[name], use, said, config)
    unneeded = {n for n, v in of_typed.items() if n not in values and _setting(config, n) == [v]}
    values = {**values, **of_typed, **values}
    of_defaults, kept = ({}, []) if lacking else _defaults(said, own, config, unchanged)
    values = {**values, **of_defaults, **values}  # what was asked for wins
    of_unsaid, unsaid = _unsaid(said, values, config, unchanged)
    values = {n: v for n, v in {**values, **of_unsaid}.items() if n not in unneeded}
    taken = ", ".join(f"{name}={value}" for name, value in values.items())
    lines = []
    if lacking:
        lines.append(f"{given.NAME} has no such algorithm: counts are those of its {stand_in}")
    lines += [f"taken from {given.NAME}: {taken}"] if taken else []
    if kept:
        lines.append(f"defaults of {given.NAME} that do not act: {', '.join(kept)}")
    if unsaid:
        lines.append(f"otherwise in {given.NAME}, which has no word for it: {', '.join(unsaid)}")
    if (kept or unsaid) and not said.library_defaults:
        lines.append(f"(steps.library_defaults=true takes these over from {given.NAME})")
    return values, lines


def _defaults(
    said: Dialect, own: Collection[str], config: Any, unchanged: Any
) -> tuple[dict[str, Any], list[str]]:
    """Return the values that the library's defaults act as, and the defaults that do not act.

    Fields in ``own`` are no defaults. Without ``unchanged``, the recipe's defaults, none acts.
    """
    values: dict[str, Any] = {}
    kept = []
    theirs = type(said)(algo=said.algo, version=said.version).resolved()
    for name, use in _uses_for(said).items():
        value = flat(theirs)[name]
        if name in own or not isinstance(use, Acts) or value is None:
            continue
        ours, meant = _setting(config, use.setting), _meant(use, value, theirs)
        if meant is None or ours in ([], [meant[use.setting]]):
            continue
        if unchanged is not None and not _is_given(config, use.setting, ours, unchanged):
            values |= {name: v for name, v in meant.items() if _setting(config, name)}
            continue
        here = f"here {use.setting}={ours[0]}"
        if ours == [value]:  # the same number in another formula
            here = f"that is {use.setting}={meant[use.setting]}, here {ours[0]}"
        kept.append(f"{name}={value} ({here})")
    return values, kept


def _unsaid(
    said: Dialect, values: Collection[str], config: Any, unchanged: Any
) -> tuple[dict[str, Any], list[str]]:
    """As :func:`_defaults`, of what the library does and has no field for."""
    taken, left = {}, []
    known = said.IMPLICIT_DEFAULTS.get(str(said.algo), {})
    if hasattr(config, "convolutions"):
        known = said.IMPLICIT_DEFAULTS.get(f"{said.algo}_atari", known)
    for name, wanted in known.items():
        ours = _setting(config, name)
        if name in values or ours in ([], [wanted]):
            continue
        if unchanged is not None and not _is_given(config, name, ours, unchanged):
            taken[name] = wanted
        else:
            left.append(f"{name}={wanted} (here {ours[0]})")
    return taken, left


def _uses_for(said: Dialect) -> dict[str, Acts | Refused]:
    """The fields that act or are refused for the algorithm of resolved settings."""
    found = {}
    for name, use in uses(type(said)).items():
        elsewhere = isinstance(use, Acts) and use.family not in (None, said.family)
        here = use.otherwise if isinstance(use, Acts) and elsewhere else use
        if here is not None and said.applies(name, str(said.algo)):  # None: here it counts
            found[name] = here
    return found


def uncounted(settings: Dialect) -> dict[str, Any]:
    """Return the changed settings that do not count; those of a group with dotted names."""
    names = _uses_for(settings.resolved())
    return {name: value for name, value in changed(settings).items() if name in names}


def differing_meanings(source: Dialect, target: Dialect) -> dict[str, tuple[Any, Any]]:
    """Settings that two libraries have and that do not count, where they are not the same.

    By the name of the recipe's setting, the value of each, defaults included.
    """
    ours, theirs = _meanings(source), _meanings(target)
    both = ((name, ours[name], theirs[name]) for name in ours if name in theirs)
    return {name: (one, other) for name, one, other in both if not same_value(one, other)}


def _meanings(settings: Dialect) -> dict[str, Any]:
    """The recipe's settings that all fields mean, and those that the library has no field for."""
    said = settings.resolved()
    values = flat(said)
    found = dict(said.IMPLICIT_DEFAULTS.get(str(said.algo), {}))
    for name, use in _uses_for(said).items():
        if values[name] is not None:
            found |= _meant(use, values[name], said) or {}
    return found


def _meant(use: Acts | Refused, value: Any, settings: Dialect) -> dict[str, Any] | None:
    """The settings of recipes that a field sets, and their values; ``None`` if there are none."""
    if isinstance(use, Refused):
        return None
    try:
        own = {use.setting: use.value(value, settings)}
    except (SettingError, ArithmeticError, AttributeError, TypeError, ValueError):
        return None
    also = {} if use.also is None else _meant(use.also, value, settings) or {}
    return own | {name: value for name, value in also.items() if value is not None}


def _taken(
    name: str, given: Any, use: Acts | Refused, said: Dialect, config: Any
) -> dict[str, Any]:
    """The recipe's settings that a changed field sets, and their values."""
    if isinstance(use, Refused):
        if given in use.accepted:
            return {}
        why = f"of {said.LIBRARY} is no setting of a recipe"
        raise SettingError(name, given, why, use.why)
    value, ours = flat(said)[name], _setting(config, use.setting)
    if not ours:
        why = f"of {said.LIBRARY} is {use.setting}, which this recipe does not have"
        raise SettingError(name, value, why, "leave it out, or use a recipe that has it")
    meant = use.value(value, said)
    if ours[0] != meant and _is_given(config, use.setting, ours, type(config)()):
        why = f"of {said.LIBRARY} contradicts {use.setting}={show(ours[0])}"
        works = f"leave one of them out: both mean {use.setting}"
        raise SettingError(name, given, why, works)
    if use.also is None or use.also.value(value, said) is None:
        return {use.setting: meant}
    return {use.setting: meant, **_taken(name, given, use.also, said, config)}


def _can_act(name: str, use: Acts | Refused, said: Dialect, config: Any) -> bool:
    """Return whether a given default of the library is a setting of the recipe.

    Features that are off by default are off in a recipe that does not have them.
    """
    value = flat(said)[name]
    if isinstance(use, Refused) or (value is None and _meant(use, value, said) is None):
        return False
    return bool(_setting(config, use.setting)) or value not in (None, False)


def _is_given(config: Any, name: str, value: list[Any], default: Any) -> bool:
    """Return whether the recipe's setting was given or has another value than by default."""
    *groups, last = name.split(".")
    group = functools.reduce(getattr, groups, config)
    return last in given_fields(group) or value != _setting(default, name)


def _setting(config: Any, name: str) -> list[Any]:
    """The recipe's value of the setting that a field acts as; empty if it has none."""
    try:
        return [functools.reduce(getattr, name.split("."), config)]
    except AttributeError:
        return []
