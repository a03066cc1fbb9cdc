"""Hook for exploration noise that stays the same for several steps."""

from __future__ import annotations

from typing import ClassVar

from kit.hooks.base import Kind, KitHook
from kit.modules.gsde import StateDependentExploration


class SampleNoise(KitHook):
    """Samples a policy's state-dependent noise before each batch.

    The noise comes from the trainer's random numbers, which checkpoints contain. It is sent to an
    asynchronous collector together with the weights, so the first batches, which are collected with
    the same weights, also have the same noise.

    Args:
        policy: policy that collects the batches.
    """

    kind: Kind = "step"
    operations: ClassVar = {"pre_collect": "sample"}

    def __init__(self, policy: StateDependentExploration) -> None:
        self.policy = policy

    def sample(self) -> None:
        """Sample new noise for all environments."""
        self.policy.sample()
