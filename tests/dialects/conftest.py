"""Makes the helpers beside it importable."""
