"""The lock of a run folder: one process at a time writes to a run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from kit.logging.files import not_written
from kit.steps import SettingError


class RunLock:
    """Held from the moment a run is built until it ends, or its process does.

    The system gives the lock (``flock``) of a dead process back, whatever killed it. The file says
    who holds it: host, process, and when that process started, by which the lock of another machine
    is known, and that of a dead process where the file system has no ``flock``.

    Args:
        folder: run folder, which exists.

    Raises:
        SettingError: if another process holds it.
    """

    NAME: ClassVar = "lock"
    _of_this_process: ClassVar[WeakValueDictionary[Path, RunLock]] = WeakValueDictionary()

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / self.NAME
        self.begun, self._pid = False, os.getpid()
        self._file: int | None = None
        here = folder.resolve()
        before = self._of_this_process.get(here)
        if before is not None and not before.begun:
            before.release()  # built, and never run
        self._file = self._take()
        self._of_this_process[here] = self

    def _take(self) -> int:
        while True:
            try:
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
                with contextlib.ExitStack() as unless_taken:
                    unless_taken.callback(os.close, file)
                    self._refuse_foreign(file)
                    self._refuse_held(file)
                    if not self._is_there(file):  # the holder has just removed it
                        continue
                    os.truncate(file, 0)
                    os.write(file, json.dumps(_this_process()).encode())
                    unless_taken.pop_all()
                    return file
            except OSError as error:
                raise not_written(self.path, error) from error

    def _refuse_foreign(self, file: int) -> None:
        """Refuse a file that has another name as well, such as a hard link: it is not ours."""
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            why = f"has a {self.path.name} that is not a file of its own"
            works = f"remove {self.path}, and resume again"
            raise SettingError("resume", str(self.folder), why, works)

    def _refuse_held(self, file: int) -> None:
        held = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = True
        except OSError:
            pass  # this file system has no locks
        holder, this = _read(file), _this_process()
        if not held and (not holder or holder == this):
            return
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
        if holder.get("host") != this["host"] and holder:
            why = f"is held by {who}, another machine"
            works = f"end it there; if it is gone, remove {self.path} and resume again"
            raise SettingError("resume", str(self.folder), why, works)
        if held or _started(int(holder["pid"])) == holder["started"]:
            works = f"wait for it, or end it: kill {holder.get('pid', '')}".rstrip()
            raise SettingError("resume", str(self.folder), f"is being run by {who}", works)

    def _is_there(self, file: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(file))
        except FileNotFoundError:
            return False

    def begin(self) -> None:
        """Take note that the run begins.

        Raises:
            SettingError: if the folder was resumed again since this run was built.
        """
        if self._file is None:
            self._file = self._take()
        self.begun = True

    def check(self) -> None:
        """Take the lock again if its file was removed while the run runs.

        Raises:
            SettingError: if another process has taken it since.
        """
        if self._file is not None and not self._is_there(self._file):
            os.close(self._file)
            self._file = None
            self._file = self._take()

    def release(self) -> None:
        """Give the lock back and remove its file."""
        file, self._file = self._file, None
        self.begun = False
        if file is not None and self._pid == os.getpid():  # and not in a process forked from it
            if self._is_there(file):
                self.path.unlink(missing_ok=True)
            os.close(file)


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "started": _started(pid)}


def _started(pid: int) -> str:
    """When a process started, in ticks since the machine did; empty where there is no such one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _read(file: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    types = {"host": str, "pid": int, "started": str}
    known = isinstance(found, dict)
    return found if known and all(isinstance(found.get(k), t) for k, t in types.items()) else {}
