"""Base classes for collectors, with step counts, RNG state, weight updates and policy checks."""

from __future__ import annotations

import abc
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import BaseCollector
from torchrl.envs.utils import ExplorationType

from kit.collectors.actor import ActionSelector
from kit.collectors.policy import FastPolicy, Policy, PolicyPath, fast_policy_of
from kit.config.devices import usable_device
from kit.envs.episodes import Episode
from kit.envs.normalize import Normalizer
from kit.envs.spaces import Key
from kit.steps import SettingError
from kit.steps.errors import whole_number


class KitCollector(BaseCollector):  # type: ignore[misc, unused-ignore]
    """Base class for collectors with exact step counts.

    A collector is an iterable of batches with TorchRL's keys. The iteration ends after
    ``total_frames`` policy steps.

    Args:
        num_envs: number of environments.
        total_frames: total number of policy steps; -1: no limit.
        init_random_frames: number of initial policy steps with random actions; ``None``: the number
            in the trainer's plan, or 0 without a trainer.
        exploration_frames: number of policy steps, including random ones, after which ``policy``
            replaces ``exploration_policy``.
        exploration_policy: policy that acts instead of ``policy`` until ``exploration_frames``.
        exploration_type: TorchRL's exploration type, which determines whether actions are sampled.
        fast_policy: how the policy is executed. ``"auto"``: NumPy computes the actions of small
            networks (rounding may differ), and other policies are traced. Small GPU policies
            are copied to the host once per batch. ``"exact"``: the policy is traced, with outputs
            bitwise equal to the module's. ``"module"``: the TensorDict module is called.
        seed: seed for random actions and the policy's sampling.
        device: device of the policy and the batches; ``None``: CPU.
        policy_device: device of the policy, if different from ``device``.
        storing_device: device of batches, if different from ``device``.
        pre_collect_hook: called without arguments before each batch is collected.
        post_collect_hook: called with each batch before it is returned; may change the batch.

    Attributes:
        policy_steps: number of policy steps so far.
        random_policy_steps: number of policy steps with random actions so far.
        env_steps: number of env steps so far, as reported by the environments.
        episodes: number of finished episodes so far.
        environment_errors: number of environment failures that the run has recovered from.
        exact_resume: whether the last :meth:`load_state_dict` restored the complete state.
        exact_policy: whether the policy's outputs are bitwise equal to the TensorDict module's.
        collects_on_host: whether batches are collected on the host and then moved to
            ``storing_device``.
        steps_elsewhere: whether the environments are stepped in other processes, so that ``env``
            is not stepped.
        continues_episodes: whether the last batch continued the episodes of the previous batch.
            False if other code stepped, reset or seeded the environments in between.
    """

    reset_at_each_iter: bool = False
    policy_steps: int
    random_policy_steps: int
    env_steps: int
    episodes: int
    environment_errors: int
    env: Any = None
    _actor: ActionSelector
    policy: Any = None
    frames_per_batch = requested_frames_per_batch = -1
    prefill_frames = 0
    exact_resume = True
    exact_policy = True
    continues_episodes = True
    follows_plan = False
    collects_on_host = False
    steps_elsewhere = False

    def __init__(
        self,
        num_envs: int,
        *,
        total_frames: int = -1,
        init_random_frames: int | None = None,
        exploration_frames: int = 0,
        exploration_policy: Policy | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        fast_policy: FastPolicy | bool = "auto",
        seed: int = 0,
        device: torch.device | str | None = None,
        policy_device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Callable[[TensorDictBase], None] | None = None,
    ) -> None:
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook)
        self.num_envs = num_envs
        self.total_frames = -1 if total_frames is None or total_frames < 0 else total_frames
        self.follows_plan = init_random_frames is None
        self.init_random_frames = whole_number("init_random_frames", init_random_frames or 0)
        self.exploration_frames = whole_number("exploration_frames", exploration_frames)
        self.exploration_policy, self._exploration_type = exploration_policy, exploration_type
        self._fast_policy = fast_policy_of(fast_policy)
        self.policy_device = usable_device(policy_device=policy_device, device=device)
        self.storing_device = usable_device(storing_device=storing_device, device=device)
        for name in self._COUNTERS:
            setattr(self, name, 0)
        self._finished: list[Episode] = []
        self._iter = -1
        self.closed = False
        self._random_numbers = RNGStream(seed, self.policy_device)

    def _create_actor(self) -> None:
        """Create the action selector for ``env`` and the policies."""
        self.exact_policy = self._fast_policy != "auto"
        self._actor = ActionSelector(
            self.env,
            self.policy,
            self.exploration_policy,
            init_random_frames=self.init_random_frames,
            exploration_frames=self.exploration_frames,
            exploration_type=self._exploration_type,
            device=self.policy_device,
            storing_device=self.storing_device,
            fast_policy=self._fast_policy,
        )

    def act_at_random(self, policy_steps: int) -> None:
        """Set ``init_random_frames`` unless the user set it or another process selects actions."""
        if self.follows_plan and (actor := vars(self).get("_actor")) is not None:
            self.init_random_frames = policy_steps
            actor.act_at_random(policy_steps)

    # ------------------------------------------------------------------ TorchRL's interface
    @property
    def _frames(self) -> int:
        """Number of policy steps so far, under the attribute name that TorchRL reads."""
        return self.policy_steps

    def __len__(self) -> int:
        """Return the number of batches.

        Raises:
            TypeError: if the number of batches is unknown or unlimited.
        """
        size = self.requested_frames_per_batch
        if size <= 0 or self.total_frames < 0:
            raise TypeError(f"the number of batches of {self!r} is unknown or unlimited")
        return (self.total_frames - self.prefill_frames) // size + bool(self.prefill_frames)

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches until ``total_frames`` is reached."""
        while self.total_frames < 0 or self.policy_steps < self.total_frames:
            yield self.collect()

    def collect(self) -> TensorDictBase:
        """Collect and return one batch.

        Raises:
            EnvError: if an environment fails and is not restarted.
        """
        if self.closed:
            raise RuntimeError("this collector was shut down; create a new one")
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        self._iter += 1
        with self._prepared():
            batch = self._collect()
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch

    def _prepared(self) -> AbstractContextManager[Any]:
        """Prepare the next batch and return the context manager for collecting it."""
        return self._random_numbers

    @abc.abstractmethod
    def _collect(self) -> TensorDictBase:
        """Take the policy steps for one batch, count them and return the batch."""

    @property
    def policy_path(self) -> PolicyPath:
        """How this process executes the policy, and why it cannot use a faster method."""
        return self._actor.path

    @property
    def normalizer(self) -> Normalizer | None:
        """The environments' running normaliser, or ``None``."""
        return getattr(self.env, "normalizer", None)

    def deliver_raw(self, raw: bool) -> bool:
        """Set whether batches contain raw or normalised observations and rewards.

        The policy always acts on normalised observations.

        Args:
            raw: whether batches contain raw values, as a replay buffer needs, or values that are
                normalised at each step.

        Returns:
            Whether the collector supports this choice. By default, raw batches are supported only
            if the environments are not normalised.
        """
        return not raw or self.normalizer is None

    def take_episodes(self) -> list[Episode]:
        """Return the episodes that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def metrics(self) -> dict[str, float]:
        """Return additional metrics to log. By default, there are none."""
        return {}

    def update_policy_weights_(self, policy_or_weights: Any = None, **kwargs: Any) -> None:
        """Copy weights into the policy. Without arguments, do nothing, because weights are shared.

        Args:
            policy_or_weights: a module, its ``state_dict``, or a TensorDict of its parameters.
            **kwargs: ``weights``, ``policy`` or ``weights_dict``, as in TorchRL.

        Raises:
            SettingError: if the weights do not match the policy.
        """
        named = kwargs.get("weights_dict") or kwargs
        for source in (policy_or_weights, named.get("policy"), named.get("weights")):
            if source is not None:
                copy_weights(source, self.policy)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed random actions, the policy's sampling and the environments.

        Returns:
            Seed for the next component; equal to ``seed`` if ``static_seed`` is true.
        """
        self._random_numbers.seed(seed)
        self._seed_environments(seed)
        return seed if static_seed else seed + 1

    @abc.abstractmethod
    def _seed_environments(self, seed: int) -> None:
        """Seed the environments. They are reset before the next batch."""

    # ------------------------------------------------------------------ shutdown and state
    def begin_again(self, seed: int, random_steps: int) -> None:
        """Start again with counts of 0, new episodes, and open environments.

        Args:
            seed: seed for random actions, the policy's sampling and the environments.
            random_steps: number of policy steps with random actions at the start.

        Raises:
            SettingError: if the environments cannot be created a second time.
        """
        if self.closed:
            self.env.reopen()
            self.closed = False
        self.take_episodes()
        for name in self._COUNTERS:
            setattr(self, name, 0)
        self._iter, self.env.backend.faults = -1, 0
        self.init_random_frames = random_steps
        self._actor.act_at_random(random_steps)
        self.set_seed(seed)

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Close the environments. The collector cannot be used afterwards."""
        del timeout
        if self.closed:
            return
        self.closed = True
        self._release()
        if close_env and self.env is not None:
            with contextlib.nullcontext() if raise_on_error else contextlib.suppress(Exception):
                self.env.close(raise_if_closed=False)

    def _release(self) -> None:
        """Release resources other than the environments. By default, there are none."""

    _COUNTERS = (
        "policy_steps",
        "random_policy_steps",
        "env_steps",
        "episodes",
        "environment_errors",
    )

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the counters and RNG state. Subclasses add the state of the environments."""
        state = OrderedDict((name, getattr(self, name)) for name in self._COUNTERS)
        state["batches"] = self._iter + 1
        state["random_numbers"] = self._random_numbers.state_dict()
        state["finished"] = [list(episode) for episode in self._finished]
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        for name in self._COUNTERS:
            setattr(self, name, int(state_dict[name]))
        self._iter = int(state_dict["batches"]) - 1
        self._random_numbers.load_state_dict(state_dict["random_numbers"])
        self._finished = [Episode(*episode) for episode in state_dict["finished"]]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_envs={self.num_envs}, total_frames={self.total_frames})"


