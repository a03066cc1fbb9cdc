"""Saved runs: run folders, trusted modules, saved policies and comparisons."""
