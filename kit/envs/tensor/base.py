"""Base class of environments implemented in torch, which step thousands of copies at once.

A subclass implements three pure functions: initial state, transition and observation. The base
class provides time limits, action repeat, autoreset, returns, random numbers, checkpoints and
TorchRL's interface, without reading any tensor on the host.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from kit.config.devices import usable_device
from kit.envs.spaces import Leaf, leaves, to_composite
from kit.steps.errors import SettingError, whole_number


class EpisodeState(NamedTuple):
    """The complete state of all environments between two policy steps.

    Attributes:
        physics: the simulator's state, ``[state_size, num_envs]``. Each row is one quantity of all
            environments, so that arithmetic runs on contiguous memory.
        episode_return: sum of rewards since the episode started, ``[num_envs]``.
        episode_length: policy steps since the episode started, ``[num_envs]``, int64.
    """

    physics: Tensor
    episode_return: Tensor
    episode_length: Tensor


class TensorStep(NamedTuple):
    """The result of one policy step of all environments.

    Attributes:
        observation: observation for the next action, ``[num_envs, observation_size]``; after an
            episode's end, the first observation of the next episode.
        next_observation: observation after the action, even if the episode ended; same shape.
        reward: sum of rewards over the action repeats, ``[num_envs]``.
        terminated: whether the episode terminated, ``[num_envs]``, bool.
        truncated: whether the time limit was reached, ``[num_envs]``, bool.
        env_steps: simulator steps performed, ``[num_envs]``, int64; at most ``action_repeat``.
        episode_return: sum of rewards since the episode started, including this step,
            ``[num_envs]``.
        episode_length: policy steps since the episode started, including this step,
            ``[num_envs]``, int64.
    """

    observation: Tensor
    next_observation: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    env_steps: Tensor
    episode_return: Tensor
    episode_length: Tensor


class TensorEnv(EnvBase):  # type: ignore[misc, unused-ignore]
    """A batch of identical environments, stepped together by tensor operations.

    There are three interfaces to the same state:

    - :meth:`reset_tensors` and :meth:`step_tensors` use plain tensors and reset finished
      environments. They update the state in place, so a CUDA graph can capture them (after
      ``graph.register_generator_state(env.generator)``).
    - :meth:`advance` is the same step as a pure function, for tracing and compiling.
    - ``reset`` and ``step`` of TorchRL's ``EnvBase`` use TensorDicts, without automatic resets.

    Action values are not checked by :meth:`step_tensors`, :meth:`advance` and, on a GPU, ``step``,
    because the check would synchronise with the device. Actions must be valid for ``action_spec``.

    Args:
        num_envs: number of environments.
        device: device of the environments; ``None``: torch's default device.
        dtype: dtype of states, observations and rewards. Steps agree with Gymnasium to 1e-12 in
            ``torch.float64`` and to 1e-5 in ``torch.float32`` (Acrobot at top speed: 5e-3).
        max_episode_steps: policy steps after which an episode is truncated; ``None``: Gymnasium's
            registered limit, in simulator steps.
        action_repeat: number of simulator steps per action. The repeat stops when the episode ends.
        seed: seed of the initial states; ``None``: drawn from torch's global generator.
    """

    state_size: ClassVar[int]
    """Number of state variables in the simulation of one environment."""
    uniform_size: ClassVar[int]
    """Number of uniform random numbers that determine one initial state."""
    time_limit: ClassVar[int]
    """Simulator steps after which an episode is truncated by default."""
    observation_low: ClassVar[tuple[float, ...]]
    """Lower bound of each observation entry; may be infinite."""
    observation_high: ClassVar[tuple[float, ...]]
    """Upper bound of each observation entry; may be infinite."""
    num_actions: ClassVar[int] = 0
    """Number of discrete actions (shape ``[num_envs]``); 0 if actions are continuous."""
    action_limit: ClassVar[float] = float("inf")
    """Largest absolute value of continuous actions (shape ``[num_envs, 1]``)."""

    physics: Tensor
    episode_return: Tensor
    episode_length: Tensor

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.float32,
        max_episode_steps: int | None = None,
        action_repeat: int = 1,
        seed: int | None = None,
    ) -> None:
        self.num_envs = whole_number("num_envs", num_envs, at_least=1)
        self.action_repeat = whole_number("action_repeat", action_repeat, at_least=1)
        if max_episode_steps is None:
            self._most_env_steps = self.time_limit
            self.max_episode_steps = -(-self.time_limit // self.action_repeat)
        else:
            limit = whole_number("max_episode_steps", max_episode_steps, at_least=1)
            self.max_episode_steps, self._most_env_steps = limit, limit * self.action_repeat
        self.dtype = dtype
        self._action_shape = (self.num_envs,) if self.num_actions else (self.num_envs, 1)
        device = usable_device(device=torch.get_default_device() if device is None else device)
        super().__init__(device=device, batch_size=(self.num_envs,))
        self._make_specs()
        self._make_buffers()
        self.generator = torch.Generator(self.device)
        self._set_seed(seed)
        self._check_functions()
        self.reset_tensors()

    @torch.no_grad()
    def _check_functions(self) -> None:
        """Check that ``transition`` is pure and that the subclass's results have valid shapes."""
        n, name = self.num_envs, type(self).__name__
        uniform = torch.zeros((self.uniform_size, n), dtype=self.dtype, device=self.device)
        physics = self.initial_state(uniform)
        _check_shape(f"{name}.initial_state", physics, (self.state_size, n))
        before = physics.clone()
        later, reward, terminated = self.transition(physics, self.action_spec.zero())
        if not torch.equal(before, physics):
            reason = "The method transition must return new tensors, not change physics in place"
            raise SettingError("physics", name, reason, "Modify a copy: physics.clone()")
        _check_shape(f"{name}.transition physics", later, (self.state_size, n))
        _check_shape(f"{name}.transition reward", reward, (n,))
        _check_shape(f"{name}.transition terminated", terminated, (n,))
        if terminated.dtype != torch.bool:
            field = f"{name}.transition terminated"
            reason = "The termination flag must be boolean"
            raise SettingError(field, terminated.dtype, reason, [torch.bool])
        seen = (n, len(self.observation_low))
        _check_shape(f"{name}.observe", self.observe(physics), seen)

    # Methods for subclasses: pure functions that return new tensors and do not branch on values.

    @abstractmethod
    def initial_state(self, uniform: Tensor) -> Tensor:
        """Return initial states, ``[state_size, num_envs]``.

        Args:
            uniform: random numbers in [0, 1), ``[uniform_size, num_envs]``.
        """

    @abstractmethod
    def transition(self, physics: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Perform one simulator step in all environments.

        Args:
            physics: current state, ``[state_size, num_envs]``.
            action: integers ``[num_envs]``, or floats ``[num_envs, 1]``.

        Returns:
            The next physics, the reward ``[num_envs]``, and boolean termination flags
            ``[num_envs]``.
        """

    def observe(self, physics: Tensor) -> Tensor:
        """Return observations, ``[num_envs, observation_size]``; by default the whole state."""
        return physics.T

    # Plain-tensor interface.

    @torch.no_grad()
    def reset_tensors(self, seed: int | None = None, mask: Tensor | None = None) -> Tensor:
        """Start new episodes in the environments in ``mask`` (``None``: all).

        Args:
            seed: seed for the generator; ``None``: keep the generator's state.
            mask: environments to reset, ``[num_envs]``, bool; ``None``: all.

        Returns:
            The current observations of all environments, ``[num_envs, observation_size]``.
        """
        if seed is not None:
            self._set_seed(seed)
        if mask is None:
            mask = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        begun = self._begin(mask.to(self.device), self.episodes, self.draw_uniform())
        self._store(begun)
        return self.observe(begun.physics)

    @torch.no_grad()
    def step_tensors(self, action: Tensor) -> TensorStep:
        """Perform one policy step in all environments and reset those that finished."""
        episodes, step = self.advance(self.episodes, action, self.draw_uniform())
        self._store(episodes)
        return step

    def advance(
        self, episodes: EpisodeState, action: Tensor, uniform: Tensor
    ) -> tuple[EpisodeState, TensorStep]:
        """Compute one step as a pure function. Use :meth:`draw_uniform` for ``uniform``."""
        ended, step = self._play(episodes, action)
        ongoing = self._begin(step.terminated | step.truncated, ended, uniform)
        return ongoing, step._replace(observation=self.observe(ongoing.physics))

    def _begin(self, ended: Tensor, episodes: EpisodeState, uniform: Tensor) -> EpisodeState:
        """Return the state after starting new episodes in the environments in ``ended``."""
        return EpisodeState(
            torch.where(ended, self.initial_state(uniform), episodes.physics),
            episodes.episode_return.masked_fill(ended, 0.0),
            episodes.episode_length.masked_fill(ended, 0),
        )

    def draw_uniform(self) -> Tensor:
        """Draw the random numbers for one step, ``[uniform_size, num_envs]``."""
        return torch.rand(
            (self.uniform_size, self.num_envs),
            generator=self.generator,
            dtype=self.dtype,
            device=self.device,
        )

    @property
    def episodes(self) -> EpisodeState:
        """The current state of all environments, as tensors that the next step changes in place."""
        return EpisodeState(self.physics, self.episode_return, self.episode_length)

    def _play(self, episodes: EpisodeState, action: Tensor) -> tuple[EpisodeState, TensorStep]:
        """Perform one policy step without resetting finished environments."""
        # A wrong shape could broadcast and apply every action to every environment.
        _check_shape("action.shape", action, self._action_shape)
        if self.num_actions and action.is_floating_point():
            reason = "Discrete actions must have an integer dtype"
            raise SettingError("action.dtype", action.dtype, reason, [torch.int64])
        physics, reward, terminated = self.transition(episodes.physics, action)
        env_steps = torch.ones_like(episodes.episode_length)
        for made in range(1, self.action_repeat):
            over = terminated
            if self._most_env_steps % self.action_repeat:  # time limit may fall within a repeat
                before = episodes.episode_length * self.action_repeat
                over = over | (before + made >= self._most_env_steps)
            later, more, now_terminated = self.transition(physics, action)
            physics = torch.where(over, physics, later)
            reward = reward + more.masked_fill(over, 0.0)
            env_steps = env_steps + ~over
            terminated = terminated | (now_terminated & ~over)
        episodes = EpisodeState(
            physics, episodes.episode_return + reward, episodes.episode_length + 1
        )
        observation = self.observe(physics)
        truncated = episodes.episode_length >= self.max_episode_steps
        step = TensorStep(
            observation, observation, reward, terminated, truncated, env_steps, *episodes[1:]
        )
        return episodes, step

    def check_choice(self, action: int) -> None:
        """Check that a discrete action is in range, because the dynamics accept any number.

        Raises:
            SettingError: if the action is not in ``0`` to ``num_actions - 1``.
        """
        last = max(self.num_actions - 1, 0)
        if not 0 <= action <= last:
            reason = f"The environment's actions range from 0 to {last}"
            raise SettingError("action", action, reason, [min(max(action, 0), last)])

    def _store(self, episodes: EpisodeState) -> None:
        """Write the state in place, because a captured CUDA graph uses fixed memory addresses."""
        for buffer, value in zip(self.episodes, episodes):
            buffer.copy_(value)

    # TorchRL's EnvBase interface.

    @torch.no_grad()
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        before, action = self.episodes, tensordict["action"]
        after, step = self._play(before, action)
        moving = tensordict.get("_step", None)
        moving = None if moving is None else moving.view(self.num_envs)
        if self.num_actions and self.device.type == "cpu":
            for chosen in (action if moving is None else action[moving]).unique().tolist():
                self.check_choice(chosen)
        columns = {n: getattr(step, n).unsqueeze(-1) for n in ("reward", "terminated", "truncated")}
        columns["done"] = columns["terminated"] | columns["truncated"]
        columns["observation"] = step.next_observation
        result = TensorDict(columns, batch_size=self.batch_size, device=self.device)
        if moving is not None:  # TorchRL's "_step" mask excludes some environments
            after = EpisodeState(*(torch.where(moving, *both) for both in zip(after, before)))
            result = torch.where(moving, result, self._skip_tensordict(tensordict))
        self._store(after)
        return result

    @torch.no_grad()
    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        ended = None if tensordict is None else tensordict.get("_reset", None)
        observation = self.reset_tensors(mask=None if ended is None else ended.view(self.num_envs))
        return TensorDict({"observation": observation}, self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        if seed is None:
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        self.generator.manual_seed(seed)

    def to(self, device: torch.device | str | int) -> TensorEnv:
        """Move all environments. Moving to a new device restarts the generator from its seed."""
        super().to(device)
        if self.generator.device != self.device:
            seed = self.generator.initial_seed()
            self.generator = torch.Generator(self.device).manual_seed(seed)
        return self

    def gymnasium_spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Return the observation space and the action space of one environment."""
        kind = torch.zeros(0, dtype=self.dtype).numpy().dtype
        low, high = (np.array(b, kind) for b in (self.observation_low, self.observation_high))
        observation = gym.spaces.Box(low, high, dtype=kind.type)
        if self.num_actions:
            return observation, gym.spaces.Discrete(self.num_actions)
        limit = self.action_limit
        return observation, gym.spaces.Box(-limit, limit, (1,), dtype=kind.type)

    def _make_specs(self) -> None:
        n, device = self.num_envs, self.device

        def described(space: gym.Space[Any], root: str) -> list[Leaf]:
            """Return the same arrays as a VectorEnv, but with this environment's dtype."""
            dtype = np.dtype(space.dtype)
            return [dataclasses.replace(leaf, dtype=dtype) for leaf in leaves(space, root, root)]

        observation, action = self.gymnasium_spaces()
        self.observation_leaves = described(observation, "observation")
        self.action_leaves = described(action, "action")
        self.observation_spec = to_composite(self.observation_leaves, n, device)
        self.action_spec = to_composite(self.action_leaves, n, device)
        self.reward_spec = Unbounded(shape=(n, 1), dtype=self.dtype, device=device)
        flag = Categorical(n=2, shape=(n, 1), dtype=torch.bool, device=device)
        flags = {name: flag.clone() for name in ("done", "terminated", "truncated")}
        self.done_spec = Composite(flags, shape=(n,), device=device)

    # Checkpoints: nn.Module's state_dict, with the generator as extra state.

    def _make_buffers(self) -> None:
        shape, device = (self.num_envs,), self.device
        physics = torch.zeros((self.state_size, *shape), dtype=self.dtype, device=device)
        self.register_buffer("physics", physics)
        self.register_buffer("episode_return", torch.zeros(shape, dtype=self.dtype, device=device))
        self.register_buffer("episode_length", torch.zeros(shape, dtype=torch.int64, device=device))

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in EpisodeState._fields:
            destination[prefix + name] = destination[prefix + name].clone()

    def get_extra_state(self) -> dict[str, Any]:
        """Return the environment's name and the generator's state."""
        return {"environment": type(self).__name__, "generator": self.generator.get_state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the generator's state."""
        self.generator.set_state(state["generator"].cpu())

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Restore the saved state bit for bit, including unfinished episodes.

        Raises:
            SettingError: if the environment, number of environments or dtype differs from the saved
                state. The environment is then left unchanged.
        """
        physics = state_dict["physics"]
        for field, here, saved in (
            ("environment", type(self).__name__, state_dict["_extra_state"]["environment"]),
            ("num_envs", self.num_envs, physics.shape[-1]),
            ("dtype", self.dtype, physics.dtype),
        ):
            if here != saved:
                reason = f"The saved state has {field}={saved}"
                raise SettingError(field, here, reason, [saved])
        return super().load_state_dict(state_dict, strict=strict, assign=False)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise SettingError for a wrong shape, which could broadcast or fail in a later step."""
    if tensor.shape != shape:
        raise SettingError(name, tuple(tensor.shape), "The tensor has the wrong shape", [shape])
