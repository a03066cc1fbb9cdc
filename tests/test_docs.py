"""The code in the documentation runs as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text[: found.start(1)].count("\n")
            yield pytest.param(page, line, found[1], id=f"{page.stem}:{line + 1}")


@pytest.mark.parametrize(("page", "line", "code"), blocks())
def test_a_block_runs_as_it_stands(page, line, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType("documented")  # in `sys.modules`, where dataclasses look types up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile("\n" * line + code, str(page), "exec"), module.__dict__)


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_page_on_hooks_lists_every_stage_in_order():
    from kit.trainer.stages import SIGNATURES, STAGES

    text = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| (.+?) \| `(.+?)` \|(?: update)? \|$", text, re.MULTILINE)
    expected = [(s.name, s.when, SIGNATURES[s.signature][0]) for s in STAGES.values()]
    assert listed == expected
