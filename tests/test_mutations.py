"""Every mutation of the list changes one place of the code that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mutations import MUTATIONS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}: {m.before.strip()[:40]}")
def test_a_mutation_has_one_place(mutation):
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.before) == 1
    assert mutation.after != mutation.before
