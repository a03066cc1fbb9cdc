"""A recipe in a folder of the user's own has all that the kit's recipes have."""

from __future__ import annotations

import csv
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kit.evaluate import main as evaluate
from kit.runs.recipe import Recipe
from tests.short_runs import one_line

ROOT = Path(__file__).parents[1]
SHORT = [
    "env.num_envs=2", "steps.total_policy_steps=64", "steps.steps_per_env=8",
    "steps.evaluation_every=null", "steps.evaluation_episodes=1", "progress=false",
]  # fmt: skip


def documented(page: str = "recipes.md") -> str:
    """Return the recipe that a page shows whole."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (recipe,) = [block for block in blocks if "__main__" in block]
    return recipe


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """The recipe, in a folder beside the one in which commands are given."""
    file = tmp_path / "elsewhere" / "my_a2c.py"
    file.parent.mkdir()
    file.write_text(documented())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return file


@pytest.fixture
def command(file, monkeypatch):
    """Runs ``python my_a2c.py ...`` in this process."""

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [str(file), *arguments])
        runpy.run_path(str(file), run_name="__main__")

    return run


@pytest.fixture
def preset(file):
    """Writes a preset of the recipe."""

    def write(name: str, text: str) -> None:
        folder = file.parent / "presets" / "my_a2c"
        folder.mkdir(parents=True)
        (folder / f"{name}.yaml").write_text(text)

    return write


def runs() -> list[Path]:
    return sorted(path.parent for path in Path("runs").rglob("config.yaml"))


def settings_of(run: Path) -> dict:
    return yaml.safe_load((run / "config.yaml").read_text())


def last_row(run: Path) -> dict[str, str]:
    with (run / "metrics.csv").open() as rows:
        return list(csv.DictReader(rows))[-1]


def test_documented_recipe_has_at_most_60_lines():
    assert len(documented().splitlines()) <= 60


def test_custom_recipe_trains_and_saves_its_path(command, file):
    command(*SHORT, "learning_rate=0.01")
    (run,) = runs()
    assert run.parent == Path("runs/my_a2c/CartPole-v1")
    assert settings_of(run)["recipe"] == str(file)
    assert settings_of(run)["learning_rate"] == 0.01
    assert (last_row(run)["policy_steps"], last_row(run)["gradient_steps"]) == ("64", "4")


def test_guide_recipe_trains_on_discrete_and_continuous_actions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_spo.py").write_text(documented("guides/own-algorithm.md"))
    for number, env in enumerate(("CartPole-v1", "Pendulum-v1")):
        changes = [f"env.id={env}", "epsilon=0.1", "steps.minibatch_size=8"]
        monkeypatch.setattr(sys, "argv", ["my_spo.py", *SHORT, *changes])
        runpy.run_path("my_spo.py", run_name="__main__")
        run = runs()[number]
        assert settings_of(run)["epsilon"] == 0.1
        assert last_row(run)["gradient_steps"] == "80"
        assert float(last_row(run)["train/ratio_distance"]) > 0


def test_help_lists_settings_of_custom_recipe(command, file, capsys):
    command("--help")
    text = capsys.readouterr().out
    assert f"usage: python {file} [setting=value ...]\n" in text
    assert re.search(r"learning_rate=0.0007 +float > 0: Learning rate of RMSprop\.\n", text)
    assert "steps.total_policy_steps=" in text


def test_mapping_setting_accepts_keys_from_cli_preset_and_sweep(command, preset, file, capsys):
    text = file.read_text()
    rate = "    learning_rate: PositiveFloat = 7e-4\n"
    assert rate in text
    mapping = "    weights: dict[str, float] = field(default_factory=dict)\n"
    file.write_text(text.replace(rate, f"{mapping}{rate}"))
    command(*SHORT, "weights.goal=0.5")
    command(*SHORT, "weights={goal: 1.5}")
    preset("heavy", "weights: {speed: 2.0}\n")
    command(*SHORT, "preset=heavy", "--multirun", "weights.goal=3,4")
    assert sorted((settings_of(run)["weights"] for run in runs()), key=str) == [
        {"goal": 0.5},
        {"goal": 1.5},
        {"speed": 2.0, "goal": 3},
        {"speed": 2.0, "goal": 4},
    ]
    with pytest.raises(SystemExit):
        command(*SHORT, "weights.goal=far")
    assert one_line(capsys.readouterr().err).startswith("weights.goal='far' is not a number")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "heavy.yaml': The file has no mapping of names to settings."),
        ("env: [1", "heavy.yaml"),
        ("env: {grvity: 9}", "env.grvity=9 is not a setting of EnvConfig. Try: id"),
    ],
)
def test_invalid_preset_exits_with_one_line_error(text, message, command, preset, capsys):
    preset("heavy", text)
    with pytest.raises(SystemExit):
        command("preset=heavy")
    assert message in one_line(capsys.readouterr().err)


def test_custom_recipe_resumes_exactly(command, tmp_path):
    command(*SHORT, "checkpoint_every=16")
    (run,) = runs()
    whole = (run / "metrics.csv").read_bytes()
    for checkpoint in sorted((run / "checkpoints").iterdir())[1:]:
        checkpoint.rename(tmp_path / checkpoint.name)  # as if it had been killed before
    command("resume=latest")
    assert runs() == [run]
    assert (run / "metrics.csv").read_bytes() == whole


def test_evaluate_finds_custom_recipe_from_another_folder(command, capsys, tmp_path, monkeypatch):
    command(*SHORT, "env.normalize_observation=true")
    (run,) = [path.resolve() for path in runs()]
    monkeypatch.chdir(tmp_path)
    evaluate([str(run), "--episodes", "2"])
    text = capsys.readouterr().out
    assert "after 64 policy steps, deterministic actions" in text
    assert "over 2 episodes" in text


def in_a_shell(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-W", "ignore", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_script_freezes_imported_objects_in_gc(file):
    text = file.read_text() + "\n    import gc\n    print(gc.isenabled(), gc.get_freeze_count())\n"
    file.write_text(text)
    ran = in_a_shell(str(file), *SHORT)
    enabled, frozen = ran.stdout.split()[-2:]
    assert (ran.stderr, enabled) == ("", "True")
    assert int(frozen) > 100_000


def test_joblib_launcher_runs_all_points_and_reports_failures(file):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    launcher = ["--multirun", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1"]
    ran = in_a_shell(str(file), *SHORT, *launcher, "learning_rate=0.1,0.01", "device=cpu,gpu")
    assert ran.returncode == 1
    assert "error: device='gpu': PyTorch has no device with this name" in ran.stderr
    assert sorted(settings_of(run)["learning_rate"] for run in runs()) == [0.01, 0.1]
    assert [last_row(run)["policy_steps"] for run in runs()] == ["64", "64"]


# ---------------------------------------------------------------------- where a recipe is


def test_recipe_loads_file_by_path_once(file):
    recipe = Recipe(str(file))
    module = recipe.load()
    assert Recipe.of(module.Config) == recipe
    assert recipe.name == "my_a2c"
    assert recipe.load() is module


def test_evaluate_reports_missing_recipe_file_in_one_line(command, file, capsys):
    command(*SHORT)
    capsys.readouterr()
    file.unlink()
    with pytest.raises(SystemExit):
        evaluate(["latest", "--trust", str(file)])
    assert one_line(capsys.readouterr().err).startswith(f"recipe='{file}': Importing it failed")
