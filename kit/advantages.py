"""Return and advantage estimators."""

from __future__ import annotations

from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.modules.batchnorm import _NormBase
from torchrl.objectives import value as torchrl_value

from kit.envs.normalize import RunningMeanStd
from kit.fast.traced import Traced
from kit.steps import SettingError
from kit.steps.errors import one_of, real_number, whole_number

Standardize = Literal["batch", "running"]
Ends = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Rewards, values, next values, ``done`` and ``terminated``, with time as the last dimension."""


def discounted_suffix_sums(values: Tensor, factors: Tensor) -> Tensor:
    """Return ``x`` with ``x[t] = values[t] + factors[t] * x[t + 1]``; ``x`` is 0 past the end.

    Time is the last dimension. The recursion is solved by doubling in about ``log2(steps)`` tensor
    operations, without synchronising with the host.

    Args:
        values: Summands, ``[..., steps]``.
        factors: Factors of ``x[t + 1]``, ``[..., steps]``; 0 ends a sum.
    """
    steps = values.shape[-1]
    reach = 1
    while reach < steps:
        # values[t] sums `reach` terms, and factors[t] is the weight of the following term.
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
    """Compute generalised advantage estimates (Schulman et al. 2016, eq. 16).

    The value after a terminated step is 0. After a truncated step it is ``next_value``, the value
    of the final observation before the reset.

    Args:
        reward: Rewards ``[..., steps]``; all other tensors have this shape.
        value: Values of the observations.
        next_value: Values of the next observations, before any reset.
        done: Whether the episode ended with the step.
        terminated: Whether the episode terminated with the step.
        gamma: Discount factor in [0, 1].
        lmbda: Weight, in [0, 1], of longer estimates.
    """
    delta = reward + gamma * next_value * ~terminated - value
    return discounted_suffix_sums(delta, gamma * lmbda * (~done).to(delta.dtype))


def n_step_returns(
    reward: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float | Tensor,
    n_step: int,
) -> Tensor:
    """Compute n-step returns with bootstrapping (Mnih et al. 2016, section 4).

    ``n_step`` rewards are summed, or fewer if the episode or the batch ends earlier. See
    :func:`generalized_advantages` for the other arguments.
    """
    first = reward + gamma * next_value * ~terminated
    returns = first
    for _ in range(min(n_step, reward.shape[-1]) - 1):
        later = torch.cat([returns[..., 1:], next_value[..., -1:]], dim=-1)
        returns = torch.where(done, first, reward + gamma * later)
    return returns


def vtrace(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    log_ratio: Tensor,
    gamma: float | Tensor,
    max_rho: float = 1.0,
    max_c: float = 1.0,
    lmbda: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute V-trace advantages and value targets (Espeholt et al. 2018, eq. 1, section 4.2).

    ``log_ratio`` is the log-probability of the action under the current policy minus the recorded
    log-probability. ``max_rho`` is the maximum importance weight of a temporal difference.
    ``max_c`` is the maximum importance weight that is propagated to earlier steps, and ``lmbda`` in
    [0, 1] multiplies it (remark 2). See :func:`generalized_advantages` for the other
    arguments.
    """
    ratio = log_ratio.exp()
    rho, c = ratio.clamp(max=max_rho), lmbda * ratio.clamp(max=max_c)
    delta = rho * (reward + gamma * next_value * ~terminated - value)
    target = value + discounted_suffix_sums(delta, gamma * c * ~done)
    later = torch.cat([target[..., 1:], next_value[..., -1:]], dim=-1)
    later = torch.where(done, next_value, later)
    return rho * (reward + gamma * later * ~terminated - value), target


