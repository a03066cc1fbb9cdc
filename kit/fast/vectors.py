"""Treat several tensors as parts of one vector, so that one operation can process them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def vector_of(tensors: Sequence[Tensor], within: Tensor | None = None) -> Tensor:
    """Concatenate flattened tensors, without a copy if they are adjacent in memory.

    Args:
        tensors: Tensors of any shape.
        within: Vector that the tensors may be parts of. Without it, adjacent tensors are only
            recognised if they fill their storage.
    """
    vector = joined(tensors, within)
    return torch.cat([one.flatten() for one in tensors]) if vector is None else vector


def joined(parts: Sequence[Tensor], within: Tensor | None = None) -> Tensor | None:
    """Return a vector that views all tensors, or ``None`` if they do not exactly fill a storage.

    With ``within``, they must be adjacent parts of this vector instead.
    """
    storage = (parts[0] if within is None else within).untyped_storage()
    start = offset = 0 if within is None else parts[0].storage_offset()
    for part in parts:
        if (
            part.untyped_storage().data_ptr() != storage.data_ptr()
            or part.storage_offset() != offset
            or not part.is_contiguous()
        ):
            return None
        offset += part.numel()
    if within is not None:
        return within.narrow(0, start - within.storage_offset(), offset - start)
    fits = storage.nbytes() == offset * parts[0].element_size()
    return parts[0].as_strided((offset,), (1,), 0) if fits else None


def parts_of(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into tensors with the shapes and dtypes of ``like``."""
    parts = torch.split(vector, [one.numel() for one in like])
    return [part.view(one.shape).to(one.dtype) for part, one in zip(parts, like)]
