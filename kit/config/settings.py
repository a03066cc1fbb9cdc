"""Configuration: Hydra fills a dataclass of plain values, Python wires the objects."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from kit.config.documentation import field_docs
from kit.config.limits import Count, Limits, Positive
from kit.steps import SettingError
from kit.steps.errors import nearest_first


@dataclass
class EnvConfig:
    """The environments."""

    id: str = "CartPole-v1"
    """Gymnasium id."""
    num_envs: Count = 8
    """environment copies in one process."""
    vectorization: str = "sync"
    """how copies are stepped: sync (one after the other), async (in worker processes), native (the
    environment's own vector environment), envpool or tensor (written in torch)."""
    action_repeat: Count = 1
    """env steps one action is held for."""
    max_episode_steps: Count | None = None
    """policy steps after which an episode is truncated; null: as the environment is registered."""
    normalize_observation: bool = False
    """whether observations get running mean 0 and variance 1."""
    normalize_reward: bool = False
    """whether rewards are divided by the running deviation of their discounted sum."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """arguments of the environment itself, and further ones of make_env: restart_on_error, ..."""


@dataclass
class RunConfig:
    """What every recipe has besides its algorithm."""

    env: EnvConfig = field(default_factory=EnvConfig)
    collector: str | None = None
    """what collects: vector, tensor (environments written in torch), episode (whole episodes),
    async (while the learner works) or torchrl; null: vector, or episode if the plan asks for it."""
    collector_kwargs: dict[str, Any] = field(default_factory=dict)
    """further arguments of the collector: max_staleness, exact_policy, layout, ..."""
    seed: Annotated[int, Limits(0)] = 0
    """of environments, initial weights, exploration and minibatches."""
    device: str = "cpu"
    """where networks, batches and buffers are: cpu, cuda, cuda:1."""
    threads: Count | None = 1
    """threads of PyTorch on the CPU; more pay for large networks only. null: PyTorch's choice."""
    compile: Any = "auto"
    """how losses run: auto (flat programs, bitwise as eager), true (torch.compile) or false."""
    logger: str = "csv"
    """where rows of metrics go besides metrics.csv: wandb, tensorboard, several with commas."""
    runs: str = "runs"
    """folder in which each run gets a folder of its own."""
    resume: str | None = None
    """run folder to go on with, or "latest"."""
    log_every: Count | None = None
    """policy steps between two rows of metrics; null: a hundredth of the run."""
    checkpoint_every: Count | None = None
    """policy steps between two checkpoints; null: a tenth of the run."""
    time_limit: Positive | None = None
    """seconds after which the run ends, after the iteration that is under way; null: none."""
    progress: bool = True
    """whether plan, progress and ledger are shown in the terminal."""


# ---------------------------------------------------------------------- names
def resolve(name: str | type, package: str, field: str = "loss") -> Any:
    """Return the class or function called ``name``.

    Args:
        name: an attribute of ``package`` (``ClipPPOLoss``), a full name (``my_module:MyLoss``), or
            the class itself.
        package: where short names are looked for.
        field: setting that asks for it, for the error.

    Raises:
        SettingError: if there is none; the nearest spelling comes first.
    """
    if not isinstance(name, str):
        return name
    module_name, _, attribute = name.rpartition(":") if ":" in name else (package, "", name)
    try:
        module = importlib.import_module(module_name or package)
    except ImportError as error:
        raise SettingError(field, name, f"cannot be imported: {error}") from None
    if not hasattr(module, attribute):
        known = [entry for entry in dir(module) if not entry.startswith("_")]
        raise SettingError(
            field, name, f"is not in {module.__name__}", nearest_first(attribute, known)[:3]
        )
    return getattr(module, attribute)


# ---------------------------------------------------------------------- dataclass <-> plain
def to_plain(config: Any) -> Any:
    """Return a dataclass as nested dictionaries, lists and plain values."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        plain = {f.name: to_plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
        name = getattr(type(config), "NAME", None)
        return {"dialect": name, **plain} if isinstance(name, str) else plain
    if isinstance(config, Mapping):
        return {str(key): to_plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_plain(value) for value in config]
    if config is None or isinstance(config, (bool, int, float, str)):
        return config
    return str(config)


def from_plain(cls: type, values: Mapping[str, Any], path: str = "") -> Any:
    """Make a dataclass from nested plain values, checking names and types.

    Args:
        cls: the dataclass.
        values: by name of the field; what is missing has its default.
        path: name of the field that this is, for errors.

    Raises:
        SettingError: at the first name that is no field or value of another type.
    """
    known = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls, include_extras=True)
    made: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{path}{name}"
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.55)
            why = f"is not a setting of {cls.__name__}"
            raise SettingError(full, value, why, near or list(known))
        made[name] = _checked(full, value, hints[name], known[name])
    return cls(**made)


def check(config: Any, path: str = "") -> None:
    """Refuse settings of a wrong type or out of their limits, however the dataclass was made.

    Raises:
        SettingError: at the first one.
    """
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    from_plain(type(config), values, path)


def _checked(path: str, value: Any, hint: Any, described: dataclasses.Field[Any]) -> Any:
    if hint is Any:
        default = described.default_factory
        is_class = isinstance(default, type) and dataclasses.is_dataclass(default)
        if is_class and isinstance(value, Mapping) and "dialect" not in value:
            return from_plain(typing.cast("type", default), value, f"{path}.")
        if isinstance(value, Mapping) and "dialect" in value:
            return _dialect(value)
        return value
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast("type", hint)):
            check(value, f"{path}.")
            return value
        if not isinstance(value, Mapping):
            raise SettingError(path, value, "is not a group of settings", f"use {path}.name=value")
        return from_plain(typing.cast("type", hint), value, f"{path}.")
    value = _plain_value(path, value, hint)
    for limits in _limits(hint):
        if value is not None:
            limits.check(path, value, described.default)
    return value


def _limits(hint: Any) -> list[Limits]:
    """The limits of a type such as ``Count`` or ``Count | None``."""
    own = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Limits)]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [limits for option in typing.get_args(hint) for limits in _limits(option)]
    return own


def _dialect(value: Mapping[str, Any]) -> Any:
    from kit.dialects import dialect

    settings = dict(value)
    return dialect(settings.pop("dialect")).from_settings(settings)


def _plain_value(path: str, value: Any, hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _plain_value(path, value, arguments[0])
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            if option is type(None) and value is None:
                return None
        for option in (a for a in arguments if a is not type(None)):
            try:
                return _plain_value(path, value, option)
            except SettingError:
                continue
        raise _wrong(path, value, _called(hint))
    if origin is Literal:
        if value in arguments:
            return value
        raise SettingError(path, value, "is not a choice", nearest_first(value, arguments))
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            raise _wrong(path, value, "a list such as [64,64]")
        items = [_plain_value(path, item, arguments[0]) for item in value]
        return origin(items)
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            raise _wrong(path, value, "a mapping such as {name: value}")
        return dict(value)
    return _scalar(path, value, hint)


def _scalar(path: str, value: Any, hint: Any) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and is_number:
        if value != value:
            raise SettingError(path, value, "is not a number")
        return float(value)
    if hint is int and is_number and value == value and float(value).is_integer():
        return int(value)
    if hint is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    if hint is bool and isinstance(value, bool):
        return value
    if isinstance(hint, type) and hint not in _CALLED and isinstance(value, hint):
        return value
    raise _wrong(path, value, _called(hint))


def _wrong(path: str, value: Any, wanted: str) -> SettingError:
    return SettingError(path, value, f"is not {wanted}", f"give {wanted}")


_CALLED = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "a mapping",
    type(None): "null",
    Any: "any value",
}


def _called(hint: Any) -> str:
    """What a type is called in messages and in the help."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return " ".join([_called(arguments[0]), *map(str, _limits(hint))])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_called, arguments))
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin in (list, tuple):
        return f"a list, each {_called(arguments[0])}"
    return _CALLED.get(origin or hint, getattr(hint, "__name__", str(hint)))


def settings(config: Any, path: str = "") -> Iterator[tuple[str, Any, str, str]]:
    """Yield dotted name, value, type in words and documentation of every setting."""
    cls: type = type(config)
    docs, hints = field_docs(cls), typing.get_type_hints(cls, include_extras=True)
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{path}{f.name}.")
        else:
            yield f"{path}{f.name}", value, _called(hints[f.name]), docs.get(f.name, "")
