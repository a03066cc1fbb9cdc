"""Terminals that show ASCII alone, and pipes whose reader has gone."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

import recipes.ppo
from kit.cli.launch import main
from tests.short_runs import COMMON, SHORT

KIT = [sys.executable, "-m", "kit", "steps"]


@pytest.mark.parametrize("words", [["words", "sb3"], ["words"], ["explain", "sb3"]])
def test_a_command_whose_reader_has_gone_ends_in_silence(words):
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run([*KIT, *words], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_a_run_whose_reader_has_gone_ends_in_silence(monkeypatch, capsys, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patched, os.fdopen(writer, "w") as stream:
        patched.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            main(recipes.ppo.Config, recipes.ppo.build,
                 [*SHORT["ppo"], *COMMON, "progress=true", f"runs={tmp_path}"])  # fmt: skip
    assert ended.value.code != 0
    assert capsys.readouterr().err == ""


def test_a_terminal_of_ascii_shows_question_marks(monkeypatch, tmp_path):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    words = [*SHORT["ppo"], *COMMON, "progress=true", f"runs={tmp_path}"]
    main(recipes.ppo.Config, recipes.ppo.build, words)
    assert b"last evaluation: return" in shown.buffer.getvalue()
    assert b" ? " in shown.buffer.getvalue()
