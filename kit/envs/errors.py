"""Errors raised by environments, formatted as a single line."""

from __future__ import annotations

from kit.steps.errors import place_of

FAULTS = (Exception, SystemExit)
"""Exceptions that environment code may raise. Simulators call ``sys.exit`` on fatal errors."""


class EnvError(RuntimeError):
    """An environment raised an exception, returned invalid values, or its process died.

    Args:
        name: id of the environment.
        env: index of the environment; ``None`` if the failure concerns the whole vector.
        what: description of the failure, written after the environment's name and a colon.
        policy_step: policy steps taken in this process before the failure, if recorded.
    """

    def __init__(
        self, name: str, env: int | None, what: str, policy_step: int | None = None
    ) -> None:
        what = " ".join(what.split())
        self.name, self.env, self.what, self.policy_step = name, env, what, policy_step
        where = "" if env is None else f", env {env}"
        when = "" if policy_step is None else f", after {policy_step} policy steps"
        super().__init__(f"environment {name}{where}{when}: {what}")

    def at(self, policy_step: int) -> EnvError:
        """Return a copy of this error with ``policy_step`` filled in if it was missing."""
        step = policy_step if self.policy_step is None else self.policy_step
        return EnvError(self.name, self.env, self.what, step)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.name, self.env, self.what, self.policy_step)


def fault_of(name: str, env: int | None, error: BaseException, call: str) -> EnvError:
    """Return an exception raised in ``call`` as an :class:`EnvError` of environment ``name``."""
    if isinstance(error, EnvError):
        return error
    text = str(error).partition(" was raised from the environment creator for")[0]  # Gymnasium's
    what = f"{call} raised {type(error).__name__}: {text}{place_of(error)}"
    return EnvError(name, env, what)
