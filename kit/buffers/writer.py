"""Writing transitions to a storage."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.data import TensorDictRoundRobinWriter

from kit.steps import SettingError


def check_num_envs(num_envs: int | list[int], stored: int | list[int]) -> None:
    """Raise an error if other environments write than those that have written before.

    Raises:
        SettingError: if the numbers differ.
    """
    if num_envs != stored:
        why = f"differs from the {stored} environments whose transitions are stored"
        raise SettingError("num_envs", num_envs, why, [stored])


class SliceWriter(TensorDictRoundRobinWriter):  # type: ignore[misc, unused-ignore]
    """Writes transitions one after the other, as slices of the storage, the oldest first.

    What is stored and where is as with TorchRL's writer, which makes an index on the data's device
    and reads it on the host: there a GPU would be waited for with every batch.
    """

    _cursor: int

    def extend(self, data: TensorDictBase) -> Tensor:
        """Store rows and return their places."""
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
