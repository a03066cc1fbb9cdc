"""Backend for EnvPool, which steps environments in C++ threads."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kit.envs.backends.base import EnvBackend, Mask, StepArrays, infos_of_arrays
from kit.envs.errors import fault_of
from kit.envs.spaces import Arrays, some
from kit.steps.errors import SettingError

_LIMIT_ONLY_TRUNCATES = (
    "envpool.atari",
    "envpool.box2d",
    "envpool.classic_control",
    "envpool.mujoco.gym",
    "envpool.toy_text",
)
"""Environment families whose step limit does not affect rewards (MiniGrid's does)."""

_NOT_INFO = frozenset({"env_id", "elapsed_step"})
"""Entries of EnvPool's ``info`` that do not describe an episode."""


class EnvPoolBackend(EnvBackend):
    """Environments stepped by EnvPool in synchronous mode.

    EnvPool resets a finished environment in the following step. This backend requests the reset
    immediately, so that a reset uses no policy step. EnvPool's built-in frame skip (4 for Atari) is
    part of the environment, so each policy step counts as one env step. Actions are not checked,
    and the state of environments cannot be captured.

    If an episode terminates in the step that reaches the limit, EnvPool only reports truncation.
    This backend therefore applies the limits of Atari, Box2D, classic control, MuJoCo and toy text
    itself and reports both flags. For other families, such a termination is reported as truncation.

    Args:
        id: EnvPool's id, usually identical to Gymnasium's.
        num_envs: number of environments.
        seed: seed of all environments; a reset with another seed recreates the environments.
        max_episode_steps: time limit in policy steps; ``None``: EnvPool's default.
        kwargs: ``num_threads`` and environment options for ``envpool.make_gymnasium``.

    Raises:
        SettingError: if EnvPool cannot be imported.
    """

    def __init__(
        self,
        id: str,
        num_envs: int,
        seed: int = 0,
        max_episode_steps: int | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            from envpool import make_gymnasium
        except Exception as error:  # some EnvPool releases import optional packages
            reason = f"The package envpool cannot be imported ({error})"
            hint = "Run pip install 'torchrl-kit[envpool]'"
            raise SettingError("env.vectorization", "envpool", reason, hint) from None
        self._limit = _limit_here(id, max_episode_steps)
        self._lengths = np.zeros(num_envs, np.int64)
        pool_limit = max_episode_steps if self._limit is None else self._limit + 1
        limit = {} if pool_limit is None else {"max_episode_steps": pool_limit}
        make = functools.partial(make_gymnasium, id, num_envs=num_envs, **limit)
        self._how = functools.partial(make, **(kwargs or {}))
        self._make(seed)
        self._describe(id, num_envs, *self._spaces)

    def _make(self, seed: int) -> None:
        self._seed = seed % 2**31
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # EnvPool warns about rounding its own bounds
            self.pool: Any = self._how(seed=self._seed)
            self._spaces = self.pool.observation_space, self.pool.action_space

    def reset(
        self, observation: Arrays, seeds: Sequence[int] | None = None, mask: Mask | None = None
    ) -> None:
        """Reset the environments in ``mask`` (``None``: all). Only the first seed is used."""
        if seeds is not None and int(seeds[0]) % 2**31 != self._seed:
            self.close()
            self._make(int(seeds[0]))
        chosen = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        self._lengths[chosen] = 0
        first, info = self.pool.reset(chosen.astype(np.int32))
        for leaf in self.observation_leaves:
            observation[leaf.key][info["env_id"]] = leaf.of(first)

    def step(self, actions: Arrays, result: StepArrays, active: Mask | None = None) -> Mask | None:
        """Step all environments, then reset those that finished."""
        assert active is None
        converted = self.convert(actions)
        try:
            seen, reward, terminated, truncated, info = self.pool.step(converted)
        except Exception as error:
            raise fault_of(self.name, None, error, "step()") from error
        result.reward[...] = reward
        result.terminated[...] = terminated
        result.truncated[...] = truncated
        self._lengths += 1
        if self._limit is not None:
            result.truncated[...] |= self._lengths >= self._limit
        for leaf in self.observation_leaves:
            value = leaf.of(seen)
            result.next_observation[leaf.key][...] = value
            result.observation[leaf.key][...] = value
        ended, self.infos = result.terminated | result.truncated, {}
        if some(ended):
            entries = {name: info[name] for name in info if name not in _NOT_INFO}
            self.infos = infos_of_arrays(entries, ended)
            self.reset(result.observation, mask=ended)
        return None

    def close(self) -> None:
        """Stop EnvPool's threads."""
        with contextlib.suppress(Exception):
            self.pool.close()
        self.pool = None  # EnvPool stops its threads when the last reference is dropped


def _limit_here(id: str, limit: int | None) -> int | None:
    """Return the step limit that this backend applies; ``None`` if EnvPool applies it."""
    import envpool
    from envpool.registration import registry

    family = getattr(registry, "specs", {}).get(id, ("",))[0]  # not every EnvPool release has specs
    if family not in _LIMIT_ONLY_TRUNCATES:
        return None
    return int(envpool.make_spec(id).config.max_episode_steps) if limit is None else limit
