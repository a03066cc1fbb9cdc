"""Find, import and run recipes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from kit import RECIPES_ROOT
from kit.distributed import Ranks
from kit.logging.files import from_here
from kit.steps.errors import SettingError, close_to


def builtin_recipes() -> dict[str, Path]:
    """Return the files of the built-in recipes, keyed by recipe name."""
    files = (RECIPES_ROOT / "recipes").glob("[!_]*.py")
    return {file.stem: file for file in sorted(files)}


def builtin_file(name: str) -> Path:
    """Return the file of a built-in recipe.

    Raises:
        SettingError: if there is no such recipe.
    """
    files = builtin_recipes()
    if name not in files:
        advice = close_to(name, [*files]) or "List the recipes with: kit recipes"
        raise SettingError("recipe", name, "There is no such recipe", advice)
    return files[name]


@dataclass(frozen=True)
class Recipe:
    """A module with a dataclass ``Config`` and a function ``build``, in a package or a file."""

    source: str
    """Dotted name of a module in a package (``recipes.ppo``), or the path of a file."""

    @classmethod
    def of(cls, config_class: type) -> Recipe:
        """Return the recipe that defines ``config_class``, even if it runs as ``__main__``."""
        module = sys.modules.get(config_class.__module__)
        spec = getattr(module, "__spec__", None)
        name = spec.name if spec is not None else config_class.__module__
        name = name.removesuffix(".__main__")
        file = getattr(module, "__file__", None)
        return cls(name if "." in name or file is None else str(Path(file).resolve()))

    @classmethod
    def named(cls, name: str) -> Recipe:
        """Return the built-in recipe or Python file that a command-line argument names.

        Raises:
            SettingError: if there is no such recipe.
        """
        if name.endswith(".py") and Path(name).is_file():
            return cls(str(Path(name).resolve()))
        builtin_file(name)
        return cls(f"recipes.{name}")

    @property
    def name(self) -> str:
        """Last part of the source, such as ``ppo``."""
        return self.file.stem if self.file else self.source.rpartition(".")[2]

    @property
    def file(self) -> Path | None:
        """File of the recipe; ``None`` if the recipe is in a package."""
        return Path(self.source) if self.source.endswith(".py") else None

    @property
    def command(self) -> str:
        """Shell command that runs the recipe, in as many processes as this run."""
        if Ranks.current is not None and Ranks.current.size > 1:
            target = from_here(self.file) if self.file else f"-m {self.source}"
            return f"torchrun --nproc-per-node {Ranks.current.size} {target}"
        if self.file:
            return f"python {from_here(self.file)}"
        if self.source == f"recipes.{self.name}" and self.name in builtin_recipes():
            return f"kit train {self.name}"
        return f"python -m {self.source}"

    def load(self) -> ModuleType:
        """Import the recipe.

        Raises:
            SettingError: if it cannot be imported.
        """
        try:
            file, name = self.file, self.source
            return self._import_file(file) if file else importlib.import_module(name)
        except (ImportError, OSError) as error:
            raise SettingError("recipe", self.source, f"Importing it failed: {error}") from None

    def _import_file(self, file: Path) -> ModuleType:
        name = f"recipe_{self.name}"
        present = sys.modules.get(name)
        if present is not None and present.__file__ == str(file):
            return present
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look up field types in sys.modules
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))  # lets the recipe import modules from its folder
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
