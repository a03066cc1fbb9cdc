"""What runs in the process of an AsyncCollector."""

from __future__ import annotations

import contextlib
import pickle
import signal
import sys
import traceback
from typing import Any

import torch
from tensordict import TensorDictBase

from kit.collectors.base import KitCollector
from kit.collectors.diverged import PolicyFault
from kit.collectors.weights import SharedWeights
from kit.envs.errors import EnvironmentFault
from kit.steps import SettingError


def serve(pipe: Any, how: bytes, weights: SharedWeights, max_staleness: int, threads: int) -> None:
    """Make batches as weights arrive, and do what else the pipe says, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who then closes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that environments are closed
    torch.set_num_threads(threads)
    served = None
    try:
        parts = pickle.loads(how).fn
        weights.belong_to(parts["policy"])
        collector = parts["collector"](parts["create_env_fn"](), parts["policy"], **parts["kwargs"])
        served = _Served(pipe, collector, weights, max_staleness)
        served.tell_facts()
        while served.work():
            pass
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # nobody is there any more
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(("error", _sendable(error)))
            pipe.recv()
    finally:
        if served is not None:
            served.collector.shutdown(raise_on_error=False)


_FACTS = (
    "num_envs",
    "total_frames",
    "frames_per_batch",
    "requested_frames_per_batch",
    "prefill_frames",
    "init_random_frames",
    "exploration_frames",
    "exact_policy",
)


class _Served:
    """A collector that makes one batch after the other, as far as it has weights.

    Args:
        pipe: to the learner.
        collector: makes the batches.
        weights: versions of the policy's weights; number ``v`` is that of batch ``v``.
        max_staleness: how many versions behind the one of a batch its policy is.
    """

    def __init__(
        self, pipe: Any, collector: KitCollector, weights: SharedWeights, max_staleness: int
    ) -> None:
        self.pipe, self.collector, self.weights = pipe, collector, weights
        self.max_staleness = max_staleness
        self.made = 0
        self.newest = -1
        self._slots: dict[int, TensorDictBase] = {}

    def tell_facts(self) -> None:
        """Tell the learner what it has to know about the collector."""
        facts = {name: getattr(self.collector, name) for name in _FACTS}
        self.pipe.send(("ready", facts))

    @property
    def _version(self) -> int:
        """Version with which the next batch is made."""
        return max(self.made - self.max_staleness, 0)

    def work(self) -> bool:
        """Make a batch, or do what the learner says; return whether to go on."""
        total = self.collector.total_frames
        more = total < 0 or self.collector.policy_steps < total
        due = more and self._version <= self.newest
        if due and not self.pipe.poll():
            self._make_batch()
            return True
        command, *arguments = self.pipe.recv()
        if command == "version":
            self.newest = arguments[0]
        elif command == "state":
            while more and self._version <= self.newest:
                self._make_batch()
                more = total < 0 or self.collector.policy_steps < total
            self.pipe.send(("state", dict(self.collector.state_dict())))
        elif command == "load":
            state, self.made = arguments
            self.collector.load_state_dict(state)
            self.newest = self.made - self.max_staleness - 1
            self.pipe.send(("loaded", self.collector.exact_resume))
        elif command == "seed":
            self.collector.set_seed(arguments[0])
            self.pipe.send(("seeded", None))
        return bool(command != "close")

    def _make_batch(self) -> None:
        version = self._version
        self.weights.read(version)
        batch = self.collector.collect()
        self.made += 1
        collector = self.collector
        normalizer = collector.normalizer
        facts = {
            "slot": self._store(batch.cpu()),
            "version": version,
            "counters": {name: getattr(collector, name) for name in collector._COUNTERS},
            "episodes": [tuple(episode) for episode in collector.take_episodes()],
            "normalizer": None if normalizer is None else normalizer.state_dict(),
        }
        self.pipe.send(("batch", facts))

    def _store(self, batch: TensorDictBase) -> int:
        """Write a batch to the shared buffer whose turn it is; return its number."""
        number = (self.made - 1) % (self.max_staleness + 1)
        slot = self._slots.get(number)
        if slot is None or not _alike(slot, batch):
            slot = self._slots[number] = batch.clone().share_memory_()
            self.pipe.send(("slot", (number, slot)))
        else:
            slot.copy_(batch)
        return number


def _alike(one: TensorDictBase, other: TensorDictBase) -> bool:
    """Whether two batches have the same keys, shapes and types."""
    if one.batch_size != other.batch_size:
        return False
    keys = set(one.keys(True, True))
    if keys != set(other.keys(True, True)):
        return False
    pairs = [(one.get(key), other.get(key)) for key in keys]
    return all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def _sendable(error: Exception) -> Exception:
    """Return an exception as it can be sent: the kit's own as they are, others by their text."""
    if isinstance(error, (EnvironmentFault, PolicyFault, SettingError)):
        return error
    text = "".join(traceback.format_exception(error))
    return RuntimeError(f"the process that collects failed: {error}\n{text}")
