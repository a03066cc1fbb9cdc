"""Start Ray, or connect to a cluster."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from kit.steps import SettingError

_ATTEMPTS = 3
_OBJECT_STORE = 100 * 2**20
"""Bytes of the object store of a local Ray. Sweeps need little more than Ray's minimum."""


def import_ray(field: str, value: Any) -> Any:
    """Import Ray.

    Args:
        field: setting that needs Ray, for error messages.
        value: value of the setting.

    Raises:
        SettingError: if Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        advice = "Install it: pip install 'torchrl-kit[ray]'"
        raise SettingError(field, value, "Ray is not installed", advice) from None
    return ray


def start_ray(field: str, value: Any, **local: Any) -> None:
    """Connect to the cluster at ``RAY_ADDRESS``, or start Ray on this machine.

    There are up to three attempts, because Ray gives up after 30 seconds on a loaded machine.

    Args:
        field: setting that needs Ray, for error messages.
        value: value of the setting.
        **local: arguments for ``ray.init`` if it starts Ray.

    Raises:
        SettingError: if Ray is not installed, or does not start.
    """
    ray = import_ray(field, value)
    # Without this, Ray warns that a later version will stop hiding GPUs from tasks without GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = os.environ.get("RAY_ADDRESS")
    options = {} if address else {"include_dashboard": False, **local}
    error: Exception | None = None
    for _ in range(_ATTEMPTS):
        try:
            ray.init(address or "local", logging_level=logging.ERROR, **options)
            return
        except Exception as failure:  # Ray raises plain exceptions
            error = failure
            ray.shutdown()
    text = " ".join(str(error).split()).rstrip(".")
    if address:
        reason = f"Connecting to the Ray cluster at RAY_ADDRESS={address} failed: {text}"
        raise SettingError(field, value, reason, "Start a cluster with: ray start --head")
    reason = f"Ray did not start in {_ATTEMPTS} attempts: {text}"
    raise SettingError(field, value, reason, "Try again when the machine is less busy")


@contextlib.contextmanager
def ray_session(field: str, value: Any) -> Iterator[None]:
    """Use Ray within the context.

    A Ray session of the caller is used and kept. Otherwise, :func:`start_ray` starts one, which
    ends with the context.

    Args:
        field: setting that needs Ray, for error messages.
        value: value of the setting.

    Raises:
        SettingError: if Ray is not installed, or does not start.
    """
    ray = import_ray(field, value)
    if ray.is_initialized():
        yield
        return
    try:
        start_ray(field, value, object_store_memory=_OBJECT_STORE)
        yield
    finally:
        ray.shutdown()
