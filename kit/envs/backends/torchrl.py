"""Any TorchRL environment, stepped with arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite
from torchrl.envs import EnvBase, GymWrapper, SerialEnv, TransformedEnv

from kit.envs.backends.base import EnvBackend, Mask, StepArrays, infos_of_arrays
from kit.envs.errors import FAULTS, fault_of
from kit.envs.spaces import ActionConverter, Arrays, Key, Leaf
from kit.envs.state import CannotCapture, capture, restore
from kit.envs.vector_env import VectorEnv
from kit.steps.errors import SettingError


class TorchRLBackend(EnvBackend):
    """A TorchRL environment with its transforms: ``GymEnv``, ``SerialEnv``, ``ParallelEnv``, ...

    It costs what TorchRL costs; collectors of the kit then give what they promise. An environment
    without a batch dimension is one env. All entries of its observation specs are observations,
    actions are as its action specs say (one-hot ones stay one-hot). Those of no dimension, as
    TorchRL's readers of ``info`` write them, are numbers of finished episodes, too.

    Args:
        env: the environment.
        action_repeat: env steps of one policy step, as TorchRL does not report them; an
            environment of the kit below the transforms does.

    Raises:
        SettingError: if it has several batch dimensions or several rewards, or an environment of
            the kit below normalises.
    """

    uses_torch = True

    def __init__(self, env: EnvBase, action_repeat: int = 1) -> None:
        self.env, self.action_repeat = env, action_repeat
        if env.batch_dims > 1:
            raise SettingError(
                "env.batch_size", tuple(env.batch_size), "has more than one dimension", [(4,), ()]
            )
        self.num_envs = env.batch_size.numel()
        self.specs = (self._rows(env.full_observation_spec), self._rows(env.full_action_spec))
        self.observation_leaves, self.action_leaves = map(_leaves, self.specs)
        self.convert = ActionConverter(None, self.action_leaves, self.num_envs)
        reward = self._rows(env.full_reward_spec)
        shapes = [tuple(reward[key].shape) for key in reward.keys(True, True)]
        if shapes != [(self.num_envs, 1)]:
            raise SettingError(
                "env.reward_spec", shapes, "is not one number for each copy", [(self.num_envs, 1)]
            )
        self._scalars = [
            leaf.key
            for leaf in self.observation_leaves
            if not leaf.shape and leaf.key != "observation"
        ]
        self._root: TensorDictBase | None = None
        below = env
        while isinstance(below, TransformedEnv):
            below = below.base_env
        self._own = below if isinstance(below, VectorEnv) else None
        if self._own is not None and self._own.normalizer is not None:
            name = "observation" if self._own.normalizer.observation else "reward"
            why = "below transforms would go on learning in evaluations, and change returns"
            works = "leave it out there, and give it to the outer make_env(...)"
            raise SettingError(f"env.normalize_{name}", True, why, works)
        self.name = type(below).__name__ if self._own is None else self._own.name

    def _rows(self, spec: Composite) -> Composite:
        """Return ``spec`` with the batch dimension of the envs."""
        if self.env.batch_dims == 1:
            return spec.clone()
        return spec.clone().expand(1, *spec.shape)

    def reset(
        self, observation: Arrays, seeds: Sequence[int] | None = None, mask: Mask | None = None
    ) -> None:
        """Reset through TorchRL; of the seeds the first one is used, as TorchRL derives others."""
        try:
            if seeds is not None:
                self.env.set_seed(int(seeds[0]))
            if mask is None or self._root is None:
                self._root = self.env.reset()
            else:
                chosen = torch.from_numpy(mask).reshape(self.env.full_done_spec["done"].shape)
                self._root = self.env.reset(self._root.set("_reset", chosen.to(self.env.device)))
        except FAULTS as error:
            raise fault_of(self.name, None, error, "reset()") from error
        self._write(self._root, observation)

    def step(self, actions: Arrays, result: StepArrays, active: Mask | None = None) -> Mask | None:
        """Step through TorchRL, which resets finished envs."""
        assert active is None
        assert self._root is not None
        self.convert(actions)  # refuses other shapes
        given = self._root.copy()
        for key, values in actions.items():
            shape = self.env.full_action_spec[key].shape
            given.set(key, torch.from_numpy(values).reshape(shape).to(self.env.device))
        try:
            stepped, self._root = self.env.step_and_maybe_reset(given)
        except FAULTS as error:
            raise fault_of(self.name, None, error, "step()") from error
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
            scalars = {_text(key): self._row(following, key) for key in self._scalars}
            self.infos = infos_of_arrays(scalars, result.terminated | result.truncated)
        return None

    def _write(self, tensordict: TensorDictBase, arrays: Arrays) -> None:
        for leaf in self.observation_leaves:
            arrays[leaf.key][...] = self._row(tensordict, leaf.key)

    def _row(self, tensordict: TensorDictBase, key: Key) -> Any:
        value = tensordict.get(key).detach().cpu()
        return (value if self.env.batch_dims else value.unsqueeze(0)).numpy()

    # ------------------------------------------------------------------ in and out
    def full_states(self) -> list[Any]:
        """Return the state of transforms and of the environments below, and the present TensorDict.

        Raises:
            CannotCapture: if an environment below is neither Gymnasium's, in this process, nor the
                kit's.
        """
        assert self._root is not None
        root = {_text(key): value.clone() for key, value in self._root.items(True, True)}
        below = [_state_of(part) for part in _below(self.env)]
        return [{"below": below, "transforms": dict(self.env.state_dict()), "root": root}]

    def set_full_states(self, states: list[Any]) -> None:
        """Restore the states of :meth:`full_states`."""
        (state,) = states
        for part, saved in zip(_below(self.env), state["below"], strict=True):
            if isinstance(part, VectorEnv):
                part.load_full_state(saved)
            else:
                restore(part, saved)
        self.env.load_state_dict(state["transforms"])
        entries = {tuple(name.split("/")): value for name, value in state["root"].items()}
        self._root = TensorDict(entries, self.env.batch_size, device=self.env.device)

    def close(self) -> None:
        """Close the environment and its processes."""
        with contextlib.suppress(Exception):
            self.env.close(raise_if_closed=False)


def _leaves(spec: Composite) -> list[Leaf]:
    entries = [(key, spec[key]) for key in spec.keys(True, True)]
    return [
        Leaf(key, (), None, tuple(one.shape[1:]), torch.empty(0, dtype=one.dtype).numpy().dtype)
        for key, one in entries
    ]


def _below(env: EnvBase) -> list[Any]:
    """Return the environments of Gymnasium or of the kit that ``env`` steps in this process."""
    if isinstance(env, VectorEnv):
        return [env]
    if isinstance(env, TransformedEnv):
        return _below(env.base_env)
    if isinstance(env, SerialEnv):
        return [one for inner in env._envs for one in _below(inner)]
    if isinstance(env, GymWrapper):
        return [env._env]
    raise CannotCapture(f"{type(env).__name__} does not give the state of its environments")


def _state_of(part: Any) -> Any:
    if not isinstance(part, VectorEnv):
        return capture(part)
    state = part.full_state()
    if state["envs"] is None:
        raise CannotCapture(part.not_resumable)
    return state


def _text(key: Key) -> str:
    return key if isinstance(key, str) else "/".join(key)
