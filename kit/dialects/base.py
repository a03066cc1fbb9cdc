"""Base class for dialects: settings, conversion to and from a plan, and caveats."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Self

from kit.dialects.fields import MapsTo, extra_field, flat, uses
from kit.steps.errors import SettingError, close_to, one_of
from kit.steps.foreign import ForeignSteps
from kit.steps.plan import StepPlan
from kit.steps.same_run import differing_settings
from kit.steps.schema import PositiveInt, check_types
from kit.steps.values import same_value

ON_POLICY, OFF_POLICY, OFFLINE = "on_policy", "off_policy", "offline"

COUNTS_AS = {ON_POLICY: "ppo", OFF_POLICY: "sac"}
"""Stand-in algorithm for each family, used if a library lacks the recipe's algorithm."""

RAW: dict[str, Any] = {"env.normalize_observation": False, "env.normalize_reward": False}
"""Implicit defaults for libraries that normalise neither observations nor rewards."""

Difference = tuple[str, Any, Any]
"""A plan setting's name, its value in the plan, and the nearest value that the library supports."""


@dataclass
class Dialect(ForeignSteps):
    """Base class for the settings of another library.

    Field names, defaults and rounding follow the library. Keyword-only fields contain information
    that a plan needs but the library configures elsewhere, such as algorithm and episode length.
    """

    LIBRARY: ClassVar[str]
    """Name of the library."""
    VERSIONS: ClassVar[Mapping[str, str]]
    """Supported library versions, mapped to descriptions. The first version is the default."""
    ALGORITHMS: ClassVar[Mapping[str, str]]
    """The library's algorithms, mapped to their families."""
    ALIASES: ClassVar[Mapping[str, str]] = {}
    """Alternative algorithm names, mapped to names in ``ALGORITHMS``."""
    IMPLIED: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Fields that imply an algorithm, keyed by algorithm. An empty tuple marks the default."""
    DEFAULTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Algorithm-specific defaults for fields that are ``None``."""
    TOTAL: ClassVar[str] = ""
    """Field with the requested policy steps, before rounding to whole iterations."""
    CANNOT: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    """Plan properties that the library fixes, mapped to (value, reason) pairs."""
    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Field names in other library versions, mapped to their names in this version."""
    GROUPS: ClassVar[Mapping[str, type]] = {}
    """Fields that contain a group of settings, mapped to the group's class."""
    SECTIONS: ClassVar[frozenset[str]] = frozenset({""})
    """Sections in the library's config files that contain the fields."""
    PATHS: ClassVar[Mapping[str, str]] = {}
    """Dotted names in config files, mapped to fields with a different name."""
    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ()
    """Prefixes of entries in config files that never affect training, such as ``logger.``."""

    RECIPES: ClassVar[Mapping[str, str]] = {}
    """Recipes of algorithms whose recipe has another name, keyed by algorithm."""

    IMPLICIT_DEFAULTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The library's hard-coded values for recipe settings, keyed by algorithm."""

    algo: str | None = extra_field()
    """Algorithm or family (``on_policy``, ``off_policy``, ``offline``); inferred if ``None``."""
    env_id: str | None = extra_field(use=MapsTo("env.id"))
    """Environment ID; ``None`` for the recipe's environment."""
    version: str = extra_field(default="")
    """Library version. If empty, defaults to the first of ``VERSIONS``."""
    library_defaults: bool = extra_field(default=False)
    """Whether omitted settings use the library's defaults instead of the recipe's."""

    def __post_init__(self) -> None:
        if self.version == "":
            self.version = next(iter(self.VERSIONS))

    # ------------------------------------------------------------------ to a plan
    def to_plan(self, algo: str | None = None) -> StepPlan:
        """Return the plan that these settings describe.

        Settings that have no effect for the algorithm are ignored; :meth:`idle_settings` lists
        them.

        Args:
            algo: algorithm or family that overrides the field ``algo``.

        Raises:
            SettingError: if a setting is invalid or would make the library itself fail.
        """
        resolved = self.resolved(algo)
        same = {"final_evaluation": False} | {
            plan: getattr(resolved, name)
            for name, plan in resolved._same_as(str(resolved.algo)).items()
        }
        try:
            plan = StepPlan(**same | resolved._plan())
        except SettingError as error:
            if hasattr(self, error.field):
                raise
            reason = f"{error.why} (this value is computed from the {self.LIBRARY} settings)"
            raise SettingError(error.field, error.value, reason, error.works, error.hint) from None
        asked = getattr(resolved, self.TOTAL) if self.TOTAL and plan.is_exact else None
        if asked not in (None, plan.total_policy_steps):
            plan.asked["total_policy_steps"] = asked
        return plan

    @abstractmethod
    def _plan(self) -> dict[str, Any]:
        """Return the plan settings that are computed from several fields."""

    @classmethod
    def _same_as(cls, algo: str) -> dict[str, str]:
        """Return a dict from the algorithm's field names to plan settings with the same value."""
        used = {f.name: f.metadata.get("plan") for f in fields(cls) if cls.applies(f.name, algo)}
        return {name: plan for name, plan in used.items() if plan}

    def resolved(self, algo: str | None = None) -> Self:
        """Return a validated copy with the algorithm's defaults filled in.

        Raises:
            SettingError: if a setting is invalid.
        """
        resolved = copy.copy(self)
        # The command line parses version=1.0 as a number.
        resolved.version = one_of("version", str(self.version), list(self.VERSIONS))
        resolved.algo = self._algorithm(algo if algo is not None else self.algo)
        for name, value in resolved._defaults().items():
            if getattr(resolved, name) is None:
                setattr(resolved, name, value)
        check_types(resolved)
        for group in self.GROUPS:
            setattr(resolved, group, copy.copy(getattr(resolved, group)))
            check_types(getattr(resolved, group), f"{group}.")
        return resolved

    def _algorithm(self, algo: Any) -> str:
        if algo is None:
            return self.implied_algorithm()
        if isinstance(algo, str) and algo in self.ALGORITHMS:
            return algo
        names = [*self.ALGORITHMS, *sorted(set(self.ALGORITHMS.values()))]
        if isinstance(algo, str):  # "DiscreteSAC" matches discrete_sac
            by_letters = {_letters(name): name for name in names} | dict(self.ALIASES)
            algo = by_letters.get(_letters(algo), algo)
        return one_of("algo", algo, names)

    def algorithm_for(self, algo: str | None, family: str | None) -> str | None:
        """Return the library's name for a recipe's algorithm, or the family as a fallback.

        The settings may select a variant of the recipe's algorithm, such as ``ppo2``.

        Raises:
            SettingError: if the settings select a different algorithm.
        """
        found = algo
        if family is not None and algo not in self.ALGORITHMS:
            found = self.ALIASES.get(_letters(str(algo)), family)
        given = "" if self.algo is None else self._algorithm(self.algo)
        if given not in self.ALGORITHMS or found is None or found == given:
            return found
        # ``found`` is a family if the library does not have the recipe's algorithm.
        if given.startswith(found) or self.ALGORITHMS[given] == found:
            return given
        reason = f"The algorithm of this recipe is {algo}"
        raise SettingError("algo", self.algo, reason, f"Omit algo, or use a recipe for {given}")

    def implied_algorithm(self) -> str:
        """Return the algorithm that the other settings imply."""
        for algo, names in self.IMPLIED.items():
            if not names or any(getattr(self, name) is not None for name in names):
                return algo
        return next(iter(self.ALGORITHMS))

    def _defaults(self) -> Mapping[str, Any]:
        """Return the values that replace ``None`` for this algorithm and version."""
        return self.DEFAULTS.get(COUNTS_AS.get(str(self.algo), str(self.algo)), {})

    @property
    def family(self) -> str:
        """Algorithm family: ``on_policy``, ``off_policy`` or ``offline``."""
        algorithm = self._algorithm(self.algo)
        return self.ALGORITHMS.get(algorithm, algorithm)

    # ------------------------------------------------------------------ from a plan
    @classmethod
    def from_plan(cls, plan: StepPlan, **settings: Any) -> Self:
        """Return settings that result in exactly ``plan``.

        Args:
            plan: plan to convert.
            **settings: fixed field values, such as the algorithm or the version.

        Raises:
            SettingError: if the library cannot express the plan.
        """
        nearest, differences = cls.nearest(plan, **settings)
        if differences:
            name, wanted, closest = differences[0]
            reason = f"{cls.LIBRARY} cannot express this value; the nearest value is {closest}"
            raise SettingError(name, wanted, reason)
        return nearest

    @classmethod
    def nearest(cls, plan: StepPlan, **settings: Any) -> tuple[Self, list[Difference]]:
        """Return the settings whose plan is nearest to ``plan``, and the remaining differences.

        Raises:
            SettingError: if this library's settings cannot approximate the plan.
        """
        cls._check_expressible(plan)
        nearest, first_error = None, None
        given = settings.get("algo")
        family = ON_POLICY if plan.on_policy else OFF_POLICY
        for algo in [given] if given else cls._algorithms_for(plan):
            fixed = {**settings, "algo": algo} if algo else settings
            same = cls._same_as(str(algo) if algo in cls.ALGORITHMS else family)
            try:
                candidate = cls(
                    **{n: getattr(plan, of) for n, of in same.items()}
                    | cls._fields_for(plan, fixed)
                )
                for name, value in settings.items():
                    setattr(candidate, name, value)
                differences = differing_settings(plan, candidate.to_plan())
            except SettingError as error:
                first_error = first_error or error
                continue
            if not differences:
                return candidate, []
            nearest = nearest or (candidate, differences)
        if nearest is None:
            assert first_error is not None
            raise first_error
        return nearest

    @classmethod
    def _check_expressible(cls, plan: StepPlan) -> None:
        """Raise an error if this library's settings cannot approximate ``plan``."""
        if plan.iterations is None:
            reason = f"{cls.LIBRARY} needs a fixed number of iterations"
            raise SettingError("iterations", None, reason, "Set iterations")
        for name, (wanted, reason) in cls.CANNOT.items():
            if getattr(plan, name) != wanted:
                episodes = "steps_per_env" if wanted else "min_episodes"
                names = {"on_policy": "update_epochs", "collects_episodes": episodes}
                shown = names.get(name, name)
                reason = f"{cls.LIBRARY} cannot express this value: {reason}"
                raise SettingError(shown, getattr(plan, shown), reason)

    @staticmethod
    def _algorithms_for(plan: StepPlan) -> Iterable[str | None]:
        """Return the algorithms to try, in order. ``None`` lets :meth:`_fields_for` choose."""
        return [None]

    @staticmethod
    @abstractmethod
    def _fields_for(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return approximate values for fields that no plan setting determines directly.

        Args:
            plan: plan to convert.
            settings: fixed field values.
        """

    # ------------------------------------------------------------------ caveats
    def notes(self, algo: str | None = None) -> list[str]:
        """Return the caveats that apply to these settings.

        Args:
            algo: algorithm or family that overrides the field ``algo``.
        """
        return [*self.resolved(algo)._notes(self.to_plan(algo))]

    @abstractmethod
    def _notes(self, plan: StepPlan) -> Iterable[str]:
        """Yield the caveats that apply to resolved settings."""

    @classmethod
    def applies(cls, name: str, algo: str) -> bool:
        """Return whether an algorithm or family uses a field."""
        group, _, inner = name.partition(".")
        if inner and not cls.applies(group, algo):
            return False
        owner: Any = cls.GROUPS[group] if inner else cls
        meta = owner.__dataclass_fields__[inner or group].metadata
        only, names = meta.get("only"), {algo, cls.ALGORITHMS.get(algo, algo)}
        if "use" not in meta:
            names.add(COUNTS_AS.get(algo, algo))
        return not only or not names.isdisjoint(only)

    @classmethod
    def counting_fields(cls, algo: str) -> frozenset[str]:
        """Return the fields that determine the step counts of an algorithm or family."""
        used = {f.name for f in fields(cls) if not f.kw_only and cls.applies(f.name, algo)}
        return frozenset(used - set(uses(cls)) - set(cls.GROUPS))

    def idle_settings(self, algo: str | None = None) -> list[str]:
        """Return the names of non-default fields that have no effect for the algorithm."""
        algorithm = self._algorithm(algo if algo is not None else self.algo)
        values, default = flat(self), {**flat(self.unchanged()), "version": self.version}
        idle = [name for name in default if not self.applies(name, algorithm)]
        return [name for name in idle if not same_value(values[name], default[name])]

    def fixed_values(self) -> Mapping[str, Any]:
        """Return the recipe settings that define the resolved algorithm, whatever was set."""
        return {}

    def recipe(self) -> str:
        """Return the name of the recipe for these settings."""
        algo = str(self.resolved().algo)
        return self.RECIPES.get(algo, algo)

    # ------------------------------------------------------------------ in and out
    def unchanged(self) -> Self:
        """Return the library's defaults, including defaults that depend on these settings."""
        return type(self)()

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all fields."""
        return [f.name for f in fields(cls)]

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Create the dialect from a mapping of settings. Raises SettingError for unknown names."""
        return cls(**cls.named(settings))

    @classmethod
    def named(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings keyed by field name. Groups of settings remain mappings.

        Raises:
            SettingError: if a name is unknown. The message suggests the nearest spellings.
        """
        by_field, unmatched = cls.placed({str(n).replace("-", "_"): v for n, v in settings.items()})
        for name, value in unmatched.items():
            raise cls._unknown(name, value)
        return by_field

    @classmethod
    def configuration(cls, settings: dict[str, Any], path: Path | None) -> dict[str, Any] | None:
        """Return a configuration that the library composes from several config files.

        Args:
            settings: settings on the command line. Settings that select config files are removed.
            path: config file of the library.

        Returns:
            The configuration, keyed by dotted name, or ``None`` if there is nothing to compose.
        """
        return None

    @classmethod
    def experiment_file(cls, settings: Mapping[str, Any]) -> Path | None:
        """Return the library's config file that ``settings`` select, or ``None``."""
        return None

    @classmethod
    def placed(cls, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split settings into known fields, keyed by field name, and unmatched settings."""
        by_field: dict[str, Any] = {}
        unmatched: dict[str, Any] = {}
        for name, value in values.items():
            section, _, last = name.rpartition(".")
            by_section = last if section in cls.SECTIONS and last in cls.names() else None
            group, _, rest = name.partition(".")
            if field := cls.PATHS.get(name, by_section):
                by_field[field] = value
            elif rest and group in cls.GROUPS:
                by_field.setdefault(group, {})[rest] = value
            else:
                unmatched[name] = value
        return by_field, unmatched

    @classmethod
    def _unknown(cls, name: str, value: Any) -> SettingError:
        """Create the error for an unknown setting, suggesting its new name or similar names."""
        last = name.rpartition(".")[2]
        reason = f"The {cls.NAME} dialect has no such setting"
        near = close_to(last, sorted({*cls.names(), *cls.PATHS}))
        if last in cls.RENAMED:
            reason = f"This setting has a different name in {cls.LIBRARY} {cls().version}"
            near = [cls.RENAMED[last]]
        return SettingError(name, value, reason, near or f"See `kit steps words {cls.NAME}`")


@dataclass
class WrappedDialect(Dialect):
    """Base class for libraries in which wrappers implement action repeat and time limits."""

    action_repeat: PositiveInt = extra_field("action_repeat", 1)
    """Env steps per action, as configured in the environment."""
    max_episode_steps: PositiveInt | None = extra_field("max_episode_steps")
    """Policy steps after which the environment truncates an episode."""


def _letters(name: str) -> str:
    """Return an algorithm name in lower case without punctuation, such as ``discretesac``."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


# ---------------------------------------------------------------------- plans
def trains(plan: StepPlan) -> bool:
    """Return whether a run with an exact plan reaches its first training iteration."""
    return plan.first_training_iteration <= plan.iterations


def ratio_of(plan: StepPlan) -> Fraction:
    """Return the number of gradient steps per policy step in an off-policy plan."""
    if plan.replay_ratio is not None:
        return plan.replay_ratio
    return Fraction(plan.gradient_steps_per_iteration or 0, max(plan.frames_per_batch, 1))


def steps_of_training(plan: StepPlan) -> int:
    """Return the number of gradient steps per training iteration, or 0 if a plan never trains."""
    return round(ratio_of(plan) * plan.frames_per_batch) if trains(plan) else 0


def step_by_step(plan: StepPlan) -> StepPlan:
    """Convert an off-policy plan that collects whole episodes to one that collects single steps.

    Gradient steps are spread evenly over the policy steps. The gradient steps in a prefill
    iteration become pretraining steps. All other plans are returned unchanged.

    Raises:
        SettingError: if the episode length is unknown.
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
