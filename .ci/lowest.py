"""Print the lowest supported version of each dependency, as constraints for pip."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
for requirement in project["dependencies"]:
    found = re.match(r"([\w-]+)>=([\d.]+)", requirement)
    assert found is not None, f"{requirement} has no lower bound"
    print(f"{found[1]}=={found[2]}")
