"""Who acts: nobody (random actions), an exploration policy, or the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrl.envs.utils import ExplorationType

from kit.collectors.policy import IS_INIT, Policy, PolicyRunner, Tensors
from kit.envs.copies import StepArrays
from kit.envs.spaces import Arrays, Key, Leaf
from kit.steps import SettingError


class ActsOn(Protocol):
    """What has to be known of an environment to act in it."""

    num_envs: int
    observation_leaves: list[Leaf]
    action_leaves: list[Leaf]
    full_action_spec: Any


@dataclass
class Stretch:
    """Consecutive steps whose actions come from one source."""

    steps: int
    """of each copy."""
    act: Callable[[Tensors], Sequence[Tensor]]
    """returns what is written in one step."""
    runner: PolicyRunner | None
    """whose policy acts; ``None``: nobody's."""
    outputs: list[Sequence[Tensor]] = field(default_factory=list)
    """what was written in each step."""
    starts: list[Tensor] = field(default_factory=list)
    """whether each step was the first of its episode, where the policy wants to know."""
    places: list[tuple[Key, int]] = field(default_factory=list)
    """where the actions are among the outputs."""


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
            kwargs = {"exploration_type": exploration_type, "fast": fast, "device": device}
            return PolicyRunner(one, keys, env.num_envs, **kwargs)

        self.runner, self.explorer = runner(policy), runner(exploration_policy)
        self._example: list[Tensor] | None = None
        self._runners = [one for one in (self.runner, self.explorer) if one is not None]

    # ------------------------------------------------------------------ one batch
    def stretches(self, policy_steps: int, steps: int) -> list[Stretch]:
        """Return who acts in the next steps of each copy.

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
                found.append(self._stretch(runner, left))
            policy_steps, steps = policy_steps + left * self.num_envs, steps - left
        return found

    def _stretch(self, runner: PolicyRunner | None, steps: int) -> Stretch:
        if runner is None:
            return Stretch(steps, self._random(steps), None)
        return Stretch(steps, self._calls(runner), runner)

    def mode(self) -> Any:
        """Inference mode is cheaper, but a call that is no replay may have to make parameters."""
        for runner in self._runners:
            runner.prepare()
        replays = self._runners and all(runner.replays for runner in self._runners)
        return torch.inference_mode() if replays else torch.no_grad()

    def _calls(self, runner: PolicyRunner) -> Callable[[Tensors], Sequence[Tensor]]:
        if self.on_cpu:
            return runner

        def call(observation: Tensors) -> Sequence[Tensor]:
            return runner({key: value.to(self.device) for key, value in observation.items()})

        return call

    def _random(self, steps: int) -> Callable[[Tensors], Sequence[Tensor]]:
        """Return what acts at random; where actions are masked, among those allowed."""
        spec, mask_key = self.env.full_action_spec, self._mask_key
        if mask_key is None:
            drawn = spec.rand([steps])
            entries = iter(zip(*[drawn.get(key).unbind(0) for key in self.action_keys]))
            return lambda observation: next(entries)
        spec = spec.clone()

        def act(observation: Tensors) -> Sequence[Tensor]:
            for key in self.action_keys:
                spec[key].update_mask(observation[mask_key].bool())
            drawn = spec.rand()
            return [drawn.get(key) for key in self.action_keys]

        return act

    def random(self, observation: Tensors) -> Sequence[Tensor]:
        """Return actions of one step at random."""
        return self._random(1)(observation)

    def aligned(self, values: Tensors, observation: Tensors) -> list[Tensor]:
        """Return what somebody else wrote in one step as if the policy had: zero where it did not.

        Args:
            values: what was written, by key.
            observation: what was acted on.
        """
        assert self.runner is not None
        starts = self.runner.stand_by()
        if self._example is None:
            given = {key: value.to(self.device) for key, value in observation.items()}
            self._example = [torch.zeros_like(value) for value in self.runner.peek(given)]
        known = {IS_INIT: starts, **values}
        keys = self.runner.out_keys
        return [known.get(key, zero).to(self.device) for key, zero in zip(keys, self._example)]

    def ended(self, mask: NDArray[np.bool_]) -> None:
        """Have the policies forget what belongs to episodes that ended, ``[num_envs]``."""
        for runner in self._runners:
            if runner.remembers:
                runner.ended(mask)

    def after(self, stretch: Stretch, result: StepArrays) -> None:
        """Bring what the policies remember up to date after a step.

        Args:
            stretch: whose step it was.
            result: what it gave.
        """
        ended = result.terminated | result.truncated
        for runner in self._runners:
            if runner.remembers:
                if runner is not stretch.runner:
                    starts = runner.stand_by()
                    if runner is self.runner:
                        stretch.starts.append(starts)
                runner.ended(ended)

    @property
    def remembers(self) -> bool:
        """Whether :meth:`after` has something to do."""
        return any(runner.remembers for runner in self._runners)

    def actions(self, stretch: Stretch, outputs: Sequence[Tensor]) -> Arrays:
        """Return the actions among what was written, for the environments."""
        if not stretch.places:
            keys = self.action_keys
            written = keys if stretch.runner is None else stretch.runner.out_keys
            stretch.places = [(key, written.index(key)) for key in keys]
        if self.on_cpu:
            return {key: outputs[place].numpy() for key, place in stretch.places}
        return {key: outputs[place].cpu().numpy() for key, place in stretch.places}

    def written(self, stretches: list[Stretch], observation: Mapping[Key, Tensor]) -> Tensors:
        """Return what was written, ``[num_envs, steps, ...]``.

        The keys are those of the policy. Where another acted that does not write them, they are
        zero.

        Args:
            stretches: of a batch.
            observation: an observation, for a policy that has not acted yet.
        """
        if self.runner is None:
            keys, examples = self.action_keys, None
        else:
            examples = self._examples(stretches, observation)
            keys = self.runner.out_keys
        stacked: Tensors = {}
        for place, key in enumerate(keys):
            values: list[Tensor] = []
            for stretch in stretches:
                values += self._values(stretch, key, place, examples)
            stacked[key] = torch.stack(values).transpose(0, 1)
        return stacked

    def _examples(
        self, stretches: list[Stretch], observation: Mapping[Key, Tensor]
    ) -> Sequence[Tensor] | None:
        """Return one value of everything that the policy writes, if others have acted too."""
        assert self.runner is not None
        if all(stretch.runner is self.runner for stretch in stretches):
            return None
        acted = [s.outputs[0] for s in stretches if s.runner is self.runner and s.outputs]
        if acted:
            return acted[0]
        given = {key: value.to(self.device) for key, value in observation.items()}
        return self.runner.peek(given)

    def _values(
        self, stretch: Stretch, key: Key, place: int, examples: Sequence[Tensor] | None
    ) -> Sequence[Tensor]:
        if stretch.runner is self.runner:
            return [outputs[place] for outputs in stretch.outputs]
        keys = self.action_keys if stretch.runner is None else stretch.runner.out_keys
        if key in keys:
            index = keys.index(key)
            return [outputs[index].to(self.device) for outputs in stretch.outputs]
        if key == IS_INIT and stretch.starts:
            return stretch.starts
        assert examples is not None
        return [torch.zeros_like(examples[place])] * len(stretch.outputs)

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
