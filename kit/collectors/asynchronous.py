"""Collector that runs in a separate process while the learner trains."""

from __future__ import annotations

import contextlib
import pickle
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from threading import get_ident
from typing import Any

import torch
from gymnasium.vector.utils import CloudpickleWrapper
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase

from kit.collectors.base import KitCollector, PolicyError
from kit.collectors.policy import Policy
from kit.collectors.rollout import VectorCollector
from kit.envs.backends.workers import how_it_ended, without_main
from kit.envs.episodes import Episode
from kit.envs.errors import EnvError
from kit.envs.hanging import ASK, StepWatch, end_process, is_main_thread, is_parents_affair
from kit.envs.state import capture_process, restore_process, seed_process
from kit.envs.vector_env import VectorEnv
from kit.steps import SettingError
from kit.steps.errors import whole_number

_SECONDS_TO_CLOSE = 10.0
_SECONDS_OF_A_STEP = 1.5
"""Seconds that an environment step may take before shutdown stops waiting for it."""


class AsyncCollector(KitCollector):
    """Collects the next batch in a worker process while the learner trains on the last batch.

    Batch ``b``, counted from 0, is collected with the weights that the learner had when it
    requested batch ``b - max_staleness``. The first batches use the weights from the request for
    batch 0. The staleness of a batch, in update phases, therefore grows from 0 to
    ``max_staleness`` and then stays constant. Staleness does not depend on timing, so runs are
    reproducible and can be resumed bit for bit.

    Weights are sent when a batch is requested, or when :meth:`update_policy_weights_` is called
    before that. Batches are returned through ``max_staleness + 2`` buffers in shared memory.

    Args:
        create_env_fn: function that creates the environment in the worker process, or an
            environment from ``make_env``, which the worker process creates again.
        policy: module that takes and returns a TensorDict. The worker process receives its
            parameters, buffers, and public attributes of type int, float, bool or str. The same
            applies to ``exploration_policy``.
        collector: class of the collector that runs in the worker process.
        max_staleness: maximum number of update phases by which a batch's policy lags behind the
            learner; 0: the learner waits for each batch.
        reuse: whether to return the shared buffer itself instead of a copy. Its contents are valid
            until the next batch is requested.
        threads: number of PyTorch threads in the worker process.
        storing_device: device of the returned batches.
        pre_collect_hook: called in this process before it waits for a batch.
        post_collect_hook: called in this process with each batch before it is returned.
        **kwargs: arguments for the collector in the worker process.

    Attributes:
        staleness: staleness of the last batch, in update phases.

    Raises:
        SettingError: if the collector in the worker process raises it.
    """

    collects_on_host = True
    steps_elsewhere = True

    def __init__(
        self,
        create_env_fn: Callable[[], EnvBase] | EnvBase,
        policy: Policy | None = None,
        *,
        collector: type[KitCollector] = VectorCollector,
        max_staleness: int = 1,
        reuse: bool = False,
        threads: int = 1,
        storing_device: torch.device | str = "cpu",
        pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Callable[[TensorDictBase], None] | None = None,
        **kwargs: Any,
    ) -> None:
        self.env = create_env_fn if isinstance(create_env_fn, EnvBase) else None
        self.policy, self.reuse = policy, reuse
        exploration_policy = kwargs.get("exploration_policy")
        self.max_staleness = whole_number("max_staleness", max_staleness)
        self._slots: dict[int, TensorDictBase] = {}
        self._arrived: deque[dict[str, Any]] = deque()  # received batches
        self._taken, self._published = 0, -1
        self.staleness = 0
        self._staleness_since_row: list[int] = []
        # Versions of the weights for the batches in progress. A new version overwrites the oldest.
        versions = range(self.max_staleness + 1)
        policies = _policies(policy, exploration_policy)
        self._weights = [[_shared(tensor) for tensor in _tensors(policies)] for _ in versions]
        self._settings = [_settings(policies) for _ in versions]
        make: Any = create_env_fn if self.env is None else self.env.make_again
        how = collector, make, policy, kwargs
        self._start(pickle.dumps(CloudpickleWrapper(how)), threads)
        try:
            _, facts = self._receive()
        except BaseException:
            self._closing()
            raise
        super().__init__(
            facts["num_envs"],
            total_frames=facts["total_frames"],
            exploration_policy=exploration_policy,
            storing_device=storing_device,
            pre_collect_hook=pre_collect_hook,
            post_collect_hook=post_collect_hook,
        )
        for name, value in facts.items():
            setattr(self, name, value)

    def _start(self, how: bytes, threads: int) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._in_step = _shared(torch.zeros(()))
        arguments = (theirs, how, self._weights, threads, self._in_step, is_main_thread())
        self._process = context.Process(target=serve, args=arguments)
        with without_main():
            self._process.start()
        theirs.close()
        # The finaliser runs at exit, before multiprocessing joins its processes.
        rest = self._process, self._pipe, self._in_step
        self._closing = Finalize(self, _stop, rest, exitpriority=1)

    # ------------------------------------------------------------------ batch collection
    def _prepared(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()  # the RNG state is in the worker process

    def _collect(self) -> TensorDictBase:
        """Send the current weights, then wait for the next batch and return it."""
        self.update_policy_weights_()
        facts = self._await("batch")
        self.staleness = self._taken - facts["version"]
        self._staleness_since_row.append(self.staleness)
        self._taken += 1
        self.continues_episodes = facts["continues_episodes"]
        for name in self._COUNTERS:
            setattr(self, name, facts["counters"][name])
        self._finished += [Episode(*episode) for episode in facts["episodes"]]
        if facts["normalizer"] is not None and isinstance(self.env, VectorEnv):
            assert self.env.normalizer is not None
            self.env.normalizer.load_state_dict(facts["normalizer"])
        batch: TensorDictBase = facts["batch"]
        if self.storing_device.type != "cpu":
            return batch.to(self.storing_device).unlock_()
        # Shared TensorDicts are locked, but a shallow copy accepts new entries, such as advantages.
        return batch.clone(recurse=not self.reuse)

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Send the policy's current weights to the worker process.

        Only the first call after each batch has an effect. Without such a call, weights are sent
        when the next batch is requested.
        """
        if args or kwargs:
            super().update_policy_weights_(*args, **kwargs)
        if self._published < self._taken:
            policies = _policies(self.policy, self.exploration_policy)
            slot = self._taken % len(self._weights)
            _copy(_tensors(policies), self._weights[slot])
            self._published = self._taken
            before, self._settings[slot] = self._settings[slot - 1], _settings(policies)
            changed = {n: v for n, v in self._settings[slot].items() if before.get(n, before) != v}
            self._send(("version", self._published, changed))

    def metrics(self) -> dict[str, float]:
        """Return the mean staleness of the batches since the last call."""
        since, self._staleness_since_row = self._staleness_since_row, []
        return {"collector/staleness": statistics.fmean(since)} if since else {}

    def seconds_in_step(self) -> float:
        """Return how long the worker's current environment step has taken so far, in seconds."""
        return float(self._in_step)

    def deliver_raw(self, raw: bool) -> bool:
        """Set whether batches are raw or normalised, and return whether the choice is supported.

        Raw batches are supported only if this process has the worker's normalisation statistics.
        """
        self._send(("raw", raw))
        delivered = bool(self._await("raw"))
        has_statistics = self.normalizer is not None or self.normalized_by != "Normalizer"
        return delivered and (has_statistics or not raw)

    # ------------------------------------------------------------------ messages
    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._pipe.send(message)
        except (OSError, ValueError) as error:
            raise self._death() from error

    def _await(self, wanted: str) -> Any:
        """Wait for a message of the given kind. Batches that arrive in the meantime are queued."""
        if wanted == "batch" and self._arrived:
            return self._arrived.popleft()
        while True:
            kind, value = self._receive()
            if kind == wanted:
                return value
            self._arrived.append(value)

    def _receive(self) -> tuple[str, Any]:
        wait([self._pipe, self._process.sentinel])
        try:
            if not self._pipe.poll():
                raise self._death()
            with _uninterrupted():
                kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if kind == "error":
            raise value
        if kind == "batch":
            self._slots |= value.pop("new_slots")
            value["batch"] = self._slots[value.pop("slot")]
        return kind, value

    def _death(self) -> EnvError:
        what = f"the collector's process died ({how_it_ended(self._process)})"
        return EnvError(getattr(self.env, "name", "env"), None, what)

    # ------------------------------------------------------------------ seed and state
    def _seed_environments(self, seed: int) -> None:
        self._send(("seed", seed))
        self._await("seeded")

    def _release(self) -> None:
        """Stop the worker process."""
        self._closing()
        self._slots.clear()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the counters, queued batches and worker state. Waits until the worker is idle."""
        state = super().state_dict()
        self._send(("state",))
        state["collector"] = self._await("state")
        state["taken"] = self._taken
        state["published"] = self._published
        state["under_way"] = [
            {**facts, "batch": facts["batch"].clone().to_dict(), "shape": [*facts["batch"].shape]}
            for facts in self._arrived
        ]
        state["staleness"] = [self.staleness, [*self._staleness_since_row]]
        # Include the weights for later batches, in case the resumed run has more batches.
        collected, slots = self._taken + len(self._arrived), len(self._weights)
        unused = range(max(collected - self.max_staleness, 0), self._published + 1)
        weights = {v: [tensor.clone() for tensor in self._weights[v % slots]] for v in unused}
        state["unused"] = {v: (weights[v], _plain(self._settings[v % slots])) for v in unused}
        state["max_staleness"] = self.max_staleness
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore a saved state. Its ``max_staleness`` must not be lower than this collector's."""
        if self.max_staleness > (most := int(state_dict["max_staleness"])):
            reason = "is larger than in the checkpoint, which lacks the required older weights"
            raise SettingError("max_staleness", self.max_staleness, reason, [most])
        super().load_state_dict(state_dict)
        collected = int(state_dict["taken"]) + len(state_dict["under_way"])
        self._send(("load", state_dict["collector"], collected))
        self.exact_resume = self._await("loaded")
        for version, (weights, settings) in state_dict["unused"].items():
            slot = version % len(self._weights)
            _copy(weights, self._weights[slot])
            self._settings[slot] = settings
            self._send(("version", version, settings))
        self._taken, self._published = int(state_dict["taken"]), int(state_dict["published"])
        self._arrived = deque(
            {**facts, "batch": TensorDict(facts["batch"], facts["shape"])}
            for facts in state_dict["under_way"]
        )
        self.staleness, self._staleness_since_row = state_dict["staleness"]


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C while a message is read, because an interrupted message would be lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop(process: Any, pipe: Any, in_step: Tensor) -> None:
    """Stop the process gracefully, or kill it if it does not stop in time."""
    with contextlib.suppress(OSError, ValueError):
        pipe.send(("close",))
    end = time.monotonic() + _SECONDS_TO_CLOSE
    while process.is_alive() and time.monotonic() < end and in_step < _SECONDS_OF_A_STEP:
        process.join(0.05)
    end_process(process, 0.0)
    pipe.close()


def _policies(*policies: Any) -> nn.ModuleList:
    """Return a list of the policies that are PyTorch modules."""
    return nn.ModuleList(policy for policy in policies if isinstance(policy, nn.Module))


def _tensors(policies: nn.ModuleList) -> list[Tensor]:
    """Return the parameters and buffers of the policies."""
    return [*policies.parameters(), *policies.buffers()]


def _settings(policies: nn.ModuleList) -> dict[tuple[str, str], Any]:
    """Return the public int, float, bool and str attributes of policies and their submodules."""
    return {
        (path, name): value
        for path, module in policies.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, (bool, int, float, str))
    }