class AdvantageNormalizer(nn.Module):
    """Normalises advantages to mean 0 and standard deviation 1.

    Args:
        over: ``"batch"``: use the mean and standard deviation of each batch. ``"running"``: use
            running statistics of all transitions (Chan et al. 1979), saved in checkpoints as
            float64.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, over: Standardize) -> None:
        super().__init__()
        one_of("standardize", over, ("batch", "running"))
        self.over = over
        for name, first in {"mean": 0.0, "var": 1.0, "count": 0.0}.items():
            self.register_buffer(name, torch.tensor(first, dtype=torch.float64))

    @torch.no_grad()
    def forward(self, advantage: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return normalised advantages.

        Args:
            advantage: ``[num_envs, steps, ...]``.
            mask: Mask of valid steps, ``[num_envs, steps]``; ``None``: all steps are valid.
        """
        if self.over == "batch":
            return _standardized(advantage, mask)
        weight, count, mean, centred = _centred(advantage, mask)
        moments = RunningMeanStd(self.mean, self.var, self.count)
        var = centred.double().square().sum() / count
        for buffer, new in zip(moments, moments.merged(mean.double(), var, count)):
            buffer.copy_(new)
        std = self.var.sqrt().clamp_min(1e-6)
        return ((advantage - self.mean) / std).to(advantage.dtype) * weight


