"""Settings in the words of other libraries, each a dataclass that makes a plan and back.

Importing this imports no dialect; each is imported when it is asked for.

Examples:
    >>> from kit.dialects import Tianshou
    >>> plan = Tianshou(num_epochs=2, step_per_epoch=100, step_per_collect=10, num_train_envs=4,
    ...                 algo="sac").to_plan()
    >>> plan.frames_per_batch, plan.iterations
    (12, 18)
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kit.steps.errors import SettingError, nearest_first

if TYPE_CHECKING:
    from kit.dialects.base import Dialect
    from kit.steps.plan import StepPlan

DIALECTS: dict[str, tuple[str, str]] = {
    "sheeprl": ("sheeprl", "Sheeprl"),
    "tianshou": ("tianshou", "Tianshou"),
    "tianshou2": ("tianshou", "Tianshou2"),
    "pyrado": ("pyrado", "Pyrado"),
    "nip": ("nip", "Nip"),
    "dreamer": ("dreamer", "Dreamer"),
    "dreamer-paper": ("dreamer", "DreamerPaper"),
    "sb3": ("sb3", "SB3"),
    "torchrl": ("torchrl", "TorchRL"),
    "cleanrl": ("cleanrl", "CleanRL"),
}
"""Dialects by name: module and class."""

_CLASSES = {name: (module, name) for module, name in DIALECTS.values()} | {
    "Dialect": ("base", "Dialect"),
    "RlTrainerParameters": ("nip", "RlTrainerParameters"),
    "LrFactors": ("nip", "LrFactors"),
    "GAE": ("pyrado", "GAE"),
}


def dialect(name: str) -> type[Dialect]:
    """The dialect called ``name``.

    Raises:
        SettingError: if there is none; the nearest spelling comes first.
    """
    if name not in DIALECTS:
        raise SettingError("dialect", name, "is not known", nearest_first(name, [*DIALECTS]))
    made: type[Dialect] = __getattr__(DIALECTS[name][1])
    return made


def as_plan(
    steps: StepPlan | Dialect | Mapping[str, Any],
    algo: str | None = None,
    family: str | None = None,
) -> StepPlan:
    """The plan that ``steps`` means, in whatever words it is said.

    Args:
        steps: a plan, a dialect, or settings of a dialect by name with its name under ``dialect``.
        algo: algorithm that will run it; settings that mean nothing for it are refused.
        family: ``on_policy`` or ``off_policy``, for an algorithm that the library does not have.

    Raises:
        SettingError: if the settings make no plan.
    """
    from kit.dialects.base import Dialect
    from kit.steps.plan import StepPlan

    if isinstance(steps, StepPlan):
        return steps
    if isinstance(steps, Mapping):
        settings = dict(steps)
        steps = dialect(settings.pop("dialect", None)).from_settings(settings)
    if not isinstance(steps, Dialect):
        raise SettingError("steps", steps, "is neither a plan nor a dialect", [*DIALECTS])
    meant = steps.algorithm_for(algo, family)
    return steps.to_plan(meant, strict=meant is not None)


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, class_name = _CLASSES[name]
    return getattr(importlib.import_module(f"kit.dialects.{module}"), class_name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_CLASSES])
