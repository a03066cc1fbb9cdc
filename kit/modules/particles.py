"""Particles: networks of one structure with weights of their own, which run in one batched pass."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.func import functional_call

from kit.steps import SettingError, StepPlan


class Particles(nn.Module):
    """Networks whose parameters are stacked, ``[particles, ...]``.

    The rows of its inputs are as many blocks of consecutive rows as there are particles, and each
    block passes the particle of its number. Where rows do not divide, as in an evaluation of 10
    episodes by 4 particles, some blocks have a row more than others.

    Args:
        networks: one for each particle.

    Attributes:
        count: of the particles.
        network: the structure, with the stacked parameters.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.count = len(networks)
        self.network = copy.deepcopy(networks[0])
        self._names = [name for name, _ in self.network.named_parameters()]
        for name in self._names:
            path, _, last = name.rpartition(".")
            stacked = torch.stack([network.get_parameter(name).detach() for network in networks])
            setattr(self.network.get_submodule(path), last, nn.Parameter(stacked))

    def forward(self, *inputs: Tensor) -> Any:
        """Return the outputs of the particles, of each for its rows of inputs ``[rows, ...]``."""
        rows, count = inputs[0].shape[0], self.count
        each = -(-rows // count)
        blocks, place = inputs, None
        if each * count > rows:  # shorter blocks end with zeros
            row = torch.arange(rows, device=inputs[0].device)
            number = particle_of(row, rows, count)
            place = number * each + row - (number * rows + count - 1) // count
            zeros = (one.new_zeros(each * count, *one.shape[1:]) for one in inputs)
            blocks = tuple(zero.index_copy(0, place, one) for zero, one in zip(zeros, inputs))
        blocks = tuple(one.reshape(count, each, *one.shape[1:]) for one in blocks)
        # By path: a functional loss of TorchRL puts parameters where named_parameters sees none.
        parameters = {name: operator.attrgetter(name)(self.network) for name in self._names}
        one = functools.partial(functional_call, self.network)
        found = torch.vmap(one)(parameters, blocks)
        outputs = [found] if isinstance(found, Tensor) else found
        flat = [output.flatten(0, 1) for output in outputs]
        flat = flat if place is None else [output[place] for output in flat]
        return flat[0] if isinstance(found, Tensor) else tuple(flat)


def particle_of(row: Any, rows: int, particles: int) -> Any:
    """The particle that a row belongs to, of a number or of a tensor of numbers."""
    return row * particles // rows


def make_particles(
    make: Callable[[], tuple[Any, ...]], count: int, plan: StepPlan
) -> tuple[Any, ...]:
    """Make the same networks several times and stack them.

    Args:
        make: makes networks of TensorDict modules, such as an actor and a critic, which may share
            some; the initial weights of each call are those of one particle.
        count: of the particles.
        plan: of the run, whose environments and minibatches are divided among the particles.

    Raises:
        SettingError: if they do not divide evenly, or a network is recurrent.
    """
    _check(plan, count)
    made = [make() for _ in range(count)]
    stacked: set[int] = set()
    for same in zip(*([m for network in one for m in network.modules()] for one in made)):
        first = same[0]
        if hasattr(first, "burn_in"):
            why = "has a hidden state, which particles do not have"
            raise SettingError("recurrent", type(first).__name__, why, [None])
        leaf = isinstance(first, TensorDictModule) and not isinstance(first, TensorDictSequential)
        if leaf and id(first) not in stacked:
            first.module = Particles([module.module for module in same])
            stacked.add(id(first))
    return made[0]


def _check(plan: StepPlan, count: int) -> None:
    """Refuse a plan whose minibatches do not give each particle as many transitions."""
    size = plan.minibatch_size or 0
    for is_uneven, field, value, works in (
        (plan.collects_episodes, "steps.steps_per_env", None, 64),
        (plan.num_envs % count, "env.num_envs", plan.num_envs, count),
        (size % count, "steps.minibatch_size", size, max(size - size % count, count)),
        (plan.sequence_length, "steps.sequence_length", plan.sequence_length, None),
        (plan.last_minibatch == "carry", "steps.last_minibatch", "carry", "smaller"),
    ):
        if is_uneven:
            why = f"does not divide batches evenly among {count} particles"
            raise SettingError(field, value, why, [works])
