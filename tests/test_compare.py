"""Runs are compared over their seeds, in numbers and in a picture, and nothing is hidden."""

from __future__ import annotations

import csv
import shutil
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.image import imread

import recipes.a2c
import recipes.ppo
from kit.__main__ import main as kit
from kit.cli.compare import table
from kit.cli.compare_plot import draw, shared
from kit.cli.launch import main
from kit.dialects import Tianshou
from kit.experiment import EnvConfig, OnPolicySteps
from kit.logging.csv_file import read_rows
from kit.runs.comparison import COLUMN, Comparison, Group, SeedCurve, compare
from kit.runs.saved_runs import runs_of, training_settings
from kit.steps import SettingError
from tests.short_runs import COMMON, SHORT, tiny_config

LOW, HIGH = 0.001, 0.01


def made(tmp_path: Path, *, stops_at: int | None = None, **changes: Any) -> Path:
    """Run PPO for 64 policy steps, evaluated after every 16, and return its folder."""
    evaluated = OnPolicySteps(
        total_policy_steps=64, steps_per_env=8, update_epochs=1, minibatch_size=8,
        evaluation_every=16, evaluation_episodes=2,
    )  # fmt: skip
    trainer = recipes.ppo.build(tiny_config(tmp_path, **{"steps": evaluated, **changes}))
    trainer.register_op(
        "log_row", lambda row: row["policy_steps"] == stops_at and trainer.request_stop()
    )
    trainer.run()
    return trainer.folder


