"""EnvPool: many equal environments in threads, written in C++."""

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
"""Families to which their limit means nothing else (to MiniGrid's rewards, for one, it does)."""

_NOT_INFO = frozenset({"env_id", "elapsed_step"})
"""Entries of ``info`` that EnvPool always gives, and that every episode has already."""


class EnvPoolBackend(EnvBackend):
    """Environments stepped by EnvPool, in synchronous mode.

    EnvPool resets a finished env in the step after the last; here it is reset at once, by asking
    for just those envs, so that no policy step is spent. A frame skip of EnvPool's own (Atari: 4)
    is part of the environment: each policy step counts as one env step. The values of actions are
    not checked, the state of an env cannot be captured.

    Of an episode that terminates in the very step that its limit truncates, EnvPool says only that
    it was truncated. Atari, Box2D, classic control, MuJoCo and toy text are truncated here instead,
    so that both are said; of other families the termination in that step is lost.

    Args:
        id: EnvPool's id, most often Gymnasium's.
        num_envs: number of envs.
        seed: of all envs. EnvPool is seeded when it is made, so a new seed makes it again.
        max_episode_steps: policy steps after which an episode is truncated; ``None``: its own.
        kwargs: for ``envpool.make_gymnasium``: ``num_threads``, and those of the environment.

    Raises:
        SettingError: if EnvPool is not installed.
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
        except Exception as error:  # some releases look for files that others bring
            why = f"needs the package envpool, which cannot be imported ({error})"
            works = "pip install 'torchrl-kit[envpool]'"
            raise SettingError("env.vectorization", "envpool", why, works) from None
        self._limit = _limit_here(id, max_episode_steps)
        self._lengths = np.zeros(num_envs, np.int64)
        theirs = max_episode_steps if self._limit is None else self._limit + 1
        limit = {} if theirs is None else {"max_episode_steps": theirs}
        make = functools.partial(make_gymnasium, id, num_envs=num_envs, **limit)
        self._how = functools.partial(make, **(kwargs or {}))
        self._make(seed)
        self._describe(id, num_envs, *self._spaces)

    def _make(self, seed: int) -> None:
        self._seed = seed % 2**31
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bounds that it rounds itself
            self.pool: Any = self._how(seed=self._seed)
            self._spaces = self.pool.observation_space, self.pool.action_space

    def reset(
        self, observation: Arrays, seeds: Sequence[int] | None = None, mask: Mask | None = None
    ) -> None:
        """Reset all envs, or those of ``mask``; of the seeds the first one is used."""
        if seeds is not None and int(seeds[0]) % 2**31 != self._seed:
            self.close()
            self._make(int(seeds[0]))
        chosen = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        self._lengths[chosen] = 0
        first, info = self.pool.reset(chosen.astype(np.int32))
        for leaf in self.observation_leaves:
            observation[leaf.key][info["env_id"]] = leaf.of(first)

    def step(self, actions: Arrays, result: StepArrays, active: Mask | None = None) -> Mask | None:
        """Step all envs, then reset those that finished."""
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
            known = {name: info[name] for name in info if name not in _NOT_INFO}
            self.infos = infos_of_arrays(known, ended)
            self.reset(result.observation, mask=ended)
        return None

    def close(self) -> None:
        """Stop EnvPool's threads."""
        with contextlib.suppress(Exception):
            self.pool.close()
        self.pool = None  # the threads end with the last reference


def _limit_here(id: str, given: int | None) -> int | None:
    """Return the limit at which episodes are truncated here; ``None`` leaves that to EnvPool."""
    import envpool
    from envpool.registration import registry

    family = getattr(registry, "specs", {}).get(id, ("",))[0]  # where a release still says so
    if family not in _LIMIT_ONLY_TRUNCATES:
        return None
    return int(envpool.make_spec(id).config.max_episode_steps) if given is None else given
