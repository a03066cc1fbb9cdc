"""Which modules the settings in a run folder may import."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import gymnasium as gym

from kit.dialects.files import flat
from kit.steps import SettingError

_OWN = frozenset({"kit", "recipes", "torchrl", "gymnasium"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_ARGUMENTS = ("env.kwargs.", "collector_kwargs.")
_NO_MODULES = frozenset({"recipe", "device", "runs", "resume", "start_from", "buffer_folder"})
"""Settings whose colon is part of a device or of a folder."""


def check_names(
    config: Mapping[str, Any], folder: Path, trust: Collection[str], how: str, recipe: Path
) -> None:
    """Refuse settings of a run folder that name modules from elsewhere.

    Trusted are the kit, its recipes, TorchRL, Gymnasium, packages that register environments, and
    the project: modules below the working folder or beside the recipe, but not what came with the
    run folder or is installed.

    Args:
        config: of the run, as its ``config.yaml`` has it.
        folder: of the run.
        trust: further modules that may be imported, by the first part of their name.
        how: how to trust one, for the error: ``trust=``.
        recipe: file of the recipe.

    Raises:
        SettingError: naming the setting, its module, and how to trust it.
    """
    for name, value in flat(config).items():
        names_module = isinstance(value, str) and ":" in value
        if not names_module or name in _NO_MODULES or name.startswith(_ARGUMENTS):
            continue
        package = value.partition(":")[0].partition(".")[0]
        if package not in {*trust, *_OWN, *_environments()} and not _is_of_project(
            package, folder, recipe.parent
        ):
            raise _untrusted(name, value, package, how)


def check_recipe(source: str, folder: Path, trust: Collection[str], how: str) -> None:
    """Refuse a recipe that a run folder names, unless it is the kit's, the project's, or trusted.

    Arguments are those of :func:`check_names`; ``source`` is a dotted name or the path of a file.

    Raises:
        SettingError: naming the recipe, and how to trust it.
    """
    package = source if source.endswith(".py") else source.partition(".")[0]
    if package in {*trust, *_OWN}:
        return
    if source.endswith(".py"):
        trusted = _is_below(Path(source), Path.cwd()) and not _is_brought(Path(source), folder)
    else:
        trusted = _is_of_project(package, folder)
    if not trusted:
        raise _untrusted("recipe", source, package, how)


def trusted_names(text: str | None) -> list[str]:
    """The modules in ``a,b`` or ``[a,b]``."""
    names = (text or "").strip("[]").split(",")
    return [name.strip() for name in names if name.strip()]


def _untrusted(name: str, value: str, package: str, how: str) -> SettingError:
    why = "is what the run folder says, and would import a module from outside the project"
    return SettingError(name, value, why, f"if you trust {package}, add {how}{package}")


def _is_of_project(package: str, folder: Path, *beside: Path) -> bool:
    """Whether a package is below the working folder or ``beside``, and no part of the run."""
    try:
        spec = importlib.util.find_spec(package)  # of a first part of a name, it imports nothing
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False  # it is found nowhere; where it will be is not known
    found = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    files = [Path(place) for place in found if place is not None]
    return bool(files) and all(
        any(_is_below(file, root) for root in (Path.cwd(), *beside))
        and not _is_brought(file, folder)
        for file in files
    )


def _is_below(file: Path, root: Path) -> bool:
    file, root = file.resolve(), root.resolve()
    return file.is_relative_to(root) and not _INSTALLED.intersection(file.relative_to(root).parts)


def _is_brought(file: Path, folder: Path) -> bool:
    """Whether a file is in the run folder, or elsewhere below the folder of all runs."""
    here, run = Path.cwd().resolve(), folder.resolve()
    above = [run, *run.parents[:3]]  # <runs>/<recipe>/<env>/<run>
    outside = (root for root in above if not here.is_relative_to(root))
    return any(file.resolve().is_relative_to(root) for root in outside)


def _environments() -> Iterator[str]:
    """Packages whose environments are registered, or will be when Gymnasium looks for them."""
    plugins = (plugin.value for plugin in entry_points(group="gymnasium.envs"))
    for place in (*plugins, *(spec.entry_point for spec in gym.registry.values()), "ale_py"):
        if isinstance(place, str):
            yield place.partition(":")[0].partition(".")[0]
