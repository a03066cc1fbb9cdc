"""Backend that steps any TorchRL environment through NumPy arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import EnvBase, GymWrapper, VecNorm, VecNormV2

from kit.envs.backends.base import EnvBackend, Mask, StepArrays, infos_of_arrays
from kit.envs.backends.gymnasium import resets_by_mask
from kit.envs.backends.torchrl_layers import (
    base_env_of,
    copied,
    filled,
    frame_skip_of,
    from_entries,
    load_state_below,
    plain_entries,
    processes_of,
    seed_spaces_below,
    state_below,
    text_of,
    transforms_of,
)
from kit.envs.errors import FAULTS, fault_of
from kit.envs.spaces import ActionConverter, Arrays, Key, Leaf, path_of
from kit.envs.vector_env import VectorEnv
from kit.steps.errors import SettingError


class TorchRLBackend(EnvBackend):
    """A TorchRL environment with its transforms, such as ``GymEnv`` or ``ParallelEnv``.

    Steps are not faster than in TorchRL, but all of the kit's collectors can be used. An
    environment without a batch dimension counts as one environment. All entries of the observation
    specs are observations. Actions follow the action specs, so one-hot actions stay one-hot. Scalar
    entries, for example from TorchRL's ``info`` readers, are also reported for finished episodes.

    Attributes:
        action_repeat: number of env steps per policy step, derived from frame-skip transforms
            because TorchRL does not report the number. A VectorEnv reports its own env steps.

    Raises:
        SettingError: if the environment has several batch dimensions, rewards or done keys; if a
            wrapped VectorEnv normalises or has a frame skip around it; or if a wrapped Gymnasium
            vector environment spends a policy step on each reset.
    """

    uses_torch = True

    def __init__(self, env: EnvBase) -> None:
        self.env, self.action_repeat = env, frame_skip_of(env)
        missing = {"done", "terminated"} - set(env.full_done_spec.keys(True, True))
        if missing:
            reason = f"The environment has no done keys named {sorted(missing)}"
            raise SettingError("env.done_keys", env.done_keys, reason, [["done"]])
        self.num_envs = env.batch_size.numel()
        self.specs = (self._rows(env.full_observation_spec), self._rows(env.full_action_spec))
        self.observation_leaves, self.action_leaves = map(_leaves, self.specs)
        if len(self.action_leaves) > 1:  # look up each action array by its own key
            self.action_leaves = [replace(a, path=path_of(a.key)) for a in self.action_leaves]
        self.convert = ActionConverter(None, self.action_leaves, self.num_envs)
        reward = self._rows(env.full_reward_spec)
        shapes = [tuple(reward[key].shape) for key in reward.keys(True, True)]
        if shapes != [(self.num_envs, 1)]:
            reason = "The environment must return one scalar reward per batch entry"
            raise SettingError("env.reward_spec", shapes, reason, [(self.num_envs, 1)])
        self._scalars = [
            leaf.key
            for leaf in self.observation_leaves
            if not leaf.shape and leaf.key != "observation"
        ]
        self._root: TensorDictBase | None = None
        self._left: Arrays | None = None  # current observation of a wrapped VectorEnv
        below = base_env_of(env)
        self._own = below if isinstance(below, VectorEnv) else None
        if isinstance(below, GymWrapper) and isinstance(below._env, gym.vector.VectorEnv):
            # Rejects GymEnv(id, num_envs=...), which resets in the step after an episode's end.
            resets_by_mask(below._env)
        self._shows_arrays = isinstance(below, GymWrapper) and not env.batch_dims
        if self._own is not None and self._own.normalizer is not None:
            name = "observation" if self._own.normalizer.observation else "reward"
            reason = "The inner VectorEnv would keep updating its statistics during evaluations"
            hint = "Normalise in the outer make_env(...) instead"
            raise SettingError(f"env.normalize_{name}", True, reason, hint)
        self.name = type(below).__name__ if self._own is None else self._own.name

    def _rows(self, spec: Composite) -> Composite:
        """Return ``spec`` with an environment batch dimension."""
        if self.env.batch_dims == 1:
            return spec.clone()
        return spec.clone().expand(1, *spec.shape)

    def reset(
        self, observation: Arrays, seeds: Sequence[int] | None = None, mask: Mask | None = None
    ) -> None:
        """Reset through TorchRL, which derives all seeds from the first seed."""
        try:
            if seeds is not None:
                self.env.set_seed(int(seeds[0]))
                seed_spaces_below(self.env, int(seeds[0]))
            if mask is None or self._root is None:
                self._root = self.env.reset()
            else:
                chosen = torch.from_numpy(mask).reshape(self.env.full_done_spec["done"].shape)
                self._root = self.env.reset(self._root.set("_reset", chosen.to(self.env.device)))
        except FAULTS as error:
            raise fault_of(self.name, None, error, "reset()") from error
        self._left = None if self._own is None else self._own.start()
        self._write(self._root, observation)

    def step(self, actions: Arrays, result: StepArrays, active: Mask | None = None) -> Mask | None:
        """Step through TorchRL, which resets finished environments."""
        assert active is None
        assert self._root is not None
        self.convert(actions)  # raises SettingError if an action has a wrong shape
        inputs = self._root.copy()
        for key, values in actions.items():
            shape = self.env.full_action_spec[key].shape
            inputs.set(key, torch.from_numpy(values).reshape(shape).to(self.env.device))
        try:
            stepped, self._root = self._step_and_reset(inputs)
        except FAULTS as error:
            raise fault_of(self.name, None, error, "step()") from error
        self._left = None if self._own is None else self._own.start()
        following = stepped.get("next")
        self._write(following, result.next_observation)
        self._write(self._root, result.observation)
        result.reward[...] = self._row(following, self.env.reward_key)[:, 0]
        result.terminated[...] = self._row(following, "terminated")[:, 0]
        done = self._row(following, "done")[:, 0]
        truncated = self._row(following, "truncated")[:, 0] if "truncated" in following else done
        result.truncated[...] = truncated | (done & ~result.terminated)
        result.env_steps[...] = self.action_repeat if self._own is None else self._own.env_steps
        if self._own is not None:
            self.infos = self._own.backend.infos
        else:
            scalars = {text_of(key): self._row(following, key) for key in self._scalars}
            self.infos = infos_of_arrays(scalars, result.terminated | result.truncated)
        return None

    def _step_and_reset(self, inputs: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Call ``step_and_maybe_reset``, but copy the last observation before the reset.

        Gymnasium environments may overwrite the last observation's array during a reset.
        """
        if not self._shows_arrays:
            return self.env.step_and_maybe_reset(inputs)  # type: ignore[no-any-return]
        stepped = self.env.step(inputs)
        stepped.set("next", stepped.get("next").clone())
        present = self.env._step_mdp(stepped)
        if self.env._post_step_mdp_hooks is not None:
            stepped, present = self.env._post_step_mdp_hooks(stepped, present)
        return stepped, self.env.maybe_reset(present)

    def _write(self, tensordict: TensorDictBase, arrays: Arrays) -> None:
        for leaf in self.observation_leaves:
            arrays[leaf.key][...] = self._row(tensordict, leaf.key)

    def _row(self, tensordict: TensorDictBase, key: Key) -> Any:
        value = tensordict.get(key).detach().cpu()
        return (value if self.env.batch_dims else value.unsqueeze(0)).numpy()

    # ------------------------------------------------------------------ state
    def full_states(self) -> list[Any]:
        """Return the current TensorDict and the state of the environments below the transforms.

        Raises:
            StateCaptureError: if an environment below the transforms is neither a VectorEnv nor a
                Gymnasium environment in this process.
        """
        assert self._root is not None
        return [{"below": state_below(self.env), "root": plain_entries(self._root)}]

    def set_full_states(self, states: list[Any]) -> None:
        """Restore states returned by :meth:`full_states`."""
        (state,) = states
        load_state_below(self.env, state["below"])
        self._root = from_entries(state["root"], self.env)
        self._left = None if self._own is None else self._own.start()

    @property
    def is_where_it_was(self) -> bool:
        """Whether no other code has stepped the wrapped VectorEnv, if there is one."""
        return self._own is None or self._own.is_at(self._left)

    @property
    def learns(self) -> str | None:
        """Name of an active TorchRL normalisation transform, if any.

        Transforms in other processes are not detected.
        """
        running = (one for one in transforms_of(self.env) if isinstance(one, (VecNorm, VecNormV2)))
        return next((type(one).__name__ for one in running if not one.frozen), None)

    def state_of_transforms(self) -> list[dict[str, Any]]:
        """Return the state of each transform, such as running statistics or stacked frames."""
        found = []
        for one in transforms_of(self.env):
            held = {name: value for name, value in vars(one).items() if isinstance(value, Tensor)}
            found.append(copied({"own": one.state_dict(), "held": held}))
        return found + [copied(processes.state_dict()) for processes in processes_of(self.env)]

    def load_state_of_transforms(self, states: list[dict[str, Any]]) -> None:
        """Restore the transforms' states in place, because transforms may share statistics."""
        transforms = list(transforms_of(self.env))
        for transform, state in zip(transforms, states):
            transform.load_state_dict(filled(transform.state_dict(), state["own"]))
            for name, value in state["held"].items():  # e.g. RandomTruncationTransform's horizon
                setattr(transform, name, value.clone())
        for processes, state in zip(processes_of(self.env), states[len(transforms) :]):
            processes.load_state_dict(filled(processes.state_dict(), state))

    def close(self) -> None:
        """Close the environment and its processes."""
        with contextlib.suppress(Exception):
            self.env.close(raise_if_closed=False)


def _leaves(spec: Composite) -> list[Leaf]:
    found = []
    for key in spec.keys(True, True):
        one = spec[key]
        dtype = torch.empty(0, dtype=one.dtype).numpy().dtype
        found.append(Leaf(key, (), None, tuple(one.shape[1:]), dtype))
    return found
