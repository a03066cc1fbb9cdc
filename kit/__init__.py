"""A modular component kit on TorchRL and tensordict that counts every step exactly.

Importing ``kit`` imports nothing else: ``kit.steps`` works without torch, and each room is
imported by its own name (``kit.collectors``, ``kit.update``, ``kit.trainer.trainer``, ...).
"""

from __future__ import annotations

__version__ = "0.1.0"
