"""RL components on TorchRL and tensordict, with exact step accounting.

``kit`` exports the names that most recipes need. All other public names are in packages such as
``kit.modules`` or ``kit.buffers``. A name is public if it is in the ``__all__`` of ``kit`` or of
one of its packages. ``import kit`` does not import these packages; they are imported on first
access. ``kit.steps`` works without torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kit.lazy import lazy

if TYPE_CHECKING:
    from kit.advantages import GAE, RewardToGo, VTrace
    from kit.buffers import make_replay_buffer
    from kit.cli.launch import main
    from kit.collectors import VectorCollector, make_collector
    from kit.config import (
        ActorCriticConfig,
        CriticNetworkConfig,
        EnvConfig,
        FittedCriticConfig,
        NetworkConfig,
        OfflineConfig,
        OffPolicyConfig,
        OnPolicyConfig,
        ReplayConfig,
    )
    from kit.envs import make_env
    from kit.experiment import Experiment
    from kit.hooks import (
        AnnealLearningRate,
        Evaluator,
        Hook,
        StopWhen,
        TargetKL,
        anneal_coefficients,
        anneal_epsilon,
        fit_critic,
    )
    from kit.modules import (
        EpsilonGreedy,
        GaussianNoise,
        make_action_value,
        make_actor,
        make_actor_critic,
        make_q_network,
        make_value,
        parameter_groups,
    )
    from kit.runs import SavedRun, compare
    from kit.steps import (
        OfflineSteps,
        OffPolicySteps,
        OnPolicySteps,
        SequenceSteps,
        SettingError,
        StepLedger,
        StepPlan,
    )
    from kit.trainer import Trainer
    from kit.update import TrustRegion, Update, make_target_updater

__all__ = [
    "GAE", "ActorCriticConfig", "AnnealLearningRate", "CriticNetworkConfig", "EnvConfig",
    "EpsilonGreedy", "Evaluator", "Experiment", "FittedCriticConfig", "GaussianNoise", "Hook",
    "NetworkConfig", "OffPolicyConfig", "OffPolicySteps", "OfflineConfig", "OfflineSteps",
    "OnPolicyConfig", "OnPolicySteps", "ReplayConfig", "RewardToGo", "SavedRun", "SequenceSteps",
    "SettingError", "StepLedger", "StepPlan", "StopWhen", "TargetKL", "Trainer", "TrustRegion",
    "Update", "VTrace", "VectorCollector", "anneal_coefficients", "anneal_epsilon", "compare",
    "fit_critic", "main", "make_action_value", "make_actor", "make_actor_critic", "make_collector",
    "make_env", "make_q_network", "make_replay_buffer", "make_target_updater", "make_value",
    "parameter_groups",
]  # fmt: skip

__version__ = "0.1.0"

# Makes the built-in recipes importable. They are inside kit in a wheel, next to kit in a clone.
_PACKAGE = Path(__file__).parent
RECIPES_ROOT = _PACKAGE / "builtin" if (_PACKAGE / "builtin").is_dir() else _PACKAGE.parent
if str(RECIPES_ROOT) not in sys.path:
    sys.path.append(str(RECIPES_ROOT))

__getattr__, __dir__ = lazy(__name__)
