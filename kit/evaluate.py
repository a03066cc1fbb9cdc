"""The policies of saved runs, and the command that evaluates them: ``python -m kit.evaluate``."""

from __future__ import annotations

from kit.cli.evaluate import main
from kit.runs.saved_policy import SavedPolicy, SavedRun

__all__ = ["SavedPolicy", "SavedRun", "main"]

if __name__ == "__main__":
    main()
