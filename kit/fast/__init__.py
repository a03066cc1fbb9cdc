"""Functions of tensors, recorded once and run without Python."""
