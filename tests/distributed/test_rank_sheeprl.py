"""Runs on several ranks count what sheeprl counted with as many processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dialects.recorded import expectation
from tests.dialects.test_observed import CASES
from tests.distributed.torchrun import Torchrun

SCRIPT = str(Path(__file__).with_name("sheeprl_on_ranks.py"))
RECORDED = [
    case
    for case in CASES
    if case["system"] == "sheeprl" and case["params"].get("world_size", 1) > 1
]


def started(case: dict[str, Any]) -> int:
    """Number of processes for a case: in sheeprl, all but one of a decoupled run only train."""
    return 1 if "decoupled" in case["algo"] else case["params"]["world_size"]


def counted(cases: list[dict[str, Any]], ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What each case counts in one start of torchrun; all ranks must agree."""
    (folder / "cases").write_text(json.dumps(cases))
    run = Torchrun([SCRIPT, str(folder / "cases"), str(folder / "seen")], folder / "log", ranks)
    assert run.ended() == 0, run.text()[-3_000:]
    first, *others = json.loads((folder / "seen").read_text())
    assert [first] * len(others) == others
    return first


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.nightly)])
def test_ranks_count_what_sheeprl_counted(ranks, tmp_path):
    cases = [case for case in RECORDED if started(case) == ranks]
    if ranks == 3:  # recorded with two processes, and predicted for three
        cases = [{**case, "params": {**case["params"], "world_size": 3}, "observed": {}}
                 for case in RECORDED if started(case) == 2]  # fmt: skip
    assert cases
    for case, figures in zip(cases, counted(cases, ranks, tmp_path)):
        wanted = {**expectation(case).figures, **case["observed"]}
        wanted = {name: wanted[name] for name in figures if name in wanted}
        assert len(wanted) >= 9
        assert {name: figures[name] for name in wanted} == wanted, case["id"]
