"""Exploration noise that never makes the host read a tensor.

TorchRL's modules with the same arguments, keys and numbers. TorchRL first asks on the host whether
an action is within its bounds; here it is clipped in any case, so that a policy with noise runs on
the fast path of collectors. :class:`EpsilonGreedy` knows the environment's action mask.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Bounded
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import AdditiveGaussianModule, EGreedyModule, OrnsteinUhlenbeckProcessModule

from kit.modules.heads import action_masks


class _OnDevice:
    """A module whose spec moves with its buffers: TorchRL leaves it on the CPU."""

    buffers: Any
    _spec: Any

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[misc]
        if self._spec is not None:  # it may be given later
            self._spec = self._spec.to(next(self.buffers()).device)
        return self


class EpsilonGreedy(_OnDevice, EGreedyModule):  # type: ignore[misc, unused-ignore]
    """TorchRL's ``EGreedyModule``, whose random actions are allowed ones.

    Args:
        env: the environment, with one ``Discrete`` action. Where it has an observation
            ``action_mask``, ``[num_envs, choices]``, only choices that it allows are drawn.
        **kwargs: ``eps_init``, ``eps_end``, ``annealing_num_steps``, ``device``.
    """

    def __init__(self, env: Any, **kwargs: Any) -> None:
        key, spec = env.action_leaves[0].key, env.action_spec
        masks = action_masks(env, int(spec.n))
        mask = masks[0] if masks else None
        super().__init__(spec, action_key=key, action_mask_key=mask, **kwargs)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Replace actions, each with probability epsilon, by random ones."""
        if self.action_mask_key is None:
            return super().forward(tensordict)  # type: ignore[no-any-return, unused-ignore]
        if exploration_type() not in (ExplorationType.RANDOM, None):
            return tensordict
        action, allowed = tensordict.get(self.action_key), tensordict.get(self.action_mask_key)
        scores = torch.rand(allowed.shape, device=action.device).masked_fill(allowed == 0, -1.0)
        explores = torch.rand(action.shape, device=action.device) < self.eps
        return tensordict.set(self.action_key, torch.where(explores, scores.argmax(-1), action))


class GaussianNoise(_OnDevice, AdditiveGaussianModule):  # type: ignore[misc, unused-ignore]
    """TorchRL's ``AdditiveGaussianModule``: noise ``sigma * N(mean, std)``, clipped to the bounds.

    Args:
        spec: spec of the action; bounded.
        std: unit of sigma: a number, or one for each dimension of the action, as
            :func:`half_range`.
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
    """TorchRL's ``OrnsteinUhlenbeckProcessModule``, clipped to the bounds.

    Args:
        spec: spec of the action; bounded.
        **kwargs: ``eps_init``, ``eps_end``, ``annealing_num_steps``, ``theta``, ``mu``, ``sigma``,
            ``dt``, ``x0``, ``sigma_min``, ``n_steps_annealing``, ``action_key``, ``is_init_key``,
            ``device``.
    """

    def __init__(self, *, spec: Any, **kwargs: Any) -> None:
        # TorchRL adds entries, which the spec of an environment does not allow.
        super().__init__(spec=spec.clone(), safe=False, **kwargs)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add noise to the action, and write the process it comes from."""
        tensordict = super().forward(tensordict)
        key = self.ou.key
        return tensordict.set(key, _clipped(tensordict.get(key), self.spec[key]))


def half_range(env: Any, device: torch.device | str = "cpu") -> float | Tensor:
    """Half the distance between the bounds of actions: the unit in which TD3's authors give noise.

    Args:
        env: the environment, with one continuous action, which has bounds.
        device: of the tensor.

    Returns:
        A number where it is that of all dimensions, else a tensor with the shape of the action.
    """
    space = env.action_spec[0].space
    half = ((space.high - space.low) / 2).to(device)
    first = float(half.flatten()[0])
    return first if bool((half == first).all()) else half


def _clipped(action: Tensor, spec: Any) -> Tensor:
    if not isinstance(spec, Bounded):
        return action
    return torch.minimum(torch.maximum(action, spec.space.low), spec.space.high)
