"""Parsing of a recipe's arguments: presets, runs to resume and ``name=value`` overrides."""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kit.config import RunConfig
from kit.config.plain import from_plain, settings, to_plain
from kit.config.renamed import current_name
from kit.dialects import DIALECTS, dialect
from kit.dialects.base import Dialect
from kit.dialects.carried import given_settings, use_of
from kit.dialects.fields import flat as flat_settings
from kit.dialects.files import left_unread, load, make, value_of
from kit.runs.recipe import Recipe
from kit.runs.run_folder import check_same_recipe
from kit.runs.saved_runs import find_run, read_config
from kit.runs.trust import check_names, trusted_names
from kit.steps.errors import SettingError, one_of
from kit.steps.values import flat

CHOICES = ("steps", "preset", "resume", "trust")
"""Arguments that are read before the overrides are applied."""


def split(override: str) -> tuple[str, str]:
    """Return the name and the value of an override as strings."""
    key, _, value = override.partition("=")
    return key.lstrip("+"), value


def with_current_name(override: str, config_class: type[RunConfig]) -> str:
    """Return an override with its setting's current name. Print a warning for an old name."""
    key, _ = split(override)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        new = current_name(key, config_class)
    for warning in caught:
        print(warning.message, file=sys.stderr)
    return override if new == key else override.replace(key, new, 1)