class StepsCollector(KitCollector):
    """Base class for collectors that return batches ``[num_envs, steps_per_env]``.

    Args:
        num_envs: number of environments.
        frames_per_batch: number of policy steps per batch, ``num_envs * steps_per_env``.
        steps_per_env: number of policy steps per environment in each batch; alternative to
            ``frames_per_batch``.
        prefill_frames: number of policy steps in a separate first batch; 0: no such batch.
        **settings: arguments for :class:`KitCollector`. ``init_random_frames``,
            ``exploration_frames`` and ``prefill_frames`` must be multiples of ``num_envs``.

    Raises:
        SettingError: if a step count cannot be reached exactly. The error lists the nearest
            valid values.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        frames_per_batch: int | None = None,
        steps_per_env: int | None = None,
        prefill_frames: int = 0,
        **settings: Any,
    ) -> None:
        self.steps_per_env = _steps_per_env(num_envs, frames_per_batch, steps_per_env)
        self.frames_per_batch = self.requested_frames_per_batch = num_envs * self.steps_per_env
        self.prefill_frames = whole_number("prefill_frames", prefill_frames)
        super().__init__(num_envs, **settings)
        for field in ("init_random_frames", "exploration_frames", "prefill_frames"):
            check_multiple(field, getattr(self, field), num_envs)
        if self.total_frames >= 0:
            check_total(self.total_frames, self.prefill_frames, self.frames_per_batch)

    @property
    def is_prefill(self) -> bool:
        """Whether the next batch is the prefill batch."""
        return self.policy_steps < self.prefill_frames

    def _collect(self) -> TensorDictBase:
        prefill = self.is_prefill
        return self._collect_steps(
            self.prefill_frames // self.num_envs if prefill else self.steps_per_env
        )

    @abc.abstractmethod
    def _collect_steps(self, steps: int) -> TensorDictBase:
        """Take ``steps`` policy steps in each environment, count them and return the batch."""


class RNGStream:
    """A collector's RNG state, kept separate from PyTorch's global RNG state.

    Inside ``with stream:``, PyTorch uses the stream's RNG state and computes no gradients.

    Args:
        seed: seed from which :func:`policy_seed` derives the stream's seed.
        device: device of the policy; a GPU has a separate RNG state.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self._no_grad = torch.no_grad()
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Reset the stream to a new seed."""
        seed = policy_seed(seed)
        self._state = torch.Generator().manual_seed(seed).get_state()
        self._on_device: Tensor | None = None
        if self.device.type == "cuda":
            self._on_device = torch.Generator(self.device).manual_seed(seed).get_state()

    def __enter__(self) -> None:
        """Install the stream's RNG state and disable gradients."""
        self._no_grad.__enter__()
        self._outside = torch.get_rng_state()
        torch.set_rng_state(self._state)
        if self._on_device is not None:
            self._outside_device = torch.cuda.get_rng_state(self.device)
            torch.cuda.set_rng_state(self._on_device, self.device)

    def __exit__(self, *error: object) -> None:
        """Save the stream's RNG state and restore the previous state."""
        self._state = torch.get_rng_state()
        torch.set_rng_state(self._outside)
        if self._on_device is not None:
            self._on_device = torch.cuda.get_rng_state(self.device)
            torch.cuda.set_rng_state(self._outside_device, self.device)
        self._no_grad.__exit__(*error)

    def state_dict(self) -> dict[str, Any]:
        """Return the RNG state."""
        on_device = None if self._on_device is None else self._on_device.clone()
        return {"state": self._state.clone(), "on_device": on_device}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._state = state_dict["state"].clone()
        if self._on_device is not None and state_dict["on_device"] is not None:
            self._on_device = state_dict["on_device"].clone()


