"""Replay of sequences that cross episodes, with the last observation of each episode."""

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
    """Windows of consecutive records of one environment, drawn uniformly, across episodes.

    A record is an observation with the reward and the flags that arrived with it and the action
    that followed: an episode of L policy steps is L + 1 records, the first with ``is_init``, the
    last with ``done`` and an action of zeros. World models are trained on records: they predict the
    reward and the end that come with an observation. TorchRL's slice samplers never cross episodes
    and know no record of the last observation.

    Args:
        size: records of all environments together; the oldest are overwritten.
        sequence_length: records of a window, at least 2.
        device: where records are kept.
        latents: of a world model, by name, where one is not known: entries ``"latent"`` of batches
            are stored with the records, those of minibatches in their place after a gradient step,
            and a window begins with that of the record before it. Empty: windows begin as episodes.

    Attributes:
        normalizer: normalises observations and rewards of minibatches by its statistics at the time
            of drawing; records are raw. ``None``: minibatches are as they were stored.

    Raises:
        SettingError: if a window is longer than the memory.
    """

    FLAGS = ("is_init", "terminated", "done")
    joins_steps = True
    in_keys = (("next", "reward"), ("next", "terminated"), ("next", "done"))
    """Entries of a batch that :meth:`extend` reads."""

    reads_minibatches = False
    reads_loss_outputs = True
    """whether :meth:`update_priority` reads what a loss writes into minibatches: latents."""

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
        self._written: list[int] = []  # records of each environment so far
        self._arrived: list[tuple[float, bool]] = []  # reward with the next record; is it a first?

    @property
    def capacity(self) -> int:
        """Records of each environment."""
        return 0 if self._rows is None else int(self._rows.shape[1])

    def __len__(self) -> int:
        return sum(min(written, self.capacity) for written in self._written)

    def normalize_by(self, normalizer: Normalizer | None) -> None:
        """Store raw records, and normalise minibatches by the present statistics."""
        self.normalizer = normalizer

    # ------------------------------------------------------------------ writing
    def extend(self, batch: TensorDictBase, keys: Sequence[Any] = ()) -> None:
        """Add the transitions of a batch as records.

        Args:
            batch: ``[num_envs, steps]``; or whole episodes ``[episodes, longest]`` with a mask,
                which follow one another as if they were those of one environment.
            keys: not used.

        Raises:
            SettingError: if an environment's part of the memory is shorter than a window, or
                batches are of different numbers of environments, without an axis of time, or of
                pieces of episodes.
        """
        del keys  # the memory is filled before its loss is known to read anything
        if batch.ndim < 2:
            why = "loses which steps follow one another, and sequences are made of these"
            raise SettingError("layout", "flat", why, ["padded"])
        mask = batch.get(("collector", "mask"), None)
        streams = len(batch) if mask is None else 1
        if mask is not None and int(batch["next", "done"][mask].sum()) < len(batch):
            why = "would join pieces of episodes that do not follow one another"
            works = "collect without split_trajs"
            raise SettingError("sequence_length", self.sequence_length, why, works)
        if self._rows is not None:
            check_num_envs(streams, len(self._written))
        for number, row in enumerate(batch.unbind(0)):
            if mask is None:
                self._append(number, row, streams)
            else:
                self._append(0, row[mask[number]], streams)

    def _append(self, env: int, transitions: TensorDictBase, num_envs: int) -> None:
        """Write consecutive transitions ``[steps]`` of an environment."""
        if not len(transitions):
            return
        if self._rows is None:
            self._allocate(transitions, num_envs)
        assert self._rows is not None
        done = transitions.get(("next", "done")).reshape(-1).cpu()
        ends = done.nonzero().reshape(-1)
        steps = torch.arange(len(done))
        place = steps + done.cumsum(0) - done.long()  # final records come between
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
            why = f"gives each of {num_envs} environments {capacity} records, less than a sequence"
            works = [self.sequence_length * num_envs]
            raise SettingError("buffer_size", self.size, why, works)
        self._arrived, self._written = [(0.0, True)] * num_envs, [0] * num_envs
        done = torch.zeros(len(transitions), dtype=torch.bool)
        like = self._records(0, transitions, done)[:1]
        rows = like.to(self.device).expand(num_envs, capacity, *like.shape[1:])
        self._rows = rows.clone().zero_().reshape(num_envs, capacity)

    def _records(self, env: int, transitions: TensorDictBase, done: Tensor) -> TensorDictBase:
        """Observations before the actions, with what arrived with them."""
        before, first = self._arrived[env]
        reward = transitions.get(("next", "reward")).roll(1, 0)
        is_init = done.roll(1, 0)
        reward[0], is_init[0] = before, first
        is_init = is_init.to(reward.device).unsqueeze(-1)
        never = torch.zeros_like(is_init)
        own = self._kept(transitions)
        arrived = {"reward": torch.where(is_init, 0.0, reward), "is_init": is_init}
        return own.update({**arrived, "terminated": never, "done": never}).to(self.device)

    def _final_records(self, transitions: TensorDictBase) -> TensorDictBase:
        """Last observations of episodes, after which no action follows."""
        following, own = transitions.get("next"), self._kept(transitions)
        flags = {"is_init": torch.zeros_like(following.get("done")), "done": following.get("done")}
        arrived = {key: following.get(key) for key in ("reward", "terminated")}
        found = own.apply(torch.zeros_like).update({**arrived, **flags})
        return found.update(following.select(*own.keys(True, True), strict=False)).to(self.device)

    def _kept(self, transitions: TensorDictBase) -> TensorDictBase:
        """What records keep of transitions besides what arrived."""
        own = transitions.exclude("next", "collector", "reward", *self.FLAGS, "truncated")
        if self.latents and "latent" not in own.keys():
            for name, value in self.latents.items():
                own.set(("latent", name), value.expand(*own.shape, *value.shape))
        return own

    # ------------------------------------------------------------------ sampling
    def example(self, transitions: TensorDictBase) -> TensorDictBase:
        """A minibatch ``[1, sequence_length]`` that repeats each transition of ``[num_envs]``."""
        length, envs = self.sequence_length, len(transitions)
        memory = SequenceReplay(length * envs, length, self.device, self.latents)
        memory.extend(transitions.unsqueeze(-1).expand(envs, length).clone())
        return memory.sample(1)

    def epoch(self, plan: StepPlan, limit: int) -> Iterator[MinibatchGroup]:
        """Yield a minibatch ``[sequences, sequence_length]`` for each gradient step that is due.

        Raises:
            SettingError: if the plan does not say how many sequences a minibatch has.
        """
        count = whole_number("minibatch_size", plan.minibatch_size, at_least=1)
        for _ in range(limit):
            several = range(plan.minibatches_per_gradient_step or 1)
            yield [self.sample(count) for _ in several]

    def sample(self, count: int) -> TensorDictBase:
        """Draw windows, each as likely as every other, ``[count, sequence_length]``.

        The first record of a window is marked as the first of an episode where the latent before it
        is not known; one that precedes such a mark as the last of its own. With latents,
        ``"before"`` is the record before the window, at all time steps the same.

        Raises:
            SettingError: if no environment has written a whole window yet.
        """
        length, capacity = self.sequence_length, self.capacity
        filled = [min(written, capacity) for written in self._written]
        windows = torch.tensor([max(n - length + 1, 0) for n in filled])
        if not len(windows) or not windows.any():
            works = f"begin after {length * max(len(filled), 1)} policy steps"
            why = f"comes before an environment has written a sequence of {length} records"
            raise SettingError("learning_starts", sum(filled), why, works)
        assert self._rows is not None
        until = windows.cumsum(0)
        drawn = torch.randint(int(until[-1]), (count,))
        env = torch.searchsorted(until, drawn, right=True)
        oldest = torch.tensor([max(n - capacity, 0) for n in self._written])
        place = drawn - (until - windows)[env]  # 0: the oldest record is the first
        steps = (oldest[env] + place)[:, None] + torch.arange(-1, length)
        rows = (env[:, None] * capacity + steps % capacity).to(self.device)
        sequences = self._at(rows[:, 1:])
        is_init = sequences.get("is_init").clone()
        sequences.get("done")[:, :-1] |= is_init[:, 1:]
        known = torch.zeros_like(is_init[:, 0])
        if self.latents:
            before = self._at(rows[:, 0])
            # The record before the oldest is the newest: another time, where the head writes.
            known = before["latent", "known"] & (place > 0).to(self.device).unsqueeze(-1)
            sequences.set("before", before.unsqueeze(1).expand(count, length))
            sequences.set("index", rows[:, 1:])
        is_init[:, 0] |= ~known
        if self.normalizer is not None:
            entries = self.normalizer.minibatch(leaves(sequences))
            sequences = nested(entries, sequences.batch_size, sequences.device)
        return sequences.set("is_init", is_init)  # type: ignore[no-any-return]

    def _at(self, rows: Tensor) -> TensorDictBase:
        """The records at places counted over all environments."""
        assert self._rows is not None
        return self._rows[rows // self.capacity, rows % self.capacity]

    def update_priority(self, minibatch: TensorDictBase) -> None:
        """Store the latents of a minibatch; of a record in several windows, that of the last.

        Every window stays as likely as every other.
        """
        if not self.latents:
            return
        assert self._rows is not None
        rows, order = minibatch["index"].flatten().sort(stable=True)
        newest = order[rows.diff(append=rows.new_full((1,), -1)) != 0]
        rows, latents = minibatch["index"].flatten()[newest], minibatch["latent"].flatten(0, 1)
        self._rows["latent"][rows // self.capacity, rows % self.capacity] = latents[newest]

    # ------------------------------------------------------------------ in and out
    def state_dict(self) -> dict[str, Any]:
        """The records that are filled, and where each environment writes."""
        rows = self._rows
        filled = max((min(n, self.capacity) for n in self._written), default=0)
        return {
            "size": self.size,
            "capacity": self.capacity,
            "rows": None if rows is None else _plain(rows[:, :filled]),
            "written": list(self._written),
            "arrived": [list(one) for one in self._arrived],
            "raw": self.normalizer is not None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            SettingError: if it is of a memory of another size, which this one would have from then.
        """
        if (saved := state_dict.get("size", self.size)) != self.size:
            why = f"is not that of the memory that was saved, {saved}"
            raise SettingError("buffer_size", self.size, why, [saved])
        if not state_dict.get("raw", False):  # earlier versions stored normalised records
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
        """Begin new episodes, for a run whose environments do not go on with the last ones."""
        del num_envs
        self._arrived = [(0.0, True)] * len(self._arrived)
