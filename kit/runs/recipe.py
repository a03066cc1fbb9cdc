"""Where a recipe is, so that a command, a worker process or a saved run finds it again."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from kit.steps import SettingError


@dataclass(frozen=True)
class Recipe:
    """A module with a dataclass ``Config`` and a function ``build``, in a package or a file."""

    source: str
    """Dotted name of a module in a package (``recipes.ppo``), or the path of a file."""

    @classmethod
    def of(cls, config_class: type) -> Recipe:
        """The recipe that defines these settings, also while it runs as ``__main__``."""
        module = sys.modules.get(config_class.__module__)
        spec = getattr(module, "__spec__", None)
        name = spec.name if spec is not None else config_class.__module__
        name = name.removesuffix(".__main__")
        file = getattr(module, "__file__", None)
        return cls(name if "." in name or file is None else str(Path(file).resolve()))

    @property
    def name(self) -> str:
        """Last part of the source: ``ppo``."""
        return self.file.stem if self.file else self.source.rpartition(".")[2]

    @property
    def file(self) -> Path | None:
        """The file, where the recipe is in no package."""
        return Path(self.source) if self.source.endswith(".py") else None

    @property
    def command(self) -> str:
        """What runs it in a shell."""
        return f"python {self.source}" if self.file else f"python -m {self.source}"

    def load(self) -> ModuleType:
        """Import the recipe.

        Raises:
            SettingError: if it cannot be imported.
        """
        try:
            file, name = self.file, self.source
            return self._import_file(file) if file else importlib.import_module(name)
        except (ImportError, OSError) as error:
            raise SettingError("recipe", self.source, f"cannot be imported: {error}") from None

    def _import_file(self, file: Path) -> ModuleType:
        name = f"recipe_{self.name}"
        present = sys.modules.get(name)
        if present is not None and present.__file__ == str(file):
            return present
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where dataclasses look up the types of their fields
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))  # for modules beside it
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
