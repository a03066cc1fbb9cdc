"""Policies of saved runs, and the command ``python -m kit.evaluate``, which evaluates them."""

from __future__ import annotations

from kit.cli.evaluate import main
from kit.runs.saved_policy import SavedPolicy, SavedRun

__all__ = ["SavedPolicy", "SavedRun", "main"]

if __name__ == "__main__":
    main()
