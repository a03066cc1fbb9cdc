"""What every foreign vocabulary has: settings, a plan and back, and what to beware of."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from kit.steps.errors import SettingError, nearest_first, one_of, whole_number
from kit.steps.plan import StepPlan
from kit.steps.same_run import differing_settings

ON_POLICY, OFF_POLICY, OFFLINE = "on_policy", "off_policy", "offline"

Count = Annotated[int, 1]
"""A whole number from 1."""
Natural = Annotated[int, 0]
"""A whole number from 0."""

Difference = tuple[str, Any, Any]
"""A setting of a plan, what was wanted, and what the dialect can say."""


def _as_it_is(value: Any, settings: Any) -> Any:
    del settings
    return value


def linear_or_constant(value: Any, settings: Any) -> str:
    """Return the schedule that a flag such as ``anneal_lr`` means."""
    del settings
    return "linear" if value else "constant"


@dataclass(frozen=True)
class Refused:
    """A field that no recipe has a setting for: only the library's default is accepted."""

    why: str
    """what to do instead."""
    accepted: tuple[Any, ...] = ()
    """values besides the default that are what a recipe does anyway."""


@dataclass(frozen=True)
class Acts:
    """A field that sets a setting of a recipe."""

    setting: str
    """name of the recipe's setting; dotted in a group: ``env.normalize_reward``."""
    value: Callable[[Any, Any], Any] = _as_it_is
    """makes its value from the field's, and from all settings of the library."""
    family: str | None = None
    """family whose recipes it acts in; ``None``: any."""
    otherwise: Acts | Refused | None = None
    """what it is in other families; ``None``: it counts there."""


