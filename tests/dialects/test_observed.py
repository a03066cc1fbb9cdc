"""Every dialect says what the real library was seen to count."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from kit.steps import SettingError
from kit.testing import check_observed

DATA = Path(__file__).parents[1] / "data"
FILES = [*sorted(DATA.glob("semantics/*.json")), *sorted(DATA.glob("observed/*.json"))]
CASES = [case for file in FILES for case in json.loads(file.read_text())]

PROSE = {"rule", "ratio_argument", "note_optimizers"}
"""Figures that explain themselves in words."""


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_the_dialect_agrees_with_the_library(case):
    seen = check_observed(copy.deepcopy(case))
    assert seen.differences == []
    assert seen.compared
    varying = {text.split(":")[0].split()[0] for text in case.get("nondeterministic", ())}
    assert set(seen.ignored) <= PROSE | varying
    assert bool(seen)


def test_a_figure_that_is_wrong_is_a_difference():
    case = copy.deepcopy(next(case for case in CASES if case["id"] == "sheeprl-002"))
    case["observed"]["gradient_steps_total_per_rank"] += 1
    seen = check_observed(case)
    assert len(seen.differences) == 1
    assert "gradient_steps_total_per_rank: observed 305, the dialect 304" in seen.differences[0]
    assert not seen


def test_a_figure_that_is_not_understood_is_listed():
    case = copy.deepcopy(CASES[0])
    case["observed"]["phase_of_the_moon"] = 3
    assert "phase_of_the_moon" in check_observed(case).ignored


def test_a_library_that_fails_must_be_refused_and_one_that_runs_must_not():
    fails = copy.deepcopy(next(case for case in CASES if "error" in case["observed"]))
    del fails["observed"]["error"]
    assert any("none was observed" in text for text in check_observed(fails).differences)
    runs = copy.deepcopy(CASES[0])
    runs["observed"]["error"] = "ValueError('no')"
    assert any("the library fails" in text for text in check_observed(runs).differences)


def test_a_long_list_may_have_been_cut():
    case = copy.deepcopy(next(case for case in CASES if case["id"] == "sheeprl-002"))
    steps = case["observed"]["gradient_steps_per_iteration_per_rank"]
    case["observed"]["gradient_steps_per_iteration_per_rank"] = steps[:30]
    assert check_observed(case).differences == []
    case["observed"]["gradient_steps_per_iteration_per_rank"] = steps[:3]
    assert check_observed(case).differences


@pytest.mark.parametrize("case", [{}, {"system": "keras", "params": {}, "observed": {}}])
def test_what_is_no_case_is_refused(case):
    with pytest.raises(SettingError):
        check_observed(case)


@pytest.mark.parametrize("case", CASES[::5], ids=[case["id"] for case in CASES[::5]])
def test_settings_that_say_nothing_are_refused_and_never_a_failure(case):
    for name in case["params"]:
        for value in (None, -1, 0, "x", {}):
            seen = check_observed({**case, "params": {**case["params"], name: value}})
            assert seen.compared or seen.differences or seen.ignored


@pytest.mark.parametrize("algo", ["world_peace", None, 3])
def test_an_algorithm_that_no_library_has_is_told(algo):
    case = next(case for case in CASES if case["system"] == "sheeprl")
    (told, *_) = check_observed({**case, "algo": algo}).differences
    assert "error: none was observed" in told
    assert "algo=" in told
