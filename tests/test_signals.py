"""Signals during a run of the command line, and environments that hang meanwhile."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import recipes.ppo
from kit.cli.launch import main
from kit.cli.signals import Signals, hold_saving
from kit.hooks import Hook
from kit.runs.recipe import Recipe
from kit.trainer.checkpoint import Checkpoints
from tests.short_runs import COMMON, SHORT, policy_steps_in, the_run, tiny_config
from tests.waiting import wait_until

RUN = [*SHORT["ppo"], *COMMON, "log_every=16", "checkpoint_every=1000"]


class Sends(Hook):
    """Sends a signal to this process in the update of the second iteration."""

    operations = {"post_optim": "send"}  # noqa: RUF012

    def __init__(self, number: int) -> None:
        self.number, self.sent = number, False

    def send(self) -> None:
        if self.trainer.policy_steps == 32 and not self.sent:
            self.sent = True
            os.kill(os.getpid(), self.number)


def ppo(folder: Path, *words: str, number: int = 0) -> None:
    hooks = [Sends(number)] if number else []
    built = []

    def build(config):
        built.append(recipes.ppo.build(config, hooks=hooks))
        return built[0]

    main(recipes.ppo.Config, build, [*words, f"log_dir={folder / 'runs'}"])


@pytest.fixture(autouse=True)
def _handlers_stay_as_they_were():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_run_that_resumes_exactly(number, code, tmp_path, capfd):
    ppo(tmp_path / "whole", *RUN)
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        ppo(tmp_path, *RUN, number=number)
    assert stopped.value.code == code
    run, name = the_run(tmp_path), number.name
    said = [line for line in capfd.readouterr().err.splitlines() if line]
    assert said == [
        f"{name}: stopping after this iteration; a second signal stops the run immediately",
        f"stopped by {name} after 32 policy steps; resume it with: kit train ppo resume={run}",
    ]
    assert Checkpoints.latest(run / "checkpoints").name.endswith("-000000000032")
    assert policy_steps_in(run) == [16, 32]
    assert (run / "curve.png").is_file()
    ppo(tmp_path, f"resume={run}")
    rows = (run / "metrics.csv").read_bytes()
    assert rows == (the_run(tmp_path / "whole") / "metrics.csv").read_bytes()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_a_run_that_is_being_built(number, code, when, tmp_path, capfd):
    def build(config):
        built = recipes.ppo.build(config) if when == "after" else None
        os.kill(os.getpid(), number)
        return built

    with pytest.raises(SystemExit) as stopped:
        main(recipes.ppo.Config, build, [*RUN, f"log_dir={tmp_path / 'runs'}"])
    assert stopped.value.code == code
    assert capfd.readouterr().err == f"\nstopped by {number.name} before the run started\n"
    del stopped
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["while it is imported", "while it is built"])
def test_sigusr1_before_a_run_saves_its_first_iteration(when, tmp_path):
    def build(config):
        if when == "while it is built":
            os.kill(os.getpid(), signal.SIGUSR1)
        return recipes.ppo.build(config)

    before = signal.getsignal(signal.SIGUSR1)
    hold_saving()
    try:
        if when == "while it is imported":
            os.kill(os.getpid(), signal.SIGUSR1)
        main(recipes.ppo.Config, build, [*RUN, f"log_dir={tmp_path / 'runs'}"])
        os.kill(os.getpid(), signal.SIGUSR1)  # between two runs
        assert Signals.save_next
    finally:
        signal.signal(signal.SIGUSR1, before)
        Signals.save_next = False
    saved = sorted(path.name for path in (the_run(tmp_path) / "checkpoints").iterdir())
    assert saved == ["checkpoint-000000000016", "checkpoint-000000000064"]


@pytest.mark.parametrize(("command", "holds"), [("recipes.ppo", True), ("kit.evaluate", False)])
def test_recipe_command_blocks_sigusr1_from_first_import(command, holds, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-m"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", command])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGINT)
    try:
        exec(Path(recipes.__file__).read_text(), {})
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert (signal.SIGUSR1 in blocked) == holds


class SendsAtFirst(Hook):
    """Sends SIGTERM to this process before the first iteration."""

    operations = {"setup": "send"}  # noqa: RUF012

    def send(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_run_stopped_before_first_iteration_restarts_on_resume(tmp_path, capfd):
    def build(config):
        return recipes.ppo.build(config, hooks=[SendsAtFirst()])

    with pytest.raises(SystemExit):
        main(recipes.ppo.Config, build, [*RUN, f"log_dir={tmp_path / 'runs'}"])
    run = the_run(tmp_path)
    said = [line for line in capfd.readouterr().err.splitlines() if line]
    assert said == [
        "SIGTERM: stopping at the latest after the first iteration; "
        "a second signal stops the run immediately",
        f"stopped by SIGTERM after 0 policy steps; resume it with: kit train ppo resume={run}",
    ]
    ppo(tmp_path, f"resume={run}")
    assert policy_steps_in(run)[-1] == 64


def test_sigusr1_saves_checkpoint_and_run_continues(tmp_path):
    ppo(tmp_path, *RUN, number=signal.SIGUSR1)
    saved = sorted(path.name for path in (the_run(tmp_path) / "checkpoints").iterdir())
    assert saved == ["checkpoint-000000000032", "checkpoint-000000000064"]
    assert policy_steps_in(the_run(tmp_path)) == [16, 32, 48, 64]


def test_sigterm_ends_sweep_with_current_run(tmp_path):
    with pytest.raises(SystemExit) as stopped:
        ppo(tmp_path, *RUN, "--multirun", "seed=0,1", number=signal.SIGTERM)
    assert stopped.value.code == 143
    assert the_run(tmp_path).name.endswith("-0-s0")


def test_signal_reports_nothing_saved_without_log_dir(tmp_path, capfd):
    def build(config):
        return recipes.ppo.build(config, hooks=[Sends(signal.SIGTERM)])

    with pytest.raises(SystemExit):
        main(recipes.ppo.Config, build, [*RUN, "log_dir=null"])
    assert capfd.readouterr().err.endswith(
        "\nstopped by SIGTERM after 32 policy steps; nothing was saved (log_dir=null)\n"
    )


def test_keyboard_interrupt_without_signal_propagates(tmp_path):
    class Interrupts(Sends):
        def send(self) -> None:
            raise KeyboardInterrupt

    trainer = recipes.ppo.build(tiny_config(tmp_path), hooks=[Interrupts(0)])
    signals = Signals(Recipe("recipes.ppo"))
    signals.begin(trainer)
    with pytest.raises(KeyboardInterrupt), signals.handled():
        trainer.run()


@pytest.mark.parametrize(
    "words",
    [
        ["env.kwargs.interrupts=self"],
        ["env.kwargs.interrupts=parent", "env.vectorization=async", "env.kwargs.num_workers=1"],
        ["env.kwargs.interrupts=parent", "collector=async"],
    ],
    ids=["in this process", "in workers", "in the process that collects"],
)
def test_ctrl_c_does_not_wait_for_hanging_env(words, tmp_path, capfd):
    with pytest.raises(SystemExit) as stopped:
        ppo(tmp_path, *RUN, "env.id=tests.hanging:Hangs-v0", "env.kwargs.hangs_in=20", *words)
    assert stopped.value.code == 130
    assert " because environments hang (set env.step_timeout=SECONDS)" in capfd.readouterr().err


SECOND = """
import os, signal, sys, threading
import recipes.ppo
from kit.cli.launch import main
from kit.cli.signals import Signals
from kit.hooks import Hook