def policy_seed(seed: int) -> int:
    """Derive the seed for a policy's RNG from a run's seed.

    The result differs from the run's seed, which is used to initialise weights, and from the
    environment seeds returned by :func:`~kit.envs.vector_env.env_seeds`.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(0,))
    return int(sequence.generate_state(1, np.uint32)[0])


def _steps_per_env(num_envs: int, frames: int | None, steps: int | None) -> int:
    if frames is None:
        return whole_number("steps_per_env", 1 if steps is None else steps, at_least=1)
    frames = whole_number("frames_per_batch", frames, at_least=1)
    check_multiple("frames_per_batch", frames, num_envs)
    if steps is not None and steps * num_envs != frames:
        reason = f"conflicts with frames_per_batch={frames} and num_envs={num_envs}"
        raise SettingError("steps_per_env", steps, reason, [frames // num_envs])
    return frames // num_envs


def check_multiple(field: str, value: int, of: int) -> None:
    """Raise SettingError if ``value`` is not a multiple of the number of environments."""
    if value % of:
        down = value // of * of
        reason = f"must be a multiple of num_envs={of}, because all environments step together"
        raise SettingError(field, value, reason, [n for n in (down, down + of) if n])


def check_total(total_frames: int, prefill_frames: int, frames_per_batch: int) -> None:
    """Raise SettingError if the total is not a whole number of batches after the prefill."""
    total = whole_number("total_frames", total_frames)
    batches, left = divmod(total - prefill_frames, frames_per_batch)
    if left or batches < 0:
        near = prefill_frames + max(batches, 0) * frames_per_batch
        reason = f"cannot be split into whole batches of {frames_per_batch} policy steps"
        reason += f" after {prefill_frames} prefill steps" if prefill_frames else ""
        nearest = [n for n in (near, near + frames_per_batch) if n]
        raise SettingError("total_frames", total, reason, nearest)


def copy_weights(source: Any, policy: Any) -> None:
    """Copy parameters and buffers into a policy in place.

    Args:
        source: a module, its ``state_dict``, or a TensorDict of its parameters.
        policy: module with the same parameter and buffer names and shapes.

    Raises:
        SettingError: if names or shapes differ.
    """
    target = TensorDict.from_module(policy).data.flatten_keys(".")
    weights = TensorDict.from_module(source) if isinstance(source, nn.Module) else source
    weights = weights.flatten_keys(".") if isinstance(weights, TensorDictBase) else dict(weights)
    expected = {name: tuple(tensor.shape) for name, tensor in target.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    different = sorted(n for n in {*expected, *shapes} if expected.get(n) != shapes.get(n))
    if different:
        name = different[0]
        reason = f"has shape {shapes.get(name)}, but {expected.get(name)} in the policy to update"
        hint = "Pass the weights of a policy with the same architecture"
        raise SettingError("weights", name, reason, hint)
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(weights[name])


class PolicyError(RuntimeError):
    """Raised when an output of a policy is NaN.

    Args:
        key: key of the output.
        env: index of the environment.
        policy_step: number of policy steps taken in this environment so far.
        worker: index of the worker process; ``None``: the policy acted in this process.
    """

    def __init__(self, key: Key, env: int, policy_step: int, worker: int | None = None) -> None:
        self.key, self.env, self.policy_step, self.worker = key, env, policy_step, worker
        name = key if isinstance(key, str) else ".".join(key)
        where = "" if worker is None else f", worker {worker}"
        super().__init__(
            f"policy, env {env}{where}, after {policy_step} policy steps: its output {name} is "
            "NaN, although the observation contains no NaN. Resume an earlier checkpoint with a "
            "smaller learning_rate."
        )

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.key, self.env, self.policy_step, self.worker)


def check_policy(
    outputs: Mapping[Key, Tensor],
    observation: Mapping[Key, Any],
    actions: Sequence[Key],
    taken: int,
) -> None:
    """Raise an error if actions or log-probabilities that are stored on the host contain NaN.

    Args:
        outputs: policy outputs ``[num_envs, steps, ...]``.
        observation: observations that the policy acted on, tensors or arrays ``[steps, ...]``.
        actions: keys of the actions.
        taken: number of policy steps in each environment before this batch.

    Raises:
        PolicyError: for the first NaN, unless an observation up to that step is not finite.
    """
    for key, value in outputs.items():
        name = key if isinstance(key, str) else key[-1]
        if key not in actions and not name.endswith("log_prob"):
            continue
        if value.is_cuda or not value.is_floating_point():
            continue
        if value.dtype is torch.bfloat16:  # not supported by NumPy
            value = value.float()
        total = value.numpy().sum()  # NaN if any entry is NaN; NumPy is twice as fast as PyTorch
        if total == total:
            continue
        steps = value.isnan().reshape(*value.shape[:2], -1).any(-1).T  # [steps, num_envs]
        if not steps.any():  # infinities of opposite sign also sum to NaN
            continue
        step, env = steps.nonzero()[0].tolist()
        # A recurrent policy keeps returning NaN after a single non-finite observation.
        if all(np.isfinite(np.asarray(seen[: step + 1])).all() for seen in observation.values()):
            raise PolicyError(key, env, taken + step)
