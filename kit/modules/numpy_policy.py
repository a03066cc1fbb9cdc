"""Actions of small multilayer perceptrons, computed by NumPy.

An operation of PyTorch takes a microsecond where nothing else runs, but ten right after a step of a
physics engine has used up the processor's caches: the way to its kernel is long, NumPy's is short.
Random numbers are PyTorch's, drawn in the same order. Sums are rounded in another order, so actions
agree to about six digits. Log-probabilities are computed once per batch, by the policy's own
distribution of the network's outputs.
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
"""Largest layer that NumPy computes, in multiplications for all environments."""

_AHEAD = 128
"""Time steps for which random numbers are drawn at once, at least."""

add, dot, maximum = np.add, np.dot, np.maximum  # of a module they are looked up at every use

_FORWARD = itertools.repeat("forward")
_ZERO = np.float32(0)


def _relu(values: Array, out: Array) -> None:
    maximum(values, _ZERO, out=out)


ACTIVATIONS: dict[type[nn.Module], Callable[[Array, Array], Any]] = {
    nn.Tanh: np.tanh,
    SigmoidTanh: np.tanh,
    nn.ReLU: _relu,
}
"""Called with an array and where the result is written."""


class NumpyPolicyError(RuntimeError):
    """A policy whose actions NumPy does not compute, and why."""


class NumpyPolicy:
    """Computes the actions of the kit's actors and Q-networks, step by step.

    These are actors of :func:`~kit.modules.make_actor`, and with no outputs but the action:
    deterministic ones, with :class:`~kit.modules.exploration.GaussianNoise` or without, and
    Q-networks of :func:`~kit.modules.make_q_network`, epsilon-greedy or greedy.

    Parameters are read where they live, so that a learner's updates are seen at once.

    Args:
        policy: the actor.
        num_envs: rows of an observation.
        exploration_type: ``RANDOM`` samples actions, ``DETERMINISTIC`` takes the likeliest.
        keeps_outputs: whether :meth:`outputs` is called.

    Attributes:
        reads: key and shape of the observation of one environment.
        noise: random numbers drawn ahead, one array for each time step, the next one last.

    Raises:
        NumpyPolicyError: if it is another policy, has hooks or a ``forward`` of its own, or is so large
            that PyTorch is as fast.
    """

    def __init__(
        self,
        policy: Any,
        num_envs: int,
        exploration_type: ExplorationType | None,
        keeps_outputs: bool = True,
    ) -> None:
        if exploration_type not in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC):
            raise NumpyPolicyError(f"actions are chosen by {exploration_type}")
        self.policy, self.num_envs = policy, num_envs
        samples = exploration_type is ExplorationType.RANDOM
        network, self._seen, self._sampler, self._head = _parts(policy, num_envs, samples)
        modules = list(policy.modules())
        each = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooks = [_global_forward_hooks, _global_forward_pre_hooks, *each]
        if any(self._hooks):
            raise NumpyPolicyError("it has hooks")
        for module in modules:
            if "forward" in vars(module):
                raise NumpyPolicyError(f"the forward of its {type(module).__name__} was replaced")
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
            self._densities = Traced(self._written, self._head, self._sampling, name="")
        self._pre_tanh = pre_tanh_key(self.key)
        self._keeps_noise = self.samples and self._keeps_columns and self._pre_tanh in self.out_keys
        self._addresses = [parameter.data_ptr for parameter in policy.parameters()]
        self._places = [address() for address in self._addresses]
        self._attributes = [*map(vars, modules)]
        self._entries = [d.values() for m in modules for d in (m._modules, m._parameters) if d]
        self._known = [*itertools.chain(*self._entries)]

    def is_valid(self) -> bool:
        """Whether parameters are where they were, and modules what they were and do."""
        try:
            same = [*itertools.chain(*self._entries)] == self._known
        except RuntimeError:  # two tensors have no truth value, one and itself are not compared
            return False
        return (
            same
            and [address() for address in self._addresses] == self._places
            and not any(self._hooks)
            and not any(map(operator.contains, self._attributes, _FORWARD))
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
        self._actions, self._columns, self._noises = [], [], []
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
        """Return the actions of one time step of observations, both by key, ``[num_envs, ...]``."""
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
        """Return the policy's outputs in the steps since :meth:`begin`.

        Returns:
            By key, ``[num_envs, steps, ...]``, without actions that were written elsewhere.
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
            written = self._densities(inputs)
        found = {**written, self.key: actions}
        return {key: found[key] for key in self.out_keys if into is None or key != self.key}

    def _written(self, inputs: Any) -> dict[Any, Tensor]:
        """Return the distribution's parameters, log-probabilities and actions before the tanh."""
        actions = inputs["action"]
        parameters = self._head(inputs["columns"])
        written = dict(zip(self.policy.module[0].out_keys, parameters))
        if self._pre_tanh in self.out_keys:
            loc, scale = parameters
            noise = inputs["noise"] if self._keeps_noise else torch.zeros_like(loc)
            written[self._pre_tanh] = torch.addcmul(loc, scale, noise)
        if self._sampling.return_log_prob:
            result = TensorDict(written, actions.shape[:2])
            log_prob = self._sampling.get_dist(result).log_prob(actions)
            written[self._sampling.log_prob_key] = log_prob
        return written


