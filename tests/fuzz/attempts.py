"""Attempts at random configurations of a recipe, in a process of their own that may die or hang."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import multiprocessing
import os
import random
import selectors
import subprocess
import sys
import traceback
import typing
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

SECONDS = 300.0
"""Longer than any attempt takes, many times over; what takes longer hangs."""
ATTEMPTS_OF_A_PROCESS = 1_000
SHORT = 5_000
"""Policy steps, gradient steps and evaluation episodes of a run, at most, for it to be run."""


class Attempt(NamedTuple):
    """What became of a configuration."""

    number: int
    outcome: str
    """``built``, ``ran``, ``refused``, ``raised``, ``died`` or ``hangs``."""
    text: str
    """The refusal, or the stack trace."""
    values: dict[str, Any]


def attempts(recipe: str, numbers: range, *, run: bool = False) -> Iterator[Attempt]:
    """Yield attempts; a process that dies or hangs is replaced by another.

    Args:
        recipe: module with ``Config`` and ``build``.
        numbers: of the attempts; each is the seed of its own.
        run: whether what was built is run, if it is short.
    """
    start = numbers.start
    while start < numbers.stop:
        stop = min(start + ATTEMPTS_OF_A_PROCESS, numbers.stop)
        command = [sys.executable, "-m", "tests.fuzz.attempts", recipe, str(start), str(stop)]
        command += ["run" if run else "build"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as made:
            try:
                for answer in _answers(made):
                    yield answer
                    start = answer.number + 1
                outcome = "hangs" if made.poll() is None else "died"
            finally:
                made.kill()
        if start < stop:
            code = f"exit code {made.returncode}"
            yield Attempt(start, outcome, code, configuration(recipe, start, run))
            start += 1


def _answers(process: subprocess.Popen[str]) -> Iterator[Attempt]:
    """Yield the lines of a process until it ends, or is silent for too long."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        while waiting.select(SECONDS):
            line = process.stdout.readline()
            if not line:
                process.wait()
                return
            yield Attempt(**json.loads(line))


def configuration(recipe: str, number: int, run: bool) -> dict[str, Any]:
    """The values of an attempt; one to be run has no compiler."""
    from tests.fuzz.random_configs import random_config

    draw = random.Random(f"{recipe} {number}")
    config_class = importlib.import_module(recipe).Config
    values = random_config(config_class, draw)
    return {**values, "compile": "auto"} if run and values["compile"] is True else values


def attempt(recipe: str, number: int, run: bool) -> Attempt:
    """Build, or run, one configuration in this process: as plain values, in Python, by command.

    An error refuses it, by whomever it is raised, but for a plan that was not kept.
    """
    from kit.trainer import PlanMismatchError

    values = configuration(recipe, number, run)
    shown = {name: repr(value)[:300] for name, value in values.items()}
    module, outcome = importlib.import_module(recipe), []

    def build(config: Any) -> Any:
        trainer = module.build(config)
        short = run and is_short(trainer.plan, values.get("imagination_horizon", 1))
        outcome.append("ran" if short else "built")
        if not short:
            trainer.run = trainer.shutdown
        return trainer

    make = _by_command if number % 100 == 0 else (_from_values, _in_python)[number % 2]  # by cost
    try:
        make(module.Config, build, values)
    except BaseException as error:
        fine = isinstance(error, Exception) and not isinstance(error, PlanMismatchError)
        text = traceback.format_exc()[-3000:]
        return Attempt(number, "refused" if fine else "raised", text, shown)
    return Attempt(number, outcome[0], "", shown)


@contextlib.contextmanager
def processes_are_forked() -> Iterator[None]:
    """Let collectors and environments begin their processes without an import of torch each."""
    fork = multiprocessing.get_context("fork")
    with (
        mock.patch("torch.multiprocessing.get_context", return_value=fork),
        mock.patch("kit.envs.backends.workers._CONTEXT", fork),
    ):
        yield


def is_short(plan: Any, imagined: int) -> bool:
    """Whether a run takes seconds, where a gradient step imagines so many policy steps."""
    if not plan.is_exact or plan.total_policy_steps > SHORT:
        return bool(plan.total_policy_steps <= SHORT)
    end = plan.after(plan.iterations)
    work = end.policy_steps + end.gradient_steps * imagined
    return bool(work + end.evaluations * plan.evaluation_episodes <= SHORT)


# ---------------------------------------------------------------------- three ways to a run
def _from_values(cls: type, build: Any, values: dict[str, Any]) -> None:
    """From plain values, as of a file of settings."""
    from kit.config.plain import from_plain

    build(from_plain(cls, values)).run()  # which compares plan and ledger


def _in_python(cls: type, build: Any, values: dict[str, Any]) -> None:
    """From a dataclass of any values."""
    from kit.dialects import dialect

    hints = typing.get_type_hints(cls)
    made = {}
    for name, value in values.items():
        group = next(iter(typing.get_args(hints[name])), hints[name])
        if isinstance(value, dict) and "dialect" in value:
            settings = dict(value)
            made[name] = dialect(settings.pop("dialect")).from_settings(settings)
        elif isinstance(value, dict) and dataclasses.is_dataclass(group):
            made[name] = group(**value)
        else:
            made[name] = value
    build(cls(**made)).run()


def _by_command(cls: type, build: Any, values: dict[str, Any]) -> None:
    """From the words of a command line."""
    from kit.cli.launch import main
    from kit.config.plain import to_plain
    from kit.steps import SettingError
    from kit.steps.values import flat

    defaults, given = flat(to_plain(cls())), flat(values)
    words = [f"{n}={word(v)}" for n, v in given.items() if n not in defaults or v != defaults[n]]
    if "dialect" in values["steps"]:
        words = [w for w in words if not w.startswith("steps.dialect=")]
        words.append(f"steps={values['steps']['dialect']}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            main(cls, build, words)
    except SystemExit as ended:
        text = said.getvalue().strip()
        if ended.code != 1 or not text.startswith("error: ") or "Traceback" in text:
            raise
        raise SettingError("command line", "", text) from None


def word(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(word, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{word(v)}" for key, v in value.items()) + "}"
    plain = {"None": "null", "True": "true", "False": "false"}
    return plain.get(str(value), str(value))


def main(recipe: str, first: str, last: str, mode: str) -> None:
    """Write a line for each attempt."""
    import tempfile

    from tests.stored import read_stored

    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what runs and environments print is no answer
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with processes_are_forked(), mock.patch("kit.experiment.read_datasets", read_stored):
            for number in range(int(first), int(last)):
                out.write(json.dumps(attempt(recipe, number, mode == "run")._asdict()) + "\n")
                out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
