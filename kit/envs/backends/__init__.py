"""Backends that step a batch of environments and write the results to preallocated arrays."""
