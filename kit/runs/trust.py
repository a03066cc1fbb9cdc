"""Check that the settings of a run folder import only trusted modules."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import gymnasium as gym

from kit import RECIPES_ROOT
from kit.dialects.rl_zoo import recipe_wrappers
from kit.lazy import module_and_name
from kit.runs.recipe import Recipe
from kit.steps import SettingError
from kit.steps.values import flat, wrapper_names

_TRUSTED = frozenset({"kit", "recipes", "torchrl", "gymnasium"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_ARGUMENTS = ("env.kwargs.", "collector_kwargs.")
_NO_MODULES = frozenset({"recipe", "device", "log_dir", "resume", "init_from", "buffer_folder"})
"""Settings in which a colon is part of a device or path."""
_FOLDERS_OF_RUNS = 3
"""Number of folders above a run folder, as in ``<log_dir>/<recipe>/<env>/<run>``."""


def check_names(
    config: Mapping[str, Any], folder: Path, trust: Collection[str], how: str, recipe: Path
) -> None:
    """Check that the settings of a run folder name only trusted modules.

    kit, its recipes, TorchRL, Gymnasium and packages that register environments are trusted, as are
    modules in the working directory or next to the recipe. Modules in the run folder, and modules
    that may have been copied with it, are only trusted if ``trust`` contains them.

    Args:
        config: content of the run's ``config.yaml``.
        folder: run folder.
        trust: additional trusted modules, including their submodules.
        how: argument prefix for trusting a module, shown in errors, such as ``trust=``.
        recipe: file of the recipe.

    Raises:
        SettingError: for the first setting that names an untrusted module.
    """
    for name, value in _named_modules(config):
        module, _ = module_and_name(value)
        if not _is_trusted(module, folder, trust, recipe.parent):
            _reject(name, value, module, how)


def _named_modules(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings whose value has the form ``module:Name``, including wrappers."""
    for name, value in flat(config).items():
        names_module = isinstance(value, str) and ":" in value
        if names_module and name not in _NO_MODULES and not name.startswith(_ARGUMENTS):
            yield name, value
    env, steps = (
        values if isinstance(values := config.get(name), Mapping) else {}
        for name in ("env", "steps")
    )
    wrappers = {
        "env.wrappers": env.get("wrappers") or [],
        "steps.env_wrapper": recipe_wrappers(steps.get("env_wrapper")),
    }
    for name, entries in wrappers.items():
        yield from ((name, wrapper) for wrapper, _ in wrapper_names(entries, name))


def check_recipe(source: str, folder: Path, trust: Collection[str], how: str) -> None:
    """Check that a run folder's recipe is trusted, using the rules of :func:`check_names`.

    Args:
        source: dotted name or file path of the recipe.
        folder: run folder.
        trust: additional trusted modules.
        how: argument prefix for trusting a module, shown in error messages.

    Raises:
        SettingError: if the recipe is not trusted.
    """
    file = Recipe(source).file
    if file is None:
        trusted = _is_trusted(source, folder, trust)
    else:
        here = Path.cwd()
        found = _Found([file], [file.parent])
        trusted = source in trust or (_is_below(file, here) and not _came_with(folder, found, here))
    if not trusted:
        _reject("recipe", source, source, how)


def trusted_names(text: str | None) -> list[str]:
    """Return the module names in a string such as ``a,b`` or ``[a,b]``."""
    names = (text or "").strip("[]").split(",")
    return [name.strip() for name in names if name.strip()]


def _reject(name: str, value: str, module: str, how: str) -> NoReturn:
    reason = (
        "The run imports a module that is outside the project or was copied with the run folder"
    )
    raise SettingError(name, value, reason, f"If you trust {module}, add {how}{module}")


def _is_trusted(module: str, run: Path, trust: Collection[str], *folders: Path) -> bool:
    """Return whether ``run`` may import ``module``. ``folders`` are further project folders."""
    if any(f"{module}.".startswith(f"{name}.") for name in trust):
        return True
    found = _find(module)
    if found is None:
        return False  # a later import may find a different file
    project = [Path.cwd(), *folders]
    if module.partition(".")[0] in {*_TRUSTED, *_environments()}:
        package = [file.parent for file in found.files[:1]]
        installed = all(
            _INSTALLED.intersection(place.parts) or place == RECIPES_ROOT for place in found.places
        )
        return not _came_with(run, found, *project, *package, installed=installed)
    below = all(any(_is_below(file, root) for root in project) for file in found.files)
    return below and not _came_with(run, found, *project)


class _Found(NamedTuple):
    """Location of a module."""

    files: list[Path]
    """Files that importing the module executes; for a namespace package, its folders."""
    places: list[Path]
    """Folders in which the top-level package was found."""


def _find(module: str) -> _Found | None:
    """Locate a module without importing anything. Return ``None`` if it has no file."""
    files: list[Path] = []
    places: list[Path] = []
    search: Any = None
    for name in itertools.accumulate(module.split("."), "{}.{}".format):
        spec = _spec(name, search)
        if spec is None or spec.name != name:  # the spec of __main__ has another name
            return None
        search = spec.submodule_search_locations or ()  # a plain module has no submodules
        folders = [Path(folder) for folder in search]
        located = [Path(spec.origin)] if spec.has_location and spec.origin else folders
        if not located:
            return None  # built into Python
        places = places or [path.parent for path in folders or located]
        files += located
    return _Found(files, places)


def _spec(name: str, search: Any) -> ModuleSpec | None:
    """Return the spec with which Python would import a module from ``search`` or ``sys.path``."""
    spec: ModuleSpec | None
    if name in sys.modules:
        spec = getattr(sys.modules[name], "__spec__", None)
        return spec
    for finder in (f for f in sys.meta_path if hasattr(f, "find_spec")):
        try:
            spec = finder.find_spec(name, search)
        except (ImportError, ValueError):
            spec = None
        except KeyError:  # a namespace package has no spec before its parent is imported
            spec = ModuleSpec(name, None, is_package=True)
            folders = (Path(folder, name.rpartition(".")[2]) for folder in search)
            spec.submodule_search_locations = [str(f) for f in folders if f.is_dir()]
        if spec is not None:
            return spec
    return None


def _is_below(file: Path, root: Path) -> bool:
    file, root = file.resolve(), root.resolve()
    return file.is_relative_to(root) and not _INSTALLED.intersection(file.relative_to(root).parts)


def _came_with(run: Path, found: _Found, *project: Path, installed: bool = False) -> bool:
    """Return whether a module is in the run folder, or may have been unpacked with it.

    A module may have been unpacked with the run if a folder contains the run and the module, but no
    ``project`` folder. Unless the module is ``installed``, it may also have been unpacked with the
    run if its top-level package is next to the run or in a folder that contains runs.
    """
    code = [folder.resolve() for folder in project]
    places = [place.resolve() for place in found.places]
    for place in {run.resolve(), Path(os.path.abspath(run))}:
        apart = (f for f in place.parents if not any(c.is_relative_to(f) for c in code))
        inside = [place, *apart]
        if any(file.resolve().is_relative_to(f) for file in found.files for f in inside):
            return True
        near = place.parents[:_FOLDERS_OF_RUNS]
        if not installed and any(f in near for f in places):
            return True
    return False


def _environments() -> Iterator[str]:
    """Yield the packages that register Gymnasium environments."""
    plugins = (plugin.value for plugin in entry_points(group="gymnasium.envs"))
    for place in (*plugins, *(spec.entry_point for spec in gym.registry.values()), "ale_py"):
        if isinstance(place, str):
            yield place.partition(":")[0].partition(".")[0]
