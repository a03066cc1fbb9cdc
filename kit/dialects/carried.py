"""Mapping of other libraries' settings, such as learning rates, to recipe settings.

Each dialect field has one of four uses:

- ``counts``: the field determines step counts.
- ``acts``: the field maps to a recipe setting. For example, nip's ``lr`` maps to ``learning_rate``.
- ``ignored``: recipes accept the field, which has no effect on training. The run table lists it.
- ``refused``: recipes do not support the field, which would change training.

A field is mapped if it was given or differs from the library's default. Otherwise the recipe keeps
its own default. The run table then lists the library defaults and hard-coded library behaviour that
differ from the recipe. With ``library_defaults``, the library's values replace recipe settings that
were not given.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Collection, Iterator
from textwrap import wrap
from typing import Any, Literal

from kit.dialects.base import COUNTS_AS, Dialect
from kit.dialects.fields import Ignored, MapsTo, Unsupported, Use, flat, uses
from kit.steps.errors import SettingError, show
from kit.steps.given import given_fields
from kit.steps.values import same_value

UseName = Literal["counts", "acts", "ignored", "refused"]

_NAMES: dict[type[Any], UseName] = {MapsTo: "acts", Ignored: "ignored", Unsupported: "refused"}

_WIDTH, _MAX_LINES = 100, 5
"""Maximum width and maximum number of lines for caveats in the run table."""


def use_of(cls: type[Dialect]) -> Iterator[tuple[str, UseName, str]]:
    """Yield a tuple of name, use and explanation for each field of a dialect.

    Fields in a group have dotted names such as ``critic.gamma``. The explanation is the recipe
    setting of a mapped field, or the reason or alternative for another field.
    """
    for name in flat(cls()):
        use = uses(cls).get(name)
        if use is None:
            yield name, "counts", ""
        else:
            yield name, _NAMES[type(use)], _describe_use(use)


def _describe_use(use: Use) -> str:
    if isinstance(use, Unsupported):
        return use.alternative
    if isinstance(use, Ignored):
        return use.reason
    if use.family is None:
        return use.setting if use.also is None else f"{use.setting}, {_describe_use(use.also)}"
    setting = f"{use.setting} ({use.family.replace('_', '-')})"
    if isinstance(use.otherwise, MapsTo):
        return f"{setting}, otherwise {_describe_use(use.otherwise)}"
    if use.otherwise is None:
        return f"{setting}, otherwise it counts"
    return f"{setting}, otherwise {_NAMES[type(use.otherwise)]}: {_describe_use(use.otherwise)}"


def changed(settings: Dialect) -> dict[str, Any]:
    """Return settings that differ from the library's defaults, keyed by name (dotted in groups)."""
    default = flat(settings.unchanged())
    return {
        name: value
        for name, value in flat(settings).items()
        if name != "version" and not same_value(value, default.get(name, ...))
    }


def typed(settings: Dialect) -> set[str]:
    """Return the names of the fields that the user set, with dotted names in groups.

    If all fields were passed, as when a saved run is loaded, return no names.
    """
    groups = {f"{name}.": getattr(settings, name) for name in settings.GROUPS}
    names = set()
    for prefix, group in {"": settings, **groups}.items():
        given, all_fields = given_fields(group), {f.name for f in dataclasses.fields(group)}
        names |= {f"{prefix}{name}" for name in given if given < all_fields}
    return names


def given_settings(settings: Dialect) -> dict[str, Any]:
    """Return the settings that were given or differ from the library's defaults, keyed by name."""
    values = flat(settings)
    names = typed(settings) | changed(settings).keys()
    if settings.version == next(iter(settings.VERSIONS)):
        names -= {"version"}
    return {name: value for name, value in values.items() if name in names}


