"""What all collectors of the kit share: counting, totals, random numbers, reports."""

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
    """A collector whose every count is exact.

    An iterable of batches with TorchRL's keys. It ends after ``total_frames`` policy steps.

    Args:
        num_envs: environments.
        total_frames: policy steps in all; -1 never ends.
        init_random_frames: policy steps with random actions at the beginning; ``None``: as many
            as the plan of a trainer says, or none without a trainer.
        exploration_frames: policy steps, counted from the beginning, until which
            ``exploration_policy`` acts in place of the policy.
        exploration_policy: acts in place of the policy at the beginning.
        exploration_type: whether actions are sampled.
        fast_policy: how the policy is called. ``"auto"``: NumPy computes the actions of a small
            network, which rounds differently (on a GPU, with weights copied to the host once per
            batch); other policies run as recorded tensor operations. ``"exact"``: recorded tensor
            operations, bitwise those of the module. ``"module"``: the TensorDict module.
        seed: of the random numbers that policy and random actions use in this collector.
        device: where batches are delivered and the policy runs; ``None``: the CPU.
        policy_device: where the policy runs, if not on ``device``.
        storing_device: where batches are delivered, if not on ``device``.
        pre_collect_hook: called without arguments before each batch is collected.
        post_collect_hook: called with each batch before it is returned; it may change the batch.

    Attributes:
        policy_steps: taken so far.
        random_policy_steps: those of them with random actions.
        env_steps: made so far, as the environments report them.
        episodes: that have ended so far.
        environment_errors: faults of environments recovered from so far.
        exact_resume: whether the last :meth:`load_state_dict` put everything back where it was.
        exact_policy: whether the policy's results are bitwise those of the policy as a module.
        collects_on_host: whether batches are on the host first, and ``storing_device`` says where
            they are delivered.
        continues_episodes: whether the last batch goes on with the episodes of the one before. It does not
            where environments were seeded or reset in between, or stepped by others.
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

    def _let_act(self) -> None:
        """Create the actor, which acts in ``env`` with the policies."""
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
        """Set the number of random policy steps, if none was given and this process acts."""
        if self.follows_plan and (actor := vars(self).get("_actor")) is not None:
            self.init_random_frames = policy_steps
            actor.act_at_random(policy_steps)

    # ------------------------------------------------------------------ TorchRL's names
    @property
    def _frames(self) -> int:
        """Policy steps so far, under the name that TorchRL uses."""
        return self.policy_steps

    def __len__(self) -> int:
        """Return the number of batches.

        Raises:
            TypeError: if it is not known, or there is no end.
        """
        size = self.requested_frames_per_batch
        if size <= 0 or self.total_frames < 0:
            raise TypeError(f"{self!r} has no known number of batches")
        return (self.total_frames - self.prefill_frames) // size + bool(self.prefill_frames)

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches until ``total_frames`` is reached."""
        while self.total_frames < 0 or self.policy_steps < self.total_frames:
            yield self.collect()

    def collect(self) -> TensorDictBase:
        """Collect one batch and return it.

        Raises:
            EnvError: if an environment fails and is not to be restarted.
        """
        if self.closed:
            raise RuntimeError("this collector was shut down; make a new one")
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        self._iter += 1
        with self._prepared():
            batch = self._collect()
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch

    def _prepared(self) -> AbstractContextManager[Any]:
        """Prepare a batch and return the context in which it is collected."""
        return self._random_numbers

    @abc.abstractmethod
    def _collect(self) -> TensorDictBase:
        """Take policy steps, count them and return the batch."""

    @property
    def policy_path(self) -> PolicyPath:
        """How the policy is called, and why not faster; of one that is called in this process."""
        return self._actor.path

    @property
    def normalizer(self) -> Normalizer | None:
        """Running normalisation of the environments, if there is any."""
        return getattr(self.env, "normalizer", None)

    def deliver_raw(self, raw: bool) -> bool:
        """Deliver observations and rewards as the environments give them, for a replay buffer.

        The policy acts on normalised observations either way.

        Args:
            raw: otherwise batches are normalised, by the statistics at each step.

        Returns:
            Whether the collector can. By default, one whose environments are normalised cannot.
        """
        return not raw or self.normalizer is None

    def take_episodes(self) -> list[Episode]:
        """Return the episodes that ended since the last call, and forget them."""
        finished, self._finished = self._finished, []
        return finished

    def metrics(self) -> dict[str, float]:
        """Return further columns of the log; nothing by default."""
        return {}

    def update_policy_weights_(self, policy_or_weights: Any = None, **kwargs: Any) -> None:
        """Copy weights into the policy; without any, do nothing: it shares the learner's.

        Args:
            policy_or_weights: a module, its ``state_dict``, or a TensorDict of its parameters.
            **kwargs: ``weights``, ``policy`` or ``weights_dict``, as in TorchRL.

        Raises:
            SettingError: if they are not weights of this policy.
        """
        named = kwargs.get("weights_dict") or kwargs
        for given in (policy_or_weights, named.get("policy"), named.get("weights")):
            if given is not None:
                copy_weights(given, self.policy)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed random actions, the policy's sampling and the environments.

        Returns:
            A seed for the next component; the same one if ``static_seed``.
        """
        self._random_numbers.seed(seed)
        self._seed_environments(seed)
        return seed if static_seed else seed + 1

    @abc.abstractmethod
    def _seed_environments(self, seed: int) -> None:
        """Seed the environments; they are reset before the next batch."""

    # ------------------------------------------------------------------ in and out
    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Close the environments; the collector cannot be used afterwards."""
        del timeout
        if self.closed:
            return
        self.closed = True
        self._release()
        if close_env and self.env is not None:
            with contextlib.nullcontext() if raise_on_error else contextlib.suppress(Exception):
                self.env.close(raise_if_closed=False)

    def _release(self) -> None:
        """Release what the collector has besides its environments; nothing by default."""

    _COUNTERS = (
        "policy_steps",
        "random_policy_steps",
        "env_steps",
        "episodes",
        "environment_errors",
    )

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return counters and random numbers; subclasses add the environments."""
        state = OrderedDict((name, getattr(self, name)) for name in self._COUNTERS)
        state["batches"] = self._iter + 1
        state["random_numbers"] = self._random_numbers.state_dict()
        state["finished"] = [list(episode) for episode in self._finished]
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name in self._COUNTERS:
            setattr(self, name, int(state_dict[name]))
        self._iter = int(state_dict["batches"]) - 1
        self._random_numbers.load_state_dict(state_dict["random_numbers"])
        self._finished = [Episode(*episode) for episode in state_dict["finished"]]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_envs={self.num_envs}, total_frames={self.total_frames})"


class StepsCollector(KitCollector):
    """A collector of batches ``[num_envs, steps_per_env]``, time last.

    Args:
        num_envs: environments.
        frames_per_batch: policy steps of one batch: ``num_envs * steps_per_env``.
        steps_per_env: policy steps each env takes for one batch. One of the two is enough.
        prefill_frames: policy steps of a first batch of its own, before the others; 0 for none.
        **settings: of :class:`KitCollector`. ``init_random_frames``, ``exploration_frames`` and
            ``prefill_frames`` are multiples of ``num_envs``.

    Raises:
        SettingError: if the counts cannot be reached exactly; nearest values are named.
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
            _multiple(field, getattr(self, field), num_envs)
        if self.total_frames >= 0:
            self._check_total()

    def _check_total(self) -> None:
        total = whole_number("total_frames", self.total_frames)
        batches, left = divmod(total - self.prefill_frames, self.frames_per_batch)
        if left or batches < 0:
            near = self.prefill_frames + max(batches, 0) * self.frames_per_batch
            why = f"is not a whole number of batches of {self.frames_per_batch} policy steps"
            why += f" after {self.prefill_frames} of prefill" if self.prefill_frames else ""
            works = [n for n in (near, near + self.frames_per_batch) if n]
            raise SettingError("total_frames", total, why, works)

    @property
    def is_prefill(self) -> bool:
        """Whether the next batch is the prefill."""
        return self.policy_steps < self.prefill_frames

    def _collect(self) -> TensorDictBase:
        prefill = self.is_prefill
        return self._collect_steps(
            self.prefill_frames // self.num_envs if prefill else self.steps_per_env
        )

    @abc.abstractmethod
    def _collect_steps(self, steps: int) -> TensorDictBase:
        """Take ``steps`` policy steps in every env, count them, return the batch."""


