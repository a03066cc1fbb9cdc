"""Things that happen at stages of the loop.

Rows of metrics, CSV files, episode statistics and checkpoints are part of the trainer; these are
what can be added to it.
"""

from __future__ import annotations

from kit.hooks.annealing import (
    Anneal,
    AnnealExploration,
    AnnealLearningRate,
    EndOfExploration,
    anneal_coefficients,
    anneal_epsilon,
)
from kit.hooks.base import Hook
from kit.hooks.console import Console
from kit.hooks.critic import FitCritic, fit_critic
from kit.hooks.curve import LearningCurve, draw_curve
from kit.hooks.evaluation import Evaluator
from kit.hooks.guards import NaNGuard, NonFiniteError, StopWhen, TargetKL, TimeLimit
from kit.hooks.policy import BestPolicy, SavePolicy
from kit.hooks.rewards import ScaleReward, SignReward
from kit.hooks.video import RecordVideo

__all__ = [
    "Anneal", "AnnealExploration", "AnnealLearningRate", "BestPolicy", "Console",
    "EndOfExploration", "Evaluator", "FitCritic", "Hook", "LearningCurve", "NaNGuard", "NonFiniteError",
    "RecordVideo", "SavePolicy", "ScaleReward", "SignReward", "StopWhen", "TargetKL", "TimeLimit",
    "anneal_coefficients", "anneal_epsilon", "draw_curve", "fit_critic",
]  # fmt: skip
