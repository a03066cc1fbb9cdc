"""When nothing more can be written, the run says so and all that was written before stays."""

from __future__ import annotations

import errno
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kit.trainer.checkpoint import Checkpoints, WriteError
from recipes.ppo import build
from tests.short_runs import COMMON, SHORT, one_line, policy_steps_in, rows_in, the_run, tiny_config


def full_from(monkeypatch, path: str, call: int) -> None:
    """Let the disk be full from the given opening of a file called so on."""
    opened, before = [], Path.open

    def open_file(self, mode="r", *rest, **kwargs):
        if self.name == path and "r" not in mode:
            opened.append(self)
            if len(opened) >= call:
                raise OSError(errno.ENOSPC, "No space left on device")
        return before(self, mode, *rest, **kwargs)

    monkeypatch.setattr(Path, "open", open_file)


def test_failed_checkpoint_write_keeps_previous_checkpoint(tmp_path, monkeypatch):
    from torchrl.checkpoint import Checkpoint

    save = Checkpoint.save

    def once(self, path, metadata):
        if metadata["counters"]["policy_steps"] > 16:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(self, path, metadata=metadata)

    monkeypatch.setattr(Checkpoint, "save", once)
    with pytest.raises(WriteError) as raised:
        build(tiny_config(tmp_path)).run()
    run = the_run(tmp_path)
    assert str(raised.value) == (
        f"checkpoint-000000000032 was not written to {run}/checkpoints: No space left on device. "
        "Earlier checkpoints are unchanged; the newest checkpoint is checkpoint-000000000016."
    )
    monkeypatch.undo()
    assert build(tiny_config(tmp_path, resume=str(run))).run().policy_steps == 64


def test_failed_row_write_keeps_earlier_rows(tmp_path, monkeypatch):
    full_from(monkeypatch, "metrics.csv", 3)
    with pytest.raises(WriteError, match=r"metrics.csv cannot be written: No space left on device"):
        build(tiny_config(tmp_path)).run()
    run = the_run(tmp_path)
    before = rows_in(run)
    assert policy_steps_in(run) == [16, 32]
    monkeypatch.undo()
    build(tiny_config(tmp_path, resume=str(run))).run()
    assert policy_steps_in(run) == [16, 32, 48, 64]
    assert rows_in(run)[:2] == before


def test_failed_curve_write_keeps_rows_and_checkpoints(tmp_path, monkeypatch):
    write = Path.write_bytes

    def full(path, content):
        if path.name.startswith("curve.png"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(WriteError, match=r"curve.png cannot be written: No space left on device"):
        build(tiny_config(tmp_path)).run()
    assert policy_steps_in(the_run(tmp_path)) == [16, 32, 48, 64]
    assert Checkpoints.latest(the_run(tmp_path) / "checkpoints").name.endswith("64")


def test_run_prints_one_line_error_at_file_size_limit(tmp_path):
    """Files may have 20,000 bytes, as the system enforces: enough for rows, not for weights."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    words = [*SHORT["ppo"], *COMMON, "hidden_sizes=[64,64]", "checkpoint_every=32", "log_every=16"]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "recipes.ppo", *words, f"log_dir={tmp_path}/runs"],
        check=False, capture_output=True, text=True, preexec_fn=limit,
    )  # fmt: skip
    assert ran.returncode == 1
    message = one_line(ran.stderr)
    assert message.startswith("checkpoint-000000000032 was not written to ")
    assert message.endswith("There is no earlier checkpoint.")
    run = the_run(tmp_path)
    assert policy_steps_in(run) == [16, 32]
    assert not list((run / "checkpoints").glob("*"))  # nothing half-written