class RNGStream:
    """Random numbers of a collector's own: other uses of PyTorch's do not change them.

    Within ``with random_numbers:`` PyTorch draws from them, and records no gradients.

    Args:
        seed: where they begin, as :func:`policy_seed` derives it.
        device: where the policy runs; a GPU has random numbers of its own.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self._no_grad = torch.no_grad()
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Begin again."""
        seed = policy_seed(seed)
        self._state = torch.Generator().manual_seed(seed).get_state()
        self._on_device: Tensor | None = None
        if self.device.type == "cuda":
            self._on_device = torch.Generator(self.device).manual_seed(seed).get_state()

    def __enter__(self) -> None:
        """Let PyTorch's functions use these numbers, and record no gradients."""
        self._no_grad.__enter__()
        self._outside = torch.get_rng_state()
        torch.set_rng_state(self._state)
        if self._on_device is not None:
            self._outside_device = torch.cuda.get_rng_state(self.device)
            torch.cuda.set_rng_state(self._on_device, self.device)

    def __exit__(self, *error: object) -> None:
        """Put back the others."""
        self._state = torch.get_rng_state()
        torch.set_rng_state(self._outside)
        if self._on_device is not None:
            self._on_device = torch.cuda.get_rng_state(self.device)
            torch.cuda.set_rng_state(self._outside_device, self.device)
        self._no_grad.__exit__(*error)

    def state_dict(self) -> dict[str, Any]:
        """Return where they stand."""
        on_device = None if self._on_device is None else self._on_device.clone()
        return {"state": self._state.clone(), "on_device": on_device}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where they stood."""
        self._state = state_dict["state"].clone()
        if self._on_device is not None and state_dict["on_device"] is not None:
            self._on_device = state_dict["on_device"].clone()


def policy_seed(seed: int) -> int:
    """The seed of a policy's random numbers in a run: two streams of one seed would be the same.

    Weights are drawn from the run's own seed, and the states of environments from those of
    :func:`~kit.envs.vector_env.env_seeds`.
    """
    own = np.random.SeedSequence(seed, spawn_key=(0,))
    return int(own.generate_state(1, np.uint32)[0])


def _steps_per_env(num_envs: int, frames: int | None, steps: int | None) -> int:
    if frames is None:
        return whole_number("steps_per_env", 1 if steps is None else steps, at_least=1)
    frames = whole_number("frames_per_batch", frames, at_least=1)
    _multiple("frames_per_batch", frames, num_envs)
    if steps is not None and steps * num_envs != frames:
        why = f"contradicts frames_per_batch={frames} with {num_envs} envs"
        raise SettingError("steps_per_env", steps, why, [frames // num_envs])
    return frames // num_envs


def _multiple(field: str, value: int, of: int) -> None:
    if value % of:
        down = value // of * of
        why = f"is not a multiple of the {of} envs, which all step at once"
        raise SettingError(field, value, why, [n for n in (down, down + of) if n])


def copy_weights(source: Any, policy: Any) -> None:
    """Copy parameters and buffers into a policy, in place.

    Args:
        source: a module, its ``state_dict``, or a TensorDict of its parameters.
        policy: a module with the same ones.

    Raises:
        SettingError: if the policy has others.
    """
    own = TensorDict.from_module(policy).data.flatten_keys(".")
    given = TensorDict.from_module(source) if isinstance(source, nn.Module) else source
    given = given.flatten_keys(".") if isinstance(given, TensorDictBase) else dict(given)
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    others = {name: tuple(tensor.shape) for name, tensor in given.items()}
    different = sorted(n for n in {*shapes, *others} if shapes.get(n) != others.get(n))
    if different:
        name = different[0]
        why = f"has shape {others.get(name)}, {shapes.get(name)} in the policy"
        works = "send the weights of a policy that is built in the same way"
        raise SettingError("weights", name, why, works)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(given[name])


class PolicyError(RuntimeError):
    """An output of a policy is NaN.

    Args:
        key: of the output.
        env: number of the environment it acted in, from 0.
        policy_step: policy steps that this environment had taken.
    """

    def __init__(self, key: Key, env: int, policy_step: int) -> None:
        self.key, self.env, self.policy_step = key, env, policy_step
        name = key if isinstance(key, str) else ".".join(key)
        super().__init__(
            f"policy, env {env}, after {policy_step} policy steps: its output {name} is NaN for an "
            "observation without NaN; resume an earlier checkpoint with a smaller learning_rate"
        )

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.key, self.env, self.policy_step)


def check_policy(
    outputs: Mapping[Key, Tensor],
    observation: Mapping[Key, Any],
    actions: Sequence[Key],
    taken: int,
) -> None:
    """Refuse NaN in actions and log-probabilities, where they are on the host.

    Args:
        outputs: of the policy, ``[num_envs, steps, ...]``.
        observation: acted on, tensors or arrays ``[steps, ...]``.
        actions: their keys.
        taken: policy steps of each environment before these.

    Raises:
        PolicyError: at the first one, unless an observation was NaN by then.
    """
    for key, value in outputs.items():
        name = key if isinstance(key, str) else key[-1]
        if key not in actions and not name.endswith("log_prob"):
            continue
        if value.is_cuda or not value.is_floating_point():
            continue
        if value.dtype is torch.bfloat16:  # which NumPy does not have
            value = value.float()
        total = value.numpy().sum()  # NaN if an entry is; NumPy's costs half of PyTorch's
        if total == total:
            continue
        steps = value.isnan().reshape(*value.shape[:2], -1).any(-1).T  # [steps, num_envs]
        if not steps.any():  # infinities of both signs
            continue
        step, env = steps.nonzero()[0].tolist()
        # From such an observation on, a recurrent policy writes NaN for good ones, too.
        if all(np.isfinite(np.asarray(seen[: step + 1])).all() for seen in observation.values()):
            raise PolicyError(key, env, taken + step)
