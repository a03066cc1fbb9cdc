"""Replay memory on a disk: the same transitions, in files that leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import recipes.dqn
from kit.buffers import PrioritizedSampler, disk, make_replay_buffer
from kit.buffers.disk import TransitionStorage, zeros_on_disk
from kit.evaluate import SavedRun
from kit.experiment import OffPolicySteps
from kit.trainer import chunked_state
from kit.trainer.checkpoint import Checkpoints
from tests.buffers.test_batches import batch_of
from tests.test_checkpoint import Part

KINDS = {
    "uniform": {},
    "n-step": {"n_step": 3},
    "sequences": {"sequence_length": 2},
    "observations once": {"store_next_observation": False},
}


def anonymous_memory() -> int:
    """Bytes of this process that no file stands behind."""
    status = Path("/proc/self/status").read_text().splitlines()
    found = next(line for line in status if line.startswith("RssAnon"))
    return int(found.split()[1]) * 1024


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_disk_buffer_matches_in_memory_buffer(kind, dtype, tmp_path):
    in_memory = make_replay_buffer(20, 4, **KINDS[kind])
    on_disk = make_replay_buffer(20, 4, folder=tmp_path, **KINDS[kind])
    for number in range(9):
        batch = batch_of(2, 3, start=6 * number)
        batch["observation"], batch["next", "observation"] = (
            batch[key].to(dtype) for key in ("observation", ("next", "observation"))
        )
        in_memory.extend(batch)
        on_disk.extend(batch)
    torch.manual_seed(0)
    expected = in_memory._samples(4, 1)[0]
    torch.manual_seed(0)
    assert (on_disk._samples(4, 1)[0] == expected).all()
    assert (on_disk.buffer[:] == in_memory.buffer[:]).all()


def test_disk_buffer_supports_prioritized_sampler(tmp_path):
    sampler = PrioritizedSampler(20, alpha=0.6, beta=0.4)
    replay = make_replay_buffer(20, 4, sampler=sampler, folder=tmp_path)
    for number in range(9):
        replay.extend(batch_of(2, 3, start=6 * number))
    drawn = replay._samples(4, 1)[0]
    replay.update_priority(drawn.set("td_error", torch.arange(4.0)))
    assert torch.equal(replay.buffer[:]["observation"][drawn["index"]], drawn["observation"])


@pytest.mark.parametrize("kind", [{}, {"store_next_observation": False}], ids=str)
def test_disk_buffer_uses_no_ram_and_leaves_no_files(kind, tmp_path):
    replay = make_replay_buffer(100_000, 4, folder=tmp_path, **kind)
    before = anonymous_memory()
    for number in range(1_000):
        batch = batch_of(1, 100, start=100 * number)
        for rows in (batch, batch["next"]):  # 1 KiB each: 98 MiB, or twice as much
            rows["observation"] = rows["observation"].expand(1, 100, 256).clone()
        replay.extend(batch)
    assert anonymous_memory() - before < 2**24
    assert len(replay.buffer) == 100_000
    assert os.listdir(tmp_path) == []
    newest = replay.buffer[-1]
    assert newest["observation"].unique().tolist() == [99_999]
    assert newest["next", "observation"].unique().tolist() == [100_000]


@pytest.mark.parametrize("kind", [{}, {"store_next_observation": False}], ids=str)
def test_torchrl_load_state_dict_restores_to_disk(kind, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        disk, "zeros_on_disk", lambda *a: made.append(zeros_on_disk(*a)) or made[-1]
    )
    saved, restored = (make_replay_buffer(20, 4, folder=tmp_path, **kind).buffer for _ in range(2))
    saved.extend(batch_of(1, 9)[0])
    before = len(made)
    restored.load_state_dict(saved.state_dict())
    assert len(made) == 2 * before
    kept = {one.data_ptr() for one in made}
    assert {one.data_ptr() for one in restored.storage._storage.values(True, True)} <= kept
    for key in ("observation", ("next", "observation"), ("next", "done")):
        assert torch.equal(restored[:9][key], saved[:9][key])


def test_zeros_on_disk_raises_when_disk_space_is_insufficient(tmp_path):
    with pytest.raises(OSError, match=r"File too large|No space left"):
        zeros_on_disk((2**52,), torch.float32, tmp_path)


def test_storage_folder_is_fixed_when_working_directory_changes(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    storage = TransitionStorage(4, "scratch")
    monkeypatch.chdir(tmp_path / "scratch")
    assert storage.zeros((4,), torch.float32).shape == (4,)


@pytest.mark.parametrize("shape", [(0, 3), (5, 3), ()])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64])
def test_zeros_on_disk_returns_zeros(shape, dtype, tmp_path):
    assert torch.equal(zeros_on_disk(shape, dtype, tmp_path), torch.zeros(shape, dtype=dtype))


def test_saved_run_evaluates_without_buffer_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    steps = OffPolicySteps(
        total_policy_steps=64, steps_per_env=1, learning_starts=32, evaluation_every=None
    )
    recipes.dqn.build(
        recipes.dqn.Config(steps=steps, buffer_folder="scratch", progress=False)
    ).run()
    (tmp_path / "scratch").rmdir()
    run = SavedRun(next(Path("runs").glob("*/*/*")))
    assert run.evaluator(1, seed=0)(0)["evaluation/return"] > 0
    run.close()


def test_large_checkpoint_is_loaded_to_disk(tmp_path, monkeypatch):
    large = torch.arange(2**24, dtype=torch.int32)
    path = Checkpoints(tmp_path, {"part": Part(large)}).save(1, {})
    before, other = anonymous_memory(), Part()
    Checkpoints(tmp_path, {"part": other}).load(path)
    assert anonymous_memory() - before > large.nbytes / 2
    monkeypatch.setattr(chunked_state, "IN_MEMORY", 0)
    before, other = anonymous_memory(), Part()
    Checkpoints(tmp_path, {"part": other}).load(path)
    assert anonymous_memory() - before < large.nbytes / 2
    assert torch.equal(other.value, large)
