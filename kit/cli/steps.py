"""The command ``kit steps``: explain, translate and compare libraries' step settings."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kit.config.plain import field_docs
from kit.dialects import DIALECTS, as_plan, dialect
from kit.dialects.base import Dialect
from kit.dialects.carried import given_settings, use_of
from kit.dialects.explain import explain
from kit.dialects.fields import flat
from kit.dialects.files import as_override, left_unread, make, settings_of
from kit.dialects.translation import compare_text, translate
from kit.runs.recipe import builtin_recipes
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan
from kit.steps.same_run import differing_settings
from kit.steps.table import text_table

KIT = "kit"
"""Name that selects kit's own format where a dialect is expected."""

_EXAMPLES = """\
examples:
  kit steps explain sheeprl replay_ratio=0.5 num_envs=4 total_steps=10000
  kit steps explain sheeprl path/to/config.yaml algo.replay_ratio=0.3
  kit steps command sb3 path/to/ppo.yml env=CartPole-v1
  kit steps translate sb3 train_freq=1 gradient_steps=1 n_envs=4 --to sheeprl
  kit steps diff sb3 n_envs=4 gradient_steps=1 sheeprl num_envs=4 replay_ratio=1
  kit steps words tianshou
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command ``kit steps``. Return the exit code: 0, or 2 for invalid arguments."""
    parser = _parser()
    given, more = parser.parse_known_args(arguments)
    unknown = [word for word in more if word[:1] == "-" and not (word[:2] == "--" and "=" in word)]
    if unknown or (more and not hasattr(given, "words")):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:  # settings may follow options or look like options: --num-envs=4
        given.words += [word.lstrip("-") for word in more]
    try:
        print(given.run(given))
    except SettingError as error:
        print(f"kit: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kit steps",
        description="Explain, translate and compare step settings of: "
        + ", ".join([*DIALECTS, KIT]),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = {"nargs": "+", "metavar": "dialect [file.yaml] [name=value ...]"}

    verb = _verb(verbs, "explain", _explain, "print the step counts of a run by iteration")
    verb.add_argument("words", **one)
    text = "number of iterations to list (default: 12)"
    verb.add_argument("--iterations", type=int, default=12, help=text)

    text = "print the equivalent settings of another library"
    verb = _verb(verbs, "translate", _translate, text)
    verb.add_argument("words", **one)
    text = "target dialect, with settings to fix, such as version=..."
    name = "dialect [name=value ...]"
    verb.add_argument("--to", nargs="+", required=True, metavar=name, help=text)

    text = "compare the step counts of two runs; each may be one quoted argument"
    verb = _verb(verbs, "diff", _diff, text)
    verb.add_argument("words", nargs="+", metavar="dialect [name=value ...] dialect ...")

    text = "print the command that runs a library's settings"
    verb = _verb(verbs, "command", _command, text)
    verb.add_argument("words", **one)

    text = "list the dialects, or the settings of one dialect"
    verb = _verb(verbs, "words", _words, text)
    verb.add_argument("dialect", nargs="?", help="dialect whose settings to list")
    return parser


def _verb(verbs: Any, name: str, run: Callable[..., str], text: str) -> Any:
    parser = verbs.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print plain data")
    return parser


# -------------------------------------------------------------------- subcommands
def _explain(given: argparse.Namespace) -> str:
    explanation = explain(_settings(given.words))
    explanation.settings |= _typed(given.words)
    if unread := _unread(given.words):
        names = ", ".join(f"{name}={value}" for name, value in unread.items())
        explanation.notes.insert(0, f"Not read from {given.words[1]}: {names}.")
    if given.json:
        return _json(explanation.to_dict(given.iterations))
    return explanation.text(max(given.iterations, 5))


def _translate(given: argparse.Namespace) -> str:
    name, *words = given.to
    source = _settings(given.words)
    if name == KIT:
        return _to_kit(source, given.json)
    translation = translate(source, dialect(name), settings_of(words))
    translation.left_out |= _unread(given.words)
    translation.typed = _typed(given.words)
    return _json(translation.to_dict()) if given.json else translation.text()


def _to_kit(source: Dialect | StepPlan, as_json: bool) -> str:
    """Return a run's plan and settings in kit's own format, which can express every plan."""
    explained = explain(source)
    plan = explained.plan
    if as_json:
        return _json({"from": explained.to_dict(0), "to": {"plan": plan.to_dict()}})
    default = StepPlan(total_policy_steps=1).to_dict() | {"total_policy_steps": None}
    changed = {name: value for name, value in plan.to_dict().items() if value != default[name]}
    lines = [explained.title, "", "kit (StepPlan)"]
    derived = ("iterations", "asked")
    lines += [f"  {name}={value}" for name, value in changed.items() if name not in derived]
    return "\n".join([*lines, "", "Plan", plan.table()])


def _command(given: argparse.Namespace) -> str:
    settings = _settings(given.words)
    if not isinstance(settings, Dialect):
        raise SettingError("dialect", KIT, "These are already kit's own settings")
    recipe = settings.recipe()
    if recipe not in builtin_recipes():
        algo, names = settings.resolved().algo, {*builtin_recipes()} & {*settings.ALGORITHMS}
        raise SettingError("algo", algo, "There is no recipe for this algorithm", sorted(names))
    chosen = {"steps": settings.NAME}
    chosen |= {f"steps.{name}": value for name, value in given_settings(settings).items()}
    unread = _unread(given.words)
    if given.json:
        return _json({"recipe": recipe, "settings": chosen, "not_read": unread})
    comments = [f"# not read: {name}={value}" for name, value in unread.items()]
    if settings.algo is None:
        comments.append(f"# algo is not set: assuming {settings.implied_algorithm()}")
    words = [f"{name}={as_override(value)}" for name, value in chosen.items()]
    return "\n".join([*comments, shlex.join(["python", "-m", f"recipes.{recipe}", *words])])


def _diff(given: argparse.Namespace) -> str:
    left, right = (_settings(words) for words in _two(given.words))
    plans = as_plan(left), as_plan(right)
    names = _column(left), _column(right)
    if names[0] == names[1]:
        names = f"{names[0]} (1)", f"{names[1]} (2)"
    if given.json:
        differences = [
            {"setting": name, "first": str(a), "second": str(b)}
            for name, a, b in differing_settings(*plans)
        ]
        first, second = (explain(side).to_dict(0) for side in (left, right))
        return _json({"first": first, "second": second, "differences": differences})
    return compare_text(*plans, names)


def _column(settings: Dialect | StepPlan) -> str:
    return str(getattr(settings, "NAME", KIT))


def _two(words: list[str]) -> list[list[str]]:
    """Split the arguments of ``diff`` at the second dialect. Split quoted arguments at spaces."""
    words = [part for word in words for part in (shlex.split(word) if " " in word else [word])]
    starts = [k for k, word in enumerate(words) if word in DIALECTS or word == KIT]
    if len(starts) != 2 or starts[0] != 0:
        reason = "Two dialects are needed"
        advice = "Example: kit steps diff sb3 n_envs=4 sheeprl num_envs=4"
        raise SettingError("diff", " ".join(words), reason, advice)
    return [words[: starts[1]], words[starts[1] :]]


def _words(given: argparse.Namespace) -> str:
    if given.dialect is None:
        rows = [
            (name, dialect(name).LIBRARY, ", ".join(dialect(name).VERSIONS)) for name in DIALECTS
        ]
        if given.json:
            return _json([dict(zip(("dialect", "library", "versions"), row)) for row in rows])
        lines = [f"{name:<14} {library}: {versions}" for name, library, versions in rows]
        return "\n".join(lines)
    cls = dialect(given.dialect)
    fields = _fields(cls)
    if given.json:
        return _json([dict(zip(("name", "default", "use", "as", "means"), row)) for row in fields])
    lines = [
        f"Settings of {cls.LIBRARY} and their use",
        "(counts: changes step counts; acts: sets a recipe setting; ignored: has no effect;",
        " refused: not supported)",
    ]
    for name, default, use, meaning, text in fields:
        used = f"{use}: {meaning}" if meaning else use
        lines += [f"  {name}={default}  ({used})", f"      {text}"]
    lines += ["", "Versions", *(f"  {name}: {text}" for name, text in cls.VERSIONS.items())]
    algorithms = [(algo, family.replace("_", "-")) for algo, family in cls.ALGORITHMS.items()]
    return "\n".join([*lines, "", text_table(("algorithm", "family"), algorithms)])


def _fields(cls: type[Dialect]) -> list[tuple[str, str, str, str, str]]:
    """Return (name, default, use, setting or reason, documentation) for each field."""
    docs, values = {**field_docs(cls)}, flat(cls())
    for group, inner in cls.GROUPS.items():
        docs |= {f"{group}.{name}": text for name, text in field_docs(inner).items()}
    return [
        (name, str(values[name]), use, meaning, docs.get(name, ""))
        for name, use, meaning in use_of(cls)
    ]


# -------------------------------------------------------------------- arguments
def _settings(words: Sequence[str]) -> Dialect | StepPlan:
    """Create settings from a dialect, optionally a config file, and ``name=value`` arguments."""
    name, *rest = words
    path = rest.pop(0) if rest and "=" not in rest[0] else None
    settings = settings_of(rest)
    if name == KIT:
        return StepPlan.from_dict(settings)
    return make(dialect(name), settings, path)


def _unread(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings in another library's config file that kit does not read."""
    name, *rest = words
    if name not in DIALECTS:
        return {}
    path = rest.pop(0) if rest and "=" not in rest[0] else None
    settings = settings_of(rest)
    file = dialect(name).experiment_file(settings) if path is None else Path(path)
    return {} if file is None else left_unread(dialect(name), file, settings.get("env"))


def _typed(words: Sequence[str]) -> dict[str, Any]:
    """Return the ``name=value`` arguments as settings, including values equal to the default."""
    return settings_of(word for word in words if "=" in word)


def _json(values: Any) -> str:
    return json.dumps(values, indent=2, default=str)
