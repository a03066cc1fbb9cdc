"""Actions of small multilayer perceptrons, computed by NumPy.

An operation of PyTorch takes a microsecond where nothing else runs, but ten right after a step of a
physics engine has used up the processor's caches: the way to its kernel is long, NumPy's is short.
Random numbers are PyTorch's, drawn in the same order. Sums are rounded in another order, so actions
agree to about six digits. Log-probabilities are computed once per batch, by the policy's own
distribution of the network's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType
from torchrl.modules import ProbabilisticActor, TanhNormal

from kit.fast.traced import Traced
from kit.modules.actors import Heads
from kit.modules.distributions import Categorical, Normal
from kit.modules.networks import FlattenMLP, SigmoidTanh

Array = NDArray[Any]

MOST_PRODUCTS = 2**18
"""Largest layer that NumPy computes, in multiplications for all environments."""

ACTIVATIONS: dict[type[nn.Module], Callable[[Array, Array], Any]] = {
    nn.Tanh: np.tanh,
    SigmoidTanh: np.tanh,
    nn.ReLU: lambda x, out: np.maximum(x, 0.0, out),
}
"""Called with an array and where the result is written."""


class NotInNumpy(RuntimeError):
    """A policy whose actions NumPy does not compute, and why."""


class NumpyPolicy:
    """Computes the actions of an actor of :func:`~kit.modules.make_actor`, step by step.

    Parameters are read where they live, so that a learner's updates are seen at once.

    Args:
        policy: the actor.
        num_envs: rows of an observation.
        exploration_type: ``RANDOM`` samples actions, ``DETERMINISTIC`` takes the likeliest.

    Raises:
        NotInNumpy: if it is another policy, or so large that PyTorch is as fast.
    """

    def __init__(
        self, policy: Any, num_envs: int, exploration_type: ExplorationType | None
    ) -> None:
        network, head, (self.key,) = _parts(policy)
        if exploration_type not in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC):
            raise NotInNumpy(f"actions are chosen by {exploration_type}")
        self.policy, self.num_envs = policy, num_envs
        self.samples = exploration_type is ExplorationType.RANDOM
        self.out_keys = [key for key in policy.out_keys if not str(key).startswith("_")]
        self._parameters = [(p, p.data_ptr()) for p in policy.parameters()]
        self._layers = _layers(network, num_envs)
        self._sampler = _SAMPLERS[head.distribution](head, num_envs)
        self._noise: list[Array] = []
        self._actions: list[Array] = []
        self._columns: list[Array] = []
        self._expected = 0
        (self._seen,) = policy.module[0].in_keys
        self._head, self._sampling = head, policy.module[-1]
        self._densities = Traced(self._written, head, policy.module[-1], name="")

    def is_valid(self) -> bool:
        """Whether parameters are where they were."""
        return all(parameter.data_ptr() == place for parameter, place in self._parameters)

    def begin(self, steps: int) -> None:
        """Begin a batch.

        Args:
            steps: expected time steps, for which random numbers are drawn with the first one.
        """
        self._sampler.refresh()
        self._actions, self._noise, self._columns = [], [], []
        self._expected = steps

    @property
    def steps(self) -> int:
        """Time steps since :meth:`begin`."""
        return len(self._actions)

    def __call__(self, observation: Mapping[Any, Array]) -> dict[Any, Array]:
        """Return the actions of one time step, by key, ``[num_envs, ...]``.

        Args:
            observation: by key, ``[num_envs, ...]``.
        """
        value = observation[self._seen]
        for weight, bias, out, activate in self._layers[:-1]:
            np.dot(value, weight, out)
            np.add(out, bias, out)
            if activate is not None:
                activate(out, out)
            value = out
        weight, bias, _, _ = self._layers[-1]
        value = np.dot(value, weight)  # memory of its own: it is kept
        value += bias
        self._columns.append(value)
        if not self.samples:
            action = self._sampler.likeliest(value)
        else:
            step = len(self._actions)
            if step == len(self._noise):
                self._noise += list(self._sampler.noise(max(self._expected - step, 1)))
            action = self._sampler.sample(value, self._noise[step])
        self._actions.append(action)
        return {self.key: action}

    def outputs(self) -> dict[Any, Tensor]:
        """Return all that the policy writes in the steps since :meth:`begin`.

        Returns:
            By key, ``[num_envs, steps, ...]``.
        """
        actions = _stacked(self._actions)
        if self.out_keys == [self.key]:
            return {self.key: actions}
        with torch.no_grad():
            self._densities.refresh()
            written = self._densities({"columns": _stacked(self._columns), "action": actions})
        found = {**written, self.key: actions}
        return {key: found[key] for key in self.out_keys}

    def _written(self, inputs: Any) -> dict[Any, Tensor]:
        """Parameters of the distribution and, where they are asked for, log-probabilities."""
        actions = inputs["action"]
        parameters = self._head(inputs["columns"])
        names = self.policy.module[0].out_keys
        result = TensorDict(dict(zip(names, parameters)), actions.shape[:2])
        written = dict(zip(names, parameters))
        if self._sampling.return_log_prob:
            log_prob = self._sampling.get_dist(result).log_prob(actions)
            written[self._sampling.log_prob_key] = log_prob
        return written


def _stacked(steps: list[Array]) -> Tensor:
    """Stack arrays ``[num_envs, ...]`` of time steps to ``[num_envs, steps, ...]``."""
    return torch.from_numpy(steps[0][:, None] if len(steps) == 1 else np.stack(steps, axis=1))


def _parts(policy: Any) -> tuple[FlattenMLP, Any, list[Any]]:
    """Return network, head and action key of a policy.

    Raises:
        NotInNumpy: if it is no policy of the kind that is known here.
    """
    if type(policy) is not ProbabilisticActor or len(policy.module) != 2:
        raise NotInNumpy(f"{type(policy).__name__} is no actor of make_actor with one action")
    heads = getattr(policy.module[0], "module", None)
    if type(heads) is not Heads or type(heads.network) is not FlattenMLP or len(heads.heads) != 1:
        raise NotInNumpy("it is no actor of make_actor with one action and a network of its own")
    head: Any = heads.heads[0]
    if head.distribution not in _SAMPLERS or len(getattr(head, "shape", (1,))) != 1:
        raise NotInNumpy(f"its distribution is {head.distribution.__name__}")
    hooked = [m for m in heads.modules() if m._forward_hooks or m._forward_pre_hooks]
    if hooked:
        raise NotInNumpy(f"{type(hooked[0]).__name__} has hooks")
    return heads.network, head, policy.module[-1].out_keys[:1]


def _layers(network: FlattenMLP, num_envs: int) -> list[tuple[Array, Array, Array, Any]]:
    """Return weights, bias, memory for the result and activation of each layer.

    Raises:
        NotInNumpy: if a layer is unknown, too large or not in float32 on the host.
    """
    if not network.flatten.is_vector:
        raise NotInNumpy("its observation is not one vector of numbers")
    found: list[Any] = []
    for layer in network.layers:
        if type(layer) is nn.Linear:
            weight, bias = layer.weight.detach(), layer.bias.detach()
            if weight.device.type != "cpu" or weight.dtype != torch.float32:
                raise NotInNumpy(f"its parameters are {weight.dtype} on {weight.device}")
            if num_envs * weight.numel() > MOST_PRODUCTS:
                raise NotInNumpy(f"a layer makes {num_envs * weight.numel()} multiplications")
            memory = np.empty((num_envs, layer.out_features), np.float32)
            found.append((weight.numpy().T, bias.numpy(), memory, None))
        elif type(layer) in ACTIVATIONS and found:
            found[-1] = (*found[-1][:3], ACTIVATIONS[type(layer)])
        else:
            raise NotInNumpy(f"{type(layer).__name__} is no layer that NumPy computes here")
    return found


# ---------------------------------------------------------------------- distributions
class _Sampler:
    """Chooses actions from the columns of the network.

    Args:
        head: says which distribution they are parameters of.
        num_envs: rows.
    """

    fill: Callable[..., Tensor] = Tensor.normal_

    def __init__(self, head: Any, num_envs: int) -> None:
        self.head = head
        self._shape = (num_envs, *getattr(head, "shape", (head.columns,)))
        self._at_once = self._draws_alike()

    def refresh(self) -> None:
        """Compute what depends on parameters alone; once per batch."""

    def noise(self, steps: int) -> Array:
        """Draw what sampling needs, ``[steps, num_envs, ...]``, in the order of the steps."""
        return self._draw(steps, self._at_once).numpy()  # type: ignore[no-any-return]

    def _draw(self, steps: int, at_once: bool) -> Tensor:
        if steps == 1:
            return type(self).fill(torch.empty(1, *self._shape))
        if at_once:
            # With other memory in between, or PyTorch draws many at once in another order.
            apart = torch.empty(steps, *self._shape, 2)[..., 0]
            return type(self).fill(apart).contiguous()
        whole = torch.empty(steps, *self._shape)
        for row in whole.unbind():
            type(self).fill(row)
        return whole

    def _draws_alike(self) -> bool:
        """Whether one call draws for many steps what a call for each step does."""
        with torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            found = []
            for at_once in (True, False):
                torch.set_rng_state(before)
                found.append((self._draw(16, at_once), torch.get_rng_state()))
        return all(torch.equal(*both) for both in zip(*found))

    def sample(self, columns: Array, noise: Array) -> Array:
        """Return actions, ``[num_envs, ...]``, as an array of their own."""
        raise NotImplementedError

    def likeliest(self, columns: Array) -> Array:
        """Return the likeliest actions, ``[num_envs, ...]``, as an array of their own."""
        raise NotImplementedError


class _Categorical(_Sampler):
    """The winner of an exponential race, as :class:`~kit.modules.distributions.Categorical`."""

    fill = Tensor.exponential_

    def noise(self, steps: int) -> Array:
        return np.log(super().noise(steps))  # type: ignore[no-any-return]

    def sample(self, columns: Array, noise: Array) -> Array:
        return (columns - noise).argmax(-1)  # type: ignore[no-any-return]

    def likeliest(self, columns: Array) -> Array:
        return columns.argmax(-1)  # type: ignore[no-any-return]


class _Normal(_Sampler):
    """Mean plus deviation times noise; the deviation is the same in all states."""

    def refresh(self) -> None:
        self._scale = self.head.log_scale.detach().exp().numpy()

    def noise(self, steps: int) -> Array:
        return super().noise(steps) * self._scale  # type: ignore[no-any-return]

    def sample(self, columns: Array, noise: Array) -> Array:
        return columns + noise  # type: ignore[no-any-return]

    def likeliest(self, columns: Array) -> Array:
        return columns.copy()


class _TanhNormal(_Sampler):
    """A normal distribution squashed to the bounds, as TorchRL's ``TanhNormal``."""

    def __init__(self, head: Any, num_envs: int) -> None:
        super().__init__(head, num_envs)
        low, high = (head.keywords[name].numpy() for name in ("low", "high"))
        self._middle, self._half = (high + low) / 2, (high - low) / 2
        self._limit = np.float32(1 - torch.finfo(torch.float32).resolution)  # TorchRL's safe tanh

    def _squashed(self, value: Array) -> Array:
        np.tanh(value, out=value)
        np.maximum(value, -self._limit, out=value)
        np.minimum(value, self._limit, out=value)
        value *= self._half
        value += self._middle
        return value

    def sample(self, columns: Array, noise: Array) -> Array:
        size, head = self.head.size, self.head
        scale = np.tanh(columns[:, size:])
        scale *= (head.most - head.least) / 2
        scale += (head.most + head.least) / 2
        np.exp(scale, out=scale)
        scale *= noise
        scale += columns[:, :size]
        return self._squashed(scale)

    def likeliest(self, columns: Array) -> Array:
        return self._squashed(columns[:, : self.head.size].copy())


_SAMPLERS: dict[Any, type[_Sampler]] = {
    Categorical: _Categorical,
    Normal: _Normal,
    TanhNormal: _TanhNormal,
}
