"""Compute the actions of small multilayer-perceptron policies with NumPy.

A step of a physics engine evicts PyTorch's dispatch code from the CPU caches, so a PyTorch
operation takes ten microseconds instead of one. NumPy's call path is shorter. Random numbers are
drawn from PyTorch's generator, in the order in which the policy draws them. NumPy rounds sums
differently, so actions agree to about six digits. Log-probabilities are computed once per batch by
the policy's own distribution.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.nn.parameter import is_lazy
from torchrl.data import Bounded, Categorical
from torchrl.envs.utils import ExplorationType
from torchrl.modules import Actor, EGreedyModule, ProbabilisticActor, QValueActor

from kit.fast.traced import Traced
from kit.modules.exploration import EpsilonGreedy, GaussianNoise
from kit.modules.heads import HEADS, ClippedTanhNormal, Heads, Scaled
from kit.modules.host_copy import HostCopy
from kit.modules.networks import Flatten, FlattenMLP, SigmoidTanh
from kit.modules.numpy_samplers import (
    OF_DISTRIBUTIONS,
    EpsilonGreedySampler,
    Sampler,
    ScaledSampler,
)
from kit.modules.squashed import SquashedActor, pre_tanh_key

Array = NDArray[Any]

MOST_PRODUCTS = 2**18
"""Maximum number of multiplications in a layer per time step, summed over environments."""

_AHEAD = 128
"""Minimum number of time steps for which random numbers are drawn in one call."""

add, dot, maximum = np.add, np.dot, np.maximum  # module-level names save attribute lookups

_FORWARD = itertools.repeat("forward")
_ZERO = np.float32(0)


def _relu(values: Array, out: Array) -> None:
    maximum(values, _ZERO, out=out)


ACTIVATIONS: dict[type[nn.Module], Callable[[Array, Array], Any]] = {
    nn.Tanh: np.tanh,
    SigmoidTanh: np.tanh,
    nn.ReLU: _relu,
}
"""Functions that apply an activation and write the result to an output array."""


class NumpyPolicyError(RuntimeError):
    """Raised if NumPy cannot compute a policy's actions; the message states the reason."""


