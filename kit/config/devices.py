"""Devices that settings name."""

from __future__ import annotations

from typing import Any

import torch

from kit.steps import SettingError


def usable_device(**given: Any) -> torch.device:
    """The first device that is given, by name of its setting; the CPU if all are ``None``.

    Raises:
        SettingError: if PyTorch cannot use it.
    """
    for field, value in given.items():
        if value is None:
            continue
        try:
            torch.zeros(1, device=value).item()
        except Exception as error:  # each backend of PyTorch has its own
            why = f"cannot be used: {str(error).splitlines()[0]}"
            raise SettingError(field, value, why, ["cpu"]) from None
        return torch.device(value)
    return torch.device("cpu")
