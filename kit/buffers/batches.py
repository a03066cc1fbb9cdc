"""Minibatches sampled from a TorchRL replay buffer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import (
    HERReplayBuffer,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
)
from torchrl.data import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data.replay_buffers.samplers import Sampler, SliceSampler
from torchrl.envs.transforms import MultiStepTransform, Reward2GoTransform

from kit.buffers.direct import FastStorageIO
from kit.buffers.hindsight import HindsightReplayBuffer
from kit.buffers.n_step import NStep, close
from kit.buffers.observations import ObservationStorage
from kit.buffers.priorities import PrioritizedSampler
from kit.buffers.rollout_batches import Minibatches, MinibatchGroup, RolloutMinibatches
from kit.buffers.sequences import SequenceSampler
from kit.envs.normalize import Normalizer
from kit.envs.spaces import key_from_list, key_to_list
from kit.fast.nested import entry, leaves, nested
from kit.steps import SettingError, StepPlan


class ReplayMinibatches:
    """Samples minibatches from a TorchRL replay buffer with any storage and any sampler.

    A storage with ``ndim=1`` receives transitions in time order, or one episode after another.
    A storage with ``ndim=2`` (for a slice sampler) receives batches ``[num_envs, steps]``.

    Args:
        buffer: TorchRL replay buffer.
        n_step: Builds n-step transitions before they are stored; ``None``: one-step transitions.
        device: Device of minibatches from a host storage; ``None``: the storage's device.

    Attributes:
        keys_read: Minibatch keys that will be read; other keys may be omitted. Empty: all keys.
        reads_minibatches: Whether minibatch entries other than the loss's outputs are read after
            the gradient step. Set this to true in a subclass whose ``update_priority`` reads such
            entries. Gradient steps then receive all entries.
        normalizer: Normalises observations and rewards of sampled minibatches with its current
            statistics; stored rows are raw. ``None``: minibatches are returned as stored.

    Raises:
        SettingError: If the buffer's parts are incompatible, or ``prefetch`` is used.
    """

    keys_read: Sequence[Any] = ()
    reads_minibatches = False
    normalizer: Normalizer | None = None

    def __init__(
        self,
        buffer: ReplayBuffer,
        n_step: NStep | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        self.buffer, self.device = buffer, device
        self.n_step = n_step
        self._direct = FastStorageIO(buffer)
        self._transforms = buffer._transform
        self.sequences = buffer.sampler if isinstance(buffer.sampler, SequenceSampler) else None
        self._hindsight = buffer if isinstance(buffer, HindsightReplayBuffer) else None
        storage: Any = buffer.storage
        self._once = storage if isinstance(storage, ObservationStorage) else None
        self._ordered = self._order_dependent_parts()
        if n_step is not None and isinstance(buffer, HERReplayBuffer):
            reason = "Hindsight replay supports only one-step transitions"
            raise SettingError("n_step", n_step.steps, reason, "Use n_step=1")
        if getattr(buffer, "_prefetch", False):
            reason = "Runs that sample in other threads cannot be reproduced or resumed exactly"
            raise SettingError("prefetch", buffer._prefetch_cap, reason, [0])
        capacity = getattr(buffer.sampler, "_max_capacity", storage.max_size)
        if capacity < storage.max_size:
            reason = f"It must not be smaller than the storage's capacity of {storage.max_size}"
            raise SettingError("max_capacity", capacity, reason, [storage.max_size])
        prioritized = isinstance(buffer.sampler, TorchRLPrioritizedSampler)
        if prioritized and not isinstance(buffer.sampler, PrioritizedSampler):
            name = type(buffer.sampler).__name__
            reason = "TorchRL keeps priorities in compiled trees that cannot be checkpointed"
            hint = "Use kit.buffers.PrioritizedSampler with the same arguments"
            raise SettingError("sampler", name, reason, hint)

    def normalize_by(self, normalizer: Normalizer | None) -> None:
        """Store raw rows and normalise sampled minibatches with the current statistics.

        Call it before any transition is stored. With ``n_step``, each reward is normalised and
        clipped before rewards are summed, as in Stable-Baselines3's ``NStepReplayBuffer``.
        """
        self.normalizer = normalizer
        if self.n_step is not None:
            self.n_step.apart = normalizer is not None and normalizer.reward is not None

    def extend(self, batch: TensorDictBase, keys: Sequence[Any] = ()) -> None:
        """Add a batch to the buffer.

        With ``n_step``, the newest steps are held back until the next batch.

        Raises:
            SettingError: If the sampler cannot separate environments, or the buffer cannot separate
                episodes.
        """
        del keys  # the buffer is filled before the loss reports which keys it reads
        if self.device is not None:
            batch = batch.to("cpu")
        by_step = batch.ndim == 2 and self.buffer.storage.ndim == 1
        for part in self._ordered if by_step else ():
            self._set_num_envs(part, batch)
        if by_step and len(batch) > 1:
            self._check_transforms(len(batch))
        mask = entry(batch, ("collector", "mask"))
        if mask is not None:
            batch, by_step = self._without_padding(batch, mask), False
        if self.n_step is not None:
            complete = self.n_step(batch)
            if complete is None:
                return
            batch = complete
        if by_step:
            if self._direct.extend(batch):
                return
            batch = batch.transpose(0, 1).reshape(-1)
        if self.gpu is not None:
            batch = batch.to(self.gpu)
        if batch.ndim == 2 and batch.shape[1] == 1:
            # TensorDictReplayBuffer.extend fails to write the "index" entry of one-step batches.
            ReplayBuffer.extend(self.buffer, batch)
        else:
            self.buffer.extend(batch)

    def _without_padding(self, batch: TensorDictBase, mask: Tensor) -> TensorDictBase:
        """Return the valid transitions of padded episodes, one episode after another."""
        if self.buffer.storage.ndim == 2:
            reason = "A storage with ndim=2 would also store the padding of whole episodes"
            raise SettingError("storage", type(self.buffer.storage).__name__, reason, "Use ndim=1")
        episodes = batch[mask]
        if self.n_step is not None and int(episodes["next", "done"].sum()) < len(batch):
            reason = "Batches contain parts of episodes, so returns would cross episode boundaries"
            raise SettingError("n_step", self.n_step.steps, reason, "Collect without split_trajs")
        return episodes

    def _joining(self) -> list[str]:
        """Return the names of buffer transforms that combine a step with the following steps."""
        joining = (MultiStepTransform, Reward2GoTransform)
        return [type(one).__name__ for one in self._transforms if isinstance(one, joining)]

    @property
    def summed(self) -> NStep | None:
        """n-step settings from the buffer or its transforms; ``None`` for one-step returns."""
        kinds = [one for one in self._transforms if isinstance(one, MultiStepTransform)]
        found = [NStep(one.n_steps, float(one.gamma)) for one in kinds]
        return self.n_step or next(iter(found), None)

    def _check_transforms(self, num_envs: int) -> None:
        """Raise an error if the buffer treats adjacent rows as steps of one environment."""
        found = [("transform", name) for name in self._joining()]
        unit = getattr(self.buffer, "_sample_unit", None)
        for field, name in found + ([] if unit is None else [("sample_unit", type(unit).__name__)]):
            reason = f"Adjacent rows come from {num_envs} different environments"
            hint = "Use make_replay_buffer with n_step or sequence_length, or a storage with ndim=2"
            raise SettingError(field, name, reason, hint)

    def _order_dependent_parts(self) -> list[Any]:
        """Return the storage, sampler or buffer if its class relies on the order of the rows."""
        torchrl_kinds = (SliceSampler, HERReplayBuffer)
        parts = (self.buffer.storage, self.buffer.sampler, self.buffer)
        single = self.sequences is not None and self.sequences.sequence_length == 1
        exempt = self.sequences if single else None  # single steps need no order
        return [
            part
            for part in parts
            if part is not exempt
            and (isinstance(part, torchrl_kinds) or hasattr(part, "belong_to"))
        ]

    @property
    def joins_steps(self) -> bool:
        """Whether the buffer combines a step with the following steps of its episode."""
        return self.n_step is not None or bool(self._ordered) or bool(self._joining())

    def _set_num_envs(self, ordered: Any, batch: TensorDictBase) -> None:
        """Set ``num_envs`` on a component that relies on the row order, or reject the batch."""
        name, num_envs = type(ordered).__name__, batch.shape[0]
        whole_episodes = batch.get(("collector", "mask"), None) is not None
        if isinstance(ordered, SliceSampler):
            if num_envs > 1 and not whole_episodes:
                reason = f"A slice would mix transitions of {num_envs} environments"
                hint = "Use LazyTensorStorage(..., ndim=2) or kit.buffers.SequenceSampler"
                raise SettingError("sampler", name, reason, hint)
        elif whole_episodes:
            reason = "The buffer needs equally many transitions per environment, not whole episodes"
            raise SettingError("buffer", name, reason, "Collect with steps_per_env")
        elif hasattr(ordered, "belong_to"):
            ordered.belong_to(num_envs)
        elif num_envs > 1:
            reason = f"Adjacent rows come from {num_envs} environments, so episodes would be mixed"
            hint = "Use kit.buffers.HindsightReplayBuffer with the same arguments"
            raise SettingError("buffer", name, reason, hint)

    def epoch(self, plan: StepPlan, limit: int) -> Iterator[MinibatchGroup]:
        """Yield the minibatches of one epoch, grouped by gradient step.

        Raises:
            SettingError: If the buffer is empty, or the sampler returns too few transitions.
        """
        filled = self._direct.filled or len(self.buffer) or self._unfinished
        if not filled:
            reason = "The replay buffer is still empty when training starts"
            hint = (
                "Raise steps.learning_starts. With n_step, transitions are stored n_step steps late"
            )
            raise SettingError("learning_starts", plan.learning_starts, reason, hint)
        size = plan.minibatch_size or filled
        if plan.sequence_length is not None:
            size *= plan.sequence_length
        each = plan.minibatches_per_gradient_step or 1
        drawn: MinibatchGroup = []
        left = limit * each
        while left:
            while len(drawn) < each:
                drawn += self._samples(size, left - len(drawn))
            group, drawn = drawn[:each], drawn[each:]
            left -= each
            yield group if self.sequences is None else [self.sequences.cut(m) for m in group]

    def _samples(self, size: int, count: int) -> list[TensorDictBase]:
        """Draw at least one and at most ``count`` minibatches of ``size`` transitions."""
        minibatches = self._stored_samples(size, count)
        if self.normalizer is not None:
            minibatches = [self._normalized(one, self.normalizer) for one in minibatches]
        if self.device is None:
            return minibatches
        moved = [{k: v.to(self.device) for k, v in leaves(one).items()} for one in minibatches]
        return [nested(entries, [size]) for entries in moved]

    def _normalized(self, minibatch: TensorDictBase, normalizer: Normalizer) -> TensorDictBase:
        """Return the normalised minibatch. Rewards are clipped before they are summed."""
        entries, reward = normalizer.minibatch(leaves(minibatch)), ("next", "reward")
        if self.n_step is not None and self.n_step.apart and reward in entries:
            entries[reward] = self.n_step.summed(entries[reward])
        return nested(entries, minibatch.batch_size, minibatch.device)

    def _stored_samples(self, size: int, count: int) -> list[TensorDictBase]:
        """Draw minibatches without normalisation, on the storage's device."""
        if not (self._direct.filled or len(self.buffer)) and self._unfinished:
            assert self.n_step is not None
            steps = self.n_step.unfinished().reshape(-1)
            return [steps[torch.randint(len(steps), (size,))]]
        keys = self.keys_read if self.sequences is None else ()
        if minibatches := self._direct.samples(size, count, keys):
            return minibatches
        args = () if self.buffer.batch_size == size else (size,)
        # A sampler without replacement raises an error on an empty buffer.
        minibatch = self.buffer.sample(*args) if len(self.buffer) else TensorDict(batch_size=[0])
        if (count := minibatch.batch_size.numel()) < size:
            name = type(self.buffer.sampler).__name__
            reason = f"The sampler returned {count} transitions for a minibatch of {size}"
            hint = "Use a sampler that returns as many as requested, such as RandomSampler"
            raise SettingError("sampler", name, reason, hint)
        return [minibatch]

    @property
    def _unfinished(self) -> int:
        """Number of steps without stored n-step transition that can be sampled if none is stored.

        Prioritised samplers cannot sample them.
        """
        waiting = None if self.n_step is None or self.reads_loss_outputs else self.n_step.waiting
        return 0 if waiting is None else waiting.numel()

    @property
    def gpu(self) -> torch.device | None:
        """GPU that stores the transitions; ``None`` if they are stored on the host."""
        device = getattr(self.buffer.storage, "device", None)
        return device if isinstance(device, torch.device) and device.type == "cuda" else None

    @property
    def copies(self) -> bool:
        """Whether the buffer copies batches when storing them."""
        transformed = len(self._transforms) > 0  # a transform may keep references to the batch
        return isinstance(self.buffer.storage, LazyTensorStorage) and not transformed

    @property
    def reads_loss_outputs(self) -> bool:
        """Whether sampling priorities are computed from TD errors that the loss writes."""
        return type(self.buffer.sampler).update_priority is not Sampler.update_priority

    def update_priority(self, minibatch: TensorDictBase) -> None:
        """Update sampling priorities, if there are any, from the minibatch's TD errors.

        Raises:
            SettingError: If the loss wrote no TD errors.
        """
        buffer = self.buffer
        if not self.reads_loss_outputs:
            return
        key = getattr(buffer, "priority_key", "td_error")
        errors = entry(minibatch, key)
        if errors is None:
            reason = f"The sampler reads {key!r}, but the loss does not write this entry"
            hint = "Use a loss that writes TD errors, such as DQNLoss, or use RandomSampler"
            raise SettingError("sampler", type(buffer.sampler).__name__, reason, hint)
        self._direct.update_priority(minibatch, errors)

    def state_dict(self) -> dict[str, Any]:
        """Return the filled rows, the writer and sampler states, and the pending n-step rows."""
        filled, once, generator = self._filled(), self._once, self.buffer._rng
        waiting = None if self.n_step is None else self.n_step.waiting
        return {
            "size": self.buffer.storage.max_size,
            "filled": filled,
            "rows": _plain(self._rows(slice(filled))) if filled else {},
            "observations": None if once is None else once.observations(),
            "writer": self.buffer.writer.state_dict(),
            "sampler": dict(self.buffer.sampler.state_dict()),
            "generator": None if generator is None else generator.get_state(),
            "transforms": dict(self._transforms.state_dict()),
            "waiting": None if waiting is None else _plain(waiting),
            "episodes": self._hindsight.episodes_state() if self._hindsight else None,
            "raw": self.normalizer is not None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`.

        Raises:
            SettingError: If the state belongs to a buffer of a different size.
        """
        size = self.buffer.storage.max_size
        if (saved := state_dict.get("size", size)) != size:
            reason = f"The checkpoint was saved with a buffer of {saved} transitions"
            raise SettingError("buffer_size", size, reason, [saved])
        if not state_dict.get("raw", False):  # earlier versions of kit stored normalised rows
            self.normalize_by(None)
        filled, once = int(state_dict["filled"]), self._once
        self.buffer.storage._empty()  # set() appends to existing rows
        if filled:
            store = self.buffer.storage.set if once is None else once.set_rows
            store(range(filled), _from_plain(state_dict["rows"]))
        if once is not None:
            once.load_observations(state_dict["observations"])
        self.buffer.writer.load_state_dict(state_dict["writer"])
        self.buffer.sampler.load_state_dict(state_dict["sampler"])
        if self.buffer._rng is not None and state_dict.get("generator") is not None:
            self.buffer._rng.set_state(state_dict["generator"])
        self._transforms.load_state_dict(state_dict["transforms"])
        if self.n_step is not None:
            waiting = state_dict["waiting"]
            self.n_step.waiting = None if waiting is None else _from_plain(waiting)
        if self._joining():
            lost = f"Steps held back by {' and '.join(self._joining())} are not in checkpoints"
            warnings.warn(f"{lost} and were lost. Use n_step=... instead.", stacklevel=2)
        if self._hindsight is not None:
            self._hindsight.load_episodes_state(state_dict["episodes"])

    def _rows(self, index: Any) -> TensorDictBase:
        """Return stored rows. For an ObservationStorage, observations are omitted."""
        rows = self.buffer.storage.get(index) if self._once is None else self._once.rows(index)
        return torch.stack(rows) if isinstance(rows, list) else rows  # type: ignore[no-any-return]

    def _filled(self) -> int:
        """Return the storage's filled length along its first dimension."""
        storage = self.buffer.storage
        if not len(storage):
            return 0
        return len(storage) if storage.ndim == 1 else int(storage.shape[0])

    def empty(self) -> None:
        """Remove all transitions, including those held back for n-step returns."""
        self.buffer.empty()
        if self.n_step is not None:
            self.n_step.waiting = None

    def close_open_episodes(self, num_envs: int) -> None:
        """Mark the last transition of every open episode as truncated.

        Called when environments start new episodes: in a new run with a pre-filled buffer, or in a
        resumed run without saved environment state.
        """
        if self.n_step is not None and self.n_step.waiting is not None:
            self.n_step.close_open_episodes()
            return
        filled = self._filled()
        if not filled:
            return
        if self._hindsight is not None:
            self._hindsight.close_open_episodes()
        writer = self.buffer.writer
        if not isinstance(writer, RoundRobinWriter):  # other writers have no cursor
            return
        places = min(num_envs, filled) if self.buffer.storage.ndim == 1 else 1
        for number in range(places):
            close(self._rows((int(writer._cursor) - 1 - number) % filled))


def _plain(rows: TensorDictBase) -> dict[str, Any]:
    """Convert a TensorDict to lists and tensors, which can be loaded without running code."""
    keys = sorted(rows.keys(True, True), key=str)
    return {
        "batch_size": list(rows.batch_size),
        "keys": [*map(key_to_list, keys)],
        "values": [rows.get(key) for key in keys],
    }


def _from_plain(rows: dict[str, Any]) -> TensorDictBase:
    entries = dict(zip(map(key_from_list, rows["keys"]), rows["values"]))
    return TensorDict(entries, rows["batch_size"])


def as_minibatches(buffer: Minibatches | ReplayBuffer | None) -> Minibatches:
    """Wrap a TorchRL buffer as a minibatch source. If ``None``, use passes over the last batch."""
    if buffer is None:
        return RolloutMinibatches()
    return ReplayMinibatches(buffer) if isinstance(buffer, ReplayBuffer) else buffer
