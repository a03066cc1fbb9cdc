"""Attempts at random configurations of a recipe, in a process of their own that may die or hang."""

from __future__ import annotations

import dataclasses
import importlib
import json
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

SECONDS = 300.0
"""Longer than any attempt takes, many times over; what takes longer hangs."""


class Attempt(NamedTuple):
    """What became of a configuration."""

    number: int
    outcome: str
    """``done``, ``refused``, ``raised``, ``died`` or ``hangs``."""
    text: str
    """The refusal, or the stack trace."""
    values: dict[str, Any]


def attempts(recipe: str, numbers: range, *, run: bool = False) -> Iterator[Attempt]:
    """Yield attempts; a process that dies or hangs is replaced by another.

    Args:
        recipe: module with ``Config`` and ``build``.
        numbers: of the attempts; each is the seed of its own.
        run: whether what was built is run.
    """
    start = numbers.start
    while start < numbers.stop:
        command = [sys.executable, "-m", "tests.fuzz.attempts", recipe, str(start)]
        command += [str(numbers.stop), "run" if run else "build"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as made:
            for answer in _answers(made):
                yield answer
                start = answer.number + 1
            outcome = "hangs" if made.poll() is None else "died"
            made.kill()
        if start < numbers.stop:
            code = f"exit code {made.returncode}"
            yield Attempt(start, outcome, code, configuration(recipe, start))
            start += 1


def _answers(process: subprocess.Popen[str]) -> Iterator[Attempt]:
    """Yield the lines of a process until it ends, or is silent for too long."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        first = True
        while waiting.select(SECONDS * (3 if first else 1)):
            line = process.stdout.readline()
            if not line:
                process.wait()
                return
            first = False
            if line.startswith("{"):
                answer = json.loads(line)
                yield Attempt(**{**answer, "values": answer["values"]})


def configuration(recipe: str, number: int) -> dict[str, Any]:
    """The values of an attempt."""
    from tests.fuzz.random_configs import random_config

    draw = random.Random(f"{recipe} {number}")
    config_class = importlib.import_module(recipe).Config
    return random_config(config_class, draw, hostile=draw.choice([0.0, 0.1, 0.5]))


def attempt(recipe: str, number: int, run: bool) -> Attempt:
    """Build, or run, one configuration in this process."""
    from kit.cli.launch import _EXPLAINED
    from kit.config.plain import from_plain
    from kit.trainer import PlanNotKept

    module, values = importlib.import_module(recipe), configuration(recipe, number)
    shown = {name: repr(value)[:300] for name, value in values.items()}
    accepted = tuple(error for error in _EXPLAINED if error is not PlanNotKept)
    try:
        make = from_plain if number % 2 else _unchecked
        trainer = module.build(make(module.Config, values))
        if run:
            trainer.run()  # which compares plan and ledger
        else:
            trainer.shutdown()
    except accepted as error:
        one_line = "\n" not in str(error)
        return Attempt(number, "refused" if one_line else "raised", str(error), shown)
    except Exception:
        return Attempt(number, "raised", traceback.format_exc()[-3000:], shown)
    return Attempt(number, "done", "", shown)


def _unchecked(cls: type, values: dict[str, Any]) -> Any:
    """A dataclass of any values, as it can be made in Python."""
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
    return cls(**made)


def main(recipe: str, first: str, last: str, mode: str) -> None:
    """Write a line for each attempt."""
    import tempfile
    from unittest import mock

    from tests.stored import read_stored

    warnings.simplefilter("ignore")
    os.chdir(tempfile.mkdtemp())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what environments print is no answer
    with mock.patch("kit.experiment.read_datasets", read_stored):
        for number in range(int(first), int(last)):
            out.write(json.dumps(attempt(recipe, number, mode == "run")._asdict()) + "\n")
            out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
