"""An environment with only the wheel can train, copy, compare and evaluate recipes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import kit

ROOT = Path(__file__).parents[1]
SHORT = [
    "steps.total_policy_steps=1_024", "steps.update_epochs=1", "steps.evaluation_every=null",
    "steps.evaluation_episodes=1", "progress=false",
]  # fmt: skip

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from what belongs to the project."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("kit", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(folder), str(source)], check=True, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """An environment with the wheel; the dependencies are those of this one, the kit is not."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    target = ["--target", str(packages), "--no-deps", "--no-index", str(wheel)]
    install = [sys.executable, "-m", "pip", "install", "-q", *target]
    subprocess.run(install, check=True, capture_output=True)
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder


def run(installed: Path, *words: str, cwd: Path) -> str:
    """Run Python of the environment with these arguments, as on a machine without a checkout."""
    command = [str(installed / "bin" / "python"), "-W", "ignore", *words]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd, env={})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_wheel_contains_kit_and_recipes(wheel):
    assert wheel.name.startswith(f"torchrl_kit-{kit.__version__}-")
    names = zipfile.ZipFile(wheel).namelist()
    information = f"torchrl_kit-{kit.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"kit", information}
    files = {path for path in (ROOT / "kit").rglob("*") if path.suffix in (".py", ".typed")}
    files |= {path for path in (ROOT / "recipes").rglob("*") if path.suffix in (".py", ".yaml")}
    expected = {str(path.relative_to(ROOT)) for path in files}
    packaged = {name.removeprefix("kit/builtin/") for name in names if name.startswith("kit/")}
    assert packaged == expected


def test_copied_recipe_trains_resumes_and_evaluates(installed, tmp_path):
    where = run(installed, "-c", "import kit; print(kit.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed))
    shutil.copy(ROOT / "recipes" / "ppo.py", tmp_path)
    run(installed, "ppo.py", *SHORT, "checkpoint_every=512", cwd=tmp_path)
    (rows,) = tmp_path.glob("runs/ppo/CartPole-v1/*/metrics.csv")
    before = rows.read_text()
    run(installed, "ppo.py", "resume=latest", cwd=tmp_path)
    assert rows.read_text() == before
    evaluate = ["-m", "kit.evaluate", str(rows.parent), "--episodes", "2"]
    assert "2 episodes" in run(installed, *evaluate, cwd=tmp_path)


def test_wheel_trains_copies_compares_and_evaluates(installed, tmp_path):
    def command(*words: str) -> str:
        return run(installed, "-m", "kit", *words, cwd=tmp_path)

    assert "\nppo " in command("recipes")
    assert "presets: classic" in command("train", "ppo", "--help")
    command("train", "ppo", *SHORT, "--multirun", "seed=0,1")
    runs = sorted(tmp_path.glob("runs/ppo/CartPole-v1/*"))
    assert len(runs) == 2
    assert "2 (0, 1)" in command("compare", "runs/ppo")
    assert "2 episodes" in command("evaluate", str(runs[0]), "--episodes", "2")
    command("train", "ppo", f"resume={runs[0]}")

    command("new", "sac", "my_sac.py")
    short = ["steps.total_policy_steps=300", "steps.learning_starts=200", *SHORT[2:]]
    run(installed, "my_sac.py", *short, cwd=tmp_path)
    assert "2 episodes" in command("evaluate", "latest", "--episodes", "2")

    command("new", "tqc", "my_tqc.py")  # which imports recipes.sac
    assert "usage: python my_tqc.py" in run(installed, "my_tqc.py", "--help", cwd=tmp_path)


def test_wheel_explains_steps(installed, tmp_path):
    words = ["-m", "kit", "steps", "explain", "sb3", "train_freq=1", "n_envs=4"]
    assert "1/4" in run(installed, *words, cwd=tmp_path)


def test_wheel_imports_recipe_after_kit(installed, tmp_path):
    run(installed, "-c", "from kit import EnvConfig; from recipes.ppo import build", cwd=tmp_path)