def parsed(override: str) -> Any:
    """Parse an override with Hydra.

    Raises:
        SettingError: if Hydra cannot parse it.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        reject([override], error, f"Quote it: '{split(override)[0]}=\"...\"'")


def without_commas(override: str) -> str:
    """Quote ``logger=wandb,tensorboard``, so that Hydra does not read the list as a sweep."""
    key, value = split(override)
    is_list = key == "logger" and "," in value
    return "logger='{}'".format(value.strip("[]'\"")) if is_list else override


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run before overrides are applied."""

    values: dict[str, Any]
    """All settings as nested plain values."""
    given: Mapping[str, Any]
    """Settings from a preset, a resumed run or a config format; all others have their defaults."""
    mappings: tuple[str, ...]
    """Prefixes of settings whose names can be chosen freely, such as ``env.kwargs.``."""
    applied: frozenset[str] = frozenset(CHOICES)
    """Names of arguments that are already applied and are not overrides."""

    def overridden(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Apply overrides to the given settings, and return the result as nested plain values.

        Raises:
            SettingError: if the overrides cannot be applied.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        config = OmegaConf.create(self.given)
        pairs = [(entry.key_or_group, entry.value()) for entry in map(parsed, overrides)]
        # Apply plain values for groups last. Otherwise, other overrides silently replace them.
        groups = {name for name, value in self.values.items() if isinstance(value, dict)}
        pairs.sort(key=lambda pair: pair[0] in groups and not isinstance(pair[1], dict))
        try:
            for name, value in pairs:
                OmegaConf.update(config, name, value, merge=True)
            return typing.cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
        except OmegaConfBaseException as error:
            reject([o for o in overrides if split(o)[0] == error.full_key] or overrides, error)

    def check(self, overrides: Sequence[str], sweeps: bool) -> None:
        """Check the syntax and the setting names of overrides.

        Raises:
            SettingError: if an override is not ``name=value``, its name is unknown, or it has
                several values outside a sweep.
        """
        defaults = flat(self.values)
        known = {*defaults, *(name.rpartition(".")[0] for name in defaults)}
        for number, override in enumerate(overrides):
            key, value = split(override)
            if "=" not in override or override.startswith(("~", "-")):
                _reject_word(override, overrides[number + 1 :], defaults)
            if sweeps and key.startswith("hydra"):
                continue
            if parsed(override).is_sweep_override() and not sweeps:
                advice = f"Use {key}=[{value}] for a list, or --multirun to sweep over the values"
                raise SettingError(key, value, "Several values need a sweep", advice)
            if key == "env" and not value.startswith("{"):
                reason = "This is a group of settings, not a single one"
                raise SettingError(key, value, reason, f"Use env.id={value}")
            if not (key in known or f"{key}.".startswith(self.mappings)):
                near = [f"{name}={value}" for name in _nearest_names(key, defaults)]
                raise SettingError(key, value, "There is no such setting", near or _LIST)


def reject(overrides: Sequence[str], error: Exception, advice: str = "") -> NoReturn:
    """Raise SettingError for overrides that Hydra or OmegaConf rejects."""
    reason = f"Hydra rejects it: {str(error).splitlines()[0].rstrip('.')}"
    raise SettingError("command line", " ".join(overrides), reason, advice) from None


_LIST = "List all settings with --help=all"
_OPTIONS = ("--help", "--multirun", "--version")
_SYNONYMS = {
    "lr": "learning_rate", "env_id": "env.id", "n_envs": "env.num_envs", "n_epochs":
    "steps.update_epochs", "n_steps": "steps.steps_per_env", "batch_size": "steps.minibatch_size",
    "total_timesteps": "steps.total_policy_steps", "timesteps": "steps.total_policy_steps",
}  # fmt: skip
"""Common names for settings that have other names in kit."""


def _reject_word(word: str, following: Sequence[str], defaults: Mapping[str, Any]) -> NoReturn:
    """Raise SettingError for an argument that is not ``name=value``, and suggest a correction."""
    name, equals, value = word.lstrip("-").partition("=")
    reason = "Settings are written as name=value"
    if option := difflib.get_close_matches(word, _OPTIONS, n=1, cutoff=0.8):
        raise SettingError("command line", word, "There is no such option", option)
    if not equals and following and "=" not in following[0] and following[0][:1] != "-":
        value = following[0]
    near = _nearest_names(name.replace("-", "_"), {**defaults, **dict.fromkeys(CHOICES)})
    if not value:
        value = "true" if near and isinstance(defaults.get(near[0]), bool) else "VALUE"
    advice = f"Use {near[0]}={value}" if near else _LIST
    if equals and word.startswith("-"):
        raise SettingError(word.partition("=")[0], value, f"{reason}, without dashes", advice)
    raise SettingError("command line", word, reason, advice)


def _nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Return at most three settings with similar names, best match first."""
    last = name.rpartition(".")[2]
    known = [*known]
    exact = [entry for entry in known if entry == name or entry.rpartition(".")[2] == last]
    named = [entry for entry in (_SYNONYMS.get(last), *_of_libraries(last)) if entry in known]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return [*dict.fromkeys([*exact, *named, *near])][: 1 if exact or named else 3]


def _of_libraries(name: str) -> Iterator[str]:
    """Yield the kit settings that correspond to this setting name in other libraries."""
    for cls in map(dialect, DIALECTS):
        for field, use, target in use_of(cls):
            if use == "acts" and field.rpartition(".")[2] == name:
                yield from re.findall(r"[\w.]+", target)


# ---------------------------------------------------------------------- before the overrides
def chosen_settings(
    config_class: type[RunConfig], recipe: Recipe, words: Sequence[str]
) -> Settings:
    """Return the settings that a preset, a resumed run or a config format selects.

    Raises:
        SettingError: if the selection does not exist, or two selections contradict each other.
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
        if value:  # so that command-line arguments extend these defaults
            OmegaConf.update(given, name, value)
    preset: dict[str, Any] = {}
    if "preset" in chosen:
        presets = presets_of(config_class, recipe)
        preset = load(presets[one_of("preset", str(chosen["preset"]), [*presets])])
    steps, applied = step_format(chosen), set(CHOICES)
    if steps != "kit":
        library = dialect(steps)
        values["steps"] = to_plain(library())
        names = ", ".join(f"steps.{name}" for name in preset.pop("steps", {}))
        if names:
            text = f"kit: preset={chosen['preset']}: steps={steps} replaces {names}."
            print(text, file=sys.stderr)
        words_of_library = _library_arguments(library, words)
        applied |= {f"steps.{name}" for name in words_of_library}
        from_library = _library_settings(library, recipe, words_of_library, words)
        preset["steps"] = {"dialect": steps, **from_library}
    merged = OmegaConf.merge(given, preset)
    return Settings(values, merged, mappings, frozenset(applied))


def _library_arguments(library: type[Dialect], words: Sequence[str]) -> dict[str, Any]:
    """Return ``steps.file`` and settings under names of the library that are not field names.

    For example, RL Zoo's ``n_timesteps`` is the field ``total_timesteps``.
    """
    pairs = [split(word) for word in words]
    given = {name.removeprefix("steps."): v for name, v in pairs if name.startswith("steps.")}
    fields = flat_settings(library())
    return {name: value_of(value) for name, value in given.items() if name not in fields}


def _library_settings(
    library: type[Dialect], recipe: Recipe, arguments: Mapping[str, Any], words: Sequence[str]
) -> dict[str, Any]:
    """Return nested settings from a library's config file and from arguments with its names."""
    if not arguments:
        return {}
    settings = dict(arguments)
    file = settings.pop("file", None)
    env_id = dict(map(split, words)).get("env.id")
    path = library.experiment_file(settings) if file is None else Path(file)
    if path is not None:
        settings |= {} if env_id is None else {"env_id": env_id}
        for name, value in left_unread(library, path, env_id).items():
            print(f"kit: {path.name}: {name}={value} is not read.", file=sys.stderr)
    try:
        made = make(library, settings, file)
    except SettingError as error:
        name = f"steps.{error.field}" if error.field in arguments else error.field
        raise SettingError(name, error.value, error.why, error.works, error.hint) from None
    if file is not None and made.algo is None and recipe.name in library.ALGORITHMS:
        made = make(library, {**settings, "algo": recipe.name}, file)
    nested: dict[str, Any] = {}
    for name, value in given_settings(made).items():
        group, _, last = name.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[last] = to_plain(value)
    return nested


def choices(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of :data:`CHOICES` and ``log_dir``. Sweep values stay unparsed strings."""
    chosen: dict[str, Any] = {}
    for word in words:
        key, value = split(word)
        if "=" in word and key in (*CHOICES, "log_dir"):
            is_text = key == "trust" or (override := parsed(word)).is_sweep_override()
            chosen[key] = value if is_text else override.value()
    return chosen


def step_format(chosen: Mapping[str, Any]) -> str:
    """Return the config format of the step settings: ``kit`` or the name of another library."""
    return one_of("steps", chosen.get("steps", "kit"), ["kit", *DIALECTS])


def presets_of(config_class: type[RunConfig], recipe: Recipe) -> dict[str, Path]:
    """Return the files of a recipe's presets, keyed by preset name."""
    folder = _file_of(config_class).parent / "presets" / recipe.name
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def _file_of(config_class: type[RunConfig]) -> Path:
    return Path(sys.modules[config_class.__module__].__file__ or "")


def _resumed(
    config_class: type[RunConfig], recipe: Recipe, chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of the run to resume."""
    for name in ("steps", "preset"):
        if name in chosen:
            reason = "A resumed run keeps its settings"
            raise SettingError(name, chosen[name], reason, "Remove it")
    runs = chosen.get("log_dir") or "runs"
    folder = find_run(str(chosen["resume"]), Path(str(runs)), recipe.name)
    check_same_recipe(folder, recipe)
    saved = read_config(folder)
    saved.pop("recipe", None)
    trust = trusted_names(chosen.get("trust"))
    check_names(saved, folder, trust, "trust=", _file_of(config_class))
    return {**to_plain(from_plain(config_class, saved)), "resume": str(folder)}
