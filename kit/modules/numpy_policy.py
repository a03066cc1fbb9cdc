"""Actions of small multilayer perceptrons, computed by NumPy.

An operation of PyTorch takes a microsecond where nothing else runs, but ten right after a step of a
physics engine has used up the processor's caches: the way to its kernel is long, NumPy's is short.
Random numbers are PyTorch's, drawn in the same order. Sums are rounded in another order, so actions
agree to about six digits. Log-probabilities are computed once per batch, by the policy's own
distribution of the network's outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
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

_AHEAD = 128
"""Time steps for which random numbers are drawn at once, at least."""

# A function of a module is looked up at every use.
add, dot, exp, maximum, multiply, tanh = np.add, np.dot, np.exp, np.maximum, np.multiply, np.tanh


_ZERO = np.zeros(1, np.float32)


def _relu(values: Array, out: Array) -> None:
    maximum(values, _ZERO, out=out)


ACTIVATIONS: dict[type[nn.Module], Callable[[Array, Array], Any]] = {
    nn.Tanh: tanh,
    SigmoidTanh: tanh,
    nn.ReLU: _relu,
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

    Attributes:
        noise: random numbers drawn ahead, one array for each time step, the next one last.

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
        *self._hidden, self._last = _layers(network, num_envs)
        self._sampler = _SAMPLERS[head.distribution](head, num_envs)
        self.noise: list[Array] = []
        self._rows: Iterator[Any] = itertools.repeat(None)
        self._into: Array | None = None
        self._actions: list[Array] = []
        self._columns: list[Array] = []
        (self._seen,) = policy.module[0].in_keys
        self._head, self._sampling = head, policy.module[-1]
        self._densities = Traced(self._written, head, policy.module[-1], name="")
        self._keeps_columns = self.out_keys != [self.key]
        self._addresses = [parameter.data_ptr for parameter in policy.parameters()]
        self._places = [address() for address in self._addresses]
        modules = list(policy.modules())
        self._hooks = [m._forward_hooks for m in modules] + [m._forward_pre_hooks for m in modules]
        self._entries = [d for m in modules for d in (m._modules, m._parameters) if d]
        self._known = [*itertools.chain.from_iterable([d.values() for d in self._entries])]
        self._identities = [*map(id, self._known)]

    def is_valid(self) -> bool:
        """Whether parameters are where they were, and modules what they were."""
        present = itertools.chain.from_iterable([d.values() for d in self._entries])
        return (
            [*map(id, present)] == self._identities
            and [address() for address in self._addresses] == self._places
            and not any(self._hooks)
        )

    # ------------------------------------------------------------------ random numbers
    def continue_from(self, other: NumpyPolicy | None) -> None:
        """Take over what another policy has drawn ahead, if it draws from the same distribution."""
        if other is not None and self._sampler.draws == other._sampler.draws:
            self.noise = other.noise

    def has_noise(self, steps: int) -> bool:
        """Whether random numbers have been drawn for so many time steps, as far as any are used."""
        return len(self.noise) >= steps or not self.samples

    def _draw(self, steps: int) -> None:
        self.noise = [*self._sampler.noise(steps)][::-1] + self.noise

    # ------------------------------------------------------------------ a batch
    def begin(self, steps: int, into: Array | None = None) -> None:
        """Begin a batch.

        Args:
            steps: expected time steps, for which random numbers are drawn if none are left.
            into: where actions are written, ``[steps, num_envs, ...]``; ``None``: to memory of
                this object.
        """
        missing = steps - len(self.noise)
        if self.samples and missing > 0:  # many at once, where that draws the same numbers
            self._draw(max(missing, _AHEAD) if self._sampler.at_once else missing)
        self._sampler.refresh()
        self._actions, self._columns = [], []
        self._into, self._rows = into, itertools.repeat(None) if into is None else iter(into)

    @property
    def actions(self) -> tuple[Any, tuple[int, ...], Any]:
        """Key, shape ``[num_envs, ...]`` and type of the actions of a time step."""
        return self.key, self._sampler.actions, self._sampler.dtype

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
        for weight, bias, out, activate in self._hidden:
            dot(value, weight, out)
            add(out, bias, out)
            if activate is not None:
                activate(out, out)
            value = out
        weight, bias, out, _ = self._last
        if self._keeps_columns:
            value = dot(value, weight)  # memory of its own
            self._columns.append(value)
        else:
            value = dot(value, weight, out)
        add(value, bias, value)
        if self.samples:
            if not self.noise:
                self._draw(1)
            action = self._sampler.sample(value, self.noise.pop(), next(self._rows))
        else:
            action = self._sampler.likeliest(value, next(self._rows))
        self._actions.append(action)
        return {self.key: action}

    def outputs(self) -> dict[Any, Tensor]:
        """Return the policy's outputs in the steps since :meth:`begin`.

        Returns:
            By key, ``[num_envs, steps, ...]``, without actions that were written elsewhere.
        """
        if self._into is None:
            actions = _stacked(self._actions)
        elif self._keeps_columns:
            actions = torch.from_numpy(self._into.swapaxes(0, 1))
        else:
            return {}
        if not self._keeps_columns:
            return {self.key: actions}
        with torch.no_grad():
            self._densities.refresh()
            written = self._densities({"columns": _stacked(self._columns), "action": actions})
        found = {**written, self.key: actions}
        written_here = self.out_keys if self._into is None else set(self.out_keys) - {self.key}
        return {key: found[key] for key in self.out_keys if key in written_here}

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

    Attributes:
        shape: of the random numbers of a time step, ``[num_envs, ...]``.
        actions: shape of the actions of a time step, ``[num_envs, ...]``.
        dtype: of actions.
        at_once: whether one call draws for many time steps what a call for each draws.
    """

    fill: Callable[..., Tensor] = Tensor.normal_
    dtype: Any = np.float32

    def __init__(self, head: Any, num_envs: int) -> None:
        self.head = head
        self.shape = self.actions = (num_envs, *getattr(head, "shape", (head.columns,)))
        self.at_once = self._draws_alike()

    @property
    def draws(self) -> tuple[Any, ...]:
        """Distribution and shape of the random numbers."""
        return type(self), self.shape

    def refresh(self) -> None:
        """Compute functions of the parameters; once per batch."""

    def noise(self, steps: int) -> Array:
        """Draw the noise of samples, ``[steps, num_envs, ...]``, in the order of the steps."""
        return self._draw(steps, self.at_once).numpy()  # type: ignore[no-any-return]

    def _draw(self, steps: int, at_once: bool) -> Tensor:
        if at_once:
            # With other memory in between, or PyTorch draws many at once in another order.
            apart = torch.empty(steps, *self.shape, 2)[..., 0]
            return type(self).fill(apart).contiguous()
        whole = torch.empty(steps, *self.shape)
        for row in whole.unbind():
            type(self).fill(row)
        return whole

    def _draws_alike(self) -> bool:
        with torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            found = []
            for at_once in (True, False):
                torch.set_rng_state(before)
                found.append((self._draw(16, at_once), torch.get_rng_state()))
        return all(torch.equal(*both) for both in zip(*found))

    def sample(self, columns: Array, noise: Array, out: Array | None) -> Array:
        """Return actions, ``[num_envs, ...]``.

        Args:
            columns: of the network, unchanged until the next time step.
            noise: random numbers of this time step.
            out: where they are written; ``None``: to an array of their own.
        """
        raise NotImplementedError

    def likeliest(self, columns: Array, out: Array | None) -> Array:
        """Return the likeliest actions, ``[num_envs, ...]``."""
        raise NotImplementedError


