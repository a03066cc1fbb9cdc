"""Dataclasses with the settings of other libraries, which convert to and from a plan.

Dialects are imported on first access.

Examples:
    >>> from kit.dialects import Tianshou
    >>> plan = Tianshou(num_epochs=2, step_per_epoch=100, step_per_collect=10, num_train_envs=4,
    ...                 algo="sac").to_plan()
    >>> plan.frames_per_batch, plan.iterations
    (12, 18)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.lazy import lazy

if TYPE_CHECKING:
    from kit.dialects.base import Dialect
    from kit.dialects.carried import map_fields
    from kit.dialects.cleanrl import CleanRL
    from kit.dialects.dreamer import Dreamer, DreamerPaper
    from kit.dialects.files import from_file
    from kit.dialects.nip import LrFactors, Nip, RlTrainerParameters
    from kit.dialects.pyrado import Pyrado, PyradoGAE
    from kit.dialects.sb3 import SB3
    from kit.dialects.sheeprl import Sheeprl
    from kit.dialects.tianshou import Tianshou, Tianshou2
    from kit.dialects.torchrl import TorchRL
    from kit.dialects.translation import Translation, translate
    from kit.steps.foreign import as_plan
    from kit.steps.registry import DIALECTS, dialect

__all__ = [
    "DIALECTS", "SB3", "CleanRL", "Dialect", "Dreamer", "DreamerPaper", "LrFactors", "Nip",
    "Pyrado", "PyradoGAE", "RlTrainerParameters", "Sheeprl", "Tianshou", "Tianshou2", "TorchRL",
    "Translation", "as_plan", "dialect", "from_file", "map_fields", "translate",
]  # fmt: skip

__getattr__, __dir__ = lazy(__name__)
