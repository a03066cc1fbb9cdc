"""Processes that train together over gloo, for tests."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch.distributed import TCPStore

from kit.distributed import Ranks

TIMEOUT = 60.0
"""Seconds after which a collective, or the whole call, fails."""


def run_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, timeout: float = TIMEOUT / 2
) -> list[Any]:
    """Call ``function(ranks, *arguments)`` in new processes and return their results in rank order.

    A server process imports the kit once and forks the others. The variables of torchrun are set in
    each process.

    Args:
        function: importable function; its arguments and result are pickled.
        size: number of processes.
        arguments: further arguments.
        timeout: seconds after which a collective fails.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kit.experiment", "tests.losses"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ProcessPoolExecutor(size, mp_context=context) as pool:
        calls = [
            pool.submit(_call, rank, size, store.port, timeout, function, arguments)
            for rank in range(size)
        ]
        return [pickle.loads(call.result(TIMEOUT)) for call in calls]


def _call(
    rank: int,
    size: int,
    port: int,
    timeout: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> bytes:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    ranks = Ranks.from_environment(timeout=timeout)
    ranks.log = []
    try:
        return pickle.dumps(function(ranks, *arguments))
    except BaseException as error:
        ranks.report(error)
        raise
    finally:
        ranks.close()
