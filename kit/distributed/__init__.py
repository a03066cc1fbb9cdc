"""Ranks: processes that train one policy together, started by torchrun."""

from kit.distributed.ranks import RankError, Ranks

__all__ = ["RankError", "Ranks"]
