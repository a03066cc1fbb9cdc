"""What MuJoCo says while it reads a model. Imports no torch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from gymnasium.envs.registration import EnvSpec


@contextlib.contextmanager
def told_once(spec: EnvSpec) -> Iterator[None]:
    """Keep MuJoCo's own output out of the terminal and out of the working folder.

    MuJoCo prints what it warns of for each copy and appends it to a file where the program runs.
    Gymnasium's models use a deprecated attribute, about which a user can do nothing; everything
    else becomes a Python warning, which is shown once.

    Args:
        spec: of the environment that is made; nothing happens if it is not one of MuJoCo's.
    """
    if "mujoco" not in str(spec.entry_point):
        yield
        return
    try:
        import mujoco
    except ImportError:  # making the environment will say so
        yield
        return
    texts: list[str] = []
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(texts.append)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)
        for text in texts:
            if "deprecated" not in text:
                warnings.warn(f"MuJoCo, {spec.id}: {text}", stacklevel=2)
