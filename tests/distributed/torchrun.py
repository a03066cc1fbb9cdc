"""Commands that torchrun starts in several processes, and the processes that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def free_port() -> int:
    """Return a port that no process of this machine uses."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


class Torchrun:
    """A command in a session of its own, started by torchrun on this machine.

    Args:
        words: module or file, and its arguments.
        ranks: number of processes.
        options: further options of torchrun.
        output: file for what all processes print.
    """

    def __init__(
        self, words: list[str], output: Path, ranks: int = 2, options: tuple[str, ...] = ()
    ) -> None:
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += [] if options and "--nnodes=2" in options else ["--standalone"]
        command += [f"--nproc-per-node={ranks}", *options, *words]
        self.output = output
        self._mark = f"KIT_TEST={output}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "KIT_TEST": str(output)}
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, start_new_session=True, env=environment
            )

    def pids(self) -> list[int]:
        """Process IDs of the ranks, in their order."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                variables = (stat.parent / "environ").read_bytes().split(b"\0")
            except (OSError, IndexError):
                continue
            if parent == self.process.pid:
                ranks = [v for v in variables if v.startswith(b"RANK=")]
                found |= {int(rank[5:]): int(stat.parent.name) for rank in ranks}
        return [found[rank] for rank in sorted(found)]

    def wait_for(self, pattern: str, folder: Path, seconds: float = 60.0) -> Path:
        """Wait until a file exists below a folder."""
        end = time.monotonic() + seconds
        while not (found := sorted(folder.glob(pattern))):
            assert time.monotonic() < end, self.output.read_text()[-3_000:]
            assert self.process.poll() is None, self.output.read_text()[-3_000:]
            time.sleep(0.02)
        return found[-1]

    def ended(self, seconds: float = 120.0) -> int:
        """Wait for the end, and return the exit code; nothing of the session may be left."""
        code = self.process.wait(seconds)
        end = time.monotonic() + 10
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left, left
        return code

    def kill_all(self) -> None:
        """Kill every process at once."""
        for pid in [self.process.pid, *self._left()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def _left(self) -> list[int]:
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                variables = (stat.parent / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if self._mark.encode() in variables:
                found.append(int(stat.parent.name))
        return [pid for pid in found if pid != self.process.pid]

    def text(self) -> str:
        """Everything that was printed."""
        return self.output.read_text()