class NumpyPolicy:
    """Computes actions of kit's actors and Q-networks with NumPy, one time step per call.

    Supports actors from :func:`~kit.modules.make_actor`, and greedy or epsilon-greedy Q-networks
    from :func:`~kit.modules.make_q_network`. Deterministic actors may be followed by
    :class:`~kit.modules.exploration.GaussianNoise`. Q-networks and deterministic actors must have
    the action as their only output.

    Parameters are read in place, so weight updates take effect immediately.

    Args:
        policy: the policy.
        num_envs: number of environments, which is the number of rows in an observation.
        exploration_type: ``RANDOM`` samples actions, ``DETERMINISTIC`` uses the mode.
        keeps_outputs: whether :meth:`outputs` will be called.

    Attributes:
        reads: key of the observation, and its shape for one environment.
        noise: random numbers drawn in advance, one array per time step, in reverse order.

    Raises:
        NumpyPolicyError: if the policy or the exploration type is not supported, if a module has
            hooks or a replaced ``forward``, or if a layer is so large that PyTorch is as fast.
    """

    def __init__(
        self,
        policy: Any,
        num_envs: int,
        exploration_type: ExplorationType | None,
        keeps_outputs: bool = True,
    ) -> None:
        if exploration_type not in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC):
            raise NumpyPolicyError(f"the exploration type {exploration_type} is not supported")
        self.policy, self.num_envs = policy, num_envs
        samples = exploration_type is ExplorationType.RANDOM
        network, self._seen, self._sampler, self._head = _parts(policy, num_envs, samples)
        modules = list(policy.modules())
        each = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooks = [_global_forward_hooks, _global_forward_pre_hooks, *each]
        if any(self._hooks):
            raise NumpyPolicyError("the policy has hooks")
        for module in modules:
            if "forward" in vars(module):
                raise NumpyPolicyError(f"{type(module).__name__}.forward was replaced")
        self.samples = samples and self._sampler.draws_any
        self.out_keys = [key for key in policy.out_keys if not str(key).startswith("_")]
        layers = _layers(network, num_envs)
        *self._hidden, self._last = layers
        self.reads = self._seen, layers[0][0].shape[:1]
        self.noise: list[Array] = []
        self._rows: Iterator[Any] = itertools.repeat(None)
        self._into: Array | None = None
        self._actions: list[Array] = []
        self._columns: list[Array] = []
        self._noises: list[Array] = []
        self.key = "action" if self._head is None else policy.module[-1].out_keys[0]
        self._keeps_actions = keeps_outputs
        self._keeps_columns = keeps_outputs and self.out_keys != [self.key]
        if self._keeps_columns:
            self._sampling = policy.module[-1]
            self._densities = Traced(self._compute_outputs, self._head, self._sampling, name="")
        self._pre_tanh = pre_tanh_key(self.key)
        self._keeps_noise = self.samples and self._keeps_columns and self._pre_tanh in self.out_keys
        self._addresses = [parameter.data_ptr for parameter in policy.parameters()]
        self._places = [address() for address in self._addresses]
        self._attributes = [*map(vars, modules)]
        self._entries = [d.values() for m in modules for d in (m._modules, m._parameters) if d]
        self._known = [*itertools.chain(*self._entries)]

    def is_valid(self) -> bool:
        """Return ``False`` if a parameter, module, hook or ``forward`` was added or replaced."""
        try:
            same = [*itertools.chain(*self._entries)] == self._known
        except RuntimeError:  # comparing lists fails if a tensor was replaced
            return False
        return (
            same
            and [address() for address in self._addresses] == self._places
            and not any(self._hooks)
            and not any(map(operator.contains, self._attributes, _FORWARD))
        )

    # ------------------------------------------------------------------ random numbers
    def continue_from(self, other: NumpyPolicy | None) -> None:
        """Reuse random numbers that ``other`` drew in advance, if distribution and shape match."""
        if other is not None and self._sampler.draws == other._sampler.draws:
            self.noise = other.noise

    def has_noise(self, steps: int) -> bool:
        """Return whether random numbers for ``steps`` time steps are available or not needed."""
        return len(self.noise) >= steps or not self.samples

    def _draw(self, steps: int) -> None:
        self.noise = [*self._sampler.noise(steps)][::-1] + self.noise

    # ------------------------------------------------------------------ a batch
    def begin(self, steps: int, into: Array | None = None) -> None:
        """Start a batch.

        Args:
            steps: expected number of time steps, for which missing random numbers are drawn.
            into: output array for actions, ``[steps, num_envs, ...]``; ``None``: allocate arrays.
        """
        missing = steps - len(self.noise)
        if self.samples and missing > 0:  # drawing extra steps must not change the numbers
            self._draw(max(missing, _AHEAD) if self._sampler.at_once else missing)
        self._sampler.refresh()
        self._actions, self._columns, self._noises = [], [], []
        self._into, self._rows = into, itertools.repeat(None) if into is None else iter(into)

    @property
    def actions(self) -> tuple[Any, tuple[int, ...], Any]:
        """Key, shape (``[num_envs, ...]``) and dtype of the actions for one time step."""
        return self.key, self._sampler.actions, self._sampler.dtype

    @property
    def steps(self) -> int:
        """Number of time steps since :meth:`begin`."""
        return len(self._actions)

    def __call__(self, observation: Mapping[Any, Array]) -> dict[Any, Array]:
        """Return a dict of actions for a dict of observations, all ``[num_envs, ...]``."""
        value = observation[self._seen]
        for weight, bias, out, activate in self._hidden:
            dot(value, weight, out)
            add(out, bias, out)
            if activate is not None:
                activate(out, out)
            value = out
        weight, bias, out, _ = self._last
        if self._keeps_columns:
            value = dot(value, weight)  # outputs() reads this array later, so `out` is not reused
            self._columns.append(value)
        else:
            value = dot(value, weight, out)
        add(value, bias, value)
        if self.samples:
            if not self.noise:
                self._draw(1)
            noise = self.noise.pop()
            action = self._sampler.sample(value, noise, next(self._rows))
            if self._keeps_noise:
                self._noises.append(noise)
        else:
            action = self._sampler.likeliest(value, next(self._rows))
        if self._keeps_actions:
            self._actions.append(action)
        return {self.key: action}

    def outputs(self) -> dict[Any, Tensor]:
        """Return the policy's outputs since :meth:`begin`.

        Returns:
            A dict of tensors ``[num_envs, steps, ...]``. Actions are omitted if :meth:`begin`
            received an array ``into``.
        """
        into = self._into
        if not self._keeps_columns:
            return {self.key: _stacked(self._actions)} if into is None else {}
        actions = _stacked(self._actions) if into is None else torch.from_numpy(into.swapaxes(0, 1))
        with torch.no_grad():
            self._densities.refresh()
            inputs = {"columns": _stacked(self._columns), "action": actions}
            if self._keeps_noise:
                inputs["noise"] = _stacked(self._noises)
            computed = self._densities(inputs)
        found = {**computed, self.key: actions}
        return {key: found[key] for key in self.out_keys if into is None or key != self.key}

    def _compute_outputs(self, inputs: Any) -> dict[Any, Tensor]:
        """Return distribution parameters, log-probabilities and actions before the tanh."""
        actions = inputs["action"]
        parameters = self._head(inputs["columns"])
        outputs = dict(zip(self.policy.module[0].out_keys, parameters))
        if self._pre_tanh in self.out_keys:
            loc, scale = parameters
            noise = inputs["noise"] if self._keeps_noise else torch.zeros_like(loc)
            outputs[self._pre_tanh] = torch.addcmul(loc, scale, noise)
        if self._sampling.return_log_prob:
            result = TensorDict(outputs, actions.shape[:2])
            log_prob = self._sampling.get_dist(result).log_prob(actions)
            outputs[self._sampling.log_prob_key] = log_prob
        return outputs


