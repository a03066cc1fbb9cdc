"""DreamerV3 is sheeprl's: the same weights, minibatch and random numbers, the same gradients."""

from __future__ import annotations

import pytest

from tests.world.reference import CASES, Figures, differences, kit_step, make_step, stored_figures

LOSS, GRADIENT = 1e-6, 1e-4
"""Relative differences that single precision explains."""


def assert_close(found: Figures, wanted: Figures) -> None:
    losses, gradients = differences(found, wanted)
    assert {name: error for name, error in losses.items() if not error <= LOSS} == {}
    assert {name: error for name, error in gradients.items() if not error <= GRADIENT} == {}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_match_stored_sheeprl_values(case):
    step, wanted = make_step(case), stored_figures(case)
    found = kit_step(step)
    assert set(found.losses) == {part for names in wanted.losses for part in names.split("+")}
    assert all(gradient.any() for gradient in wanted.gradients.values())
    assert_close(found, wanted)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_match_installed_sheeprl(case):
    pytest.importorskip("sheeprl")
    from benchmarks.sheeprl_figures import sheeprl_step

    step = make_step(case)
    assert_close(kit_step(step), sheeprl_step(step))
