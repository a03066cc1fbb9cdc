"""The lock of a run folder: one process at a time writes to a run."""

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
    """Lock that is held from when a run is built until the run or its process ends.

    The system unlocks the file ``.lock`` of a dead process. The file ``lock`` exists while a
    process holds the lock, and names its host and its process ID.

    Args:
        folder: run folder, which exists.

    Raises:
        SettingError: if another process holds the lock.
        WriteError: if its files cannot be written.
    """

    NAME: ClassVar = "lock"
    FILE: ClassVar = ".lock"
    _of_this_process: ClassVar[WeakValueDictionary[Path, RunLock]] = WeakValueDictionary()

    def __init__(self, folder: Path) -> None:
        from filelock import FileLock  # which PyTorch imports for compilers alone

        self.folder, self.path = folder, folder / self.NAME
        self.begun = False
        self._this = {"host": socket.gethostname(), "pid": os.getpid()}
        self._lock = FileLock(folder / self.FILE, timeout=0, thread_local=False)
        before = self._of_this_process.get(folder.resolve())
        if before is not None and not before.begun:
            before.release()  # built, and never run
        self._take()
        self._of_this_process[folder.resolve()] = self

    def _take(self) -> None:
        run, file, holder = str(self.folder), self.folder / self.FILE, self._holder()
        who = f"process {holder.get('pid')} on {holder.get('host')}"
        if file.exists() and file.stat().st_nlink > 1:  # locking would write to another file
            why = f"has a {file.name} that is not a file of its own"
            raise SettingError("resume", run, why, f"remove {file}, and resume again")
        if holder and holder["host"] != self._this["host"]:  # whose locks may be invisible here
            works = f"end it there; if it is gone, remove {self.path} and resume again"
            raise SettingError("resume", run, f"is held by {who}, another machine", works)
        try:
            self._lock.acquire()
        except TimeoutError:
            works = f"wait for it, or end it: kill {holder.get('pid')}"
            raise SettingError("resume", run, f"is being run by {who}", works) from None
        except OSError as error:
            raise not_written(file, error) from error
        write_whole(self.path, json.dumps(self._this))

    def _holder(self) -> dict[str, Any]:
        """Return host and process ID of the holder; empty if the file has neither."""
        try:
            found = json.loads(self.path.read_bytes()) if self.path.is_file() else {}
            return {"host": str(found["host"]), "pid": int(found["pid"])}
        except (KeyError, TypeError, ValueError):
            return {}

    def begin(self) -> None:
        """Record that the run begins.

        Raises:
            SettingError: if another run was built in the folder since.
        """
        if not self._lock.is_locked:
            self._take()
        self.begun = True

    def check(self) -> None:
        """Take the lock again if its files were removed during the run.

        Raises:
            SettingError: if another process has taken it since.
        """
        if self._lock.is_locked and self._holder() != self._this:
            self._lock.release()
            self._take()

    def release(self) -> None:
        """Release the lock and remove the file that names its holder."""
        self.begun = False
        if self._lock.is_locked and self._this["pid"] == os.getpid():  # not in a forked process
            if self._holder() == self._this:
                self.path.unlink(missing_ok=True)
            self._lock.release()
