"""Noticing that a policy has diverged, before its environments are blamed for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from kit.envs.spaces import Key


class PolicyFault(RuntimeError):
    """A policy wrote NaN.

    Args:
        key: of what it wrote.
        copy: number of the copy for which it acted, from 0.
        policy_step: policy steps that this copy had taken.
    """

    def __init__(self, key: Key, copy: int, policy_step: int) -> None:
        self.key, self.copy, self.policy_step = key, copy, policy_step
        name = key if isinstance(key, str) else ".".join(key)
        super().__init__(
            f"policy, copy {copy}, after {policy_step} policy steps: wrote NaN as {name} for an "
            "observation without NaN; go on from an earlier checkpoint with a smaller learning_rate"
        )

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.key, self.copy, self.policy_step)


def check_policy(
    written: Mapping[Key, Tensor],
    observation: Mapping[Key, Tensor],
    actions: Iterable[Key],
    taken: int,
) -> None:
    """Refuse NaN in actions and log-probabilities, where they are on the host.

    Args:
        written: by the policy, ``[num_envs, steps, ...]``.
        observation: what it acted on, ``[num_envs, steps, ...]``.
        actions: their keys.
        taken: policy steps of each copy before these.

    Raises:
        PolicyFault: at the first one, unless an observation was NaN by then.
    """
    chosen = set(actions)
    for key, value in written.items():
        name = key if isinstance(key, str) else key[-1]
        if key not in chosen and not name.endswith("log_prob"):
            continue
        if value.is_cuda or not value.is_floating_point() or not value.isnan().any():
            continue
        steps = value.isnan().reshape(*value.shape[:2], -1).any(-1).T  # [steps, num_envs]
        step, copy = steps.nonzero()[0].tolist()
        # From a NaN observation on, one that remembers writes NaN for good ones, too.
        if not any(seen[:, : step + 1].isnan().any() for seen in observation.values()):
            raise PolicyFault(key, copy, taken + step)