class _Categorical(_Sampler):
    """The winner of an exponential race, as :class:`~kit.modules.distributions.Categorical`."""

    fill = Tensor.exponential_
    dtype = np.intp

    def __init__(self, head: Any, num_envs: int) -> None:
        super().__init__(head, num_envs)
        self.actions = (num_envs,)

    def noise(self, steps: int) -> Array:
        return np.log(super().noise(steps))  # type: ignore[no-any-return]

    def sample(self, columns: Array, noise: Array, out: Array | None) -> Array:
        return (columns - noise).argmax(-1, out)  # type: ignore[no-any-return]

    def likeliest(self, columns: Array, out: Array | None) -> Array:
        return columns.argmax(-1, out)  # type: ignore[no-any-return]


class _Normal(_Sampler):
    """Mean plus deviation times noise; the deviation is the same in all states."""

    def refresh(self) -> None:
        self._scale = self.head.log_scale.detach().exp().numpy()

    def sample(self, columns: Array, noise: Array, out: Array | None) -> Array:
        return add(columns, multiply(noise, self._scale, out), out)  # type: ignore[no-any-return]

    def likeliest(self, columns: Array, out: Array | None) -> Array:
        return np.positive(columns, out)  # type: ignore[no-any-return]


class _TanhNormal(_Sampler):
    """A normal distribution squashed to the bounds, as TorchRL's ``TanhNormal``."""

    def __init__(self, head: Any, num_envs: int) -> None:
        super().__init__(head, num_envs)
        low, high = (head.keywords[name].numpy() for name in ("low", "high"))
        self._middle, self._half = (high + low) / 2, (high - low) / 2
        self._bounds = self._middle.item(0), self._half.item(0)
        self._limit = np.float32(1 - torch.finfo(torch.float32).resolution)  # TorchRL's safe tanh
        # Python computes one number faster than NumPy an array of one.
        self._single = num_envs * head.size == 1

    def _squashed(self, value: Array, out: Array | None) -> Array:
        value = tanh(value, out)
        maximum(value, -self._limit, out=value)
        np.minimum(value, self._limit, out=value)
        multiply(value, self._half, value)
        return add(value, self._middle, value)  # type: ignore[no-any-return]

    def _one(self, columns: Array, noise: Array, out: Array | None) -> Array:
        """Sample a single number."""
        (mean, raw), head, limit = columns[0].tolist(), self.head, float(self._limit)
        middle, half = (head.most + head.least) / 2, (head.most - head.least) / 2
        value = math.tanh(mean + math.exp(middle + half * math.tanh(raw)) * noise.item())
        out = np.empty(self.shape, np.float32) if out is None else out
        out[...] = self._bounds[0] + self._bounds[1] * min(max(value, -limit), limit)
        return out

    def sample(self, columns: Array, noise: Array, out: Array | None) -> Array:
        if self._single:
            return self._one(columns, noise, out)
        size, head = self.head.size, self.head
        scale = tanh(columns[:, size:])
        scale *= (head.most - head.least) / 2
        scale += (head.most + head.least) / 2
        exp(scale, scale)
        multiply(scale, noise, scale)
        add(scale, columns[:, :size], scale)
        return self._squashed(scale, out)

    def likeliest(self, columns: Array, out: Array | None) -> Array:
        return self._squashed(columns[:, : self.head.size], out)


_SAMPLERS: dict[Any, type[_Sampler]] = {
    Categorical: _Categorical,
    Normal: _Normal,
    TanhNormal: _TanhNormal,
}