def apply_to_config(
    steps: Any, config: Any, algo: str | None = None, family: str | None = None
) -> list[str]:
    """Set recipe settings from a dialect's fields, and return lines for the run table."""
    if not isinstance(steps, Dialect):
        return []
    values, lines = map_fields(steps, config, steps.algorithm_for(algo, family))
    for name, value in values.items():
        *groups, last = name.split(".")
        setattr(functools.reduce(getattr, groups, config), last, value)
    return lines


def caveats(steps: Any, algo: str | None = None, family: str | None = None) -> list[str]:
    """Return the caveats that apply to another library's settings, as lines for the run table.

    If the caveats are too long, return a single line with the command that prints them.
    """
    if not isinstance(steps, Dialect):
        return []
    algorithm = steps.algorithm_for(algo, family)
    notes = [f"{steps.NAME}: {note}" for note in steps.notes(algorithm)]
    if sum(len(wrap(note, _WIDTH)) for note in notes) <= _MAX_LINES:
        return notes
    given = {"version": steps.version, "algo": algorithm, **changed(steps)}
    arguments = [shlex.quote(f"{name}={v}") for name, v in given.items() if v is not None]
    command = " ".join(["kit steps explain", steps.NAME, *arguments])
    return [f"({len(notes)} caveats of these settings: {command})"]


