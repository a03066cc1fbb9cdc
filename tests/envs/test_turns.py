"""Handing the turn to another process and back."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from kit.envs.backends import turns
from kit.envs.backends.turns import SIZE, WAKE, Turns, can_look, receive


@pytest.fixture(params=["looks", "sleeps"])
def sides(request, monkeypatch):
    """The side that asks, the side that answers, and their ends of the pipe."""
    if request.param == "sleeps":
        monkeypatch.setattr(turns, "_LOOKS", (0, 0))
    memory = multiprocessing.RawArray("q", SIZE)
    ours, theirs = multiprocessing.Pipe()
    yield Turns(memory, ours), Turns(memory, theirs), ours, theirs
    ours.close()
    theirs.close()


def answering(side, messages):
    """A thread that answers once for each message, and notes what it was asked by."""
    seen = []

    def serve():
        for message in messages:
            seen.append(side.wait_to_be_asked())
            side.answer(message)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread, seen


def test_each_question_has_one_answer(sides):
    asker, answerer, *_ = sides
    messages = [b"", b"first", b"", b"", b"second"] * 20
    thread, seen = answering(answerer, messages)
    answers = []
    for _ in messages:
        asker.ask()
        answers.append(asker.wait_for_answer())
    thread.join()
    assert answers == messages
    assert seen == [b""] * len(messages)


def test_what_was_written_before_the_turn_can_be_read_after_it(sides):
    asker, answerer, *_ = sides
    shared = [0]

    def add():
        for _ in range(200):
            answerer.wait_to_be_asked()
            shared[0] += 1
            answerer.answer(b"")

    thread = threading.Thread(target=add)
    thread.start()
    for count in range(1, 201):
        asker.ask()
        asker.wait_for_answer()
        assert shared == [count]
    thread.join()


def test_another_message_reaches_the_side_that_waits_to_be_asked(sides):
    _, answerer, ours, _ = sides
    ours.send_bytes(WAKE)
    ours.send_bytes(b"reset")
    assert answerer.wait_to_be_asked() == b"reset"


def test_wakes_are_skipped_where_a_message_is_expected(sides):
    *_, ours, theirs = sides
    for message in (WAKE, WAKE, b"ready"):
        theirs.send_bytes(message)
    assert receive(ours) == b"ready"


@pytest.mark.parametrize("side", ["asks", "answers"])
def test_the_end_of_the_other_side_is_noticed(sides, side):
    asker, answerer, ours, theirs = sides
    if side == "asks":
        theirs.close()
        asker.ask()
        with pytest.raises((EOFError, OSError)):
            asker.wait_for_answer()
    else:
        ours.close()
        with pytest.raises((EOFError, OSError)):
            answerer.wait_to_be_asked()


def test_a_side_looks_shorter_after_long_turns_and_longer_after_short_ones(monkeypatch):
    memory = multiprocessing.RawArray("q", SIZE)
    ours, theirs = multiprocessing.Pipe()
    asker, answerer = Turns(memory, ours), Turns(memory, theirs)
    most = asker._looks

    def wait() -> None:
        asker.ask()
        timer = threading.Timer(0.1, lambda: answerer.answer(b""))
        timer.start()
        asker.wait_for_answer()
        timer.join()

    wait()
    wait()
    assert asker._looks == most // 4
    monkeypatch.setattr(turns, "_SHORT", 60.0)
    wait()
    assert asker._looks == most


def test_looking_takes_a_core_for_each_side(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    assert [can_look(processes) for processes in (1, 2, 3)] == [True, True, False]


def test_looking_takes_a_processor_that_keeps_the_order_of_writing(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not can_look(1)
