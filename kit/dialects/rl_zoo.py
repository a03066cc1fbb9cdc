"""Values in the notation of RL Zoo's hyperparameter files.

RL Zoo evaluates strings such as ``dict(net_arch=[64], activation_fn=nn.ReLU)`` as Python code. Here
they are parsed, and names such as ``nn.ReLU`` become the string ``ReLU``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kit.dialects.expressions import Expressions
from kit.steps.errors import SettingError, whole_number
from kit.steps.values import wrapper_names

ATARI = "AtariWrapper"
_RESIZE = "YAMLCompatResizeObservation"
_PER_FRAME = {_RESIZE, "ResizeObservation", "GrayscaleObservation", "FlattenObservation"}
"""Wrappers that process each frame by itself, so that they can precede the frame skip."""


# ---------------------------------------------------------------------- keyword arguments
def parse_kwargs(field: str, value: Any) -> dict[str, Any]:
    """Return keyword arguments that are given as a mapping or a string such as ``dict(a=1)``.

    Classes are returned as their names.

    Raises:
        SettingError: if the string is not a mapping of literals and names.
    """
    parsed = Expressions({}).value_of(field, value) if isinstance(value, str) else value
    if not isinstance(parsed, Mapping) or not all(isinstance(name, str) for name in parsed):
        reason = "The value is not a mapping of names to literals, lists and classes"
        raise SettingError(field, value, reason, "For example, dict(net_arch=[64, 64])")
    return {name: _class_name(entry) for name, entry in parsed.items()}


def _class_name(value: Any) -> Any:
    return value.__name__ if isinstance(value, type) else value


# ---------------------------------------------------------------------- wrappers
class Wrappers(NamedTuple):
    """The parts of an ``env_wrapper`` setting."""

    atari: bool
    """Whether the wrappers contain Stable-Baselines3's Atari preprocessing."""
    action_repeat: int | None
    max_episode_steps: int | None
    others: list[str | dict[str, Any]]
    """Other wrappers, as in the setting ``env.wrappers``."""


def split_wrappers(entries: Any) -> Wrappers:
    """Split an ``env_wrapper`` setting into recipe settings and other wrappers.

    Raises:
        SettingError: if an entry is not a class with keyword arguments.
    """
    named = [(n, dict(k)) for n, k in wrapper_names(entries or [], "env_wrapper")]
    classes = [name.rpartition(".")[2] for name, _ in named]
    repeat = limit = None
    others: list[str | dict[str, Any]] = []
    for number, (name, kwargs) in enumerate(named):
        after = {*classes[number + 1 :]}
        if classes[number] == "FrameSkip" and after <= _PER_FRAME:
            repeat = whole_number("env_wrapper", kwargs.get("skip", 4), 1)
        elif classes[number] == "TimeLimit" and "FrameSkip" not in after:
            limit = whole_number("env_wrapper", kwargs.get("max_episode_steps"), 1)
        elif classes[number] != ATARI:
            path = _path(name)
            others.append({path: kwargs} if kwargs else path)
    return Wrappers(ATARI in classes, repeat, limit, others)


def recipe_wrappers(entries: Any) -> list[str | dict[str, Any]]:
    """Return the wrappers of an ``env_wrapper`` setting that a recipe imports."""
    return split_wrappers(entries).others


def _path(name: str) -> str:
    """Return ``module:Class`` for RL Zoo's ``module.Class``."""
    module, _, last = name.rpartition(".")
    if last == _RESIZE:
        return "gymnasium.wrappers:ResizeObservation"
    if module.startswith("gymnasium.wrappers."):  # Gymnasium 1.0 has other submodules.
        return f"gymnasium.wrappers:{last}"
    return name if ":" in name else f"{module}:{last}"
