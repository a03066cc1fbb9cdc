"""Particles: networks of the same architecture but separate weights, run in one batched pass."""

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
    """Networks of the same architecture with stacked parameters, ``[particles, ...]``.

    The rows of the inputs are split into one block of consecutive rows per particle, and each
    particle processes its block. If the rows cannot be divided evenly, such as 10 evaluation
    episodes among 4 particles, some blocks have an extra row.

    Args:
        networks: one network per particle.

    Attributes:
        count: number of particles.
        network: the network with stacked parameters.
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
        """Return outputs for inputs ``[rows, ...]``; each particle processes a block of rows."""
        rows, count = inputs[0].shape[0], self.count
        each = -(-rows // count)
        blocks, place = inputs, None
        if each * count > rows:  # pad shorter blocks with zeros
            row = torch.arange(rows, device=inputs[0].device)
            number = particle_of(row, rows, count)
            place = number * each + row - (number * rows + count - 1) // count
            zeros = (one.new_zeros(each * count, *one.shape[1:]) for one in inputs)
            blocks = tuple(zero.index_copy(0, place, one) for zero, one in zip(zeros, inputs))
        blocks = tuple(one.reshape(count, each, *one.shape[1:]) for one in blocks)
        # Attribute paths are used because TorchRL's functional losses hide parameters from
        # named_parameters.
        parameters = {name: operator.attrgetter(name)(self.network) for name in self._names}
        one = functools.partial(functional_call, self.network)
        found = torch.vmap(one)(parameters, blocks)
        outputs = [found] if isinstance(found, Tensor) else found
        flat = [output.flatten(0, 1) for output in outputs]
        flat = flat if place is None else [output[place] for output in flat]
        return flat[0] if isinstance(found, Tensor) else tuple(flat)


def particle_of(row: Any, rows: int, particles: int) -> Any:
    """Return the index of the particle that processes a row; ``row`` is an int or a tensor."""
    return row * particles // rows


def make_particles(
    make: Callable[[], tuple[Any, ...]], count: int, plan: StepPlan
) -> tuple[Any, ...]:
    """Create ``count`` versions of each network and stack them into particles.

    Args:
        make: function that creates a tuple of TensorDict modules, such as an actor and a critic,
            which may share modules. Each call provides the initial weights of one particle.
        count: number of particles.
        plan: step plan; its environments and minibatches are divided among the particles.

    Raises:
        SettingError: if the plan cannot be divided evenly among the particles, or a network is
            recurrent.
    """
    _check(plan, count)
    networks = [make() for _ in range(count)]
    stacked: set[int] = set()
    for same in zip(*([m for part in one for m in part.modules()] for one in networks)):
        first = same[0]
        if hasattr(first, "burn_in"):
            reason = "Particles do not support recurrent networks"
            raise SettingError("recurrent", type(first).__name__, reason, [None])
        leaf = isinstance(first, TensorDictModule) and not isinstance(first, TensorDictSequential)
        if leaf and id(first) not in stacked:
            first.module = Particles([module.module for module in same])
            stacked.add(id(first))
    return networks[0]


def in_one_process(plan: StepPlan, count: int) -> StepPlan:
    """Return a plan in which the processes of a plan become particles of one process.

    pyrado collects whole episodes for each particle and takes one gradient step with all of them.
    The particles of one process collect the same number of steps from environments of their own.

    Raises:
        SettingError: if the length of an episode is unknown.
    """
    if plan.world_size != count or not plan.collects_episodes:
        return plan
    if plan.episode_length is None:
        reason = "Particles collect equally many steps, which follow from the episode length"
        raise SettingError("episode_length", None, reason, "Set episode_length or env_max_steps")
    each = plan.frames_per_batch // plan.num_envs
    return plan.replace(
        world_size=1, num_envs=count * plan.num_envs, steps_per_env=each, min_steps=None,
        min_episodes=None, episode_length=None, minibatch_size=None,
        minibatches_per_gradient_step=1,
    )  # fmt: skip


def _check(plan: StepPlan, count: int) -> None:
    """Raise SettingError if particles would get different numbers of transitions per minibatch."""
    size = plan.minibatch_size or 0
    for is_uneven, field, value, hint in (
        (plan.collects_episodes, "steps.steps_per_env", None, 64),
        (plan.num_envs % count, "env.num_envs", plan.num_envs, count),
        (size % count, "steps.minibatch_size", size, max(size - size % count, count)),
        (plan.sequence_length, "steps.sequence_length", plan.sequence_length, None),
        (plan.last_minibatch == "carry", "steps.last_minibatch", "carry", "smaller"),
    ):
        if is_uneven:
            reason = f"Batches cannot be divided evenly among {count} particles"
            raise SettingError(field, value, reason, [hint])
