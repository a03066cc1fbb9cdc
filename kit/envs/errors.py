"""Faults of environments, in one line each."""

from __future__ import annotations

from kit.steps.errors import place_of

FAULTS = (Exception, SystemExit)
"""Errors of environments; simulators exit the process where they cannot continue."""


class EnvError(RuntimeError):
    """An environment raised, returned something impossible, or its process died.

    Args:
        name: id of the environment.
        env: number of the environment, from 0; ``None`` where only the whole vector is known.
        what: what happened, as the end of a sentence.
        policy_step: policy steps that it had taken in this process, if known.
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
        """The same fault with the policy steps before it, unless they are known."""
        known = policy_step if self.policy_step is None else self.policy_step
        return EnvError(self.name, self.env, self.what, known)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.name, self.env, self.what, self.policy_step)


def fault_of(name: str, env: int | None, error: BaseException, call: str) -> EnvError:
    """Return an error raised in ``call`` as a fault of the environment ``name``."""
    if isinstance(error, EnvError):
        return error
    what = f"{call} raised {type(error).__name__}: {error}{place_of(error)}"
    return EnvError(name, env, what)
