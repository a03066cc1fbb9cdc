"""Validation of device settings."""

from __future__ import annotations

from typing import Any

import torch

from kit.steps import SettingError


def usable_device(**devices: Any) -> torch.device:
    """Return the first device that is not ``None``, or the CPU.

    Args:
        **devices: devices, keyed by setting name.

    Raises:
        SettingError: if PyTorch cannot use the device.
    """
    for field, device in devices.items():
        if device is not None:
            return _usable(field, device)
    return torch.device("cpu")


def _usable(field: str, device: Any) -> torch.device:
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # each PyTorch backend raises a different type
        reason, near = f"PyTorch cannot use it: {str(error).splitlines()[0]}", ["cpu"]
        if isinstance(error, TypeError):
            reason = "This is not a device"
        if str(error).startswith("Could not run"):
            reason = "PyTorch has no backend for this device"
        if str(error).startswith("Expected one of"):
            reason = "PyTorch has no device with this name"
        if str(device).startswith("gpu"):
            near = [str(device).replace("gpu", "cuda"), *near]
        raise SettingError(field, device, reason, near) from None
    return torch.device(device)
