"""Recipes on a GPU: programs compute what eager steps do, and runs resume bit by bit."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch

from kit import evaluate
from tests.simulated_cuda import config_of
from tests.stored import read_stored
from tests.test_resume import assert_same, end_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NORMALIZED = {"env.normalize_observation": True, "env.normalize_reward": True}
TENSOR = {"env.vectorization": "tensor", "collector": "tensor"}
PIXELS = {
    "env.id": "kit.testing.envs:kit/Glimpse-v0",
    "preprocess": "none",
    "convolutions": [[4, 3, 2]],
}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo tensor": TENSOR,
    "ppo tensor continuous": {**TENSOR, "env.id": "Pendulum-v1"},
    "ppo tensor normalized": {**TENSOR, **NORMALIZED},
    "ppo normalized": NORMALIZED,
    "ppo exact": {"collector_kwargs": {"fast_policy": "exact"}},
    "ppo bfloat16": {"precision": "bfloat16"},
    "ppo_pixels": PIXELS,
    "ppo_recurrent": {},
    "a2c": {},
    "reinforce": {"steps.total_policy_steps": 4_000},
    "trpo": {},
    "svpg": {"steps.total_policy_steps": 4_000},
    "dqn": {},
    "dqn exact": {"collector_kwargs": {"fast_policy": "exact"}},
    "dqn three steps": {"n_step": 3},
    "dqn_pixels": PIXELS,
    "dqn_pixels thin": {**PIXELS, "store_next_observation": False},
    "rainbow": {},
    "ddpg": {},
    "td3": {},
    "sac": {},
    "sac exact": {"collector_kwargs": {"fast_policy": "exact"}},
    "sac thin": {"store_next_observation": False},
    "sac bfloat16": {"precision": "bfloat16"},
    "sac tensor": {**TENSOR, "env.id": "Pendulum-v1"},
    "sac standardized": {"standardize_reward": True},
    "sac_discrete": {},
    "redq": {},
    "droq": {},
    "tqc": {},
    "crossq": {},
    "dreamerv1": {"steps.total_policy_steps": 400, "env.max_episode_steps": 20},
    "dreamerv3": {},
    "plan2explore": {},
    "bc": {},
    "td3_bc": {},
    "cql": {},
    "iql": {},
    "impala": {"collector": "vector"},
}


def config(name: str, **more: Any) -> Any:
    recipe, *_ = name.split()
    found = config_of(recipe)
    found.compile = "auto"
    for path, value in {**RUNS[name], **more}.items():
        *groups, field = path.split(".")
        owner = found
        for group in groups:
            owner = getattr(owner, group)
        assert hasattr(owner, field), path
        setattr(owner, field, value)
    return found


def built(name: str, **more: Any) -> Any:
    recipe, *_ = name.split()
    return importlib.import_module(f"recipes.{recipe}").build(config(name, **more))


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.loss_module.state_dict().items()
            if isinstance(value, torch.Tensor)}  # fmt: skip


@pytest.fixture(autouse=True)
def _data_sets_in_memory(monkeypatch):
    monkeypatch.setattr("kit.experiment.read_datasets", read_stored)


@pytest.mark.parametrize("name", list(RUNS))
def test_traced_run_matches_eager_run(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = built(name, compile="exact")
        ours.run()
    theirs = built(name, compile=False)
    theirs.run()
    # Programs read learning rates on the device, as float32.
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-3, atol=1e-5)
    eager = [str(one.message) for one in caught if "runs eagerly" in str(one.message)]
    assert not eager
    assert all(value.is_cuda for value in weights(ours).values())


def test_redq_update_runs_as_cuda_graph():
    trainer, found = built("redq"), set()

    def note() -> None:
        found.update(traced.executor for traced in trainer.update.traced_step.traced.values())

    trainer.register_op("post_steps", note)
    trainer.run()
    assert found == {"", "cudagraph"}  # before the first gradient step there is none


@pytest.mark.parametrize("name", list(RUNS))
def test_interrupted_run_resumes_exactly(name, tmp_path):
    whole = built(name, log_dir=str(tmp_path / "whole"), checkpoint_every=16)
    whole.run()
    iterations = whole.ledger.iterations
    cut = built(name, log_dir=str(tmp_path / "cut"), checkpoint_every=16)

    def cut_off() -> None:
        if cut.ledger.iterations == max(iterations * 3 // 4, 1):
            raise KeyboardInterrupt

    cut.register_op("post_steps", cut_off)
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    (folder,) = (config.parent for config in (tmp_path / "cut").glob("**/config.yaml"))
    resumed = built(name, log_dir=str(tmp_path / "cut"), checkpoint_every=16, resume=str(folder))
    assert 0 < resumed.ledger.iterations < iterations
    resumed.run()
    (other,) = (config.parent for config in (tmp_path / "whole").glob("**/config.yaml"))
    assert_same(end_state(folder), end_state(other))


@pytest.mark.parametrize("name", ["ppo", "sac", "dqn_pixels", "dreamerv3", "iql"])
def test_evaluate_plays_policy_of_gpu_run(name, tmp_path, capsys):
    trainer = built(name, log_dir=str(tmp_path), checkpoint_every=16)
    trainer.run()
    (folder,) = (config.parent for config in tmp_path.glob("**/config.yaml"))
    evaluate.main([str(folder), "--episodes", "2"])
    assert "over 2 episodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [
        {"collector": "async"},
        {"env.vectorization": "async"},
        {"env.vectorization": "native"},
        {"collector": "torchrl"},
    ],
    ids=str,
)
def test_impala_trains_on_gpu_with_other_collectors_and_backends(changes):
    trainer = built("impala", **changes)
    assert trainer.run().compare(trainer.plan) == []
