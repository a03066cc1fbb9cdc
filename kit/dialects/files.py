"""Functions that parse settings from the command line and other libraries' config files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kit.dialects.base import Dialect
from kit.steps.errors import SettingError, nearest_first
from kit.steps.values import flat


def value_of(text: str) -> Any:
    """Parse a string as a number, bool, list or mapping, or return other strings unchanged.

    Examples:
        >>> [value_of(t) for t in ("4", "1e6", "1/3", "true", "null", "(2,episode)", "sac")]
        [4, 1000000.0, 0.3333333333333333, True, None, (2, 'episode'), 'sac']
    """
    text = text.strip()
    constants = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    if len(text) > 1 and text[0] + text[-1] in ("()", "[]"):
        return tuple(value_of(part) for part in text[1:-1].split(",") if part.strip())
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if len(text) > 1 and text[0] + text[-1] == "{}":
        return _mapping(text)
    for number in (int, float, _fraction):
        try:
            return number(text)
        except (ValueError, ZeroDivisionError):
            continue
    return text


def _mapping(text: str) -> Any:
    """Parse a string in braces as a YAML mapping, or return it unchanged if this fails."""
    import yaml

    try:
        parsed = _yaml(text)
    except yaml.YAMLError:
        return text
    return parsed if isinstance(parsed, dict) else text


def _fraction(text: str) -> float:
    numerator, _, denominator = text.partition("/")
    return float(numerator) / float(denominator)


def as_override(value: Any) -> str:
    """Return a value in the syntax of Hydra's overrides."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{as_override(v)}" for name, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(as_override, value)) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, str):
        return str(value)
    is_word = re.fullmatch(r"[A-Za-z_][\w./:-]*", value) and value_of(value) == value
    return value if is_word else '"{}"'.format(value.replace('"', '\\"'))


def settings_of(words: Iterable[str]) -> dict[str, Any]:
    """Parse arguments such as ``num_envs=4``.

    Raises:
        SettingError: if an argument is not of the form ``name=value``.
    """
    settings: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            reason = "Settings have the form name=value"
            raise SettingError("setting", word, reason, "For example, num_envs=4")
        settings[name.strip().lstrip("+-")] = value_of(value)
    return settings


def make(cls: type[Dialect], given: Mapping[str, Any], path: str | None = None) -> Dialect:
    """Create a dialect from settings and an optional config file. Settings take precedence.

    With a config file whose algorithm is known, ``library_defaults`` is true unless it is set.

    Args:
        cls: dialect class.
        given: settings keyed by the library's names, which may be dotted (``algo.total_steps``).
        path: config file of the library in YAML format. Unrelated entries are ignored.

    Raises:
        SettingError: if a setting is unknown, or the file cannot be read.
    """
    settings, file = dict(given), None if path is None else Path(path)
    values = cls.configuration(settings, file)
    if values is None and file is None:
        return cls(**cls.named(settings))
    if values is None:
        assert file is not None
        chosen = read(cls, file, settings.get("env_id", settings.get("env")))
    else:
        chosen = _placed(cls, values, file)
    chosen |= cls.named(settings)
    if chosen.get("algo") in cls.ALGORITHMS:  # settings that a file omits have library defaults
        chosen.setdefault("library_defaults", True)
    return cls(**chosen)


# -------------------------------------------------------------------- files
def from_file(
    cls: type[Dialect], path: str | Path, env: str | None = None, **settings: Any
) -> Dialect:
    """Read a config file of a library.

    The library's defaults apply to omitted settings (``library_defaults``).

    Args:
        cls: dialect class.
        path: YAML file.
        env: environment ID, which selects a section of RL Zoo's files.
        **settings: settings that override the settings in the file.

    Raises:
        SettingError: if the file cannot be read, or has no such section.
    """
    return make(cls, settings if env is None else {**settings, "env_id": env}, str(path))


