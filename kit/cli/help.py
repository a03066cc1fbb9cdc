"""Help text of a recipe: description, examples, presets and groups of settings."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from kit.cli.overrides import presets_of
from kit.config import OfflineConfig, OffPolicyConfig, ReplayConfig, RunConfig
from kit.config.plain import check, field_docs
from kit.dialects import DIALECTS, dialect
from kit.runs.comparison import as_typed
from kit.runs.recipe import Recipe
from kit.steps.errors import Limits, words
from kit.steps.schema import type_hints

GROUPS = (
    "Algorithm",
    "Networks",
    "Steps",
    "Replay buffer",
    "Data",
    "Environments",
    "Run",
    "Hardware",
)
"""Titles of the settings groups, in the order in which the help prints them."""
_OF_CLASSES = (
    (RunConfig, "Run"), (OfflineConfig, "Data"), (ReplayConfig, "Replay buffer"),
    (OffPolicyConfig, "Replay buffer"),
)  # fmt: skip
"""Help groups for settings that these classes declare. The default is "Algorithm"."""
_OF_NAMES = {
    "gamma": "Algorithm", "n_step": "Algorithm",
    "device": "Hardware", "threads": "Hardware", "compile": "Hardware", "precision": "Hardware",
    "collector": "Hardware", "collector_kwargs": "Hardware",
    "hidden_sizes": "Networks", "critic_hidden_sizes": "Networks", "activation": "Networks",
    "shared_backbone": "Networks", "initial_log_std": "Networks", "orthogonal": "Networks",
}  # fmt: skip
RARE = {
    "buffer_folder", "checkpoint_every", "collector", "collector_kwargs", "compile",
    "critic_backbone_lr_scale", "critic_epochs", "critic_learning_rate", "critic_lr_schedule",
    "critic_max_grad_norm", "critic_minibatch_size", "env.step_timeout", "evaluation_max_steps",
    "evaluation_seed", "gsde_at_warmup", "gsde_expln", "gsde_sample_freq", "hindsight",
    "keep_best", "orthogonal", "precision", "progress", "reward_scale", "save_policy",
    "stacked_frames", "standardize_reward", "steps.frames_per_batch", "steps.min_episodes",
    "steps.min_steps", "steps.minibatches", "steps.num_normalization_steps",
    "steps.pretrain_steps", "steps.rounding", "steps.sequence_length", "store_next_observation",
    "time_limit",
}  # fmt: skip
"""Settings that only ``--help=all`` shows, unless the recipe changes their default."""
_WIDTH = 100
_TEXT = 34  # column in which descriptions start


class Setting(NamedTuple):
    """A setting of a recipe."""

    name: str
    """Dotted name."""
    default: str
    """Default value in command-line syntax."""
    kind: str
    """Type, such as ``int > 0``; empty for any type."""
    text: str
    """Description."""
    group: str
    """Title of the setting's group in the help."""


def help_text(config_class: type[RunConfig], steps: str = "kit", everything: bool = False) -> str:
    """Return the help text of a recipe.

    Args:
        config_class: dataclass of the recipe's settings.
        steps: name of the config format whose step settings are shown.
        everything: whether to include rarely used settings.
    """
    recipe = Recipe.of(config_class)
    docstring = sys.modules[config_class.__module__].__doc__ or ""
    config: Any = config_class()
    if steps in DIALECTS:
        config.steps = dialect(steps)()
        check(config)
    found = [*recipe_settings(config)]
    shown = found if everything else [*_usual(found, config_class)]
    text, examples = _described(docstring)
    examples += [
        (f"{recipe.command} -m seed=0,1,2", "sweep: one run for each value"),
        (f"{recipe.command} resume=latest", "continue the newest run"),
    ]
    lines = [text, ""] if text else []
    lines.append(f"usage: {recipe.command} [setting=value ...]")
    lines += ["", "examples:", *_table(examples)]
    if presets := [*presets_of(config_class, recipe)]:
        lines += ["", f"presets: {', '.join(presets)}   (use one: preset={presets[0]})"]
    for title in GROUPS:
        if members := [setting for setting in shown if setting.group == title]:
            lines += ["", f"{title}:", *_listed(members)]
    more = [("trust=MODULE,...", "modules that a resumed run may import")]
    if not everything:
        more = [("--help=all", f"show {len(found) - len(shown)} more settings")]
    if config_class.FAMILY != "offline":
        more += [("--help steps=NAME", "show the step settings of another library:")]
        more += [("", line) for line in textwrap.wrap(", ".join(DIALECTS), 70)]
    more += [("-m, --multirun", "run a sweep"), ("--version", "print the version of kit")]
    return "\n".join([*lines, "", "more:", *_table(more)])