@dataclass
class Dialect(ABC):
    """Settings in the words of another library.

    The fields of a dialect are those of the library, with its names, defaults and rounding.
    Besides them there are a few ``FACTS`` that a plan needs and that the library knows from
    elsewhere: the algorithm, the version whose behaviour is meant, the length of an episode.
    """

    NAME: ClassVar[str]
    """name of the dialect on the command line."""
    LIBRARY: ClassVar[str]
    """name of the library."""
    VERSIONS: ClassVar[Mapping[str, str]]
    """behaviours by name, each in one sentence; the default one is the code's."""
    ALGORITHMS: ClassVar[Mapping[str, str]]
    """algorithms and their family."""
    ALIASES: ClassVar[Mapping[str, str]] = {}
    """other names of algorithms."""
    FACTS: ClassVar[frozenset[str]] = frozenset({"algo", "version"})
    """fields that are not of the library's own configuration."""
    MEANS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """families or algorithms for which a field means something; all, if it is not listed."""
    CARRIED: ClassVar[Mapping[str, Acts | Refused]] = {}
    """fields that set a recipe's setting, or are refused there; all others count."""
    RENAMED: ClassVar[Mapping[str, str]] = {}
    """names of other versions of the library, and what they are called here."""
    NESTED: ClassVar[frozenset[str]] = frozenset()
    """fields that are groups of settings themselves."""
    SECTIONS: ClassVar[frozenset[str]] = frozenset({""})
    """groups of the library's configuration files that have its fields."""
    PATHS: ClassVar[Mapping[str, str]] = {}
    """fields that its configuration files know by another, dotted name."""

    algo: str | None = field(default=None, kw_only=True)
    """algorithm, in the library's spelling, or a family: ``on_policy``, ``off_policy``,
    ``offline``; ``None``: guessed from the settings."""
    version: str = field(default="", kw_only=True)
    """version of the library whose behaviour is meant, or ``documented``: what its documentation
    says where its code does otherwise."""

    # ------------------------------------------------------------------ to a plan
    def to_plan(self, algo: str | None = None, *, strict: bool = False) -> StepPlan:
        """Return the run that these settings make.

        Args:
            algo: algorithm or family, in place of the field ``algo``.
            strict: whether a setting that means nothing for the algorithm is refused; it is
                listed by :meth:`idle_settings` otherwise.

        Raises:
            SettingError: if a setting is invalid, or the library itself would fail.
        """
        resolved = self.resolved(algo)
        if strict:
            resolved._refuse_idle(self)
        try:
            return resolved._plan()
        except SettingError as error:
            if hasattr(self, error.field):
                raise
            raise SettingError(
                error.field,
                error.value,
                f"follows from these settings of {self.LIBRARY} and {error.why}",
                error.works,
                error.hint,
            ) from None

    @abstractmethod
    def _plan(self) -> StepPlan:
        """Return the plan of settings that are complete and checked."""

    def resolved(self, algo: str | None = None) -> Self:
        """Return a copy with the algorithm's defaults filled in and every number checked.

        Raises:
            SettingError: if a setting is invalid.
        """
        one_of("version", self.version, list(self.VERSIONS))
        made = copy.copy(self)
        made.algo = self._algorithm(algo if algo is not None else self.algo)
        for name, value in made._defaults().items():
            if getattr(made, name) is None:
                setattr(made, name, value)
        for name, (at_least, optional) in whole_numbers(type(self)).items():
            value = getattr(made, name)
            if value is not None or not optional:
                setattr(made, name, whole_number(name, value, at_least))
        return made

    def _algorithm(self, algo: Any) -> str:
        if algo is None:
            return self._guess()
        if isinstance(algo, str) and algo in self.ALGORITHMS:
            return algo
        known = [*self.ALGORITHMS, *sorted(set(self.ALGORITHMS.values()))]
        if isinstance(algo, str):  # "DiscreteSAC" is discrete_sac
            meant = {_letters(name): name for name in known} | dict(self.ALIASES)
            algo = meant.get(_letters(algo), algo)
        return one_of("algo", algo, known)

    def algorithm_for(self, algo: str | None, family: str | None) -> str | None:
        """Return the algorithm of a recipe, or its family where the library does not have it."""
        return algo if family is None or algo in self.ALGORITHMS else family

    @abstractmethod
    def _guess(self) -> str:
        """Return the algorithm that the given settings speak of."""

    def _defaults(self) -> Mapping[str, Any]:
        """Return what stands for ``None`` in each field, for this algorithm and version."""
        return {}

    @property
    def family(self) -> str:
        """Family of the algorithm: ``on_policy``, ``off_policy`` or ``offline``."""
        algorithm = self._algorithm(self.algo)
        return self.ALGORITHMS.get(algorithm, algorithm)

    # ------------------------------------------------------------------ from a plan
    @classmethod
    def from_plan(cls, plan: StepPlan, **settings: Any) -> Self:
        """Return settings that make ``plan``.

        Args:
            plan: the run to say in this library's words.
            **settings: fields to set as they are: the algorithm, the version, carried settings.

        Raises:
            SettingError: if the library cannot express the plan; it names the setting and why.
        """
        made, differences = cls.nearest(plan, **settings)
        if differences:
            name, wanted, can = differences[0]
            raise SettingError(
                name,
                wanted,
                f"cannot be said in {cls.LIBRARY}, whose nearest settings make it "
                f"{'nothing' if can is None else can}",
            )
        return made

    @classmethod
    def nearest(cls, plan: StepPlan, **settings: Any) -> tuple[Self, list[Difference]]:
        """Return the settings nearest to ``plan``, and in what the run they make differs.

        Raises:
            SettingError: if no settings of this library come near.
        """
        if not isinstance(plan, StepPlan):
            raise SettingError("plan", plan, "is no StepPlan", "give a StepPlan")
        if plan.iterations is None:
            raise SettingError(
                "iterations", None, f"is open, and {cls.LIBRARY} has to be told", "give it"
            )
        nearest, refusal = None, None
        given = settings.get("algo")
        for algo in [given] if given else cls._algorithms_for(plan):
            try:
                kept = {**settings, "algo": algo} if algo else settings
                made = cls(**cls._from(plan, kept))
                for name, value in settings.items():
                    setattr(made, name, value)
                differences = differing_settings(plan, made.to_plan())
            except SettingError as error:
                refusal = refusal or error
                continue
            if not differences:
                return made, []
            nearest = nearest or (made, differences)
        if nearest is None:
            assert refusal is not None
            raise refusal
        return nearest

    @staticmethod
    def _algorithms_for(plan: StepPlan) -> Iterable[str | None]:
        """Return the algorithms to try, in turn; ``None``: the one that :meth:`_from` guesses."""
        del plan
        return [None]

    @staticmethod
    @abstractmethod
    def _from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings nearest to ``plan``; ``settings`` are set on them afterwards."""

    # ------------------------------------------------------------------ what to beware of
    def notes(self) -> list[str]:
        """Return what a reader of these settings would not expect, a sentence each."""
        return self.resolved()._notes(self.to_plan())

    def _notes(self, plan: StepPlan) -> list[str]:
        """Return the notes of settings that are resolved."""
        del plan
        return []

    @classmethod
    def applies(cls, name: str, algo: str) -> bool:
        """Whether a field means something for an algorithm or a family."""
        means = cls.MEANS.get(name.partition(".")[0])
        return means is None or algo in means or cls.ALGORITHMS.get(algo, algo) in means

    @classmethod
    def applicable_fields(cls, algo: str) -> frozenset[str]:
        """Return the fields that mean something for an algorithm or a family."""
        return frozenset(f.name for f in fields(cls) if cls.applies(f.name, algo))

    def idle_settings(self, algo: str | None = None) -> list[str]:
        """Return the fields that were changed and mean nothing for the algorithm."""
        algorithm = self._algorithm(algo if algo is not None else self.algo)
        applicable = self.applicable_fields(algorithm)
        return [name for name in self.changed() if name not in applicable]

    def _refuse_idle(self, given: Dialect) -> None:
        """``self`` is resolved; only what ``given`` really said is refused."""
        idle = given.idle_settings(self.algo)
        if idle:
            applicable = sorted(
                self.applicable_fields(str(self.algo)) - self.FACTS - set(self.CARRIED)
            )
            raise SettingError(
                idle[0],
                getattr(given, idle[0]),
                f"means nothing for {self.algo} in {self.LIBRARY}",
                f"leave it out; what counts: {', '.join(applicable)}",
            )

    # ------------------------------------------------------------------ in and out
    def changed(self) -> dict[str, Any]:
        """Return the settings that are not the library's defaults."""
        default = type(self)()
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name != "version" and getattr(self, f.name) != getattr(default, f.name)
        }

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Make the dialect from settings by name.

        Raises:
            SettingError: if a name is no field; the nearest spelling comes first.
        """
        known = [f.name for f in fields(cls)]
        made = {str(name).replace("-", "_"): value for name, value in settings.items()}
        for name, value in made.items():
            if name not in known:
                raise cls.unknown(name, value, known)
        return cls(**made)

    @classmethod
    def unknown(cls, name: str, value: Any, known: list[str]) -> SettingError:
        """Return the error that a setting is unknown: it has another name, or a misspelt one."""
        why, last = f"is not a setting of {cls.LIBRARY}", name.rpartition(".")[2]
        if last in cls.RENAMED:
            return SettingError(name, value, f"{why} {cls().version}", [cls.RENAMED[last]])
        return SettingError(name, value, why, nearest_first(last, known)[:4])


@cache
def whole_numbers(cls: type[Dialect]) -> Mapping[str, tuple[int, bool]]:
    """Return the fields that are whole numbers: the smallest value, and whether ``None`` is one."""
    found = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        for option in options:
            if get_origin(option) is Annotated:
                found[name] = get_args(option)[1], type(None) in options
    return found


def _letters(name: str) -> str:
    """An algorithm's name without what libraries spell differently: ``Discrete-SAC``."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def trains(plan: StepPlan) -> bool:
    """Whether an exact plan reaches ``learning_starts``."""
    return plan.first_training_iteration <= plan.iterations


