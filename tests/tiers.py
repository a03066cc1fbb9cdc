"""Test tiers by duration: fast, slow and nightly.

``tests/durations.json`` has the CPU seconds of each test, with those of processes that it starts.
A test above :data:`LIMIT` is slow unless it is marked ``guard``; ``nightly`` and ``gpu`` are marked
by hand. ``make durations`` writes the file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_name("durations.json")
LIMIT = 0.3
"""Most CPU seconds of a fast test."""
STARTUP = 25.0
"""CPU seconds in which one pytest worker imports torch and collects the tests."""

ADVICE = """\
These tests are neither fast, slow nor guards:
  {tests}
Run `make durations` and commit tests/durations.json. Mark a test `guard` if it must stay in the
fast suite although it takes more than {limit} CPU seconds."""


def read() -> dict[str, dict[str, float]]:
    """Return CPU seconds by file and test."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def seconds(nodeid: str, durations: Mapping[str, Mapping[str, float]]) -> float | None:
    """Return the CPU seconds of a test, or ``None`` if they are not recorded.

    A parametrised test has one entry if all of its cases are fast, else one for each case. A case
    that is not recorded counts as the slowest case.
    """
    file, _, test = nodeid.partition("::")
    recorded = durations.get(file, {})
    if test in recorded:
        return recorded[test]
    name = test.partition("[")[0]
    cases = [cpu for case, cpu in recorded.items() if case.partition("[")[0] == name]
    return max(cases, default=None)


def write(measured: Mapping[str, float], guards: set[str]) -> None:
    """Write the durations of the tests that ran, and keep those of others.

    The sums of the tiers are those of the first run without a file, which is one of all tests.

    Args:
        measured: CPU seconds by node id.
        guards: node ids of the tests that are marked ``guard``.
    """
    tests: dict[str, dict[str, float]] = {}
    for nodeid, cpu in measured.items():
        tests.setdefault(nodeid.partition("[")[0], {})[nodeid] = round(cpu, 2)
    durations = read()
    for name, cases in tests.items():
        slowest = max(cases.values())
        file, _, test = name.partition("::")
        recorded = durations.setdefault(file, {})
        for old in [one for one in recorded if one.partition("[")[0] == test]:
            del recorded[old]
        for nodeid, cpu in {name: slowest}.items() if slowest <= LIMIT else cases.items():
            recorded[nodeid.partition("::")[2]] = cpu
    fast = sum(cpu for nodeid, cpu in measured.items() if cpu <= LIMIT or nodeid in guards)
    sums = {"fast": round(fast), "slow": round(sum(measured.values()) - fast)}
    durations.setdefault("suite", sums)
    FILE.write_text(json.dumps(durations, indent=0, sort_keys=True) + "\n")


def estimate(tier: str) -> str:
    """Return how long a tier takes on this machine, as text."""
    cores = len(os.sched_getaffinity(0))
    minutes = (read()["suite"][tier] / cores + STARTUP) / 60
    return f"{tier} tests: about {minutes:.1f} minutes on {cores} cores"


if __name__ == "__main__":
    print(estimate(sys.argv[1]), flush=True)
