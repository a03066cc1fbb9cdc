"""Environment errors with single-line messages."""

from __future__ import annotations

from kit.steps.errors import place_of

FAULTS = (Exception, SystemExit)
"""Exceptions treated as environment failures; some simulators fail with ``sys.exit``."""


class EnvError(RuntimeError):
    """Raised if an environment raises an exception, returns invalid values or crashes.

    Args:
        name: id of the environment.
        env: index of the environment; ``None`` if the failure concerns all environments.
        what: description of the failure, appended to the environment's name in the message.
        policy_step: number of policy steps before the failure in this process; ``None``: unknown.
        worker: index of the worker process; ``None``: the environment runs in this process.
    """

    def __init__(
        self,
        name: str,
        env: int | None,
        what: str,
        policy_step: int | None = None,
        worker: int | None = None,
    ) -> None:
        what = " ".join(what.split())
        self.name, self.env, self.what, self.policy_step = name, env, what, policy_step
        self.worker = worker
        where = "" if env is None else f", env {env}"
        where += "" if worker is None else f", worker {worker}"
        when = "" if policy_step is None else f", after {policy_step} policy steps"
        super().__init__(f"environment {name}{where}{when}: {what}")

    def at(self, policy_step: int) -> EnvError:
        """Return a copy of this error with ``policy_step`` filled in if it was missing."""
        step = policy_step if self.policy_step is None else self.policy_step
        return EnvError(self.name, self.env, self.what, step, self.worker)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.name, self.env, self.what, self.policy_step, self.worker)


def fault_of(name: str, env: int | None, error: BaseException, call: str) -> EnvError:
    """Convert an exception raised in ``call`` to an :class:`EnvError` for environment ``name``."""
    if isinstance(error, EnvError):
        return error
    text = str(error).partition(" was raised from the environment creator for")[0]  # Gymnasium's
    what = f"{call} raised {type(error).__name__}: {text}{place_of(error)}"
    return EnvError(name, env, what)
