"""Write transitions to a replay storage."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.data import TensorDictRoundRobinWriter

from kit.steps import SettingError


def check_num_envs(num_envs: int | list[int], stored: int | list[int]) -> None:
    """Raise an error if stored transitions come from a different number of environments.

    Raises:
        SettingError: If the numbers differ.
    """
    if num_envs != stored:
        reason = f"The buffer already contains transitions from {stored} environments"
        raise SettingError("num_envs", num_envs, reason, [stored])


class SliceWriter(TensorDictRoundRobinWriter):  # type: ignore[misc, unused-ignore]
    """Writes transitions to consecutive slices of the storage, overwriting the oldest.

    Stores the same rows at the same indices as TorchRL's writer. Unlike that writer, it does not
    read the index on the host, so batches do not wait for the GPU.
    """

    _cursor: int

    def extend(self, data: TensorDictBase) -> Tensor:
        """Store rows and return their storage indices."""
        storage, count, start = self._storage, len(data), self._cursor
        if storage.ndim != 1 or not 0 < count <= storage.max_size:
            return super().extend(data)  # type: ignore[no-any-return]
        index: Tensor = torch.arange(start, start + count, device=data.device) % storage.max_size
        data.set("index", expand_as_right(index, data))
        self._cursor = (start + count) % storage.max_size
        self._write_count += count
        fits = min(count, storage.max_size - start)
        storage.set(slice(start, start + fits), data[:fits])
        if fits < count:
            storage.set(slice(0, count - fits), data[fits:])
        self._bump_generation(index, data)
        self._mark_update_entities(index)
        return index
