"""The words of CleanRL (https://github.com/vwxyzjn/cleanrl), whose algorithms are single files."""

from __future__ import annotations

from kit.dialects.cleanrl.settings import CleanRL as CleanRL
