"""Replay buffer for sequences that cross episode boundaries and include last observations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from kit.buffers.batches import _from_plain, _plain
from kit.buffers.rollout_batches import MinibatchGroup
from kit.buffers.writer import check_num_envs
from kit.config.devices import usable_device
from kit.envs.normalize import Normalizer
from kit.fast.nested import leaves, nested
from kit.steps import SettingError, StepPlan
from kit.steps.errors import whole_number


class SequenceReplay:
    """Uniformly samples windows of consecutive records from one environment, across episodes.

    A record consists of an observation, the reward and flags that arrived with the observation, and
    the action that followed. An episode of L policy steps has L + 1 records. The first record has
    ``is_init`` set, and the last has ``done`` set and a zero action. World models are trained on
    records, because they predict the reward and the end of an episode from the observation that
    arrives at the same time. TorchRL's slice samplers never cross episodes and have no record of
    the last observation.

    Args:
        size: Maximum number of records from all environments; the oldest are overwritten.
        sequence_length: Records per window, at least 2.
        device: Device of the records.
        latents: Initial latent states of a world model, keyed by name. Latents in the batch entry
            ``"latent"`` are stored with their records and updated after each gradient step. A
            window starts with the latent of the preceding record. Empty: each window starts like
            a new episode.

    Attributes:
        normalizer: Normalises observations and rewards of sampled minibatches with its current
            statistics; records are raw. ``None``: minibatches are returned as stored.

    Raises:
        SettingError: If a window is longer than the buffer.
    """

    FLAGS = ("is_init", "terminated", "done")
    joins_steps = True
    in_keys = (("next", "reward"), ("next", "terminated"), ("next", "done"))
    """Batch keys that :meth:`extend` needs."""

    reads_minibatches = False
    reads_loss_outputs = True
    """Whether :meth:`update_priority` reads loss outputs (the latents)."""

    normalizer: Normalizer | None = None

    def __init__(
        self,
        size: int,
        sequence_length: int | None,
        device: torch.device | str = "cpu",
        latents: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.size = whole_number("buffer_size", size, at_least=1)
        self.sequence_length = whole_number("sequence_length", sequence_length, at_least=2)
        self.device = usable_device(device=device)
        self.latents = dict(latents or {})
        self._rows: TensorDictBase | None = None  # [num_envs, capacity]
        self._written: list[int] = []  # number of records written by each environment
        self._arrived: list[tuple[float, bool]] = []  # each next record's reward and is_init

    @property
    def capacity(self) -> int:
        """Maximum number of records per environment."""
        return 0 if self._rows is None else int(self._rows.shape[1])

    def __len__(self) -> int:
        return sum(min(written, self.capacity) for written in self._written)

    def normalize_by(self, normalizer: Normalizer | None) -> None:
        """Store raw records and normalise sampled minibatches with the current statistics."""
        self.normalizer = normalizer

    # ------------------------------------------------------------------ writing
    def extend(self, batch: TensorDictBase, keys: Sequence[Any] = ()) -> None:
        """Convert a batch's transitions to records and store them.

        Args:
            batch: Batch ``[num_envs, steps]``, or complete episodes ``[episodes, longest]`` with a
                mask, which are stored as consecutive episodes of one environment.
            keys: Unused.

        Raises:
            SettingError: If the capacity per environment is smaller than a window, the number of
                environments changes, or a batch has no time dimension or contains split episodes.
        """
        del keys  # the buffer is filled before the loss reports which keys it reads
        if batch.ndim < 2:
            reason = "Flat batches do not show which steps are consecutive"
            raise SettingError("layout", "flat", reason, ["padded"])
        mask = batch.get(("collector", "mask"), None)
        streams = len(batch) if mask is None else 1
        if mask is not None and int(batch["next", "done"][mask].sum()) < len(batch):
            reason = "Batches contain parts of episodes that are not consecutive"
            hint = "Collect without split_trajs"
            raise SettingError("sequence_length", self.sequence_length, reason, hint)
        if self._rows is not None:
            check_num_envs(streams, len(self._written))
        for number, row in enumerate(batch.unbind(0)):
            if mask is None:
                self._append(number, row, streams)
            else:
                self._append(0, row[mask[number]], streams)

    def _append(self, env: int, transitions: TensorDictBase, num_envs: int) -> None:
        if not len(transitions):
            return
        if self._rows is None:
            self._allocate(transitions, num_envs)
        assert self._rows is not None
        done = transitions.get(("next", "done")).reshape(-1).cpu()
        ends = done.nonzero().reshape(-1)
        steps = torch.arange(len(done))
        place = steps + done.cumsum(0) - done.long()  # leaves room for final records
        records = self._rows[0, :1].expand(len(done) + len(ends)).clone().zero_()
        records[place] = self._records(env, transitions, done)
        if len(ends):
            records[place[ends] + 1] = self._final_records(transitions[ends])
        written = self._written[env]
        places = (written + torch.arange(len(records))) % self.capacity
        newest = slice(-min(self.capacity, len(records)), None)
        self._rows[env, places[newest]] = records[newest]
        self._written[env] = written + len(records)
        reward = float(transitions.get(("next", "reward")).reshape(-1)[-1])
        self._arrived[env] = (0.0, True) if done[-1] else (reward, False)

    def _allocate(self, transitions: TensorDictBase, num_envs: int) -> None:
        capacity = self.size // num_envs
        if capacity < self.sequence_length:
            reason = (
                f"Only {capacity} records per environment can be stored, fewer than one sequence"
            )
            hint = [self.sequence_length * num_envs]
            raise SettingError("buffer_size", self.size, reason, hint)
        self._arrived, self._written = [(0.0, True)] * num_envs, [0] * num_envs
        done = torch.zeros(len(transitions), dtype=torch.bool)
        like = self._records(0, transitions, done)[:1]
        rows = like.to(self.device).expand(num_envs, capacity, *like.shape[1:])
        self._rows = rows.clone().zero_().reshape(num_envs, capacity)

    def _records(self, env: int, transitions: TensorDictBase, done: Tensor) -> TensorDictBase:
        """Return a record for each transition, with the observation before the action."""
        before, first = self._arrived[env]
        reward = transitions.get(("next", "reward")).roll(1, 0)
        is_init = done.roll(1, 0)
        reward[0], is_init[0] = before, first
        is_init = is_init.to(reward.device).unsqueeze(-1)
        never = torch.zeros_like(is_init)
        stored = self._stored_entries(transitions)
        arrived = {"reward": torch.where(is_init, 0.0, reward), "is_init": is_init}
        return stored.update({**arrived, "terminated": never, "done": never}).to(self.device)

    def _final_records(self, transitions: TensorDictBase) -> TensorDictBase:
        """Return records for the last observations of episodes, with zero actions."""
        following, stored = transitions.get("next"), self._stored_entries(transitions)
        flags = {"is_init": torch.zeros_like(following.get("done")), "done": following.get("done")}
        arrived = {key: following.get(key) for key in ("reward", "terminated")}
        final = stored.apply(torch.zeros_like).update({**arrived, **flags})
        keys = stored.keys(True, True)
        return final.update(following.select(*keys, strict=False)).to(self.device)

    def _stored_entries(self, transitions: TensorDictBase) -> TensorDictBase:
        """Return the transition entries to store, except rewards and flags."""
        stored = transitions.exclude("next", "collector", "reward", *self.FLAGS, "truncated")
        if self.latents and "latent" not in stored.keys():
            for name, value in self.latents.items():
                stored.set(("latent", name), value.expand(*stored.shape, *value.shape))
        return stored

    # ------------------------------------------------------------------ sampling
    def example(self, transitions: TensorDictBase) -> TensorDictBase:
        """Return an example minibatch ``[1, sequence_length]`` made of repeated transitions."""
        length, envs = self.sequence_length, len(transitions)
        memory = SequenceReplay(length * envs, length, self.device, self.latents)
        memory.extend(transitions.unsqueeze(-1).expand(envs, length).clone())
        return memory.sample(1)

    def epoch(self, plan: StepPlan, limit: int) -> Iterator[MinibatchGroup]:
        """Yield minibatches ``[sequences, sequence_length]``, grouped by gradient step.

        Raises:
            SettingError: If the plan has no minibatch size.
        """
        count = whole_number("minibatch_size", plan.minibatch_size, at_least=1)
        for _ in range(limit):
            several = range(plan.minibatches_per_gradient_step or 1)
            yield [self.sample(count) for _ in several]

    def sample(self, count: int) -> TensorDictBase:
        """Draw windows ``[count, sequence_length]`` uniformly.

        The first record of a window has ``is_init`` set if the preceding latent is unknown. A
        record before an ``is_init`` record has ``done`` set. With latents, ``"before"`` is the
        record that precedes the window, repeated for all time steps.

        Raises:
            SettingError: If no environment has written a full window yet.
        """
        length, capacity = self.sequence_length, self.capacity
        filled = [min(written, capacity) for written in self._written]
        windows = torch.tensor([max(n - length + 1, 0) for n in filled])
        if not len(windows) or not windows.any():
            hint = f"Set steps.learning_starts to {length * max(len(filled), 1)} or more"
            reason = f"No environment has written a sequence of {length} records yet"
            raise SettingError("learning_starts", sum(filled), reason, hint)
        assert self._rows is not None
        until = windows.cumsum(0)
        drawn = torch.randint(int(until[-1]), (count,))
        env = torch.searchsorted(until, drawn, right=True)
        oldest = torch.tensor([max(n - capacity, 0) for n in self._written])
        place = drawn - (until - windows)[env]  # 0 is the oldest record
        steps = (oldest[env] + place)[:, None] + torch.arange(-1, length)
        rows = (env[:, None] * capacity + steps % capacity).to(self.device)
        sequences = self._at(rows[:, 1:])
        is_init = sequences.get("is_init").clone()
        sequences.get("done")[:, :-1] |= is_init[:, 1:]
        has_latent = torch.zeros_like(is_init[:, 0])
        if self.latents:
            before = self._at(rows[:, 0])
            # The index before the oldest record holds the newest record, so it is not used.
            has_latent = before["latent", "known"] & (place > 0).to(self.device).unsqueeze(-1)
            sequences.set("before", before.unsqueeze(1).expand(count, length))
            sequences.set("index", rows[:, 1:])
        is_init[:, 0] |= ~has_latent
        if self.normalizer is not None:
            entries = self.normalizer.minibatch(leaves(sequences))
            sequences = nested(entries, sequences.batch_size, sequences.device)
        return sequences.set("is_init", is_init)  # type: ignore[no-any-return]

    def _at(self, rows: Tensor) -> TensorDictBase:
        """Return the records at indices into the flattened ``[num_envs, capacity]`` storage."""
        assert self._rows is not None
        return self._rows[rows // self.capacity, rows % self.capacity]

    def update_priority(self, minibatch: TensorDictBase) -> None:
        """Store the minibatch's latents with their records. Sampling stays uniform.

        If a record is in several windows, the latent from the last window is stored.
        """
        if not self.latents:
            return
        assert self._rows is not None
        rows, order = minibatch["index"].flatten().sort(stable=True)
        newest = order[rows.diff(append=rows.new_full((1,), -1)) != 0]
        rows, latents = minibatch["index"].flatten()[newest], minibatch["latent"].flatten(0, 1)
        self._rows["latent"][rows // self.capacity, rows % self.capacity] = latents[newest]

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """Return the stored records and the write positions of the environments."""
        rows = self._rows
        filled = max((min(n, self.capacity) for n in self._written), default=0)
        return {
            "size": self.size,
            "capacity": self.capacity,
            "rows": None if rows is None else _plain(rows[:, :filled]),
            "written": list(self._written),
            "arrived": [list(pair) for pair in self._arrived],
            "raw": self.normalizer is not None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`.

        Raises:
            SettingError: If the state belongs to a buffer of a different size.
        """
        if (saved := state_dict.get("size", self.size)) != self.size:
            reason = f"The checkpoint was saved with a buffer of {saved} records"
            raise SettingError("buffer_size", self.size, reason, [saved])
        if not state_dict.get("raw", False):  # earlier versions of kit stored normalised records
            self.normalizer = None
        self._written = [int(written) for written in state_dict["written"]]
        self._arrived = [(float(reward), bool(first)) for reward, first in state_dict["arrived"]]
        if state_dict["rows"] is None:
            self._rows = None
            return
        rows = _from_plain(state_dict["rows"]).to(self.device)
        empty = rows[:, :1].expand(len(rows), int(state_dict["capacity"])).clone().zero_()
        empty[:, : rows.shape[1]] = rows
        self._rows = empty

    def close_open_episodes(self, num_envs: int) -> None:
        """Start new episodes. Called when the environments do not continue the stored episodes."""
        del num_envs
        self._arrived = [(0.0, True)] * len(self._arrived)
