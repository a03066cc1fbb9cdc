"""The command line: overrides, sweeps, presets, vocabularies, resumes, help."""

from __future__ import annotations

import csv
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

import kit
import recipes.a2c
import recipes.ppo
import recipes.sac
from kit.cli.launch import main
from kit.dialects import DIALECTS, Pyrado
from kit.dialects.carried import map_fields
from kit.runs.saved_runs import find_run
from tests.short_runs import one_line

SHORT = [
    "env.num_envs=2", "steps.total_policy_steps=32", "steps.steps_per_env=8", "hidden_sizes=[8]",
    "steps.minibatch_size=8", "steps.update_epochs=1", "steps.evaluation_every=null",
    "steps.evaluation_episodes=1", "progress=false",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def ppo(*arguments: str) -> None:
    main(recipes.ppo.Config, recipes.ppo.build, arguments)


def runs() -> list[Path]:
    return sorted(path.parent for path in Path("runs").rglob("config.yaml"))


def settings_of(run: Path) -> dict:
    return yaml.safe_load((run / "config.yaml").read_text())


def test_run_folder_contains_every_file():
    ppo(*SHORT, "seed=3")
    (run,) = runs()
    assert run.parent == Path("runs/ppo/CartPole-v1")
    assert run.name.endswith("-s3")
    files = {path.name for path in run.iterdir()}
    assert files == {
        ".lock", "config.yaml", "plan.txt", "metrics.csv", "times.csv", "curve.png", "checkpoints",
    }  # fmt: skip
    assert {path.name for path in Path().iterdir()} == {"runs"}  # and nothing of Hydra's


@pytest.mark.parametrize("form", ["{place}.{name}={value}", "{place}={{{name}: {value}}}"])
def test_overrides_set_dict_settings_by_key_or_as_mapping(form):
    inner = form.format(place="env.kwargs", name="sutton_barto_reward", value="true")
    outer = form.format(place="collector_kwargs", name="fast_policy", value="exact")
    ppo(*SHORT, inner, outer)
    saved = settings_of(runs()[0])
    assert saved["env"]["kwargs"] == {"sutton_barto_reward": True}
    assert saved["collector_kwargs"] == {"fast_policy": "exact"}


def test_logger_override_accepts_comma_separated_names():
    ppo(*SHORT, "logger=csv,tensorboard")
    (run,) = runs()
    assert (run / "metrics.csv").is_file()
    assert list(run.rglob("events.out.tfevents.*"))


def test_sweep_runs_every_point_and_prints_comparison(capsys):
    ppo(*SHORT, "progress=true", "--multirun", "seed=0,1", "learning_rate=0.1,0.01")
    made = [(s["seed"], s["learning_rate"]) for s in map(settings_of, runs())]
    assert sorted(made) == [(0, 0.01), (0, 0.1), (1, 0.01), (1, 0.1)]
    shown = capsys.readouterr().out
    assert "seed 1, " in shown  # in the title of a run
    assert "learning_rate=0.01" in shown
    (table,) = Path("runs").glob("ppo/sweeps/*/sweep.csv")
    assert [path.name for path in table.parent.iterdir() if path.suffix == ".json"] == []
    rows = list(csv.DictReader(table.open()))
    assert [(row["seed"], row["learning_rate"]) for row in rows] == [
        ("0", "0.1"), ("0", "0.01"), ("1", "0.1"), ("1", "0.01"),
    ]  # fmt: skip
    assert all(Path(row["folder"], "metrics.csv").exists() for row in rows)
    last = shown.split("run  seed  learning_rate")[1]
    assert f"kit compare {table.parent}\n" in last
    assert all(row["folder"] in last for row in rows)
    assert "total_policy_steps" not in last  # the same in all


def test_sweep_resolves_latest_run_before_it_starts():
    place = "it's here"
    given = f'log_dir="{place}"'
    ppo(*SHORT, given)
    before = find_run("latest", Path(place), "ppo")
    ppo(given, "-m", *SHORT, "seed=1,2", "init_from=latest")
    after = set(Path(place).glob("ppo/*/*-s[12]"))
    assert [settings_of(run)["init_from"] for run in after] == [str(before)] * 2


def test_sweep_writes_hydra_files_under_log_dir(tmp_path):
    ppo(*SHORT, 'log_dir="here"', "--multirun", "seed=0,1")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert len(list(tmp_path.glob("here/ppo/sweeps/*/multirun.yaml"))) == 1


@pytest.mark.parametrize(
    ("swept", "error"),
    [
        ("learning_rate=1e-3,-1",
         "learning_rate=-1.0: The value must be above 0. "
         "This is run 1 of the sweep (learning_rate=-1); no run was started."),
        ("steps.steps_per_env=8,12 seed=0,1 steps.rounding=error",
         "steps.total_policy_steps=32 is not a multiple of the 24 policy steps per iteration. "
         "Try: 24 or 48, or steps.rounding=up or down. "
         "This is run 2 of the sweep (steps.steps_per_env=12, seed=0); no run was started."),
        ("seed=0,1 hydra/launcher=joblib gamma=2",
         "gamma=2.0: The value must be at least 0 and at most 1. "
         "This is run 0 of the sweep (seed=0); no run was started."),
    ],
)  # fmt: skip
def test_sweep_starts_no_run_when_any_point_is_invalid(swept, error, capsys):
    with pytest.raises(SystemExit):
        ppo(*SHORT, "--multirun", *swept.split())
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"\nerror: {error}\n")
    assert [*Path().iterdir()] == []


