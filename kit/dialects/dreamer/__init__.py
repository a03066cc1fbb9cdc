"""Dreamer: the official DreamerV3, and Algorithm 1 of the first paper."""

from __future__ import annotations

from kit.dialects.base import step_by_step
from kit.dialects.dreamer import counting, notes, rules
from kit.dialects.dreamer.settings import DreamerPaperSettings, DreamerSettings
from kit.steps.plan import StepPlan

__all__ = ["Dreamer", "DreamerPaper", "rules"]


class Dreamer(DreamerSettings):
    """Settings of the official DreamerV3, and their plan."""

    _plan = counting.to_plan
    _notes = notes.notes
    _from = staticmethod(counting.settings_from)


class DreamerPaper(DreamerPaperSettings):
    """Algorithm 1 of the first paper, and its plan."""

    _plan = counting.paper_plan
    _notes = notes.paper_notes
    _from = staticmethod(counting.paper_from)

    def interleaved(self) -> StepPlan:
        """The same experiment with the gradient steps spread over the policy steps.

        After the seed episodes come the same ``collect_interval`` gradient steps, as pretraining,
        and then as many for each ``policy_steps_per_episode``, one when it is due.
        """
        return step_by_step(self.to_plan())