def written(run: Path, column: str = COLUMN, file: str = "metrics.csv") -> list[float]:
    """The values of a column, as they are in the file."""
    with (run / file).open() as opened:
        return [float(row[column]) for row in csv.DictReader(opened) if row[column]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[tuple[float, int], Path]:
    """Runs of two learning rates with four seeds each, by learning rate and seed."""
    place = tmp_path_factory.mktemp("compared")
    return {
        (rate, seed): made(place, learning_rate=rate, seed=seed)
        for rate in (LOW, HIGH)
        for seed in range(4)
    }


@pytest.fixture
def place(runs, tmp_path) -> Path:
    """A copy of the folder of all these runs."""
    return shutil.copytree(runs[LOW, 0].parents[2], tmp_path / "runs")


# ---------------------------------------------------------------------- groups
def test_compare_groups_runs_that_differ_only_in_seed(runs):
    compared = compare([runs[LOW, 0].parents[1]])
    low, high = compared.groups
    assert (low.name, high.name) == ("learning_rate=0.001", "learning_rate=0.01")
    assert [[run.seed for run in group.runs] for group in (low, high)] == [[0, 1, 2, 3]] * 2
    assert (compared.title, compared.axis, compared.remarks) == (
        "ppo on CartPole-v1", "policy_steps", [],
    )  # fmt: skip


def test_compare_computes_statistics_from_run_files(runs):
    low, _ = compare([*runs.values()]).groups
    folders = [runs[LOW, seed] for seed in range(4)]
    values = [written(folder) for folder in folders]
    last = sorted(found[-1] for found in values)
    assert [run.steps for run in low.runs] == [[16, 32, 48, 64]] * 4
    assert [run.values for run in low.runs] == values
    assert low.mean == statistics.fmean(last)
    assert low.std == statistics.pstdev(last)
    assert low.greatest == statistics.fmean(map(max, values))
    assert low.interquartile_mean == (last[1] + last[2]) / 2
    assert [run.policy_steps for run in low.runs] == [64] * 4
    assert [run.gradient_steps for run in low.runs] == [8] * 4
    seconds = [written(folder, "time/seconds", "times.csv")[-1] for folder in folders]
    assert [run.seconds for run in low.runs] == seconds
    assert asdict(low)["runs"][0]["folder"] == str(folders[0])  # plain data


def test_compare_omits_statistics_for_too_few_seeds(runs):
    three = compare([runs[LOW, seed] for seed in range(3)]).groups[0]
    assert (three.interquartile_mean, three.std is None) == (None, False)
    one = compare([runs[LOW, 0]]).groups[0]
    assert (one.mean, one.std) == (written(runs[LOW, 0])[-1], None)


@pytest.mark.parametrize(("text", "middle"), [("nan", "nan"), ("inf", "")])
def test_compare_shows_non_finite_values(text, middle, place):
    runs = [Path(run.folder) for run in compare([place]).groups[0].runs]
    metrics = runs[0] / "metrics.csv"
    rows = list(csv.reader(metrics.open()))
    rows[-1][rows[0].index(COLUMN)] = text
    metrics.write_text("\n".join(map(",".join, rows)) + "\n")
    (group,) = compare(runs).groups
    found = [str(group.mean), str(group.std), str(group.greatest), str(group.interquartile_mean)]
    ends = sorted(run.values[-1] for run in group.runs)
    assert found == [text, "nan", text, middle or str((ends[1] + ends[2]) / 2)]
    assert f"{text} ± nan" in table(compare(runs))


def test_compare_separates_runs_with_init_from(runs, tmp_path):
    other = made(tmp_path, learning_rate=LOW, seed=4, init_from=str(runs[LOW, 0]))
    names = [group.name for group in compare([runs[LOW, 0], other]).groups]
    assert names == ["init_from=null", f"init_from={runs[LOW, 0]}"]


def test_compare_shows_setting_missing_from_older_run(runs, tmp_path):
    older = shutil.copytree(runs[LOW, 1], tmp_path / "older")
    config = yaml.safe_load((older / "config.yaml").read_text())
    del config["clip_value"]
    (older / "config.yaml").write_text(yaml.safe_dump(config))
    names = [group.name for group in compare([runs[LOW, 0], older]).groups]
    assert names == ["clip_value=null", "clip_value=(not set)"]


def test_training_settings_exclude_seed_of_other_library():
    plain = {"seed": 1, "gamma": 0.9, "steps": {"dialect": Tianshou.NAME, "train_seed": 1}}
    assert set(training_settings(plain)) == {"gamma", "steps.dialect"}


def test_compare_names_recipes_without_their_settings(runs, tmp_path):
    steps = OnPolicySteps(
        total_policy_steps=16, steps_per_env=8, minibatch_size=16, evaluation_every=16
    )
    config = recipes.a2c.Config(
        env=EnvConfig(num_envs=2), steps=steps, log_dir=str(tmp_path), progress=False, gamma=0.5
    )
    trainer = recipes.a2c.build(config)
    trainer.run()
    compared = compare([runs[LOW, 0], runs[HIGH, 0], trainer.folder])
    assert [group.name for group in compared.groups] == [
        "recipe=ppo, learning_rate=0.001", "recipe=ppo, learning_rate=0.01", "recipe=a2c",
    ]  # fmt: skip
    assert compared.title == "CartPole-v1"


def test_compare_remarks_on_different_tasks(runs, tmp_path):
    env = EnvConfig(num_envs=2, kwargs={"sutton_barto_reward": True})
    compared = compare([runs[LOW, 0], made(tmp_path, learning_rate=LOW, env=env)])
    assert [group.name for group in compared.groups] == [
        "env.kwargs.sutton_barto_reward=(not set)", "env.kwargs.sutton_barto_reward=true",
    ]  # fmt: skip
    assert compared.remarks == [
        "The groups have different tasks, so their values are not comparable."
    ]


# ---------------------------------------------------------------------- what is not hidden
def test_compare_remarks_on_seeds_of_different_length(runs, tmp_path):
    shorter = made(tmp_path, learning_rate=LOW, seed=7, stops_at=32)
    compared = compare([runs[LOW, 0], runs[LOW, 1], shorter])
    assert compared.remarks == [
        "Last values are at different policy steps: 32 (seed 7); 64 (seeds 0, 1)."
    ]
    (line,) = [line for line in table(compared).splitlines() if line.startswith("all runs")]
    assert "3 (0, 1, 7)" in line
    assert "32 to 64" in line


def test_compare_uses_longer_of_two_runs_with_same_seed(runs, tmp_path):
    shorter = made(tmp_path, learning_rate=LOW, stops_at=32)
    for given in ([shorter, runs[LOW, 0]], [runs[LOW, 0], shorter]):
        compared = compare(given)
        assert [run.folder for run in compared.groups[0].runs] == [str(runs[LOW, 0])]
        said = f"{shorter} is omitted: {runs[LOW, 0]} has the same seed."
        assert compared.remarks == [said]


def test_compare_omits_and_names_run_without_values(runs, tmp_path):
    begun = shutil.copytree(runs[LOW, 1], tmp_path / "begun")
    (begun / "metrics.csv").unlink()
    compared = compare([runs[LOW, 0], begun])
    assert compared.remarks == [f"{begun} has no {COLUMN} and is omitted."]
    assert len(compared.groups[0].runs) == 1


def test_compare_uses_gradient_steps_as_axis_for_offline_run(place):
    run = runs_of(place)[0]
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    with (run / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(row | {"policy_steps": 0} for row in rows)
    (run / "times.csv").unlink()
    compared = compare([run])
    assert compared.axis == "gradient_steps"
    assert compared.groups[0].runs[0].steps == [2, 4, 6, 8]


def test_initial_evaluation_row_does_not_make_run_offline(runs, tmp_path):
    evaluated = Tianshou(
        num_epochs=1, step_per_epoch=64, step_per_collect=16, num_train_envs=2, batch_size=8
    )
    begun = made(tmp_path, steps=evaluated, stops_at=0)
    assert [row["policy_steps"] for row in read_rows(begun)] == [0]
    assert compare([runs[LOW, 0], begun]).axis == "policy_steps"


# ---------------------------------------------------------------------- the command
def test_table_has_line_per_group_and_legend(place, monkeypatch, capsys):
    monkeypatch.chdir(place.parent)
    assert kit(["compare", "runs"]) == 0
    title, _, header, _, low, high, _, *legend = capsys.readouterr().out.splitlines()
    assert title == "ppo on CartPole-v1"
    names = ["group", "seeds", "policy steps", "last", "max", "IQM", "gradient steps"]
    assert [header.index(name) for name in names] == sorted(header.index(name) for name in names)
    assert low.startswith("learning_rate=0.001  4 (0-3)")
    assert high.startswith("learning_rate=0.01 ")
    group = compare(["runs"]).groups[0]
    assert f"{group.mean:.2f} ± {group.std:.2f}" in low
    assert [line.split()[0] for line in legend] == ["last", "max", "IQM", "seconds"]
    assert COLUMN in legend[0]


def test_compare_accepts_any_column(place, capsys):
    assert kit(["compare", str(place), "--column", "episode/length"]) == 0
    assert "last value of episode/length" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("runss", "run='runss': The folder contains no runs. Try: runs"),
        ("runs/ppo/CartPole-v2", "The folder contains no runs. Try: runs/ppo/CartPole-v1."),
        ("empty", "run='empty': The folder contains no runs. Try: runs/ppo/CartPole-v1/"),
        ("runs --column evaluation/retrun",
         "column='evaluation/retrun': These runs have no such column. Try: evaluation/return"),
        ("runs --plot broken/config.yaml/c.png", "File exists: 'broken/config.yaml'"),
        ("broken", "run='broken': The folder has no readable config.yaml: expected"),
    ],
)  # fmt: skip
def test_compare_reports_invalid_arguments_in_one_line(words, message, place, monkeypatch, capsys):
    monkeypatch.chdir(place.parent)
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken", "config.yaml").write_text("a: [")
    assert kit(["compare", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kit: ")
    assert message in error
    assert error.count("\n") == 1


def test_compare_rejects_runs_without_rows(place):
    run = runs_of(place)[0]
    (run / "metrics.csv").unlink()
    with pytest.raises(SettingError, match="These runs have no such column"):
        compare([run])


# ---------------------------------------------------------------------- where runs are
def test_compare_reads_runs_of_sweep_folder_after_move(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = [*SHORT["ppo"], *COMMON, "log_every=16"]
    for rates in ("0.1,0.2", "0.3,0.4"):
        main(recipes.ppo.Config, recipes.ppo.build, [*short, "-m", f"learning_rate={rates}"])
    first, _ = sorted(Path("runs/ppo/sweeps").iterdir())
    names = ["learning_rate=0.1", "learning_rate=0.2"]
    assert [group.name for group in compare([first], "episode/return").groups] == names
    Path("runs").rename("moved")
    moved = "moved" / first.relative_to("runs")
    assert [group.name for group in compare([moved], "episode/return").groups] == names
    for above in ("moved", moved.parent):
        assert len(compare([above], "episode/return").groups) == 4
    shutil.rmtree(runs_of(moved)[0])
    with pytest.raises(FileNotFoundError):
        compare([moved], "episode/return")


def test_runs_of_ignores_foreign_config_files(place):
    run = runs_of(place)[0]
    for below in (run / "wandb" / "offline-run" / "files", place / "elsewhere"):
        below.mkdir(parents=True)
        (below / "config.yaml").write_text("lr: 1")
    (run / "wandb" / "offline-run" / "files" / "plan.txt").touch()
    assert len(runs_of(place)) == 8


# ---------------------------------------------------------------------- the picture
def curve(seed: int, points: dict[int, float]) -> SeedCurve:
    return SeedCurve(seed, "", [*points], [*points.values()], max(points), 0, None)


def drawn(tmp_path: Path, *seeds: dict[int, float]) -> Comparison:
    compared = compared_of([curve(n, points) for n, points in enumerate(seeds)])
    draw(compared, tmp_path / "compared.png")
    return compared


def compared_of(curves: list[SeedCurve]) -> Comparison:
    group = Group("gamma=0.9", curves, 0.0, 0.0, 0.0, None)
    return Comparison(COLUMN, "policy_steps", "ppo on CartPole-v1", [group])


def test_plot_shows_mean_with_min_max_band(tmp_path, axes):
    drawn(tmp_path, {10: 1.0, 20: 5.0}, {10: 3.0, 20: 6.0}, {10: 2.0, 20: 10.0})
    (shown,) = axes
    (mean,) = shown.get_lines()
    assert mean.get_xydata().tolist() == [[10, 2], [20, 7]]
    (band,) = shown.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert corners == {(10, 1), (10, 3), (20, 5), (20, 10)}
    legend = shown.get_legend()
    assert legend.get_title().get_text() == "mean over seeds, band: minimum to maximum"
    assert [text.get_text() for text in legend.get_texts()] == ["gamma=0.9 (3 seeds)"]
    labels = (shown.get_xlabel(), shown.get_ylabel(), shown.get_title())
    assert labels == ("policy steps", "evaluation return", "ppo on CartPole-v1")


def test_plot_draws_seeds_separately_when_some_have_no_data(tmp_path, axes):
    drawn(tmp_path, {10: 1.0, 20: 5.0, 30: 7.0}, {10: 3.0, 20: 5.0})
    mean, alone = axes[0].get_lines()
    assert mean.get_xydata().tolist() == [[10, 2], [20, 5]]
    assert alone.get_xydata().tolist() == [[20, 5], [30, 7]]
    told = axes[0].get_legend().get_title().get_text()
    assert " ".join(told.split()).endswith("where some have no data")
    assert "interpolated" not in told


def test_plot_interpolates_different_steps_and_notes_it(tmp_path, axes):
    drawn(tmp_path, {10: 1.0, 30: 5.0}, {10: 3.0, 20: 5.0, 30: 5.0})
    (mean,) = axes[0].get_lines()
    assert mean.get_xydata().tolist() == [[10, 2], [20, 4], [30, 5]]
    assert "interpolated between steps" in axes[0].get_legend().get_title().get_text()


def test_plot_draws_seeds_without_common_steps_separately(tmp_path, axes):
    drawn(tmp_path, {10: 1.0, 20: 5.0}, {30: 3.0, 40: 5.0})
    mean, *alone = axes[0].get_lines()
    assert len(mean.get_xydata()) == 0
    assert [line.get_xydata().tolist() for line in alone] == [
        [[10, 1], [20, 5]], [[30, 3], [40, 5]],
    ]  # fmt: skip
    steps, _, interpolated = shared([curve(0, {10: 1.0}), curve(1, {20: 1.0})])
    assert (len(steps), interpolated) == (0, False)


def test_compare_writes_complete_plot_image(place, tmp_path, capsys):
    path = tmp_path / "compared.png"
    assert kit(["compare", str(place), "--plot", str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"\nplot: {path}\n")
    picture = imread(path)
    assert picture.shape[1] == 1050
    for colour in ((0x1F, 0x6F, 0xEB), (0xE8, 0x59, 0x0C)):
        near = np.abs(picture[..., :3] - np.array(colour) / 255).max(-1) < 0.02
        assert near.sum() > 300  # the line of a group
