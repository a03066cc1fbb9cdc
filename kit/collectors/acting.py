"""Who acts: nobody (random actions), an exploration policy, or the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrl.envs.utils import ExplorationType

from kit.collectors.policy import IS_INIT, Policy, PolicyRunner, Tensors
from kit.collectors.stretches import (
    CalledStretch,
    NumpyStretch,
    OpenNumpyStretch,
    RandomStretch,
    Stretch,
)
from kit.envs.backends.base import StepArrays
from kit.envs.spaces import Key, Leaf
from kit.steps import SettingError


class ActsOn(Protocol):
    """What has to be known of an environment to act in it."""

    num_envs: int
    observation_leaves: list[Leaf]
    action_leaves: list[Leaf]
    full_action_spec: Any


class Acting:
    """Chooses actions: at random first, then by an exploration policy, then by the policy.

    Args:
        env: whose actions they are.
        policy: ``None`` acts at random always.
        exploration_policy: acts until ``exploration_frames``.
        init_random_frames: policy steps with random actions.
        exploration_frames: policy steps until which the exploration policy acts.
        exploration_type: whether the policies sample.
        device: where the policies run.
        fast: whether to take the policies past TensorDict where possible.
        in_numpy: whether NumPy may make a policy's operations.

    Raises:
        SettingError: if one of exploration policy and frames is given without the other.
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
        fast: bool = True,
        in_numpy: bool = False,
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
        self.on_cpu = self.device.type == "cpu"
        self.init_random_frames, self.exploration_frames = init_random_frames, exploration_frames
        self.action_keys = [leaf.key for leaf in env.action_leaves]
        keys = [leaf.key for leaf in env.observation_leaves]
        self._mask_key = next((key for key in keys if _last(key) == "action_mask"), None)

        def runner(one: Policy | None) -> PolicyRunner | None:
            if one is None:
                return None
            return PolicyRunner(
                one,
                keys,
                env.num_envs,
                exploration_type=exploration_type,
                fast=fast,
                device=device,
                in_numpy=self.action_keys if in_numpy and self.on_cpu else (),
            )

        self.runner, self.explorer = runner(policy), runner(exploration_policy)
        self._example: list[Tensor] | None = None
        self._runners = [one for one in (self.runner, self.explorer) if one is not None]

    # ------------------------------------------------------------------ one batch
    def sources(self, policy_steps: int, steps: int) -> list[tuple[PolicyRunner | None, int]]:
        """Return who acts in the next steps of each copy, and in how many.

        Args:
            policy_steps: of all copies so far.
            steps: of each copy.
        """
        sources: list[tuple[PolicyRunner | None, int | None]] = [(None, None)]
        if self.runner is not None:
            exploring = (self.explorer, self.exploration_frames)
            sources = [(None, self.init_random_frames), exploring, (self.runner, None)]
        found = []
        for runner, until in sources:
            left = steps
            if until is not None:
                left = min(max(until - policy_steps, 0) // self.num_envs, steps)
            if left:
                found.append((runner, left))
            policy_steps, steps = policy_steps + left * self.num_envs, steps - left
        return found

    def stretches(self, policy_steps: int, steps: int) -> list[Stretch]:
        """Return what acts in the next steps of each copy, as :meth:`sources` says."""
        return [self._stretch(*source) for source in self.sources(policy_steps, steps)]

    def _stretch(self, runner: PolicyRunner | None, steps: int) -> Stretch:
        if runner is None and self._mask_key is None:
            drawn = self.env.full_action_spec.rand([steps])
            return RandomStretch(steps, {key: drawn.get(key) for key in self.action_keys})
        if runner is not None and runner.in_numpy is not None:
            return NumpyStretch(steps, runner, runner.in_numpy)
        call = self.random if runner is None else runner
        return CalledStretch(steps, runner, call, self.action_keys, self.device)

    def open_stretch(self, policy_steps: int, steps: int) -> OpenNumpyStretch | None:
        """Return what acts from now on if NumPy makes the policy's operations, else ``None``.

        Args:
            policy_steps: of all copies so far.
            steps: of each copy, at most.
        """
        begun = max(self.init_random_frames, self.exploration_frames)
        if self.runner is None or self.runner.in_numpy is None or policy_steps < begun:
            return None
        return OpenNumpyStretch(steps, self.runner, self.runner.in_numpy)

    def mode(self, observation: Mapping[Key, NDArray[Any]] | None = None) -> Any:
        """Return the mode for a batch: inference mode is cheaper.

        But a call that is no replay may have to make parameters.

        Args:
            observation: to be acted on first; given where NumPy may make a policy's operations.
        """
        for runner in self._runners:
            runner.prepare(observation)
        replays = self._runners and all(runner.replays for runner in self._runners)
        return torch.inference_mode() if replays else torch.no_grad()

    def random(self, observation: Tensors) -> Sequence[Tensor]:
        """Return actions of one step at random; where actions are masked, among those allowed."""
        spec = self.env.full_action_spec
        if self._mask_key is not None:
            spec = spec.clone()
            for key in self.action_keys:
                spec[key].update_mask(observation[self._mask_key].cpu().bool())
        drawn = spec.rand()
        return [drawn.get(key) for key in self.action_keys]

    def aligned(self, values: Tensors, observation: Tensors) -> list[Tensor]:
        """Return what somebody else wrote in one step as if the policy had: zero where it did not.

        Args:
            values: what was written, by key.
            observation: what was acted on.
        """
        assert self.runner is not None
        starts = self.runner.stand_by()
        examples = self._examples(observation)
        known = {IS_INIT: starts, **values}
        return [known.get(key, zero).to(self.device) for key, zero in examples.items()]

    def ended(self, mask: NDArray[np.bool_]) -> None:
        """Have the policies forget what belongs to episodes that ended, ``[num_envs]``."""
        for runner in self._runners:
            if runner.remembers:
                runner.ended(mask)

    def following(self, stretch: Stretch) -> Callable[[StepArrays], None] | None:
        """Return what has to be done after each step of a stretch; ``None``: nothing."""
        if not self.remembers:
            return None

        def follow(result: StepArrays) -> None:
            ended = result.terminated | result.truncated
            for runner in self._runners:
                if runner.remembers:
                    if runner is not stretch.runner:
                        starts = runner.stand_by()
                        if runner is self.runner:
                            stretch.starts.append(starts)
                    runner.ended(ended)

        return follow

    @property
    def remembers(self) -> bool:
        """Whether a policy remembers something, as far as is known before it has acted."""
        return any(runner.remembers for runner in self._runners)

    def written(self, stretches: list[Stretch], observation: Mapping[Key, Tensor]) -> Tensors:
        """Return what was written, ``[num_envs, steps, ...]``.

        The keys are those of the policy. Where another acted that does not write them, they are
        zero.

        Args:
            stretches: of a batch.
            observation: an observation, for a policy that has not acted yet.
        """
        examples: Mapping[Key, Tensor] = {}
        keys: Sequence[Key] = self.action_keys
        if self.runner is not None:
            if any(stretch.runner is not self.runner for stretch in stretches):
                examples = self._examples(observation)
            keys = self.runner.out_keys
        whole: Tensors = {}
        for key in keys:
            parts = []
            for stretch in stretches:
                value = stretch.value(key)
                if value is None:
                    zero = torch.zeros_like(examples[key])
                    value = zero.expand(stretch.taken, *zero.shape)
                parts.append(value.to(self.device))
            whole[key] = (parts[0] if len(parts) == 1 else torch.cat(parts)).transpose(0, 1)
        return whole

    def _examples(self, observation: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Return one value of everything that the policy writes."""
        assert self.runner is not None
        if self._example is None:
            given = {key: value.to(self.device) for key, value in observation.items()}
            self._example = [torch.zeros_like(value) for value in self.runner.peek(given)]
        return dict(zip(self.runner.out_keys, self._example))

    # ------------------------------------------------------------------ in and out
    def restart(self) -> None:
        """All copies begin new episodes."""
        for runner in self._runners:
            runner.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return what the policies remember."""
        return {"runners": [runner.state_dict() for runner in self._runners]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for runner, state in zip(self._runners, state_dict["runners"], strict=True):
            runner.load_state_dict(state)


def _last(key: Key) -> str:
    return key if isinstance(key, str) else key[-1]
