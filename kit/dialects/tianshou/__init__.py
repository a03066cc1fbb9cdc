"""The vocabulary of tianshou (https://github.com/thu-ml/tianshou), of both its generations."""

from __future__ import annotations

from kit.dialects.tianshou import counting, notes
from kit.dialects.tianshou.settings import Tianshou1Settings, Tianshou2Settings


class Tianshou(Tianshou1Settings):
    """``SamplingConfig`` of tianshou 1.x, and its plan."""

    sampling = counting.sampling
    buffer_capacity = counting.buffer_capacity
    _plan = counting.to_plan
    _notes = notes.notes
    _from = staticmethod(counting.settings_from)


class Tianshou2(Tianshou2Settings):
    """The training configurations of tianshou 2.x, and their plan."""

    sampling = counting.sampling
    buffer_capacity = counting.buffer_capacity
    _plan = counting.to_plan
    _notes = notes.notes
    _from = staticmethod(counting.settings_2_from)
