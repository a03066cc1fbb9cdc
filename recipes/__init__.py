"""Recipes: one file per algorithm, runnable and importable."""

from __future__ import annotations

import gc
import signal
import sys

# sys.argv is ["-m", ...] while `python -m recipes.ppo` imports this package.
if sys.argv[:1] == ["-m"] and any(word.startswith("recipes.") for word in sys.orig_argv):
    # Importing PyTorch and TorchRL creates 400,000 objects and no garbage, but garbage collection
    # would take a fifth of the time. kit.cli.launch undoes the changes below.
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports prints no stack trace
    # SIGUSR1 would end the process, so the signal is blocked until `hold_saving` handles it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