def test_sweep_rejects_shared_wandb_run_id(capsys, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    with pytest.raises(SystemExit):
        ppo(*SHORT, "--multirun", "seed=0,1", "logger=wandb")
    error = "WANDB_RUN_ID='chosen': All runs in this sweep would log to the same W&B run. Unset "
    assert capsys.readouterr().err.startswith(f"\nerror: {error}")


def test_main_rejects_several_processes_of_srun(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setattr(sys, "argv", ["ppo", *SHORT])
    with pytest.raises(SystemExit):
        main(recipes.ppo.Config, recipes.ppo.build)
    error = "SLURM_STEP_NUM_TASKS='2': Several processes of srun would each make the whole run."
    assert capsys.readouterr().err.startswith(f"\nerror: {error}")
    assert runs() == []
    ppo(*SHORT)  # arguments of the caller, who knows which process it is
    assert len(runs()) == 1


def test_basic_sweeper_checks_settings_per_run(capsys):
    with pytest.raises(SystemExit):
        ppo(*SHORT, "--multirun", "seed=0,-1", "hydra/sweeper=basic")
    assert capsys.readouterr().err == "\nerror: seed=-1: The value must be at least 0.\n"
    assert [settings_of(run)["seed"] for run in runs()] == [0]


def test_sweep_continues_after_failed_run(capsys):
    with pytest.raises(SystemExit):
        ppo(*SHORT, "--multirun", "env.id=Nowhere-v0,CartPole-v1")
    out, err = capsys.readouterr()
    assert err.startswith("\nerror: env.id='Nowhere-v0': ")
    assert "sweep.csv" in out
    assert [settings_of(run)["env"]["id"] for run in runs()] == ["CartPole-v1"]
    (table,) = Path("runs").glob("ppo/sweeps/*/sweep.csv")
    failed, whole = csv.DictReader(table.open())
    assert (failed["env.id"], failed["folder"], whole["error"]) == ("Nowhere-v0", "", "")
    assert failed["error"].startswith("env.id='Nowhere-v0'")
    assert "Nowhere-v0': Gymnasium" in out


@pytest.mark.parametrize(
    ("swept", "why"),
    [
        ("learning_rate=interval(0.1,0.2)", "does not support sweep type : INTERVAL_SWEEP"),
        ("learning_rate=${nowhere}", "Interpolation key 'nowhere' not found"),
    ],
)
def test_sweep_prints_hydra_error_in_one_line(swept, why, capsys):
    with pytest.raises(SystemExit):
        ppo(*SHORT, "--multirun", "seed=0,1", swept)
    assert why in one_line(capsys.readouterr().err)
    assert runs() == []


def test_sweep_table_shows_values_as_typed(capsys):
    module = "kit.testing.envs:kit/Recall-v0"
    ppo(*SHORT, "--multirun", f"env.id={module}", "env.kwargs.delay=1,2")
    (table,) = Path("runs").glob("ppo/sweeps/*/sweep.csv")
    rows = list(csv.DictReader(table.open()))
    assert [(row["env.id"], row["env.kwargs.delay"]) for row in rows] == [
        (module, "1"),
        (module, "2"),
    ]


def presets() -> list[tuple[str, str]]:
    folder = Path(recipes.ppo.__file__).parent / "presets"
    return sorted((path.parent.name, path.stem) for path in folder.glob("*/*.yaml"))


def settings_from(module: ModuleType, *arguments: str) -> Any:
    """The settings that a command builds a recipe of, which then runs nothing."""
    seen = []

    class Stub:
        def run(self):
            pass

    def build(config):
        seen.append(config)
        return Stub()

    main(module.Config, build, arguments)
    (config,) = seen
    return config


@pytest.mark.parametrize(("recipe", "name"), presets())
def test_preset_sets_its_values_and_overrides_take_precedence(recipe, name):
    module = importlib.import_module(f"recipes.{recipe}")
    config = settings_from(module, f"preset={name}", "seed=7")
    folder = Path(module.__file__).parent / "presets" / recipe
    wanted = OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"))
    assert config.seed == 7
    given = {k: v for k, v in wanted.items() if k not in ("env", "steps", "seed")}
    assert {k: getattr(config, k) for k in given} == given
    assert {k: getattr(config.env, k) for k in wanted["env"]} == wanted["env"]
    assert {k: getattr(config.steps, k) for k in wanted["steps"]} == wanted["steps"]


def test_pyrado_preset_matches_pyrado_dialect():
    config = settings_from(recipes.a2c, "preset=pyrado")
    assert map_fields(Pyrado(algo="a2c"), config, "a2c") == ({}, [])  # no default that does not act
    assert config.optimizer == "rmsprop"


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_describes_recipe_and_runs_nothing(word, capsys):
    ppo("seed=3", word)
    text = capsys.readouterr().out
    assert text.startswith("Proximal policy optimisation")
    assert "\nusage: kit train ppo [setting=value ...]\n" in text
    assert "presets: classic, mujoco, ppo2" in text
    assert all(name in text for name in DIALECTS)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["--learning_rate", "1e-3"], "Use learning_rate=1e-3."),
        (["--learning-rate=1e-3"], "Use learning_rate=1e-3."),
        (["learning_rate", "1e-3"], "Use learning_rate=1e-3."),
        (["lr=1e-3"], "Try: learning_rate=1e-3."),
        (["ent_coef=0.01"], "Try: entropy_coeff=0.01."),
        (["--env.normalize-reward"], "Use env.normalize_reward=true."),
        (["--preset", "mujoco"], "Use preset=mujoco."),
        (["--learning_rate"], "Use learning_rate=VALUE."),
        (["--versoin"], "Try: --version."),
        (["qqqq=1"], "List all settings with --help=all."),
    ],
)
def test_misspelled_argument_error_suggests_correction(words, advice, capsys):
    with pytest.raises(SystemExit):
        ppo(*words)
    assert one_line(capsys.readouterr().err).endswith(advice)


