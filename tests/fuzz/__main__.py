"""Tries random settings of recipes and prints a table of what became of them.

python -m tests.fuzz
python -m tests.fuzz ppo sac --builds 1000 --runs 30
"""

from __future__ import annotations

import argparse
import pkgutil
import sys
from collections import Counter

import recipes
from tests.fuzz.attempts import attempts

RECIPES = [module.name for module in pkgutil.iter_modules(recipes.__path__)]
BUILDS, RUNS = 10_000, 300
WRONG = ("raised", "died", "hangs")
COLUMNS = ("recipe", "built", "refused", "ran, plan = ledger", "stack traces", "deaths", "hangs")


def tried(recipe: str, builds: int, runs: int) -> tuple[Counter[str], Counter[str]]:
    """Outcomes of so many builds, and of the attempts that make so many runs.

    What is neither a refusal nor a run is printed on the error stream.
    """
    built, ran = Counter[str](), Counter[str]()
    for found, numbers, run in ((built, range(builds), False), (ran, range(10**6, 10**7), True)):
        for attempt in attempts(f"recipes.{recipe}", numbers, run=run) if runs or not run else ():
            found[attempt.outcome] += 1
            if attempt.outcome in WRONG:
                print(recipe, *attempt, sep="\n", file=sys.stderr, flush=True)
            if found["ran"] == runs and run:
                break
    return built, ran


def main() -> None:
    """Print a row for each recipe, and fail if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--builds", type=int, default=BUILDS)
    parser.add_argument("--runs", type=int, default=RUNS)
    given = parser.parse_args()
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    print(*("| " + " | ".join(row) + " |" for row in rows), sep="\n")
    wrong = 0
    for recipe in given.recipes:
        built, ran = tried(recipe, given.builds, given.runs)
        counts = [built["built"], built["refused"], ran["ran"]]
        counts += [built[outcome] + ran[outcome] for outcome in WRONG]
        print("| " + " | ".join([recipe, *map("{:,}".format, counts)]) + " |", flush=True)
        wrong += sum(counts[-len(WRONG) :])
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