def _stacked(steps: list[Array]) -> Tensor:
    """Stack one array ``[num_envs, ...]`` per step into a tensor ``[num_envs, steps, ...]``."""
    return torch.from_numpy(steps[0][:, None] if len(steps) == 1 else np.stack(steps, axis=1))


def copy_on_host(policy: Any, num_envs: int) -> HostCopy:
    """Copy a GPU policy to the host for :class:`NumpyPolicy`.

    Raises:
        NumpyPolicyError: if NumPy does not support the policy, or if the policy cannot be copied.
    """
    if type(policy) not in _KNOWN:
        raise NumpyPolicyError(f"{type(policy).__name__} is not a policy from kit.modules")
    parameters = [*policy.parameters()]
    if any(map(is_lazy, parameters)):
        raise NumpyPolicyError("the policy has uninitialised lazy parameters")
    for part in policy.modules():
        if type(part).__module__.split(".")[0] not in _COPIED:
            raise NumpyPolicyError(f"NumPy does not support the layer {type(part).__name__}")
        if part._forward_hooks or part._forward_pre_hooks:
            raise NumpyPolicyError("the policy has hooks")
    largest = max((parameter.numel() for parameter in parameters), default=0)
    if num_envs * largest > MOST_PRODUCTS:
        raise NumpyPolicyError(f"a layer needs too many multiplications: {num_envs * largest}")
    try:
        return HostCopy(policy)
    except (RuntimeError, TypeError) as error:  # PyTorch cannot copy tensors with gradient history
        raise NumpyPolicyError(f"the policy cannot be copied to the host: {error}") from None


class _Parts(NamedTuple):
    """The parts of a policy that NumPy needs."""

    network: Any
    seen: Any
    """Key of the observation."""
    sampler: Sampler
    head: Any = None
    """Head that computes distribution parameters; ``None`` if the only output is the action."""


def _parts(policy: Any, num_envs: int, samples: bool) -> _Parts:
    """Return the parts of a supported policy, or raise NumpyPolicyError."""
    if type(policy) in (ProbabilisticActor, SquashedActor) and len(policy.module) == 2:
        head = _only_head(policy.module[0])
        kind = policy.module[1].distribution_class
        is_supported = kind is head.distribution and kind in OF_DISTRIBUTIONS
        if not is_supported or len(getattr(head, "shape", (1,))) != 1:
            name = getattr(kind, "__name__", kind)
            raise NumpyPolicyError(f"NumPy does not support the distribution {name}")
        if isinstance(head, ClippedTanhNormal):
            raise NumpyPolicyError("the policy's log standard deviations are clipped")
        sampler = OF_DISTRIBUTIONS[head.distribution](head, num_envs)
        network = policy.module[0].module.network
        return _Parts(network, _only_input(policy.module[0]), sampler, head)
    modules = [*policy.module] if type(policy) is TensorDictSequential else [policy]
    out_keys = getattr(policy, "out_keys", None) or ()
    if set(out_keys) == {"action"} and type(modules[0]) in _NOISES and len(modules) <= 2:
        noise = modules[1] if len(modules) > 1 else None
        if noise is not None and type(noise) not in _NOISES[type(modules[0])]:
            raise NumpyPolicyError(f"the policy's actions are modified by {type(noise).__name__}")
        make = _greedy if type(modules[0]) is QValueActor else _deterministic
        return make(modules[0], noise if samples else None, num_envs)
    name = type(policy).__name__
    raise NumpyPolicyError(f"{name} is not a policy from kit.modules with a single action")


