"""From the command line to a run: Hydra overrides, sweeps, help, resume."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import functools
import gc
import itertools
import logging
import os
import signal
import sys
import tempfile
import textwrap
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.cli.errors import errors_in_one_line
from kit.cli.signals import Signals, hold_saving, stop_with_parent
from kit.cli.sweep import check_settings, note, said, summary
from kit.config import RunConfig, checks
from kit.config.plain import check, from_plain, settings, to_plain
from kit.dialects import DIALECTS, dialect
from kit.dialects.files import flat, load
from kit.logging.files import NotSaved
from kit.runs.recipe import Recipe
from kit.runs.run_folder import SWEEP_JOB, check_same_recipe, new_sweep
from kit.runs.saved_runs import find_run, read_config
from kit.runs.trust import check_names, trusted_names
from kit.steps.errors import SettingError, nearest_first, one_of

Build = Callable[..., Any]


def main(config_class: type[RunConfig], build: Build, argv: Sequence[str] | None = None) -> None:
    """Run a recipe from the command line.

    ``key=value`` overrides a setting, ``steps=sheeprl`` chooses another library's vocabulary,
    ``--multirun key=1,2,3`` sweeps, ``--help`` documents every setting, ``resume=latest`` resumes
    the newest run. An error of the user's is one line.

    Args:
        config_class: dataclass of the recipe's settings. The recipe is named after its module.
        build: makes a trainer from such a dataclass.
        argv: arguments; those of the process by default.
    """
    if getattr(sys.modules["__main__"], config_class.__name__, None) is config_class:
        gc.freeze()  # imports are done; looking through them again takes a second at the end,
        atexit.register(gc.freeze)  # and through what the run has made a seventh of one
        hold_saving()
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    with errors_in_one_line():
        arguments = list(sys.argv[1:] if argv is None else argv)
        recipe = Recipe.of(config_class)
        if "--help" in arguments or "-h" in arguments:
            print(help_text(config_class, _vocabulary(_chosen(arguments))))
        else:
            if argv is None:
                _check_alone()
            base, given = _base(config_class, recipe, arguments)
            arguments = _without_commas(arguments)
            _check_names(base, arguments, _mappings(config_class))
            _compose(base, arguments, _Job(recipe, config_class, build, given))


_STARTED = {
    "WORLD_SIZE": "torchrun", "SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
}  # fmt: skip
"""What counts the processes that a launcher has started; ``sbatch`` starts one, and sets none."""


def _check_alone() -> None:
    """Refuse to be one of several processes with this command line, as launchers start them."""
    for name, launcher in _STARTED.items():
        if (count := os.environ.get(name, "1")) in ("", "1"):
            continue
        why = "processes were started, and each would make the same run: runs do not train together"
        works = f"start one, without {launcher}; unset {name} where their command lines differ"
        hint = "several runs: --multirun seed=0,1 hydra/launcher=joblib"
        raise SettingError(name, count, why, works, hint)


class _Job:
    """One run of a command. Other processes, to which launchers send it, import the recipe again.

    Pickled are names alone: the settings' class and ``build`` may be those of ``__main__``, which
    is another module there.

    Args:
        recipe: of the run.
        config_class: class of its settings.
        build: makes its trainer.
        given: dotted names of settings that were given before the overrides: by a preset, by the
            run to resume.
    """

    def __init__(
        self, recipe: Recipe, config_class: type[RunConfig], build: Build, given: frozenset[str]
    ) -> None:
        self.recipe, self.config_class, self.build = recipe, config_class, build
        self.given = given
        self.is_elsewhere = False
        self.failed: list[Exception] = []

    def __reduce__(self) -> tuple[Any, ...]:
        names = self.config_class.__name__, self.build.__name__
        return _job_elsewhere, (self.recipe, *names, self.given)

    def given_of(self, values: dict[str, Any], overrides: Sequence[Any]) -> dict[str, Any]:
        """Return the settings among ``values`` that were given; the others have defaults."""
        entries = [{one.key_or_group: one.value()} for one in overrides]
        names = self.given.union(*map(flat, entries))
        return _only(values, names, _mappings(self.config_class))

    def __call__(self, config: Any) -> None:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode
        from omegaconf import OmegaConf

        hydra = HydraConfig.get()
        of_sweep = hydra.mode == RunMode.MULTIRUN
        overrides = typing.cast("list[str]", OmegaConf.to_container(hydra.overrides.task))
        job = SWEEP_JOB.set((hydra.job.num, said(overrides)) if of_sweep else None)
        trainer = None
        try:
            values = typing.cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
            values = self.given_of(values, [_parsed(one) for one in overrides])
            signals = Signals(self.recipe.command)
            with signals.handled():
                trainer = self.build(from_plain(self.config_class, values))
                signals.begin(trainer)
                trainer.run()
            if of_sweep:
                note(Path(hydra.sweep.dir), hydra.job.num, overrides, trainer)
        except Exception as error:
            with contextlib.suppress(NotSaved):
                if of_sweep:
                    note(Path(hydra.sweep.dir), hydra.job.num, overrides, trainer, error)
            if self.is_elsewhere:
                raise  # Hydra brings it home
            self.failed.append(error)  # Hydra would wrap it
        finally:
            SWEEP_JOB.reset(job)


def _job_elsewhere(recipe: Recipe, config_class: str, build: str, given: frozenset[str]) -> _Job:
    """Make a job in a process that a launcher started."""
    module = recipe.load()
    job = _Job(recipe, getattr(module, config_class), getattr(module, build), given)
    job.is_elsewhere = True
    stop_with_parent()
    return job


# ---------------------------------------------------------------------- settings and overrides
def _base(
    config_class: type[RunConfig], recipe: Recipe, arguments: Sequence[str]
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the settings before overrides, and the dotted names of those that are no defaults.

    These are the settings of a preset, of a resumed run, or of a chosen vocabulary.
    """
    chosen = _chosen(arguments)
    if chosen.get("resume") not in (None, ""):
        given = [one for one in arguments if "=" in one and not one.startswith("-")]
        if _sweeps(arguments) and any(_parsed(one).is_sweep_override() for one in given):
            why = "goes on with one run, and a sweep makes several"
            raise SettingError("resume", chosen["resume"], why, "resume each by itself")
        runs = chosen.get("runs") or "runs"
        with checks.usable_folder(runs):
            folder = find_run(str(chosen["resume"]), Path(str(runs)), recipe.name)
        values = {**_resumed(config_class, recipe, folder, chosen), "resume": str(folder)}
        return values, frozenset(values)
    values = to_plain(config_class())
    changes: dict[str, Any] = {}
    steps = _vocabulary(chosen)
    if steps != "kit":
        values["steps"] = to_plain(dialect(steps)())
        changes = {"steps.dialect": steps}
    if "preset" in chosen:
        name = str(chosen["preset"])
        preset = _preset(config_class, recipe, name)
        if "steps" in preset and steps != "kit":
            why = f"takes the place of the steps that preset={name} sets"
            raise SettingError("steps", steps, why, "leave one of the two out")
        _update(values, preset, _mappings(config_class))
        changes |= flat(preset)
    return values, frozenset(changes)