def read(cls: type[Dialect], path: Path, choice: str | None = None) -> dict[str, Any]:
    """Read settings from a library's YAML file, keyed by field name.

    Args:
        cls: dialect class.
        path: YAML file.
        choice: environment ID. Selects a section if the file has one section per environment.

    Raises:
        SettingError: if the file cannot be read or has no settings, or if ``choice`` does not
            select one of several sections.
    """
    section, selected = _select_section(load(path), cls, choice, path)
    # Fields whose value may be a mapping, such as policy_kwargs
    plain = {*cls.names()} - {*cls.GROUPS, *cls.SECTIONS, *(p.split(".")[0] for p in cls.PATHS)}
    values = flat({name: v for name, v in selected.items() if name not in plain})
    values |= {name: v for name, v in selected.items() if name in plain}
    settings = _placed(cls, values, path)
    _, unmatched = cls.placed(values)
    for name, value in unmatched.items() if section else ():
        raise cls._unknown(name, value)  # every entry of a section is a setting of the algorithm
    named = {} if section in (None, "atari") else {"env_id": section}
    return named | settings


def _placed(cls: type[Dialect], values: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
    """Return the fields in a configuration. A file name can contain the algorithm.

    Raises:
        SettingError: if there are no fields.
    """
    settings, _ = cls.placed({name: value for name, value in values.items() if value != "???"})
    if not settings:
        names = sorted(cls.names())[:8]
        raise SettingError("file", str(file), f"The file has no {cls.LIBRARY} settings", names)
    algo = None if file is None else _algorithm_in_name(cls, file)
    return settings if algo is None else {"algo": algo, **settings}


MANY = 12
"""If at least this many settings match no field, only likely misspellings are reported."""


def left_unread(cls: type[Dialect], path: Path, choice: str | None = None) -> dict[str, Any]:
    """Return settings that match no field. If there are many, return only likely misspellings."""
    section, values = _select_section(load(path), cls, choice, path)
    if section:
        return {}
    _, unread = cls.placed(flat(values))
    unread = {n: v for n, v in unread.items() if not n.startswith(cls.WITHOUT_EFFECT)}
    if len(unread) < MANY:
        return unread
    names = [*cls.names(), *cls.PATHS]
    return {name: v for name, v in unread.items() if get_close_matches(name, names, 1, 0.85)}


def _yaml(text: str) -> Any:
    """Parse YAML and read ``1e-3`` as a number, as in YAML 1.2 and Hydra.

    PyYAML implements YAML 1.1, in which ``1e-3`` is a string.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return yaml.load(text, Loader)


def load(path: Path) -> dict[str, Any]:
    """Load settings from a YAML file.

    Raises:
        SettingError: if the file cannot be read or does not contain a mapping.
    """
    import yaml

    try:
        content = _yaml(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or " ".join(str(error).split())[:120]
        raise SettingError("file", str(path), f"The file cannot be read: {problem}") from None
    if not isinstance(content, dict):
        raise SettingError("file", str(path), "The file has no mapping of names to settings")
    return content


def _select_section(
    content: dict[str, Any], cls: type[Dialect], choice: str | None, path: Path
) -> tuple[str | None, dict[str, Any]]:
    """Return the name and the settings of the section for the environment ``choice``.

    RL Zoo's files have one section per environment. For other files, return no name and all of the
    file's settings.
    """
    groups = {str(n): v for n, v in content.items() if isinstance(v, dict)}
    names = {*cls.SECTIONS, *(p.split(".")[0] for p in cls.PATHS), *cls.names()}
    if len(groups) < len(content) or names & set(groups):
        return None, content
    if choice is None and len(groups) == 1:
        return next(iter(groups.items()))
    if (section := _section_for(choice, [*groups])) is not None:
        return section, groups[section]
    reason = f"{path.name} has {'no such environment' if choice else 'several environments'}"
    raise SettingError("env", choice, reason, nearest_first(choice, [*groups])[:6])


def _section_for(env_id: str | None, sections: list[str]) -> str | None:
    """Return the section for an environment, or ``None``.

    Another version of the environment matches if it is the only one. RL Zoo has one section for all
    Atari games.
    """
    if env_id is None or env_id in sections:
        return env_id
    name = re.sub(r"-v\d+$", "", env_id)
    versions = [section for section in sections if re.sub(r"-v\d+$", "", section) == name]
    if len(versions) == 1:
        return versions[0]
    is_atari = env_id.startswith("ALE/") or "NoFrameskip" in env_id
    return "atari" if is_atari and "atari" in sections else None


def _algorithm_in_name(cls: type[Dialect], path: Path) -> str | None:
    """Return the algorithm named in a file name, or ``None`` if there is none."""
    word = r"(?<![a-z0-9]){}(?![a-z0-9])"
    matches = [a for a in cls.ALGORITHMS if re.search(word.format(a), path.stem.lower())]
    return max(matches, key=len, default=None)
