"""Devices that settings name."""

from __future__ import annotations

from typing import Any

import torch


def usable_device(**given: Any) -> torch.device:
    """Return the first device that is given, after PyTorch has used it; the CPU by default."""
    device = torch.device(next((one for one in given.values() if one is not None), "cpu"))
    torch.zeros(1, device=device).item()
    return device
