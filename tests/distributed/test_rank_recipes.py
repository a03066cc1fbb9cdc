"""Every recipe trains on several ranks, or says why it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.torchrun import Torchrun
from tests.fuzz.__main__ import RECIPES

REJECTED = {"trpo": "update", "reinforce": "min_episodes", "dreamerv1": "min_episodes"}
SCRIPT = str(Path(__file__).with_name("recipes_on_ranks.py"))

Seen = list[dict[str, Any]]
"""What each rank saw of every recipe."""


@pytest.fixture
def seen(tmp_path) -> Callable[..., Seen]:
    def of(ranks: int, *names: str) -> Seen:
        run = Torchrun([SCRIPT, str(tmp_path / "seen"), *names], tmp_path / "log", ranks)
        assert run.ended(300) == 0, run.text()[-3_000:]
        return json.loads((tmp_path / "seen").read_text())

    return of


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_recipe_trains_alike_on_all_ranks(ranks, seen):
    everyone = seen(ranks)
    for name in RECIPES:
        first, *others = [one[name] for one in everyone]
        if name in REJECTED:
            assert [one["rejected"] for one in (first, *others)] == [REJECTED[name]] * ranks
            continue
        for other in others:
            assert other["digests"] == first["digests"], name  # weights, buffers, optimizers, ...
            assert other["log"] == first["log"], name
        gradients = [one for one in first["log"] if one[0] == "gradients"]
        assert len(gradients) == first["gradient_steps"] > 0, name
        assert first["plan"] == [], name
        counts = [one["counts"] for one in (first, *others)]
        assert first["totals"] == [sum(column) for column in zip(*counts)], name


@pytest.mark.slow
def test_ranks_collect_different_data_and_repeat_themselves(seen):
    one, again = (seen(2, "ppo", "sac") for _ in range(2))
    assert one == again
    for name in ("ppo", "sac"):
        batches = [rank[name]["batches"] for rank in one]
        assert len({*batches[0], *batches[1]}) == 2 * len(batches[0])


@pytest.mark.slow
def test_ranks_collect_with_ray_workers(tmp_path):
    pytest.importorskip("ray")
    words = [
        "-m", "recipes.sac", "collector=ray", "collector_kwargs.workers=2", "env.num_envs=2",
        "env.id=Pendulum-v1", "steps.total_policy_steps=200", "steps.learning_starts=100",
        "steps.evaluation_every=null", "steps.evaluation_episodes=1", f"log_dir={tmp_path}",
    ]  # fmt: skip
    run = Torchrun(words, tmp_path / "log")
    assert run.ended() == 0, run.text()[-3_000:]
    (plan,) = tmp_path.glob("sac/*/*/plan.txt")
    (row,) = [line for line in plan.read_text().splitlines() if line.startswith("policy steps ")]
    assert row.split()[-3:] == ["200", "200", "200"]
