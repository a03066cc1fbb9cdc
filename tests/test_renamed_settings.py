"""Settings that were renamed keep their old names, with a warning, for one minor version."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import yaml

from kit.cli.launch import main
from kit.config.renamed import RENAMED, upgraded
from kit.runs.saved_runs import read_config
from recipes import a2c, ppo, rainbow


@pytest.mark.parametrize("old", [name for name in RENAMED if "importance" not in name])
def test_config_accepts_an_old_name_with_a_warning(old):
    recipe = rainbow if old == "priority_exponent" else ppo
    value = getattr(recipe.Config(), RENAMED[old])
    with pytest.warns(FutureWarning, match=f"^{old} is deprecated. Use {RENAMED[old]}.$"):
        config = recipe.Config(**{old: value})
    with pytest.warns(FutureWarning, match=old):
        assert getattr(config, old) == value


def test_config_sets_and_replaces_an_old_name():
    config = ppo.Config()
    with pytest.warns(FutureWarning, match="anneal"):
        config.anneal = "cosine"
    assert config.lr_schedule == "cosine"
    with pytest.warns(FutureWarning, match="anneal"):
        assert replace(config, anneal="constant").lr_schedule == "constant"


def test_config_field_with_an_old_name_is_not_renamed():
    @dataclass
    class Config(a2c.Config):
        anneal: float = 0.5

    config = Config(anneal=0.1)
    assert (config.anneal, config.lr_schedule) == (0.1, "constant")
    assert upgraded({"anneal": 0.1}, vars(config)) == {"anneal": 0.1}


def test_command_line_warns_of_an_old_name_in_one_line(capsys, tmp_path):
    words = ["steps.total_policy_steps=16", "env.num_envs=2", "steps.steps_per_env=8"]
    words += ["steps.minibatch_size=16", "steps.update_epochs=1", "steps.evaluation_episodes=1"]
    words += ["anneal=constant", f"runs={tmp_path}", "progress=false"]
    main(ppo.Config, ppo.build, words)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "anneal is deprecated. Use lr_schedule.",
        "runs is deprecated. Use log_dir.",
    ]
    (file,) = tmp_path.glob("*/*/*/config.yaml")
    assert yaml.safe_load(file.read_text())["lr_schedule"] == "constant"


def test_saved_config_is_read_under_current_names(tmp_path):
    (tmp_path / "config.yaml").write_text("runs: here\nanneal: cosine\ngamma: 0.9\n")
    assert read_config(tmp_path) == {"log_dir": "here", "lr_schedule": "cosine", "gamma": 0.9}
