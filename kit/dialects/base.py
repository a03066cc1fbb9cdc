"""The base of all dialects: settings, the plan they make, its inverse, and caveats."""

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
    """The schedule of a flag such as ``anneal_lr``."""
    del settings
    return "linear" if value else "constant"


@dataclass(frozen=True)
class Refused:
    """A field without a setting in recipes: only the library's default is accepted."""

    why: str
    """what to use instead."""
    accepted: tuple[Any, ...] = ()
    """further values that are accepted: what recipes do anyway."""


@dataclass(frozen=True)
class Acts:
    """A field that sets a recipe's setting."""

    setting: str
    """name of the recipe's setting; dotted in a group: ``env.normalize_reward``."""
    value: Callable[[Any, Any], Any] = _as_it_is
    """its value, from that of the field and all settings of the library."""
    family: str | None = None
    """family of algorithms in which it acts; ``None``: all."""
    otherwise: Acts | Refused | None = None
    """its use in other families; ``None``: it counts."""


@dataclass
class Dialect(ABC):
    """Settings in the words of another library.

    The fields of a dialect are those of the library, with its names, defaults and rounding, and
    a few ``FACTS`` that a plan needs and that the library has from elsewhere: the algorithm, the
    version, the length of an episode.
    """

    NAME: ClassVar[str]
    """name of the dialect on the command line."""
    LIBRARY: ClassVar[str]
    """name of the library."""
    VERSIONS: ClassVar[Mapping[str, str]]
    """versions by name, each in one sentence; the default follows the code."""
    ALGORITHMS: ClassVar[Mapping[str, str]]
    """algorithms and their family."""
    ALIASES: ClassVar[Mapping[str, str]] = {}
    """other names of algorithms."""
    FACTS: ClassVar[frozenset[str]] = frozenset({"algo", "version"})
    """fields that are not of the library's own configuration."""
    MEANS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """families or algorithms in which a field has an effect; all, if it is not listed."""
    CARRIED: ClassVar[Mapping[str, Acts | Refused]] = {}
    """fields that act in a recipe or are refused there; all others count."""
    RENAMED: ClassVar[Mapping[str, str]] = {}
    """names in other versions of the library, and those in this one."""
    NESTED: ClassVar[frozenset[str]] = frozenset()
    """fields that are groups of settings themselves."""
    SECTIONS: ClassVar[frozenset[str]] = frozenset({""})
    """groups of the library's configuration files that have its fields."""
    PATHS: ClassVar[Mapping[str, str]] = {}
    """dotted names in its configuration files, where they differ from the fields."""

    algo: str | None = field(default=None, kw_only=True)
    """algorithm, in the library's spelling, or a family: ``on_policy``, ``off_policy``,
    ``offline``; ``None``: inferred from the settings."""
    version: str = field(default="", kw_only=True)
    """version of the library, or ``documented``: its documentation where the code differs."""

    # ------------------------------------------------------------------ to a plan
    def to_plan(self, algo: str | None = None, *, strict: bool = False) -> StepPlan:
        """The plan of these settings.

        Args:
            algo: algorithm or family, in place of the field ``algo``.
            strict: whether settings without effect for the algorithm are refused; otherwise
                :meth:`idle_settings` lists them.

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
                f"follows from the settings of {self.LIBRARY} and {error.why}",
                error.works,
                error.hint,
            ) from None

    @abstractmethod
    def _plan(self) -> StepPlan:
        """The plan of resolved settings."""

    def resolved(self, algo: str | None = None) -> Self:
        """A copy with the algorithm's defaults filled in and every number checked.

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
        """The algorithm of a recipe, or its family if the library does not have it."""
        return algo if family is None or algo in self.ALGORITHMS else family

    @abstractmethod
    def _guess(self) -> str:
        """The algorithm that the given settings imply."""

    def _defaults(self) -> Mapping[str, Any]:
        """Defaults of fields that are ``None``, for this algorithm and version."""
        return {}

    @property
    def family(self) -> str:
        """Family of the algorithm: ``on_policy``, ``off_policy`` or ``offline``."""
        algorithm = self._algorithm(self.algo)
        return self.ALGORITHMS.get(algorithm, algorithm)

    # ------------------------------------------------------------------ from a plan
    @classmethod
    def from_plan(cls, plan: StepPlan, **settings: Any) -> Self:
        """Settings that make ``plan``.

        Args:
            plan: the run to express.
            **settings: fields to fix: the algorithm, the version, settings besides counts.

        Raises:
            SettingError: if the library cannot express the plan; it names the setting and why.
        """
        made, differences = cls.nearest(plan, **settings)
        if differences:
            name, wanted, can = differences[0]
            raise SettingError(
                name,
                wanted,
                f"cannot be expressed in {cls.LIBRARY}; the nearest value is {can}",
            )
        return made

    @classmethod
    def nearest(cls, plan: StepPlan, **settings: Any) -> tuple[Self, list[Difference]]:
        """The settings nearest to ``plan``, and the differences of their plan.

        Raises:
            SettingError: if no settings of this library come near.
        """
        if not isinstance(plan, StepPlan):
            raise SettingError("plan", plan, "is not a StepPlan", "give a StepPlan")
        if plan.iterations is None:
            raise SettingError(
                "iterations", None, f"is open, and {cls.LIBRARY} needs it", "give it"
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
        """Algorithms to try, in order; ``None``: the choice of :meth:`_from`."""
        del plan
        return [None]

    @staticmethod
    @abstractmethod
    def _from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The fields nearest to ``plan``, given the fixed ``settings``."""

    # ------------------------------------------------------------------ caveats
    def notes(self) -> list[str]:
        """Caveats: what a reader of these settings may not expect, a sentence each."""
        return self.resolved()._notes(self.to_plan())

    def _notes(self, plan: StepPlan) -> list[str]:
        """Caveats of resolved settings."""
        del plan
        return []

    @classmethod
    def applies(cls, name: str, algo: str) -> bool:
        """Whether a field has an effect in an algorithm or a family."""
        means = cls.MEANS.get(name.partition(".")[0])
        return means is None or algo in means or cls.ALGORITHMS.get(algo, algo) in means

    @classmethod
    def applicable_fields(cls, algo: str) -> frozenset[str]:
        """Fields with an effect in an algorithm or a family."""
        return frozenset(f.name for f in fields(cls) if cls.applies(f.name, algo))

    def idle_settings(self, algo: str | None = None) -> list[str]:
        """Changed fields without effect for the algorithm."""
        algorithm = self._algorithm(algo if algo is not None else self.algo)
        applicable = self.applicable_fields(algorithm)
        return [name for name in self.changed() if name not in applicable]

    def _refuse_idle(self, given: Dialect) -> None:
        """Refuse changed fields of ``given`` without effect; ``self`` is resolved."""
        idle = given.idle_settings(self.algo)
        if idle:
            applicable = sorted(
                self.applicable_fields(str(self.algo)) - self.FACTS - set(self.CARRIED)
            )
            raise SettingError(
                idle[0],
                getattr(given, idle[0]),
                f"has no effect for {self.algo} in {self.LIBRARY}",
                f"leave it out; fields that count: {', '.join(applicable)}",
            )

    # ------------------------------------------------------------------ in and out
    def changed(self) -> dict[str, Any]:
        """The settings that differ from the library's defaults."""
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
        """The error of an unknown setting, with its name in this version or the nearest one."""
        why, last = f"is not a setting of {cls.LIBRARY}", name.rpartition(".")[2]
        if last in cls.RENAMED:
            return SettingError(name, value, f"{why} {cls().version}", [cls.RENAMED[last]])
        return SettingError(name, value, why, nearest_first(last, known)[:4])


@cache
def whole_numbers(cls: type[Dialect]) -> Mapping[str, tuple[int, bool]]:
    """Integer fields: their smallest value, and whether ``None`` is allowed."""
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
    """A plan of whole episodes with its gradient steps spread over the policy steps.

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
