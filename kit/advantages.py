"""Return and advantage estimators."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.functional import pad
from torchrl.objectives import value as torchrl_value

from kit.fast.traced import Traced


def discounted_suffix_sums(values: Tensor, factors: Tensor) -> Tensor:
    """The ``x`` with ``x[t] = values[t] + factors[t] * x[t + 1]``, and ``x`` zero past the end.

    Time is the last dimension. The recursion is solved by doubling, in about ``log2(steps)`` tensor
    operations and without reading anything on the host.

    Args:
        values: ``[..., steps]``.
        factors: ``[..., steps]``; zero where the sum is cut.
    """
    steps = values.shape[-1]
    reach = 1
    while reach < steps:
        # values[t] now sums `reach` terms, and factors[t] is the weight of the one after them.
        values = values + factors * pad(values[..., reach:], (0, reach))
        factors = factors * pad(factors[..., reach:], (0, reach))
        reach *= 2
    return values


def generalized_advantages(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float | Tensor,
    lmbda: float | Tensor,
) -> Tensor:
    """Generalised advantages (Schulman et al. 2016, eq. 16).

    The value after a terminated step is zero; after a truncated one it is ``next_value``, the value
    of the true last observation.

    Args:
        reward: ``[..., steps]``, like all that follow.
        value: of the observations acted on.
        next_value: of the observations that followed, before any reset.
        done: whether the episode ended with the step.
        terminated: whether it ended by itself.
        gamma: discount, in [0, 1].
        lmbda: weight of longer estimates, in [0, 1].
    """
    delta = reward + gamma * next_value * ~terminated - value
    return discounted_suffix_sums(delta, gamma * lmbda * (~done).to(delta.dtype))


class RewardToGo(nn.Module):
    """Monte-Carlo returns: the discounted rewards from each step to the end of its episode.

    For REINFORCE (Williams 1992; Sutton and Barto 2018, section 13.3), and with a baseline for
    REINFORCE with baseline (section 13.4). Called with a batch ``[num_envs, steps]``, padded
    episodes included, it writes ``value_target``, the return, and ``advantage``, the return minus
    the baseline, both ``[num_envs, steps, 1]`` and without gradients.

    With a baseline, what follows a truncated episode or the end of the batch is estimated by its
    value (bootstrapping), which makes the advantages those of :class:`GAE` with ``lmbda=1``.
    Without one, the return ends there.

    Args:
        gamma: discount, in [0, 1].
        value_network: baseline, from observations to ``state_value``; ``None``: no baseline.
        normalize: whether advantages get mean 0 and standard deviation 1 over all transitions of
            the batch.

    Examples:
        >>> ended = torch.tensor([False, True, False]).reshape(1, 3, 1)
        >>> ends = {"reward": torch.ones(1, 3, 1), "done": ended, "terminated": ended}
        >>> RewardToGo(gamma=0.5)(TensorDict({"next": ends}, [1, 3]))["advantage"].flatten()
        tensor([1.5000, 1.0000, 1.0000])
    """

    def __init__(
        self, *, gamma: float, value_network: Any | None = None, normalize: bool = False
    ) -> None:
        super().__init__()
        self.gamma, self.normalize = gamma, normalize
        self.estimator: GAE | None = None
        if value_network is not None:
            self.estimator = GAE(gamma=gamma, lmbda=1.0, value_network=value_network)

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add returns and advantages to a batch ``[num_envs, steps]``."""
        if self.estimator is not None:
            tensordict = self.estimator(tensordict)
        else:
            reward, done = (tensordict.get(("next", key)).squeeze(-1) for key in ("reward", "done"))
            returns = discounted_suffix_sums(reward, self.gamma * (~done).to(reward.dtype))
            tensordict.set("value_target", returns.unsqueeze(-1))
            tensordict.set("advantage", returns.unsqueeze(-1))
        if self.normalize:
            mask = tensordict.get(("collector", "mask"), None)
            advantage = tensordict.get("advantage")
            tensordict.set("advantage", _normalized(advantage, mask))
        return tensordict


def _normalized(advantage: Tensor, mask: Tensor | None) -> Tensor:
    """Advantages ``[..., 1]`` of mean 0 and standard deviation 1 where ``mask`` is true."""
    if mask is None:
        weight = torch.ones_like(advantage)
    else:
        weight = mask.reshape(advantage.shape).to(advantage.dtype)
    count = weight.sum()
    centred = (advantage - (advantage * weight).sum() / count) * weight
    return centred / (centred.square().sum() / (count - 1)).sqrt().clamp_min(1e-6)


class GAE(torchrl_value.GAE):
    """TorchRL's generalised advantage estimation, without its reads of ``done`` on the host.

    The same arguments, keys and numbers (up to the order of summation) as TorchRL's class, for
    batches ``[num_envs, steps]``. It writes ``advantage``, ``value_target`` and the values of both
    observations, all without gradients.

    Args:
        gamma: discount, in [0, 1].
        lmbda: weight of longer estimates, in [0, 1].
        value_network: module from observations to values.
        **kwargs: of TorchRL's class.
    """

    def __init__(self, *, gamma: float, lmbda: float, value_network: Any, **kwargs: Any) -> None:
        super().__init__(gamma=gamma, lmbda=lmbda, value_network=value_network, **kwargs)
        self._traced: Traced | None = None

    def forward(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Add advantages, value targets and values to a batch ``[num_envs, steps]``.

        Calls with parameters, as a loss makes them, and differentiable estimates are left to
        TorchRL's implementation.
        """
        if args or kwargs or self.differentiable or tensordict.ndim < 2:
            return super().forward(tensordict, *args, **kwargs)
        if self._traced is None:
            self._traced = Traced(self._estimates, self, self.value_network, name="GAE")
        names = self.tensor_keys
        seen = [key for key in self.value_network.in_keys if tensordict.get(key, None) is not None]
        ends = [("next", name) for name in (names.reward, names.done, names.terminated)]
        read = tensordict.select(*seen, *(("next", *_as_tuple(key)) for key in seen), *ends)
        with torch.no_grad():
            self._traced.refresh()
            for key, value in self._traced(read).items():
                tensordict.set(key, value)
        return tensordict

    def _estimates(self, batch: TensorDictBase) -> dict[Any, Tensor]:
        """Advantages, value targets and the values of both observations, by key."""
        names = self.tensor_keys
        ends = [batch.get(("next", key)) for key in (names.reward, names.done, names.terminated)]
        value = self.value_network(batch.exclude("next")).get(names.value)
        following = self.value_network(batch.get("next").copy()).get(names.value)
        reward, done, terminated = (tensor.squeeze(-1) for tensor in ends)
        advantage = generalized_advantages(
            reward, value.squeeze(-1), following.squeeze(-1), done, terminated,
            self.gamma, self.lmbda,
        ).unsqueeze(-1)  # fmt: skip
        target = advantage + value
        if self.average_gae:
            advantage = (advantage - advantage.mean()) / advantage.std().clamp_min(1e-4)
        return {
            names.advantage: advantage, names.value_target: target,
            names.value: value, ("next", names.value): following,
        }  # fmt: skip


def _as_tuple(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)
