"""What the ranks of a run exchange: weights, statistics, requests and counts."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kit import __version__
from kit.advantages import AdvantageNormalizer
from kit.distributed import RankError, Ranks
from kit.envs.normalize import RunningMeanStd, merge_gains
from kit.steps import SettingError, StepLedger
from kit.trainer.checkpoint import normalizer_of
from kit.update import Update


class Request:
    """Attribute of a trainer that hooks and signals set, and that all ranks read alike.

    With several ranks, a new value takes effect when the ranks next agree, because a rank that
    left the loop alone would leave the others waiting.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, owner: type) -> bool:
        return bool(trainer.agreed.get(self.name, False))

    def __set__(self, trainer: Any, value: bool) -> None:
        trainer.requested[self.name] = value
        if trainer.ranks.size == 1 or not value:
            trainer.agreed[self.name] = value


class Meeting:
    """Exchanges between the ranks of a run. With one rank, every method does nothing.

    Args:
        trainer: trainer of this rank.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.ranks = trainer, trainer.ranks
        self._known: dict[str, list[RunningMeanStd]] = {}
        self._averaged: list[Tensor] = []
        self._skips = False  # whether a hook on some rank may end an update phase
        self._compared = False

    # ------------------------------------------------------------------ start
    def begin(self) -> None:
        """Compare versions and settings, and start from the weights of rank 0.

        Raises:
            SettingError: if ranks have other packages, settings or networks.
        """
        if self.ranks.size == 1:
            return
        trainer = self.trainer
        _check_alike(self.ranks, trainer.plan, trainer.config)
        tensors = dict(_tensors(self._learned()))
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for rank, other in enumerate(self.ranks.gather_objects(shapes, "networks")):
            if other != shapes:
                reason = f"has other shapes on rank {rank} than on rank {self.ranks.rank}"
                raise SettingError("loss_module", _first_difference(shapes, other), reason)
        self.ranks.share(tensors.values(), "weights")
        self._averaged = _averaged_buffers(trainer.loss_module)
        self._skips = bool(self.ranks.gather(torch.tensor([self._may_skip()]), "hooks").any())
        self._take_statistics()

    def _learned(self) -> dict[str, Any]:
        """Return the state that all ranks share, keyed by the name of its part."""
        trainer = self.trainer
        found: dict[str, Any] = {"loss_module": trainer.loss_module}
        for kind, statistics in self._statistics().items():
            found[kind] = {name: moments._asdict() for name, moments in statistics.items()}
        for name, update in updates_of(trainer).items():
            found[name] = update.loss_module if update.loss_module is not None else {}
            found[f"{name} optimizer"] = {
                key: optimizer.state_dict()["state"] for key, optimizer in update.optimizers.items()
            }
        return {k: v.state_dict() if isinstance(v, nn.Module) else v for k, v in found.items()}

    # ------------------------------------------------------------------ statistics
    def _statistics(self) -> dict[str, dict[str, RunningMeanStd]]:
        """Return the running statistics of normalisation and advantages, keyed by name."""
        trainer = self.trainer
        normalizer = normalizer_of(trainer.evaluate if trainer.plan.offline else trainer.collector)
        advantage = trainer.advantage
        modules = advantage.modules() if isinstance(advantage, nn.Module) else ()
        running = (m for m in modules if isinstance(m, AdvantageNormalizer) and m.over == "running")
        return {
            "normalization": {} if normalizer is None else dict(normalizer.named_moments()),
            "advantages": {
                str(number): RunningMeanStd(one.mean, one.var, one.count)
                for number, one in enumerate(running)
            },
        }

    def _take_statistics(self) -> None:
        """Remember the shared statistics, to which the next merge adds what each rank learns."""
        if self.ranks.size > 1:
            for kind, statistics in self._statistics().items():
                self._known[kind] = [_on_host(moments) for moments in statistics.values()]

    def merge(self, kind: str) -> None:
        """Give all ranks the statistics of the data of all ranks.

        Args:
            kind: ``"normalization"`` or ``"advantages"``.
        """
        if self.ranks.size == 1 or not self._known[kind]:
            return
        found = list(self._statistics()[kind].values())
        own = [array for moments in map(_on_host, found) for array in moments]
        vector = torch.from_numpy(np.concatenate([array.ravel() for array in own]))
        sizes = [array.size for array in own]
        columns = iter(self.ranks.gather(vector, kind).split(sizes, dim=1))
        for moments, known in zip(found, self._known[kind]):
            shaped = [next(columns).numpy().reshape(-1, *tensor.shape) for tensor in moments]
            merged = merge_gains(known, map(RunningMeanStd, *shaped))
            for tensor, value in zip(moments, merged):
                tensor.copy_(torch.as_tensor(value))
        self._known[kind] = [_on_host(moments) for moments in found]

    def average_buffers(self) -> None:
        """Replace the buffers that a loss declares as averaged by their mean over all ranks."""
        if self._averaged:
            vector = torch.cat([buffer.reshape(-1) for buffer in self._averaged])
            parts = self.ranks.mean(vector, "buffers").split([b.numel() for b in self._averaged])
            for buffer, part in zip(self._averaged, parts):
                buffer.copy_(part.view_as(buffer))

    # ------------------------------------------------------------------ decisions and counts
    def agree(self, what: str = "iteration") -> None:
        """Exchange requests and counts; requests of any rank take effect on all.

        Raises:
            RankError: if ranks made different numbers of policy or gradient steps.
        """
        if self.ranks.size == 1:
            return
        trainer, ledger = self.trainer, self.trainer.ledger
        trainer.batches.count_environment(ledger)
        wishes = [
            trainer.requested.get(name, False) for name in ("_stop_training", "_save_requested")
        ]
        own = [*wishes, self._may_skip(), *_local_counts(ledger), *_alike(ledger)]
        found = self.ranks.gather(torch.tensor([int(one) for one in own]), what)
        _check_counts(found[:, -2:])
        stop, save, self._skips, *sums = found.sum(0)[:-2].tolist()
        ledger.synchronize(*sums)
        if stop and not trainer.agreed.get("_stop_training"):
            reasons = self.ranks.gather_objects(trainer.stop_reason, "reason")
            first = next(r for r, flag in enumerate(found[:, 0].tolist()) if flag)
            trainer.stop_reason = reasons[first]
        trainer.agreed |= {"_stop_training": bool(stop), "_save_requested": bool(save)}

    def sum_counts(self) -> None:
        """Sum the counts that differ between ranks, for a row of metrics."""
        if self.ranks.size > 1:
            own = torch.tensor(_local_counts(self.trainer.ledger))
            self.trainer.ledger.synchronize(*self.ranks.gather(own, "counts").sum(0).tolist())

    def agree_to_skip(self) -> None:
        """After an epoch, skip the rest of the update on all ranks if a hook on any rank asked."""
        if self.ranks.size > 1 and self._skips:
            wish = torch.tensor([int(self.trainer.requested.get("skips_rest_of_update", False))])
            found = self.ranks.gather(wish, "epoch")
            self.trainer.agreed["skips_rest_of_update"] = bool(found.any())

    def _may_skip(self) -> bool:
        stages = self.trainer.stages
        return any(stages[name] for name in _WITHIN_UPDATES)

    # ------------------------------------------------------------------ comparison
    def compare(self) -> None:
        """Compare weights, buffers, optimizers and statistics bitwise.

        Raises:
            RankError: if a tensor differs; the message names the tensor and the ranks.
        """
        if self.ranks.size == 1:
            return
        digests = {name: _digest(tensor) for name, tensor in _tensors(self._learned())}
        everyone = self.ranks.gather_objects(digests, "digest")
        for name in digests:
            ranks = [n for n, other in enumerate(everyone) if other.get(name) != everyone[0][name]]
            if ranks:
                names = ", ".join(map(str, ranks))
                hint = "State that is learned without gradients must be the same on all ranks"
                raise RankError(f"{name} differs between rank 0 and rank {names}. {hint}.")

    def end_update(self, gradient_steps: int) -> None:
        """Average buffers. After the first update, compare, so that differences are found early."""
        self.average_buffers()
        if gradient_steps and not self._compared:
            self._compared = True
            self.compare()


_WITHIN_UPDATES = (
    "process_optim_batch", "process_loss", "post_loss", "post_backward", "post_optim",
    "post_optim_log", "post_epoch_log", "post_epoch", "pre_epoch_log", "pre_epoch",
)  # fmt: skip
"""Stages at which a hook may end an update phase."""


def updates_of(trainer: Any) -> dict[str, Update]:
    """Return the trainer's update and the updates of its hooks, keyed by name."""
    found = {"update": trainer.update}
    for name, hook in trainer.registered_modules.items():
        found[f"hook {name}"] = getattr(hook, "update", None)
    return {name: one for name, one in found.items() if isinstance(one, Update)}