def _stacked(steps: list[Array]) -> Tensor:
    """Stack arrays ``[num_envs, ...]`` of time steps to ``[num_envs, steps, ...]``."""
    return torch.from_numpy(steps[0][:, None] if len(steps) == 1 else np.stack(steps, axis=1))


def copy_on_host(policy: Any, num_envs: int) -> HostCopy:
    """A copy on the host of a policy on a GPU, for :class:`NumpyPolicy`.

    Raises:
        NumpyPolicyError: if it is no policy that NumPy computes, as far as its class and size tell.
    """
    if type(policy) not in _KNOWN:
        raise NumpyPolicyError(f"{type(policy).__name__} is no actor of kit.modules")
    parameters = [*policy.parameters()]
    if any(map(is_lazy, parameters)):
        raise NumpyPolicyError("it has parameters without a shape yet")
    for part in policy.modules():
        if type(part).__module__.split(".")[0] not in _COPIED:
            raise NumpyPolicyError(f"{type(part).__name__} is no layer that NumPy computes here")
        if part._forward_hooks or part._forward_pre_hooks:
            raise NumpyPolicyError("it has hooks")
    largest = max((parameter.numel() for parameter in parameters), default=0)
    if num_envs * largest > MOST_PRODUCTS:
        raise NumpyPolicyError(f"a layer makes {num_envs * largest} multiplications")
    try:
        return HostCopy(policy)
    except (RuntimeError, TypeError) as error:  # PyTorch copies no tensors with gradients
        raise NumpyPolicyError(f"it cannot be copied to the host: {error}") from None


class _Parts(NamedTuple):
    """What has to be known of a policy."""

    network: Any
    seen: Any
    """key of the observation."""
    sampler: Sampler
    head: Any = None
    """makes a distribution's parameters of the network's columns, where the policy has one."""


def _parts(policy: Any, num_envs: int, samples: bool) -> _Parts:
    """Return the parts of a policy of the kind that is known here."""
    if type(policy) in (ProbabilisticActor, SquashedActor) and len(policy.module) == 2:
        head = _only_head(policy.module[0])
        chosen = policy.module[1].distribution_class
        known = chosen is head.distribution and chosen in OF_DISTRIBUTIONS
        if not known or len(getattr(head, "shape", (1,))) != 1:
            raise NumpyPolicyError(f"its distribution is {getattr(chosen, '__name__', chosen)}")
        if isinstance(head, ClippedTanhNormal):
            raise NumpyPolicyError("its log deviations are clipped")
        sampler = OF_DISTRIBUTIONS[head.distribution](head, num_envs)
        network = policy.module[0].module.network
        return _Parts(network, _only_input(policy.module[0]), sampler, head)
    modules = [*policy.module] if type(policy) is TensorDictSequential else [policy]
    written = getattr(policy, "out_keys", None) or ()
    if set(written) == {"action"} and type(modules[0]) in _NOISES and len(modules) <= 2:
        noise = modules[1] if len(modules) > 1 else None
        if noise is not None and type(noise) not in _NOISES[type(modules[0])]:
            raise NumpyPolicyError(f"its actions are changed by {type(noise).__name__}")
        make = _greedy if type(modules[0]) is QValueActor else _deterministic
        return make(modules[0], noise if samples else None, num_envs)
    raise NumpyPolicyError(
        f"{type(policy).__name__} is no actor of kit.modules with one action alone"
    )


