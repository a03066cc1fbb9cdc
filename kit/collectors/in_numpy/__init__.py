"""Small policies on the host: their recorded operations, made by NumPy."""

from kit.collectors.in_numpy.calls import NotInNumpy
from kit.collectors.in_numpy.program import NumpyProgram

__all__ = ["NotInNumpy", "NumpyProgram"]
