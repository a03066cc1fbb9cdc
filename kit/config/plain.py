"""Settings as plain values: written, read back, checked and described."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kit.config.renamed import RenamedSettings, current_name
from kit.steps import SettingError, StepPlan
from kit.steps.errors import check_fields, show
from kit.steps.foreign import ForeignSteps
from kit.steps.given import GivenFields
from kit.steps.registry import dialect
from kit.steps.schema import called, convert, type_hints
from kit.steps.settings import OfflineSteps, OffPolicySteps, OnPolicySteps
from kit.steps.values import flat, same_value

PLAN = "plan"
"""In place of a dialect's name: the settings of steps are those of a plan itself."""


def to_plain(config: Any) -> Any:
    """A dataclass as nested dictionaries, lists and plain values."""
    if isinstance(config, StepPlan):
        return {"dialect": PLAN, **config.to_dict()}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        plain = {f.name: to_plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
        return {"dialect": config.NAME, **plain} if isinstance(config, ForeignSteps) else plain
    if isinstance(config, Mapping):
        return {str(key): to_plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_plain(value) for value in config]
    if config is None or isinstance(config, (bool, int, float, str)):
        return config
    return str(config)


@functools.cache
def field_docs(cls: type) -> Mapping[str, str]:
    """The text under each field of a dataclass, its bases' fields included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):
            continue
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, definition.body[1:]):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(text)):
                    docs[name] = " ".join(str(text).split())
    return docs


def from_plain(cls: type, values: Mapping[str, Any], path: str = "") -> Any:
    """Make a dataclass from nested plain values, checking names and types.

    Args:
        cls: the dataclass.
        values: by name of the field; what is missing has its default.
        path: name of the field that this is, for errors.

    Raises:
        SettingError: at the first name that is no field or value of another type.
    """
    if isinstance(cls, RenamedSettings):
        values = {current_name(name, cls): value for name, value in values.items()}
    check_fields(values, cls, f"is not a setting of {cls.__name__}", path)
    hints = type_hints(cls)
    return cls(**{n: _made(f"{path}{n}", value, hints[n]) for n, value in values.items()})


def check(config: Any, path: str = "") -> None:
    """Refuse settings of a wrong type or out of their limits in a dataclass made in Python.

    Values that mean one of the right type (``8.0`` a whole number, ``3`` a text) become it. An
    attribute that is no setting was set by a name that is misspelled.
    """
    cls: type = type(config)
    hints = type_hints(cls)
    attributes = {n: v for n, v in vars(config).items() if not hasattr(cls, n) and n[:1] != "_"}
    check_fields(attributes, cls, f"is not a setting of {cls.__name__}", path)
    for f in dataclasses.fields(config):
        value, group = getattr(config, f.name), _group(hints[f.name])
        if group is not None and isinstance(value, Mapping):
            raise _no_group(f"{path}{f.name}", value, group)
        if group is not None and not issubclass(group, GivenFields):
            _check_defaults(f"{path}{f.name}", f, group)
        object.__setattr__(config, f.name, _made(f"{path}{f.name}", value, hints[f.name]))


def _check_defaults(path: str, declared: dataclasses.Field[Any], group: type) -> None:
    """Refuse a recipe's own defaults for a group that forgets which of its fields were given."""
    if declared.default_factory is dataclasses.MISSING:
        return
    default = declared.default_factory()
    if type(default) is not group or issubclass(group, StepPlan):
        return
    needed = [f.name for f in dataclasses.fields(group) if _is_required(f)]
    if default != group(**{name: getattr(default, name) for name in needed}):
        why = f"has defaults that would be lost in {group.__name__}(...) with other fields"
        works = f"derive {group.__name__} from kit.config.GivenFields"
        raise SettingError(path, default, why, works)


def _is_required(declared: dataclasses.Field[Any]) -> bool:
    return declared.default is declared.default_factory is dataclasses.MISSING


def _made(path: str, value: Any, hint: Any) -> Any:
    """The value of a field, checked; groups are made of mappings, or taken as they are."""
    group = _group(hint)
    if group is None:
        return convert(path, value, hint)
    if isinstance(value, Mapping):
        if not _has_steps(group) or "dialect" not in value:
            return from_plain(group, value, f"{path}.")
        settings = dict(value)
        name = settings.pop("dialect")
        if name != PLAN and issubclass(group, OfflineSteps):
            raise _no_vocabulary(path, name, group)
        return (StepPlan.from_dict if name == PLAN else dialect(name).from_settings)(settings)
    if isinstance(value, group):
        check(value, f"{path}.")
    elif isinstance(value, ForeignSteps) and issubclass(group, OfflineSteps):
        raise _no_vocabulary(path, value.NAME, group)
    elif not (_has_steps(group) and isinstance(value, (ForeignSteps, StepPlan))):
        raise _no_group(path, value, group)
    return value


def _group(hint: Any) -> type | None:
    """The dataclass that a field's type names first; ``None`` for plain values."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _group(typing.get_args(hint)[0])
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def _has_steps(group: type) -> bool:
    """Whether a group of settings makes a plan, which another plan can replace."""
    return issubclass(group, (OnPolicySteps, OffPolicySteps, OfflineSteps))


def _no_vocabulary(path: str, name: Any, group: type) -> SettingError:
    """The error of another library's settings of steps for a recipe that collects nothing."""
    why = "counts policy steps, and this recipe collects none: it learns from a data set"
    names = ", ".join(f"{path}.{f.name}" for f in dataclasses.fields(group)[:3])
    return SettingError(path, name, why, f"use {names}")


def _no_group(path: str, value: Any, group: type) -> SettingError:
    """The error of a value in place of a group of settings."""
    works = f"use {path}={group.__name__}(...), or {path}.name=value on the command line"
    return SettingError(path, value, "is not a group of settings", works)


def differences(config: Any, besides: Collection[str] = ()) -> list[str]:
    """Return a line with the settings that differ from the recipe's defaults; none if none does.

    Args:
        config: settings of a recipe.
        besides: dotted names of settings to leave out.
    """
    ours, usual = to_plain(config), to_plain(type(config)())
    steps, told = ours.get("steps", {}), []
    if "dialect" in steps:  # the recipe has no defaults for another library's settings
        told = [f"steps={steps['dialect']}"]
        usual["steps"] = to_plain(type(config.steps)()) if steps["dialect"] != PLAN else steps
    known = flat(usual)
    for name, value in flat(ours).items():
        if name not in besides and (name not in known or not same_value(value, known[name])):
            comparable = name in known and not ("dialect" in steps and name.startswith("steps."))
            default = f" (recipe: {show(known[name], text=True)})" if comparable else ""
            told.append(f"{name}={show(value, text=True)}{default}")
    return [f"settings: {', '.join(told)}"] if told else []


def settings(config: Any, path: str = "") -> Iterator[tuple[str, Any, str, str]]:
    """Yield dotted name, value, type in words and documentation, a sentence, of every setting."""
    cls: type = type(config)
    docs, hints = field_docs(cls), type_hints(cls)
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{path}{f.name}.")
        else:
            text = docs.get(f.name, "")
            sentence = text[:1].upper() + text[1:]
            yield f"{path}{f.name}", value, called(hints[f.name]), sentence
