"""One file per algorithm, runnable and importable."""

from __future__ import annotations

import gc
import signal
import sys

# As Python has them while it imports this package for the command python -m recipes.ppo.
if sys.argv[:1] == ["-m"] and any(word.startswith("recipes.") for word in sys.orig_argv):
    # Importing PyTorch and TorchRL makes 400,000 objects, none of them garbage; looking for some
    # takes a fifth of the time. The command line undoes both before it does anything.
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends imports without a stack trace
    # SIGUSR1, which would end the process, waits for the command line (`hold_saving`).
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