def _centred(advantage: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights (0 for padding), the weight sum, the mean, and weighted centred advantages."""
    weight = torch.ones_like(advantage)
    if mask is not None:
        more = [1] * (advantage.ndim - mask.ndim)
        weight = mask.reshape(*mask.shape, *more).expand_as(advantage).to(advantage.dtype)
    count = weight.sum()
    mean = (advantage * weight).sum() / count
    return weight, count, mean, (advantage - mean) * weight


def _standardized(advantage: Tensor, mask: Tensor | None) -> Tensor:
    """Return advantages with mean 0 and standard deviation 1."""
    _, count, _, centred = _centred(advantage, mask)
    degrees = (count - 1).clamp_min(1)  # a single advantage becomes 0
    return centred / (centred.square().sum() / degrees).sqrt().clamp_min(1e-6)


class GAE(torchrl_value.GAE):
    """TorchRL's generalised advantage estimator without host synchronisation.

    Keys and results are the same as for TorchRL's class, up to rounding, because sums are computed
    in a different order. Batches are ``[num_envs, steps]`` (episodes may be padded) or ``[steps]``
    (episodes are separated by ``done``). With several agents, entries have shape ``[num_envs,
    steps, agents, 1]``. The outputs, without gradients, are ``advantage``, ``value_target`` (the
    TD(lambda) return), and the values of current and next observations. A recurrent value network
    starts from the hidden states in the batch.

    Args:
        gamma: Discount factor in [0, 1].
        lmbda: Weight, in [0, 1], of longer estimates.
        value_network: Module that maps observations to values.
        n_step: Number of rewards summed before bootstrapping. ``None``: use ``lmbda``.
        standardize: Transitions over which advantages are normalised (see
            :class:`AdvantageNormalizer`). ``None``: advantages are not normalised here. A loss can
            normalise them per minibatch (``normalize_advantage``).

    Raises:
        SettingError: If an argument is out of range, or ``n_step`` is combined with ``lmbda``.
    """

    def __init__(
        self,
        *,
        gamma: float,
        lmbda: float = 1.0,
        value_network: Any,
        n_step: int | None = None,
        standardize: Standardize | None = None,
    ) -> None:
        real_number("gamma", gamma, 0, 1)
        real_number("lmbda", lmbda, 0, 1)
        super().__init__(gamma=gamma, lmbda=lmbda, value_network=value_network)
        if n_step is not None:
            whole_number("n_step", n_step, at_least=1)
            if lmbda != 1.0:
                reason = f"N-step returns cannot be combined with lmbda={lmbda}"
                raise SettingError("n_step", n_step, reason, [None], "Or use lmbda=1")
        self.n_step = n_step
        self.standardizer = AdvantageNormalizer(standardize) if standardize else None
        self._traced: Traced | None = None

    @property
    def _reads(self) -> list[Any]:
        """Keys that the value network reads."""
        return list(getattr(self.value_network, "in_keys", ()))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add advantages, value targets and values to a batch ``[num_envs, steps]`` or ``[steps]``.

        Time is the batch dimension named ``"time"``, or else the last one. N-step transitions are
        discounted by gamma to the power of ``steps_to_next_obs``.
        """
        self._time = _time_of(tensordict)
        if self._traced is None:
            self._traced = Traced(self._compute, self, self.value_network, name="GAE")
        with torch.no_grad():
            self._traced.refresh()
            for key, value in self._traced(tensordict).items():
                tensordict.set(key, value)
        return tensordict

    def _compute(self, batch: TensorDictBase) -> dict[Any, Tensor]:
        """Return advantages, value targets, and values of current and next observations."""
        names, reads, time = self.tensor_keys, self._reads, self._time
        end_keys = [("next", name) for name in (names.reward, names.done, names.terminated)]
        others = (names.steps_to_next_obs, ("collector", "mask"))
        seen = [*reads, *(("next", key) for key in reads)]
        batch = batch.select(*seen, *end_keys, *others, strict=False)
        value = self._values(batch.exclude("next"))
        following = batch.get("next").copy()
        if "is_init" in reads:  # next observations never start an episode
            following.set("is_init", torch.zeros_like(following.get(names.done)))
        following = self._values(following)

        def time_last(tensor: Tensor) -> Tensor:
            return tensor.reshape(value.shape).movedim(time, -1)

        reward, done, terminated = (time_last(batch.get(key)) for key in end_keys)
        steps, mask = (batch.get(key, None) for key in others)
        gamma = self.gamma if steps is None else self.gamma ** time_last(steps)
        ends = (reward, time_last(value), time_last(following), done, terminated)
        estimates = self._estimates(batch, ends, gamma)
        advantage, target = (estimate.movedim(-1, time) for estimate in estimates)
        if self.standardizer is not None:
            advantage = self.standardizer(advantage, mask)
        return {
            names.advantage: advantage, names.value_target: target,
            names.value: value, ("next", names.value): following,
        }  # fmt: skip

    def _values(self, seen: TensorDictBase) -> Tensor:
        """Return values ``[num_envs, steps, 1]`` or ``[steps, 1]``.

        Rows are flattened for recurrent networks, which then run one time step from the hidden
        states in the batch, and for layers such as batch normalisation, which expect features in
        dimension 1.
        """
        network, name = self.value_network, self.tensor_keys.value
        if "is_init" not in self._reads and not _needs_rows(network):
            return network(seen).get(name)  # type: ignore[no-any-return]
        return network(seen.reshape(-1)).get(name).unflatten(0, seen.batch_size)  # type: ignore[no-any-return]

    def _estimates(self, batch: TensorDictBase, ends: Ends, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """Return advantages and value targets, with time as the last dimension."""
        reward, value, following, done, terminated = ends
        if self.n_step is None:
            advantage = generalized_advantages(*ends, gamma, self.lmbda)
            return advantage, advantage + value
        target = n_step_returns(reward, following, done, terminated, gamma, self.n_step)
        return target - value, target


def _needs_rows(network: Any) -> bool:
    """Return whether a layer of the network expects features in dimension 1."""
    modules = network.modules() if isinstance(network, nn.Module) else ()
    return any(isinstance(m, (_NormBase, nn.GroupNorm, nn.Flatten)) for m in modules)


def _time_of(batch: TensorDictBase) -> int:
    """Return the index of the time dimension: the dimension named ``"time"``, or else the last."""
    names = list(batch.names)
    return names.index("time") if "time" in names else batch.ndim - 1


class VTrace(GAE):
    """V-trace (Espeholt et al. 2018): off-policy advantages for batches from an older policy.

    For batches from the current policy, the value targets are TD(1) returns if ``lmbda`` is 1.
    TorchRL's class compares the log-probability of a newly sampled action with that of the recorded
    action. This class evaluates the recorded action under both policies. Other behaviour is as in
    :class:`GAE`.

    Args:
        gamma: Discount factor in [0, 1].
        value_network: Module that maps observations to values.
        actor_network: Current policy; its log-probabilities are compared with those in the batch.
        max_rho: Maximum importance weight of a temporal difference.
        max_c: Maximum importance weight that is propagated to earlier steps.
        lmbda: Factor in [0, 1] that multiplies the propagated weight.
        standardize: As in :class:`GAE`.
    """

    def __init__(
        self,
        *,
        gamma: float,
        value_network: Any,
        actor_network: Any,
        max_rho: float = 1.0,
        max_c: float = 1.0,
        lmbda: float = 1.0,
        standardize: Standardize | None = None,
    ) -> None:
        super().__init__(
            gamma=gamma, lmbda=lmbda, value_network=value_network, standardize=standardize
        )
        self.actor_network = actor_network
        self.max_rho, self.max_c = max_rho, max_c
        (self._action,) = actor_network.dist_sample_keys
        (self._log_prob,) = actor_network.log_prob_keys

    @property
    def _reads(self) -> list[Any]:
        """Keys that the value network and the policy read, and keys that the policy writes."""
        reads = [*self.actor_network.in_keys, *self.actor_network.out_keys]
        return [*dict.fromkeys([*super()._reads, *reads])]

    def _estimates(self, batch: TensorDictBase, ends: Ends, gamma: Tensor) -> tuple[Tensor, Tensor]:
        rows = batch.exclude("next").reshape(-1)
        now = self.actor_network.get_dist(rows).log_prob(rows.get(self._action))
        before = batch.get(self._log_prob)
        ratio = (now.reshape(before.shape) - before).movedim(self._time, -1)
        ratio = ratio.reshape(ends[0].shape)
        return vtrace(*ends, ratio, gamma, self.max_rho, self.max_c, self.lmbda)


class RewardToGo(nn.Module):
    """Monte-Carlo returns: the sum of discounted rewards from each step to the end of its episode.

    The module is for REINFORCE without a baseline (Williams 1992; Sutton and Barto 2018, section
    13.3). Batches are ``[num_envs, steps]`` (episodes may be padded) or ``[steps]``. Returns are
    written as ``value_target`` and ``advantage``, both ``[..., steps, 1]``. Rewards after a
    truncation or the end of the batch count as 0, so collect complete episodes. With a baseline,
    use :class:`GAE` with ``lmbda=1``, which bootstraps from the value network.

    Args:
        gamma: Discount factor in [0, 1].
        standardize: As in :class:`GAE`.

    Examples:
        >>> ended = torch.tensor([False, True, False]).reshape(1, 3, 1)
        >>> ends = {"reward": torch.ones(1, 3, 1), "done": ended, "terminated": ended}
        >>> RewardToGo(gamma=0.5)(TensorDict({"next": ends}, [1, 3]))["advantage"].flatten()
        tensor([1.5000, 1.0000, 1.0000])
    """

    def __init__(self, *, gamma: float, standardize: Standardize | None = None) -> None:
        super().__init__()
        self.gamma = real_number("gamma", gamma, 0, 1)
        self.standardizer = AdvantageNormalizer(standardize) if standardize else None

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add returns and advantages to a batch ``[num_envs, steps]`` or ``[steps]``."""
        reward, time = tensordict.get(("next", "reward")), _time_of(tensordict)
        done = tensordict.get(("next", "done")).reshape(reward.shape).movedim(time, -1)
        factors = self.gamma * (~done).to(reward.dtype)
        returns = discounted_suffix_sums(reward.movedim(time, -1), factors).movedim(-1, time)
        advantage = returns
        if self.standardizer is not None:
            advantage = self.standardizer(advantage, tensordict.get(("collector", "mask"), None))
        return tensordict.set("value_target", returns).set("advantage", advantage)
