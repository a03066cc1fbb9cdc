"""What a minibatch of a replay buffer is: samples of a TorchRL replay buffer."""

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
    """Samples of a TorchRL replay buffer, any storage and any sampler.

    Args:
        buffer: TorchRL's buffer.
        n_step: makes transitions of several steps before they are stored; ``None``: of one.
        device: where minibatches are delivered, from a storage on the host; ``None``: where they
            are stored.

    A storage with ``ndim=1`` gets transitions in the order in which they happened, and whole
    episodes one after the other; one with ``ndim=2`` (for a slice sampler) gets batches
    ``[num_envs, steps]`` as they are.

    Attributes:
        keys_read: of the entries of a minibatch that will be read; empty: any may be. Others may
            be left out.
        reads_minibatches: whether entries of minibatches are read after they were returned, other
            than a loss's outputs. A subclass that does, in ``update_priority``, sets it to true:
            gradient steps then receive all entries.
        normalizer: normalises observations and rewards of minibatches by its statistics at the time
            of drawing; stored rows are raw. ``None``: minibatches are as they were stored.

    Raises:
        SettingError: if the buffer's parts do not go together, or its random numbers are drawn in
            other threads (``prefetch``).
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
        self._ordered = self._rely_on_order()
        if n_step is not None and isinstance(buffer, HERReplayBuffer):
            works = "use n_step=1: rewards are computed again for single transitions"
            raise SettingError("n_step", n_step.steps, "does not go with hindsight", works)
        if getattr(buffer, "_prefetch", False):
            why = "draws random numbers in other threads, so that no run repeats itself or resumes"
            raise SettingError("prefetch", buffer._prefetch_cap, why, [0])
        capacity = getattr(buffer.sampler, "_max_capacity", storage.max_size)
        if capacity < storage.max_size:
            why = f"is less than the {storage.max_size} transitions that the buffer holds"
            raise SettingError("max_capacity", capacity, why, [storage.max_size])
        prioritized = isinstance(buffer.sampler, TorchRLPrioritizedSampler)
        if prioritized and not isinstance(buffer.sampler, PrioritizedSampler):
            name = type(buffer.sampler).__name__
            why = "of TorchRL keeps priorities in compiled trees, which no checkpoint holds"
            works = "use kit.buffers.PrioritizedSampler, with the same arguments"
            raise SettingError("sampler", name, why, works)

    def normalize_by(self, normalizer: Normalizer | None) -> None:
        """Store raw rows, and normalise minibatches by the present statistics of a normaliser.

        To be called before anything is stored. With ``n_step`` each reward is normalised and
        clipped before they are summed, as by Stable-Baselines3's ``NStepReplayBuffer``.
        """
        self.normalizer = normalizer
        if self.n_step is not None:
            self.n_step.apart = normalizer is not None and normalizer.reward is not None

    def extend(self, batch: TensorDictBase, keys: Sequence[Any] = ()) -> None:
        """Add the batch to the buffer; with ``n_step``, the last steps wait for what follows.

        Raises:
            SettingError: if the sampler cannot separate the environments of this batch, or the
                buffer its episodes.
        """
        del keys  # a buffer is filled before its loss is known to read anything
        if self.device is not None:
            batch = batch.to("cpu")
        by_step = batch.ndim == 2 and self.buffer.storage.ndim == 1
        for part in self._ordered if by_step else ():
            self._tell_environments(part, batch)
        if by_step and len(batch) > 1:
            self._refuse_transforms(len(batch))
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
            # TensorDictReplayBuffer fails where it notes the places of such rows in the batch.
            ReplayBuffer.extend(self.buffer, batch)
        else:
            self.buffer.extend(batch)

    def _without_padding(self, batch: TensorDictBase, mask: Tensor) -> TensorDictBase:
        """The transitions of whole episodes, one episode after the other."""
        if self.buffer.storage.ndim == 2:
            why = "would hold the padding of whole episodes, with ndim=2"
            raise SettingError("storage", type(self.buffer.storage).__name__, why, "use ndim=1")
        episodes = batch[mask]
        if self.n_step is not None and int(episodes["next", "done"].sum()) < len(batch):
            why = "would sum rewards beyond the end of a batch, which cuts episodes in pieces"
            raise SettingError("n_step", self.n_step.steps, why, "collect without split_trajs")
        return episodes

    def _joining(self) -> list[str]:
        """Names of the buffer's transforms that join steps to those that follow."""
        joining = (MultiStepTransform, Reward2GoTransform)
        return [type(one).__name__ for one in self._transforms if isinstance(one, joining)]

    @property
    def summed(self) -> NStep | None:
        """How rewards of several steps are summed, here or by a transform of the buffer."""
        kinds = [one for one in self._transforms if isinstance(one, MultiStepTransform)]
        found = [NStep(one.n_steps, float(one.gamma)) for one in kinds]
        return self.n_step or next(iter(found), None)

    def _refuse_transforms(self, num_envs: int) -> None:
        """Refuse what takes rows that follow each other for steps of one environment."""
        found = [("transform", name) for name in self._joining()]
        unit = getattr(self.buffer, "_sample_unit", None)
        for field, name in found + ([] if unit is None else [("sample_unit", type(unit).__name__)]):
            why = f"would join steps of other environments: {num_envs} write in turn"
            works = "use make_replay_buffer with n_step or sequence_length, or a storage of ndim=2"
            raise SettingError(field, name, why, works)

    def _rely_on_order(self) -> list[Any]:
        """The parts that rely on the order in which environments write."""
        of_torchrl = (SliceSampler, HERReplayBuffer)
        parts = (self.buffer.storage, self.buffer.sampler, self.buffer)
        single = self.sequences is not None and self.sequences.sequence_length == 1
        alone = self.sequences if single else None  # a sequence of one step does not
        return [
            part
            for part in parts
            if part is not alone and (isinstance(part, of_torchrl) or hasattr(part, "belong_to"))
        ]

    @property
    def joins_steps(self) -> bool:
        """Whether steps are joined to those that follow, until an episode ends."""
        return self.n_step is not None or bool(self._ordered) or bool(self._joining())

    def _tell_environments(self, ordered: Any, batch: TensorDictBase) -> None:
        """Say how many environments write in turn."""
        name, num_envs = type(ordered).__name__, batch.shape[0]
        whole_episodes = batch.get(("collector", "mask"), None) is not None
        if isinstance(ordered, SliceSampler):
            if num_envs > 1 and not whole_episodes:
                why = f"would mix environments in a slice: {num_envs} write in turn"
                works = "use LazyTensorStorage(..., ndim=2) or kit.buffers.SequenceSampler"
                raise SettingError("sampler", name, why, works)
        elif whole_episodes:
            why = "needs as many transitions of every environment, and whole episodes differ"
            raise SettingError("buffer", name, why, "collect with steps_per_env")
        elif hasattr(ordered, "belong_to"):
            ordered.belong_to(num_envs)
        elif num_envs > 1:
            why = f"would take goals from other episodes: {num_envs} environments write in turn"
            works = "use kit.buffers.HindsightReplayBuffer, with the same arguments"
            raise SettingError("buffer", name, why, works)

    def epoch(self, plan: StepPlan, limit: int) -> Iterator[MinibatchGroup]:
        """Yield a sample for each gradient step that is due; all of them are one epoch.

        Raises:
            SettingError: if nothing has been stored yet, or a sampler gives fewer
                transitions than it is asked for.
        """
        filled = self._direct.filled or len(self.buffer)
        if not filled:
            why = "comes before the replay buffer holds a transition"
            works = "begin later: transitions of n_step steps wait for n_step more"
            raise SettingError("learning_starts", plan.learning_starts, why, works)
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
        """Draw minibatches of so many transitions: at least one, at most ``count``."""
        minibatches = self._stored_samples(size, count)
        if self.normalizer is not None:
            minibatches = [self._normalized(one, self.normalizer) for one in minibatches]
        if self.device is None:
            return minibatches
        there = [{k: v.to(self.device) for k, v in leaves(one).items()} for one in minibatches]
        return [nested(one, [size]) for one in there]

    def _normalized(self, minibatch: TensorDictBase, normalizer: Normalizer) -> TensorDictBase:
        """A minibatch as it is trained on; n-step rewards are summed after they are clipped."""
        entries, reward = normalizer.minibatch(leaves(minibatch)), ("next", "reward")
        if self.n_step is not None and self.n_step.apart and reward in entries:
            entries[reward] = self.n_step.summed(entries[reward])
        return nested(entries, minibatch.batch_size, minibatch.device)

    def _stored_samples(self, size: int, count: int) -> list[TensorDictBase]:
        """Minibatches where they are stored."""
        keys = self.keys_read if self.sequences is None else ()
        if minibatches := self._direct.samples(size, count, keys):
            return minibatches
        own = () if self.buffer.batch_size == size else (size,)
        # A sampler that uses transitions up raises where none is left.
        minibatch = self.buffer.sample(*own) if len(self.buffer) else TensorDict(batch_size=[0])
        if (gave := minibatch.batch_size.numel()) < size:
            name = type(self.buffer.sampler).__name__
            why = f"gave {gave} transitions for a minibatch of {size}"
            works = "use one that gives as many as it is asked for, such as RandomSampler"
            raise SettingError("sampler", name, why, works)
        return [minibatch]

    @property
    def gpu(self) -> torch.device | None:
        """The GPU on which transitions are kept, wherever batches come from; ``None``: on none."""
        kept = getattr(self.buffer.storage, "device", None)
        return kept if isinstance(kept, torch.device) and kept.type == "cuda" else None

    @property
    def copies(self) -> bool:
        """Whether batches are copied when they are stored."""
        transformed = len(self._transforms) > 0  # by what may keep them
        return isinstance(self.buffer.storage, LazyTensorStorage) and not transformed

    @property
    def reads_loss_outputs(self) -> bool:
        """Whether the sampler has priorities, which follow from errors that the loss writes."""
        return type(self.buffer.sampler).update_priority is not Sampler.update_priority

    def update_priority(self, minibatch: TensorDictBase) -> None:
        """Set the priorities of a minibatch to its new errors, where the sampler has priorities.

        Raises:
            SettingError: if the loss wrote no errors.
        """
        buffer = self.buffer
        if not self.reads_loss_outputs:
            return
        key = getattr(buffer, "priority_key", "td_error")
        errors = entry(minibatch, key)
        if errors is None:
            why = f"needs {key!r}, which the loss does not write"
            works = "use a loss that writes it, such as DQNLoss, or RandomSampler"
            raise SettingError("sampler", type(buffer.sampler).__name__, why, works)
        self._direct.update_priority(minibatch, errors)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows that are filled, where writer and sampler are, the steps that wait."""
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
        """Restore what :meth:`state_dict` returned.

        Raises:
            SettingError: if it is of a buffer of another size, whose oldest rows are elsewhere.
        """
        size = self.buffer.storage.max_size
        if (saved := state_dict.get("size", size)) != size:
            why = f"is not that of the buffer that was saved, {saved}"
            raise SettingError("buffer_size", size, why, [saved])
        if not state_dict.get("raw", False):  # earlier versions stored normalised rows
            self.normalize_by(None)
        filled, once = int(state_dict["filled"]), self._once
        self.buffer.storage._empty()  # rows that are set are added to those that there are
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
            what = f"steps that {' and '.join(self._joining())} holds back are in no checkpoint"
            warnings.warn(f"{what}: they are missing now, use n_step=... instead", stacklevel=2)
        if self._hindsight is not None:
            self._hindsight.load_episodes_state(state_dict["episodes"])

    def _rows(self, index: Any) -> TensorDictBase:
        """Stored rows as they are, without observations that are stored once."""
        rows = self.buffer.storage.get(index) if self._once is None else self._once.rows(index)
        return torch.stack(rows) if isinstance(rows, list) else rows  # type: ignore[no-any-return]

    def _filled(self) -> int:
        """Places along the storage's first dimension that hold something, used up or not."""
        storage = self.buffer.storage
        if not len(storage):
            return 0
        return len(storage) if storage.ndim == 1 else int(storage.shape[0])

    def close_open_episodes(self, num_envs: int) -> None:
        """Mark the newest transition of every env as truncated, where an episode is still open.

        For a run whose environments begin episodes: a new one with a buffer that was filled before,
        or one that is resumed with environments that could not give their state.
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
        if not isinstance(writer, RoundRobinWriter):  # only it knows what it wrote last
            return
        places = min(num_envs, filled) if self.buffer.storage.ndim == 1 else 1
        for number in range(places):
            close(self._rows((int(writer._cursor) - 1 - number) % filled))


def _plain(rows: TensorDictBase) -> dict[str, Any]:
    """Return a TensorDict as lists and tensors, which a checkpoint holds without code."""
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
    """Return the source of minibatches: a TorchRL buffer as it is, passes for ``None``."""
    if buffer is None:
        return RolloutMinibatches()
    return ReplayMinibatches(buffer) if isinstance(buffer, ReplayBuffer) else buffer
