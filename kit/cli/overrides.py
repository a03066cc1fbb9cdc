"""What is given on the command line: a preset or a run to resume, and ``name=value`` over it."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import typing
from collections.abc import Mapping, Sequence
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
    given: Mapping[str, Any]
    """Those of a preset, a resumed run or a chosen vocabulary; the others have their defaults."""
    mappings: tuple[str, ...]
    """Settings that take any names, with a dot: ``env.kwargs.``, arguments of the environment."""

    def overridden(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the given settings, also those given by ``overrides``, as nested plain values.

        Raises:
            SettingError: if they cannot be applied.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        config = OmegaConf.create(self.given)
        read = [(one.key_or_group, one.value()) for one in map(parsed, overrides)]
        # A value in place of a group comes last: settings of the group would replace it in silence.
        groups = {name for name, value in self.values.items() if isinstance(value, dict)}
        read.sort(key=lambda one: one[0] in groups and not isinstance(one[1], dict))
        try:
            for name, value in read:
                OmegaConf.update(config, name, value, merge=True)
            return typing.cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
        except OmegaConfBaseException as error:
            refuse(overrides, error)

    def check(self, overrides: Sequence[str], sweeps: bool) -> None:
        """Raise SettingError for unknown names, and for several values outside a sweep."""
        defaults = flat(self.values)
        known = {*defaults, *(name.rpartition(".")[0] for name in defaults)}
        for override in overrides:
            key, value = split(override)
            if "=" not in override or override.startswith(("~", "-")):
                why = "is not of the form name=value"
                raise SettingError("command line", override, why, "--help lists all settings")
            if sweeps and key.startswith("hydra"):
                continue
            if parsed(override).is_sweep_override() and not sweeps:
                works = f"use [{value}] for a list, or --multirun for a run of each"
                raise SettingError(key, value, "is several values", works)
            if not (key in known or f"{key}.".startswith(self.mappings)):
                near = _nearest_names(key, [*defaults])
                raise SettingError(
                    key, value, "is not a setting", near or "--help lists all settings"
                )


def refuse(overrides: Sequence[str], error: Exception, works: str = "") -> NoReturn:
    """Raise SettingError for overrides that Hydra or OmegaConf rejects."""
    why = f"is refused: {str(error).splitlines()[0].rstrip('.')}"
    raise SettingError("command line", " ".join(overrides), why, works) from None


def _nearest_names(name: str, known: Sequence[str]) -> list[str]:
    """Return at most three settings spelled like ``name``, those of another group first."""
    last = name.rpartition(".")[2]
    same = [entry for entry in known if entry.rpartition(".")[2] == last]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.55)
    return [*dict.fromkeys([*same, *near])][:3]


# ---------------------------------------------------------------------- before the overrides
def chosen_settings(
    config_class: type[RunConfig], recipe: Recipe, words: Sequence[str]
) -> Settings:
    """Return the settings of a preset, of a resumed run, or of a chosen vocabulary.

    Raises:
        SettingError: if the choice does not exist, or two choices contradict each other.
    """
    from omegaconf import OmegaConf

    chosen = choices(words)
    default = config_class()
    mapped = {name: value for name, value, *_ in settings(default) if isinstance(value, dict)}
    mappings = tuple(f"{name}." for name in mapped)
    if chosen.get("resume") not in (None, ""):
        resumed = _resumed(config_class, recipe, chosen)
        return Settings(resumed, resumed, mappings)
    values: dict[str, Any] = to_plain(default)
    given = OmegaConf.create()
    for name, value in mapped.items():
        if value:  # a recipe's own arguments: those of the command line are added
            OmegaConf.update(given, name, value)
    preset: dict[str, Any] = {}
    if "preset" in chosen:
        preset = _preset(config_class, recipe, str(chosen["preset"]))
    steps = vocabulary(chosen)
    if steps != "kit":
        values["steps"] = to_plain(dialect(steps)())
        if "steps" in preset:
            why = f"takes the place of the steps that preset={chosen['preset']} sets"
            raise SettingError("steps", steps, why, "leave one of the two out")
        preset["steps"] = {"dialect": steps}
    return Settings(values, OmegaConf.merge(given, preset), mappings)


def choices(words: Sequence[str]) -> dict[str, Any]:
    """Return the words that come before all settings, and ``runs``; several values as text."""
    chosen: dict[str, Any] = {}
    for word in words:
        key, value = split(word)
        if "=" in word and key in (*CHOICES, "log_dir"):
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
    runs = chosen.get("log_dir") or "runs"
    folder = find_run(str(chosen["resume"]), Path(str(runs)), recipe.name)
    check_same_recipe(folder, recipe)
    saved = read_config(folder)
    saved.pop("recipe", None)
    trust = trusted_names(chosen.get("trust"))
    check_names(saved, folder, trust, "trust=", _file_of(config_class))
    return {**to_plain(from_plain(config_class, saved)), "resume": str(folder)}
