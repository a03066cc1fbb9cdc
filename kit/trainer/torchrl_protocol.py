"""The side of a trainer that hooks see: TorchRL's protocol."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Self

from tensordict import TensorDictBase

from kit.steps import SettingError, StepLedger
from kit.trainer.stages import Stages


class TorchRLProtocol:
    """What TorchRL's hook objects find in a trainer, so that they register unchanged.

    Args:
        ledger: what has happened, which hooks read under TorchRL's names.
        loss_module: what hooks find under this name; ``None`` where there is none.
        updates: whether the run makes gradient steps at all.

    Attributes:
        stages: what is registered.
        registered_modules: what is kept in checkpoints on behalf of hooks, by name.
        stop_reason: why the run ended before its plan; ``None`` otherwise.
    """

    def __init__(self, ledger: StepLedger, loss_module: Any, *, updates: bool) -> None:
        self.ledger = ledger
        self.loss_module = loss_module
        self.stages = Stages(updates=updates)
        self.stop_reason: str | None = None
        self._stop_training = False
        self._skip_phase = False
        self._log_dict: defaultdict[str, list[Any]] = defaultdict(list)
        self.registered_modules: dict[str, Any] = {}

    def add(self, hook: Any, name: str | None = None) -> Self:
        """Register a hook object under ``name``, or under the one that it chooses.

        Raises:
            SettingError: if another hook has this name, or it is none.
        """
        if not callable(getattr(hook, "register", None)):
            works = "give an object with register(trainer, name), or use register_op(stage, f)"
            raise SettingError("hook", hook, "is no hook", works)
        if name is None and not _names_itself(hook):
            name = "".join("_" + c.lower() if c.isupper() else c for c in type(hook).__name__)[1:]
        if name is None:
            hook.register(self)
        else:
            hook.register(self, name)
        return self

    def register_op(self, dest: str, op: Callable[..., Any], **kwargs: Any) -> None:
        """Register a function at a stage; see ``kit.trainer.stages.STAGES`` and docs/hooks.md.

        Raises:
            SettingError: if the stage does not exist or never runs, or if the function cannot be
                called as it does.
        """
        self.stages.register(dest, op, **kwargs)

    register_hook = register_op

    def register_module(self, module_name: str, module: Any) -> None:
        """Keep ``module``'s state in checkpoints.

        Raises:
            SettingError: if the name is used already.
        """
        if module_name in self.registered_modules:
            raise SettingError(
                "hook",
                module_name,
                "is registered already",
                "choose another name: add(hook, name)",
            )
        self.registered_modules[module_name] = module

    def request_stop(self, reason: str | None = None) -> None:
        """End the run after this iteration."""
        self._stop_training = True
        self.stop_reason = reason or "a hook asked for it"

    def skip_rest_of_update(self) -> None:
        """End this update phase after this epoch; what was due is counted as skipped."""
        self._skip_phase = True

    def compute_loss(self, sub_batch: TensorDictBase, method: str | None = None) -> Any:
        """Return the losses of a minibatch, or what a method of the loss module makes of it."""
        if method is None:
            return self.loss_module(sub_batch)
        return getattr(self.loss_module, method)(sub_batch)

    @property
    def policy_steps(self) -> int:
        """Policy steps so far, in all processes."""
        return self.ledger.policy_steps

    @property
    def collected_frames(self) -> int:
        """Policy steps so far, under the name that TorchRL's hooks read."""
        return self.ledger.policy_steps

    @property
    def _optim_count(self) -> int:
        """Gradient steps of this process so far, under the name that TorchRL's hooks read."""
        return self.ledger.local_gradient_steps


def _names_itself(hook: Any) -> bool:
    """Whether a hook has a name of its own when ``register`` is called without one."""
    name = inspect.signature(hook.register).parameters.get("name")
    return name is not None and name.default is not inspect.Parameter.empty
