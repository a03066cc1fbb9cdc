"""What a run shows in the terminal: its plan, its progress, its ledger."""

from __future__ import annotations

import io

import pytest
from rich.console import Console as RichConsole

from kit.hooks import Console
from tests.tiny import on_policy_plan, ppo_trainer


def shown(plan=None, terminal: bool = False, **parts) -> str:
    """Run with a console and return what it printed."""
    hook = Console("a title")
    stream = io.StringIO()
    hook.console = RichConsole(
        file=stream, force_terminal=terminal, width=200, highlight=False, soft_wrap=True
    )
    ppo_trainer(plan or on_policy_plan(), hooks=[hook], **parts).run()
    return stream.getvalue()


def test_console_shows_plan_progress_and_ledger_in_order():
    text = shown(log_every=16)
    plan, rest = text.split(" 25%")
    assert plan.startswith("\na title\n")
    assert on_policy_plan().table() in plan
    assert "counted" in rest
    assert rest.rstrip().splitlines()[-1].startswith("seconds: ")


def test_console_prints_line_per_tenth_without_terminal():
    text = shown(on_policy_plan(total_policy_steps=640), log_every=16)
    lines = [line.split() for line in text.splitlines() if "policy steps " in line and "%" in line]
    assert [line[0] for line in lines] == [
        "16", "64", "128", "192", "256", "320", "384", "448", "512", "576", "640",
    ]  # fmt: skip
    assert "\x1b" not in text
    assert "\r" not in text


def test_console_shows_progress_bar_in_terminal():
    text = shown(terminal=True)
    assert "\x1b" in text
    assert "64 policy steps" in text
    assert "100%" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.04321, "0.0432"), (-0.7432, "-0.743"), (0.0, "0.0"), (9.94, "9.9"), (1234.5, "1,234"),
     (float("inf"), "inf")],
)  # fmt: skip
def test_console_formats_returns_by_magnitude(value, text):
    hook, stream = Console(), io.StringIO()
    hook.console = RichConsole(file=stream, soft_wrap=True)
    hook.trainer = ppo_trainer(on_policy_plan())
    hook.trainer.journal.latest["episode/return"] = value
    hook.show({"policy_steps": 16})
    assert stream.getvalue().endswith(f"  return {text}\n")


def test_console_shows_evaluation_without_std():
    hook, stream = Console(), io.StringIO()
    hook.console = RichConsole(file=stream, soft_wrap=True)
    hook.trainer = ppo_trainer(on_policy_plan(evaluation_episodes=2))
    hook.trainer.journal.latest["evaluation/return"] = 7.0
    hook.end()
    assert "\nlast evaluation: return 7.0 over 2 episodes\n" in stream.getvalue()


def test_console_shows_reason_of_early_stop():
    hook = Console("a title")
    stream = io.StringIO()
    hook.console = RichConsole(file=stream, width=200, soft_wrap=True)
    trainer = ppo_trainer(on_policy_plan(), hooks=[hook])
    trainer.register_op("post_steps", lambda: trainer.request_stop("enough [seen]"))
    trainer.run()
    assert "stopped early: enough [seen]" in stream.getvalue()


def test_console_prints_folder_with_brackets_unchanged(tmp_path):
    folder = tmp_path / "[bold]"
    text = shown(folder=folder)
    assert f"run folder: {folder}" in text


def test_run_without_console_prints_nothing(capsys):
    ppo_trainer(on_policy_plan()).run()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("terminal", [False, True])
def test_console_shows_plan_of_unknown_length(terminal):
    plan = on_policy_plan(total_policy_steps=None, iterations=3)
    assert "seconds: " in shown(plan, terminal=terminal)
