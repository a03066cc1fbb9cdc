"""The words of Dreamer: the official code of its third version, and the loop of the first paper."""

from __future__ import annotations

from kit.dialects.dreamer.settings import Dreamer as Dreamer
from kit.dialects.dreamer.settings import DreamerPaper as DreamerPaper
