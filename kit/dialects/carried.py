"""Settings of other libraries besides counts, as settings of a recipe.

Each field of a dialect has one of three uses. It *counts*: the plan follows from it. It *acts*: it
sets the recipe's setting of the same meaning, such as ``lr`` of nip the ``learning_rate``. It is
*refused* by name: recipes do it in another way, or not at all.

A field acts if it differs from the library's default. Otherwise the recipe keeps its own default,
and the table of the run lists where the two differ, also in settings that the library has no field
for. With ``library_defaults`` the recipe takes all of these over that were not changed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from kit.dialects.base import Dialect
from kit.dialects.fields import Acts, Refused, uses
from kit.steps.errors import SettingError, show

Use = Literal["counts", "acts", "refused"]


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
            inner = vars(value).items()
            found |= {f"{field.name}.{name}": entry for name, entry in inner}
        else:
            found[field.name] = value
    return found


def changed(settings: Dialect) -> dict[str, Any]:
    """The settings that differ from the library's defaults; those of a group with dotted names."""
    default = flat(type(settings)())
    return {n: v for n, v in flat(settings).items() if n != "version" and v != default[n]}


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
    values: dict[str, Any] = {}
    kept: list[str] = []
    unchanged = type(config)() if said.library_defaults else None
    for name, use in _uses_for(said).items():
        if changed[name] != default[name]:
            values |= _taken(name, changed[name], use, said, config)
        elif isinstance(use, Acts) and flat(theirs)[name] is not None:
            value, ours = flat(theirs)[name], _setting(config, use)
            of_default = _meant(use, value, theirs)
            meant = None if of_default is None else of_default[use.setting]
            if of_default is not None and ours not in ([], [meant]):
                if unchanged is not None and ours == _setting(unchanged, use):
                    values |= {name: v for name, v in of_default.items() if _has(config, name)}
                    continue
                here = f"here {use.setting}={ours[0]}"
                if ours == [value]:  # the same number in another formula
                    here = f"that is {use.setting}={meant}, here {ours[0]}"
                kept.append(f"{name}={value} ({here})")
    unsaid = []
    for name, wanted in said.UNSAID.get(str(said.algo), {}).items():
        ours = _setting(config, Acts(name))
        if name in values or ours in ([], [wanted]):
            continue
        if unchanged is not None and ours == _setting(unchanged, Acts(name)):
            values[name] = wanted
        else:
            unsaid.append(f"{name}={wanted} (here {ours[0]})")
    taken = ", ".join(f"{name}={value}" for name, value in values.items())
    lines = [f"taken from {given.NAME}: {taken}"] if taken else []
    if kept:
        lines.append(f"defaults of {given.NAME} that do not act: {', '.join(kept)}")
    if unsaid:
        lines.append(f"otherwise in {given.NAME}, which has no word for it: {', '.join(unsaid)}")
    if (kept or unsaid) and not said.library_defaults:
        lines.append(f"(steps.library_defaults=true takes these over from {given.NAME})")
    return values, lines


def _uses_for(said: Dialect) -> dict[str, Acts | Refused]:
    """The fields that act or are refused for the algorithm of resolved settings."""
    found = {}
    for name, use in uses(type(said)).items():
        elsewhere = isinstance(use, Acts) and use.family not in (None, said.family)
        here = use.otherwise if isinstance(use, Acts) and elsewhere else use
        if here is not None and said.applies(name, str(said.algo)):  # None: here it counts
            found[name] = here
    return found


def carry_over(source: Dialect, target: Dialect, fixed: Collection[str]) -> dict[str, Any]:
    """Set in ``target`` the changed settings of ``source`` that act.

    Two fields are equivalent if they set the same setting of recipes to the same value.

    Args:
        source: settings of a library.
        target: those of another, changed in place.
        fixed: fields of ``target`` to leave as they are.

    Returns:
        The changed settings of ``source`` that do not count, without an equivalent.
    """
    said, default, changed = source.resolved(), flat(type(source)()), flat(source)
    left_out = {}
    for name, use in _uses_for(said).items():
        if changed[name] == default[name]:
            continue
        made = target.resolved()
        if type(source) is type(target):
            found = {name: changed[name]} if name in _uses_for(made) else None
        else:
            found = _equivalent(use, flat(said)[name], said, _uses_for(made), made)
        kept = {f: v for f, v in (found or {}).items() if f.partition(".")[0] not in fixed}
        if found is None or not _put(target, kept):
            left_out[name] = changed[name]
    return left_out