class Twice(Hook):
    operations = {"post_optim": "send"}
    def send(self):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        print("not reached", flush=True)

main(recipes.ppo.Config, lambda config: recipes.ppo.build(config, hooks=[Twice()]), sys.argv[1:])
"""


def test_second_signal_ends_run_immediately(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", SECOND, *RUN, f"log_dir={tmp_path}/runs"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (-signal.SIGTERM, "")
    assert not (the_run(tmp_path) / "checkpoints").exists()


# ---------------------------------------------------------------------- processes of launchers
LAUNCHES = """
import subprocess, sys, time
run = subprocess.Popen([sys.executable, "-W", "ignore", "-c", *sys.argv[1:]])
print(run.pid, flush=True)
time.sleep(3600)
"""
LAUNCHED = """
import sys, time
import recipes.ppo
from kit.cli.launch import main
from kit.cli.signals import stop_with_parent

class SlowTerminal:  # as on a machine with too much to do
    def write(self, text):
        time.sleep(0.5)
        return sys.__stderr__.write(text)
    def __getattr__(self, name):
        return getattr(sys.__stderr__, name)

sys.stderr = SlowTerminal()
stop_with_parent()
main(recipes.ppo.Config, recipes.ppo.build, sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("to", "number"),
    [("launcher", signal.SIGKILL), ("all", signal.SIGTERM)],
)
def test_launched_run_saves_checkpoint_when_launcher_ends(to, number, tmp_path):
    words = [
        *RUN,
        "steps.total_policy_steps=1_000_000",
        "log_every=160",
        f"log_dir={tmp_path}/runs",
    ]
    command = [sys.executable, "-c", LAUNCHES, LAUNCHED, *words]
    output = (tmp_path / "output").open("w")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=output, start_new_session=True
    ) as launcher:
        pid = int(launcher.stdout.readline())
        wait_until(lambda: [*tmp_path.glob("runs/*/*/*/metrics.csv")], "the run's first row")
        (os.killpg if to == "all" else os.kill)(launcher.pid, number)
        launcher.wait()
        wait_until(lambda: not is_running(pid), "the run's end")
    run = the_run(tmp_path)
    assert Checkpoints.latest(run / "checkpoints") is not None
    assert (run / "curve.png").is_file()
    assert not (run / "lock").exists()
    assert "stopped by SIGTERM after" in (tmp_path / "output").read_text()


def is_running(pid: int) -> bool:
    """Whether there is such a process, which is no child of this one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