_NOISES: dict[type, tuple[type, ...]] = {
    QValueActor: (EpsilonGreedy, EGreedyModule),
    Actor: (GaussianNoise,),
}
"""Noise modules that may follow a greedy or deterministic policy."""

_KNOWN = (ProbabilisticActor, SquashedActor, TensorDictSequential, *_NOISES)
_COPIED = ("torch", "tensordict", "torchrl", "kit")
"""Packages whose layers can be copied. Other layers may contain arbitrary objects."""


def _only_input(module: Any) -> Any:
    if len(module.in_keys) != 1:
        raise NumpyPolicyError(f"the policy reads several entries: {[*module.in_keys]}")
    return module.in_keys[0]


def _only_head(module: Any) -> Any:
    heads: Any = getattr(module, "module", None)
    is_single = type(heads) is Heads and len(heads.heads) == 1
    if not is_single or type(heads.heads[0]) not in HEADS:
        raise NumpyPolicyError("the policy has several actions or a shared backbone")
    return heads.heads[0]


def _greedy(policy: Any, noise: Any, num_envs: int) -> _Parts:
    """Return the parts of a Q-network with optional epsilon-greedy noise."""
    values, selector = policy.module
    masked = selector.action_mask_key is not None or getattr(noise, "action_mask_key", None)
    if masked or selector.action_space != "categorical":
        raise NumpyPolicyError("the policy's actions are masked or not integers")
    seen = _only_input(values)
    if noise is None:
        return _Parts(values.module, seen, EpsilonGreedySampler(None, num_envs, 0))
    spec = noise.spec["action"]
    if type(spec) is not Categorical or spec.dtype != torch.int64 or spec.shape != (num_envs,):
        raise NumpyPolicyError(f"random actions from {type(spec).__name__} are not supported")
    sampler = EpsilonGreedySampler(noise, num_envs, int(spec.n))
    return _Parts(values.module, seen, sampler)


def _deterministic(policy: Any, noise: Any, num_envs: int) -> _Parts:
    """Return the parts of a deterministic actor with optional Gaussian noise."""
    head, bounds = _only_head(policy), None
    if type(head) is not Scaled or len(head.shape) != 1:
        raise NumpyPolicyError("the policy's action is not a bounded vector")
    if noise is not None:
        spec = noise.spec["action"]
        if isinstance(spec, Bounded):
            bounds = spec.space.low.numpy(), spec.space.high.numpy()
    sampler = ScaledSampler(head, num_envs, noise, bounds)
    return _Parts(policy.module.network, _only_input(policy), sampler)


def _layers(network: Any, num_envs: int) -> list[tuple[Array, Array, Array, Any]]:
    """Return the weights, bias, output buffer and activation of each layer."""
    if type(network) is not FlattenMLP:
        raise NumpyPolicyError(f"the policy's network is {type(network).__name__}")
    if type(network.flatten) is not Flatten or not network.flatten.is_vector:
        raise NumpyPolicyError("the policy's observation is not a single floating-point vector")
    found: list[Any] = []
    for layer in network.layers:
        if type(layer) is nn.Linear and layer.bias is not None:
            weight, bias = layer.weight.detach(), layer.bias.detach()
            if weight.device.type != "cpu" or weight.dtype != torch.float32:
                raise NumpyPolicyError(
                    f"weights are {weight.dtype} on {weight.device}, not float32 on CPU"
                )
            if num_envs * weight.numel() > MOST_PRODUCTS:
                raise NumpyPolicyError(
                    f"a layer needs too many multiplications: {num_envs * weight.numel()}"
                )
            memory = np.empty((num_envs, layer.out_features), np.float32)
            # Adding a bias of shape [1, n] is four times faster than adding one of shape [n].
            found.append((weight.numpy().T, bias.numpy()[None], memory, None))
        elif type(layer) in ACTIVATIONS and found and found[-1][3] is None:
            found[-1] = (*found[-1][:3], ACTIVATIONS[type(layer)])
        else:
            raise NumpyPolicyError(f"NumPy does not support the layer {type(layer).__name__}")
    if found and found[-1][3] is not None:
        raise NumpyPolicyError("the policy's output layer has an activation")
    return found
