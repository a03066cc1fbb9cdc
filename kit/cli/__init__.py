"""Command-line interfaces of ``kit`` and of recipes."""
