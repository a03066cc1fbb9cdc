"""Runs of several ranks are read in one process like those of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import recipes.ppo
import recipes.sac
from kit.__main__ import main as kit
from kit.cli.launch import main
from kit.evaluate import SavedRun
from kit.runs.comparison import compare
from kit.runs.saved_runs import runs_of
from tests.distributed.torchrun import Torchrun
from tests.short_runs import COMMON, SHORT

RECIPES = {"ppo": recipes.ppo, "sac": recipes.sac}
SHEEPRL = ["steps=sheeprl", "steps.algo=sac", "steps.total_steps=20", "steps.learning_starts=8",
           "steps.per_rank_batch_size=4", "steps.world_size=2"]  # fmt: skip
pytestmark = pytest.mark.slow


def train(name: str, folder: Path, *words: str, ranks: int = 2) -> Path:
    """Train a recipe briefly on several ranks and return its run folder."""
    words = (f"recipes.{name}", *SHORT[name], *COMMON, f"log_dir={folder}", *words)
    run = Torchrun(["-m", *words], folder.with_suffix(".log"), ranks)
    assert run.ended() == 0, run.text()[-3_000:]
    return runs_of(folder)[-1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: train(name, folder / name) for name in RECIPES}


@pytest.mark.parametrize("name", RECIPES)
def test_one_process_evaluates_run_of_two_ranks(name, runs, capsys):
    for options in ([], ["--best"]):
        assert kit(["evaluate", str(runs[name]), "--episodes", "2", *options]) in (None, 0)
        assert "return" in capsys.readouterr().out


@pytest.mark.parametrize("name", RECIPES)
def test_one_process_exports_run_of_two_ranks(name, runs, tmp_path):
    assert kit(["export", str(runs[name]), str(tmp_path / "policy.pt2")]) in (None, 0)
    assert (tmp_path / "policy.pt2").is_file()


@pytest.mark.parametrize("name", RECIPES)
def test_new_run_of_one_process_starts_from_two_ranks(name, runs, tmp_path):
    recipe, words = RECIPES[name], [*SHORT[name], *COMMON, f"init_from={runs[name]}"]
    built = []

    def build(cfg):
        trainer = recipe.build(cfg)
        built.append({k: v.clone() for k, v in trainer.loss_module.state_dict().items()})
        return trainer

    main(recipe.Config, build, [*words, f"log_dir={tmp_path}"])
    saved = SavedRun(runs[name])
    weights = saved.trainer.loss_module.state_dict()
    saved.close()
    assert built[0].keys() == weights.keys()
    assert all(torch.equal(built[0][key], weights[key]) for key in weights if "params" in key)


def test_ranks_count_loaded_statistics_once(runs, tmp_path):
    counts = []
    for run in (runs["ppo"], train("ppo", tmp_path / "new", f"init_from={runs['ppo']}")):
        saved = SavedRun(run)
        moments = dict(saved.trainer.collector.env.normalizer.named_moments())
        counts.append({name: one.count.item() for name, one in moments.items()})
        saved.close()
    source, new = counts
    assert source
    assert all(new[name] == pytest.approx(2 * source[name], abs=1e-3) for name in source)


def test_compare_separates_runs_with_other_numbers_of_ranks(runs, tmp_path):
    words = [*SHORT["ppo"], *COMMON, "seed=1", f"log_dir={tmp_path}"]
    main(recipes.ppo.Config, recipes.ppo.build, words)
    one, two = compare([*runs_of(tmp_path), runs["ppo"]]).groups
    assert (one.name, two.name) == ("ranks=1", "ranks=2")
    assert two.runs[0].policy_steps == one.runs[0].policy_steps


def test_one_process_reads_run_whose_settings_name_two_processes(tmp_path):
    words = [word for word in SHORT["sac"] if not word.startswith("steps.")]
    words += [word for word in COMMON if not word.startswith("steps.")]
    run = Torchrun(["-m", "recipes.sac", *words, *SHEEPRL, f"log_dir={tmp_path}"], tmp_path / "log")
    assert run.ended() == 0, run.text()[-3_000:]
    assert kit(["evaluate", str(runs_of(tmp_path)[0]), "--episodes", "1"]) in (None, 0)
