"""What is given on the command line: a preset or a run to resume, and ``name=value`` over it."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kit.config import RunConfig
from kit.config.plain import from_plain, settings, to_plain
from kit.dialects import DIALECTS, dialect
from kit.dialects.files import load
from kit.runs.recipe import Recipe
from kit.runs.run_folder import check_same_recipe
from kit.runs.saved_runs import find_run, read_config
from kit.runs.trust import check_names, trusted_names
from kit.steps.errors import SettingError, one_of
from kit.steps.values import flat

CHOICES = ("steps", "preset", "resume", "trust")
"""Words that come before all settings: they say where the settings are that others change."""


def split(override: str) -> tuple[str, str]:
    """The name and the text of the value of an override."""
    key, _, value = override.partition("=")
    return key.lstrip("+"), value


def parsed(override: str) -> Any:
    """An override as Hydra reads it.

    Raises:
        SettingError: if Hydra cannot.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        refuse([override], error, f"quote it: '{split(override)[0]}=\"...\"'")


def without_commas(override: str) -> str:
    """Write ``logger=wandb,tensorboard``, or such a list, as one text: it is no sweep."""
    key, value = split(override)
    several = key == "logger" and "," in value
    return "logger='{}'".format(value.strip("[]'\"")) if several else override


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run before they are overridden."""

    values: dict[str, Any]
    """All settings as nested plain values."""
    given: frozenset[str]
    """Dotted names of those that are no defaults."""
    mappings: tuple[str, ...]
    """Settings that take any names, with a dot: ``env.kwargs.``, arguments of the environment."""

    def overridden(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The settings that are given, also by these overrides; the others have defaults.

        Raises:
            SettingError: if they cannot be applied.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        config, names = OmegaConf.create(self.values), set(self.given)
        read = [(one.key_or_group, one.value()) for one in map(parsed, overrides)]
        # A value in place of a group comes last: settings of the group would replace it in silence.
        groups = {name for name, value in self.values.items() if isinstance(value, dict)}
        read.sort(key=lambda one: one[0] in groups and not isinstance(one[1], dict))
        try:
            for name, value in read:
                OmegaConf.update(config, name, value, merge=True, force_add=True)
                names |= flat({name: value}).keys()
            values = typing.cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
        except OmegaConfBaseException as error:
            refuse(overrides, error)
        return _only(values, names, self.mappings)

    def check(self, overrides: Sequence[str], sweeps: bool) -> None:
        """Refuse names that no setting has, and several values outside a sweep."""
        defaults = flat(self.values)
        known = {*defaults, *(name.rpartition(".")[0] for name in defaults)}
        for override in overrides:
            key, value = split(override)
            if "=" not in override or override.startswith(("~", "-")):
                near = _nearest_names(key, [*defaults]) or ["seed"]
                works = ["--multirun", "--help"] if key.startswith("-") else [f"{near[0]}=VALUE"]
                why = "is not of the form name=value"
                raise SettingError("command line", override, why, works)
            if sweeps and key.startswith("hydra"):
                continue
            if parsed(override).is_sweep_override() and not sweeps:
                is_list = isinstance(defaults.get(key), list) or key.startswith("steps.")
                works = [f"[{value}]"] if is_list and not value.startswith("[") else []
                works.append("--multirun, for a run of each")
                raise SettingError(key, value, "is several values", works)
            if not (key in known or f"{key}.".startswith(self.mappings)):
                works = _nearest_names(key, [*defaults])
                hint = works or "--help lists all settings"
                raise SettingError(key, value, "is not a setting", hint)


def refuse(overrides: Sequence[str], error: Exception, works: str = "") -> NoReturn:
    """Refuse in one line overrides that Hydra or OmegaConf refuses."""
    why = f"is refused: {str(error).splitlines()[0].rstrip('.')}"
    raise SettingError("command line", " ".join(overrides), why, works) from None


def _nearest_names(name: str, known: Sequence[str]) -> list[str]:
    """Settings that are spelled like ``name``: those of another group first, at most three."""
    last = name.rpartition(".")[2]
    same = [entry for entry in known if entry.rpartition(".")[2] == last]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.55)
    return [*same, *(entry for entry in near if entry not in same)][:3]


def _only(
    values: Mapping[str, Any], names: Collection[str], mappings: tuple[str, ...], path: str = ""
) -> dict[str, Any]:
    """Return the entries of nested ``values`` with these dotted names; mappings stay whole."""
    found = {}
    for key, value in values.items():
        name = f"{path}{key}"
        within = any(one.startswith(f"{name}.") for one in names)
        if within and isinstance(value, Mapping) and f"{name}." not in mappings:
            found[key] = _only(value, names, mappings, f"{name}.")
        elif within or name in names:
            found[key] = value
    return found


# ---------------------------------------------------------------------- before the overrides
def chosen_settings(
    config_class: type[RunConfig], recipe: Recipe, words: Sequence[str]
) -> Settings:
    """The settings of a preset, of a resumed run, or of a chosen vocabulary.

    Raises:
        SettingError: if what is chosen is not there, or two choices contradict each other.
    """
    chosen = choices(words)
    default = config_class()
    names = (name for name, value, *_ in settings(default) if isinstance(value, dict))
    mappings = tuple(f"{name}." for name in names)
    if chosen.get("resume") not in (None, ""):
        resumed = _resumed(config_class, recipe, chosen)
        return Settings(resumed, frozenset(resumed), mappings)
    values: dict[str, Any] = to_plain(default)
    changes: dict[str, Any] = {}
    steps = vocabulary(chosen)
    if steps != "kit":
        values["steps"] = to_plain(dialect(steps)())
        changes = {"steps": {"dialect": steps}}
    if "preset" in chosen:
        preset = _preset(config_class, recipe, str(chosen["preset"]))
        if "steps" in preset and steps != "kit":
            why = f"takes the place of the steps that preset={chosen['preset']} sets"
            raise SettingError("steps", steps, why, "leave one of the two out")
        changes |= preset
    return Settings(_merged(values, changes), frozenset(flat(changes)), mappings)


def choices(words: Sequence[str]) -> dict[str, Any]:
    """The words that come before all settings, and ``runs``; several values as text."""
    chosen: dict[str, Any] = {}
    for word in words:
        key, value = split(word)
        if "=" in word and key in (*CHOICES, "runs"):
            several = key == "trust" or (one := parsed(word)).is_sweep_override()
            chosen[key] = value if several else one.value()
    return chosen


def vocabulary(chosen: Mapping[str, Any]) -> str:
    """The name of the vocabulary of steps."""
    return one_of("steps", chosen.get("steps", "kit"), ["kit", *DIALECTS])


def _preset(config_class: type[RunConfig], recipe: Recipe, name: str) -> dict[str, Any]:
    """The settings of a file beside the recipe."""
    folder = _file_of(config_class).parent / "presets" / recipe.name
    presets = {file.stem: file for file in folder.glob("*.yaml")}
    return load(presets[one_of("preset", name, sorted(presets))])


def _file_of(config_class: type[RunConfig]) -> Path:
    return Path(sys.modules[config_class.__module__].__file__ or "")


def _resumed(
    config_class: type[RunConfig], recipe: Recipe, chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a run that is resumed."""
    for name in ("steps", "preset"):
        if name in chosen:
            why = "cannot be chosen again for a run that is resumed"
            raise SettingError(name, chosen[name], why, "leave it out")
    runs = chosen.get("runs") or "runs"
    folder = find_run(str(chosen["resume"]), Path(str(runs)), recipe.name)
    check_same_recipe(folder, recipe)
    saved = read_config(folder)
    saved.pop("recipe", None)
    trust = trusted_names(chosen.get("trust"))
    check_names(saved, folder, trust, "trust=", _file_of(config_class))
    return {**to_plain(from_plain(config_class, saved)), "resume": str(folder)}


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested ``values`` with nested ``changes``."""
    merged = dict(values)
    for name, change in changes.items():
        before = merged.get(name)
        if isinstance(change, Mapping) and isinstance(before, Mapping):
            merged[name] = _merged(before, change)
        else:
            merged[name] = change
    return merged
