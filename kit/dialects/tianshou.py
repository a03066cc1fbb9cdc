"""The vocabulary of tianshou (https://github.com/thu-ml/tianshou).

Its unit is the environment step, the policy step here. A training step, the iteration here,
collects ``c = ceil(step_per_collect / m) * m`` of them with ``m`` environments. An epoch is a
reporting period: as many training steps as reach ``step_per_epoch``, then a test. ``Tianshou`` has
the names of 1.x (``SamplingConfig``), ``Tianshou2`` those of 2.x.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, ClassVar, Self

from kit.dialects.base import OFF_POLICY, OFFLINE, ON_POLICY, Dialect, ratio_of
from kit.dialects.fields import Acts, Refused, acts, counts, fact, refused
from kit.steps.counts import LARGEST_RATIO
from kit.steps.errors import SettingError, real_number, whole_number
from kit.steps.plan import StepPlan
from kit.steps.schema import NonNegativeInt, PositiveInt

_ALGORITHMS = {
    **dict.fromkeys(("ppo", "a2c", "reinforce", "npg", "trpo", "gail"), ON_POLICY),
    **dict.fromkeys(("sac", "dqn", "td3", "ddpg", "discrete_sac", "redq", "iqn"), OFF_POLICY),
    **dict.fromkeys(("c51", "rainbow", "qrdqn", "fqf", "bdqn"), OFF_POLICY),
    **dict.fromkeys(("bcq", "cql", "td3_bc", "discrete_cql", "discrete_bcq"), OFFLINE),
    **dict.fromkeys(("discrete_crr", "imitation"), OFFLINE),
}
_COLLECTING = (ON_POLICY, OFF_POLICY)
BUFFER_SIZE = 4096
"""Default of ``buffer_size``."""
INITIAL_TESTS = {"1.1.0": 2, "2.0.1": 1}
"""Tests before training: in 1.1.0 ``run`` resets the trainer, and iterating over it once more."""


def _stores_next(ignored: bool, settings: Any) -> bool:
    return not ignored


def _stacked(given: Any, settings: Any) -> int:
    """Frames of a stack of which the newest alone is stored."""
    frames, newest = settings.replay_buffer_stack_num, settings.replay_buffer_save_only_last_obs
    if frames > 1 and not newest:
        why = "makes stacks that the policy has not acted on"
        works = "stack frames in the environment, and set replay_buffer_save_only_last_obs=true"
        raise SettingError("replay_buffer_stack_num", frames, why, works)
    if frames == 1:  # by default what is observed is stored as it is, whatever it is a stack of
        why = "leaves one frame of stacks that the policy has acted on"
        works = "set replay_buffer_stack_num to the frames that the environment stacks"
        raise SettingError("replay_buffer_save_only_last_obs", newest, why, works)
    return int(frames)


_USED_UP = Refused("a batch of on-policy algorithms is used up at once")


def _capacity(given: int, settings: Any) -> int:
    """The transitions that the buffer holds: equally many of each environment."""
    envs = settings.said()["envs"]
    return int(-(-given // envs) * envs)


def _as(neutral: str, default: Any, only: tuple[str, ...] = (), **more: Any) -> Any:
    """A field that counts, with its name in both generations: a field of ``Sampling``."""
    return field(default=default, metadata={"neutral": neutral, "only": only, **more})


@dataclass
class TianshouSettings(Dialect):
    """What both generations of names have in common."""

    LIBRARY = "tianshou"
    ALGORITHMS: ClassVar = _ALGORITHMS
    ALIASES: ClassVar = {"pg": "reinforce", "bdq": "bdqn", "branchingdqn": "bdqn"} | {
        "rainbowdqn": "rainbow"
    }
    CANNOT: ClassVar = {"world_size": (1, "one process trains")}

    batch_size: PositiveInt | None = _as("batch_size", 64)
    """transitions in a minibatch; ``None``: all that was collected; off-policy the whole buffer,
    though the documentation of 2.x has no ``None`` there."""
    num_test_envs: PositiveInt = refused(
        "there is an environment for each episode of an evaluation", 1
    )
    """test environments."""
    buffer_size: PositiveInt = _as(
        "buffer", BUFFER_SIZE, use=Acts("buffer_size", _capacity, OFF_POLICY)
    )
    """transitions in the replay buffer, rounded up to equally many of each environment."""
    start_timesteps: NonNegativeInt = _as("start", 0, _COLLECTING)
    """environment steps collected before training, outside of every epoch."""
    start_timesteps_random: bool = _as("start_random", False, _COLLECTING)
    """whether these have random actions."""
    replay_buffer_ignore_obs_next: bool = acts(
        "store_next_observation", False, _stores_next, family=OFF_POLICY, otherwise=_USED_UP
    )
    """whether the buffer does not store next observations."""
    replay_buffer_save_only_last_obs: bool = acts(
        "stacked_frames", False, _stacked, family=OFF_POLICY, otherwise=_USED_UP
    )
    """whether the buffer stores only the last of stacked frames."""
    replay_buffer_stack_num: PositiveInt = acts(
        "stacked_frames", 1, _stacked, family=OFF_POLICY, otherwise=_USED_UP
    )
    """frames that the buffer stacks into one observation; with ``save_only_last_obs``, as many as
    the environment stacks: what is learned from is what was acted on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        envs = self.neutral()["envs"]
        if getattr(self, envs) == -1:
            setattr(self, envs, os.cpu_count() or 1)

    @classmethod
    def neutral(cls) -> dict[str, str]:
        """Names in common to both generations, and the fields of this one."""
        return {f.metadata["neutral"]: f.name for f in fields(cls) if "neutral" in f.metadata}

    def said(self) -> dict[str, Any]:
        """The settings under names in common to both generations."""
        return {neutral: getattr(self, own) for neutral, own in self.neutral().items()}

    def implied_algorithm(self) -> str:
        """The family that the given settings imply: gradient steps per sample are off-policy."""
        said = self.said()
        off_policy = said["per_sample"] != 1.0 or said["repeat"] is None
        return OFF_POLICY if off_policy or said["start_random"] is True else ON_POLICY

    def sampling(self) -> Sampling:
        """Resolved settings in names common to both generations.

        Raises:
            SettingError: if they contradict each other, or the library fails.
        """
        return Sampling(names=self, family=self.family, version=self.version, **self.said())

    def _plan(self) -> dict[str, Any]:
        return self.sampling().plan()

    @classmethod
    def _from(cls, plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        said = _said_for(plan)
        made = {own: said[neutral] for neutral, own in cls.neutral().items()}
        return made | {"algo": settings.get("algo", said["family"])}

    def _notes(self, plan: StepPlan) -> Iterator[str]:
        return self.sampling().notes()


@dataclass
class Tianshou(TianshouSettings):
    """``SamplingConfig`` of tianshou 1.x, field by field."""

    NAME = "tianshou"
    VERSIONS: ClassVar = {
        "1.1.0": "the code of 1.1.0; two tests before training, and num_epochs=0 runs one epoch",
    }
    SECTIONS = frozenset({"", "sampling_config", "sampling"})

    num_epochs: NonNegativeInt = _as("epochs", 100)
    """epochs of training, each of as many training steps as reach ``step_per_epoch``, and a test;
    the run has ``num_epochs * ceil(step_per_epoch / c) * c`` environment steps."""
    step_per_epoch: PositiveInt = _as("epoch_steps", 30000)
    """environment steps of one epoch, rounded up to whole training steps."""
    num_train_envs: PositiveInt = _as("envs", -1)
    """training environments; -1: as many as the machine has CPUs."""
    train_seed: int = acts("seed", 42)
    """seed of the training environments."""
    num_test_episodes: PositiveInt = _as("test_episodes", 1)
    """episodes of one test, over all test environments."""
    step_per_collect: PositiveInt = _as("collect", 2048, _COLLECTING)
    """environment steps collected in one training step, rounded up to equally many of each."""
    repeat_per_collect: int | None = _as("repeat", 1, (ON_POLICY,))
    """passes over the collected batch (on-policy)."""
    update_per_step: float = _as("per_sample", 1.0, (OFF_POLICY,))
    """gradient steps per collected step (off-policy): ``round(update_per_step * c)`` in each
    training step, where a half goes to the even number and 0 is an error."""
    stop_rew: float | None = fact(use=Acts("stop_at_return"))
    """mean return of a test at which the run ends, after that epoch (``stop_fn``)."""
    test_return: float | None = fact()
    """return of every test episode, where it is known beforehand."""

    @property
    def test_seed(self) -> int:
        """Seed of the test environments."""
        return self.train_seed + self.num_train_envs

    def sampling(self) -> Sampling:
        """As for both generations; a run may end with its first test."""
        made = super().sampling()
        if self.family == ON_POLICY:
            whole_number("repeat_per_collect", self.repeat_per_collect)
        stop, known = self.stop_rew, self.test_return
        if stop is not None:
            made.stops = known is not None and known >= stop
        return made


@dataclass
class Tianshou2(TianshouSettings):
    """``OnPolicyTrainingConfig`` and ``OffPolicyTrainingConfig`` of tianshou 2.x in one."""

    NAME = "tianshou2"
    VERSIONS: ClassVar = {"2.0.1": "the code of 2.0.1; one test before training"}
    SECTIONS = frozenset({"", "training_config", "training"})

    max_epochs: NonNegativeInt = _as("epochs", 100)
    """epochs of training (``num_epochs`` of 1.x)."""
    epoch_num_steps: PositiveInt = _as("epoch_steps", 30000)
    """environment steps of one epoch, rounded up to whole training steps."""
    num_training_envs: PositiveInt = _as("envs", -1)
    """training environments; -1: as many as the machine has CPUs."""
    test_step_num_episodes: NonNegativeInt = _as("test_episodes", -1)
    """episodes of one test; -1: one for each test environment; 0: none, where the code fails."""
    collection_step_num_env_steps: PositiveInt = _as("collect", 2048, _COLLECTING)
    """environment steps collected in one training step, rounded up to equally many of each."""
    collection_step_num_episodes: PositiveInt | None = counts(only=_COLLECTING)
    """episodes collected in one training step; the code never forwards it, and fails."""
    test_in_training: bool = refused("evaluations come between iterations", False, only=_COLLECTING)
    """whether a stop criterion met in training leads to a test."""
    update_step_num_repetitions: NonNegativeInt = _as("repeat", 1, (ON_POLICY,))
    """passes over the collected batch (on-policy)."""
    update_step_num_gradient_steps_per_sample: float = _as("per_sample", 1.0, (OFF_POLICY,))
    """gradient steps per collected step (off-policy), rounded in each training step."""
    episode_length: PositiveInt | None = fact()
    """steps of every episode; no count follows from it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test_step_num_episodes == -1:
            self.test_step_num_episodes = self.num_test_envs

    def unchanged(self) -> Self:
        """The library's defaults; there are as many test episodes as test environments."""
        made = super().unchanged()
        made.test_step_num_episodes = self.num_test_envs
        return made

    def sampling(self) -> Sampling:
        """As for both generations; what the code cannot do is refused."""
        if self.test_step_num_episodes == 0:
            why = "fails in tianshou 2.0.1, which always tests"
            raise SettingError("test_step_num_episodes", 0, why, [-1, 1])
        episodes = self.collection_step_num_episodes
        if episodes is not None and self.family != OFFLINE:
            why = "is never forwarded by tianshou 2.0.1, which fails"
            hint = "give collection_step_num_env_steps"
            raise SettingError("collection_step_num_episodes", episodes, why, [None], hint)
        return super().sampling()


def _renamed(old: type[Any], new: type[Any]) -> dict[str, str]:
    """Names of one generation, and those of another where they differ."""
    names, others = old.neutral(), new.neutral()
    return {name: others[n] for n, name in names.items() if others.get(n, name) != name}


Tianshou.RENAMED = _renamed(Tianshou2, Tianshou)
Tianshou2.RENAMED = _renamed(Tianshou, Tianshou2)


@dataclass(kw_only=True)
class Sampling:
    """Settings of tianshou, resolved and checked, under names in common to both generations.

    The fields of a generation say at their place which of these names they have.
    """

    family: str
    version: str
    epochs: int
    epoch_steps: int
    envs: int
    collect: int
    batch_size: int | None
    repeat: int | None
    per_sample: float
    start: int
    start_random: bool
    test_episodes: int
    buffer: int
    names: Any = None
    """the settings of one generation, for their names in messages."""
    stops: bool = False
    """whether the first test after an epoch ends the run."""

    # ------------------------------------------------------------------ counts
    def up(self, steps: int) -> int:
        """``steps``, rounded up to equally many of each environment."""
        return -(-steps // self.envs) * self.envs

    @property
    def capacity(self) -> int:
        """Transitions that the replay buffer holds."""
        return self.up(self.buffer)

    @property
    def collected(self) -> int:
        """Environment steps of one collection."""
        return self.up(self.collect)

    @property
    def trainings_per_epoch(self) -> int:
        """Training steps of one epoch."""
        return -(-self.epoch_steps // self.collected)

    @property
    def epochs_run(self) -> int:
        """Epochs that are run: 1.1.0 asks whether it has ended only after the first."""
        epochs = max(self.epochs, 1) if self.version == "1.1.0" else self.epochs
        return min(epochs, 1) if self.stops else epochs

    def name_of(self, neutral: str) -> str:
        """Name of a field in the generation that is spoken."""
        return str(self.names.neutral()[neutral])

    def gradient_steps(self) -> int:
        """Gradient steps of one training step (off-policy)."""
        name, ratio = self.name_of("per_sample"), self.per_sample
        ratio = real_number(name, ratio, 0, LARGEST_RATIO)
        steps = round(ratio * self.collected)
        if steps == 0:
            rounded = f"round({ratio} * {self.collected}) = 0"
            why = f"makes {rounded} gradient steps of a collection, where tianshou fails"
            raise SettingError(name, ratio, why, [1 / self.collected])
        return steps

    # ------------------------------------------------------------------ plan
    def plan(self) -> dict[str, Any]:
        """The settings of the plan."""
        offline = self.family == OFFLINE  # an epoch is so many gradient steps
        every = 1 if offline else self.trainings_per_epoch
        made: dict[str, Any] = {
            "iterations": self.epochs_run * every,
            "minibatch_size": self.batch_size,
            "initial_evaluations": INITIAL_TESTS[self.version],
            "evaluation_every_iterations": every,
            "evaluation_episodes": self.test_episodes,
        }
        if not self.test_episodes:
            made = {name: value for name, value in made.items() if "evaluation" not in name}
        if offline:
            return made | {"steps_per_env": 0, "gradient_steps_per_iteration": self.epoch_steps}
        made |= {"num_envs": self.envs, "steps_per_env": self.collected // self.envs}
        made |= {"random_steps": 0, "prefill_steps": self.up(self.start)}
        made["prefill_random"] = self.start_random
        if self.family == ON_POLICY:
            return made | self._on_policy()
        return made | {"gradient_steps_per_iteration": self.gradient_steps()}

    def _on_policy(self) -> dict[str, Any]:
        start = self.up(self.start)
        rows = self.collected + start
        newest = None
        if self.capacity < rows:
            newest = rows = self.capacity
        return {
            "update_epochs": self.repeat,
            "minibatch_size": None if self.batch_size is None else min(self.batch_size, rows),
            "last_minibatch": "merge",
            "prefill_in_first_batch": start > 0,
            "train_on_newest": newest,
        }

    # ------------------------------------------------------------------ caveats
    def notes(self) -> Iterator[str]:
        """One sentence for each caveat of resolved settings."""
        if self.names.algo not in self.names.ALGORITHMS:
            read = self.family.replace("_", "-")
            yield f"Read as {read}: no algorithm is named, algo=... does."
        if self.family == OFFLINE:
            yield "Offline, an epoch is so many gradient steps; nothing is collected."
            return
        if self.collected != self.collect:
            yield f"A collection is {self.collected} steps: equally many of each environment."
        epoch = self.trainings_per_epoch * self.collected
        if epoch != self.epoch_steps:
            yield f"An epoch is {epoch:,} steps: {self.trainings_per_epoch:,} whole collections."
        if self.epochs_run != self.epochs:
            yield "num_epochs=0 still runs one epoch."
        if INITIAL_TESTS[self.version] == 2:
            yield "The initial test is run twice: there are two tests more than epochs."
        stop = getattr(self.names, "stop_rew", None)
        if stop is not None and not self.stops:
            yield (
                f"stop_rew={stop:g} ends the run after the first epoch whose test reaches it: "
                "these counts are those of a run that never does. Give test_return where it is "
                "known."
            )
            yield (
                "An initial test that reaches stop_rew ends the run after the first epoch, "
                "whatever its test; recipes ask the tests after epochs alone."
            )
        if self.names.algo == "dqn":
            yield "Its loss is the mean of squared errors, that of recipes the Huber loss."
        yield from self._start_notes()
        yield from self._schedule_notes()
        yield from self._ratio_notes() if self.family == OFF_POLICY else self._batch_notes()

    def _start_notes(self) -> Iterator[str]:
        if not self.start:
            return
        yield f"start_timesteps: {self.up(self.start):,} steps before the epochs, then a reset."
        if self.family == ON_POLICY:
            yield "They are trained on as part of the first batch."

    def _schedule_notes(self) -> Iterator[str]:
        """Its linear schedule falls with each update of the policy, off-policy each gradient step.

        It is planned for ``ceil(step_per_epoch / step_per_collect)`` of them in an epoch, before
        ``step_per_collect`` is rounded up to equally many of each environment.
        """
        if not self.epochs:
            return
        planned = -(-self.epoch_steps // self.collect) * self.epochs
        off_policy = self.family == OFF_POLICY
        trainings = self.trainings_per_epoch * self.epochs
        made = trainings * (self.gradient_steps() if off_policy else 1)
        counted = "gradient steps" if off_policy else "training steps"
        told = (
            f"A linear learning rate counts {counted}: it is planned for {planned:,} of them, and"
        )
        if made > planned:
            yield f"{told} {made:,} are made: after {planned:,} it is zero, and then negative."
        elif made < planned:
            share = 1 - made / planned
            yield f"{told} {made:,} are made: it ends at {share:.3g} of its first value."

    def _ratio_notes(self) -> Iterator[str]:
        name, ratio = self.name_of("per_sample"), self.per_sample
        steps = self.gradient_steps()
        if Fraction(repr(float(ratio))) * self.collected != steps:
            yield (
                f"{name}={ratio} makes round({ratio} * {self.collected}) = {steps} gradient steps "
                f"of each collection, half to even and without carry: {steps / self.collected:.4g} "
                "per environment step."
            )

    def _batch_notes(self) -> Iterator[str]:
        if self.capacity < self.collected:
            yield f"The buffer holds only the newest {self.capacity} transitions of a collection."
        rows, size = min(self.collected, self.capacity), self.batch_size
        if size is not None and rows % size and rows > size:
            yield f"The last minibatch takes the remainder: {size + rows % size} transitions."


def _said_for(plan: StepPlan) -> dict[str, Any]:
    """Settings of a plan under names common to both generations, and the family."""
    rows = plan.frames_per_batch
    family = ON_POLICY if plan.on_policy else OFF_POLICY if rows else OFFLINE
    every = plan.evaluation_every_iterations
    if every is None and plan.evaluation_every and rows:
        every = max(plan.evaluation_every // rows, 1)
    every = min(every or plan.iterations, plan.iterations) or 1
    tests = plan.evaluations_after(plan.iterations) > 0
    capacity = plan.train_on_newest or max(rows + plan.local_prefill_steps, 1)
    return {
        "family": family,
        "epochs": -(-plan.iterations // every),
        "epoch_steps": every * (rows or plan.gradient_steps_per_iteration or 1),
        "envs": plan.num_envs,
        "collect": rows or 1,
        "batch_size": plan.minibatch_size,
        "repeat": plan.update_epochs if plan.on_policy else 1,
        "per_sample": 1.0 if plan.on_policy else float(ratio_of(plan)),
        "start": plan.local_prefill_steps,
        "start_random": plan.prefill_random and plan.prefill_steps > 0,
        "test_episodes": plan.evaluation_episodes if tests else 1,
        "buffer": capacity if plan.on_policy else BUFFER_SIZE,
    }
