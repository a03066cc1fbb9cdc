"""The command ``kit``."""

from __future__ import annotations

import ast
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recipes
from kit import __version__
from kit.__main__ import COMMANDS, main

RECIPES = sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))
CONFIGS = Path(__file__).parent / "data" / "configs"


@pytest.fixture
def kit(capsys):
    def run(words, code=0):
        assert main(["steps", *words.split()]) == code
        out = capsys.readouterr()
        return out.out if code == 0 else out.err

    return run


def test_explain_shows_settings_counts_and_caveats(kit):
    text = kit("explain sheeprl replay_ratio=0.5 num_envs=4 total_steps=10000")
    assert text.startswith("sheeprl 0.8.4, sac (off-policy)")
    assert "num_envs=4" in text
    assert "4,952" in text
    assert "- The last iteration with random actions also trains." in text


def test_explain_reads_config_file_of_library(kit):
    text = kit(f"explain sheeprl {CONFIGS / 'sheeprl_dreamer.yaml'} algo.replay_ratio=0.5")
    assert "dreamer_v3" in text
    assert "replay_ratio=0.5" in text
    text = kit(f"explain sb3 {CONFIGS / 'sb3_zoo_ppo.yml'} env=CartPole-v1")
    assert "100,096" in text


def test_explain_prints_json(kit):
    data = json.loads(kit("explain tianshou algo=ppo num_train_envs=4 num_epochs=1 --json"))
    assert data["plan"]["steps_per_env"] == 512
    assert data["totals"]["policy_steps"] == 30_720
    assert data["iterations"][0]["gradient_steps"] == 32


def test_explain_accepts_kit_settings(kit):
    assert "10,000" in kit("explain kit total_policy_steps=10000 num_envs=4 replay_ratio=1/4")


def test_translate_prints_equivalent_settings(kit):
    text = kit("translate sb3 train_freq=1 gradient_steps=1 n_envs=4 --to sheeprl")
    assert "replay_ratio=0.25" in text
    assert "first training iteration: 26 wanted, 25 is nearest" in text
    data = json.loads(kit("translate sb3 n_envs=4 --to tianshou --json"))
    assert data["to"]["settings"]["num_train_envs"] == 4


@pytest.mark.parametrize(("name", "version"), [("cleanrl", "1.0"), ("dreamer-paper", "2020")])
def test_explain_accepts_version_that_looks_like_number(kit, name, version):
    given, usual = (kit(f"explain {name} {word} --json") for word in (f"version={version}", ""))
    assert json.loads(given)["title"] == json.loads(usual)["title"]


@pytest.mark.parametrize("name", ["nip", "pyrado"])
def test_explain_accepts_output_of_translate(kit, name):
    source = {
        "nip": "sb3 algo=ppo n_steps=8 n_envs=2 total_timesteps=64 batch_size=8",
        "pyrado": "pyrado algo=ppo min_steps=40 env_max_steps=10 max_iter=3",
    }
    made = json.loads(kit(f"translate {source[name]} --to {name} --json"))["to"]
    words = " ".join(f"{key}={value}" for key, value in made["settings"].items())
    kit(f"explain {name} algo={made['algo']} {words}")
    assert not {"critic", "backbone_lr_scale"} & set(made["settings"])


def test_translate_keeps_target_settings(kit):
    text = kit("translate dreamer-paper steps=50000 --to sheeprl version=0.5.7")
    assert "version=0.5.7" in text
    assert "StepPlan" in kit("translate sb3 n_envs=4 --to kit")
    assert json.loads(kit("translate sb3 n_envs=4 --to kit --json"))["to"]["plan"]["num_envs"] == 4


def test_translate_to_kit_always_includes_run_length(kit):
    text = kit("translate sb3 algo=ppo total_timesteps=100000 --to kit")
    assert "total_policy_steps=100352" in text


def test_translate_lists_settings_that_do_not_affect_counts(kit):
    given = "translate sb3 algo=ppo learning_rate=0.001 use_sde=true"
    text = kit(f"{given} --to cleanrl gamma=0.9")
    made, left_out = text.split("Not translated, because these settings do not affect step counts")
    assert "  gamma=0.9\n" in made
    assert left_out.startswith("\n- learning_rate=0.001\n- use_sde=True\n\n")
    data = json.loads(kit(f"{given} --to cleanrl --json"))
    assert data["not_translated"] == {"learning_rate": 0.001, "use_sde": True}


def test_unknown_setting_error_suggests_only_fields(capsys):
    assert main(["steps", "explain", "sb3", "foo=1"]) == 2
    assert not re.search("ALGORITHMS|DEFAULTS|NAME", capsys.readouterr().err)


def test_diff_shows_first_difference(kit):
    text = kit("diff sb3 n_envs=4 gradient_steps=1 sheeprl num_envs=4 replay_ratio=1")
    assert "First difference in iteration 25" in text
    data = json.loads(kit("diff sb3 n_envs=4 sb3 n_envs=2 --json"))
    assert {"setting": "num_envs", "first": "4", "second": "2"} in data["differences"]


