"""The command ``kit recipes``: list the built-in recipes."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence

from kit.runs.recipe import builtin_recipes


def recipe_lines() -> list[str]:
    """Return one line per built-in recipe, with its name and the first line of its docstring."""
    files = builtin_recipes()
    width = max(map(len, files), default=0)
    lines = []
    for name, file in files.items():
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        lines.append(f"{name:<{width}}  {docstring.partition(chr(10))[0].rstrip('.')}")
    return lines


def main(words: Sequence[str]) -> int:
    """Run the command ``kit recipes``."""
    parser = argparse.ArgumentParser(prog="kit recipes", description="List the built-in recipes.")
    parser.parse_args(words)
    print("\n".join(recipe_lines()))
    print("\ntrain one:  kit train ppo env.id=CartPole-v1")
    print("copy one:   kit new ppo my_ppo.py")
    return 0
