"""Counting needs no torch, and a command that explains it starts at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = [
    "kit.steps",
    "kit.dialects",
    "kit.dialects.sheeprl",
    "kit.dialects.tianshou",
    "kit.dialects.torchrl",
    "kit.dialects.explain",
    "kit.dialects.translation",
    "kit.cli.steps",
    "kit.testing",
    "kit.testing.observed",
]


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_no_heavy_library(module):
    heavy = "{'torch', 'torchrl', 'tensordict', 'numpy', 'matplotlib', 'yaml', 'gymnasium'}"
    code = f"import sys, {module}; print(*{heavy} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


def test_steps_and_dialects_import_no_other_kit_packages():
    code = (
        "import sys, kit.steps, kit.dialects.sheeprl\n"
        "ours = {m for m in sys.modules if m.startswith('kit.')}\n"
        "print(*{m for m in ours if not m.startswith(('kit.steps', 'kit.dialects', 'kit.lazy'))})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""