def _local_counts(ledger: StepLedger) -> list[int]:
    """Return the counts that differ between ranks and are summed."""
    return [ledger.local_env_steps, ledger.local_episodes, ledger.local_environment_errors]


def _alike(ledger: StepLedger) -> list[int]:
    """Return the counts that are the same on all ranks."""
    return [ledger.local_policy_steps, ledger.local_gradient_steps]


def _check_counts(found: Tensor) -> None:
    for name, counts in zip(("policy steps", "gradient steps"), found.T.tolist()):
        if len({*counts}) > 1:
            by_rank = ", ".join(f"rank {rank}: {count:,}" for rank, count in enumerate(counts))
            raise RankError(f"ranks made different numbers of {name} ({by_rank})")


def _check_alike(ranks: Ranks, plan: Any, config: Mapping[str, Any]) -> None:
    """Raise SettingError if ranks have other versions of packages or other settings."""
    packages = {
        "kit": __version__, "torch": torch.__version__, "numpy": np.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    mine = {**packages, "plan": repr(plan), **{k: repr(v) for k, v in config.items()}}
    for rank, other in enumerate(ranks.gather_objects(mine, "settings")):
        if other != mine:
            name = _first_difference(mine, other)
            reason = f"differs from {other.get(name)} on rank {rank}"
            hint = "Start all ranks with the same command and the same packages"
            raise SettingError(name, mine.get(name), reason, hint)


def _first_difference(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return next(name for name in (*mine, *other) if mine.get(name) != other.get(name))


def _averaged_buffers(loss: Any) -> list[Tensor]:
    """Return the buffers that modules of the loss declare as ``averaged_over_ranks``.

    TorchRL stores the buffers of an actor or critic in the loss, under the name of the network.
    """
    if not isinstance(loss, nn.Module):
        return []
    networks = {n: one for n, one in vars(loss).items() if isinstance(one, nn.Module)}
    roots = {"": loss, **{f"{name}_params.": one for name, one in networks.items()}}
    names = {
        f"{prefix}{path}.{name}"
        for prefix, root in roots.items()
        for path, module in root.named_modules()
        for name in getattr(module, "averaged_over_ranks", ())
    }
    return [buffer for name, buffer in loss.named_buffers() if name in names]


def _on_host(moments: RunningMeanStd) -> RunningMeanStd:
    """Return a copy of the statistics as arrays."""
    return RunningMeanStd(*(tensor.detach().cpu().numpy().copy() for tensor in moments))


def _tensors(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dictionaries, with dotted names."""
    if isinstance(state, Tensor) and not is_lazy(state):
        yield name, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))


def _digest(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().tobytes(), digest_size=16).hexdigest()