def test_cli_accepts_settings_spelled_like_options(kit):
    assert "num_envs=2" in kit("explain cleanrl --num-envs=2 algo=ppo total_timesteps=1024")
    with pytest.raises(SystemExit):
        main(["steps", "explain", "cleanrl", "--num-envs"])


def test_diff_accepts_two_quoted_arguments(capsys):
    two = ["sb3 n_envs=2 gradient_steps=-1", "sb3 n_envs=2 gradient_steps=2"]
    assert main(["steps", "diff", *two]) == 0
    assert capsys.readouterr().out.startswith("Identical runs")


def test_words_command_lists_dialects_and_settings(kit):
    assert "dreamer-paper" in kit("words")
    text = kit("words tianshou")
    assert "update_per_step=1.0" in text
    assert "rounded half to even" in text
    assert "train_seed=42  (acts: seed, evaluation_seed)" in text
    assert "critic.lamda=0.95  (acts: gae_lambda)" in kit("words pyrado")
    uses = {row["name"]: (row["use"], row["as"]) for row in json.loads(kit("words sb3 --json"))}
    assert uses["gradient_steps"] == ("counts", "")
    assert uses["clip_range"] == ("acts", "clip_epsilon, clip_schedule")
    assert uses["use_sde"] == ("acts", "gsde")
    assert len(json.loads(kit("words --json"))) == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("explain sheprl", "dialect='sheprl' is not a dialect. Try: sheeprl"),
        ("explain sheeprl replay_rato=1", "Try: replay_ratio"),
        ("explain sb3 train_freq=0", "train_freq=0: The value must be at least 1"),
        ("explain sb3 n_envs", "cannot be read"),
        ("explain sb3 n_envs=1 junk", "Settings have the form name=value"),
        ("translate sb3 --to shee", "dialect='shee' is not a dialect"),
        ("diff sb3 n_envs=4", "Two dialects are needed. Example: kit steps diff"),
        ("words sb4", "dialect='sb4' is not a dialect. Try: sb3"),
        ("explain kit num_envs=4", "leaves the length of the run undefined"),
    ],
)
def test_invalid_arguments_give_one_line_error(kit, words, message):
    error = kit(words, code=2)
    assert error.startswith("kit: ")
    assert message in error
    assert error.count("\n") == 1


def test_command_enables_garbage_collection_after_imports():
    code = (
        "import gc, sys; from kit.__main__ import main; sys.argv = ['kit', 'steps', 'words']; "
        "main(); sys.exit(not gc.isenabled())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_kit_runs_as_module():
    words = [sys.executable, "-m", "kit", "steps", "words"]
    assert "tianshou" in subprocess.run(words, check=True, capture_output=True, text=True).stdout
    words = [sys.executable, "-m", "kit", "steps", "explain", "sheprl"]
    assert subprocess.run(words, check=False, capture_output=True).returncode == 2


# ---------------------------------------------------------------------- recipes
def test_kit_without_arguments_lists_commands(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in COMMANDS)


def test_version_matches_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kit {__version__}\n"


def test_unknown_command_error_suggests_nearest(capsys):
    assert main(["evalute"]) == 2
    assert capsys.readouterr().err == "kit: There is no command 'evalute'. Try: evaluate.\n"


def test_recipes_lists_each_recipe_in_one_line(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == RECIPES
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("recipe", RECIPES)
def test_new_copies_recipe_with_adapted_commands(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", recipe, "mine.py"]) == 0
    text = Path("mine.py").read_text()
    header = ast.get_docstring(ast.parse(text)) or ""
    assert f"Copied from kit's recipe {recipe}." in header
    assert "\n    python mine.py " in header
    assert "kit train" not in text
    original = Path(recipes.__file__).with_name(f"{recipe}.py").read_text()
    assert text.partition('"""\n\nfrom')[2] == original.partition('"""\n\nfrom')[2]
    assert main(["new", "sac", "mine.py"]) == 2
    assert capsys.readouterr().err == "kit: mine.py exists already. Choose another name.\n"
    assert Path("mine.py").read_text() == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("new pp mine.py", "recipe='pp': There is no such recipe. Try: ppo."),
        ("new ppo mine", "file='mine': A recipe is a Python file. Use mine.py."),
        ("train pp", "recipe='pp': There is no such recipe. Try: ppo."),
    ],
)
def test_cli_rejects_unknown_recipes_and_files(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"kit: {message}\n"
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_train_runs_recipes_and_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = "steps.total_policy_steps=16 steps.steps_per_env=1 steps.update_epochs=1 progress=false"
    short += " steps.minibatch_size=null steps.evaluation_episodes=1 hidden_sizes=[4]"
    assert main(["train", "ppo", *short.split()]) == 0
    assert main(["train", "ppo", "resume=latest"]) == 0
    assert main(["new", "ppo", "mine.py"]) == 0
    assert main(["train", "mine.py", *short.split()]) == 0
    assert len([*tmp_path.glob("runs/*/CartPole-v1/*/metrics.csv")]) == 2
    assert main(["train"]) == 0
    assert "usage: kit train" in capsys.readouterr().out
