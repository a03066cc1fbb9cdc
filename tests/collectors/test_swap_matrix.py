"""Every on-policy loss with every kind of collector: it runs as planned, or the reason is given."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from kit.collectors import COLLECTORS
from kit.experiment import EnvConfig, OnPolicySteps
from kit.steps import SettingError

IMAGES = {
    "env": EnvConfig("kit.testing.envs:kit/Glimpse-v0", 4), "preprocess": "none",
    "frame_stack": 1, "convolutions": [[4, 3, 2]],
}  # fmt: skip
LEARNERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        loss: ("ppo", {"loss": loss})
        for loss in ("ClipPPOLoss", "PPOLoss", "A2CLoss", "ReinforceLoss")
    },
    "KLPENPPOLoss": ("ppo", {"loss": "kit.losses:KLPENPPOLoss"}),
    "A2C": ("a2c", {}),
    "REINFORCE": ("reinforce", {}),
    "REINFORCE without a baseline": ("reinforce", {"baseline": False}),
    "IMPALA": ("impala", {}),
    "TRPO": ("trpo", {"critic_epochs": 1}),
    "recurrent PPO": ("ppo_recurrent", {"recurrent_size": 4}),
    "PPO from images": ("ppo_pixels", IMAGES),
    "SVPG": ("svpg", {"num_particles": 2}),
    "SVPG of PPO": ("svpg", {"num_particles": 2, "loss": "ClipPPOLoss"}),
}
"""Recipe and settings."""

PARTICLES = "steps.steps_per_env=None.* cannot be divided evenly among"
REFUSED = {
    ("PPO from images", "tensor"): "needs an environment written in torch, not",
    ("SVPG", "episode"): PARTICLES,
    ("SVPG of PPO", "episode"): PARTICLES,
}
"""What does not go together, and why."""


def trained(learner: str, collector: str) -> Any:
    """Two iterations, whole episodes where the collector collects these."""
    recipe, own = LEARNERS[learner]
    module = importlib.import_module(f"recipes.{recipe}")
    whole = collector == "episode"
    amount = {"steps_per_env": None, "min_steps": 32} if whole else {"steps_per_env": 8}
    sequences = recipe == "ppo_recurrent"
    one_step = recipe == "trpo"
    steps = OnPolicySteps(
        **amount, total_policy_steps=64, update_epochs=1 if one_step else 2, evaluation_every=None,
        evaluation_episodes=1, minibatch_size=4 if sequences else None if whole or one_step else 16,
        sequence_length=4 if sequences else None,
    )  # fmt: skip
    vectorization = "tensor" if collector == "tensor" else "sync"
    env = EnvConfig("CartPole-v1", 4, vectorization=vectorization)
    settings = {"env": env, "steps": steps, "hidden_sizes": [4], "progress": False, "log_dir": None}
    trainer = module.build(module.Config(**{**settings, "collector": collector, **own}))
    before = {name: value.clone() for name, value in trainer.loss_module.state_dict().items()}
    ledger = trainer.run()
    assert type(trainer.collector) is COLLECTORS[collector]
    assert ledger.compare(trainer.plan) == []
    assert ledger.policy_steps >= 64
    after = trainer.loss_module.state_dict()
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(before[name], value) for name, value in after.items())
    return trainer


@pytest.mark.parametrize("learner", list(LEARNERS))
@pytest.mark.parametrize(
    "collector",
    [
        pytest.param(n, marks=pytest.mark.nightly if n in ("async", "ray") else ())
        for n in COLLECTORS
    ],
)
def test_loss_trains_with_collector_or_raises_setting_error(learner, collector):
    if (learner, collector) not in REFUSED:
        trained(learner, collector)
        return
    with pytest.raises(SettingError, match=REFUSED[learner, collector]):
        trained(learner, collector)