def _plain(settings: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """Return the attributes of type int, float, bool or str, excluding enum members."""
    return {n: v for n, v in settings.items() if type(v) in (bool, int, float, str)}


def _shared(tensor: Tensor) -> Tensor:
    copy = tensor.detach().cpu().clone()
    return copy.share_memory_()  # type: ignore[no-any-return, no-untyped-call]


def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, copy in zip(source, target, strict=True):
            copy.copy_(tensor)


# ---------------------------------------------------------------------- worker process
def serve(
    pipe: Any,
    pickled: bytes,
    weights: list[list[Tensor]],
    threads: int,
    in_step: Tensor,
    in_main_thread: bool,
) -> None:
    """Run the worker process: collect batches and execute commands until the pipe is closed."""
    is_parents_affair(in_main_thread)
    signal.signal(ASK, lambda *_: sys.exit(0))  # sys.exit lets cleanup code close the environments
    threading.Thread(target=_watch, args=(in_step, get_ident()), daemon=True).start()
    torch.set_num_threads(threads)
    served = None
    try:
        make, make_env, policy, kwargs = pickle.loads(pickled).fn
        seed_process(kwargs.get("seed", 0))  # environments may use the global RNG
        policies = _policies(policy, kwargs.get("exploration_policy"))
        served = _Worker(pipe, make(make_env(), policy, **kwargs), policies, weights)
        facts = {name: getattr(served.collector, name) for name in _FACTS}
        pipe.send(("ready", {**facts, "normalized_by": _normalized_by(served.collector)}))
        while served.work():
            pass
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent process has exited
    except (Exception, KeyboardInterrupt) as error:
        with contextlib.suppress(OSError):
            pipe.send(("error", _sendable(error)))
            pipe.recv()
    finally:
        if served is not None:
            served.collector.shutdown(raise_on_error=False)


def _normalized_by(collector: KitCollector) -> str:
    """Return the name of the normaliser in use, or an empty string if there is none."""
    env: Any = getattr(collector, "env", None)
    learns = env.backend.learns if isinstance(env, VectorEnv) else None
    return str(learns or ("" if collector.normalizer is None else "Normalizer"))


def _watch(in_step: Tensor, thread: int) -> None:
    """Write the duration of the current environment step to ``in_step`` five times per second."""
    watch = StepWatch(thread)
    while True:
        in_step.fill_(watch.seconds())
        time.sleep(0.2)


_FACTS = (
    "num_envs",
    "total_frames",
    "frames_per_batch",
    "requested_frames_per_batch",
    "prefill_frames",
    "init_random_frames",
    "exploration_frames",
    "exact_policy",
    "reset_at_each_iter",
)


class _Worker:
    """Runs a collector in the worker process and collects batches while weights are available.

    ``weights`` contains ``max_staleness + 1`` versions. The learner writes version ``v`` when it
    requests batch ``v``.
    """

    def __init__(
        self,
        pipe: Any,
        collector: KitCollector,
        policies: nn.ModuleList,
        weights: list[list[Tensor]],
    ) -> None:
        self.pipe, self.collector, self.weights = pipe, collector, weights
        self.policies, self.tensors = policies, _tensors(policies)
        self.max_staleness = len(weights) - 1
        self.collected = 0
        self.newest = -1
        self._starts_episodes = False  # whether the next batch starts new episodes
        self._settings: dict[int, dict[tuple[str, str], Any]] = {}  # keyed by weights version
        self._slots: dict[int, TensorDictBase] = {}

    @property
    def _version(self) -> int:
        """Version of the weights for the next batch."""
        return max(self.collected - self.max_staleness, 0)

    @property
    def _is_due(self) -> bool:
        """Whether another batch is needed and its weights have arrived."""
        total = self.collector.total_frames
        more = total < 0 or self.collector.policy_steps < total
        return more and self._version <= self.newest

    def work(self) -> bool:
        """Collect one batch or execute one command. Return whether the worker should continue."""
        if self._is_due and not self.pipe.poll():
            self._collect_batch()
            return True
        command, *arguments = self.pipe.recv()
        if command == "version":
            self.newest, self._settings[self.newest] = arguments
        elif command == "state":
            self._collect_due()
            state = {**self.collector.state_dict(), "process": capture_process()}
            self.pipe.send(("state", state))
        elif command == "load":
            state, self.collected = arguments
            for version in sorted(self._settings):
                self._set(version)
            self.collector.load_state_dict(state)
            restore_process(state["process"])
            self._starts_episodes = not self.collector.exact_resume
            self.newest = self.collected - self.max_staleness - 1
            self.pipe.send(("loaded", self.collector.exact_resume))
        elif command == "seed":
            self._collect_due()  # batches already requested use the old RNG state
            self.collector.set_seed(arguments[0])
            self.pipe.send(("seeded", None))
        elif command == "raw":
            self._collect_due()
            self.pipe.send(("raw", self.collector.deliver_raw(*arguments)))
        return bool(command != "close")

    def _collect_due(self) -> None:
        while self._is_due:
            self._collect_batch()

    def _collect_batch(self) -> None:
        version, collector = self._version, self.collector
        _copy(self.weights[version % len(self.weights)], self.tensors)
        self._set(version)
        batch = collector.collect()
        self.collected += 1
        normalizer = collector.normalizer
        slot, new_slots = self._store(batch.cpu())
        facts = {
            "slot": slot,
            "new_slots": new_slots,
            "version": version,
            "continues_episodes": collector.continues_episodes and not self._starts_episodes,
            "counters": {name: getattr(collector, name) for name in collector._COUNTERS},
            "episodes": [tuple(episode) for episode in collector.take_episodes()],
            "normalizer": None if normalizer is None else normalizer.state_dict(),
        }
        self.pipe.send(("batch", facts))
        self._starts_episodes = False

    def _set(self, version: int) -> None:
        """Apply the attribute changes that were sent with a version of the weights."""
        for (path, name), value in self._settings.pop(version, {}).items():
            setattr(self.policies.get_submodule(path), name, value)

    def _store(self, batch: TensorDictBase) -> tuple[int, dict[int, TensorDictBase]]:
        """Copy a batch to the next shared buffer. Return the buffer's index and any new buffer."""
        number = (self.collected - 1) % (self.max_staleness + 2)
        slot = self._slots.get(number)
        if slot is not None and _signature(slot) == _signature(batch):
            slot.copy_(batch)
            return number, {}
        slot = self._slots[number] = batch.clone().share_memory_()
        return number, {number: slot}


def _signature(batch: TensorDictBase) -> tuple[Any, ...]:
    """Return the batch size, keys, shapes and dtypes of a batch."""
    found = {key: (value.shape, value.dtype) for key, value in batch.items(True, True)}
    return batch.batch_size, found


def _sendable(error: BaseException) -> Exception:
    """Convert an exception to one that can be pickled. Unknown types become RuntimeError."""
    if isinstance(error, KeyboardInterrupt):  # raised by an environment, not by Ctrl-C
        return EnvError("env", None, "raised KeyboardInterrupt in the collector's process")
    if isinstance(error, (EnvError, PolicyError, SettingError)):
        return error
    text = "".join(traceback.format_exception(error))
    return RuntimeError(f"the collector's process failed: {error}\n{text}")