def test_version_names_recipe_and_kit(capsys):
    ppo("--version")
    assert capsys.readouterr().out == f"ppo (kit {kit.__version__})\n"


def test_run_ends_with_commands_for_its_folder(capsys):
    ppo(*SHORT, "progress=true")
    (run,) = runs()
    text = capsys.readouterr().out
    assert f"kit evaluate {run}\n" in text
    assert f"kit compare {run.parent}\n" in text
    assert "resume=" not in text
    ppo(*SHORT, "progress=true", "seed=1", "time_limit=1e-9")
    (stopped,) = (folder for folder in runs() if folder.name.endswith("-s1"))
    assert f"kit train ppo resume={stopped}\n" in capsys.readouterr().out


def test_help_shows_settings_of_chosen_dialect(capsys):
    ppo("--help", "steps=sb3")
    assert "steps.n_steps=" in capsys.readouterr().out


def test_resume_finds_quoted_folders():
    ppo(*SHORT, "log_dir='a,b'")
    (run,) = [path.parent for path in Path("a,b").rglob("config.yaml")]
    before = (run / "metrics.csv").read_bytes()
    ppo("resume='latest'", "log_dir='a,b'")
    ppo(f"resume='{run}'", "log_dir='a,b'")
    assert (run / "metrics.csv").read_bytes() == before
    assert [path.name for path in Path().iterdir()] == ["a,b"]


def test_ctrl_c_during_build_exits_with_one_line(capsys, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        main(recipes.ppo.Config, interrupted, SHORT)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "\nstopped\n"


@pytest.mark.parametrize(
    ("words", "module", "code", "said"),
    [
        ("recipes.ppo", "torch", -signal.SIGINT, ""),
        ("recipes.ppo", "omegaconf", 130, "\nstopped\n"),
        ("kit evaluate latest", "torch", 130, "\nstopped\n"),
    ],
)
def test_ctrl_c_during_import_prints_no_traceback(words, module, code, said, tmp_path):
    interrupted = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    (tmp_path / f"{module}.py").write_text(interrupted)
    command = [sys.executable, "-W", "ignore", "-m", *words.split()]
    places = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": places},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs may ignore it
    ) as ran:
        assert ran.communicate() == (None, said)
    assert ran.returncode == code


def test_main_propagates_error_raised_in_build():
    def broken(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        main(recipes.ppo.Config, broken, SHORT)


def test_command_enables_gc_after_imports():
    code = """if True:
        import gc, sys
        sys.argv, sys.orig_argv = ["-m", "--help"], ["python", "-m", "recipes.ppo", "--help"]
        import recipes.ppo
        assert not gc.isenabled()
        from kit.experiment import main
        main(recipes.ppo.Config, recipes.ppo.build)
        assert gc.isenabled()
        for sys.argv, sys.orig_argv in [
            (["script.py"], ["python", "script.py"]),
            (["-m"], ["python", "-m", "mine.train"]),  # whose package imports a recipe
        ]:
            del sys.modules["recipes"]
            import recipes
            assert gc.isenabled()
    """
    ran = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(("full", "trace"), [("0", False), ("1", True)])
def test_library_error_prints_traceback_only_on_request(full, trace):
    program = "import recipes.ppo as r; from kit.cli.launch import main"
    program += "; main(r.Config, lambda cfg: int('many'), [])"
    environment = {**os.environ, "HYDRA_FULL_ERROR": full}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1
    assert ("Traceback" in ran.stderr) == trace
    assert "ValueError: invalid literal for int()" in ran.stderr
    assert trace or one_line(ran.stderr)
