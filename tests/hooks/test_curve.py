"""The learning curve shows the returns of the rows."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.image import imread

from kit.hooks import draw_curve

ROWS = """policy_steps,episode/return,evaluation/return,evaluation/return_std
100,10,,
200,,20.5,2
1500,30,,
2000,40,50,0
"""


def test_curve_plots_training_and_evaluation_over_policy_steps(tmp_path, axes):
    (tmp_path / "metrics.csv").write_text(ROWS)
    draw_curve(tmp_path / "metrics.csv", tmp_path / "curve.png", "ppo on CartPole-v1")
    (drawn,) = axes
    training, evaluation = drawn.get_lines()
    assert training.get_xydata().tolist() == [[100, 10], [1500, 30], [2000, 40]]
    assert evaluation.get_xydata().tolist() == [[200, 20.5], [2000, 50]]
    (band,) = drawn.collections
    corners = band.get_paths()[0].vertices
    assert {tuple(corner) for corner in corners.tolist()} >= {(200, 18.5), (200, 22.5), (2000, 50)}
    assert drawn.get_xlabel() == "policy steps"
    assert drawn.get_ylabel() == "return of an episode"
    assert drawn.get_title() == "ppo on CartPole-v1"
    labels = [text.get_text() for text in drawn.get_legend().get_texts()]
    assert labels == ["training episodes", "evaluation (± std)"]


def test_curve_omits_band_when_evaluation_has_no_std(tmp_path, axes):
    (tmp_path / "metrics.csv").write_text("policy_steps,evaluation/return\n100,10\n200,20\n")
    draw_curve(tmp_path / "metrics.csv", tmp_path / "curve.png")
    (drawn,) = axes
    (line,) = drawn.get_lines()
    assert line.get_label() == "evaluation"
    assert not drawn.collections


def test_curve_image_has_expected_size_and_content(tmp_path):
    (tmp_path / "metrics.csv").write_text(ROWS)
    draw_curve(tmp_path / "metrics.csv", tmp_path / "curve.png")
    picture = imread(tmp_path / "curve.png")
    assert picture.shape == (630, 1050, 4)
    blue = np.array([0x1F, 0x6F, 0xEB]) / 255
    near = np.abs(picture[..., :3] - blue).max(-1) < 0.02
    assert near.sum() > 500  # the line of the evaluations
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.png", "metrics.csv"]
    assert not plt.get_fignums()


@pytest.mark.parametrize("rows", ["policy_steps\n100\n", "policy_steps,episode/return\n"])
def test_curve_is_empty_without_episodes(tmp_path, rows):
    (tmp_path / "metrics.csv").write_text(rows)
    draw_curve(tmp_path / "metrics.csv", tmp_path / "curve.png")
    assert imread(tmp_path / "curve.png").shape == (630, 1050, 4)
