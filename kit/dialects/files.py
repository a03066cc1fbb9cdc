"""Settings from the command line and from the configuration files of other libraries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kit.dialects.base import Dialect
from kit.steps.errors import SettingError, nearest_first
from kit.steps.values import flat

_INTERPOLATION = re.compile(r"^\$\{([\w.]+)\}$")


def value_of(text: str) -> Any:
    """The plain value that ``text`` means: a number, a truth value, a list, a mapping, or itself.

    Examples:
        >>> [value_of(t) for t in ("4", "1e6", "1/3", "true", "null", "(2,episode)", "sac")]
        [4, 1000000.0, 0.3333333333333333, True, None, (2, 'episode'), 'sac']
    """
    text = text.strip()
    named = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in named:
        return named[text.lower()]
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
    """The mapping that a text in braces means, as in a YAML file; else the text."""
    import yaml

    try:
        found = _yaml(text)
    except yaml.YAMLError:
        return text
    return found if isinstance(found, dict) else text


def _fraction(text: str) -> float:
    over, _, under = text.partition("/")
    return float(over) / float(under)


def settings_of(words: Iterable[str]) -> dict[str, Any]:
    """The settings in words such as ``num_envs=4``.

    Raises:
        SettingError: if a word is no setting.
    """
    settings: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise SettingError("setting", word, "is not of the form name=value", "use num_envs=4")
        settings[name.strip().lstrip("+-")] = value_of(value)
    return settings


def make(cls: type[Dialect], given: Mapping[str, Any], path: str | None = None) -> Dialect:
    """Make a dialect from settings, over those of a configuration file.

    Args:
        cls: the dialect.
        given: settings by the library's names, nested ones with dots (``algo.total_steps``).
        path: a YAML file of the library; what it says of other things is left out.

    Raises:
        SettingError: if a setting is unknown, or the file cannot be read.
    """
    settings = dict(given)
    if str(settings.get("algo")) in cls.CONFIGS.get("algo", {}):
        settings |= cls.CONFIGS["algo"][settings["algo"]]
    typed = cls.CONFIGS.keys() & settings.keys() - {"algo"}
    configs = {name: settings.pop(name) for name in typed}
    if path is None:
        return cls(**_configured(cls, configs) | cls.named(settings))
    if "exp" in configs:
        why = "and a file are two experiments"
        raise SettingError("exp", configs["exp"], why, "leave one of them out")
    choice = settings.pop("env", None)
    from_file = read(cls, Path(path), choice, configs)
    return cls(**from_file | cls.named(settings))


def _configured(cls: type[Dialect], configs: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of choices among the library's configurations, such as ``{"env": "atari"}``."""
    made: dict[str, Any] = {}
    chosen = dict(configs)
    for group, known in cls.CONFIGS.items():
        if group not in chosen:
            continue
        choice = chosen[group]
        if not isinstance(choice, str) or choice not in known:
            why = f"is no configuration of {cls.LIBRARY} that is known here"
            raise SettingError(group, choice, why, nearest_first(choice, [*known])[:3])
        for name, value in known[choice].items():
            if name in cls.CONFIGS and name != group:
                chosen.setdefault(name, value)
            else:
                made[name] = value
    return made


