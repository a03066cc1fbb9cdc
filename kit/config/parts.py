"""Parts that are given by name, and the arguments that they take."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any

from torch import nn
from torchrl.objectives import LossModule

from kit.lazy import module_and_name
from kit.steps.errors import SettingError, nearest_first


def resolve(name: str | Any) -> Any:
    """Import a loss by the name of its class or function.

    Args:
        name: one of TorchRL's losses (``ClipPPOLoss``), a full name (``my_module:MyLoss``), or the
            class itself.

    Raises:
        SettingError: if there is none; the nearest spelling comes first.
    """
    if not isinstance(name, str):
        return name
    module_name, attribute = module_and_name(name)
    try:
        module = importlib.import_module(module_name or "torchrl.objectives")
    except ImportError as error:
        raise SettingError("loss", name, f"cannot be imported: {error}") from None
    if not hasattr(module, attribute):
        names = [entry for entry in dir(module) if not entry.startswith("_")]
        known = [entry for entry in names if isinstance(getattr(module, entry, None), type)]
        works = nearest_first(attribute, known)[:3]
        raise SettingError("loss", name, f"is not in {module.__name__}", works)
    return getattr(module, attribute)


def accepts(make: Callable[..., Any], argument: str) -> bool:
    """Whether a function or class takes an argument, through ``**kwargs`` of its bases too."""
    constructors: list[Any] = [make]
    if isinstance(make, type):
        ends = (LossModule, nn.Module, object)  # to which nothing is passed on
        bases = itertools.takewhile(lambda base: base not in ends, make.__mro__)
        constructors = [vars(base)["__init__"] for base in bases if "__init__" in vars(base)]
    for constructor in constructors:
        parameters = inspect.signature(constructor).parameters
        if argument in parameters:
            return True
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return False
    # What is left over is the last one's; TorchRL's losses raise at it.
    return bool(constructors) and not constructors[-1].__module__.startswith("torchrl.")
