"""Environment wrappers that are given by name."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kit.lazy import module_and_name
from kit.steps.errors import SettingError
from kit.steps.values import wrapper_names

if TYPE_CHECKING:
    from kit.envs.single_env import Wrapper


def load_wrappers(entries: Sequence[str | Mapping[str, Any]]) -> list[Wrapper]:
    """Import the wrappers in the setting ``env.wrappers``.

    Raises:
        SettingError: if a wrapper cannot be imported.
    """
    return [_load(name, kwargs) for name, kwargs in wrapper_names(entries)]


def _load(name: str, kwargs: Mapping[str, Any]) -> Wrapper:
    module, attribute = module_and_name(name)
    if not module:
        reason = "A wrapper is given by its module and its name"
        raise SettingError(
            "env.wrappers", name, reason, "For example, gymnasium.wrappers:ClipAction"
        )
    try:
        wrapper: Wrapper = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        reason = f"The wrapper cannot be imported: {error}"
        advice = "Install its package, or remove the wrapper"
        raise SettingError("env.wrappers", name, reason, advice) from None
    # YAML has no tuples, which Gymnasium requires for shapes.
    settings = {n: tuple(v) if isinstance(v, list) else v for n, v in kwargs.items()}
    return functools.partial(wrapper, **settings)
