"""Losses that TorchRL does not have."""
