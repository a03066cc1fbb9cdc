"""Command-line interfaces for ``kit`` and its recipes."""
