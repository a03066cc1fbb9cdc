"""Selection of random, exploration or policy actions during a rollout."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrl.envs.utils import ExplorationType

from kit.collectors.policy import (
    IS_INIT,
    FastPolicy,
    Policy,
    PolicyPath,
    PolicyRunner,
    Tensors,
    check_writes,
    where_rows,
)
from kit.envs.backends.base import Mask
from kit.envs.spaces import Arrays, Key
from kit.modules.host_copy import HostCopy
from kit.modules.numpy_policy import NumpyPolicy, NumpyPolicyError, copy_on_host
from kit.modules.random_actions import HasActionSpec, RandomActions
from kit.steps import SettingError

NO_CONTEXT: AbstractContextManager[Any] = contextlib.nullcontext()
_FOREVER = 2**62


class ActionSelector:
    """Selects actions at random first, then with an exploration policy, then with the policy.

    Args:
        env: environment to select actions for.
        policy: module that takes and returns a TensorDict; ``None``: random actions.
        exploration_policy: policy that acts instead of ``policy`` until ``exploration_frames``.
        init_random_frames: number of initial policy steps with random actions.
        exploration_frames: number of policy steps, including random ones, after which ``policy``
            replaces the exploration policy.
        exploration_type: TorchRL's exploration type, which determines whether actions are sampled.
        device: device of the policies.
        storing_device: device on which outputs are stored; ``None``: ``device``. If a GPU policy's
            outputs are stored on the host, they are copied at every step, like the actions.
        fast_policy: see :class:`~kit.collectors.KitCollector`.
        keeps_outputs: whether the policies' outputs are stored in batches.

    Attributes:
        runner: executes the policy; ``None`` if all actions are random.
        numpy: computes the policy's actions with NumPy; ``None`` if ``runner`` computes them.

    Raises:
        SettingError: if only one of ``exploration_policy`` and ``exploration_frames`` is set, or a
            policy overwrites an entry of the environment.
    """

    def __init__(
        self,
        env: HasActionSpec,
        policy: Policy | None,
        exploration_policy: Policy | None = None,
        *,
        init_random_frames: int = 0,
        exploration_frames: int = 0,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        device: torch.device | str = "cpu",
        storing_device: torch.device | str | None = None,
        fast_policy: FastPolicy = "exact",
        keeps_outputs: bool = True,
    ) -> None:
        if (exploration_policy is None) != (exploration_frames == 0):
            reason = f"conflicts with exploration_policy={type(exploration_policy).__name__}"
            raise SettingError(
                "exploration_frames",
                exploration_frames,
                reason,
                "set both exploration_frames and exploration_policy, or neither",
            )
        self.env, self.num_envs = env, env.num_envs
        self.device = torch.device(device)
        self._on_cpu = self.device.type == "cpu"
        wanted = torch.device(storing_device or self.device)
        self._brings_outputs = wanted.type == "cpu" and not self._on_cpu
        self.exploration_frames = exploration_frames
        self.action_keys = [leaf.key for leaf in env.action_leaves]
        keys = [leaf.key for leaf in env.observation_leaves]
        self._observations = [(leaf.key, leaf.shape) for leaf in env.observation_leaves]

        def runner(module: Policy | None) -> PolicyRunner | None:
            if module is None:
                return None
            fast, kept = fast_policy != "module", keys if keeps_outputs else ()
            check = partial(check_writes, module, actions=self.action_keys, observations=kept)
            if declared := getattr(module, "out_keys", None):
                check(declared)
            return PolicyRunner(
                module, keys, env.num_envs, exploration_type=exploration_type, fast=fast,
                device=device, check=check,
            )  # fmt: skip

        self.runner, self.explorer = runner(policy), runner(exploration_policy)
        self._runners = [one for one in (self.runner, self.explorer) if one is not None]
        self._random = RandomActions(env)
        self.act_at_random(init_random_frames)
        self.at_random = False  # all actions are random, regardless of the step count
        self._places: list[tuple[Key, int]] = []
        self._zeros: dict[Key, Tensor] = {}
        self._recorded: list[Sequence[Tensor]] = []
        self.keeps_outputs = keeps_outputs
        self.numpy: NumpyPolicy | None = None
        self._copy: HostCopy | None = None  # host copy of a GPU policy, for NumPy
        self._wants_numpy = fast_policy == "auto" and policy is not None
        self._not_in_numpy = "" if self._wants_numpy else f"fast_policy={fast_policy!r}"
        if self._wants_numpy:
            self._compute_in_numpy()

    def act_at_random(self, policy_steps: int) -> None:
        """Set the number of initial random policy steps. Without a policy, all steps are random."""
        self.init_random_frames = policy_steps
        self._random_until = _FOREVER if self.runner is None else policy_steps
        self._policy_from = max(self._random_until, self.exploration_frames)

    def _compute_in_numpy(self) -> None:
        """Set up NumPy to compute the actions if it supports the policy."""
        assert self.runner is not None
        before, policy = self.numpy, self.runner.policy
        try:
            self._copy = None if self._on_cpu else copy_on_host(policy, self.num_envs)
            policy = policy if self._copy is None else self._copy.module
            kind = self.runner.exploration_type
            self.numpy = NumpyPolicy(policy, self.num_envs, kind, self.keeps_outputs)
            if self.numpy.reads not in self._observations:
                raise NumpyPolicyError("the policy does not read this environment's observation")
            self.numpy.continue_from(before)
        except NumpyPolicyError as reason:
            self.numpy, self._not_in_numpy = None, str(reason)
        self.runner.is_recurrent = self.numpy is None

    @property
    def path(self) -> PolicyPath:
        """How the policy is currently executed. This may change during the first calls."""
        if self.runner is None:
            return PolicyPath("module", "actions are random")
        if self.numpy is not None:
            return PolicyPath("numpy", "")
        if self.runner.plain_reason:
            return PolicyPath("module", self.runner.plain_reason)
        return PolicyPath("program", self._not_in_numpy)

    # ------------------------------------------------------------------ batch collection
    def prepare(self) -> None:
        """Check whether the policies have changed. Called once per batch."""
        for runner in self._runners:
            if runner is self.runner and self.numpy is not None:
                followed = self._copy is None or self._copy.follow()
                changed = not (followed and self.numpy.is_valid())
            else:
                changed = runner.prepare() and runner is self.runner and self._wants_numpy
            if changed:
                self._compute_in_numpy()

    def is_ready(self, policy_steps: int, steps: int) -> bool:
        """Return whether NumPy will compute the next batch's actions from noise already drawn."""
        numpy = self.numpy
        return numpy is not None and policy_steps >= self._policy_from and numpy.has_noise(steps)

    def begin(
        self, policy_steps: int = 0, steps: int = 0, into: NDArray[Any] | None = None
    ) -> AbstractContextManager[Any]:
        """Begin a batch. Call :meth:`prepare` first.

        Args:
            policy_steps: total number of policy steps in all environments so far.
            steps: number of time steps in the batch; 0 if unknown.
            into: array ``[steps, num_envs, ...]`` that receives the actions of all time steps.

        Returns:
            Context manager for the batch. It enables inference mode only if all policies replay
            traced graphs, because other calls may create parameters.
        """
        self._recorded = []
        if steps and policy_steps < self._random_until:
            left = (self._random_until - policy_steps) // self.num_envs
            self._random.begin(min(left, steps), left)
        if self.numpy is not None:
            before = max(self._policy_from - policy_steps, 0) // self.num_envs
            self.numpy.begin(max(steps - before, 0), None if before else into)
            return NO_CONTEXT
        replays = self._runners and all(runner.replays for runner in self._runners)
        return torch.inference_mode() if replays else NO_CONTEXT

    def __call__(
        self, observation: Arrays, policy_steps: int = 0, active: Mask | None = None
    ) -> Arrays:
        """Return the actions for one time step, a dict of arrays ``[num_envs, ...]``.

        Args:
            observation: dict of observation arrays ``[num_envs, ...]``.
            policy_steps: total number of policy steps in all environments so far.
            active: mask of the environments that take this step; ``None``: all.
        """
        if self.at_random or policy_steps < self._policy_from:
            outputs = self._before_the_policy(observation, policy_steps, active)
        elif self.numpy is not None:
            return self.numpy(observation)
        else:
            assert self.runner is not None
            outputs = self.runner(self._tensors(observation))
        if self._brings_outputs:
            outputs = [output.cpu() for output in outputs]
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
        """Keys of the recorded outputs. The policy's keys are unknown until its first call."""
        return self.action_keys if self.runner is None else self.runner.out_keys

    def _tensors(self, observation: Arrays) -> Tensors:
        if self._on_cpu:
            # Copy the inputs, because the policy may keep them and these arrays are reused.
            # Copies are also aligned, which keeps MKL's rounding the same in a resumed run.
            return {key: torch.from_numpy(array).clone() for key, array in observation.items()}
        return {k: torch.from_numpy(array).to(self.device) for k, array in observation.items()}

    def random_steps(self, policy_steps: int, count: int) -> int:
        """Return how many of the next ``count`` policy steps have random actions."""
        return count if self.at_random else min(max(self._random_until - policy_steps, 0), count)

    def _before_the_policy(
        self, observation: Arrays, policy_steps: int, active: Mask | None
    ) -> Sequence[Tensor]:
        """Return the outputs for a step before ``policy`` selects all actions."""
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
            value if key == IS_INIT else where_rows(rows, other.to(value.device), value)
            for key, value, other in zip(self._keys, outputs, others)
        ]

    def _padded(
        self, values: Tensors, observation: Arrays, acting: PolicyRunner | None
    ) -> list[Tensor]:
        """Return the given outputs for all of the policy's keys, with zeros for missing outputs.

        Args:
            values: random actions or exploration outputs, keyed by output key.
            observation: dict of observations at this step.
            acting: runner that computed the outputs; other runners skip this step.
        """
        assert self.runner is not None
        if not self._zeros:
            peeked = self.runner.peek(self._tensors(observation))
            self._zeros = {k: torch.zeros_like(v) for k, v in zip(self.runner.out_keys, peeked)}
        starts = {r: r.skip_step() for r in self._runners if r is not acting}
        present = {IS_INIT: starts[self.runner], **values}
        return [present.get(key, zero).to(self.device) for key, zero in self._zeros.items()]

    def outputs(self) -> Tensors:
        """Return a dict of all outputs since :meth:`begin`, each ``[num_envs, steps, ...]``.

        The keys are the policy's output keys. Outputs that random actions or the exploration policy
        do not provide are zero.
        """
        last = self.numpy.outputs() if self.numpy is not None and self.numpy.steps else {}
        if not self._recorded:
            return last
        outputs = zip(self._keys, zip(*self._recorded), strict=True)
        found = {key: torch.stack(steps, dim=1) for key, steps in outputs}
        # NumPy's outputs are on the host, but earlier outputs may be on a GPU.
        after = {k: torch.cat([found[k], v.to(found[k].device)], dim=1) for k, v in last.items()}
        return after or found

    @property
    def is_recurrent(self) -> bool:
        """Whether any policy has hidden state. True until this has been determined."""
        return any(runner.is_recurrent for runner in self._runners)

    def end_episodes(self, ended: Mask) -> None:
        """Reset the hidden state for environments whose next step starts an episode.

        Args:
            ended: mask of these environments, ``[num_envs]``.
        """
        for runner in self._runners:
            if runner.is_recurrent:
                runner.end_episodes(ended)

    # ------------------------------------------------------------------ blocks of steps
    def phases(self, policy_steps: int, steps: int) -> list[tuple[PolicyRunner | None, int]]:
        """Split the next time steps into (runner, steps) pairs. Random steps have no runner."""
        limits: list[tuple[PolicyRunner | None, int]] = [(None, self._random_until)]
        limits += [(self.explorer, self.exploration_frames), (self.runner, _FOREVER)]
        found = []
        for runner, until in limits:
            left = min(max(until - policy_steps, 0) // self.num_envs, steps)
            if left:
                found.append((runner, left))
            policy_steps, steps = policy_steps + left * self.num_envs, steps - left
        return found

    # ------------------------------------------------------------------ restart and state
    def restart(self) -> None:
        """Reset all hidden state. Called when every environment starts a new episode."""
        for runner in self._runners:
            runner.restart()

    def seeded(self) -> None:
        """Discard random numbers that were drawn in advance. Called after a new seed is set."""
        self._random.clear()
        if self.numpy is not None:
            self.numpy.noise = []

    def state_dict(self) -> dict[str, Any]:
        """Return the hidden state and the random numbers that were drawn in advance."""
        noise = [] if self.numpy is None else self.numpy.noise
        return {
            "runners": [runner.state_dict() for runner in self._runners],
            "random": self._random.state_dict(),
            "noise": torch.from_numpy(np.stack(noise)) if noise else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        for runner, state in zip(self._runners, state_dict["runners"], strict=True):
            runner.load_state_dict(state)
        self._random.load_state_dict(state_dict["random"])
        if self.numpy is not None:
            noise = state_dict["noise"]
            self.numpy.noise = [] if noise is None else [*noise.numpy().copy()]
