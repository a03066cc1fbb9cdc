"""The vocabulary of pyrado, the Python side of SimuRLacra (https://github.com/famura/SimuRLacra)."""

from __future__ import annotations

from kit.dialects.pyrado import counting, notes
from kit.dialects.pyrado.settings import GAE as GAE
from kit.dialects.pyrado.settings import PyradoSettings
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan


class Pyrado(PyradoSettings):
    """Settings of pyrado's step-based algorithms, and their plan."""

    _plan = counting.to_plan
    _notes = notes.notes
    _from = staticmethod(counting.settings_from)

    def after_reset(self) -> StepPlan:
        """The run that follows a ``reset()``: the emptied memory is filled once more.

        Raises:
            SettingError: for DQL in version 7c48d66, whose ``reset`` fails.
        """
        plan = self.to_plan()
        if plan.on_policy:
            return plan
        if self.resolved().algo == "dql" and self.version == "7c48d66":
            why = "cannot be reset: its exploration has no reset_expl_params"
            raise SettingError("algo", "dql", why, ["sac"])
        return plan.replace(prefill_random=not self.use_trained_policy_for_refill)
