"""Saved runs: their folders, what they may import, and the policies in them."""