_NOISES: dict[type, tuple[type, ...]] = {
    QValueActor: (EpsilonGreedy, EGreedyModule),
    Actor: (GaussianNoise,),
}
"""What may change the actions of a greedy or deterministic policy, and only where it samples."""

_KNOWN = (ProbabilisticActor, SquashedActor, TensorDictSequential, *_NOISES)
_COPIED = ("torch", "tensordict", "torchrl", "kit")
"""Packages whose layers can be copied; a layer of another one may hold anything."""


def _only_input(module: Any) -> Any:
    if len(module.in_keys) != 1:
        raise NumpyPolicyError(f"it reads {len(module.in_keys)} entries: {[*module.in_keys]}")
    return module.in_keys[0]


def _only_head(module: Any) -> Any:
    heads: Any = getattr(module, "module", None)
    own = type(heads) is Heads and len(heads.heads) == 1
    if not own or type(heads.heads[0]) not in HEADS:
        raise NumpyPolicyError(
            "it is no actor of make_actor with one action and a network of its own"
        )
    return heads.heads[0]


def _greedy(policy: Any, noise: Any, num_envs: int) -> _Parts:
    """Return the parts of a Q-network, whose greedy action may be replaced by a random one."""
    values, chosen = policy.module
    masked = chosen.action_mask_key is not None or getattr(noise, "action_mask_key", None)
    if masked or chosen.action_space != "categorical":
        raise NumpyPolicyError("its actions are masked, or no numbers")
    seen = _only_input(values)
    if noise is None:
        return _Parts(values.module, seen, EpsilonGreedySampler(None, num_envs, 0))
    spec = noise.spec["action"]
    if type(spec) is not Categorical or spec.dtype != torch.int64 or spec.shape != (num_envs,):
        raise NumpyPolicyError(f"random actions are those of {type(spec).__name__}")
    sampler = EpsilonGreedySampler(noise, num_envs, int(spec.n))
    return _Parts(values.module, seen, sampler)


def _deterministic(policy: Any, noise: Any, num_envs: int) -> _Parts:
    """Return the parts of a deterministic actor, to whose actions noise may be added."""
    head, bounds = _only_head(policy), None
    if type(head) is not Scaled or len(head.shape) != 1:
        raise NumpyPolicyError("its action is not one vector between bounds")
    if noise is not None:
        spec = noise.spec["action"]
        if isinstance(spec, Bounded):
            bounds = spec.space.low.numpy(), spec.space.high.numpy()
    sampler = ScaledSampler(head, num_envs, noise, bounds)
    return _Parts(policy.module.network, _only_input(policy), sampler)


def _layers(network: Any, num_envs: int) -> list[tuple[Array, Array, Array, Any]]:
    """Return weights, bias, memory for the result and activation of each layer."""
    if type(network) is not FlattenMLP:
        raise NumpyPolicyError(f"its network is {type(network).__name__}")
    if type(network.flatten) is not Flatten or not network.flatten.is_vector:
        raise NumpyPolicyError("its observation is not one vector of floating-point numbers")
    found: list[Any] = []
    for layer in network.layers:
        if type(layer) is nn.Linear and layer.bias is not None:
            weight, bias = layer.weight.detach(), layer.bias.detach()
            if weight.device.type != "cpu" or weight.dtype != torch.float32:
                raise NumpyPolicyError(f"its parameters are {weight.dtype} on {weight.device}")
            if num_envs * weight.numel() > MOST_PRODUCTS:
                raise NumpyPolicyError(f"a layer makes {num_envs * weight.numel()} multiplications")
            memory = np.empty((num_envs, layer.out_features), np.float32)
            # One row is added to one row in a quarter of the time that a vector takes.
            found.append((weight.numpy().T, bias.numpy()[None], memory, None))
        elif type(layer) in ACTIVATIONS and found and found[-1][3] is None:
            found[-1] = (*found[-1][:3], ACTIVATIONS[type(layer)])
        else:
            raise NumpyPolicyError(f"{type(layer).__name__} is no layer that NumPy computes here")
    if found and found[-1][3] is not None:
        raise NumpyPolicyError("its outputs pass an activation")
    return found