def _put(settings: Dialect, values: Mapping[str, Any]) -> bool:
    """Set fields, dotted ones in groups, if they are valid and the plan stays what it is."""
    changed = _with(settings, values)
    try:
        if changed.to_plan() != settings.to_plan():
            return False
    except SettingError:
        return False
    vars(settings).update(vars(changed))
    return True


def _with(settings: Dialect, values: Mapping[str, Any]) -> Dialect:
    """A copy with fields set, dotted ones in groups."""
    made = copy.copy(settings)
    for name, value in values.items():
        group, _, inner = name.rpartition(".")
        if group:
            value = dataclasses.replace(getattr(made, group), **{inner: value})
        setattr(made, group or name, value)
    return made


def _accepts(settings: Dialect, name: str, value: Any) -> bool:
    """Whether a value is one that the library takes for a field."""
    try:
        _with(settings, {name: value}).resolved()
    except SettingError:
        return False
    return True


def differing_meanings(source: Dialect, target: Dialect) -> dict[str, tuple[Any, Any]]:
    """Settings that two libraries have and that do not count, where they are not the same.

    Args:
        source: settings of a library, defaults included.
        target: those of another.

    Returns:
        By the name of the recipe's setting, the value of each.
    """
    ours, theirs = meanings(source), meanings(target)
    both = ((name, ours[name], theirs[name]) for name in ours if name in theirs)
    return {name: (one, other) for name, one, other in both if one != other}


def meanings(settings: Dialect, names: Collection[str] | None = None) -> dict[str, Any]:
    """The recipe's settings that fields of a dialect mean, and their values.

    Args:
        settings: settings of a library.
        names: fields to ask; ``None``: all, and what the library has no field for.
    """
    said, values = settings.resolved(), flat(settings.resolved())
    found = {} if names is not None else dict(said.UNSAID.get(str(said.algo), {}))
    for name, use in _uses_for(said).items():
        if values[name] is not None and (names is None or name in names):
            found |= _meant(use, values[name], said) or {}
    return found


def _equivalent(
    use: Acts | Refused, given: Any, said: Dialect, theirs: Mapping[str, Any], made: Dialect
) -> dict[str, Any] | None:
    """The fields of another library that set what ``use`` sets, and their values."""
    meant = _meant(use, given, said)
    if meant is None:
        return None
    for order in itertools.permutations(meant):  # a coefficient may act only once it is fixed
        found: dict[str, Any] = {}
        so_far = made
        for setting in order:
            fields = _fields_of(setting, given, meant, theirs, so_far)
            if fields is None:
                break
            found |= fields
            so_far = _with(so_far, fields)
        else:
            return found
    return None


def _fields_of(
    setting: str,
    given: Any,
    meant: Mapping[str, Any],
    theirs: Mapping[str, Acts | Refused],
    made: Dialect,
) -> dict[str, Any] | None:
    """The field that sets one of the recipe's settings to what is ``meant``, and its value.

    It is none at all, if the other library has the setting so.
    """
    wanted = meant[setting]
    flags = (True, False) if isinstance(wanted, str | bool) else ()  # of a schedule, or opposite
    for name, value in itertools.product(theirs, (*flags, given, wanted)):
        other = _meant(theirs[name], value, made)
        same = other and setting in other and other.items() <= meant.items()
        if same and _accepts(made, name, value):
            return {name: value}
    return {} if meanings(made).get(setting, ...) == wanted else None


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
    value, ours = flat(said)[name], _setting(config, use)
    if not ours:
        why = f"of {said.LIBRARY} is {use.setting}, which this recipe does not have"
        raise SettingError(name, value, why, "leave it out, or use a recipe that has it")
    meant = use.value(value, said)
    if ours[0] not in (*_setting(type(config)(), use), meant):
        why = f"of {said.LIBRARY} contradicts {use.setting}={show(ours[0])}"
        works = f"leave one of them out: both mean {use.setting}"
        raise SettingError(name, given, why, works)
    if use.also is None or use.also.value(value, said) is None:
        return {use.setting: meant}
    return {use.setting: meant, **_taken(name, given, use.also, said, config)}


def _has(config: Any, setting: str) -> bool:
    return bool(_setting(config, Acts(setting)))


def _setting(config: Any, use: Acts) -> list[Any]:
    """The recipe's value of the setting that a field acts as; empty if it has none."""
    try:
        return [functools.reduce(getattr, use.setting.split("."), config)]
    except AttributeError:
        return []
