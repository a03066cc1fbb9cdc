"""Who acts in a rollout: random actions, an exploration policy, or the policy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules.utils import get_primers_from_module

from kit.envs.backends.base import Mask
from kit.envs.spaces import Arrays, Key, Leaf
from kit.fast.traced import Traced
from kit.modules.numpy_policy import NotInNumpy, NumpyPolicy
from kit.steps import SettingError
from kit.steps.errors import one_of

Tensors = dict[Key, Tensor]
Policy = Callable[[TensorDictBase], TensorDictBase]
FastPolicy = Literal["auto", "exact", "module"]

IS_INIT = "is_init"
"""Key under which a policy finds whether an observation is the first of its episode."""

_NO_CONTEXT: AbstractContextManager[Any] = contextlib.nullcontext()
_FOREVER = 2**62
_AHEAD = 128
"""Random actions that are drawn at once, at most."""


class PolicyPath(NamedTuple):
    """How a collector calls its policy."""

    name: Literal["numpy", "program", "module"]
    """``numpy``: a small network computed by NumPy; ``program``: its recorded tensor operations;
    ``module``: the TensorDict module."""
    reason: str
    """why it is not one of those before; empty where it is ``numpy``."""


def fast_policy_of(fast_policy: FastPolicy | bool) -> FastPolicy:
    """Return how a policy is called, from the arguments of a collector.

    Args:
        fast_policy: ``"auto"``, ``"exact"`` or ``"module"``; false is ``"module"``.

    Raises:
        SettingError: if it is none of the three.
    """
    if isinstance(fast_policy, bool):
        fast_policy = "auto" if fast_policy else "module"
    one_of("fast_policy", fast_policy, ("auto", "exact", "module"))
    return fast_policy


def exploration_type_of(kind: ExplorationType | str) -> ExplorationType:
    """Return how actions are chosen, also by the name of the type.

    Raises:
        SettingError: if there is no such type.
    """
    try:
        return ExplorationType(kind)
    except ValueError:
        works = [each.value for each in ExplorationType]
        raise SettingError("exploration_type", kind, "is no exploration type", works) from None


class ActsOn(Protocol):
    """What has to be known of an environment to act in it."""

    num_envs: int
    observation_leaves: list[Leaf]
    action_leaves: list[Leaf]
    full_action_spec: Any


class Actor:
    """Chooses actions: at random first, then by an exploration policy, then by the policy.

    Args:
        env: whose actions they are.
        policy: module from TensorDict to TensorDict; ``None`` acts at random always.
        exploration_policy: acts until ``exploration_frames``.
        init_random_frames: policy steps with random actions.
        exploration_frames: policy steps until which the exploration policy acts.
        exploration_type: whether the policies sample.
        device: where the policies run.
        fast_policy: see :class:`~kit.collectors.VectorCollector`.

    Attributes:
        runner: calls the policy; ``None`` where actions are always random.
        numpy: computes the policy's actions in place of the runner; ``None`` where it does not.

    Raises:
        SettingError: if one of exploration policy and frames is given without the other, or a
            policy reads a key that is never written.
    """

    def __init__(
        self,
        env: ActsOn,
        policy: Policy | None,
        exploration_policy: Policy | None = None,
        *,
        init_random_frames: int = 0,
        exploration_frames: int = 0,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        device: torch.device | str = "cpu",
        fast_policy: FastPolicy = "exact",
    ) -> None:
        if (exploration_policy is None) != (exploration_frames == 0):
            raise SettingError(
                "exploration_frames",
                exploration_frames,
                f"does not go with exploration_policy={type(exploration_policy).__name__}",
                "give both or none",
            )
        self.env, self.num_envs = env, env.num_envs
        self.device = torch.device(device)
        self._on_cpu = self.device.type == "cpu"
        self.init_random_frames, self.exploration_frames = init_random_frames, exploration_frames
        self.action_keys = [leaf.key for leaf in env.action_leaves]
        keys = [leaf.key for leaf in env.observation_leaves]

        def runner(one: Policy | None) -> PolicyRunner | None:
            if one is None:
                return None
            fast = fast_policy != "module"
            return PolicyRunner(
                one, keys, env.num_envs, exploration_type=exploration_type, fast=fast, device=device
            )

        for one in (policy, exploration_policy):
            _check_writes(one, self.action_keys)
        self.runner, self.explorer = runner(policy), runner(exploration_policy)
        self._runners = [one for one in (self.runner, self.explorer) if one is not None]
        self._random = RandomActions(env)
        self._random_until = _FOREVER if policy is None else init_random_frames
        self._policy_from = max(self._random_until, exploration_frames)
        self._places: list[tuple[Key, int]] = []
        self._zeros: dict[Key, Tensor] = {}
        self._recorded: list[Sequence[Tensor]] = []
        self.keeps_outputs = True
        self.numpy: NumpyPolicy | None = None
        self._wants_numpy = fast_policy == "auto" and policy is not None
        self._not_in_numpy = "" if self._wants_numpy else f"fast_policy={fast_policy!r}"
        if self._wants_numpy:
            self._compute_in_numpy()

    def _compute_in_numpy(self) -> None:
        """Have NumPy compute the policy's actions, if it can."""
        assert self.runner is not None
        before = self.numpy
        try:
            if not self._on_cpu:
                raise NotInNumpy(f"it runs on {self.device}")
            kind = self.runner.exploration_type
            self.numpy = NumpyPolicy(self.runner.policy, self.num_envs, kind)
            self.numpy.continue_from(before)
        except NotInNumpy as reason:
            self.numpy, self._not_in_numpy = None, str(reason)
        self.runner.is_recurrent = self.numpy is None

    @property
    def path(self) -> PolicyPath:
        """How the policy is called; the reason may only be known after its first calls."""
        if self.runner is None:
            return PolicyPath("module", "actions are random")
        if self.numpy is not None:
            return PolicyPath("numpy", "")
        if self.runner.plain_reason:
            return PolicyPath("module", self.runner.plain_reason)
        return PolicyPath("program", self._not_in_numpy)

    # ------------------------------------------------------------------ one batch
    def prepare(self) -> None:
        """Notice policies that have changed; once per batch."""
        for runner in self._runners:
            if runner is self.runner and self.numpy is not None:
                changed = not self.numpy.is_valid()
            else:
                changed = runner.prepare() and runner is self.runner and self._wants_numpy
            if changed:
                self._compute_in_numpy()

    def is_ready(self, policy_steps: int, steps: int) -> bool:
        """Whether a batch needs nothing of PyTorch: NumPy acts, and has its random numbers."""
        numpy = self.numpy
        return numpy is not None and policy_steps >= self._policy_from and numpy.has_noise(steps)

    def begin(
        self, policy_steps: int = 0, steps: int = 0, into: NDArray[Any] | None = None
    ) -> AbstractContextManager[Any]:
        """Begin a batch, after :meth:`prepare`.

        Args:
            policy_steps: of all environments so far.
            steps: time steps of the batch; 0: it is not known how many.
            into: where NumPy may write the actions of all time steps, ``[steps, num_envs, ...]``.

        Returns:
            The context in which to act: inference mode, which is cheaper, wherever no call may have
            to make parameters.
        """
        self._recorded = []
        if steps and policy_steps < self._random_until:
            left = (self._random_until - policy_steps) // self.num_envs
            self._random.begin(min(left, steps), left)
        if self.numpy is not None:
            before = max(self._policy_from - policy_steps, 0) // self.num_envs
            self.numpy.begin(max(steps - before, 0), None if before else into)
            return _NO_CONTEXT
        replays = self._runners and all(runner.replays for runner in self._runners)
        return torch.inference_mode() if replays else _NO_CONTEXT

    def __call__(
        self, observation: Arrays, policy_steps: int = 0, active: Mask | None = None
    ) -> Arrays:
        """Return the actions of one time step, by key, ``[num_envs, ...]``.

        Args:
            observation: by key, ``[num_envs, ...]``.
            policy_steps: of all environments so far.
            active: environments that take this step; ``None``: all.
        """
        if policy_steps < self._policy_from:
            outputs = self._before_the_policy(observation, policy_steps, active)
        elif self.numpy is not None:
            return self.numpy(observation)
        else:
            assert self.runner is not None
            outputs = self.runner(self._tensors(observation))
        if self.keeps_outputs:
            self._recorded.append(outputs)
        if not self._places:
            keys = self._keys
            self._places = [(key, keys.index(key)) for key in self.action_keys]
        if self._on_cpu:
            return {key: outputs[place].numpy() for key, place in self._places}
        return {key: outputs[place].cpu().numpy() for key, place in self._places}

    @property
    def _keys(self) -> Sequence[Key]:
        """Keys of what is recorded; known after the policy's first call."""
        return self.action_keys if self.runner is None else self.runner.out_keys

    def _tensors(self, observation: Arrays) -> Tensors:
        if self._on_cpu:
            if self.is_recurrent:  # it may keep what it is given, and this memory is used again
                observation = {key: array.copy() for key, array in observation.items()}
            return {key: torch.from_numpy(array) for key, array in observation.items()}
        return {k: torch.from_numpy(array).to(self.device) for k, array in observation.items()}

    def random_steps(self, policy_steps: int, count: int) -> int:
        """Return how many of the next ``count`` policy steps have random actions."""
        return min(max(self._random_until - policy_steps, 0), count)

    def _before_the_policy(
        self, observation: Arrays, policy_steps: int, active: Mask | None
    ) -> Sequence[Tensor]:
        """Return the outputs of a step with random actions or those of the exploration policy."""
        count = self.num_envs if active is None else int(active.sum())
        at_random = self.random_steps(policy_steps, count)
        if at_random:
            drawn = self._random(observation)
            if self.runner is None:
                return [drawn[key] for key in self.action_keys]
            if at_random == count:
                return self._padded(drawn, observation, None)
        assert self.runner is not None
        tensors = self._tensors(observation)
        if self.explorer is not None and policy_steps < self.exploration_frames:
            values = self.explorer(tensors)
            by_key = dict(zip(self.explorer.out_keys, values))
            outputs: Sequence[Tensor] = self._padded(by_key, observation, self.explorer)
        else:
            outputs = self.runner(tensors)
        if not at_random:
            return outputs
        rows = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        playing = np.arange(self.num_envs) if active is None else np.flatnonzero(active)
        rows[torch.from_numpy(playing[:at_random])] = True
        others = [drawn.get(key, torch.zeros_like(o)) for key, o in zip(self._keys, outputs)]
        return [
            one if key == IS_INIT else _where(rows, other.to(one.device), one)
            for key, one, other in zip(self._keys, outputs, others)
        ]

    def _padded(
        self, values: Tensors, observation: Arrays, acting: PolicyRunner | None
    ) -> list[Tensor]:
        """Return another source's outputs under the policy's keys, zero where it has none.

        Args:
            values: by key.
            observation: acted on.
            acting: whose outputs they are; the others skip this step.
        """
        assert self.runner is not None
        if not self._zeros:
            peeked = self.runner.peek(self._tensors(observation))
            self._zeros = {k: torch.zeros_like(v) for k, v in zip(self.runner.out_keys, peeked)}
        starts = {one: one.skip_step() for one in self._runners if one is not acting}
        known = {IS_INIT: starts[self.runner], **values}
        return [known.get(key, zero).to(self.device) for key, zero in self._zeros.items()]

    def outputs(self) -> Tensors:
        """Return all that was written since :meth:`begin`, ``[num_envs, steps, ...]``.

        The keys are those of the policy. Where another acted that does not write them, they are
        zero.
        """
        steps = self._recorded
        found = {
            key: torch.stack([outputs[number] for outputs in steps], dim=1)
            for number, key in enumerate(self._keys if steps else ())
        }
        if self.numpy is None or not self.numpy.steps:
            return found
        last = self.numpy.outputs()
        return {k: torch.cat([found[k], v], dim=1) for k, v in last.items()} if found else last

    @property
    def is_recurrent(self) -> bool:
        """Whether a policy has hidden state, as far as is known before it has acted."""
        return any(runner.is_recurrent for runner in self._runners)

    def end_episodes(self, ended: Mask) -> None:
        """Reset the hidden state of environments whose next step begins an episode.

        Args:
            ended: which environments, ``[num_envs]``.
        """
        for runner in self._runners:
            if runner.is_recurrent:
                runner.end_episodes(ended)

    # ------------------------------------------------------------------ blocks of steps
    def phases(self, policy_steps: int, steps: int) -> list[tuple[PolicyRunner | None, int]]:
        """Return who acts in the next time steps (``None``: random actions), and in how many.

        Args:
            policy_steps: of all environments so far.
            steps: time steps.
        """
        limits: list[tuple[PolicyRunner | None, int]] = [(None, self._random_until)]
        limits += [(self.explorer, self.exploration_frames), (self.runner, _FOREVER)]
        found = []
        for runner, until in limits:
            left = min(max(until - policy_steps, 0) // self.num_envs, steps)
            if left:
                found.append((runner, left))
            policy_steps, steps = policy_steps + left * self.num_envs, steps - left
        return found

    # ------------------------------------------------------------------ in and out
    def restart(self) -> None:
        """Reset all hidden state: every environment begins a new episode."""
        for runner in self._runners:
            runner.restart()

    def seeded(self) -> None:
        """Forget random numbers drawn ahead: there are new ones."""
        self._random.clear()
        if self.numpy is not None:
            self.numpy.noise = []

    def state_dict(self) -> dict[str, Any]:
        """Return hidden state, and random numbers drawn ahead."""
        noise = [] if self.numpy is None else self.numpy.noise
        return {
            "runners": [runner.state_dict() for runner in self._runners],
            "random": self._random.state_dict(),
            "noise": torch.from_numpy(np.stack(noise)) if noise else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for runner, state in zip(self._runners, state_dict["runners"], strict=True):
            runner.load_state_dict(state)
        self._random.load_state_dict(state_dict["random"])
        if self.numpy is not None:
            noise = state_dict["noise"]
            self.numpy.noise = [] if noise is None else [*noise.numpy().copy()]


class RandomActions:
    """Actions drawn from the action spec, many time steps at once where that is the same.

    Args:
        env: whose actions they are; where it has an ``action_mask``, allowed ones are drawn.
    """

    def __init__(self, env: ActsOn) -> None:
        self._env = env
        self._keys = [leaf.key for leaf in env.action_leaves]
        observed = [leaf.key for leaf in env.observation_leaves]
        self._mask = next((key for key in observed if _last(key) == "action_mask"), None)
        self._ahead: list[Tensors] = []  # the next one last
        self._alike: bool | None = None

    def begin(self, steps: int, left: int) -> None:
        """Draw actions for the next ``steps`` time steps, of ``left`` that will be random."""
        missing = steps - len(self._ahead)
        if self._mask is not None or missing <= 0:
            return
        if self._alike is None:
            self._alike = self._draws_alike()
        if self._alike:  # so that one-step batches do not pay for a spec each
            missing = max(missing, min(left - len(self._ahead), _AHEAD))
        self._ahead = self._draw(missing)[::-1] + self._ahead

    def _draw(self, steps: int) -> list[Tensors]:
        drawn = self._env.full_action_spec.rand([steps])
        rows = zip(*[drawn.get(key).unbind(0) for key in self._keys])
        return [dict(zip(self._keys, row)) for row in rows]

    def _draws_alike(self) -> bool:
        """Whether drawing for several time steps at once gives what drawing one by one gives."""
        before, found = torch.get_rng_state(), []
        for parts in ([3], [1, 1, 1]):
            torch.set_rng_state(before)
            rows = [row for steps in parts for row in self._draw(steps)]
            drawn = [row[key] for row in rows for key in self._keys]
            found.append([*drawn, torch.get_rng_state()])
        torch.set_rng_state(before)
        return all(torch.equal(*both) for both in zip(*found))

    def __call__(self, observation: Arrays) -> Tensors:
        """Return the actions of one time step, ``[num_envs, ...]``."""
        if self._ahead:
            return self._ahead.pop()
        spec = self._env.full_action_spec
        if self._mask is not None:
            spec = spec.clone()
            for key in self._keys:
                spec[key].update_mask(torch.from_numpy(observation[self._mask]).bool())
        drawn = spec.rand()
        return {key: drawn.get(key) for key in self._keys}

    def clear(self) -> None:
        """Forget what was drawn ahead."""
        self._ahead = []

    def state_dict(self) -> list[Any]:
        """Return random numbers drawn ahead, step by step."""
        return [[row[key].clone() for key in self._keys] for row in self._ahead]

    def load_state_dict(self, state_dict: list[Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._ahead = [dict(zip(self._keys, row)) for row in state_dict]


def _where(rows: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(rows.reshape(-1, *[1] * (one.ndim - 1)), one, other)


def _last(key: Key) -> str:
    return key if isinstance(key, str) else key[-1]


class PolicyRunner:
    """Calls a policy with the tensors it reads and returns the tensors it writes.

    The policy is :class:`~kit.fast.traced.Traced`: calls replay its tensor operations, with the
    same results and the same random numbers, reading the parameters where they live: the learner's
    updates are seen at once and nothing is synchronised. A policy that cannot be traced (it decides
    something on the host) runs as a TensorDict module; the reason is warned about once.

    A policy may be recurrent: its outputs of one step are inputs of the next, ``("next", key)``
    under ``key``, as in TorchRL. The hidden state of an environment is reset to its first value
    (that of the policy's primers, else zero) when its episode ends (:meth:`end_episodes`), and
    ``is_init`` is true then.

    Args:
        policy: module (or function) from TensorDict to TensorDict.
        reads: keys of the environment's observation; others that the policy reads are an error.
        num_envs: rows of every tensor.
        exploration_type: whether actions are sampled.
        fast: whether to trace at all.
        device: of the hidden state.

    Attributes:
        out_keys: of the outputs, in this order; known after the first call. Hidden state that the
            policy was given is an output, too, where it is not under the key it is written to.
        is_recurrent: whether it has hidden state or reads ``is_init``; true until known.

    Raises:
        SettingError: if the policy reads a key that is never written.
    """

    def __init__(
        self,
        policy: Policy,
        reads: Sequence[Key],
        num_envs: int,
        *,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        fast: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self.policy = policy
        self.num_envs = num_envs
        self.exploration_type = exploration_type_of(exploration_type)
        self.out_keys: list[Key] = []
        self.is_recurrent = True
        self._given = list(reads)
        self._first = first_values(policy, num_envs, device)
        self._hidden: Tensors = dict(self._first)
        self._starts = torch.ones(num_envs, 1, dtype=torch.bool, device=device)
        self._ongoing = torch.zeros_like(self._starts)
        _check_reads(policy, self._given, self._first)
        self._written: list[Key] = []  # keys of what the module returns
        self._fed: list[Key] = []  # hidden state that is returned as it was given
        self._fast, self._known = fast, False
        self._traced = Traced(self._call, policy, name="the policy")

    @property
    def plain_reason(self) -> str:
        """Why the policy runs as a TensorDict module; empty while it does not."""
        return self._traced.reason if self._fast else "fast_policy='module'"

    def prepare(self) -> bool:
        """Forget the recorded operations if the policy has changed; return whether they were."""
        dropped = self._fast and self._traced.refresh()
        if dropped:
            self._known, self.is_recurrent = False, True
        return dropped

    @property
    def replays(self) -> bool:
        """Whether calls replay recorded operations, so that they may run in inference mode."""
        return self._fast and self._traced.replays

    def __call__(self, tensors: Mapping[Key, Tensor]) -> Sequence[Tensor]:
        """Return the policy's outputs, in the order of ``out_keys``.

        To be called without gradients.

        Args:
            tensors: the environment's observation, each with ``num_envs`` rows.
        """
        if self._known and not self.is_recurrent:
            outputs = self._traced(tensors)
            return [outputs[key] for key in self.out_keys]
        pool = {IS_INIT: self._starts, **tensors, **self._hidden}
        if not self._fast or not self._written:  # hidden state has no keys before the first call
            outputs = self._call(pool)
        else:
            outputs = self._traced(pool)
            if self._traced.replays and not self._known:
                self._learn_what_is_read()
        return self._keep_hidden(outputs, pool)

    def _learn_what_is_read(self) -> None:
        """Note which outputs are read again in the next step, or belong to the next step's row."""
        read = set(self._traced.keys_read)
        kept = {_read_as(key) for key in self._written} & {*read, *self._fed}
        self._hidden = {key: value for key, value in self._hidden.items() if key in kept}
        own_starts = IS_INIT in read and IS_INIT not in self._given
        self.is_recurrent = bool(kept or self._fed or own_starts)
        self._known = True

    def call_module(self, tensors: Mapping[Key, Tensor]) -> Sequence[Tensor]:
        """Call the policy through the TensorDict module: to trace it with more around it."""
        pool = {IS_INIT: self._starts, **tensors, **self._hidden}
        return self._keep_hidden(self._call(pool), pool)

    @property
    def hidden(self) -> Tensors:
        """Hidden state that the next call reads."""
        return self._hidden if self.is_recurrent else {}

    @hidden.setter
    def hidden(self, hidden: Tensors) -> None:
        self._hidden = hidden

    def peek(self, tensors: Mapping[Key, Tensor]) -> Sequence[Tensor]:
        """Return the outputs of a call that changes no hidden state, buffer or random number."""
        with self._without_traces():
            pool = {IS_INIT: self._starts, **tensors, **self._hidden}
            return self._keep_hidden(self._call(pool), pool)

    @contextlib.contextmanager
    def _without_traces(self) -> Iterator[None]:
        """Restore hidden state, buffers, random numbers and plain attributes afterwards."""
        generator, hidden, starts = torch.get_rng_state(), self._hidden, self._starts
        buffers = list(self.policy.buffers()) if isinstance(self.policy, nn.Module) else []
        saved = [buffer.clone() for buffer in buffers]
        settings = self._traced.watch.settings()
        try:
            yield
        finally:
            torch.set_rng_state(generator)
            self._hidden, self._starts = hidden, starts
            for buffer, value in zip(buffers, saved):
                buffer.copy_(value)
            for attributes, name, value in settings:
                attributes[name] = value

    def skip_step(self) -> Tensor:
        """Advance ``is_init`` by a step in which another source acts; return that of the step."""
        starts, self._starts = self._starts, self._ongoing
        return starts

    def _call(self, pool: Mapping[Key, Tensor]) -> Tensors:
        """Call the TensorDict module; return what it writes."""
        given = dict(pool)
        with set_exploration_type(self.exploration_type):
            result = self._checked_call(TensorDict(dict(given), [self.num_envs]))
        if not self._written:
            self._written = _written(self.policy, given, result)
            public = [key for key in self._written if not _is_private(key)]
            self._fed = [key[1:] if len(key) > 2 else key[1] for key in public if _is_next(key)]
            starts = [IS_INIT] if self._fed and IS_INIT not in self._given else []
            self.out_keys = [*public, *self._fed, *starts]
        return {key: result.get(key) for key in self._written}

    def _checked_call(self, given: TensorDictBase) -> TensorDictBase:
        plain = not hasattr(self.policy, "in_keys")
        try:
            result = self.policy(given)
        except (TypeError, AttributeError, RuntimeError) as error:
            if plain and isinstance(self.policy, nn.Module):
                raise self._takes_no_tensordict(f"raised {type(error).__name__}") from error
            raise
        if plain and not isinstance(result, TensorDictBase):
            raise self._takes_no_tensordict(f"returned {type(result).__name__}")
        return result

    def _takes_no_tensordict(self, what: str) -> SettingError:
        reads = self._given[0] if len(self._given) == 1 else list(self._given)
        return SettingError(
            "policy",
            getattr(self.policy, "__name__", type(self.policy).__name__),
            f"is called with a TensorDict and {what}",
            f"wrap it: TensorDictModule(policy, in_keys=[{reads!r}], out_keys=['action'])",
        )

    # ------------------------------------------------------------------ hidden state
    def _keep_hidden(self, outputs: Mapping[Key, Tensor], pool: Tensors) -> Sequence[Tensor]:
        """Keep what the next call reads, and return what belongs to the batch."""
        returned = [value for key, value in outputs.items() if not _is_private(key)]
        fed = [pool.get(key) for key in self._fed]
        followed = {_read_as(key): value for key, value in outputs.items()}
        returned += [
            torch.zeros_like(followed[key]) if value is None else value
            for key, value in zip(self._fed, fed)
        ]
        if len(self.out_keys) > len(returned):
            returned.append(pool[IS_INIT])
        wanted = self._hidden if self._known else followed
        others = _BY_ENVIRONMENT.union(self._given)
        self._hidden = {key: followed[key] for key in wanted if key not in others}
        self._starts = self._ongoing
        return returned

    def end_episodes(self, ended: Mask | Tensor) -> None:
        """Reset the hidden state of environments whose episode ended with the last step.

        Needed where ``is_recurrent`` is true.

        Args:
            ended: ``[num_envs]``. A tensor is not read on the host.
        """
        if not isinstance(ended, Tensor):
            if not ended.any():
                return
            ended = torch.from_numpy(ended).to(self._starts.device)
        self._starts = ended.unsqueeze(-1).clone()
        for key, value in self._hidden.items():
            first = self._first.get(key, torch.zeros((), dtype=value.dtype, device=value.device))
            self._hidden[key] = _where(ended, first.expand_as(value), value)

    def restart(self) -> None:
        """Reset all hidden state: every environment begins a new episode."""
        self._starts = torch.ones_like(self._starts)
        zero = {key: torch.zeros_like(value) for key, value in self._hidden.items()}
        self._hidden = {**zero, **self._first}

    def state_dict(self) -> dict[str, Any]:
        """Return the hidden state: tensors and plain values."""
        hidden = [
            [list(key) if isinstance(key, tuple) else key, value.clone()]
            for key, value in self._hidden.items()
        ]
        return {"hidden": hidden, "starts": self._starts.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._starts = state_dict["starts"].clone()
        self._hidden = {
            tuple(key) if isinstance(key, list) else key: value.clone()
            for key, value in state_dict["hidden"]
        }


_BY_ENVIRONMENT = frozenset({"action", "reward", "done", "terminated", "truncated", IS_INIT})


def is_recurrent(policy: Any) -> bool:
    """Whether a policy declares hidden state, or reads ``is_init``."""
    if IS_INIT in (getattr(policy, "in_keys", None) or ()):
        return True
    return any(_is_next(key) for key in getattr(policy, "out_keys", None) or ())


def _check_reads(policy: Any, given: Sequence[Key], first: Tensors) -> None:
    wanted = getattr(policy, "in_keys", None) or []
    written = getattr(policy, "out_keys", None) or []
    hidden = {_read_as(key) for key in written if _is_next(key)}
    groups = {key[0] for key in written if isinstance(key, tuple)}  # ("params", "force", "loc")
    known = {*given, *first, *hidden, *groups, IS_INIT}
    missing = [key for key in wanted if key not in known]
    if missing:
        raise SettingError(
            "policy",
            type(policy).__name__,
            f"reads {missing}, which neither the environment nor the collector has",
            f"keys there are: {list(given)}",
        )


def _check_writes(policy: Any, actions: Sequence[Key]) -> None:
    """Refuse a policy whose declared outputs have no action.

    Raises:
        SettingError: if one is missing.
    """
    written = getattr(policy, "out_keys", None)
    if not written:
        return
    known = {key[:n] for key in map(_path, written) for n in range(1, len(key) + 1)}
    missing = [k for k in actions if not {_path(k)[:n] for n in (1, len(_path(k)))} & known]
    if missing:
        raise SettingError(
            "policy",
            type(policy).__name__,
            f"has out_keys={list(written)}, without the environment's action",
            f"out_keys={list(actions)}",
        )


def _path(key: Key) -> tuple[str, ...]:
    return key if isinstance(key, tuple) else (key,)


def first_values(policy: Any, num_envs: int, device: torch.device | str) -> Tensors:
    """Return the first memory that the policy's modules ask for (TorchRL's primers)."""
    if not isinstance(policy, nn.Module):
        return {}
    primers = get_primers_from_module(policy, warn=False, strict=False)
    values: Tensors = {}
    for primer in getattr(primers, "transforms", [primers] if primers is not None else []):
        for key, spec in primer.primers.items(True, True):
            default = primer.default_value
            default = default.get(key, 0.0) if isinstance(default, Mapping) else default
            first = spec.zero() + (0.0 if callable(default) else default)
            values[key] = first.to(device).expand(num_envs, *first.shape).clone()
    return values


def _written(policy: Any, given: Tensors, result: TensorDictBase) -> list[Key]:
    """Return the keys under which the policy has written tensors."""
    declared = getattr(policy, "out_keys", None)
    found = []
    for key in result.keys(include_nested=True, leaves_only=True):
        value = result.get(key)
        changed = key not in given or (declared is None and not _shows(value, given[key]))
        if isinstance(value, Tensor) and (changed or (declared and key in declared)):
            found.append(key)
    return found


def _shows(value: Any, given: Tensor) -> bool:
    """Whether a value is a given tensor, or another view of all of it."""
    same = value is given or (isinstance(value, Tensor) and value.data_ptr() == given.data_ptr())
    return same and value.shape == given.shape


def _is_next(key: Key) -> bool:
    return isinstance(key, tuple) and key[0] == "next"


def _read_as(key: Key) -> Key:
    """Return where the next step finds what is written under ``key``."""
    if not _is_next(key):
        return key
    return key[1] if len(key) == 2 else key[1:]


def _is_private(key: Key) -> bool:
    """Whether a key is of the kind that TorchRL keeps out of batches."""
    return (key if isinstance(key, str) else key[-1]).startswith("_")