def _chosen(arguments: Sequence[str]) -> dict[str, Any]:
    """The settings that come before all others, as Hydra reads them; several values as text."""
    chosen: dict[str, Any] = {}
    for argument in arguments:
        key, value = _split(argument)
        if key == "trust":
            chosen[key] = value
        elif "=" in argument and key in ("steps", "preset", "resume", "runs"):
            parsed = _parsed(argument)
            chosen[key] = value if parsed.is_sweep_override() else parsed.value()
    return chosen


def _vocabulary(chosen: Mapping[str, Any]) -> str:
    """The name of the vocabulary of steps."""
    steps, known = chosen.get("steps", "kit"), ["kit", *DIALECTS]
    if steps not in known:
        raise SettingError("steps", steps, "is no vocabulary", nearest_first(steps, known))
    return str(steps)


def _preset(config_class: type[RunConfig], recipe: Recipe, name: str) -> dict[str, Any]:
    """The settings of a file beside the recipe."""
    file = Path(sys.modules[config_class.__module__].__file__ or "")
    presets = {f.stem: f for f in (file.parent / "presets" / recipe.name).glob("*.yaml")}
    if name not in presets:
        raise SettingError("preset", name, "does not exist", nearest_first(name, sorted(presets)))
    return load(presets[name])


def _resumed(
    config_class: type[RunConfig], recipe: Recipe, folder: Path, chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a run that is resumed."""
    check_same_recipe(folder, recipe)
    saved = read_config(folder)
    saved.pop("recipe", None)
    file = Path(sys.modules[config_class.__module__].__file__ or "")
    check_names(saved, folder, trusted_names(chosen.get("trust")), "trust=", file)
    for name in ("steps", "preset"):
        if name in chosen:
            why = "cannot be chosen again for a run that is resumed"
            raise SettingError(name, chosen[name], why, "leave it out")
    return typing.cast("dict[str, Any]", to_plain(from_plain(config_class, saved)))


def _mappings(config_class: type[RunConfig]) -> tuple[str, ...]:
    """Settings that take any names, with a dot: ``env.kwargs.``, arguments of the environment."""
    found = [name for name, value, *_ in settings(config_class()) if isinstance(value, dict)]
    return tuple(f"{name}." for name in found)


def _update(
    values: dict[str, Any], changes: Mapping[str, Any], mappings: tuple[str, ...], path: str = ""
) -> None:
    """Put ``changes`` into nested ``values``; names that are not there are an error."""
    for name, change in changes.items():
        if name not in values and not f"{path}{name}".startswith(mappings):
            near = [f"{path}{entry}" for entry in nearest_first(name, [*values])[:3]]
            raise SettingError(f"{path}{name}", change, "is not a setting", near)
        if isinstance(change, Mapping) and isinstance(values.get(name), dict):
            _update(values[name], change, mappings, f"{path}{name}.")
        else:
            values[name] = change


def _only(
    values: Mapping[str, Any], names: Collection[str], mappings: tuple[str, ...], path: str = ""
) -> dict[str, Any]:
    """Return the entries of nested ``values`` with these dotted names; mappings stay whole."""
    found = {}
    for key, value in values.items():
        name = f"{path}{key}"
        within = any(one.startswith(f"{name}.") for one in names)
        if within and isinstance(value, Mapping) and f"{name}." not in mappings:
            found[key] = _only(value, names, mappings, f"{name}.")
        elif within or name in names:
            found[key] = value
    return found


def _sweeps(arguments: Sequence[str]) -> bool:
    return "--multirun" in arguments or "-m" in arguments


def _split(argument: str) -> tuple[str, str]:
    key, _, value = argument.partition("=")
    return key.lstrip("+~"), value


def _check_names(
    base: Mapping[str, Any], arguments: Sequence[str], mappings: tuple[str, ...]
) -> None:
    """Refuse options and settings that do not exist, or that mean one thing twice."""
    defaults = flat(base)
    known = list(defaults)
    groups = {name.rsplit(".", 1)[0] for name in known if "." in name}
    sweeps = _sweeps(arguments)
    for argument in arguments:
        if argument.startswith("-"):
            one_of("option", argument.split("=")[0], _OPTIONS)
            continue
        key, value = _split(argument)
        if "=" not in argument or argument.startswith("~"):
            near = _nearest_names(key, known) or ["seed"]
            why = "is not of the form name=value"
            raise SettingError("command line", argument, why, [f"{near[0]}=VALUE"])
        if key == "trust":
            continue
        if key in _FOLDERS_OF_HYDRA:
            raise SettingError(key, value, "is decided by runs", "use runs=FOLDER")
        _check_value(argument, sweeps, defaults.get(key))
        if key == "preset" or key.startswith("hydra") or key in known or key in groups:
            continue
        if not _is_in_mapping(base, key, mappings):
            works = _nearest_names(key, known) or "--help lists all settings"
            raise SettingError(key, value, "is not a setting", works)


_OPTIONS = ("--multirun", "-m", "--help", "-h")

_FOLDERS_OF_HYDRA = {
    "hydra.run.dir", "hydra.output_subdir", "hydra.sweep.dir", "hydra.sweep.subdir",
    "hydra.job.chdir",
}  # fmt: skip
"""Where Hydra would write, or run: runs have folders of their own."""


def _without_commas(arguments: list[str]) -> list[str]:
    """Write ``logger=wandb,tensorboard``, which is a sweep to Hydra, as ``wandb+tensorboard``.

    A list means the same.
    """
    if _sweeps(arguments):
        return arguments
    written = str.maketrans({",": "+", "[": None, "]": None, " ": None})
    return [a.translate(written) if _split(a)[0] == "logger" else a for a in arguments]


def _parsed(argument: str) -> Any:
    """An override as Hydra reads it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException as error:
        key, value = _split(argument)
        reason = str(error).splitlines()[0].rstrip(".")
        why = f"cannot be read: {reason}"
        works = f"quote it: '{key}=\"...\"'"
        if value[:1] in ("[", "{"):
            works = f"write it without spaces, or quote the whole argument: '{key}=...'"
        raise SettingError(key, value, why, works) from None


def _check_value(argument: str, sweeps: bool, default: Any) -> None:
    """Refuse values that Hydra cannot read, and several values outside a sweep."""
    (key, value), parsed = _split(argument), _parsed(argument)
    if parsed.is_sweep_override() and not sweeps:
        each = parsed.sweep_string_iterator() if parsed.is_discrete_sweep() else iter(())
        first = list(itertools.islice(each, 1))
        parts = isinstance(default, list) and not value.startswith("[")  # dataset=one,other
        pair = [f"[{value}]"] if parts or key.startswith("steps.") else []  # or of sb3's train_freq
        works = [*([] if parts else first), *pair, "--multirun, for a run of each"]
        raise SettingError(key, value, "is several values", works)


def _runs_of_all(base: Mapping[str, Any], arguments: Sequence[str]) -> str:
    """The folder of the runs of a sweep; a temporary one if they have none, or several."""
    runs = base["runs"]
    for parsed in (_parsed(a) for a in arguments if _split(a)[0] == "runs"):
        runs = None if parsed.is_sweep_override() else parsed.value()
    return str(runs or tempfile.gettempdir())


def _with_start(
    base: Mapping[str, Any], arguments: Sequence[str], argument: str, recipe: Recipe
) -> str:
    """Write ``start_from=latest`` with its folder: it would soon be that of a run of the sweep.

    Raises:
        SettingError: if there is no such run, or one in each of several folders of runs.
    """
    if _split(argument)[0] != "start_from":
        return argument
    parsed = _parsed(argument)
    if not parsed.is_sweep_override():
        given = [parsed.get_value_element_as_str()]
    elif parsed.is_discrete_sweep():
        given = list(parsed.sweep_string_iterator())
    else:
        return argument  # Hydra says what is wrong
    texts = ["latest" if text.strip("\"'") == "latest" else text for text in given]
    if "latest" not in texts:
        return argument
    runs = [_parsed(a) for a in arguments if _split(a)[0] == "runs"]
    if any(one.is_sweep_override() for one in runs):
        why = "would be a run of this sweep, as there are several folders of runs"
        raise SettingError("start_from", "latest", why, "name the folder of a run")
    place = Path(str((runs[-1].value() if runs else base["runs"]) or "runs"))
    folder = str(find_run("latest", place, recipe.name, "start_from"))
    quoted = "'{}'".format(folder.replace("'", "\\'"))
    return f"start_from={','.join(quoted if text == 'latest' else text for text in texts)}"


def _nearest_names(name: str, known: Sequence[str]) -> list[str]:
    """Settings that are spelled like ``name``: those of another group first, at most three."""
    last = name.rpartition(".")[2]
    same = [entry for entry in known if entry.rpartition(".")[2] == last]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.55)
    return [*same, *(entry for entry in near if entry not in same)][:3]


