"""Terminals that show ASCII alone, closed outputs, and limits of the system."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys

import pytest

import recipes.ppo
from kit.cli.launch import main
from kit.cli.terminal import terminal
from tests.short_runs import COMMON, SHORT

KIT = [sys.executable, "-m", "kit", "steps"]


@pytest.mark.parametrize("words", [["words", "sb3"], ["words"], ["explain", "sb3"]])
def test_command_exits_silently_when_output_pipe_is_closed(words):
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run([*KIT, *words], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_run_exits_silently_when_output_pipe_is_closed(monkeypatch, capsys, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patched, os.fdopen(writer, "w") as stream:
        patched.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            main(recipes.ppo.Config, recipes.ppo.build,
                 [*SHORT["ppo"], *COMMON, "progress=true", f"log_dir={tmp_path}"])  # fmt: skip
    assert ended.value.code != 0
    assert capsys.readouterr().err == ""


def test_ascii_terminal_shows_question_marks(monkeypatch, tmp_path):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    words = [*SHORT["ppo"], *COMMON, "progress=true", f"log_dir={tmp_path}"]
    main(recipes.ppo.Config, recipes.ppo.build, words)
    assert b"last evaluation: return" in shown.buffer.getvalue()
    assert b" ? " in shown.buffer.getvalue()


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_terminal_works_when_an_output_is_closed(name, monkeypatch):
    monkeypatch.setattr(sys, name, None)  # as Python has it after python ... >&-
    with terminal():
        print("seen by nobody", file=getattr(sys, name), flush=True)
    getattr(sys, name).close()


FILES = "raise the limit of open files (ulimit -n 4096), or use fewer processes"
ROOM = "free some space on the disk or in shared memory (df -h /dev/shm)"
MEMORY = "use smaller settings, fewer processes, or a machine with more memory"
LIMITS = {
    "open files": (OSError(errno.EMFILE, "x"), f"Too many open files: {FILES}"),
    "a full disk": (OSError(errno.ENOSPC, "x"), f"No space left on device: {ROOM}"),
    "PyTorch's open files": (
        RuntimeError("unable to open shared memory object </x>: Too many open files (24)"),
        f"Too many open files: {FILES}",
    ),
    "PyTorch's shared memory": (
        RuntimeError("the process failed:\nunable to allocate: No space left on device (28)\n"),
        f"No space left on device: {ROOM}",
    ),
    "PyTorch's memory": (
        RuntimeError("DefaultCPUAllocator: can't allocate memory:\nyou tried 4 bytes"),
        f"DefaultCPUAllocator: can't allocate memory: you tried 4 bytes: {MEMORY}",
    ),
}


@pytest.mark.parametrize("case", LIMITS)
@pytest.mark.parametrize("behind", [False, True])
def test_terminal_reports_system_limits_in_one_line(case, behind, capsys):
    error, line = LIMITS[case]
    if behind:
        cause, error = error, KeyError("what could not be done")
        error.__cause__ = cause
    with pytest.raises(SystemExit) as ended, terminal():
        raise error
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"\nerror: {line}\n"


def test_terminal_does_not_handle_other_errors():
    with pytest.raises(RuntimeError, match="28"), terminal():
        raise RuntimeError("a tensor of size (28)")
