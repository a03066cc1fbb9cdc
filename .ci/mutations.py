"""Mutate random places of the modules that must be exact, and list the mutants that tests miss.

    python .ci/mutations.py [--number 200] [--seed 0]

Cosmic Ray makes the mutations, one at a time, in a copy of the working tree. A surviving mutant is
either equivalent to the original or shows a missing test.
"""

from __future__ import annotations

import argparse
import ast
import functools
import glob
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome

ROOT = Path(__file__).parents[1]
TIMEOUT = 900
"""Seconds after which the tests of a mutant count as failed."""

SUBJECTS = {
    "kit/steps/*.py": "tests/steps tests/collectors/test_vector.py",
    "kit/advantages.py": "tests/test_advantages.py tests/test_trainer.py",
    "kit/buffers/*.py": "tests/buffers tests/test_offline_recipes.py",
    "kit/collectors/rollout*.py": "tests/collectors/test_vector.py tests/collectors/test_episode.py"
    " tests/collectors/test_conformance.py",
    "kit/trainer/checkpoint.py": "tests/test_checkpoint.py tests/test_checkpoint_pieces.py",
    "kit/trainer/[pr]*.py": "tests/test_checkpoint.py tests/test_checkpoint_pieces.py"
    " tests/test_resume.py",
}
"""Tests by the modules that they guard."""


def mutations_of(pattern: str) -> list[list[MutationSpec]]:
    """Return the mutations of all matching modules, grouped by their place in the source."""
    places: dict[tuple[object, ...], list[MutationSpec]] = {}
    folder = tempfile.mkdtemp(prefix="mutations-")
    with use_db(f"{folder}/session.sqlite", WorkDB.Mode.create) as session:
        init([Path(name) for name in sorted(glob.glob(pattern))], session, {})
        for item in session.work_items:
            (mutation,) = item.mutations
            if not _is_annotation(mutation):
                place = (mutation.module_path, mutation.start_pos, mutation.end_pos)
                places.setdefault(place, []).append(mutation)
    return [*places.values()]


def _is_annotation(mutation: MutationSpec) -> bool:
    """Return whether a mutation changes an annotation, which Python does not evaluate."""
    spans = _annotations(mutation.module_path)
    return any(first <= mutation.start_pos < last for first, last in spans)


@functools.cache
def _annotations(path: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return first and last position (line and column) of all annotations of a module."""
    annotations: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            annotations.append(node.returns)
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            annotations.append(node.annotation)
    return [
        ((one.lineno, one.col_offset), (one.end_lineno or 0, one.end_col_offset or 0))
        for one in annotations
        if one is not None
    ]


def _enter_copy() -> None:
    """Let this process work in its own copy of the files that git knows."""
    copy = Path(tempfile.mkdtemp(prefix="mutants-"))
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "kit", "recipes"], check=True)


def _survivor(job: tuple[MutationSpec, str]) -> str | None:
    """Print and return the change of a mutant that all tests accept."""
    mutation, tests = job
    command = (
        f"{sys.executable} -m pytest -x -p no:cacheprovider -m 'not nightly and not gpu' {tests}"
    )
    result = mutate_and_test([mutation], command, TIMEOUT)
    survived = result.test_outcome == TestOutcome.SURVIVED
    print(f"\n{result.diff}" if survived else ".", end="", flush=True)
    return result.diff if survived else None


def main() -> None:
    """Sample mutants in proportion to the places of each subject, and test them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    os.chdir(ROOT)
    random.seed(options.seed)
    places = [(place, tests) for p, tests in SUBJECTS.items() for place in mutations_of(p)]
    drawn = random.sample(places, options.number)
    jobs = [(random.choice(place), tests) for place, tests in drawn]
    with multiprocessing.Pool(options.jobs, initializer=_enter_copy) as pool:
        survivors = [diff for diff in pool.imap_unordered(_survivor, jobs) if diff]
    print(f"\n{len(survivors)} of {len(jobs)} mutants survived")


if __name__ == "__main__":
    main()