def _check_sweep(base: Mapping[str, Any], arguments: Sequence[str], job: _Job) -> None:
    """Check the settings of every run of a sweep before the first begins, in the order of Hydra.

    Where another sweeper chooses them, by what earlier runs have reached, they are not known.
    """
    given = [argument for argument in arguments if not argument.startswith("-")]
    if any(
        _split(argument)[0].startswith(("hydra/sweeper", "hydra.sweeper")) for argument in given
    ):
        return
    parsed = [_parsed(a) for a in given if not _split(a)[0].startswith("hydra")]
    swept = [one.is_sweep_override() for one in parsed]
    if not all(one.is_discrete_sweep() for one, several in zip(parsed, swept) if several):
        return  # Hydra says what is wrong
    texts = [
        list(one.sweep_string_iterator()) if several else [one.get_value_element_as_str()]
        for one, several in zip(parsed, swept)
    ]
    keys = [one.get_key_element() for one in parsed]
    launchers = {_split(argument)[1] for argument in given if "hydra/launcher" in argument}
    here = launchers <= {"basic", "joblib"}
    read = functools.cache(_parsed)  # each value once, not once for each run
    for number, point in enumerate(itertools.product(*texts)):
        overrides = [f"{key}={text}" for key, text in zip(keys, point)]
        settings_read = [read(override) for override in overrides]
        values = _values(base, settings_read)
        if values is not None:
            told = [override for override, several in zip(overrides, swept) if several]
            values = job.given_of(values, settings_read)
            check_settings(job.config_class, values, number, told, here=here)


