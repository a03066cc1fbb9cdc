"""What a user gets when a rank fails, hangs or differs."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.distributed.torchrun import Torchrun, free_port
from tests.short_runs import COMMON, SHORT

PPO = ["-m", "recipes.ppo", *SHORT["ppo"], *COMMON]
LONG = [*PPO, "steps.total_policy_steps=4_000_000", "checkpoint_every=64"]
pytestmark = pytest.mark.slow


def errors_in(text: str) -> list[str]:
    return re.findall(r"^error: (.*)$", text, re.MULTILINE)


def test_error_on_one_rank_is_shown_once_with_its_rank(tmp_path):
    wrapper = 'env.wrappers=["tests.distributed.broken:Raises"]'
    run = Torchrun([*LONG, wrapper, f"log_dir={tmp_path}"], tmp_path / "log")
    began = time.monotonic()
    assert run.ended() == 1
    (error,) = errors_in(run.text())
    assert error.startswith(f"rank 1 on {socket.gethostname()}: ")
    assert "the simulator is gone" in error
    assert time.monotonic() - began < 60


def test_hanging_rank_is_named_after_rank_timeout(tmp_path):
    wrapper = 'env.wrappers=["tests.distributed.broken:Hangs"]'
    run = Torchrun([*LONG, wrapper, "rank_timeout=4", f"log_dir={tmp_path}"], tmp_path / "log")
    run.ended()
    (error,) = errors_in(run.text())
    assert "rank 1 did not take part in" in error
    assert "within 4 seconds" in error


@pytest.mark.parametrize("victim", ["rank", "torchrun"])
def test_other_processes_end_after_kill(victim, tmp_path):
    run = Torchrun([*LONG, f"log_dir={tmp_path}"], tmp_path / "log")
    run.wait_for("ppo/*/*/checkpoints/checkpoint-*", tmp_path)
    pids = run.pids()
    os.kill(pids[1] if victim == "rank" else run.process.pid, signal.SIGKILL)
    began = time.monotonic()
    run.ended()
    assert time.monotonic() - began < 15
    if victim == "rank":
        assert len(errors_in(run.text())) <= 1


def test_termination_of_one_rank_saves_and_stops_all(tmp_path):
    run = Torchrun([*LONG, f"log_dir={tmp_path}"], tmp_path / "log")
    run.wait_for("ppo/*/*/checkpoints/checkpoint-*", tmp_path)
    os.kill(run.pids()[1], signal.SIGTERM)
    run.ended()
    assert errors_in(run.text()) == []
    assert "exitcode  : 143" in run.text()
    assert "torchrun --nproc-per-node 2 -m recipes.ppo resume=" in run.text()


def two_machines(tmp_path: Path, *words: list[str]) -> list[Torchrun]:
    options = ["--nnodes=2", "--master-addr=localhost", f"--master-port={free_port()}"]
    return [
        Torchrun(word, tmp_path / f"log{node}", 1, (*options, f"--node-rank={node}"))
        for node, word in enumerate(words)
    ]


def test_two_machines_train_one_run(tmp_path):
    command = [*PPO, f"log_dir={tmp_path}"]
    runs = two_machines(tmp_path, command, command)
    assert [run.ended() for run in runs] == [0, 0]
    (csv,) = tmp_path.glob("ppo/*/*/metrics.csv")
    alone = Torchrun([*PPO, f"log_dir={tmp_path / 'one'}"], tmp_path / "log")
    assert alone.ended() == 0
    (other,) = tmp_path.glob("one/ppo/*/*/metrics.csv")
    assert csv.read_bytes() == other.read_bytes()


def test_ranks_with_other_settings_are_rejected(tmp_path):
    command = [*PPO, f"log_dir={tmp_path}"]
    runs = two_machines(tmp_path, command, [*command, "gamma=0.5"])
    assert 0 not in [run.ended() for run in runs]
    (error,) = errors_in("".join(run.text() for run in runs))
    assert "gamma" in error
    assert "0.5" in error
    assert "0.99" in error


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--multirun", "seed=0,1"], "Start the sweep without torchrun"),
        (["steps=sb3"], "Start it without torchrun"),
        (["steps=sheeprl", "steps.world_size=3"], "torchrun --nproc-per-node 3"),
    ],
)
def test_setting_that_needs_other_processes_is_rejected(words, text, tmp_path):
    run = Torchrun(["-m", "recipes.ppo", *words, f"log_dir={tmp_path}"], tmp_path / "log")
    assert run.ended() == 1
    (error,) = errors_in(run.text())
    assert text in error


def test_run_of_two_ranks_is_not_resumed_by_one(tmp_path):
    words = [*PPO, f"log_dir={tmp_path}"]
    assert Torchrun([*words, "checkpoint_every=64"], tmp_path / "log").ended() == 0
    run = Torchrun(["-m", "recipes.ppo", "resume=latest", f"log_dir={tmp_path}"], tmp_path / "b", 1)
    assert run.ended() == 1
    (error,) = errors_in(run.text())
    assert "was written by 2 processes, but 1 run" in error
    assert "torchrun --nproc-per-node 2" in error
