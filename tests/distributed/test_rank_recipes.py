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


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Callable[[int], Seen]:
    results: dict[int, Seen] = {}

    def of(ranks: int, *names: str) -> Seen:
        if ranks not in results or names:
            folder = tmp_path_factory.mktemp("ranks")
            run = Torchrun([SCRIPT, str(folder / "seen"), *names], folder / "log", ranks)
            assert run.ended() == 0, run.text()[-3_000:]
            found = json.loads((folder / "seen").read_text())
            if names:
                return found
            results[ranks] = found
        return results[ranks]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_alike_on_all_ranks(name, ranks, seen):
    first, *others = [one[name] for one in seen(ranks)]
    if name in REJECTED:
        assert [one["rejected"] for one in (first, *others)] == [REJECTED[name]] * ranks
        return
    for other in others:
        assert other["digests"] == first["digests"]  # weights, buffers, optimizers, statistics
        assert other["log"] == first["log"]
    gradients = [one for one in first["log"] if one[0] == "gradients"]
    assert len(gradients) == first["gradient_steps"] > 0
    assert first["plan"] == []
    counts = [one["counts"] for one in (first, *others)]
    assert first["totals"] == [sum(column) for column in zip(*counts)]


@pytest.mark.slow
def test_ranks_collect_different_data_and_repeat_themselves(seen):
    one, again = (seen(2, "ppo", "sac") for _ in range(2))
    assert one == again
    for name in ("ppo", "sac"):
        assert len({*one[0][name]["batches"], *one[1][name]["batches"]}) == 2 * len(
            one[0][name]["batches"]
        )
