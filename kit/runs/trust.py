"""Which modules the settings in a run folder may import."""

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

import kit
from kit.lazy import module_and_name
from kit.runs.recipe import Recipe
from kit.steps import SettingError
from kit.steps.values import flat

_OWN = frozenset({"kit", "recipes", "torchrl", "gymnasium"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_ARGUMENTS = ("env.kwargs.", "collector_kwargs.")
_NO_MODULES = frozenset({"recipe", "device", "log_dir", "resume", "init_from", "buffer_folder"})
"""Settings whose colon is part of a device or of a folder."""
_FOLDERS_OF_RUNS = 3
"""Folders above a run in which runs are: ``<runs>/<recipe>/<env>/<run>``."""


def check_names(
    config: Mapping[str, Any], folder: Path, trust: Collection[str], how: str, recipe: Path
) -> None:
    """Raise SettingError for settings of a run folder that name modules from elsewhere.

    Trusted are the kit, its recipes, TorchRL, Gymnasium, packages that register environments, and
    modules below the working folder or next to the recipe. A module that is in the run folder, or
    may have come with it, is never trusted.

    Args:
        config: content of the run's ``config.yaml``.
        folder: run folder.
        trust: modules that may be imported from anywhere, with their submodules.
        how: how to trust a module, for the error: ``trust=``.
        recipe: file of the recipe.
    """
    for name, value in flat(config).items():
        names_module = isinstance(value, str) and ":" in value
        if not names_module or name in _NO_MODULES or name.startswith(_ARGUMENTS):
            continue
        module, _ = module_and_name(value)
        if not _is_trusted(module, folder, trust, recipe.parent):
            _refuse(name, value, module, how)


def check_recipe(source: str, folder: Path, trust: Collection[str], how: str) -> None:
    """Raise SettingError for a recipe of a run folder from elsewhere, as :func:`check_names` does.

    ``source`` is a dotted name or the path of a file.
    """
    file = Recipe(source).file
    if file is None:
        trusted = _is_trusted(source, folder, trust)
    else:
        here = Path.cwd()
        found = _Found([file], [file.parent])
        trusted = source in trust or (_is_below(file, here) and not _came_with(folder, found, here))
    if not trusted:
        _refuse("recipe", source, source, how)


def trusted_names(text: str | None) -> list[str]:
    """The modules in ``a,b`` or ``[a,b]``."""
    names = (text or "").strip("[]").split(",")
    return [name.strip() for name in names if name.strip()]


def _refuse(name: str, value: str, module: str, how: str) -> NoReturn:
    why = "is set by the run folder and imports a module from outside the project, or one that "
    why += "may have come with the run"
    raise SettingError(name, value, why, f"if you trust {module}, add {how}{module}")


def _is_trusted(module: str, run: Path, trust: Collection[str], *beside: Path) -> bool:
    """Return whether settings of ``run`` may import ``module``; ``beside`` are project folders."""
    if any(f"{module}.".startswith(f"{name}.") for name in trust):
        return True
    found = _find(module)
    if found is None:
        return False  # where Python would find it later is not known
    project = [Path.cwd(), *beside]
    if module.partition(".")[0] in {*_OWN, *_environments()}:
        folders = [file.parent for file in found.files[:1]]
        installed = all(
            _INSTALLED.intersection(place.parts) or place == Path(kit.__file__).parents[1]
            for place in found.places
        )
        return not _came_with(run, found, *project, *folders, installed=installed)
    below = all(any(_is_below(file, root) for root in project) for file in found.files)
    return below and not _came_with(run, found, *project)


class _Found(NamedTuple):
    """Location of a module."""

    files: list[Path]
    """Files that importing it executes, or the folders of a namespace package."""
    places: list[Path]
    """Folders in which its first part was found."""


def _find(module: str) -> _Found | None:
    """Find a module without importing anything; ``None`` if it is not there, or has no file."""
    files: list[Path] = []
    places: list[Path] = []
    search: Any = None
    for name in itertools.accumulate(module.split("."), "{}.{}".format):
        spec = _spec(name, search)
        if spec is None or spec.name != name:  # as that of __main__
            return None
        search = spec.submodule_search_locations or ()  # a module has no submodules
        folders = [Path(folder) for folder in search]
        own = [Path(spec.origin)] if spec.has_location and spec.origin else folders
        if not own:
            return None  # part of Python itself
        places = places or [path.parent for path in folders or own]
        files += own
    return _Found(files, places)


def _spec(name: str, search: Any) -> ModuleSpec | None:
    """The module that Python imports by this name, from ``search`` or else from ``sys.path``."""
    spec: ModuleSpec | None
    if name in sys.modules:
        spec = getattr(sys.modules[name], "__spec__", None)
        return spec
    for finder in (one for one in sys.meta_path if hasattr(one, "find_spec")):
        try:
            spec = finder.find_spec(name, search)
        except (ImportError, ValueError):
            spec = None
        except KeyError:  # Python describes no namespace package before its parent is imported
            spec = ModuleSpec(name, None, is_package=True)
            folders = (Path(folder, name.rpartition(".")[2]) for folder in search)
            spec.submodule_search_locations = [str(one) for one in folders if one.is_dir()]
        if spec is not None:
            return spec
    return None


def _is_below(file: Path, root: Path) -> bool:
    file, root = file.resolve(), root.resolve()
    return file.is_relative_to(root) and not _INSTALLED.intersection(file.relative_to(root).parts)


def _came_with(run: Path, found: _Found, *project: Path, installed: bool = False) -> bool:
    """Return whether a module is in the run folder, or may have been unpacked together with it.

    The latter are modules below a folder that contains the run but no folder of ``project``, and
    modules next to the run or in a folder of runs, unless they are ``installed`` packages.
    """
    code = [folder.resolve() for folder in project]
    places = [place.resolve() for place in found.places]
    for place in {run.resolve(), Path(os.path.abspath(run))}:
        apart = (one for one in place.parents if not any(c.is_relative_to(one) for c in code))
        inside = [place, *apart]
        if any(file.resolve().is_relative_to(one) for file in found.files for one in inside):
            return True
        near = place.parents[:_FOLDERS_OF_RUNS]
        if not installed and any(one in near for one in places):
            return True
    return False


def _environments() -> Iterator[str]:
    """Yield the packages that register environments in Gymnasium."""
    plugins = (plugin.value for plugin in entry_points(group="gymnasium.envs"))
    for place in (*plugins, *(spec.entry_point for spec in gym.registry.values()), "ale_py"):
        if isinstance(place, str):
            yield place.partition(":")[0].partition(".")[0]
