"""The base of environments written in torch: thousands of them, stepped together on any device.

A subclass writes pure functions: how an episode begins, what an action does, and what the agent
sees. Everything else (time limits, action repeat, autoreset, returns, random numbers, saving,
TorchRL's interface) is here, and none of it reads a tensor on the host.
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
    """The state of every env between two policy steps: all that a step reads and writes.

    Attributes:
        physics: the simulator's state, ``[state_size, num_envs]``. A row is one quantity of all
            envs, so that arithmetic on it runs over contiguous memory.
        episode_return: sum of rewards since the episode began, ``[num_envs]``.
        episode_length: policy steps since the episode began, ``[num_envs]``, int64.
    """

    physics: Tensor
    episode_return: Tensor
    episode_length: Tensor


class TensorStep(NamedTuple):
    """What one policy step of every env gives.

    Attributes:
        observation: what to act on next, ``[num_envs, observation_size]``: the first observation of
            the next episode where this one ended.
        next_observation: what the action led to, of the same shape: the true last observation
            where the episode ended.
        reward: sum over the action repeats, ``[num_envs]``.
        terminated: whether the episode ended by its own rules, ``[num_envs]``, bool.
        truncated: whether the time limit was reached, ``[num_envs]``, bool. Both can be true.
        env_steps: simulator steps really made, ``[num_envs]``, int64: ``action_repeat`` or less.
        episode_return: sum of rewards since the episode began, this step included,
            ``[num_envs]``: the return of the episode where it ended.
        episode_length: policy steps since the episode began, this one included, ``[num_envs]``,
            int64: the length of the episode where it ended.
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
    """Equal environments, stepped together by tensor operations.

    It is used in three ways, which share the same state:

    - :meth:`reset_tensors` and :meth:`step_tensors`: plain tensors in and out, finished envs
      restart by themselves. They change the state in place, so they can be captured in a CUDA graph
      (after ``graph.register_generator_state(env.generator)``).
    - :meth:`advance`: the same step as a pure function, for tracing and compiling.
    - ``reset`` and ``step`` of TorchRL's ``EnvBase``: TensorDicts, and TorchRL resets what is done.

    :meth:`step_tensors`, :meth:`advance` and, on a GPU, ``step`` do not look at the values of
    actions, which would wait for the device: give those of ``action_spec``.

    Args:
        num_envs: number of envs.
        device: where they live; torch's default device if None.
        dtype: of states, observations and rewards. ``torch.float64`` is Gymnasium's dynamics to
            1e-12 in every step, ``torch.float32`` to 1e-5 (Acrobot at its top speeds: 5e-3).
        max_episode_steps: policy steps after which an episode is truncated; if None, the limit
            that Gymnasium registers, in simulator steps.
        action_repeat: simulator steps that one action is held for; ends early with the episode.
        seed: of the initial states of all envs; drawn from torch's global generator if None.
    """

    state_size: ClassVar[int]
    """quantities in the simulator's state of one env."""
    uniform_size: ClassVar[int]
    """uniform random numbers that an initial state of one env is made from."""
    time_limit: ClassVar[int]
    """simulator steps after which an episode is truncated by default."""
    observation_low: ClassVar[tuple[float, ...]]
    """smallest value of each entry of an observation; may be infinite."""
    observation_high: ClassVar[tuple[float, ...]]
    """largest value of each entry of an observation; may be infinite."""
    num_actions: ClassVar[int] = 0
    """how many actions there are to choose from, integers ``[num_envs]``; 0 if continuous."""
    action_limit: ClassVar[float] = float("inf")
    """continuous actions are floats ``[num_envs, 1]``, clipped to plus or minus this."""

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
        """Raise an error if ``transition`` changes its input, or a result could be broadcast."""
        n, name = self.num_envs, type(self).__name__
        uniform = torch.zeros((self.uniform_size, n), dtype=self.dtype, device=self.device)
        physics = self.initial_state(uniform)
        _demand_shape(f"{name}.initial_state", physics, (self.state_size, n))
        before = physics.clone()
        later, reward, terminated = self.transition(physics, self.action_spec.zero())
        if not torch.equal(before, physics):
            why = "is changed in place by transition, which has to return new tensors"
            raise SettingError("physics", name, why, "change a copy: physics.clone()")
        _demand_shape(f"{name}.transition physics", later, (self.state_size, n))
        _demand_shape(f"{name}.transition reward", reward, (n,))
        _demand_shape(f"{name}.transition terminated", terminated, (n,))
        if terminated.dtype != torch.bool:
            field = f"{name}.transition terminated"
            raise SettingError(field, terminated.dtype, "is not boolean", [torch.bool])
        seen = (n, len(self.observation_low))
        _demand_shape(f"{name}.observe", self.observe(physics), seen)

    # What a subclass writes: pure functions that return new tensors and never branch on data.

    @abstractmethod
    def initial_state(self, uniform: Tensor) -> Tensor:
        """Return states to begin in, ``[state_size, num_envs]``.

        Args:
            uniform: random numbers in [0, 1), ``[uniform_size, num_envs]``.
        """

    @abstractmethod
    def transition(self, physics: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make one simulator step of every env.

        Args:
            physics: ``[state_size, num_envs]``.
            action: ``[num_envs]`` integers, or ``[num_envs, 1]`` floats.

        Returns:
            The next physics, the reward ``[num_envs]`` and whether the episode terminated
            ``[num_envs]``, bool.
        """

    def observe(self, physics: Tensor) -> Tensor:
        """The observation, ``[num_envs, observation_size]``: all physics; may be a view."""
        return physics.T

    # Plain tensors.

    @torch.no_grad()
    def reset_tensors(self, seed: int | None = None, mask: Tensor | None = None) -> Tensor:
        """Begin an episode in every env, or in those of a mask.

        Args:
            seed: seeds the generator first, if given.
            mask: which envs, ``[num_envs]``, bool; ``None``: all.

        Returns:
            The present observations of all envs, ``[num_envs, observation_size]``.
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
        """Make one policy step of every env, and begin a new episode where one ended."""
        episodes, step = self.advance(self.episodes, action, self.draw_uniform())
        self._store(episodes)
        return step

    def advance(
        self, episodes: EpisodeState, action: Tensor, uniform: Tensor
    ) -> tuple[EpisodeState, TensorStep]:
        """Compute :meth:`step_tensors` as a pure function; see :meth:`draw_uniform`."""
        ended, step = self._play(episodes, action)
        ongoing = self._begin(step.terminated | step.truncated, ended, uniform)
        return ongoing, step._replace(observation=self.observe(ongoing.physics))

    def _begin(self, ended: Tensor, episodes: EpisodeState, uniform: Tensor) -> EpisodeState:
        """The state with new episodes where one has ended."""
        return EpisodeState(
            torch.where(ended, self.initial_state(uniform), episodes.physics),
            episodes.episode_return.masked_fill(ended, 0.0),
            episodes.episode_length.masked_fill(ended, 0),
        )

    def draw_uniform(self) -> Tensor:
        """Draw the random numbers of one step from the generator, ``[uniform_size, num_envs]``."""
        return torch.rand(
            (self.uniform_size, self.num_envs),
            generator=self.generator,
            dtype=self.dtype,
            device=self.device,
        )

    @property
    def episodes(self) -> EpisodeState:
        """The present state of every env: the tensors themselves, changed by the next step."""
        return EpisodeState(self.physics, self.episode_return, self.episode_length)

    def _play(self, episodes: EpisodeState, action: Tensor) -> tuple[EpisodeState, TensorStep]:
        """Hold the action for all its repeats; nothing restarts."""
        # Broadcasting could accept another, and step every env with every action.
        _demand_shape("action.shape", action, self._action_shape)
        if self.num_actions and action.is_floating_point():
            why = "is no type of actions that are chosen by their number"
            raise SettingError("action.dtype", action.dtype, why, [torch.int64])
        physics, reward, terminated = self.transition(episodes.physics, action)
        env_steps = torch.ones_like(episodes.episode_length)
        for made in range(1, self.action_repeat):
            over = terminated
            if self._most_env_steps % self.action_repeat:  # the limit comes inside a repeat
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
        """Refuse an action that is not there to choose from; dynamics would take any number.

        Raises:
            SettingError: if it is not one of ``0`` to ``num_actions - 1``.
        """
        last = max(self.num_actions - 1, 0)
        if not 0 <= action <= last:
            why = f"is no action of the environment, which has 0 to {last}"
            raise SettingError("action", action, why, [min(max(action, 0), last)])

    def _store(self, episodes: EpisodeState) -> None:
        """Write the state in place, so that its memory stays the same in a captured graph."""
        for buffer, value in zip(self.episodes, episodes):
            buffer.copy_(value)

    # TorchRL's EnvBase.

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
        if moving is not None:  # TorchRL asks that the other envs stand still.
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
        """Move all envs; on a new device the generator starts again from its seed."""
        super().to(device)
        if self.generator.device != self.device:
            seed = self.generator.initial_seed()
            self.generator = torch.Generator(self.device).manual_seed(seed)
        return self

    def gymnasium_spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Return the spaces of observation and action of one env."""
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
            """The arrays as a VectorEnv has them, but in this environment's type."""
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

    # Saving and loading: nn.Module's state_dict, with the generator as extra state.

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
        """Return the extra state: all but the tensors of the episodes."""
        return {"environment": type(self).__name__, "generator": self.generator.get_state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the generator."""
        self.generator.set_state(state["generator"].cpu())

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Continue where the saved environment stood, bit by bit, in the middle of its episodes.

        Raises:
            SettingError: if the state is of another environment, number of envs or dtype.
                Nothing has been changed then.
        """
        physics = state_dict["physics"]
        for field, here, saved in (
            ("environment", type(self).__name__, state_dict["_extra_state"]["environment"]),
            ("num_envs", self.num_envs, physics.shape[-1]),
            ("dtype", self.dtype, physics.dtype),
        ):
            if here != saved:
                raise SettingError(field, here, "is not that of the saved state", [saved])
        return super().load_state_dict(state_dict, strict=strict, assign=False)


def _demand_shape(what: str, given: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a result of another shape, which could be broadcast, or raise in a later step."""
    if given.shape != shape:
        raise SettingError(what, tuple(given.shape), "is another shape", [shape])
