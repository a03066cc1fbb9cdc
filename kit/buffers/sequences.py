"""Sampling of sequences of consecutive transitions from a flat storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from kit.buffers.writer import check_num_envs
from kit.steps import SettingError
from kit.steps.errors import whole_number


class SequenceSampler(Sampler):  # type: ignore[misc, unused-ignore]
    """Uniformly draws sequences of consecutive transitions from one environment.

    Transitions of several environments alternate in the storage, as kit's collectors write them. A
    sequence may span several episodes; ``is_init`` marks the first transition of each episode. A
    sequence never wraps around from the newest transition to the oldest.

    Args:
        sequence_length: Transitions per sequence.
        num_envs: Number of environments that write in turn; set by the trainer.
    """

    def __init__(self, sequence_length: int, num_envs: int = 1) -> None:
        self.sequence_length = whole_number("sequence_length", sequence_length, at_least=1)
        self.num_envs = whole_number("num_envs", num_envs, at_least=1)
        self._rows = 0  # number of rows written

    def belong_to(self, num_envs: int) -> None:
        """Set the number of environments that write in turn.

        Raises:
            SettingError: If a different number of environments has already written.
        """
        if self._rows:
            check_num_envs(num_envs, self.num_envs)
        self.num_envs = num_envs

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Count new rows, which may be written by any buffer that shares the storage."""
        self._rows += index.numel() if isinstance(index, Tensor) else 1

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Return the storage indices of random sequences with ``batch_size`` transitions in total.

        Raises:
            SettingError: If no sequence of this length has been stored yet.
        """
        length, filled = self.sequence_length, len(storage)
        spanned = (length - 1) * self.num_envs + 1
        if filled < spanned:
            hint = f"Set steps.learning_starts to {length * self.num_envs} or more"
            reason = f"Fewer than {length} steps are stored for each environment"
            raise SettingError("learning_starts", filled, reason, hint)
        oldest = self._rows % filled if filled == storage.max_size else 0
        count = batch_size // length
        device, rng = storage.device, self._rng
        start = torch.randint(filled - spanned + 1, (count, 1), generator=rng, device=device)
        steps = torch.arange(length, device=device) * self.num_envs
        return ((oldest + start + steps) % filled).reshape(-1), {}

    def cut(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return sampled transitions as ``[sequences, sequence_length]``.

        ``is_init`` marks the first transition of every episode and of every sequence.
        """
        sequences = minibatch.reshape(-1, self.sequence_length)
        is_init = sequences.get(("next", "done")).roll(1, dims=1)
        is_init[:, 0] = True
        return sequences.set("is_init", is_init)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows written and the number of environments."""
        return {"rows": self._rows, "num_envs": self.num_envs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._rows, self.num_envs = int(state_dict["rows"]), int(state_dict["num_envs"])

    def _empty(self) -> None:
        self._rows = 0

    def dumps(self, path: Path | str) -> None:
        """Write the state to a folder."""
        Path(path).mkdir(exist_ok=True)
        torch.save(self.state_dict(), Path(path) / "sequences.pt")

    def loads(self, path: Path | str) -> None:
        """Read the state from a folder."""
        self.load_state_dict(torch.load(Path(path) / "sequences.pt", weights_only=True))
