"""The ``kit`` command, also available as ``python -m kit``."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from kit import __version__
from kit.cli.terminal import terminal
from kit.steps.errors import close_to

COMMANDS = {
    "recipes": "list the built-in recipes",
    "train": "train a recipe",
    "new": "copy a recipe to a new file for editing",
    "evaluate": "evaluate the policy of a saved run, or record a video of it",
    "compare": "compare saved runs across seeds in a table and a plot",
    "record": "record episodes of a saved run in an offline dataset",
    "export": "export the policy of a saved run to PyTorch or ONNX",
    "steps": "explain and convert step settings from other libraries",
}
"""Command descriptions. Each command is a module in ``kit.cli``, imported when it runs."""

USAGE = """\
usage: kit COMMAND ...

RL recipes and components on TorchRL that count every step exactly.

commands:
{commands}

examples:
  kit train ppo env.id=CartPole-v1
  kit new ppo my_ppo.py
  kit evaluate latest

Run kit COMMAND --help for help on a command, or kit --version for the version."""


@terminal()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, or 2 for invalid arguments.

    Args:
        arguments: arguments after ``kit``. ``None``: command-line arguments of the process.
    """
    command, *words = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE.format(commands="\n".join(f"  {c:<9} {text}" for c, text in COMMANDS.items())))
        return 0
    if command == "--version":
        print(f"kit {__version__}")
        return 0
    if command not in COMMANDS:
        advice = " or ".join(close_to(command, [*COMMANDS])) or "kit --help"
        print(f"kit: There is no command {command!r}. Try: {advice}.", file=sys.stderr)
        return 2
    is_process = arguments is None
    if is_process:
        gc.disable()  # imports create 400,000 objects and no garbage
        if command == "train":  # SIGUSR1 would end the process before the run can handle it
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        if os.getcwd() not in sys.path and not sys.flags.safe_path:
            sys.path.append(os.getcwd())  # makes the user's modules importable, as in python -m kit
    module = importlib.import_module(f"kit.cli.{command}")
    if is_process:
        gc.freeze()
        gc.enable()
    return int(module.main(words) or 0)


if __name__ == "__main__":
    sys.exit(main())
