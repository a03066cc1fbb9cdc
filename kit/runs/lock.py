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
    """Held from the moment a run is built until it ends, or its process does.

    The system unlocks the file ``.lock`` of a dead process, whatever killed it. The file ``lock``
    is there while a process holds it, and names its host and its number.

    Args:
        folder: run folder, which exists.

    Raises:
        SettingError: if another process holds it.
        NotSaved: if its files cannot be written.
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
        here = folder.resolve()
        before = self._of_this_process.get(here)
        if before is not None and not before.begun:
            before.release()  # built, and never run
        self._take()
        self._of_this_process[here] = self

    def _take(self) -> None:
        self._refuse_hard_link()
        try:
            self._lock.acquire()
        except TimeoutError:
            holder = self._holder()
            why = f"is being run by process {holder.get('pid')} on {holder.get('host')}"
            works = f"wait for it, or end it: kill {holder.get('pid')}"
            raise SettingError("resume", str(self.folder), why, works) from None
        except OSError as error:
            raise not_written(self.folder / self.FILE, error) from error
        try:
            self._refuse_other_machine()
            write_whole(self.path, json.dumps(self._this))
        except BaseException:
            self._lock.release()
            raise

    def _refuse_hard_link(self) -> None:
        """Refuse a lock that has another name as well: that file is not ours to open."""
        file = self.folder / self.FILE
        if file.exists() and file.stat().st_nlink > 1:
            why = f"has a {file.name} that is not a file of its own"
            raise SettingError("resume", str(self.folder), why, f"remove {file}, and resume again")

    def _refuse_other_machine(self) -> None:
        """Refuse the run of another machine, whose locks a shared file system may not show here."""
        holder = self._holder()
        if holder and holder.get("host") != self._this["host"]:
            who = f"process {holder.get('pid')} on {holder.get('host')}, another machine"
            works = f"end it there; if it is gone, remove {self.path} and resume again"
            raise SettingError("resume", str(self.folder), f"is held by {who}", works)

    def _holder(self) -> dict[str, Any]:
        """What the note says; empty if there is none, or it says something else."""
        try:
            found = json.loads(self.path.read_bytes()) if self.path.is_file() else {}
        except ValueError:
            return {}
        this = {name: found.get(name) for name in self._this} if isinstance(found, dict) else {}
        return this if [*map(type, this.values())] == [str, int] else {}

    def begin(self) -> None:
        """Take note that the run begins.

        Raises:
            SettingError: if the folder was resumed again since this run was built.
        """
        if not self._lock.is_locked:
            self._take()
        self.begun = True

    def check(self) -> None:
        """Take the lock again if its files were removed while the run runs.

        Raises:
            SettingError: if another process has taken it since.
        """
        if self._lock.is_locked and self._holder() != self._this:
            self._lock.release()
            self._take()

    def release(self) -> None:
        """Give the lock back and remove the note."""
        self.begun = False
        if self._lock.is_locked and self._this["pid"] == os.getpid():  # not in a forked process
            if self._holder() == self._this:
                self.path.unlink(missing_ok=True)
            self._lock.release()
