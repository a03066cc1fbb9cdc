"""Lock that allows only one process to write to a run folder."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from kit.logging.files import not_written, write_whole
from kit.steps import SettingError


class RunLock:
    """Lock that a process holds from when it builds a run until the run or process ends.

    The file ``.lock`` is locked, and the system unlocks it when the process dies. While the lock is
    held, the file ``lock`` contains the host and the process ID.

    Args:
        folder: existing run folder.

    Raises:
        SettingError: if another process holds the lock.
        WriteError: if the lock files cannot be written.
    """

    NAME: ClassVar = "lock"
    FILE: ClassVar = ".lock"
    _of_this_process: ClassVar[WeakValueDictionary[Path, RunLock]] = WeakValueDictionary()

    def __init__(self, folder: Path) -> None:
        from filelock import FileLock  # importing it takes time

        self.folder, self.path = folder, folder / self.NAME
        self.begun = False
        self._this = {"host": socket.gethostname(), "pid": os.getpid()}
        self._lock = FileLock(folder / self.FILE, timeout=0, thread_local=False)
        before = self._of_this_process.get(folder.resolve())
        if before is not None and not before.begun:
            before.release()  # held by a trainer that was built but never run
        self._acquire()
        self._of_this_process[folder.resolve()] = self

    def _acquire(self) -> None:
        run, file, holder = str(self.folder), self.folder / self.FILE, self._holder()
        who = f"process {holder.get('pid')} on {holder.get('host')}"
        if file.exists() and file.stat().st_nlink > 1:  # locking would modify the linked file
            reason = f"The file {file.name} is a hard link to another file"
            raise SettingError("resume", run, reason, f"Remove {file} and resume again")
        if holder and holder["host"] != self._this["host"]:  # remote locks may be invisible
            advice = f"End that process. If it has ended, remove {self.path} and resume again"
            reason = f"The run is in use by {who}, another machine"
            raise SettingError("resume", run, reason, advice)
        try:
            self._lock.acquire()
        except TimeoutError:
            advice = f"Wait for it, or end it with: kill {holder.get('pid')}"
            raise SettingError("resume", run, f"The run is in use by {who}", advice) from None
        except OSError as error:
            raise not_written(file, error) from error
        write_whole(self.path, json.dumps(self._this))

    def _holder(self) -> dict[str, Any]:
        """Return the host and the process ID that hold the lock; empty if there is no lock."""
        try:
            found = json.loads(self.path.read_bytes()) if self.path.is_file() else {}
            return {"host": str(found["host"]), "pid": int(found["pid"])}
        except (KeyError, TypeError, ValueError):
            return {}

    def begin(self) -> None:
        """Record that the run starts.

        Raises:
            SettingError: if another process has acquired the lock in the meantime.
        """
        if not self._lock.is_locked:
            self._acquire()
        self.begun = True

    def check(self) -> None:
        """Acquire the lock again if its files were removed during the run.

        Raises:
            SettingError: if another process has acquired the lock in the meantime.
        """
        if self._lock.is_locked and self._holder() != self._this:
            self._lock.release()
            self._acquire()

    def release(self) -> None:
        """Release the lock and remove the file that names its holder."""
        self.begun = False
        if self._lock.is_locked and self._this["pid"] == os.getpid():  # not in a forked process
            if self._holder() == self._this:
                self.path.unlink(missing_ok=True)
            self._lock.release()


def forget_holder(folder: Path) -> None:
    """Let another machine lock a run whose process has died.

    A process that is still running on the same machine keeps its lock.
    """
    (folder / RunLock.NAME).unlink(missing_ok=True)
