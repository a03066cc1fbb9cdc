"""Mean of CPU vectors over ranks through blocking sockets."""

from __future__ import annotations

import os
import secrets
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_KEY = "hub"


class Hub:
    """Connects all ranks to rank 0, which sums their vectors in rank order.

    All work is done in the calling thread. gloo passes each vector between several threads, and
    the scheduler lets these wait while other threads compute: with two ranks on two cores, an
    all-reduce of 9,000 floats took 1.5 ms during training with gloo, and 0.2 ms with sockets.

    Args:
        rank: number of this process.
        size: number of processes.
        store: store of the process group, through which ranks find rank 0.
        timeout: seconds after which a rank that does not respond raises ``TimeoutError``.
    """

    def __init__(self, rank: int, size: int, store: Any, timeout: float) -> None:
        host = os.environ["MASTER_ADDR"]  # the machine of rank 0
        if rank == 0:
            token = secrets.token_hex(16)
            with socket.create_server((host, 0)) as server:
                server.settimeout(timeout)
                store.set(_KEY, f"{server.getsockname()[1]} {token}")
                self._links = _accepted(server, size - 1, token.encode(), timeout)
        else:
            port, token = store.get(_KEY).decode().split()
            link = socket.create_connection((host, int(port)), timeout)
            link.sendall(f"{token}{rank:08d}".encode())
            self._links = [link]
        for link in self._links:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._is_hub, self._size = rank == 0, size

    def mean_(self, vector: Tensor) -> None:
        """Replace a contiguous CPU vector by its mean over all ranks.

        Raises:
            OSError: if a rank ended, or did not respond in time.
        """
        import torch

        memory = _memory(vector)
        if not self._is_hub:
            (link,) = self._links
            link.sendall(memory)
            _receive(link, memory)
            return
        other = torch.empty_like(vector)
        for link in self._links:
            _receive(link, _memory(other))
            vector += other
        vector /= self._size
        for link in self._links:
            link.sendall(memory)

    def close(self) -> None:
        """Close all connections."""
        for link in self._links:
            link.close()


def _accepted(
    server: socket.socket, count: int, token: bytes, timeout: float
) -> list[socket.socket]:
    """Return connections to the other ranks, in rank order. Connections of others are closed."""
    found: dict[int, socket.socket] = {}
    while len(found) < count:
        link, _ = server.accept()
        link.settimeout(timeout)
        greeting = bytearray(len(token) + 8)
        _receive(link, memoryview(greeting))
        if secrets.compare_digest(bytes(greeting[:-8]), token):
            found[int(greeting[-8:])] = link
        else:
            link.close()
    return [found[rank] for rank in sorted(found)]


def _memory(vector: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor."""
    import torch

    array: Any = vector.reshape(-1).view(torch.uint8).numpy()  # NumPy has no bfloat16
    return memoryview(array)


def _receive(link: socket.socket, memory: memoryview) -> None:
    """Fill ``memory`` with the next bytes of a connection."""
    while memory:
        count = link.recv_into(memory)
        if not count:
            raise ConnectionError("the connection was closed")
        memory = memory[count:]
