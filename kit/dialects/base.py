"""The base of all dialects: settings, the plan they make, its inverse, and caveats."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar, Self

from kit.dialects.fields import fact, uses
from kit.steps.errors import SettingError, close_to, one_of
from kit.steps.foreign import ForeignSteps
from kit.steps.plan import StepPlan
from kit.steps.same_run import differing_settings
from kit.steps.schema import PositiveInt, check_types
from kit.steps.values import same_value

ON_POLICY, OFF_POLICY, OFFLINE = "on_policy", "off_policy", "offline"

COUNTS_AS = {ON_POLICY: "ppo", OFF_POLICY: "sac"}
"""The algorithm as which a family is counted, for recipes that a library does not have."""

RAW: dict[str, Any] = {"env.normalize_observation": False, "env.normalize_reward": False}
"""Entries of ``IMPLICIT_DEFAULTS`` for a library that normalises neither observations nor rewards."""

Difference = tuple[str, Any, Any]
"""A setting of a plan, its wanted value, and the nearest one of the dialect."""


@dataclass
class Dialect(ForeignSteps):
    """Settings in the words of another library.

    The fields of a dialect are those of the library, with its names, defaults and rounding, and
    as keyword arguments a few facts that a plan needs and that the library has from elsewhere: the
    algorithm, the version, the length of an episode.
    """

    LIBRARY: ClassVar[str]
    """name of the library."""
    VERSIONS: ClassVar[Mapping[str, str]]
    """versions of the library's code by name, each in one sentence; the first is the default."""
    ALGORITHMS: ClassVar[Mapping[str, str]]
    """algorithms and their family."""
    ALIASES: ClassVar[Mapping[str, str]] = {}
    """other names of algorithms."""
    IMPLIED: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """algorithms, and the fields of which any implies them if given; without fields: otherwise."""
    DEFAULTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """defaults of algorithms, for fields that are ``None``."""
    TOTAL: ClassVar[str] = ""
    """field with the policy steps asked for, which the run rounds to whole iterations."""
    CANNOT: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    """properties of plans, with the only value that can be expressed and why."""
    RENAMED: ClassVar[Mapping[str, str]] = {}
    """names in other versions of the library, and those in this one."""
    GROUPS: ClassVar[Mapping[str, type]] = {}
    """fields that are groups of settings themselves, and their classes."""
    SECTIONS: ClassVar[frozenset[str]] = frozenset({""})
    """groups of the library's configuration files that have its fields."""
    PATHS: ClassVar[Mapping[str, str]] = {}
    """dotted names in its configuration files, where they differ from the fields."""
    CONFIGS: ClassVar[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {}
    """groups of its configuration files of which one is chosen (``env=atari``), their choices, and
    the fields that each choice sets, or its choices in later groups."""

    IMPLICIT_DEFAULTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """settings of recipes that the library has no field for, as it has them, by algorithm."""

    algo: str | None = fact()
    """algorithm, in the library's spelling, or a family: ``on_policy``, ``off_policy``,
    ``offline``; ``None``: inferred from the settings."""
    version: str = fact(default="")
    """version of the library; the first of ``VERSIONS``, if it is empty."""
    library_defaults: bool = fact(default=False)
    """whether a run has the library's defaults in place of the recipe's, as far as the recipe has
    such a setting and it was not given."""

    def __post_init__(self) -> None:
        if self.version == "":
            self.version = next(iter(self.VERSIONS))

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
        made = self.resolved(algo)
        if strict:
            made._refuse_idle(self)
        same = {"final_evaluation": False} | {
            plan: getattr(made, name) for name, plan in made._same_as(str(made.algo)).items()
        }
        try:
            plan = StepPlan(**same | made._plan())
        except SettingError as error:
            if hasattr(self, error.field):
                raise
            why = f"follows from the settings of {self.LIBRARY} and {error.why}"
            raise SettingError(error.field, error.value, why, error.works, error.hint) from None
        asked = getattr(made, self.TOTAL) if self.TOTAL and plan.is_exact else None
        if asked not in (None, plan.total_policy_steps):
            plan.asked["total_policy_steps"] = asked
        return plan

    @abstractmethod
    def _plan(self) -> dict[str, Any]:
        """The plan's settings, beyond those that fields say as they are."""

    @classmethod
    def _same_as(cls, algo: str) -> dict[str, str]:
        """Fields with an effect in an algorithm, and the plan's settings that they are as it is."""
        named = {f.name: f.metadata.get("plan") for f in fields(cls) if cls.applies(f.name, algo)}
        return {name: plan for name, plan in named.items() if plan}

    def resolved(self, algo: str | None = None) -> Self:
        """A copy with the algorithm's defaults filled in and every number checked.

        Raises:
            SettingError: if a setting is invalid.
        """
        made = copy.copy(self)
        made.version = one_of("version", str(self.version), list(self.VERSIONS))  # 1.0 is a name
        made.algo = self._algorithm(algo if algo is not None else self.algo)
        for name, value in made._defaults().items():
            if getattr(made, name) is None:
                setattr(made, name, value)
        check_types(made)
        for group in self.GROUPS:
            setattr(made, group, copy.copy(getattr(made, group)))
            check_types(getattr(made, group), f"{group}.")
        return made

    def _algorithm(self, algo: Any) -> str:
        if algo is None:
            return self.implied_algorithm()
        if isinstance(algo, str) and algo in self.ALGORITHMS:
            return algo
        known = [*self.ALGORITHMS, *sorted(set(self.ALGORITHMS.values()))]
        if isinstance(algo, str):  # "DiscreteSAC" is discrete_sac
            meant = {_letters(name): name for name in known} | dict(self.ALIASES)
            algo = meant.get(_letters(algo), algo)
        return one_of("algo", algo, known)

    def algorithm_for(self, algo: str | None, family: str | None) -> str | None:
        """The algorithm of a recipe, or its family if the library does not have it.

        Settings may name a variant of it, such as ``ppo2``.

        Raises:
            SettingError: if they name another one.
        """
        found = algo
        if family is not None and algo not in self.ALGORITHMS:
            found = self.ALIASES.get(_letters(str(algo)), family)
        said = "" if self.algo is None else self._algorithm(self.algo)
        if said not in self.ALGORITHMS or found is None or found == said:
            return found
        # Of an algorithm that the library lacks only the family is known.
        if said.startswith(found) or self.ALGORITHMS[said] == found:
            return said
        why = f"is not the algorithm of this recipe, {algo}"
        raise SettingError("algo", self.algo, why, f"leave it out, or use a recipe for {said}")

    def implied_algorithm(self) -> str:
        """The algorithm that the given settings imply, without its name."""
        for algo, names in self.IMPLIED.items():
            if not names or any(getattr(self, name) is not None for name in names):
                return algo
        return next(iter(self.ALGORITHMS))

    def _defaults(self) -> Mapping[str, Any]:
        """Defaults of fields that are ``None``, for this algorithm and version."""
        return self.DEFAULTS.get(COUNTS_AS.get(str(self.algo), str(self.algo)), {})

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
            why = f"cannot be expressed in {cls.LIBRARY}; the nearest value is {can}"
            raise SettingError(name, wanted, why)
        return made

    @classmethod
    def nearest(cls, plan: StepPlan, **settings: Any) -> tuple[Self, list[Difference]]:
        """The settings nearest to ``plan``, and the differences of their plan.

        Raises:
            SettingError: if no settings of this library come near.
        """
        cls._refuse(plan)
        nearest, refusal = None, None
        given = settings.get("algo")
        family = ON_POLICY if plan.on_policy else OFF_POLICY
        for algo in [given] if given else cls._algorithms_for(plan):
            kept = {**settings, "algo": algo} if algo else settings
            same = cls._same_as(str(algo) if algo in cls.ALGORITHMS else family)
            try:
                made = cls(
                    **{n: getattr(plan, of) for n, of in same.items()} | cls._from(plan, kept)
                )
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

    @classmethod
    def _refuse(cls, plan: StepPlan) -> None:
        """Refuse plans far from any settings of this library."""
        if plan.iterations is None:
            why = f"is open, and {cls.LIBRARY} needs it"
            raise SettingError("iterations", None, why, "give it")
        for name, (wanted, why) in cls.CANNOT.items():
            if getattr(plan, name) != wanted:
                episodes = "steps_per_env" if wanted else "min_episodes"
                names = {"on_policy": "update_epochs", "collects_episodes": episodes}
                shown = names.get(name, name)
                why = f"cannot be expressed in {cls.LIBRARY}: {why}"
                raise SettingError(shown, getattr(plan, shown), why)

    @staticmethod
    def _algorithms_for(plan: StepPlan) -> Iterable[str | None]:
        """Algorithms to try, in order; ``None``: the choice of :meth:`_from`."""
        return [None]

    @staticmethod
    @abstractmethod
    def _from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The fields nearest to ``plan``, beyond those that say it as it is.

        Args:
            plan: the run to express.
            settings: fields that are fixed.
        """

    # ------------------------------------------------------------------ caveats
    def notes(self, algo: str | None = None) -> list[str]:
        """Caveats of these settings, a sentence each.

        Args:
            algo: algorithm or family, in place of the field ``algo``.
        """
        return [*self.resolved(algo)._notes(self.to_plan(algo))]

    @abstractmethod
    def _notes(self, plan: StepPlan) -> Iterable[str]:
        """Caveats of resolved settings."""

    @classmethod
    def applies(cls, name: str, algo: str) -> bool:
        """Whether a field has an effect in an algorithm or a family."""
        meta = cls.__dataclass_fields__[name.partition(".")[0]].metadata
        only, named = meta.get("only"), {algo, cls.ALGORITHMS.get(algo, algo)}
        if "use" not in meta:
            named.add(COUNTS_AS.get(algo, algo))
        return not only or not named.isdisjoint(only)

    @classmethod
    def counting_fields(cls, algo: str) -> frozenset[str]:
        """Fields of the library itself that count in an algorithm or a family."""
        own = {f.name for f in fields(cls) if not f.kw_only and cls.applies(f.name, algo)}
        return frozenset(own - set(uses(cls)) - set(cls.GROUPS))

    def idle_settings(self, algo: str | None = None) -> list[str]:
        """Changed fields without effect for the algorithm."""
        algorithm = self._algorithm(algo if algo is not None else self.algo)
        default = {**vars(self.unchanged()), "version": self.version}
        idle = [name for name in default if not self.applies(name, algorithm)]
        return [name for name in idle if not same_value(getattr(self, name), default[name])]

    def _refuse_idle(self, given: Dialect) -> None:
        """Refuse changed fields of ``given`` without effect; ``self`` is resolved."""
        for name in given.idle_settings(self.algo):
            why = f"has no effect for {self.algo} in {self.LIBRARY}"
            applicable = ", ".join(sorted(self.counting_fields(str(self.algo))))
            works = f"leave it out; fields that count: {applicable}"
            raise SettingError(name, getattr(given, name), why, works)

    # ------------------------------------------------------------------ in and out
    def unchanged(self) -> Self:
        """The library's defaults, as they follow from these settings."""
        return type(self)()

    @classmethod
    def names(cls) -> list[str]:
        """The names of the fields."""
        return [f.name for f in fields(cls)]

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Make the dialect from settings by name; raises errors as :meth:`named`."""
        return cls(**cls.named(settings))

    @classmethod
    def named(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings under the names of the dialect's fields; groups of it stay groups.

        Raises:
            SettingError: if a name means no field; the nearest spelling comes first.
        """
        made, others = cls.placed({str(n).replace("-", "_"): v for n, v in settings.items()})
        for name, value in others.items():
            raise cls._unknown(name, value)
        return made

    @classmethod
    def placed(cls, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Map dotted names of the library's configuration to fields; also return the others."""
        made: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for name, value in values.items():
            section, _, last = name.rpartition(".")
            own = last if section in cls.SECTIONS and last in cls.names() else None
            group, _, rest = name.partition(".")
            if field := cls.PATHS.get(name, own):
                made[field] = value
            elif rest and group in cls.GROUPS:
                made.setdefault(group, {})[rest] = value
            else:
                others[name] = value
        return made, others

    @classmethod
    def _unknown(cls, name: str, value: Any) -> SettingError:
        """The error of an unknown setting, with its name in this version or the nearest one."""
        last, known = name.rpartition(".")[2], sorted({*cls.names(), *cls.PATHS})
        why = f"is no setting of {cls.LIBRARY} that is known here"
        near = close_to(last, known)
        if last in cls.RENAMED:
            why, near = f"is not a setting of {cls.LIBRARY} {cls().version}", [cls.RENAMED[last]]
        return SettingError(name, value, why, near or f"see `kit steps words {cls.NAME}`")


@dataclass
class WrappedDialect(Dialect):
    """A dialect of a library without action repeat and time limits of its own."""

    action_repeat: PositiveInt = fact("action_repeat", 1)
    """env steps one action is held for; the environment's business."""
    max_episode_steps: PositiveInt | None = fact("max_episode_steps")
    """policy steps after which an episode is truncated; the environment's business."""


def _letters(name: str) -> str:
    """The letters and digits of an algorithm's name: ``Discrete-SAC`` is ``discretesac``."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


# ---------------------------------------------------------------------- plans
def trains(plan: StepPlan) -> bool:
    """Whether an exact plan reaches ``learning_starts``."""
    return plan.first_training_iteration <= plan.iterations


def ratio_of(plan: StepPlan) -> Fraction:
    """Gradient steps per policy step of an off-policy plan, however it says them."""
    if plan.replay_ratio is not None:
        return plan.replay_ratio
    return Fraction(plan.gradient_steps_per_iteration or 0, max(plan.frames_per_batch, 1))


def steps_of_training(plan: StepPlan) -> int:
    """Gradient steps of an iteration that trains, of an off-policy plan; 0 if none does."""
    return round(ratio_of(plan) * plan.frames_per_batch) if trains(plan) else 0


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
    prefill = plan.policy_steps_after(1) if plan.prefill_is_iteration else 0
    same = ("total_policy_steps", "num_envs", "world_size", "action_repeat", "max_episode_steps",
            "exploration_steps", "minibatch_size", "sequence_length", "final_evaluation",
            "evaluation_episodes")  # fmt: skip
    return StepPlan(
        **{name: getattr(plan, name) for name in same},
        learning_starts=max(prefill, plan.learning_starts),
        random_steps=plan.random_steps_until(plan.total_policy_steps),
        pretrain_steps=plan.pretrain_steps + (each if prefill else 0),
        replay_ratio=ratio_of(plan),
        rounding="up",
    )
