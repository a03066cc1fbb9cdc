"""One file per algorithm, runnable and importable."""

from __future__ import annotations

import gc
import sys

if sys.argv[:1] == ["-m"]:  # as a command: python -m recipes.ppo
    # Importing PyTorch and TorchRL makes a million objects, none of them garbage; looking for some
    # takes a fifth of the time. The command line collects again before it does anything.
    gc.disable()
