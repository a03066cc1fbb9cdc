"""A batch of environments as one TorchRL environment, plus an array API without TensorDicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from kit.envs.backends.base import EnvBackend, Mask, StepArrays, derived_seed
from kit.envs.episodes import Episode, EpisodeStatistics, Infos
from kit.envs.hanging import StepWatch
from kit.envs.normalize import Normalizer
from kit.envs.plain_values import StateCaptureError
from kit.envs.spaces import Arrays, Leaf, empty, key_from_list, key_to_list, to_composite
from kit.steps.errors import SettingError


def env_seeds(seed: int, num_envs: int) -> list[int]:
    """Return one seed per environment. Different run seeds give different environment seeds."""
    return [int(s) for s in np.random.SeedSequence(seed).generate_state(num_envs, np.uint32)]


_KEPT = 65_536
"""Maximum number of finished episodes stored between calls to :meth:`VectorEnv.take_episodes`."""


class _Present:
    """State of the current step. Not stored on the module, where setting attributes is slow."""

    def __init__(self, observation: Arrays) -> None:
        self.observation = observation
        self.started = False
        self.env_steps, self.made = np.zeros(0, np.int32), 0
        num_envs = len(next(iter(observation.values())))
        self.fresh = np.zeros(num_envs, np.bool_)
        self.ended = False  # whether an episode ended and has not been reset yet
        self.accounts = EpisodeStatistics(num_envs)
        self.finished: list[Episode] = []
        self.steps = 0  # number of steps since the last take_infos()
        self.infos: dict[tuple[int, int], Mapping[str, float]] = {}


class VectorEnv(EnvBase):  # type: ignore[misc, unused-ignore]
    """A batch of identical environments as one TorchRL environment with batch size ``[num_envs]``.

    Compatible with TorchRL's ``rollout``, ``TransformedEnv`` and collectors. A finished environment
    is reset within the step that finished it, so TorchRL's partial reset costs nothing. This kit's
    collectors step with arrays instead of TensorDicts (:meth:`start`, :meth:`step_arrays`).

    The keys are the same as in TorchRL: ``observation`` (or the keys of a ``Dict`` space),
    ``action``, ``reward``, ``done``, ``terminated`` and ``truncated``. Discrete actions are
    integers, not one-hot vectors. Discrete actions and observations start at 0, regardless of
    their space's ``start``.

    Args:
        backend: backend that steps the environments.
        seed: base seed from which each environment's seed is derived.
        normalizer: running normalisation, updated in training mode and frozen in evaluation mode.
        device: device of the TensorDicts; the environments run on the host.
        make_again: function that creates an identical environment, in this or another process. Its
            keyword arguments override the original arguments of :func:`~kit.envs.make_env`.

    Attributes:
        raw: whether arrays contain raw observations and rewards; see :meth:`leave_raw`.
    """

    def __init__(
        self,
        backend: EnvBackend,
        *,
        seed: int = 0,
        normalizer: Normalizer | None = None,
        device: torch.device | str | None = None,
        make_again: Callable[..., VectorEnv] | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=[backend.num_envs])
        self.backend = backend
        self.num_envs = backend.num_envs
        self.normalizer = normalizer
        self.raw = False
        self.make_again = make_again
        self.name = backend.name
        self.observation_leaves: list[Leaf] = backend.observation_leaves
        self.action_leaves: list[Leaf] = backend.action_leaves
        self._seed: int | None = seed
        self._first_seed: int | None = seed
        self._begun_again = 0
        self._now = _Present(empty(self.observation_leaves, self.num_envs))
        self._make_specs()

    def _make_specs(self) -> None:
        n, device = self.num_envs, self.device
        if self.backend.specs is None:
            self.observation_spec = to_composite(self.observation_leaves, n, device)
            self.action_spec = to_composite(self.action_leaves, n, device)
        else:
            observation, action = self.backend.specs
            self.observation_spec = observation.clone().to(device)
            self.action_spec = action.clone().to(device)
        self.reward_spec = Unbounded((n, 1), dtype=torch.float32, device=device)
        flag = Categorical(2, shape=(n, 1), dtype=torch.bool, device=device)
        self.full_done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=(n,), device=device
        )

    # ------------------------------------------------------------------ array API
    def leave_raw(self, raw: bool) -> None:
        """Set whether arrays contain raw observations and rewards, as a replay buffer needs them.

        The statistics are updated in either case. Policies act on the result of :meth:`observed`.
        TensorDicts are always normalised. If ``raw`` changes, all environments start new episodes.

        Args:
            raw: whether to leave arrays raw; has no effect without a normalizer.
        """
        raw = raw and self.normalizer is not None
        if raw != self.raw:
            self.raw, self._now.started = raw, False

    def observed(self, observation: Arrays) -> Arrays:
        """Return the observations that a policy acts on: raw arrays are normalised."""
        if not self.raw:
            return observation
        assert self.normalizer is not None
        return self.normalizer.observed(observation)

    def start(self) -> Arrays:
        """Return the current observation; the first call resets all environments."""
        if not self._now.started:
            self.restart()
        return self._now.observation

    def acts_on(self, observation: Arrays) -> None:
        """Set the arrays of the current observation, so that the previous arrays can be reused."""
        self._now.observation = self.backend.present = observation

    def restart(self, mask: Mask | None = None) -> Arrays:
        """Start new episodes and return the observations of all environments.

        Args:
            mask: environments to reset; ``None``: all. Seeds are only used in the first full reset.
        """
        observation = {**self._now.observation}  # a new dict, so that is_at() detects the reset
        if mask is None or not self._now.started:
            mask = None
            # The current arrays are part of a batch and must not be overwritten.
            observation = empty(self.observation_leaves, self.num_envs)
        seeds = None if self._seed is None else env_seeds(self._seed, self.num_envs)
        self.backend.reset(observation, seeds if mask is None else None, mask)
        self._now.observation = observation
        self._now.accounts.restart(mask)
        if mask is None:
            self.take_infos()
        self._seed, self._now.started = None, True
        if self.normalizer is not None:
            rows = slice(None) if mask is None else mask
            self.normalizer.first(observation, self.training, rows, self.raw)
        return observation

    def step_arrays(
        self,
        actions: Arrays,
        result: StepArrays,
        active: Mask | None = None,
        *,
        rewards: bool = True,
        played: Mask | None = None,
    ) -> None:
        """Step the environments in ``active`` (``None``: all).

        Args:
            actions: action arrays with one row per environment.
            result: output arrays. ``terminated`` and ``truncated`` must be 0, and ``env_steps`` 1.
            active: mask of environments to step; requires ``backend.steps_some``. Others keep their
                state.
            rewards: whether to normalise rewards; if false, call :meth:`normalize_rewards` later.
            played: mask of environments whose step belongs to a batch and updates the normalisation
                statistics; ``None``: all stepped environments.

        Raises:
            EnvError: if an environment raises or returns invalid values.
        """
        recovered = self.backend.step(actions, result, active)
        if self.normalizer is not None:
            taught = played if active is None else None
            how = self.training, active, recovered, rewards, taught, self.raw
            self.normalizer.step(result, *how)
        now = self._now
        now.observation = result.observation
        for env, info in self.backend.infos.items() if self.backend.infos else ():
            now.infos[now.steps, env] = info
        now.steps += 1

    def normalize_rewards(self, steps: StepArrays) -> None:
        """Normalise the raw rewards from consecutive calls with ``rewards=False``."""
        if self.normalizer is not None:
            self.normalizer.rewards(steps, self.training, self.raw)

    def take_infos(self) -> Infos:
        """Return the ``Episode.info`` of each episode that ended since the last call.

        Keys are (step index, environment index) pairs. Steps are counted from the last call or
        the last full reset.
        """
        now = self._now
        infos, now.infos, now.steps = now.infos, {}, 0
        return infos

    def abandon(self) -> None:
        """Start new episodes in all environments before the next step."""
        self._now.started = False

    def is_at(self, observation: Arrays | None) -> bool:
        """Return whether ``observation`` is still the current observation of the environments."""
        here = self._now.started and self._now.observation is observation
        return here and self.backend.is_where_it_was

    @property
    def is_started(self) -> bool:
        """Whether the environments have been reset since they were last seeded."""
        return self._now.started

    @property
    def env_steps(self) -> NDArray[np.int32]:
        """Number of env steps of each environment in the last TensorDict step, ``[num_envs]``."""
        return self._now.env_steps

    @property
    def env_steps_made(self) -> int:
        """Total number of env steps performed by TensorDict steps."""
        return self._now.made

    @property
    def needs_raw_reward(self) -> bool:
        """Whether steps must provide ``StepArrays.raw_reward``; true if rewards are normalised."""
        return self.normalizer is not None and self.normalizer.reward is not None

    def new_step(self) -> StepArrays:
        """Allocate the arrays for one step."""
        n = self.num_envs
        return StepArrays(
            next_observation=empty(self.observation_leaves, n),
            observation=empty(self.observation_leaves, n),
            reward=np.zeros(n, np.float32),
            terminated=np.zeros(n, np.bool_),
            truncated=np.zeros(n, np.bool_),
            env_steps=np.ones(n, np.int32),
            raw_reward=np.zeros(n, np.float32) if self.needs_raw_reward else None,
        )

    # ------------------------------------------------------------------ TensorDict API
    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        del kwargs
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None or not self._now.started:
            self.restart()
        else:
            chosen = mask.reshape(self.num_envs).cpu().numpy()
            forced = chosen & ~self._now.fresh
            if forced.any():
                self._now.observation = {k: v.copy() for k, v in self._now.observation.items()}
                # A TorchRL time limit truncated these episodes.
                self._now.finished += self._now.accounts.cut(forced)
                self.restart(forced)
        self._now.fresh, self._now.ended = np.ones(self.num_envs, np.bool_), False
        return self._tensordict(self._now.observation)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step all environments; raise SettingError if a finished environment was not reset."""
        if self._now.ended:
            reason = "The environment was stepped after the end of an episode, without a reset"
            hint = "Use env.step_and_maybe_reset, or set make_env(action_repeat=...)"
            raise SettingError("env", self.name, reason, hint)
        actions = {
            leaf.key: tensordict.get(leaf.key).detach().cpu().numpy() for leaf in self.action_leaves
        }
        result = self.new_step()
        self.step_arrays(actions, result)
        self._now.fresh = result.terminated | result.truncated
        self._now.ended = bool(self._now.fresh.any())
        self._now.env_steps = result.env_steps
        self._now.made += int(result.env_steps.sum())
        reward, terminated, truncated, env_steps = result.counted
        self._now.finished += self._now.accounts.add(
            reward[None], terminated[None], truncated[None], env_steps[None], self.take_infos()
        )
        del self._now.finished[:-_KEPT]
        if self.raw and self.needs_raw_reward:
            assert self.normalizer is not None
            result.reward[...] = self.normalizer.scaled(result.reward)
        step = self._tensordict(result.next_observation)
        for name in ("reward", "terminated", "truncated"):
            value = torch.from_numpy(getattr(result, name)).unsqueeze(-1)
            step[name] = value.to(self.device)
        step["done"] = step["terminated"] | step["truncated"]
        return step

    def take_episodes(self) -> list[Episode]:
        """Return the episodes that have ended since the last call (TensorDict steps only)."""
        finished, self._now.finished = self._now.finished, []
        return finished

    def _tensordict(self, arrays: Arrays) -> TensorDictBase:
        seen = self.observed(arrays)
        tensors = {key: torch.from_numpy(array.copy()) for key, array in seen.items()}
        return TensorDict(tensors, [self.num_envs], device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        self._seed = seed
        self._first_seed = self._first_seed if seed is None else seed
        self._now.started = False

    # ------------------------------------------------------------------ state
    def full_state(self) -> dict[str, Any]:
        """Return the complete state that the next step depends on, as tensors and plain values.

        The entry ``envs`` is ``None`` if the state of the environments cannot be captured.
        """
        try:
            states: list[Any] | None = self.backend.full_states() if self._now.started else []
        except StateCaptureError as reason:
            self.not_resumable = str(reason)
            states = None
        return {
            "started": self._now.started,
            "seed": self._seed,
            "faults": self.backend.faults,
            "envs": states,
            "transforms": self.backend.state_of_transforms() if self._now.started else [],
            "not_resumable": self.not_resumable,
            "begun_again": self._begun_again,
            "accounts": self._now.accounts.state_dict(),
            "observation": [
                [key_to_list(key), torch.from_numpy(value.copy())]
                for key, value in self._now.observation.items()
            ],
            "normalizer": None if self.normalizer is None else self.normalizer.state_dict(),
            "raw": self.raw,
        }

    not_resumable: str = ""
    """Reason why the environments' state cannot be captured; empty if it can be captured."""

    def load_full_state(self, state: dict[str, Any]) -> bool:
        """Restore a state returned by :meth:`full_state`.

        Returns:
            Whether all environments continue exactly. Otherwise, all environments have been reset.
        """
        if self.normalizer is not None and state["normalizer"] is not None:
            self.normalizer.load_state_dict(state["normalizer"])
        # Checkpoints of earlier versions only contain normalised arrays.
        self.raw = self.normalizer is not None and bool(state.get("raw", False))
        self.backend.faults = int(state["faults"])
        if not state["started"]:
            self._seed, self._now.started = state["seed"], False
            return True
        self._begun_again = int(state["begun_again"])
        observation = empty(self.observation_leaves, self.num_envs)
        transforms = state.get("transforms", [])
        if state["envs"] is not None or transforms:  # some objects only exist after a reset
            self.backend.reset(observation, env_seeds(0, self.num_envs))
            self.backend.load_state_of_transforms(transforms)
        if state["envs"] is None:
            self._begin_again()
            return False
        try:
            self.backend.set_full_states(state["envs"])
        except StateCaptureError as reason:
            self.not_resumable = str(reason)
            self._begin_again()
            return False
        for key, value in state["observation"]:
            observation[key_from_list(key)][...] = value.numpy()
        self._now.observation = observation
        self._seed, self._now.started = None, True
        if "accounts" in state:  # missing in old checkpoints
            self._now.accounts.load_state_dict(state["accounts"])
        return True

    def _begin_again(self) -> None:
        """Start new episodes with seeds that neither the original nor a resumed run has used."""
        self._begun_again += 1
        if self._first_seed is not None:
            self._seed = derived_seed(self._first_seed, self._begun_again, 0)
        self._now.started = False
        self.restart()

    def reopen(self) -> None:
        """Create the environments again after they were closed.

        Raises:
            SettingError: if the environments cannot be created a second time.
        """
        if self.make_again is None:
            reason = "The closed environments cannot be created a second time"
            raise SettingError("env", self.name, reason, "Use make_env with an ID or a function")
        self.backend = self.make_again().backend
        self.is_closed, self._now.started = False, False

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the environments."""
        self.backend.close()
        super().close(raise_if_closed=raise_if_closed)


StepWatch.CALLS |= {VectorEnv.step_arrays.__code__, VectorEnv.restart.__code__}