def step_by_step(plan: StepPlan) -> StepPlan:
    """Return a plan of whole episodes with its gradient steps spread over the policy steps.

    Those of the first iteration, if it collects a prefill, become pretraining, and each later
    episode's are due as its policy steps are made. Other plans are returned as they are.

    Raises:
        SettingError: if the episodes are of unknown length.
    """
    if not plan.collects_episodes or plan.on_policy:
        return plan
    each = plan.gradient_steps_per_iteration or 0
    ratio = plan.replay_ratio
    if ratio is None:
        ratio = Fraction(each, plan.frames_per_batch)
    prefill = plan.policy_steps_after(1) if plan.prefill_is_iteration else 0
    return StepPlan(
        total_policy_steps=plan.total_policy_steps,
        num_envs=plan.num_envs,
        world_size=plan.world_size,
        action_repeat=plan.action_repeat,
        max_episode_steps=plan.max_episode_steps,
        learning_starts=max(prefill, plan.learning_starts),
        random_steps=plan.random_steps_until(plan.total_policy_steps),
        exploration_steps=plan.exploration_steps,
        pretrain_steps=plan.pretrain_steps + (each if prefill else 0),
        replay_ratio=ratio,
        minibatch_size=plan.minibatch_size,
        sequence_length=plan.sequence_length,
        final_evaluation=plan.final_evaluation,
        evaluation_episodes=plan.evaluation_episodes,
        rounding="up",
    )
