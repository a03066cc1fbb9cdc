"""Generalised state-dependent exploration, gSDE (Raffin et al. 2022).

TorchRL's ``gSDEModule`` reads its noise from the batch, where an environment transform writes it
once per episode, and bounds the standard deviation differently, so it cannot repeat other
libraries' runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, exploration_type

from kit.modules.distributions import Normal, TanhNormal
from kit.modules.heads import Parameters, bounds_of, only_action
from kit.modules.networks import linear

_LARGEST_MEAN = 2.0
"""Bound for means before the tanh, as in Stable-Baselines3."""
_LEAST_VARIANCE = 1e-6


class StateDependent(Parameters):
    """Head for actions with state-dependent exploration noise.

    For features ``x``, the noise is ``x @ E``. The entries of the matrix ``E`` are normally
    distributed with standard deviations ``s = exp(log_std)``. The standard deviation of an action
    is therefore ``sqrt(x^2 @ s^2)``.

    Args:
        features: number of features.
        shape: shape of the action.
        initial_log_std: initial value of all entries of ``log_std``.
        gain: gain of the orthogonal weights of the mean; ``None``: PyTorch's initialisation.
        bounds: bounds of the action. Actions are then squashed to the bounds, means before the tanh
            are clipped to [-2, 2], and the standard deviation also trains the features, as in
            Stable-Baselines3's SAC. ``None``: as in Stable-Baselines3's PPO and A2C.
        expln: whether ``s = 1 + log(1 + log_std)`` for positive entries of ``log_std``.
    """

    names = ("loc", "scale")

    def __init__(
        self,
        features: int,
        shape: Sequence[int],
        initial_log_std: float,
        gain: float | None = None,
        bounds: tuple[Tensor, Tensor] | None = None,
        expln: bool = False,
    ) -> None:
        self.distribution = Normal if bounds is None else TanhNormal
        event: dict[str, Any] = {"event_dim": len(shape)}
        if bounds is not None:
            event = {"event_dims": len(shape), "low": bounds[0], "high": bounds[1]}
        super().__init__(features, **event)
        size = math.prod(shape)
        self.shape, self.squashes, self.expln = tuple(shape), bounds is not None, expln
        self.mean = linear(features, size, gain)
        self.log_std = nn.Parameter(torch.full((features, size), float(initial_log_std)))

    def forward(self, columns: Tensor) -> tuple[Tensor, ...]:
        """Return the mean (before the tanh) and the standard deviation of the action."""
        loc = self.mean(columns)
        if self.squashes:
            loc = loc.clamp(-_LARGEST_MEAN, _LARGEST_MEAN)
        else:
            columns = columns.detach()
        scale = (columns.square() @ self.std.square() + _LEAST_VARIANCE).sqrt()
        return loc.unflatten(-1, self.shape), scale.unflatten(-1, self.shape)  # type: ignore[no-untyped-call]

    @property
    def std(self) -> Tensor:
        """Standard deviations of the entries of exploration matrices, ``[features, actions]``."""
        if not self.expln:
            return self.log_std.exp()
        above = self.log_std.clamp(min=0).log1p() + 1
        return torch.where(self.log_std > 0, above, self.log_std.clamp(max=0).exp())

    def noise(self, columns: Tensor, matrices: Tensor) -> Tensor:
        """Return the noise for each row of features.

        Args:
            columns: features, ``[rows, features]``.
            matrices: standard normal numbers, ``[rows, features, actions]``.
        """
        noise = torch.einsum("rf,rfa->ra", columns, self.std * matrices)
        return noise.unflatten(-1, self.shape)  # type: ignore[no-any-return, no-untyped-call]


def state_dependent_head(
    env: Any, features: int, continuous: str, initial_log_std: float, gain: float | None
) -> dict[Any, Parameters]:
    """Create the head for the environment's only action, keyed by the action's key.

    Args:
        env: the environment.
        features: number of features.
        continuous: ``gsde``, ``tanh_gsde`` or ``tanh_gsde_expln``.
        initial_log_std: see :class:`StateDependent`.
        gain: see :class:`StateDependent`.

    Raises:
        SettingError: if the environment does not have exactly one Box action.
    """
    leaf = only_action(env, "Box", "state-dependent exploration", "gsde=false")
    spec = env.full_action_spec[leaf.key]
    bounds = None if continuous == "gsde" else bounds_of(leaf, spec)
    settings = initial_log_std, gain, bounds, continuous == "tanh_gsde_expln"
    return {leaf.key: StateDependent(features, spec.shape[1:], *settings)}


class StateDependentExploration(TensorDictModuleBase):
    """Policy that adds state-dependent noise to the mean of an actor's action.

    Each environment has its own exploration matrix, so that its noise is a fixed function of the
    state until the matrix is sampled again. :class:`~kit.hooks.SampleNoise` samples new matrices
    before each batch, so checkpoints need not contain them. Deterministic actions have no noise.

    Args:
        actor: policy from :func:`~kit.modules.make_actor` with ``continuous="gsde"``,
            ``"tanh_gsde"`` or ``"tanh_gsde_expln"``.
        num_envs: number of environments.
        sample_freq: number of steps after which new matrices are sampled within a batch; -1: only
            before each batch.
    """

    def __init__(self, actor: Any, num_envs: int, sample_freq: int = -1) -> None:
        super().__init__()
        self.actor, self.sample_freq = actor, sample_freq
        self.in_keys = actor.in_keys
        self.out_keys = [key for key in actor.out_keys if key != "features"]
        like = self.head.log_std
        matrices = torch.randn(num_envs, *like.shape, device=like.device)
        self.register_buffer("matrices", matrices, persistent=False)
        steps = torch.zeros((), dtype=torch.int64, device=like.device)
        self.register_buffer("steps", steps, persistent=False)  # since the last call to sample()

    @property
    def head(self) -> StateDependent:
        """Head of the actor."""
        head: StateDependent = self.actor.module[0][-1].module.heads[0]
        return head

    def sample(self) -> None:
        """Sample new exploration matrices for all environments."""
        self.matrices.normal_()
        self.steps.zero_()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action and the actor's other outputs."""
        if exploration_type() is not ExplorationType.RANDOM:
            return self.actor(tensordict)  # type: ignore[no-any-return]
        if self.sample_freq > 0:
            self._sample_if_due()
        network, sampling = self.actor.module
        outputs = network(tensordict.copy())
        dist = sampling.get_dist(outputs)
        action = dist.loc + self.head.noise(outputs.get("features"), self.matrices)
        if self.head.squashes:
            action = dist.squash(action)
        outputs.set(sampling.dist_sample_keys[0], action)
        if sampling.return_log_prob:
            outputs.set(sampling.log_prob_keys[0], dist.log_prob(action))
        return tensordict.update(outputs.select(*self.out_keys))

    def _sample_if_due(self) -> None:
        """Sample new matrices every ``sample_freq`` steps, without control flow on tensors."""
        due = (self.steps > 0) & (self.steps % self.sample_freq == 0)
        self.matrices.copy_(torch.where(due, torch.randn_like(self.matrices), self.matrices))
        self.steps.add_(1)


def with_gsde(actor: Any, env: Any, cfg: Any) -> Any:
    """Return the policy that collects data: ``actor``, with state-dependent noise if configured.

    Args:
        actor: policy of the recipe.
        env: training environments.
        cfg: recipe settings with the fields ``gsde`` and ``gsde_sample_freq``.
    """
    if not cfg.gsde:
        return actor
    return StateDependentExploration(actor, env.num_envs, cfg.gsde_sample_freq)
