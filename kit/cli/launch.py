"""From the command line to a run: Hydra overrides, sweeps, help, resume."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from kit.cli.run_folder import find_run, read_config
from kit.config.settings import RunConfig, from_plain, settings, to_plain
from kit.dialects import DIALECTS, dialect
from kit.steps import SettingError
from kit.steps.errors import nearest_first, one_of

Build = Callable[..., Any]


def main(
    config_class: type[RunConfig], build: Build, name: str, argv: Sequence[str] | None = None
) -> None:
    """Run a recipe from the command line.

    ``key=value`` overrides a setting, ``steps=sheeprl`` chooses another library's vocabulary,
    ``--multirun key=1,2,3`` sweeps, ``--help`` documents every setting, ``resume=latest`` goes on
    with the newest run. What goes wrong is said in one line.

    Args:
        config_class: dataclass of the recipe's settings.
        build: makes a trainer from such a dataclass.
        name: of the recipe.
        argv: arguments; those of the process by default.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--help" in arguments or "-h" in arguments:
        chosen = dict(_split(argument) for argument in arguments if "=" in argument)
        print(help_text(config_class, name, chosen.get("steps", "kit")))
        return
    try:
        presets = (
            Path(sys.modules[config_class.__module__].__file__ or "").parent / "presets" / name
        )
        base = _base(config_class, name, arguments, presets)
        _check_names(base, arguments)
        _compose(base, name, arguments, lambda values: _run(config_class, build, values))
    except Exception as error:
        if not explains_itself(error):
            raise
        print(f"\nerror: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("\nstopped; go on with resume=latest", file=sys.stderr)
        raise SystemExit(130) from None


def _run(config_class: type[RunConfig], build: Build, values: Mapping[str, Any]) -> None:
    build(from_plain(config_class, values)).run()


def explains_itself(error: BaseException) -> bool:
    """Whether the message of an error tells a user what to do, so that no trace is needed."""
    from kit.collectors.diverged import PolicyFault
    from kit.envs.errors import EnvironmentFault
    from kit.hooks.guards import NotFinite
    from kit.trainer import PlanNotKept
    from kit.trainer.checkpoint import NotSaved
    from kit.trainer.stages import HookError

    faults = (EnvironmentFault, PolicyFault, HookError)
    return isinstance(error, (SettingError, *faults, NotFinite, NotSaved, PlanNotKept))


# ---------------------------------------------------------------------- settings and overrides
def _base(
    config_class: type[RunConfig], recipe: str, arguments: Sequence[str], presets: Path
) -> dict[str, Any]:
    """The settings before overrides: defaults, a preset, a resumed run's, a chosen vocabulary."""
    chosen = dict(_split(argument) for argument in arguments if "=" in argument)
    resume = chosen.get("resume")
    if resume not in (None, "null", ""):
        folder = find_run(resume, Path(chosen.get("runs", "runs")), recipe)
        return {**_resumed(config_class, recipe, folder, chosen), "resume": str(folder)}
    values: dict[str, Any] = to_plain(config_class())
    if "preset" in chosen:
        _update(values, _preset(chosen["preset"], presets))
    if chosen.get("steps") in DIALECTS:
        vocabulary = dialect(chosen["steps"])()
        values["steps"] = {**to_plain(vocabulary), "dialect": chosen["steps"]}
    elif "steps" in chosen and chosen["steps"] != "kit":
        raise SettingError(
            "steps",
            chosen["steps"],
            "is no vocabulary",
            nearest_first(chosen["steps"], ["kit", *DIALECTS]),
        )
    return values


def _resumed(
    config_class: type[RunConfig], recipe: str, folder: Path, chosen: Mapping[str, str]
) -> dict[str, Any]:
    """The settings of a run that goes on."""
    saved = read_config(folder)
    made_by = saved.pop("recipe", recipe)
    if made_by != recipe:
        works = f"python -m recipes.{made_by} resume={folder}"
        raise SettingError("resume", str(folder), f"is a run of {made_by}, not of {recipe}", works)
    for name in ("steps", "preset"):
        if name in chosen:
            why = "cannot be chosen again for a run that goes on"
            raise SettingError(name, chosen[name], why, "leave it out")
    return typing.cast("dict[str, Any]", to_plain(from_plain(config_class, saved)))


def _preset(name: str, presets: Path) -> dict[str, Any]:
    """Read ``presets/<recipe>/<name>.yaml``."""
    there = sorted(path.stem for path in presets.glob("*.yaml"))
    if name not in there:
        raise SettingError("preset", name, "does not exist", nearest_first(name, there))
    values = yaml.safe_load((presets / f"{name}.yaml").read_text())
    assert isinstance(values, dict)
    return values


def _update(values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Put ``changes`` into nested ``values``; names that are not there are an error."""
    for name, change in changes.items():
        if name not in values:
            raise SettingError(name, change, "is not a setting", nearest_first(name, [*values])[:3])
        if isinstance(change, Mapping) and isinstance(values[name], dict):
            _update(values[name], change)
        else:
            values[name] = change


def _split(argument: str) -> tuple[str, str]:
    key, _, value = argument.partition("=")
    return key.lstrip("+~"), value


def _check_names(base: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Refuse options and settings that do not exist, with the nearest ones that do."""
    known = list(_names(base))
    groups = {name.rsplit(".", 1)[0] for name in known if "." in name}
    sweeps = "--multirun" in arguments or "-m" in arguments
    for argument in arguments:
        if argument.startswith("-"):
            one_of("option", argument.split("=")[0], _OPTIONS)
            continue
        key, value = _split(argument)
        if "=" not in argument or argument.startswith("~"):
            near = _nearest_names(key, known) or ["seed"]
            why = "is not of the form name=value"
            raise SettingError("command line", argument, why, [f"{near[0]}=VALUE"])
        _check_value(argument, sweeps)
        if key == "preset" or key.startswith("hydra") or key in known or key in groups:
            continue
        if not _is_argument(base, key):
            works = _nearest_names(key, known) or "--help lists all settings"
            raise SettingError(key, value, "is not a setting", works)


_OPTIONS = ("--multirun", "-m", "--help", "-h")


def _check_value(argument: str, sweeps: bool) -> None:
    """Refuse what Hydra cannot read as a value, and several values outside a sweep."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, value = _split(argument)
    try:
        parsed = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        reason = str(error).splitlines()[0].rstrip(".")
        why = f"cannot be read: {reason}"
        raise SettingError(key, value, why, f"quote it: '{key}=\"...\"'") from None
    if parsed.is_sweep_override() and not sweeps:
        first = value.split(",")[0]
        raise SettingError(
            key, value, "is several values", [first, "--multirun, for a run of each"]
        )


def _nearest_names(name: str, known: Sequence[str]) -> list[str]:
    """Settings that are spelled like ``name``: those of another group first, at most three."""
    last = name.rpartition(".")[2]
    same = [entry for entry in known if entry.rpartition(".")[2] == last]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.55)
    return [*same, *(entry for entry in near if entry not in same)][:3]


def _is_argument(base: Mapping[str, Any], key: str) -> bool:
    """Whether a setting is an argument of a class: ``env.kwargs.gravity``, of the environment."""
    places = ("env.kwargs", "collector_kwargs")
    return any(f"{key}.".startswith(f"{p}.") and p.split(".")[0] in base for p in places)


def _names(values: Mapping[str, Any], path: str = "") -> Any:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _names(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def _compose(
    base: dict[str, Any], name: str, arguments: list[str], run: Callable[[dict[str, Any]], None]
) -> None:
    """Let Hydra apply the overrides and call ``run`` once, or once for each point of a sweep."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    plain = [a for a in arguments if _split(a)[0] not in ("steps", "resume", "preset")]
    plain.sort(key=lambda argument: not argument.startswith("-"))  # options first: argparse
    plain = [f"++{a.lstrip('+')}" if _is_argument(base, _split(a)[0]) else a for a in plain]
    sweep = f"{base['runs']}/{name}/sweeps/{datetime.now():%Y%m%d-%H%M%S}"
    node = {
        **base,
        "hydra": {
            "run": {"dir": "."},
            "output_subdir": None,
            "sweep": {"dir": sweep, "subdir": "."},
            "job": {"chdir": False},
        },
        "defaults": [
            "_self_",
            {"override hydra/job_logging": "disabled"},
            {"override hydra/hydra_logging": "disabled"},
        ],
    }
    ConfigStore.instance().store(name=f"kit_{name}", node=node)
    failed: list[BaseException] = []

    def task(config: Any) -> None:
        try:
            values = OmegaConf.to_container(config, resolve=True)
            assert isinstance(values, dict)
            run({str(key): value for key, value in values.items()})
        except Exception as error:
            # Hydra would wrap it; it is raised again outside.
            failed.append(error)

    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [name, *plain]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise what is wrong instead of printing it and leaving
    try:
        with contextlib.suppress(KeyError):
            logging.getLogger("hydra").setLevel(logging.ERROR)
        hydra.main(version_base="1.3", config_path=None, config_name=f"kit_{name}")(task)()
        if failed:
            raise failed[0]
    except (HydraException, OmegaConfBaseException) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise SettingError("command line", " ".join(plain), f"is refused: {reason}") from None
    finally:
        sys.argv = before
        del os.environ["HYDRA_FULL_ERROR"]
        if full is not None:
            os.environ["HYDRA_FULL_ERROR"] = full


# ---------------------------------------------------------------------- help
def help_text(config_class: type[RunConfig], name: str, steps: str = "kit") -> str:
    """Return the documentation of every setting of a recipe, with default and unit.

    Args:
        config_class: dataclass of the recipe's settings.
        name: of the recipe.
        steps: vocabulary whose settings are shown.
    """
    config: Any = config_class()
    if steps in DIALECTS:
        config.steps = dialect(steps)()
    lines = [
        f"python -m recipes.{name} [setting=value ...]",
        "",
        "  --multirun setting=1,2,3   sweeps over values",
        "  resume=latest              goes on with the newest run (or resume=<run folder>)",
        "  preset=NAME                settings from recipes/presets, such as preset=mujoco",
        f"  steps=NAME                 steps in another vocabulary: {', '.join(DIALECTS)}",
        "",
        "settings:",
        "",
    ]
    for dotted, default, kind, text in settings(config):
        lines.append(f"  {dotted}={_shown(default)}  ({kind})")
        lines += textwrap.wrap(
            text.replace("``", ""), 92, initial_indent="      ", subsequent_indent="      "
        )
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(str, value)) + "]"
    return str(value)
