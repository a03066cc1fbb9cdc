"""Conversion of settings to and from plain values, checks and descriptions."""

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
"""Dialect name that selects a :class:`~kit.steps.StepPlan` instead of a config format."""


def to_plain(config: Any) -> Any:
    """Return a dataclass as nested dictionaries, lists and plain values."""
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
    """Return the docstrings of a dataclass's fields, including inherited fields."""
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
    """Create a dataclass from nested plain values, and check names and types.

    Args:
        cls: dataclass to create.
        values: values by field name. Missing fields keep their default.
        path: prefix of setting names in errors.

    Raises:
        SettingError: for an unknown name or a value of the wrong type.
    """
    if isinstance(cls, RenamedSettings):
        values = {current_name(name, cls): value for name, value in values.items()}
    check_fields(values, cls, f"is not a setting of {cls.__name__}", path)
    hints = type_hints(cls)
    return cls(**{n: _converted(f"{path}{n}", value, hints[n]) for n, value in values.items()})


def check(config: Any, path: str = "") -> None:
    """Check the types and limits of settings that were set in Python.

    Equivalent values, such as ``8.0`` for an integer, are converted to the declared type.

    Args:
        config: dataclass of settings.
        path: prefix of setting names in errors.

    Raises:
        SettingError: for a value of the wrong type or outside its limits, and for attributes that
            are not settings.
    """
    cls: type = type(config)
    hints = type_hints(cls)
    attributes = {n: v for n, v in vars(config).items() if not hasattr(cls, n) and n[:1] != "_"}
    check_fields(attributes, cls, f"is not a setting of {cls.__name__}", path)
    for f in dataclasses.fields(config):
        value, group = getattr(config, f.name), _group(hints[f.name])
        if group is not None and isinstance(value, Mapping):
            raise _not_a_group(f"{path}{f.name}", value, group)
        if group is not None and not issubclass(group, GivenFields):
            _check_defaults(f"{path}{f.name}", f, group)
        object.__setattr__(config, f.name, _converted(f"{path}{f.name}", value, hints[f.name]))


def _check_defaults(path: str, declared: dataclasses.Field[Any], group: type) -> None:
    """Reject custom defaults for a settings group that does not record which fields are set."""
    if declared.default_factory is dataclasses.MISSING:
        return
    default = declared.default_factory()
    if type(default) is not group or issubclass(group, StepPlan):
        return
    required = [f.name for f in dataclasses.fields(group) if _is_required(f)]
    if default != group(**{name: getattr(default, name) for name in required}):
        reason = f"These defaults would be lost when a user sets {group.__name__}(...)"
        advice = f"Derive {group.__name__} from kit.config.GivenFields"
        raise SettingError(path, default, reason, advice)


def _is_required(declared: dataclasses.Field[Any]) -> bool:
    return declared.default is declared.default_factory is dataclasses.MISSING


def _converted(path: str, value: Any, hint: Any) -> Any:
    """Check the value of a field and return it. Mappings become settings groups."""
    group = _group(hint)
    if group is None:
        return convert(path, value, hint)
    if isinstance(value, Mapping):
        if not _has_steps(group) or "dialect" not in value:
            return from_plain(group, value, f"{path}.")
        settings = dict(value)
        name = settings.pop("dialect")
        if name != PLAN and issubclass(group, OfflineSteps):
            raise _no_dialect(path, name, group)
        return (StepPlan.from_dict if name == PLAN else dialect(name).from_settings)(settings)
    if isinstance(value, group):
        check(value, f"{path}.")
    elif isinstance(value, ForeignSteps) and issubclass(group, OfflineSteps):
        raise _no_dialect(path, value.NAME, group)
    elif not (_has_steps(group) and isinstance(value, (ForeignSteps, StepPlan))):
        raise _not_a_group(path, value, group)
    return value


def _group(hint: Any) -> type | None:
    """Return the first dataclass in a field's type, or ``None`` for plain values."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _group(typing.get_args(hint)[0])
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def _has_steps(group: type) -> bool:
    """Return whether a settings group creates a step plan and can be replaced by a plan."""
    return issubclass(group, (OnPolicySteps, OffPolicySteps, OfflineSteps))


def _no_dialect(path: str, name: Any, group: type) -> SettingError:
    """Return the error for another library's step settings in an offline recipe."""
    reason = "Other libraries count policy steps, but an offline recipe collects none"
    names = ", ".join(f"{path}.{f.name}" for f in dataclasses.fields(group)[:3])
    return SettingError(path, name, reason, f"Use {names}")


def _not_a_group(path: str, value: Any, group: type) -> SettingError:
    """Return the error for a plain value that was given instead of a settings group."""
    advice = f"Use {path}={group.__name__}(...), or {path}.name=value on the command line"
    return SettingError(path, value, "A group of settings is expected", advice)


def differences(config: Any, exclude: Collection[str] = ()) -> list[str]:
    """Return a line that lists the settings with non-default values, or an empty list.

    Args:
        config: recipe settings.
        exclude: dotted names of settings to omit.
    """
    values, defaults = to_plain(config), to_plain(type(config)())
    steps, parts = values.get("steps", {}), []
    if "dialect" in steps:  # recipes have no defaults for other libraries' settings
        parts = [f"steps={steps['dialect']}"]
        defaults["steps"] = to_plain(type(config.steps)()) if steps["dialect"] != PLAN else steps
    known = flat(defaults)
    for name, value in flat(values).items():
        if name not in exclude and (name not in known or not same_value(value, known[name])):
            comparable = name in known and not ("dialect" in steps and name.startswith("steps."))
            default = f" (default: {_shown(known[name])})" if comparable else ""
            parts.append(f"{name}={_shown(value)}{default}")
    return [f"settings: {', '.join(parts)}"] if parts else []


def _shown(value: Any) -> str:
    return "null" if value is None else show(value, text=True)


def settings(config: Any, path: str = "") -> Iterator[tuple[str, Any, str, str]]:
    """Yield the dotted name, value, type description and documentation of each setting."""
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