# -------------------------------------------------------------------- files
def read(
    cls: type[Dialect],
    path: Path,
    choice: str | None = None,
    configs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The settings of a YAML file of the library, by field.

    Args:
        cls: the dialect.
        path: the file.
        choice: which of several groups of settings to take, in a file that has one for each
            environment.
        configs: choices among the library's configurations, over those of the file.

    Raises:
        SettingError: if the file cannot be read, has no settings, or leaves the choice open.
    """
    content = load(path)
    values = flat(_chosen(content, cls, choice, path))
    resolved = {name: _resolved(value, values) for name, value in values.items()}
    # Left out are values that are missing, and interpolations that lead nowhere.
    known = {n: v for n, v in resolved.items() if v != "???" and not str(v).startswith("${")}
    settings, _ = cls.placed(known)
    if not settings:
        names = sorted(cls.names())[:8]
        raise SettingError("file", str(path), f"has no settings of {cls.LIBRARY}", names)
    listed, _ = _listed(cls, content)
    made = _configured(cls, listed | dict(configs or {}))
    algo = made.pop("algo", None) or _algorithm(cls, path)
    return ({"algo": algo} if algo else {}) | made | settings


MANY = 12
"""Settings of a file that are not read from which on it is taken to be about much else."""


def left_unread(cls: type[Dialect], path: Path, choice: str | None = None) -> dict[str, Any]:
    """The settings of a file that no field means; of many, those that are spelt like one."""
    _, unread = cls.placed(flat(_chosen(load(path), cls, choice, path)))
    if cls.CONFIGS and "defaults" in unread:
        _, unread["defaults"] = _listed(cls, unread)
        unread = {name: value for name, value in unread.items() if value != []}
    if len(unread) < MANY:
        return unread
    known = [*cls.names(), *cls.PATHS]
    return {name: v for name, v in unread.items() if get_close_matches(name, known, 1, 0.85)}


def _yaml(text: str) -> Any:
    """The plain values of a YAML text, in which ``1e-3`` is a number.

    YAML 1.2 has it so, as Hydra's command line does. To PyYAML, which reads YAML 1.1, it is text.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return yaml.load(text, Loader)


def load(path: Path) -> dict[str, Any]:
    """The settings of a YAML file.

    Raises:
        SettingError: if it cannot be read, or has none.
    """
    import yaml

    try:
        content = _yaml(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or " ".join(str(error).split())[:120]
        raise SettingError("file", str(path), f"cannot be read: {problem}") from None
    if not isinstance(content, dict):
        raise SettingError("file", str(path), "has no settings by name")
    return content


def _chosen(
    content: dict[str, Any], cls: type[Dialect], choice: str | None, path: Path
) -> dict[str, Any]:
    """One group of a file that has a group of settings for each environment (SB3 zoo)."""
    groups = {str(n): v for n, v in content.items() if isinstance(v, dict)}
    known = {*cls.SECTIONS, *(p.split(".")[0] for p in cls.PATHS), *cls.names()}
    if len(groups) < len(content) or known & set(groups):
        if choice is not None and "env" not in cls.CONFIGS:
            why = f"chooses nothing in {path.name}, which has the settings of one run"
            raise SettingError("env", choice, why, "leave it out")
        return content
    if choice in groups:
        return groups[str(choice)]
    if choice is None and len(groups) == 1:
        return next(iter(groups.values()))
    why = "is not one of the file's environments" if choice else "leaves open which is meant"
    names = nearest_first(choice, [*groups])[:6]
    raise SettingError("env", choice, f"{why} in {path.name}", names)


def _resolved(value: Any, values: Mapping[str, Any]) -> Any:
    """The value of an interpolation such as ``${algo.rollout_steps}``, if it leads anywhere."""
    for _ in range(8):
        found = _INTERPOLATION.match(value) if isinstance(value, str) else None
        if found is None or found[1] not in values:
            break
        value = values[found[1]]
    return value


def _listed(cls: type[Dialect], content: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The choices in a file's list of defaults (``override /env: atari``), and other entries."""
    found: dict[str, Any] = {}
    others: list[Any] = []
    for entry in content.get("defaults") or []:
        if entry == "_self_":
            continue
        named = [*entry.items()] if isinstance(entry, Mapping) else []
        groups = {str(key).split("/")[-1].split()[-1]: choice for key, choice in named}
        chosen = {g: c for g, c in groups.items() if g in cls.CONFIGS and c not in (None, "???")}
        found |= chosen
        if len(chosen) < len(named) or not named:
            others.append(entry)
    return found, others


def _algorithm(cls: type[Dialect], path: Path) -> str | None:
    """The algorithm in the name of a file."""
    configs = cls.CONFIGS.get("algo", {})
    word = r"(?<![a-z0-9]){}(?![a-z0-9])"
    known = [*cls.ALGORITHMS, *configs]
    found = [name for name in known if re.search(word.format(name), path.stem.lower())]
    name = max(found, key=len, default=None)
    return None if name is None else configs.get(name, {}).get("algo", name)
