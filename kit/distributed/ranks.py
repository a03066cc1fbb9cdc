"""Collective operations between the processes that train together."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from kit.distributed.hub import Hub

if TYPE_CHECKING:  # `kit steps` does not import torch
    from torch import Tensor

ALONE = timedelta(days=30)
"""Time that ranks wait for rank 0 to evaluate or save, which may take longer than the timeout."""
_FEW = 250_000
"""Largest number of elements that are averaged through sockets instead of gloo."""
_REPORT_SECONDS = 3.0
"""Time that a rank waits for the reports of others after a collective failed."""


class RankError(RuntimeError):
    """Raised if a collective fails because another rank raised an error, ended or hangs.

    Attributes:
        reported: whether another rank reports the original error, so that this error is not shown.
    """

    def __init__(self, reason: str, *, reported: bool = False) -> None:
        super().__init__(reason)
        self.reported = reported


class Ranks:
    """Processes that train together, and the collectives between them.

    Each rank collects with its own environments and takes gradient steps with the mean gradient of
    all ranks. With one rank, every method returns its argument, and ``torch.distributed`` is not
    imported.

    Args:
        rank: number of this process, from 0.
        size: number of processes.
        timeout: seconds after which a collective fails if a rank does not take part.

    Attributes:
        current: ranks of this process, set by :meth:`from_environment`.
        log: list to which the name and number of elements of each collective is appended, or
            ``None``.
    """

    current: ClassVar[Ranks | None] = None

    def __init__(self, rank: int = 0, size: int = 1, timeout: float = 600.0) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.log: list[tuple[str, int]] | None = None
        self._store: Any = None
        self._patient: Any = None
        self._hub: Hub | None = None

    @classmethod
    def from_environment(cls, device: str = "cpu", timeout: float = 600.0) -> Ranks:
        """Join the processes that torchrun started; without torchrun, return one rank.

        CPU tensors are exchanged through gloo, and small gradients through
        :class:`~kit.distributed.hub.Hub`. With ``device="cuda"``, each rank uses the GPU
        ``LOCAL_RANK`` and exchanges gradients through NCCL, or through gloo if there are fewer GPUs
        than ranks on this machine.

        Args:
            device: device of the networks.
            timeout: seconds after which a collective fails if a rank does not take part.
        """
        size = int(os.environ.get("WORLD_SIZE") or 1)
        if size == 1 or "RANK" not in os.environ:
            return cls(timeout=timeout)
        if cls.current is not None:
            return cls.current
        import torch
        import torch.distributed as dist

        ranks = cls(int(os.environ["RANK"]), size, timeout)
        backend = "gloo"
        if torch.device(device).type == "cuda":
            gpus = torch.cuda.device_count()
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % gpus)
            if int(os.environ.get("LOCAL_WORLD_SIZE", size)) <= gpus:
                backend = "cpu:gloo,cuda:nccl"
        limit = timedelta(seconds=timeout)
        store, rank, size = next(dist.rendezvous("env://", timeout=limit))  # type: ignore[attr-defined]
        # torchrun restarts processes with the same store, which has their earlier addresses.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
        ranks._store = dist.PrefixStore("kit", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        ranks._patient = dist.new_group(backend="gloo", timeout=ALONE)
        Ranks.current = ranks
        return ranks

    @property
    def name(self) -> str:
        """Rank and host of this process, for messages."""
        return f"rank {self.rank} on {socket.gethostname()}"

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which owns the run folder, loggers and evaluations."""
        return self.rank == 0

    # ------------------------------------------------------------------ collectives
    def mean(self, vector: Tensor, what: str = "gradients") -> Tensor:
        """Replace ``vector`` in place by its mean over all ranks, and return it.

        The result is bitwise the same on all ranks.
        """
        if self.size == 1:
            return vector
        import torch.distributed as dist

        with self._collective(what, vector.numel()):
            if vector.is_cpu and vector.numel() <= _FEW:
                self._connected().mean_(vector)
                return vector
            dist.all_reduce(vector)
        return vector.div_(self.size)

    def _connected(self) -> Hub:
        """Return the sockets between the ranks, which are opened by the first call."""
        if self._hub is None:
            self._hub = Hub(self.rank, self.size, self._store, self.timeout)
        return self._hub

    def gather(self, vector: Tensor, what: str) -> Tensor:
        """Return the CPU vectors of all ranks in rank order, of shape ``[size, *vector.shape]``."""
        if self.size == 1:
            return vector.unsqueeze(0)
        import torch
        import torch.distributed as dist

        found = [torch.empty_like(vector) for _ in range(self.size)]
        with self._collective(what, vector.numel()):
            dist.all_gather(found, vector.contiguous())
        return torch.stack(found)

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Return the values of all ranks in rank order. Values are pickled."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        with self._collective(what, 1):
            dist.all_gather_object(found, value, group=self._patient)
        return found

    def share(self, tensors: Iterable[Tensor], what: str) -> None:
        """Overwrite the tensors in place with the values of rank 0."""
        if self.size == 1:
            return
        import torch
        import torch.distributed as dist

        for tensor in tensors:
            with self._collective(what, tensor.numel()), torch.no_grad():
                value = tensor.detach().contiguous()
                dist.broadcast(value, 0)
                tensor.copy_(value)

    def wait(self, what: str) -> None:
        """Wait until all ranks call this method, however long it takes."""
        if self.size > 1:
            import torch
            import torch.distributed as dist

            with self._collective(what, 1):
                dist.all_reduce(torch.zeros(1), group=self._patient)

    # ------------------------------------------------------------------ restarts
    def remember(self, name: str, value: str) -> None:
        """Store a value of rank 0 that survives when torchrun restarts the processes."""
        if self.size > 1 and self.is_first and (store := _agent_store()) is not None:
            store.set(f"kit/{name}", value)

    def recall(self, name: str) -> str | None:
        """Return the value that was stored before torchrun restarted the processes, if any."""
        if self.size == 1 or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return None
        store = _agent_store()
        if store is None or not store.check([f"kit/{name}"]):
            return None
        return str(store.get(f"kit/{name}").decode())

    def close(self) -> None:
        """Leave the process group."""
        if self.size > 1:
            import torch.distributed as dist

            if self._hub is not None:
                self._hub.close()
            self._store = self._patient = self._hub = Ranks.current = None
            dist.destroy_process_group()

    # ------------------------------------------------------------------ errors
    def report(self, error: BaseException) -> bool:
        """Tell the other ranks that this rank ends with an error.

        Returns:
            Whether no other rank has reported an error before. Only the first error is shown.
        """
        if self._store is None:
            return True
        self._store.set(f"error/{self.rank}", str(error))
        return bool(self._store.add("errors", 1) == 1)

    @contextmanager
    def _collective(self, what: str, elements: int) -> Iterator[None]:
        if self.log is not None:
            self.log.append((what, elements))
        began = time.monotonic()
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise self._explained(error, what, time.monotonic() - began) from error

    def _explained(self, error: Exception, what: str, seconds: float) -> RankError:
        """Return an error that names the rank at fault."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        end = time.monotonic() + _REPORT_SECONDS
        if self._store is not None:
            self._store.set(f"failed/{self.rank}", what)
        while self._store is not None and time.monotonic() < end:
            if any(self._store.check([f"error/{rank}"]) for rank in others):
                return RankError("another rank ended with an error", reported=True)
            if all(self._store.check([f"failed/{rank}"]) for rank in others):
                break
            time.sleep(0.05)
        if seconds < self.timeout * 0.9:
            return RankError(f"another rank ended during {what!r}")
        silent = [r for r in others if not self._store.check([f"failed/{r}"])] or others
        names = ", ".join(map(str, silent))
        limit = f"within {self.timeout:g} seconds"
        return RankError(f"rank {names} did not take part in {what!r} {limit}")


def _agent_store() -> Any:
    """Connect to the store of torchrun's agent, which outlives the processes that it starts."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False)
