"""Several tensors as parts of one vector, so that one operation reads or changes all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def vector_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the vector of tensors of any shapes; without a copy if they are its parts already."""
    whole = joined(tensors)
    return torch.cat([one.flatten() for one in tensors]) if whole is None else whole


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the vector whose parts are these tensors, in this order; ``None`` if there is none."""
    storage, place = parts[0].untyped_storage(), 0
    for part in parts:
        if (
            part.untyped_storage().data_ptr() != storage.data_ptr()
            or part.storage_offset() != place
            or not part.is_contiguous()
        ):
            return None
        place += part.numel()
    fits = storage.nbytes() == place * parts[0].element_size()
    return parts[0].as_strided((place,), (1,), 0) if fits else None


def parts_of(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a vector, in the shapes and data types of these tensors."""
    parts = torch.split(vector, [one.numel() for one in like])
    return [part.view(one.shape).to(one.dtype) for part, one in zip(parts, like)]
