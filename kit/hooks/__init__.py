"""Hooks that a trainer calls at stages of the training loop.

The trainer itself already logs metrics and episode statistics, writes CSV files and saves
checkpoints. Hooks add optional behaviour.
"""

from __future__ import annotations

from kit.hooks.annealing import (
    Anneal,
    AnnealExploration,
    AnnealLearningRate,
    EndOfExploration,
    anneal_coefficients,
    anneal_epsilon,
    anneal_learning_rates,
)
from kit.hooks.base import Hook
from kit.hooks.console import Console
from kit.hooks.critic import FitCritic, fit_critic
from kit.hooks.curve import LearningCurve, draw_curve
from kit.hooks.evaluation import Evaluator
from kit.hooks.exploration import SampleNoise
from kit.hooks.guards import NaNGuard, NonFiniteError, StopWhen, TargetKL, TimeLimit
from kit.hooks.policy import BestPolicy, SavePolicy
from kit.hooks.rewards import ScaleReward, SignReward
from kit.hooks.video import RecordVideo

__all__ = [
    "Anneal", "AnnealExploration", "AnnealLearningRate", "BestPolicy", "Console",
    "EndOfExploration", "Evaluator", "FitCritic", "Hook", "LearningCurve", "NaNGuard",
    "NonFiniteError", "RecordVideo", "SampleNoise", "SavePolicy", "ScaleReward", "SignReward",
    "StopWhen", "TargetKL", "TimeLimit", "anneal_coefficients", "anneal_epsilon",
    "anneal_learning_rates", "draw_curve", "fit_critic",
]  # fmt: skip