def map_fields(
    given: Dialect, config: Any, algo: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Map the fields of a dialect to recipe settings.

    Returns:
        The recipe settings, keyed by name (dotted in groups: ``env.normalize_reward``), and lines
        for the run table.

    Raises:
        SettingError: if the recipe lacks a setting or has another value for it, or if the library
            has no defaults for the algorithm.
    """
    resolved, differing = given.resolved(algo), changed(given)
    given_names = typed(given) | differing.keys()
    stand_in = COUNTS_AS.get(str(resolved.algo))
    is_stand_in = stand_in in resolved.ALGORITHMS
    if is_stand_in and resolved.library_defaults:
        reason = f"{resolved.LIBRARY} does not have the algorithm of this recipe"
        near = [name for name, of in resolved.ALGORITHMS.items() if of == resolved.algo]
        raise SettingError("library_defaults", True, reason, f"Also set algo={' or '.join(near)}")
    defaults = type(config)() if resolved.library_defaults else None
    values: dict[str, Any] = {}
    restated: dict[str, Any] = {}
    for name, use in _select_uses(resolved).items():
        if name in differing:
            values |= _map_field(name, differing[name], use, resolved, config)
        elif name in given_names and _can_map(name, use, resolved, config):
            restated |= _map_field(name, flat(given)[name], use, resolved, config)
    unneeded = {n for n, v in restated.items() if n not in values and _setting(config, n) == [v]}
    values = {**values, **restated, **values}
    values |= _fixed_values(resolved, config, values)
    library_values, unmapped = (
        ({}, []) if is_stand_in else _map_defaults(resolved, given_names, config, defaults)
    )
    values = {**values, **library_values, **values}  # Fields that the user set take precedence.
    implicit_values, implicit = _map_implicit_defaults(resolved, values, config, defaults)
    values = {n: v for n, v in {**values, **implicit_values}.items() if n not in unneeded}
    lines = []
    if without_effect := [*_without_effect(given, resolved, given_names)]:
        lines.append(f"accepted without effect: {', '.join(without_effect)}")
    if is_stand_in:
        lines.append(f"{given.NAME} does not have this algorithm, so counts follow its {stand_in}")
    if values:
        applied = ", ".join(f"{name}={value}" for name, value in values.items())
        lines.append(f"set from {given.NAME}: {applied}")
    if unmapped:
        lines.append(f"defaults of {given.NAME} that were not applied: {', '.join(unmapped)}")
    if implicit:
        lines.append(f"fixed in {given.NAME}, but different here: {', '.join(implicit)}")
    if (unmapped or implicit) and not resolved.library_defaults:
        lines.append(f"(steps.library_defaults=true applies these values of {given.NAME})")
    return values, lines


def _fixed_values(resolved: Dialect, config: Any, values: Collection[str]) -> dict[str, Any]:
    """Return recipe settings that define the algorithm, unless given or already equal."""
    fixed, defaults = resolved.fixed_values(), type(config)()
    kept = {
        name for name in fixed if name in values or _setting(config, name) in ([], [fixed[name]])
    }
    return {
        name: value for name, value in fixed.items()
        if name not in kept and not _is_given(config, name, _setting(config, name), defaults)
    }  # fmt: skip


def _without_effect(
    given: Dialect, resolved: Dialect, given_names: Collection[str]
) -> Iterator[str]:
    """Yield the given fields that have no effect on training, each with the reason."""
    values = flat(given)
    for name, use in _select_uses(resolved).items():
        if isinstance(use, Ignored) and name in given_names:
            yield f"{name}={show(values[name])} ({use.reason})"
    for name in given.idle_settings(resolved.algo):
        yield f"{name}={show(values[name])} ({resolved.algo} does not use it)"


def _map_defaults(
    resolved: Dialect, given_names: Collection[str], config: Any, defaults: Any
) -> tuple[dict[str, Any], list[str]]:
    """Return recipe settings from library defaults, and a list of defaults that are not applied.

    Fields in ``given_names`` are skipped. ``defaults`` is a recipe config with default settings. If
    it is ``None``, no library default is applied.
    """
    values: dict[str, Any] = {}
    unmapped = []
    for name, use in _select_uses(resolved).items():
        value = flat(resolved)[name]
        if name in given_names or not isinstance(use, MapsTo) or value is None:
            continue
        ours = _setting(config, use.setting)
        theirs = _translate_value(use, value, resolved) or {}
        if use.setting not in theirs or ours in ([], [theirs[use.setting]]):
            continue
        if defaults is not None and not _is_given(config, use.setting, ours, defaults):
            values |= {name: v for name, v in theirs.items() if _setting(config, name)}
            continue
        here = f"here {use.setting}={ours[0]}"
        if ours == [value]:  # The settings have equal values but different definitions.
            here = f"equals {use.setting}={theirs[use.setting]}, here {ours[0]}"
        unmapped.append(f"{name}={value} ({here})")
    return values, unmapped


def _map_implicit_defaults(
    resolved: Dialect, values: Collection[str], config: Any, defaults: Any
) -> tuple[dict[str, Any], list[str]]:
    """Like :func:`_map_defaults`, but for hard-coded library behaviour that has no field."""
    applied, unmapped = {}, []
    implicit = resolved.IMPLICIT_DEFAULTS.get(str(resolved.algo), {})
    if hasattr(config, "convolutions"):
        implicit = resolved.IMPLICIT_DEFAULTS.get(f"{resolved.algo}_atari", implicit)
    for name, theirs in implicit.items():
        ours = _setting(config, name)
        if name in values or ours in ([], [theirs]):
            continue
        if defaults is not None and not _is_given(config, name, ours, defaults):
            applied[name] = theirs
        else:
            unmapped.append(f"{name}={theirs} (here {ours[0]})")
    return applied, unmapped


def _select_uses(resolved: Dialect) -> dict[str, Use]:
    """Return the mapped and unsupported fields that the configured algorithm uses."""
    selected, here = {}, (None, resolved.family, resolved.algo)
    for name, use in uses(type(resolved)).items():
        elsewhere = isinstance(use, MapsTo) and use.family not in here
        chosen = use.otherwise if isinstance(use, MapsTo) and elsewhere else use
        if chosen is not None and resolved.applies(name, str(resolved.algo)):
            selected[name] = chosen
    return selected


def uncounted(settings: Dialect) -> dict[str, Any]:
    """Return non-default settings that affect no step counts, keyed by name (dotted in groups)."""
    names = _select_uses(settings.resolved())
    return {name: value for name, value in changed(settings).items() if name in names}


def differing_meanings(source: Dialect, target: Dialect) -> dict[str, tuple[Any, Any]]:
    """Return the recipe settings that differ between two libraries, including defaults.

    Each pair of values is keyed by the name of the recipe setting.
    """
    ours, theirs = _translate_fields(source), _translate_fields(target)
    pairs = ((name, ours[name], theirs[name]) for name in ours if name in theirs)
    return {name: (one, other) for name, one, other in pairs if not same_value(one, other)}


def _translate_fields(settings: Dialect) -> dict[str, Any]:
    """Return the recipe settings to which all fields and implicit defaults map."""
    resolved = settings.resolved()
    values = flat(resolved)
    translated = dict(resolved.IMPLICIT_DEFAULTS.get(str(resolved.algo), {}))
    for name, use in _select_uses(resolved).items():
        if values[name] is not None:
            translated |= _translate_value(use, values[name], resolved) or {}
    return translated


def _translate_value(use: Use, value: Any, settings: Dialect) -> dict[str, Any] | None:
    """Return the recipe settings to which a field's value maps, or ``None`` if there are none."""
    if not isinstance(use, MapsTo):
        return None
    try:
        theirs = use.value(value, settings)
    except (SettingError, ArithmeticError, AttributeError, TypeError, ValueError):
        return None
    first = {} if theirs is None and use.optional else {use.setting: theirs}
    also = {} if use.also is None else _translate_value(use.also, value, settings) or {}
    return first | {name: value for name, value in also.items() if value is not None}


def _map_field(name: str, given: Any, use: Use, resolved: Dialect, config: Any) -> dict[str, Any]:
    """Return the recipe settings to which a field maps, or raise an error if unsupported."""
    if isinstance(use, Ignored):
        return {}
    if isinstance(use, Unsupported):
        if given in use.accepted:
            return {}
        reason = f"Recipes do not support this {resolved.LIBRARY} setting"
        raise SettingError(name, given, reason, use.alternative)
    value, values = flat(resolved)[name], {}
    link: MapsTo | None = use
    while link is not None:
        theirs = link.value(value, resolved)
        if theirs is not None or not (link.optional or link is not use):
            _check_setting(name, link.setting, theirs, resolved, config)
            values[link.setting] = theirs
        link = link.also
    return values


def _check_setting(name: str, setting: str, theirs: Any, resolved: Dialect, config: Any) -> None:
    """Raise an error if a recipe lacks the setting of a field, or has another value for it."""
    value, ours = flat(resolved)[name], _setting(config, setting)
    if not ours:
        reason = f"This recipe has no {setting}, which this {resolved.LIBRARY} setting needs"
        raise SettingError(name, value, reason, f"Omit {name}, or use a recipe with {setting}")
    if ours[0] != theirs and _is_given(config, setting, ours, type(config)()):
        reason = f"This {resolved.LIBRARY} setting conflicts with {setting}={show(ours[0])}"
        raise SettingError(name, value, reason, f"Set only {name} or {setting}")


def _can_map(name: str, use: Use, resolved: Dialect, config: Any) -> bool:
    """Return whether to map a field that the user set to its default value."""
    value = flat(resolved)[name]
    if not isinstance(use, MapsTo) or not _translate_value(use, value, resolved):
        return False
    return bool(_setting(config, use.setting)) or value not in (None, False)


def _is_given(config: Any, name: str, value: list[Any], default: Any) -> bool:
    """Return whether a recipe setting was given or differs from its default."""
    *groups, last = name.split(".")
    group = functools.reduce(getattr, groups, config)
    return last in given_fields(group) or value != _setting(default, name)


def _setting(config: Any, name: str) -> list[Any]:
    """Return a list with a recipe setting's value, or an empty list if it does not exist."""
    try:
        return [functools.reduce(getattr, name.split("."), config)]
    except AttributeError:
        return []
