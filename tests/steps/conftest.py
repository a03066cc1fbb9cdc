"""Makes the helpers beside it importable from the folders below it too."""
