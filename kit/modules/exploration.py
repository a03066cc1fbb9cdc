"""Exploration noise modules that run without synchronising with the device.

The modules have the same arguments, keys and random numbers as TorchRL's modules. TorchRL's modules
check on the host whether actions are within their bounds. These modules always clip instead, so
collectors can run noisy policies on their fast path. :class:`EpsilonGreedy` also respects action
masks.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import AdditiveGaussianModule, EGreedyModule, OrnsteinUhlenbeckProcessModule

from kit.modules.heads import action_masks


class _OnDevice:
    """Mixin that, unlike TorchRL, keeps a module's spec on the same device as its buffers."""

    buffers: Any
    _spec: Any

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[misc]
        if self._spec is not None:  # the spec may be set after construction
            self._spec = self._spec.to(next(self.buffers()).device)
        return self


class EpsilonGreedy(_OnDevice, EGreedyModule):  # type: ignore[misc, unused-ignore]
    """TorchRL's ``EGreedyModule`` for environments with action masks.

    Args:
        env: environment with one ``Discrete`` action. If it has an observation ``action_mask``,
            ``[num_envs, choices]``, random actions are drawn from the allowed actions.
        **kwargs: ``eps_init``, ``eps_end``, ``annealing_num_steps``, ``device``.
    """

    def __init__(self, env: Any, **kwargs: Any) -> None:
        key, spec = env.action_leaves[0].key, env.action_spec
        masks = action_masks(env, int(spec.n))
        mask = masks[0] if masks else None
        super().__init__(spec, action_key=key, action_mask_key=mask, **kwargs)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Replace each action by a random action with probability epsilon."""
        if self.action_mask_key is None:
            return super().forward(tensordict)  # type: ignore[no-any-return, unused-ignore]
        if exploration_type() not in (ExplorationType.RANDOM, None):
            return tensordict
        action, allowed = tensordict.get(self.action_key), tensordict.get(self.action_mask_key)
        scores = torch.rand(allowed.shape, device=action.device).masked_fill(allowed == 0, -1.0)
        explores = torch.rand(action.shape, device=action.device) < self.eps
        return tensordict.set(self.action_key, torch.where(explores, scores.argmax(-1), action))


class GaussianNoise(_OnDevice, AdditiveGaussianModule):  # type: ignore[misc, unused-ignore]
    """Variant of ``AdditiveGaussianModule`` that always clips ``action + sigma * N(mean, std)``.

    Args:
        spec: action spec; if it is bounded, noisy actions are clipped to the bounds.
        std: standard deviation of the noise for ``sigma = 1``, scalar or one per action dimension;
            see :func:`half_range`.
        **kwargs: ``sigma_init``, ``sigma_end``, ``annealing_num_steps``, ``mean``, ``action_key``,
            ``device``.
    """

    def __init__(self, *arguments: Any, std: float | Tensor = 1.0, **kwargs: Any) -> None:
        super().__init__(*arguments, **kwargs)
        self.std = torch.as_tensor(std, device=self.mean.device)

    def _add_noise(self, action: Tensor) -> Tensor:
        mean, std = self.mean.expand(action.shape), self.std.expand(action.shape)
        noise = torch.normal(mean=mean, std=std).to(action.device)
        return _clipped(action + noise * self.sigma, self.spec[self.action_key])


class OrnsteinUhlenbeckNoise(_OnDevice, OrnsteinUhlenbeckProcessModule):  # type: ignore[misc, unused-ignore]
    """Variant of TorchRL's ``OrnsteinUhlenbeckProcessModule`` that clips actions to the bounds.

    Args:
        spec: action spec; if it is bounded, noisy actions are clipped to the bounds.
        **kwargs: ``eps_init``, ``eps_end``, ``annealing_num_steps``, ``theta``, ``mu``, ``sigma``,
            ``dt``, ``x0``, ``sigma_min``, ``n_steps_annealing``, ``action_key``, ``is_init_key``,
            ``device``.
    """

    def __init__(self, *, spec: Any, **kwargs: Any) -> None:
        # Cloned because TorchRL adds entries to the spec, and an environment's spec is locked.
        super().__init__(spec=spec.clone(), safe=False, **kwargs)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add noise to the action and write the state of the noise process."""
        tensordict = super().forward(tensordict)
        key = self.ou.key
        return tensordict.set(key, _clipped(tensordict.get(key), self.spec[key]))


def make_noise(env: Any, noise_type: str, scale: float) -> nn.Module:
    """Create the module that adds exploration noise to deterministic actions.

    Args:
        env: environment with one bounded continuous action.
        noise_type: ``normal``: independent Gaussian noise; ``ou``: an Ornstein-Uhlenbeck process
            with theta 0.15 and time step 0.01, as in Stable-Baselines3, which is reset at the start
            of each episode.
        scale: standard deviation (``normal``) or sigma (``ou``), relative to half the action range.
    """
    spec, unit = env.full_action_spec, half_range(env)
    if noise_type == "ou":
        return OrnsteinUhlenbeckNoise(spec=spec, eps_init=1.0, eps_end=1.0, sigma=scale * unit)
    return GaussianNoise(spec=spec, sigma_init=scale, sigma_end=scale, std=unit)


def half_range(env: Any, device: torch.device | str = "cpu") -> float | Tensor:
    """Return half the width of the action range, the unit of TD3's noise parameters.

    Args:
        env: environment with one bounded continuous action.
        device: device of the returned tensor.

    Returns:
        A float if all dimensions have the same range, otherwise a tensor of the action's shape.
    """
    space = env.action_spec[0].space
    half = ((space.high - space.low) / 2).to(device)
    first = float(half.flatten()[0])
    return first if bool((half == first).all()) else half


def _clipped(action: Tensor, spec: Any) -> Tensor:
    if not isinstance(spec, Bounded):
        return action
    return torch.minimum(torch.maximum(action, spec.space.low), spec.space.high)
