"""The words of Stable-Baselines3 (https://github.com/DLR-RM/stable-baselines3)."""

from __future__ import annotations

from kit.dialects.sb3.settings import SB3 as SB3
