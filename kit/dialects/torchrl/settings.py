"""The words of TorchRL's own ``Trainer``, its collectors and its replay buffers.

Its unit is the frame: a policy step in a collector, an env step (policy steps times ``frame_skip``)
in the trainer. An iteration is one batch of the collector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from kit.dialects.base import OFF_POLICY, ON_POLICY, Dialect, trains
from kit.dialects.torchrl.counting import RULE, arguments, growing_updates
from kit.steps.errors import SettingError, one_of, whole_number, yes_or_no
from kit.steps.plan import StepPlan

RANDOM, WITHOUT = "random", "without_replacement"


@dataclass
class TorchRL(Dialect):
    """Settings of TorchRL's collector, replay buffer and ``Trainer``."""

    NAME: ClassVar[str] = "torchrl"
    LIBRARY: ClassVar[str] = "TorchRL"
    VERSIONS: ClassVar[Mapping[str, str]] = {
        "0.14.1": "the code of 0.14.1",
        "documented": "the docstrings as they read: optim_steps_per_batch=None is the number of "
        "copies, and init_random_frames counts env steps everywhere",
    }
    ALGORITHMS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("ppo", "a2c", "reinforce"), ON_POLICY),
        **dict.fromkeys(("sac", "dqn", "td3", "ddpg", "redq", "iql", "cql"), OFF_POLICY),
    }
    FACTS: ClassVar[frozenset[str]] = Dialect.FACTS | {"num_envs", "max_episode_steps"}
    MEANS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    AT_LEAST: ClassVar[Mapping[str, int]] = {
        "frames_per_batch": 1,
        "total_frames": 0,
        "frame_skip": 1,
        "optim_steps_per_batch": 0,
        "num_epochs": 0,
        "batch_size": 1,
        "buffer_size": 1,
        "num_envs": 1,
        "max_episode_steps": 1,
    }
    CARRIED: ClassVar[frozenset[str]] = frozenset({"buffer_size"})

    SECTIONS: ClassVar[frozenset[str]] = frozenset({"", "trainer", "collector", "replay_buffer"})
    PATHS: ClassVar[Mapping[str, str]] = {"collector.total_frames": "collector_total_frames"}

    frames_per_batch: int = 1000
    """policy steps of one batch, over all copies, rounded up to equally many of each."""
    total_frames: int = 1_000_000
    """env steps of the run (policy steps times ``frame_skip``), rounded up to whole batches."""
    collector_total_frames: int | None = None
    """policy steps after which the collector ends; ``None`` or -1: never."""
    frame_skip: int = 1
    """env steps of one policy step, as the trainer is told."""
    init_random_frames: int | None = None
    """frames with random actions, rounded up to whole batches: the collector counts policy steps,
    and the trainer begins to train after as many env steps."""
    optim_steps_per_batch: int | None = None
    """minibatches of one epoch, at most; ``None``: until the sampler has none left."""
    num_epochs: int = 1
    """epochs of one batch."""
    batch_size: int | None = None
    """transitions in a minibatch of the replay buffer; ``None``: ``frames_per_batch``."""
    buffer_size: int | None = None
    """transitions that the replay buffer holds; ``None``: a batch, or a million if sampled at
    random."""
    sampler: str | None = None
    """``random``, or ``without_replacement``; ``None``: as the algorithm needs it."""
    iterate: bool = False
    """whether an epoch iterates over the buffer, and so ends with it."""
    drop_last: bool = False
    """whether a last, smaller minibatch is dropped."""
    num_envs: int = field(default=1, kw_only=True)
    """environment copies of the collector."""
    max_episode_steps: int | None = field(default=None, kw_only=True)
    """policy steps after which an episode is truncated; a transform's business."""
    version: str = field(default="0.14.1", kw_only=True)
    """behaviour that is meant; see ``VERSIONS``."""

    def _guess(self) -> str:
        return ON_POLICY if self.sampler == WITHOUT or self.iterate is True else OFF_POLICY

    def _defaults(self) -> Mapping[str, Any]:
        on_policy = self.family == ON_POLICY
        frames = self.frames_per_batch
        return {
            "sampler": WITHOUT if on_policy else RANDOM,
            "batch_size": frames,
            "buffer_size": frames if on_policy else 1_000_000,
        }

    # ------------------------------------------------------------------ to a plan
    @property
    def collected(self) -> int:
        """Policy steps of one batch."""
        return -(-self.frames_per_batch // self.num_envs) * self.num_envs

    def _plan(self) -> StepPlan:
        one_of("sampler", self.sampler, (RANDOM, WITHOUT))
        yes_or_no("iterate", self.iterate)
        yes_or_no("drop_last", self.drop_last)
        batch = self.collected
        iterations = -(-self.total_frames // (batch * self.frame_skip))
        if self.collector_total_frames not in (None, -1):
            own = whole_number("collector_total_frames", self.collector_total_frames)
            iterations = min(iterations, -(-own // batch))
        random, trains = self._random_batches()
        return StepPlan(
            iterations=iterations,
            num_envs=self.num_envs,
            steps_per_env=batch // self.num_envs,
            action_repeat=self.frame_skip,
            max_episode_steps=self.max_episode_steps,
            random_steps=min(random, iterations) * batch,
            learning_starts=trains * batch if trains > 1 else 0,
            final_evaluation=False,
            **self._updates(iterations, trains),
        )

    def _random_batches(self) -> tuple[int, int]:
        """Batches with random actions, and the first batch that is trained on."""
        if self.init_random_frames in (None, -1):
            return 0, 1
        asked = whole_number("init_random_frames", self.init_random_frames)
        trains = max(-(-asked // (self.collected * self.frame_skip)), 1)
        if self.version == "documented":
            return (trains if asked else 0), trains
        return -(-asked // self.collected), trains

    def _updates(self, iterations: int, first: int) -> dict[str, Any]:
        limit = self.optim_steps_per_batch
        if limit is None and self.version == "documented":
            limit = self.num_envs
        if self.sampler == RANDOM:
            if limit is None:
                raise SettingError(
                    "optim_steps_per_batch", None, "never ends with a random sampler", [1]
                )
            return {
                "gradient_steps_per_iteration": limit * self.num_epochs,
                "minibatch_size": self.batch_size,
            }
        if limit is None and not self.iterate:
            raise SettingError("optim_steps_per_batch", None, "never ends without iterate", [1])
        assert self.buffer_size is not None
        if self.buffer_size > self.collected:
            return self._growing(limit, iterations, first)
        return self._without_replacement(limit)

    def _growing(self, limit: int | None, iterations: int, first: int) -> dict[str, Any]:
        assert self.batch_size is not None
        assert self.buffer_size is not None
        held = [min(k * self.collected, self.buffer_size) for k in (first, first + 1, iterations)]
        return growing_updates(
            rows=held[:1] + held[1:] * (iterations > first),
            size=self.batch_size,
            buffer_size=self.buffer_size,
            epochs=self.num_epochs,
            limit=limit,
            iterate=self.iterate,
            drop_last=self.drop_last,
        )

    def _without_replacement(self, limit: int | None) -> dict[str, Any]:
        assert self.batch_size is not None
        assert self.buffer_size is not None
        rows = min(self.collected, self.buffer_size)
        size = min(self.batch_size, rows)
        if self.drop_last and self.batch_size > rows:
            raise SettingError(
                "batch_size", self.batch_size, f"is more than the {rows} frames of a buffer", [rows]
            )
        made: dict[str, Any] = {
            "update_epochs": self.num_epochs,
            "minibatch_size": size,
            "minibatches_per_epoch": limit or None,
            "last_minibatch": "drop" if self.drop_last else "smaller",
            "train_on_newest": rows if rows < self.collected else None,
        }
        if limit == 0:
            return made | {"update_epochs": 0}
        available = rows // size if self.drop_last else -(-rows // size)
        if self.iterate and (limit is None or limit > available):
            return made | {"minibatches_per_epoch": None}
        if self.iterate:
            return made | {"counting": "torchrl"}
        return made | ({"counting": "torchrl:sample"} if self.drop_last else _CARRY)

    # ------------------------------------------------------------------ from a plan
    @classmethod
    def _from(cls, plan: StepPlan, settings: Mapping[str, Any]) -> Self:
        if plan.world_size > 1 or plan.collects_episodes:
            name = "min_episodes" if plan.collects_episodes else "world_size"
            raise SettingError(name, getattr(plan, name), "cannot be said of a TorchRL trainer")
        if not plan.frames_per_batch:
            why = "cannot be said of a TorchRL trainer: an iteration collects"
            raise SettingError("steps_per_env", plan.steps_per_env, why, [1])
        made: dict[str, Any] = {
            "frames_per_batch": plan.frames_per_batch,
            "total_frames": plan.total_policy_steps * plan.action_repeat,
            "frame_skip": plan.action_repeat,
            "init_random_frames": _init_random_frames(plan, settings.get("version")) or None,
            "num_envs": plan.num_envs,
            "max_episode_steps": plan.max_episode_steps,
            "batch_size": plan.minibatch_size or plan.frames_per_batch,
        }
        if not plan.on_policy:
            ratio = plan.replay_ratio
            steps = plan.gradient_steps_per_iteration or 0
            each = steps if ratio is None else round(ratio * plan.frames_per_batch)
            each = each if trains(plan) else 0
            algo = settings.get("algo", OFF_POLICY)
            if each and plan.counting.startswith(RULE):
                buffer_size, epochs, most = arguments(plan)
                return cls(
                    **made,
                    algo=algo,
                    sampler=WITHOUT,
                    num_epochs=epochs,
                    optim_steps_per_batch=most,
                    iterate=True,
                    drop_last=True,
                    buffer_size=buffer_size,
                )
            return cls(**made, algo=algo, sampler=RANDOM, optim_steps_per_batch=each)
        limit = plan.minibatches_per_epoch
        rows = plan.train_on_newest or plan.frames_per_batch
        straddles = plan.last_minibatch == "carry" or plan.counting == "torchrl:sample"
        if straddles and limit is None:
            limit = rows // made["batch_size"]
        elif limit is None and settings.get("version") == "documented":
            limit = rows // made["batch_size"] + 2  # None would mean the number of copies
        return cls(
            **made,
            algo=settings.get("algo", ON_POLICY),
            sampler=WITHOUT,
            num_epochs=plan.update_epochs or 0,
            optim_steps_per_batch=limit,
            iterate=not straddles,
            drop_last=plan.last_minibatch == "drop",
            buffer_size=rows,
        )

    def notes(self) -> list[str]:
        """Return what a reader of these settings would not expect, a sentence each."""
        from kit.dialects.torchrl.notes import notes

        return notes(self.resolved(), self.to_plan())


def _init_random_frames(plan: StepPlan, version: str | None) -> int:
    """Frames that make the plan's random steps, and begin to train where it does."""
    batch, first = plan.frames_per_batch, plan.first_training_iteration
    skipped = batch * plan.action_repeat
    if version == "documented":
        return first * skipped if plan.random_steps else 0
    for frames in (plan.random_steps, (first - 1) * skipped + 1, first * skipped):
        random = min(-(-frames // batch) * batch, plan.iterations * batch)
        starts = max(-(-frames // skipped), 1)
        if random == min(plan.random_steps, plan.iterations * batch) and starts == first:
            return frames
    return plan.random_steps


_CARRY = {"last_minibatch": "carry"}
