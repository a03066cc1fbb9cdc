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
        if value is not None:
            return _usable(field, value)
    return torch.device("cpu")


def _usable(field: str, value: Any) -> torch.device:
    try:
        torch.zeros(1, device=value).item()
    except Exception as error:  # each backend of PyTorch has its own
        reason, works = str(error).splitlines()[0], ["cpu"]
        if isinstance(error, TypeError):
            reason = "it does not name one"
        if reason.startswith("Could not run"):
            reason = "PyTorch has no backend for it here"
        if reason.startswith("Expected one of"):
            reason = "PyTorch has no device of this name"
        if str(value).startswith("gpu"):
            works = [str(value).replace("gpu", "cuda"), *works]
        raise SettingError(field, value, f"cannot be used: {reason}", works) from None
    return torch.device(value)