def _values(base: Mapping[str, Any], overrides: Sequence[Any]) -> dict[str, Any] | None:
    """The settings after overrides, as Hydra applies them; ``None`` if it alone can."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = OmegaConf.create(dict(base))
    try:
        for one in overrides:
            how = {"merge": True, "force_add": one.is_add() or one.is_force_add()}
            OmegaConf.update(config, one.key_or_group, one.value(), **how)
        return typing.cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException:  # such as a value of Hydra's own
        return None


def _is_in_mapping(base: Mapping[str, Any], key: str, mappings: tuple[str, ...]) -> bool:
    """Whether a setting is in a mapping, such as an argument of a class, or the whole mapping."""
    return f"{key}.".startswith(mappings) and key.split(".")[0] in base


def _added(
    base: Mapping[str, Any], arguments: Sequence[str], mappings: tuple[str, ...]
) -> list[str]:
    """Arguments as Hydra wants them, where those in mappings are new to it."""
    free = [_is_in_mapping(base, _split(one)[0], mappings) for one in arguments]
    return [f"++{a.lstrip('+')}" if new else a for a, new in zip(arguments, free)]


def _compose(base: dict[str, Any], arguments: list[str], job: _Job) -> None:
    """Let Hydra apply the overrides and call ``job`` once, or once for each point of a sweep."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    plain = [a for a in arguments if _split(a)[0] not in ("steps", "resume", "preset", "trust")]
    groups = {name for name, value in base.items() if isinstance(value, dict)}
    # Options first, for argparse; values of whole groups last: nothing could be set within them.
    plain.sort(key=lambda a: (not a.startswith("-"), _split(a)[0] in groups and "={" not in a))
    plain = _added(base, plain, _mappings(job.config_class))
    name = f"kit_{job.recipe.name}"
    sweep = None
    if _sweeps(arguments):
        plain = [_with_start(base, plain, one, job.recipe) for one in plain]
        _check_sweep(base, plain, job)
        sweep = new_sweep(Path(_runs_of_all(base, plain)), job.recipe.name)
    ConfigStore.instance().store(name=name, node=_node(base, sweep))
    logging.getLogger("hydra").setLevel(logging.ERROR)
    try:
        with _command_line([job.recipe.name, *plain]):
            hydra.main(version_base="1.3", config_path=None, config_name=name)(job)()
        if job.failed:
            raise job.failed[0]
    except (HydraException, OmegaConfBaseException) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise SettingError("command line", " ".join(plain), f"is refused: {reason}") from None
    finally:
        if sweep is not None:
            if table := summary(sweep):  # of the runs that have ended
                print(f"\n{table}")
            with contextlib.suppress(OSError):
                sweep.rmdir()  # if Hydra has not come to write there


