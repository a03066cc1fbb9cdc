"""The code in the documentation runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def blocks():
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text[: found.start(1)].count("\n")
            yield pytest.param(page, line, found[1], id=f"{page.stem}:{line + 1}")


@pytest.mark.parametrize(("page", "line", "code"), blocks())
def test_a_block_runs_as_it_stands(page, line, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = compile("\n" * line + code, str(page), "exec")
    exec(program, {"__name__": "__docs__"})
