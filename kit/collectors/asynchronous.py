"""Collecting in a process of its own while the learner works."""

from __future__ import annotations

import contextlib
import pickle
import signal
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
from gymnasium.vector.utils import CloudpickleWrapper
from tensordict import TensorDictBase
from torch import nn
from torchrl.envs import EnvBase

from kit.collectors.base import KitCollector
from kit.collectors.collecting_process import serve
from kit.collectors.plain_batch import from_plain, to_plain
from kit.collectors.policy import Policy
from kit.collectors.vector import VectorCollector
from kit.collectors.weights import SharedWeights
from kit.envs.backends.worker_process import without_main
from kit.envs.episodes import Episode
from kit.envs.errors import EnvironmentFault
from kit.envs.vector_env import VectorEnv
from kit.steps import SettingError
from kit.steps.errors import whole_number

_SECONDS_TO_CLOSE = 10.0


class AsyncCollector(KitCollector):
    """Collects in another process, so that the next batch is made while the learner works.

    Batch number ``b`` (from 0) is collected with the weights that the learner had when it asked for
    batch ``b - max_staleness`` (the first ones: for batch 0). So the staleness of a batch, in
    update phases, is known: it grows from 0 to ``max_staleness`` and stays there. It does not
    depend on how fast either side is, and neither do the batches: a run is reproducible, and
    resumes, bit by bit.

    Weights go to the process when a batch is asked for, or earlier with
    :meth:`update_policy_weights_`. Batches come back through ``max_staleness + 1`` buffers in
    shared memory, in which one is filled while another is read.

    Args:
        create_env_fn: function that makes the environment, in the process; or an environment of
            ``make_env``, which is made anew there.
        policy: module from TensorDict to TensorDict; the process has a copy.
        collector: class of the collector in the process.
        max_staleness: update phases that the policy of a batch may be behind; 0 collects while the
            learner waits.
        reuse: whether a batch is the shared buffer itself, valid until the next one is asked for.
        threads: PyTorch's threads in the process.
        storing_device: where batches are delivered.
        **kwargs: for the collector in the process.

    Attributes:
        staleness: of the last batch, in update phases.

    Raises:
        SettingError: if the environment cannot be made anew, or the collector refuses something.
    """

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
        **kwargs: Any,
    ) -> None:
        self.env = create_env_fn if isinstance(create_env_fn, EnvBase) else None
        self.policy, self.reuse = policy, reuse
        self.max_staleness = whole_number("max_staleness", max_staleness)
        self.storing_device = torch.device(storing_device)
        self._slots: dict[int, TensorDictBase] = {}
        self._arrived: deque[tuple[str, Any]] = deque()
        self._taken, self._published = 0, -1
        self.staleness, self._staleness_sum, self._staleness_count = 0, 0, 0
        module = policy if isinstance(policy, nn.Module) else None
        self._weights = SharedWeights(module, self.max_staleness + 1)
        how = {
            "create_env_fn": _maker(create_env_fn),
            "policy": policy,
            "collector": collector,
            "kwargs": kwargs,
        }
        self._start(pickle.dumps(CloudpickleWrapper(how)), threads)
        try:
            _, facts = self._receive()
        except BaseException:
            self._closing()
            raise
        super().__init__(facts["num_envs"], total_frames=facts["total_frames"])
        for name, value in facts.items():
            setattr(self, name, value)

    def _start(self, how: bytes, threads: int) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, how, self._weights, self.max_staleness, threads)
        self._process = context.Process(target=serve, args=arguments)
        with without_main():
            self._process.start()
        theirs.close()
        self._closing = weakref.finalize(self, _stop, self._process, self._pipe)

    # ------------------------------------------------------------------ one batch
    def collect(self) -> TensorDictBase:
        """Return the next batch, and have another one made meanwhile.

        Raises:
            EnvironmentFault: if an environment fails or the process dies.
        """
        if self.closed:
            raise RuntimeError("this collector was shut down; make a new one")
        self.update_policy_weights_()
        _, facts = self._await("batch")
        self._iter += 1
        self._note_staleness(self._taken - facts["version"])
        self._taken += 1
        for name in self._COUNTERS:
            setattr(self, name, facts["counters"][name])
        self._finished += [Episode(*episode) for episode in facts["episodes"]]
        if facts["normalizer"] is not None and isinstance(self.env, VectorEnv):
            assert self.env.normalizer is not None
            self.env.normalizer.load_state_dict(facts["normalizer"])
        batch = facts["batch"] if "batch" in facts else self._slots[facts["slot"]]
        if self.storing_device.type != "cpu":
            return batch.to(self.storing_device)
        return batch if self.reuse or "batch" in facts else batch.clone()

    def _collect(self) -> TensorDictBase:
        raise NotImplementedError  # the process does

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Send the policy's weights, from which the process goes on.

        The first call after a batch counts; later ones before the next batch do nothing. Without
        any, weights are sent when the next batch is asked for.
        """
        if args or kwargs:
            super().update_policy_weights_(*args, **kwargs)
        if self._published < self._taken:
            self._weights.write(self._taken)
            self._published = self._taken
            self._send(("version", self._published))

    def _note_staleness(self, staleness: int) -> None:
        self.staleness = staleness
        self._staleness_sum += staleness
        self._staleness_count += 1

    def metrics(self) -> dict[str, float]:
        """Return the mean staleness of the batches since the last call."""
        if not self._staleness_count:
            return {}
        mean = self._staleness_sum / self._staleness_count
        self._staleness_sum = self._staleness_count = 0
        return {"collector/staleness": mean}

    # ------------------------------------------------------------------ messages
    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._pipe.send(message)
        except (OSError, ValueError) as error:
            raise self._death() from error

    def _await(self, wanted: str) -> tuple[str, Any]:
        """Return the next message of a kind; batches that come before are kept."""
        for number, (kind, _) in enumerate(self._arrived):
            if kind == wanted:
                message = self._arrived[number]
                del self._arrived[number]
                return message
        while True:
            message = self._receive()
            if message[0] == wanted:
                return message
            self._arrived.append(message)

    def _receive(self) -> tuple[str, Any]:
        while True:
            wait([self._pipe, self._process.sentinel])
            try:
                if not self._pipe.poll():
                    raise self._death()
                kind, value = self._pipe.recv()
            except (EOFError, OSError) as error:
                raise self._death() from error
            if kind == "error":
                raise value
            if kind != "slot":
                return kind, value
            self._slots[value[0]] = value[1]

    def _death(self) -> EnvironmentFault:
        self._process.join(_SECONDS_TO_CLOSE)
        code = self._process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        name = getattr(self.env, "name", "env")
        return EnvironmentFault(name, None, f"the process that collects died ({how})")

    # ------------------------------------------------------------------ in and out
    def _seed_environments(self, seed: int) -> None:
        self._send(("seed", seed))
        self._await("seeded")

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """End the process; the collector cannot be used afterwards."""
        del timeout, raise_on_error
        if self.closed:
            return
        self.closed = True
        self._closing()
        self._slots.clear()
        if close_env and self.env is not None:
            self.env.close(raise_if_closed=False)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return counters, the state of the collector in the process, and batches under way.

        Waits until the process has made all the batches for which it has weights.
        """
        state = super().state_dict()
        self._send(("state",))
        state["collector"] = self._await("state")[1]
        state["taken"] = self._taken
        state["published"] = self._published
        state["under_way"] = [self._saved(facts) for kind, facts in self._arrived]
        state["staleness"] = [self.staleness, self._staleness_sum, self._staleness_count]
        return state

    def _saved(self, facts: dict[str, Any]) -> dict[str, Any]:
        batch = facts["batch"] if "batch" in facts else self._slots[facts["slot"]]
        others = {key: value for key, value in facts.items() if key not in ("batch", "slot")}
        return {**others, "batch": to_plain(batch.clone())}

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state_dict)
        made = int(state_dict["taken"]) + len(state_dict["under_way"])
        self._send(("load", state_dict["collector"], made))
        self.exact_resume = self._await("loaded")[1]
        self._taken, self._published = int(state_dict["taken"]), int(state_dict["published"])
        self._arrived = deque(
            ("batch", {**facts, "batch": from_plain(facts["batch"])})
            for facts in state_dict["under_way"]
        )
        self.staleness, self._staleness_sum, self._staleness_count = state_dict["staleness"]


def _maker(create_env_fn: Any) -> Callable[[], EnvBase]:
    """Return what makes the environment in the other process.

    Raises:
        SettingError: if it is an environment that does not know how it was made.
    """
    if not isinstance(create_env_fn, EnvBase):
        return create_env_fn  # type: ignore[no-any-return]
    again = getattr(create_env_fn, "make_again", None)
    if again is None:
        raise SettingError(
            "env",
            type(create_env_fn).__name__,
            "cannot be made anew in the process that collects",
            "pass a function that makes it, or an environment of make_env",
        )
    return again  # type: ignore[no-any-return]


def _stop(process: Any, pipe: Any) -> None:
    """End the process: ask, wait, and then insist."""
    with contextlib.suppress(OSError, ValueError):
        pipe.send(("close",))
    process.join(_SECONDS_TO_CLOSE)
    for insist in (process.terminate, process.kill):
        if process.is_alive():
            insist()
            process.join(_SECONDS_TO_CLOSE)
    pipe.close()
