"""Measurements: each module writes its table into ``benchmarks/results``."""
