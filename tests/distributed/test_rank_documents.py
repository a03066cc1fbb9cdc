"""The torchrun commands in the documentation run as they stand, in a shortened form."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.distributed.torchrun import Torchrun, free_port
from tests.short_runs import rows_in
from tests.test_docs import PYTHON, commands, shortened

COMMANDS = [
    pytest.param(shlex.split(text), id=f"{page}:{line}")
    for page, line, text in commands()
    if text.startswith("torchrun ")
]
ALONE = [one for one in COMMANDS if "--nnodes" not in one.values[0]]
ON_MACHINES = [one.values[0] for one in COMMANDS if "--nnodes" in one.values[0]]
SCRIPTS = [one for one in PYTHON if "Ranks.from_environment" in one.values[2]]


def split(words: list[str]) -> tuple[dict[str, str], str, list[str]]:
    """Return torchrun's options, the module and its arguments."""
    program, *words = words
    assert program == "torchrun"
    start = words.index("-m")
    options = dict(zip(words[:start:2], words[1:start:2]))
    return options, words[start + 1], words[start + 2 :]


def complete(folder: Path, run: Torchrun) -> None:
    """Check that one run was made, as planned."""
    assert run.ended() == 0, run.text()[-3_000:]
    (table,) = folder.glob("*/*/*/plan.txt")
    (policy_steps,) = (line for line in table.read_text().splitlines() if "policy steps " in line)
    planned, counted = policy_steps.split()[-2:]
    assert planned == counted == f"{int(rows_in(table.parent)[-1]['policy_steps']):,}"


@pytest.mark.nightly
@pytest.mark.parametrize("words", ALONE)
def test_documented_command_runs(words, tmp_path):
    options, module, arguments = split(words)
    ranks, folder = int(options.pop("--nproc-per-node")), tmp_path / "runs"
    more = tuple(f"{name}={value}" for name, value in options.items())
    if "resume=latest" in arguments:
        first = [*shortened(module, []), f"log_dir={folder}", "time_limit=0.01"]
        run = Torchrun(["-m", module, *first], tmp_path / "first", ranks)
        assert run.ended() == 0, run.text()[-3_000:]
    arguments = [*shortened(module, arguments), f"log_dir={folder}"]
    complete(folder, Torchrun(["-m", module, *arguments], tmp_path / "log", ranks, more))


def test_documented_commands_run_on_two_machines(tmp_path):
    runs = []
    port = free_port()
    for words in ON_MACHINES:
        options, module, arguments = split(words)
        assert options.pop("--master-addr") == "first-machine"
        assert int(options.pop("--nproc-per-node")) > 1
        options |= {"--master-addr": "localhost", "--master-port": str(port)}
        more = tuple(f"{name}={value}" for name, value in options.items())
        arguments = [word for word in shortened(module, arguments) if "log_dir" not in word]
        arguments = ["-m", module, *arguments, f"log_dir={tmp_path / 'runs'}"]
        runs.append(Torchrun(arguments, tmp_path / f"log{len(runs)}", 1, more))
    first, second = runs
    complete(tmp_path / "runs", first)
    assert second.ended() == 0


@pytest.mark.parametrize(("page", "line", "code"), SCRIPTS)
def test_documented_script_runs_on_two_ranks(page, line, code, tmp_path):
    (tmp_path / "script.py").write_text(code)
    run = Torchrun([str(tmp_path / "script.py")], tmp_path / "log")
    assert run.ended() == 0, run.text()[-3_000:]
