"""Settings of other libraries, as dataclasses that convert to and from a plan.

Dialects are imported on first access.

Examples:
    >>> from kit.dialects import Tianshou
    >>> plan = Tianshou(num_epochs=2, step_per_epoch=100, step_per_collect=10, num_train_envs=4,
    ...                 algo="sac").to_plan()
    >>> plan.frames_per_batch, plan.iterations
    (12, 18)
"""

from __future__ import annotations

import importlib
from typing import Any

from kit.steps.foreign import as_plan
from kit.steps.registry import DIALECTS, dialect

__all__ = ["DIALECTS", "as_plan", "dialect"]

_PATHS = [*DIALECTS.values(), "kit.dialects.base:Dialect", "kit.dialects.pyrado:GAE",
          "kit.dialects.nip:RlTrainerParameters", "kit.dialects.nip:LrFactors"]  # fmt: skip
_MODULES = {path.partition(":")[2]: path.partition(":")[0] for path in _PATHS}
"""Module of each lazily imported class."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
