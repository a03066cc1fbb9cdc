"""Gradients of several parameters as one vector, which ranks average in one collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kit.fast.vectors import parts_of

Layout = tuple[tuple[int, bool], ...]
"""Index of each trainable parameter, and whether the parameter has a gradient."""


def flatten(gradients: Mapping[int, Tensor], parameters: Sequence[Tensor]) -> dict[Layout, Tensor]:
    """Return the gradients as one vector, keyed by its layout; empty if no parameter is trainable.

    The size of the vector depends only on the parameters, so it is the same on all ranks. A missing
    gradient is stored as zeros. The last entries are 1 for each gradient and 0 for each missing
    gradient.
    """
    layout = tuple((n, n in gradients) for n, p in enumerate(parameters) if p.requires_grad)
    if not layout:
        return {}
    parts = [gradients[n] if has else torch.zeros_like(parameters[n]) for n, has in layout]
    flags = parts[0].new_ones(len(layout))
    for place, (_, has_gradient) in enumerate(layout):
        if not has_gradient:
            flags[place].zero_()
    return {layout: torch.cat([*[part.flatten() for part in parts], flags])}


def common_layout(layout: Layout, mean: Tensor) -> Layout:
    """Return the layout of a mean of vectors, in which each gradient exists in any of the vectors.

    The tensor is only read on the host if a gradient is missing in ``layout``.
    """
    if all(has_gradient for _, has_gradient in layout):
        return layout
    flags = mean[-len(layout) :].tolist()
    return tuple((number, flag > 0) for (number, _), flag in zip(layout, flags))


def split(vector: Tensor, layout: Layout, parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the gradients in a vector, keyed by parameter index."""
    parts = parts_of(vector[: -len(layout)], [parameters[number] for number, _ in layout])
    return {number: part for (number, has_gradient), part in zip(layout, parts) if has_gradient}