def _node(base: dict[str, Any], sweep: Path | None) -> dict[str, Any]:
    """Settings and their defaults for Hydra, which writes no files and no log of its own."""
    own = {
        "run": {"dir": "."},
        "output_subdir": None,
        "sweep": {"dir": str(sweep or "."), "subdir": "."},
        "job": {"chdir": False},
    }
    logs = [{f"override hydra/{log}": "disabled"} for log in ("job_logging", "hydra_logging")]
    return {**base, "hydra": own, "defaults": ["_self_", *logs]}


@contextlib.contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    """Let Hydra find these arguments, and raise what is wrong instead of printing and leaving."""
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = arguments, "1"
    try:
        yield
    finally:
        sys.argv = argv
        del os.environ["HYDRA_FULL_ERROR"]
        if full is not None:
            os.environ["HYDRA_FULL_ERROR"] = full


# ---------------------------------------------------------------------- help
def help_text(config_class: type[RunConfig], steps: str = "kit") -> str:
    """Every setting of a recipe with default, type and unit; steps in the vocabulary ``steps``."""
    config: Any = config_class()
    if steps in DIALECTS:
        config.steps = dialect(steps)()
        check(config)
    lines = [
        f"{Recipe.of(config_class).command} [setting=value ...]",
        "",
        "  --multirun setting=1,2,3   sweeps over values",
        "  resume=latest              resumes the newest run (or resume=<run folder>)",
        "  trust=MODULE,...           modules that a resumed run may import, docs/security.md",
        "  preset=NAME                settings from presets/<recipe>/NAME.yaml beside the recipe",
    ]
    if config_class.FAMILY != "offline":
        names = ", ".join(DIALECTS)
        lines.append(f"  steps=NAME                 steps in another vocabulary: {names}")
    lines += ["", "settings:", ""]
    for dotted, default, kind, text in settings(config):
        lines.append(f"  {dotted}={_shown(default)}  ({kind})")
        wrapped = textwrap.wrap(text.replace("``", ""), 86, break_on_hyphens=False)
        lines += textwrap.indent("\n".join(wrapped), " " * 6).split("\n")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(str, value)) + "]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
