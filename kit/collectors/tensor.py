"""Collector for environments that are written in PyTorch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from kit.collectors.actor import ActionSelector
from kit.collectors.base import StepsCollector, check_policy
from kit.collectors.policy import IS_INIT, Policy, PolicyRunner, Tensors
from kit.config.devices import usable_device
from kit.envs.episodes import Episode
from kit.envs.errors import EnvError
from kit.envs.normalize import Normalizer
from kit.envs.spaces import Key
from kit.envs.tensor import TENSOR_ENVS, EpisodeState, TensorBackend, TensorEnv
from kit.envs.vector_env import VectorEnv, env_seeds
from kit.fast.traced import Traced
from kit.steps import SettingError
from kit.steps.errors import whole_number

Named = dict[tuple[str, Any], Tensor]
"""Tensors, keyed by kind and name."""


class TensorCollector(StepsCollector):
    """Steps a PyTorch environment without synchronising with the host.

    A block of steps runs as one traced graph, or as one CUDA graph on a GPU. The graph includes the
    policy, the environment, running normalisation and the writes to the batch. Counts and returns
    stay on the device until they are read. On a CPU, each batch is checked for NaN, infinity and
    invalid actions. On a GPU, returns and actions are checked when episodes are read, because
    checks synchronise with the host.

    Args:
        create_env_fn: :class:`~kit.envs.tensor.TensorEnv`, environment from
            ``make_env(..., vectorization="tensor")``, or function that creates either.
        policy: module that takes and returns a TensorDict; ``None``: random actions.
        reset_at_each_iter: whether each batch starts new episodes in all environments.
        device: must be the environment's device, or ``None``.
        block: number of steps per traced graph. With ``fast_policy="module"``, steps are executed
            one by one.
        **settings: arguments for :class:`~kit.collectors.StepsCollector`, such as
            ``frames_per_batch`` and ``total_frames``. ``seed`` does not seed the environments; use
            :meth:`set_seed`.

    Raises:
        SettingError: if the environment is not written in PyTorch, or a step count cannot be
            reached exactly.
    """

    def __init__(
        self,
        create_env_fn: EnvBase | Callable[[], EnvBase],
        policy: Policy | None = None,
        *,
        reset_at_each_iter: bool = False,
        device: torch.device | str | None = None,
        block: int = 16,
        **settings: Any,
    ) -> None:
        self.env, self._outer = as_tensor_env(create_env_fn)
        self.device = torch.device(self.env.device)
        if device is not None and usable_device(device=device).type != self.device.type:
            devices = [str(self.device)]
            raise SettingError("device", str(device), "is not the environment's device", devices)
        self._ended = FinishedEpisodes(self.env.num_envs, self.device)
        self._env_steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._choices = torch.zeros(2, dtype=torch.int64, device=self.device)  # lowest, highest
        super().__init__(self.env.num_envs, device=self.device, **settings)
        self.policy, self.reset_at_each_iter = policy, reset_at_each_iter
        fast = self._fast_policy != "module"
        self._fast_policy = "exact" if fast else "module"
        self._create_actor()
        self._steps = TensorSteps(
            self.env,
            self._actor,
            self.normalizer or Normalizer([], self.num_envs, observation=False, reward=False),
            block=whole_number("block", block, at_least=1),
            fast=fast,
        )
        self._episode = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._begun = self._outer is not None and self._outer.is_started
        # Restart open episodes, because their first steps are missing from this collector's counts.
        self._left = None if self.env.episode_length.any() else self._writes

    # ------------------------------------------------------------------ batch collection
    def _collect_steps(self, steps: int) -> TensorDictBase:
        env = self.env
        resets = self.reset_at_each_iter and self._iter > 0
        self.continues_episodes = self._left == self._writes and not resets
        if not self.continues_episodes:
            env.reset_tensors()
            self._restart()
        self._steps.prepare()
        learn = self._begin()
        shape = (steps, env.uniform_size, self.num_envs)
        uniform = torch.rand(shape, generator=env.generator, dtype=env.dtype, device=self.device)
        memory = self._steps.memory(steps)
        start = 0
        for runner, count in self._actor.phases(self.policy_steps, steps):
            end = start + count
            while start < end:
                left = range(start, end)
                start += self._steps.run(runner, memory, uniform, left, learn)
            if runner is None:
                self.random_policy_steps += count * self.num_envs
        self._record_choices(memory)
        if self.device.type == "cpu":
            self._check_choices()
            self._check_policy(memory)
            self._check_finite(memory)
        self._count(memory)
        self._left = self._writes
        batch = memory.tensordict(self._trajectories(memory))
        return batch if self.storing_device == self.device else batch.to(self.storing_device)

    @property
    def _writes(self) -> int:
        """Version counter that is incremented whenever the environments are stepped or reset."""
        return int(self.env.episode_length._version)

    # ------------------------------------------------------------------ normalisation
    @property
    def normalizer(self) -> Normalizer | None:
        """Running normaliser of the environment, with its statistics on the device."""
        return None if self._outer is None else self._outer.normalizer

    def deliver_raw(self, raw: bool) -> bool:
        """Set whether batches are raw or normalised. Both are always supported."""
        if raw != self._steps.raw:
            self._steps.raw = raw
            self._steps.clear()
        return True

    def _begin(self) -> bool:
        """Prepare the statistics for a batch, and return whether the batch will update them."""
        if self._outer is None or self.normalizer is None:
            return False
        normalizer = self.normalizer.to(self.device)
        if not self._begun and self._outer.training:
            seen = self.env.observe(self.env.episodes.physics)
            before = normalizer.statistics
            after = normalizer.first_tensors(before, seen)
            for tensor, value in zip(before.tensors(), after.tensors()):
                tensor.copy_(value)
        self._begun = True
        return bool(self._outer.training)

    # ------------------------------------------------------------------ checks and counts
    def _count(self, memory: TensorMemory) -> None:
        frames = memory.steps * self.num_envs
        self.policy_steps += frames
        self._ended.add(memory)
        self._env_steps += memory.step["env_steps"].sum() if memory.repeats else frames

    def _trajectories(self, memory: TensorMemory) -> Tensor:
        """Return each step's episode number, which grows by ``num_envs`` per episode."""
        done = memory.done.long()
        ended = self._episode + done.cumsum(0)
        self._episode = ended[-1]
        return (ended - done) * self.num_envs + torch.arange(self.num_envs, device=self.device)

    def _check_policy(self, memory: TensorMemory) -> None:
        written = {key: value.transpose(0, 1) for key, value in memory.written.items()}
        seen: Tensors = {"observation": memory.step["observation"]}
        taken = self.policy_steps // self.num_envs
        check_policy(written, seen, self._actor.action_keys, taken)

    def _record_choices(self, memory: TensorMemory) -> None:
        """Record the lowest and highest discrete actions, which are checked later."""
        if self.env.num_actions:
            lowest, highest = memory.written[self._actor.action_keys[0]].long().aminmax()
            torch.minimum(self._choices[0], lowest, out=self._choices[0])
            torch.maximum(self._choices[1], highest, out=self._choices[1])

    def _check_choices(self) -> None:
        """Raise an error for invalid discrete actions. Synchronises with the device."""
        for chosen in self._choices.tolist():
            self.env.check_choice(chosen)

    def _check_finite(self, memory: TensorMemory) -> None:
        for field, what in (("reward", "reward"), ("next_observation", "observation")):
            values = memory.step[field]
            if not values.sum().isfinite() and not values.isfinite().all():
                step, *_, env = place = values.isfinite().logical_not().nonzero()[0].tolist()
                name = type(self.env).__name__
                length = int(memory.step["episode_length"][step, env]) - 1
                value = "NaN" if values[tuple(place)].isnan() else "infinity"
                what = f"returned {value} as {what}, {length} policy steps into its episode"
                raise EnvError(name, env, what, self.policy_steps // self.num_envs + step)

    # The counts are on the device. Reading them synchronises with the host.

    @property
    def env_steps(self) -> int:
        """Number of env steps so far."""
        return int(self._env_steps)

    @env_steps.setter
    def env_steps(self, value: int) -> None:
        self._env_steps.fill_(value)

    @property
    def episodes(self) -> int:
        """Number of episodes that have ended so far."""
        return self._ended.count()

    @episodes.setter
    def episodes(self, value: int) -> None:
        assert value == 0 or self._ended.count() == value

    def take_episodes(self) -> list[Episode]:
        """Return the episodes that ended since the last call, but at most the latest 65,536."""
        self._check_choices()
        self._finished += self._ended.take()
        return super().take_episodes()

    # ------------------------------------------------------------------ seed and state
    def _restart(self) -> None:
        self._begun = False
        self._episode += 1
        self._ended.restart()
        self._actor.restart()

    def _seed_environments(self, seed: int) -> None:
        self.env.set_seed(env_seeds(seed, self.num_envs)[0])
        self._left = None

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Release the traced graphs. The collector cannot be used afterwards."""
        del timeout, close_env, raise_on_error
        self.closed = True
        self._steps.clear()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the counters, RNG state and environment state. Synchronises with the device."""
        self._finished += self._ended.take()
        state = super().state_dict()
        state["ended"] = self._ended.state_dict()
        state["continues_episodes"] = self._left == self._writes
        state["episode"] = self._episode.clone()
        state["actor"] = self._actor.state_dict()
        state["env"] = dict(self.env.state_dict())
        state["begun"] = self._begun
        state["normalizer"] = self.normalizer and self.normalizer.state_dict()
        state["raw"] = self._steps.raw
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._ended.load_state_dict(state_dict["ended"])
        super().load_state_dict(state_dict)
        self._episode = state_dict["episode"].to(self.device).clone()
        self._actor.load_state_dict(state_dict["actor"])
        self.env.load_state_dict(state_dict["env"])
        self._left = self._writes if state_dict.get("continues_episodes", True) else None
        self._begun = bool(state_dict["begun"])
        if self.normalizer is not None:
            self.normalizer.load_state_dict(state_dict["normalizer"])
        self.deliver_raw(bool(state_dict.get("raw", False)))


def as_tensor_env(create_env_fn: Any) -> tuple[TensorEnv, VectorEnv | None]:
    """Return the torch environment and its ``VectorEnv``, creating them if necessary."""
    env = create_env_fn if isinstance(create_env_fn, EnvBase) else create_env_fn()
    outer = None
    if isinstance(env, VectorEnv) and isinstance(env.backend, TensorBackend):
        outer, env = env, env.backend.env
    if not isinstance(env, TensorEnv):
        reason = f"needs an environment written in torch, not {type(env).__name__}"
        hint = f"Use make_env(..., vectorization='tensor') with one of: {', '.join(TENSOR_ENVS)}"
        raise SettingError("collector", "tensor", reason, hint)
    return env, outer


class TensorSteps:
    """Runs policy and environment steps on the device, and writes them to a batch's memory.

    If ``fast``, every ``block`` steps run as one traced graph.
    """

    raw = False
    """Whether observations and rewards are written to batches without normalisation."""

    def __init__(
        self,
        env: TensorEnv,
        actor: ActionSelector,
        normalizer: Normalizer,
        *,
        block: int,
        fast: bool,
    ) -> None:
        self.env, self.actor, self.normalizer = env, actor, normalizer
        self.block, self.fast = block, fast
        self._written: dict[Key, Tensor] = {}
        self._blocks: dict[Any, Traced] = {}

    def prepare(self) -> None:
        """Discard traced graphs whose policy has changed. Called once per batch."""
        runners = [r for r in (self.actor.runner, self.actor.explorer) if r is not None]
        before = [runner.replays for runner in runners]
        self.actor.prepare()
        kept = all(runner.replays for runner, was in zip(runners, before) if was)
        if any(block.refresh() for block in self._blocks.values()) or not kept:
            self._blocks.clear()

    def memory(self, steps: int) -> TensorMemory:
        """Allocate memory for a batch of ``steps`` time steps."""
        observation = self.env.observe(self.env.episodes.physics)
        runner = self.actor.runner
        if not self._written and runner is None:
            drawn = self.env.full_action_spec.zero()
            self._written = {key: drawn.get(key) for key in self.actor.action_keys}
        elif not self._written and runner is not None:
            values = runner.peek(_policy_input(observation, self.env.episodes))
            self._written = dict(zip(runner.out_keys, values))
        return TensorMemory(steps, observation, self._written, self.env.action_repeat > 1)

    def run(
        self,
        runner: PolicyRunner | None,
        memory: TensorMemory,
        uniform: Tensor,
        steps: range,
        learn: bool,
    ) -> int:
        """Execute the next block of steps and return the number of executed steps.

        Args:
            runner: executes the policy; ``None``: random actions.
            memory: memory for the batch.
            uniform: random numbers for the batch, ``[steps, uniform_size, num_envs]``.
            steps: remaining steps of the batch.
            learn: whether running statistics are updated.
        """
        fast = self.fast and (runner is None or runner.replays)
        start, count = steps.start, min(self.block, len(steps)) if fast else 1
        hidden = dict(runner.hidden) if runner is not None and fast else {}
        part = slice(start, start + count)
        inputs: Named = {
            **_named("episodes", self.env.episodes._asdict()),
            **_named("statistics", dict(enumerate(self.normalizer.statistics.tensors()))),
            **_named("random", {"uniform": uniform[part]}),
            **_named("hidden", hidden),
            **_named("step", {name: tensor[part] for name, tensor in memory.step.items()}),
            **_named("outputs", {key: tensor[part] for key, tensor in memory.written.items()}),
        }
        function = self._function(runner, count, fast, learn)
        key = id(runner), count, learn
        if fast and key not in self._blocks:
            # An empty name disables the warning that random actions cannot always be traced.
            name = "a block of environment steps" if runner is not None else ""
            self._blocks[key] = Traced(function, self.env, self.normalizer, name=name)
        outputs = self._blocks[key](inputs) if fast else function(inputs)
        for (kind, name), value in outputs.items():
            if kind != "hidden":
                inputs[kind, name].copy_(value)
        if runner is not None and fast:
            runner.hidden = _of("hidden", outputs)
        return count

    def _function(
        self, runner: PolicyRunner | None, count: int, fast: bool, learn: bool
    ) -> Callable[[Named], Mapping[Any, Tensor]]:
        """Return a function that executes ``count`` policy and environment steps.

        The function maps named tensors to the new environment state, statistics and hidden state.
        """
        env, actor, normalizer = self.env, self.actor, self.normalizer
        initial, raw = normalizer.statistics, self.raw

        def steps(inputs: Named) -> Named:
            now = EpisodeState(**_of("episodes", inputs))
            statistics = initial.replaced(_of("statistics", inputs).values())
            hidden, uniform = _of("hidden", inputs), inputs["random", "uniform"]
            if runner is not None and fast:
                runner.hidden = dict(hidden)
            results: list[dict[str, Tensor]] = []
            for time_step in range(count):
                raw_observation = env.observe(now.physics)
                observation = normalizer.apply(statistics, raw_observation)
                seen = _policy_input(observation, now)
                if runner is None:
                    drawn = env.full_action_spec.rand()
                    outputs = {key: drawn.get(key) for key in actor.action_keys}
                else:
                    written = runner.call_module(seen) if fast else runner(seen)
                    outputs = dict(zip(runner.out_keys, written))
                now, step = env.advance(now, outputs[actor.action_keys[0]], uniform[time_step])
                statistics, step = normalizer.step_tensors(statistics, step, learn, raw)
                if runner is not None and runner.is_recurrent:
                    runner.end_episodes(step.terminated | step.truncated)
                outputs.setdefault(IS_INIT, seen[IS_INIT])
                acted_on = raw_observation if raw else observation
                results.append({**step._asdict(), "observation": acted_on})
                for key, place in _of("outputs", inputs).items():
                    if key in outputs:  # the exploration policy may lack some of these outputs
                        place[time_step].copy_(outputs[key])  # the next step may reuse its memory
            for name, place in _of("step", inputs).items():
                torch.stack([result[name].transpose(0, -1) for result in results], out=place)
            later = {} if runner is None else {key: runner.hidden[key] for key in hidden}
            return {
                **_named("episodes", now._asdict()),
                **_named("statistics", dict(enumerate(statistics.tensors()))),
                **_named("hidden", later),
            }

        return steps

    def clear(self) -> None:
        """Release the traced graphs."""
        self._blocks.clear()


def _named(kind: str, tensors: Mapping[Any, Tensor]) -> Named:
    return {(kind, name): tensor for name, tensor in tensors.items()}


def _of(kind: str, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    return {name: tensor for (of, name), tensor in tensors.items() if of == kind}


def _policy_input(observation: Tensor, episodes: EpisodeState) -> Tensors:
    starts = (episodes.episode_length == 0).unsqueeze(-1)
    return {"observation": observation, IS_INIT: starts}


class TensorMemory:
    """Tensors for one batch on the environment's device, with time as the first dimension.

    As in torch environments, observations have shape ``[steps, observation_size, num_envs]``. The
    batch is a view with the usual order of dimensions.

    Args:
        steps: number of time steps.
        observation: observation of all environments, ``[num_envs, observation_size]``.
        written: dict with an example of each policy output.
        repeats: whether a policy step may take several env steps.

    Attributes:
        step: fields of :class:`~kit.envs.tensor.TensorStep`, and the ``observation`` that the
            policy acted on.
        written: dict of policy outputs ``[steps, num_envs, ...]``.
    """

    def __init__(
        self, steps: int, observation: Tensor, written: dict[Key, Tensor], repeats: bool
    ) -> None:
        num_envs, size = observation.shape
        self.steps, self.num_envs, self.repeats = steps, num_envs, repeats

        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((steps, *shape, num_envs), dtype=dtype, device=observation.device)

        kind, flag, count = observation.dtype, torch.bool, torch.int64
        self.step = {
            "observation": make(kind, size),
            "next_observation": make(kind, size),
            "reward": make(kind),
            "terminated": make(flag),
            "truncated": make(flag),
            "episode_return": make(kind),
            "episode_length": make(count),
        }
        if repeats:
            self.step["env_steps"] = make(count)
        self.written = {
            key: torch.zeros((steps, *value.shape), dtype=value.dtype, device=value.device)
            for key, value in written.items()
        }

    @property
    def done(self) -> Tensor:
        """Whether each step ended an episode, ``[steps, num_envs]``."""
        return self.step["terminated"] | self.step["truncated"]

    def tensordict(self, trajectories: Tensor) -> TensorDictBase:
        """Return the batch ``[num_envs, steps]``. ``trajectories`` are its episode numbers."""
        shape = [self.num_envs, self.steps]
        batch = TensorDict({"next": TensorDict({}, shape)}, shape)
        batch["observation"] = self.step["observation"].permute(2, 0, 1)
        batch["next", "observation"] = self.step["next_observation"].permute(2, 0, 1)
        for key, value in self.written.items():
            batch[key] = value.transpose(0, 1)
        batch["collector", "traj_ids"] = trajectories.T
        for name in ("reward", "terminated", "truncated"):
            batch["next", name] = self.step[name].T.unsqueeze(-1)
        batch["next", "done"] = batch["next", "terminated"] | batch["next", "truncated"]
        return batch


class FinishedEpisodes:
    """Ring buffer on the device for the last ``capacity`` finished episodes."""

    def __init__(self, num_envs: int, device: torch.device, capacity: int = 2**16) -> None:
        self.num_envs, self.capacity = num_envs, capacity
        self._ended = torch.zeros((), dtype=torch.int64, device=device)
        self._taken = 0
        # One row per field of Episode. Steps that end no episode are written to the extra column.
        self._columns = torch.zeros(5, capacity + 1, dtype=torch.float64, device=device)
        self._open_env_steps = torch.zeros(num_envs, dtype=torch.int64, device=device)

    def add(self, memory: TensorMemory) -> None:
        """Add the episodes that finished in a batch."""
        done, length = memory.done, memory.step["episode_length"]
        made = self._env_steps(done, memory.step["env_steps"]) if memory.repeats else length
        envs = torch.arange(self.num_envs, device=done.device).expand_as(length)
        columns = (envs, memory.step["episode_return"], length, made, memory.step["terminated"])
        at_once = max(self.capacity // self.num_envs, 1)
        for start in range(0, len(done), at_once):
            part = slice(start, start + at_once)
            flat = done[part].reshape(-1)
            places = (self._ended + flat.cumsum(0) - 1) % self.capacity
            places = torch.where(flat, places, self.capacity)
            values = torch.stack([column[part].reshape(-1).double() for column in columns])
            self._columns.scatter_(1, places.expand_as(values), values)
            self._ended += flat.sum()

    def _env_steps(self, done: Tensor, env_steps: Tensor) -> Tensor:
        """Return the episode's env steps so far at each time step, ``[steps, num_envs]``."""
        made = env_steps.long().cumsum(0)
        at_ends = (made * done).cummax(0).values
        before = torch.cat([torch.zeros_like(made[:1]), at_ends[:-1]])
        since = made - before + self._open_env_steps * (before == 0)
        self._open_env_steps = torch.where(done[-1], torch.zeros_like(since[-1]), since[-1])
        return since

    def count(self) -> int:
        """Return the total number of finished episodes. Synchronises with the device."""
        return int(self._ended)

    def take(self) -> list[Episode]:
        """Return the episodes that ended since the last call. Synchronises with the device."""
        ended = self.count()
        first = max(self._taken, ended - self.capacity)
        self._taken = ended
        places = torch.arange(first, ended, device=self._columns.device) % self.capacity
        return [
            Episode(int(env), value, int(length), int(made), bool(terminated))
            for env, value, length, made, terminated in self._columns[:, places].T.tolist()
        ]

    def restart(self) -> None:
        """Reset the open episodes' step counts. Called when all environments start new episodes."""
        self._open_env_steps = torch.zeros_like(self._open_env_steps)

    def state_dict(self) -> dict[str, Tensor | int]:
        """Return the counts. The collector saves the episodes that were not returned yet."""
        return {"ended": self.count(), "open_env_steps": self._open_env_steps.cpu().clone()}

    def load_state_dict(self, state_dict: dict[str, Tensor | int]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._taken = int(state_dict["ended"])
        self._ended.fill_(self._taken)
        self._open_env_steps.copy_(torch.as_tensor(state_dict["open_env_steps"]))
