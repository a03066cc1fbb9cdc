"""Settings for tianshou (https://github.com/thu-ml/tianshou).

tianshou counts environment steps, which are policy steps. A training step is an iteration that
collects ``c = ceil(step_per_collect / m) * m`` steps with ``m`` environments. An epoch has
``ceil(step_per_epoch / c)`` training steps and ends with a test. ``Tianshou`` uses the field names
from 1.x (``SamplingConfig``), and ``Tianshou2`` uses the field names from 2.x.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, ClassVar, Self, TextIO

from kit.dialects.base import OFF_POLICY, OFFLINE, ON_POLICY, Dialect, ratio_of
from kit.dialects.fields import Ignored, MapsTo, count_field, extra_field, ignored, mapped
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
STAND_INS = {"npg": "trpo", "gail": "ppo"} | dict.fromkeys(
    ("iqn", "c51", "qrdqn", "fqf", "bdqn"), "dqn"
)
"""Algorithms without a recipe, mapped to a recipe that can repeat their step counts."""
_EXAMPLES = {
    **{f"{suite}{name}": name for suite in ("mujoco", "atari") for name in _ALGORITHMS},
    "atarisac": "discrete_sac",
    "discretedqn": "dqn",
}
"""Algorithms of tianshou's example scripts, keyed by the script's name (``mujoco_sac``)."""
_COLLECTING = (ON_POLICY, OFF_POLICY)
BUFFER_SIZE = 4096
"""Default value of ``buffer_size``."""
INITIAL_TESTS = {"1.1.0": 2, "2.0.1": 1}
"""Number of tests before training, keyed by version; tianshou 1.1.0 resets its trainer twice."""


def _stores_next(ignored: bool, settings: Any) -> bool:
    return not ignored


def _stack_size(frames: Any, settings: Any) -> int:
    """Return the number of stacked frames. A single frame does not determine recipe settings."""
    if frames == 1:  # Environments may stack frames that the buffer stores unchanged.
        raise SettingError("replay_buffer_stack_num", frames, "Nothing is stacked", "Use 2")
    return int(frames)


def _newest_of(newest: Any, settings: Any) -> int:
    """Return the number of stacked frames. The buffer stores only the newest frame."""
    frames = settings.replay_buffer_stack_num
    if not newest or frames == 1:
        reason = "tianshou's buffer would return one frame, but the policy observed all frames"
        hint = "Set replay_buffer_stack_num to the number of frames that the environment stacks"
        raise SettingError("replay_buffer_save_only_last_obs", newest, reason, hint)
    return int(frames)


def _test_seed(given: Any, settings: Any) -> int:
    return int(settings.test_seed)


_NO_BUFFER = Ignored("only off-policy recipes have a replay buffer")


def _capacity(given: int, settings: Any) -> int:
    """Return the buffer's capacity, rounded up to a multiple of the number of environments."""
    envs = settings.by_neutral_name()["envs"]
    return int(-(-given // envs) * envs)


def _neutral_field(neutral: str, default: Any, only: tuple[str, ...] = (), **more: Any) -> Any:
    """Declare a field that affects step counts; ``neutral`` names its :class:`Sampling` field."""
    return field(default=default, metadata={"neutral": neutral, "only": only, **more})


@dataclass
class TianshouSettings(Dialect):
    """Settings that have the same names in tianshou 1.x and 2.x."""

    LIBRARY = "tianshou"
    ALGORITHMS: ClassVar = _ALGORITHMS
    ALIASES: ClassVar = {
        **_EXAMPLES,
        "pg": "reinforce",
        "bdq": "bdqn",
        "branchingdqn": "bdqn",
        "rainbowdqn": "rainbow",
    }
    RECIPES: ClassVar = {"discrete_sac": "sac_discrete", **STAND_INS}
    CANNOT: ClassVar = {"world_size": (1, "tianshou trains in a single process")}

    batch_size: PositiveInt | None = _neutral_field("batch_size", 64)
    """Transitions per minibatch; ``None`` for the whole batch (on-policy) or buffer (otherwise)."""
    num_test_envs: PositiveInt = ignored("evaluations use one environment per episode", 1)
    """Number of test environments."""
    buffer_size: PositiveInt = _neutral_field(
        "buffer", BUFFER_SIZE, use=MapsTo("buffer_size", _capacity, OFF_POLICY)
    )
    """Capacity of the replay buffer, rounded up to a multiple of the number of environments."""
    start_timesteps: NonNegativeInt = _neutral_field("start", 0, _COLLECTING)
    """Environment steps before training, which are not part of any epoch."""
    start_timesteps_random: bool = _neutral_field("start_random", False, _COLLECTING)
    """Whether the steps before training use random actions."""
    replay_buffer_ignore_obs_next: bool = mapped(
        "store_next_observation", False, _stores_next, family=OFF_POLICY, otherwise=_NO_BUFFER
    )
    """Whether the buffer omits next observations."""
    replay_buffer_save_only_last_obs: bool = mapped(
        "stacked_frames", False, _newest_of, family=OFF_POLICY, otherwise=_NO_BUFFER
    )
    """Whether the buffer stores only the last frame of each stack."""
    replay_buffer_stack_num: PositiveInt = mapped(
        "stacked_frames", 1, _stack_size, family=OFF_POLICY, otherwise=_NO_BUFFER
    )
    """Number of frames in each observation. Environments that do not stack them are wrapped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        envs = self.neutral()["envs"]
        if getattr(self, envs) == -1:
            setattr(self, envs, os.cpu_count() or 1)

    def algorithm_for(self, algo: str | None, family: str | None) -> str | None:
        """Return tianshou's name for a recipe's algorithm, or the family as a fallback.

        An algorithm without a recipe can run with any recipe of its family.
        """
        given = None if self.algo is None else self._algorithm(self.algo)
        if given in STAND_INS and self.ALGORITHMS[given] == family:
            return given
        return super().algorithm_for(algo, family)

    @classmethod
    def neutral(cls) -> dict[str, str]:
        """Map names that are common to tianshou 1.x and 2.x to the field names of this class."""
        return {f.metadata["neutral"]: f.name for f in fields(cls) if "neutral" in f.metadata}

    def by_neutral_name(self) -> dict[str, Any]:
        """Return the settings keyed by names that are common to tianshou 1.x and 2.x."""
        return {neutral: getattr(self, field) for neutral, field in self.neutral().items()}

    def implied_algorithm(self) -> str:
        """Return the algorithm family that the settings imply."""
        settings = self.by_neutral_name()
        off_policy = settings["per_sample"] != 1.0 or settings["repeat"] is None
        return OFF_POLICY if off_policy or settings["start_random"] is True else ON_POLICY

    def sampling(self) -> Sampling:
        """Return resolved settings with names that are common to tianshou 1.x and 2.x.

        Raises:
            SettingError: if the settings contradict each other or would make tianshou fail.
        """
        values = self.by_neutral_name()
        return Sampling(names=self, family=self.family, version=self.version, **values)

    def pprints(self) -> str:
        """Return tianshou's settings as text with one setting per line."""
        lines = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if not f.kw_only]
        return f"{type(self).__qualname__}[\n    " + ", \n    ".join(lines) + "]"

    def pprint(self, file: TextIO | None = None) -> None:
        """Print :meth:`pprints` to ``file`` (default: standard output)."""
        print(self.pprints(), file=file)

    def _plan(self) -> dict[str, Any]:
        return self.sampling().plan()

    @classmethod
    def _fields_for(cls, plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        values = _settings_for(plan)
        fields = {field: values[neutral] for neutral, field in cls.neutral().items()}
        return fields | {"algo": settings.get("algo", values["family"])}

    def _notes(self, plan: StepPlan) -> Iterator[str]:
        return self.sampling().notes()


@dataclass
class Tianshou(TianshouSettings):
    """Settings in ``SamplingConfig`` of tianshou 1.x."""

    NAME = "tianshou"
    VERSIONS: ClassVar = {
        "1.1.0": "code of 1.1.0; two tests before training, and num_epochs=0 runs one epoch",
    }
    SECTIONS = frozenset({"", "sampling_config", "sampling"})

    num_epochs: NonNegativeInt = _neutral_field("epochs", 100)
    """Number of epochs of ``ceil(step_per_epoch / c)`` training steps."""
    step_per_epoch: PositiveInt = _neutral_field("epoch_steps", 30000)
    """Environment steps per epoch, rounded up to whole training steps."""
    num_train_envs: PositiveInt = _neutral_field("envs", -1)
    """Number of training environments; -1 for the number of CPUs."""
    train_seed: int = mapped("seed", 42, also=MapsTo("evaluation_seed", _test_seed))
    """Seed for the training environments. The seed for the test environments depends on it."""
    num_test_episodes: PositiveInt = _neutral_field("test_episodes", 1)
    """Total number of episodes per test in all test environments."""
    step_per_collect: PositiveInt = _neutral_field("collect", 2048, _COLLECTING)
    """Environment steps per training step, rounded up to a multiple of ``num_train_envs``."""
    repeat_per_collect: int | None = _neutral_field("repeat", 1, (ON_POLICY,))
    """Passes over the collected batch (on-policy)."""
    update_per_step: float = _neutral_field("per_sample", 1.0, (OFF_POLICY,))
    """Gradient steps per collected step (off-policy), rounded half to even per training step."""
    stop_rew: float | None = extra_field(use=MapsTo("stop_at_return"))
    """Mean test return at which the run stops after an epoch (``stop_fn``)."""
    test_return: float | None = extra_field()
    """The return of every test episode, if known in advance."""

    @property
    def test_seed(self) -> int:
        """Seed for the test environments."""
        return self.train_seed + self.num_train_envs

    def sampling(self) -> Sampling:
        """Return resolved settings, including whether the run stops after its first epoch."""
        sampling = super().sampling()
        if self.family == ON_POLICY:
            whole_number("repeat_per_collect", self.repeat_per_collect)
        if self.stop_rew is not None:
            sampling.stops = self.test_return is not None and self.test_return >= self.stop_rew
        return sampling


@dataclass
class Tianshou2(TianshouSettings):
    """Settings in ``OnPolicyTrainingConfig`` and ``OffPolicyTrainingConfig`` of tianshou 2.x."""

    NAME = "tianshou2"
    VERSIONS: ClassVar = {"2.0.1": "code of 2.0.1; one test before training"}
    SECTIONS = frozenset({"", "training_config", "training"})

    num_test_envs: PositiveInt = count_field(default=1)
    """Number of test environments, which is the default number of episodes per test."""
    max_epochs: NonNegativeInt = _neutral_field("epochs", 100)
    """Number of epochs (``num_epochs`` in 1.x)."""
    epoch_num_steps: PositiveInt = _neutral_field("epoch_steps", 30000)
    """Environment steps per epoch, rounded up to whole training steps."""
    num_training_envs: PositiveInt = _neutral_field("envs", -1)
    """Number of training environments; -1 for the number of CPUs."""
    test_step_num_episodes: NonNegativeInt = _neutral_field("test_episodes", -1)
    """Episodes per test; -1 for one per test environment. tianshou fails with 0 episodes."""
    collection_step_num_env_steps: PositiveInt = _neutral_field("collect", 2048, _COLLECTING)
    """Environment steps per training step, rounded up to a multiple of the number of
    environments."""
    collection_step_num_episodes: PositiveInt | None = count_field(only=_COLLECTING)
    """Episodes per training step. Not usable: tianshou does not read it and raises an error."""
    test_in_training: bool = ignored(
        "it only matters with a stop criterion, which ends a run after an evaluation",
        False,
        only=_COLLECTING,
    )
    """Whether to run a test when training meets the stop criterion."""
    update_step_num_repetitions: NonNegativeInt = _neutral_field("repeat", 1, (ON_POLICY,))
    """Passes over the collected batch (on-policy)."""
    update_step_num_gradient_steps_per_sample: float = _neutral_field(
        "per_sample", 1.0, (OFF_POLICY,)
    )
    """Gradient steps per collected step (off-policy), rounded per training step."""
    episode_length: PositiveInt | None = extra_field()
    """Fixed episode length in steps, which does not affect counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test_step_num_episodes == -1:
            self.test_step_num_episodes = self.num_test_envs

    def unchanged(self) -> Self:
        """Return the library's defaults with one test episode per test environment."""
        defaults = super().unchanged()
        defaults.test_step_num_episodes = self.num_test_envs
        return defaults

    def sampling(self) -> Sampling:
        """Return resolved settings, or raise an error if they would make tianshou fail."""
        if self.test_step_num_episodes == 0:
            reason = "tianshou 2.0.1 always runs tests and fails if a test has no episodes"
            raise SettingError("test_step_num_episodes", 0, reason, [-1, 1])
        episodes = self.collection_step_num_episodes
        if episodes is not None and self.family != OFFLINE:
            reason = "tianshou 2.0.1 ignores this setting and fails"
            hint = "Set collection_step_num_env_steps"
            raise SettingError("collection_step_num_episodes", episodes, reason, [None], hint)
        return super().sampling()


def _map_renamed_fields(old: type[Any], new: type[Any]) -> dict[str, str]:
    """Map field names in ``old`` to their new names in ``new``, omitting unchanged names."""
    names, others = old.neutral(), new.neutral()
    return {name: others[n] for n, name in names.items() if others.get(n, name) != name}


Tianshou.RENAMED = _map_renamed_fields(Tianshou2, Tianshou)
Tianshou2.RENAMED = _map_renamed_fields(Tianshou, Tianshou2)


@dataclass(kw_only=True)
class Sampling:
    """Resolved and validated settings with names that are common to tianshou 1.x and 2.x."""

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
    """Settings with the user's field names, which are used in messages."""
    stops: bool = False
    """Whether the run stops at the first test after an epoch."""

    # ------------------------------------------------------------------ counts
    def round_up(self, steps: int) -> int:
        """Round ``steps`` up to a multiple of the number of environments."""
        return -(-steps // self.envs) * self.envs

    @property
    def capacity(self) -> int:
        """Capacity of the replay buffer in transitions."""
        return self.round_up(self.buffer)

    @property
    def collected(self) -> int:
        """Environment steps per collection."""
        return self.round_up(self.collect)

    @property
    def trainings_per_epoch(self) -> int:
        """Number of training steps per epoch."""
        return -(-self.epoch_steps // self.collected)

    @property
    def epochs_run(self) -> int:
        """Number of epochs in the run. 1.1.0 always runs at least one epoch."""
        epochs = max(self.epochs, 1) if self.version == "1.1.0" else self.epochs
        return min(epochs, 1) if self.stops else epochs

    def name_of(self, neutral: str) -> str:
        """Return the name of a field in the user's tianshou version."""
        return str(self.names.neutral()[neutral])

    def gradient_steps(self) -> int:
        """Return the number of gradient steps per training step (off-policy)."""
        name, ratio = self.name_of("per_sample"), self.per_sample
        ratio = real_number(name, ratio, 0, LARGEST_RATIO)
        steps = round(ratio * self.collected)
        if steps == 0:
            rounded = f"round({ratio} * {self.collected}) = 0"
            reason = f"tianshou fails with {rounded} gradient steps per training step"
            raise SettingError(name, ratio, reason, [1 / self.collected])
        return steps

    # ------------------------------------------------------------------ plan
    def plan(self) -> dict[str, Any]:
        """Return the plan settings."""
        offline = self.family == OFFLINE  # Offline epochs are measured in gradient steps.
        every = 1 if offline else self.trainings_per_epoch
        plan: dict[str, Any] = {
            "iterations": self.epochs_run * every,
            "minibatch_size": self.batch_size,
            "initial_evaluations": INITIAL_TESTS[self.version],
            "evaluation_every_iterations": every,
            "evaluation_episodes": self.test_episodes,
        }
        if not self.test_episodes:
            plan = {name: value for name, value in plan.items() if "evaluation" not in name}
        if offline:
            return plan | {"steps_per_env": 0, "gradient_steps_per_iteration": self.epoch_steps}
        plan |= {"num_envs": self.envs, "steps_per_env": self.collected // self.envs}
        plan |= {"random_steps": 0, "prefill_steps": self.round_up(self.start)}
        plan["prefill_random"] = self.start_random
        if self.family == ON_POLICY:
            return plan | self._on_policy()
        return plan | {"gradient_steps_per_iteration": self.gradient_steps()}

    def _on_policy(self) -> dict[str, Any]:
        start = self.round_up(self.start)
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
        """Yield the caveats that apply to resolved settings."""
        if self.names.algo not in self.names.ALGORITHMS:
            family = self.family.replace("_", "-")
            yield f"Settings are interpreted as {family}, because algo is not set."
        if self.names.algo in STAND_INS:
            yield f"There is no recipe for {self.names.algo}, so only its step counts apply."
        if self.family == OFFLINE:
            yield "Offline epochs count gradient steps and collect nothing."
            return
        if self.collected != self.collect:
            yield f"A collection is {self.collected} steps, a multiple of {self.envs} environments."
        epoch = self.trainings_per_epoch * self.collected
        if epoch != self.epoch_steps:
            yield f"An epoch is {epoch:,} steps in {self.trainings_per_epoch:,} whole collections."
        if self.epochs_run != self.epochs:
            yield "num_epochs=0 still runs one epoch."
        if INITIAL_TESTS[self.version] == 2:
            yield "The initial test runs twice, so there are two more tests than epochs."
        stop = getattr(self.names, "stop_rew", None)
        if stop is not None and not self.stops:
            yield (
                f"stop_rew={stop:g} ends the run after the first epoch with this test return. The "
                "plan assumes that no test reaches it unless test_return is set."
            )
            yield (
                "An initial test that reaches stop_rew ends the run after the first epoch; recipes "
                "ignore initial tests."
            )
        if self.names.algo == "dqn":
            yield "DQN uses the mean of squared errors as its loss; recipes use the Huber loss."
        yield from self._start_notes()
        yield from self._schedule_notes()
        yield from self._ratio_notes() if self.family == OFF_POLICY else self._batch_notes()

    def _start_notes(self) -> Iterator[str]:
        if not self.start:
            return
        yield f"Environments are reset after {self.round_up(self.start):,} start_timesteps."
        if self.family == ON_POLICY:
            yield "The steps of start_timesteps are part of the first batch."

    def _schedule_notes(self) -> Iterator[str]:
        """Yield a note if the linear learning-rate schedule does not end at zero.

        The learning rate decreases after every policy update (every gradient step if off-policy).
        tianshou assumes ``ceil(step_per_epoch / step_per_collect)`` updates per epoch and does not
        round ``step_per_collect`` in this formula.
        """
        if not self.epochs:
            return
        planned = -(-self.epoch_steps // self.collect) * self.epochs
        off_policy = self.family == OFF_POLICY
        trainings = self.trainings_per_epoch * self.epochs
        actual = trainings * (self.gradient_steps() if off_policy else 1)
        unit = "gradient steps" if off_policy else "training steps"
        note = f"A linear learning rate is planned for {planned:,} {unit}, but {actual:,} are made"
        if actual > planned:
            yield f"{note}. It becomes negative after {planned:,} {unit}."
        elif actual < planned:
            yield f"{note}. It ends at {1 - actual / planned:.3g} of its initial value."

    def _ratio_notes(self) -> Iterator[str]:
        name, ratio = self.name_of("per_sample"), self.per_sample
        steps = self.gradient_steps()
        if Fraction(repr(float(ratio))) * self.collected != steps:
            yield (
                f"{name}={ratio} means round({ratio} * {self.collected}) = {steps} gradient steps "
                f"per collection, rounded half to even: {steps / self.collected:.4g} per "
                "environment step."
            )

    def _batch_notes(self) -> Iterator[str]:
        if self.capacity < self.collected:
            yield f"The buffer holds only the newest {self.capacity} transitions of a collection."
        rows, size = min(self.collected, self.capacity), self.batch_size
        if size is not None and rows % size and rows > size:
            yield f"The last minibatch has {size + rows % size} transitions with the remainder."


def _settings_for(plan: StepPlan) -> dict[str, Any]:
    """Return settings for a plan, including ``family``, with names common to 1.x and 2.x."""
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
