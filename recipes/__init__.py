"""One file per algorithm, runnable and importable."""
