"""The command ``kit``, also as ``python -m kit``."""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Sequence

from kit.cli.terminal import terminal

MODULES = {
    "kit.cli.steps": "explain, translate and compare hyper-parameters of several libraries",
    "kit.cli.compare": "compare saved runs over their seeds, as a table and as a picture",
    "kit.cli.evaluate": "play the policy of a saved run, and record it to video",
    "kit.cli.record": "record the policy of a saved run to a data set",
    "kit.cli.export": "write the policy of a saved run to a file for PyTorch or ONNX alone",
}
"""Descriptions of commands by module, imported late: ``kit steps`` needs no PyTorch."""
COMMANDS = {module.rpartition(".")[2]: module for module in MODULES}


@terminal()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, or 2 for invalid arguments.

    Args:
        arguments: words after ``kit``; ``None``: arguments of the process.
    """
    parser = argparse.ArgumentParser(
        prog="kit",
        description="A modular component kit on TorchRL and tensordict.",
        epilog="\n".join(
            ["commands:", *(f"  {name:<9} {MODULES[module]}" for name, module in COMMANDS.items())]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, help="see below; each has its own --help")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="arguments of the command")
    given = parser.parse_args(arguments)
    if arguments is None:  # this process is the command's own
        gc.disable()  # imports make 400,000 objects and no garbage, for which Python would look
    module = importlib.import_module(COMMANDS[given.command])
    if arguments is None:
        gc.freeze()
        gc.enable()
    return int(module.main(given.words) or 0)


if __name__ == "__main__":
    sys.exit(main())