# ---------------------------------------------------------------------- settings
def recipe_settings(config: Any, path: str = "") -> Iterator[Setting]:
    """Yield the settings of a recipe, starting with those that its own class declares."""
    cls: type = type(config)
    docs, hints = field_docs(cls), type_hints(cls)
    names = [field.name for field in dataclasses.fields(config)]
    if not path:
        names.sort(key=lambda name: (name != "learning_rate", name not in cls.__annotations__))
    for name in names:
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from recipe_settings(value, f"{path}{name}.")
            continue
        text = docs.get(name, "").replace("``", "")
        group = {"env.": "Environments", "steps.": "Steps"}.get(path) or _group_of(name)
        yield Setting(
            f"{path}{name}",
            as_typed(value),
            kind_of(hints[name]),
            text[:1].upper() + text[1:],
            group,
        )


def _group_of(name: str) -> str:
    classes = (group for cls, group in _OF_CLASSES if name in cls.__annotations__)
    return _OF_NAMES.get(name) or next(classes, "Algorithm")


def _usual(found: Sequence[Setting], config_class: type[RunConfig]) -> Iterator[Setting]:
    """Yield commonly used settings, and those whose default the recipe changes."""
    shared = (cls for cls in config_class.__mro__ if cls.__module__ == RunConfig.__module__)
    base = next(cls for cls in shared if issubclass(cls, RunConfig))
    defaults = {setting.name: setting.default for setting in recipe_settings(base())}
    for setting in found:
        if setting.name not in RARE or setting.default != defaults.get(setting.name):
            yield setting


def kind_of(hint: Any) -> str:
    """Return a type as text, such as ``float in (0, 1]`` or ``l2 | l1``; empty for any type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _limited(*arguments)
    if origin is Literal:
        return " | ".join(words(arguments))
    if origin in (typing.Union, types.UnionType):
        has_choices = any(typing.get_origin(option) is Literal for option in arguments)
        return (" | " if has_choices else " or ").join(map(kind_of, arguments))
    if origin is list or (origin is tuple and Ellipsis in arguments):
        return f"list of {kind_of(arguments[0])}"
    if origin is tuple:
        return f"({', '.join(map(kind_of, arguments))})"
    if origin in (dict, Mapping):
        return "dict"
    names: dict[Any, str] = {Any: "", type(None): "null"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _limited(kind: Any, limits: Any) -> str:
    if not isinstance(limits, Limits):
        return "schedule"
    low, high, name = limits.low, limits.high, kind.__name__
    if kind is int and low == 1 and high >= 10_000:
        return "int > 0"
    if high >= 10_000:
        return name if low < -10_000 else f"{name} {'>' if limits.open else '>='} {low:g}"
    return f"{name} in {'(' if limits.open else '['}{low:g}, {high:g}]"


# ---------------------------------------------------------------------- layout
def _described(docstring: str) -> tuple[str, list[tuple[str, str]]]:
    """Split a docstring into its description and its example commands with their comments."""
    lines = [line.strip() for line in docstring.strip().splitlines()]
    commands = [line for line in lines if line.startswith(("kit train ", "python "))]
    text = "\n".join(lines[: lines.index(commands[0])] if commands else lines)
    for header in ("examples:", "Run it:"):
        text = text.strip().removesuffix(header)
    pairs = (command.partition("#") for command in commands if "--help" not in command)
    return text.strip(), [(command.strip(), comment.strip()) for command, _, comment in pairs]


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max((len(first) for first, second in rows if second), default=0)
    return [f"  {first:<{width}}  {second}".rstrip() for first, second in rows]


def _listed(settings: Sequence[Setting]) -> Iterator[str]:
    for setting in settings:
        head = f"  {setting.name}={setting.default}"
        kind = f"{setting.kind}: " if setting.kind else ""
        text = textwrap.wrap(f"{kind}{setting.text}", _WIDTH - _TEXT, break_on_hyphens=False)
        if len(head) > _TEXT - 2:
            yield head
            head = ""
        for line in text or [""]:
            yield f"{head:<{_TEXT}}{line}".rstrip()
            head = ""
