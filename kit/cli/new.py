"""The command ``kit new``: copy a built-in recipe to a file that you can change."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from kit.runs.recipe import builtin_file
from kit.steps import SettingError

_HEADER = '''\
"""{summary}

Copied from kit's recipe {name}. Run it:

{commands}

Change it: the fields of Config are the settings of the command line. build() creates the networks,
the loss and the optimizer; replace any of them with your own.
"""
'''


def copied(name: str, file: Path) -> str:
    """Return a built-in recipe's source code, with a header for the copy at the path ``file``.

    Raises:
        SettingError: if there is no such recipe.
    """
    text = builtin_file(name).read_text(encoding="utf-8")
    module = ast.parse(text)
    docstring = ast.get_docstring(module) or ""
    program = f"python {file}"
    commands = [
        f"    {line.strip()}".replace(f"kit train {name}", program)
        for line in docstring.splitlines()
        if line.strip().startswith("kit train") and "preset=" not in line  # presets are not copied
    ]
    summary = docstring.partition("kit train")[0].strip()
    header = _HEADER.format(summary=summary, name=name, commands="\n".join(commands))
    return header + "".join(text.splitlines(keepends=True)[module.body[0].end_lineno :])


def main(words: Sequence[str]) -> int:
    """Run the command ``kit new``. Return the exit code: 0, or 2 if nothing was copied."""
    parser = argparse.ArgumentParser(
        prog="kit new",
        description="Copy a built-in recipe to a file. Existing files are never overwritten.",
        epilog="List the recipes with: kit recipes",
    )
    parser.add_argument("recipe", help="name of the recipe, such as ppo")
    parser.add_argument("file", type=Path, metavar="FILE.py", help="file to create")
    given = parser.parse_args(words)
    file: Path = given.file
    try:
        if file.suffix != ".py":
            advice = f"Use {file.with_suffix('.py')}"
            raise SettingError("file", str(file), "A recipe is a Python file", advice)
        text = copied(given.recipe, file)
        with file.open("x", encoding="utf-8") as created:
            created.write(text)
    except FileExistsError:
        print(f"kit: {file} exists already. Choose another name.", file=sys.stderr)
        return 2
    except (SettingError, OSError) as error:
        print(f"kit: {error}", file=sys.stderr)
        return 2
    print(f"{file} is a copy of the recipe {given.recipe}. Run it with: python {file}")
    return 0
