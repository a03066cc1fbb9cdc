"""Running a TensorDict policy on plain tensors, at the cost of its tensor operations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

from kit.envs.spaces import Key
from kit.steps import SettingError
from kit.tracing import FlatProgram, NotTraceable, Watch, trace

Tensors = dict[Key, Tensor]


class PolicyRunner:
    """Calls a policy with the tensors it reads and returns the tensors it writes.

    The first call goes through the TensorDict module and is traced; later calls replay its tensor
    operations, with the same results and the same random numbers, reading the parameters where
    they live: the learner's updates are seen at once and nothing is synchronised. A policy that
    cannot be traced (it decides something on the host) runs as a TensorDict module; the reason is
    told once.

    Args:
        policy: module (or function) from TensorDict to TensorDict.
        reads: keys to give it, of those that the environment and the collector have; others that
            it asks for are an error.
        num_envs: rows of every tensor.
        exploration_type: whether actions are sampled.
        fast: whether to trace at all.

    Attributes:
        out_keys: what the policy writes; known after the first call.
        plain_reason: why the policy runs as a TensorDict module; empty while it does not.

    Raises:
        SettingError: if the policy reads a key that nobody gives.
    """

    def __init__(
        self,
        policy: Callable[[TensorDictBase], TensorDictBase],
        reads: Sequence[Key],
        num_envs: int,
        *,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        fast: bool = True,
    ) -> None:
        self.policy = policy
        self.num_envs = num_envs
        self.exploration_type = exploration_type
        self.in_keys = _wanted(policy, reads)
        self.out_keys: list[Key] = []
        self.plain_reason = "" if fast else "asked for"
        self._program: FlatProgram | None = None
        self._keys_read: list[Key] = []
        self._watch = Watch(policy)
        self._verified = False

    def prepare(self) -> None:
        """Forget the trace if the policy is no longer what was traced; call once per batch."""
        if self._watch.look_closely() or not (self._program and self._program.is_valid()):
            self._program = None

    def __call__(self, tensors: Mapping[Key, Tensor]) -> Sequence[Tensor]:
        """Return what the policy writes, in the order of ``out_keys``.

        To be called without gradients.

        Args:
            tensors: at least ``in_keys``, each with ``num_envs`` rows.
        """
        if self._program is not None and self._verified:
            return self._program(*[tensors[key] for key in self._keys_read])
        inputs = [tensors[key] for key in self.in_keys]
        if self._program is not None:
            return self._verify(inputs)
        return self._plain(*inputs) if self.plain_reason else self._trace(inputs)

    @property
    def replays(self) -> bool:
        """Whether calls replay a trace, so that they may run in inference mode."""
        return self._program is not None and self._verified

    def _plain(self, *inputs: Tensor) -> list[Tensor]:
        given = TensorDict(dict(zip(self.in_keys, inputs)), [self.num_envs])
        before = {key: given.get(key) for key in self.in_keys}
        with set_exploration_type(self.exploration_type):
            written = self.policy(given)
        if not self.out_keys:
            self.out_keys = [
                key
                for key in written.keys(include_nested=True, leaves_only=True)
                if key not in before or written.get(key) is not before[key]
            ]
        return [written.get(key) for key in self.out_keys]

    def _trace(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        generator = torch.get_rng_state()
        try:
            self._program, outputs = trace(self._plain, inputs)
        except NotTraceable as reason:
            return self._give_up(str(reason), generator, inputs)
        self._keys_read = [self.in_keys[number] for number in self._program.inputs_read]
        # A policy that changes its own buffers must not be run twice to compare.
        self._verified = self._program.changes_constants
        return outputs

    def _verify(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run both ways once, from the same random numbers, and keep the fast one if they agree."""
        assert self._program is not None
        generator = torch.get_rng_state()
        fast = self._program(*[inputs[number] for number in self._program.inputs_read])
        torch.set_rng_state(generator)
        plain = self._plain(*inputs)
        self._verified = all(torch.equal(a, b) for a, b in zip(fast, plain))
        if not self._verified:
            self._program = None
            self._tell("it does not repeat itself: something in it changes from call to call")
        return plain

    def _give_up(self, reason: str, generator: Tensor, inputs: list[Tensor]) -> Sequence[Tensor]:
        self._program = None
        self._tell(reason)
        torch.set_rng_state(generator)
        return self._plain(*inputs)

    def _tell(self, reason: str) -> None:
        self.plain_reason = reason
        warnings.warn(
            f"the policy runs as a TensorDict module, not on the fast path: {reason}", stacklevel=2
        )


def _wanted(policy: Any, reads: Sequence[Key]) -> list[Key]:
    wanted = getattr(policy, "in_keys", None)
    if wanted is None:
        return list(reads)
    missing = [key for key in wanted if key not in reads]
    if missing:
        raise SettingError(
            "policy",
            type(policy).__name__,
            f"reads {missing}, which neither the environment nor the collector has",
            f"keys there are: {list(reads)}",
        )
    return [key for key in reads if key in wanted]
