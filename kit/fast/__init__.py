"""Trace functions of tensors once and replay them without Python."""
