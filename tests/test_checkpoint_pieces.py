"""Large tensors of a checkpoint are written once: what has not changed is shared with the next."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from kit.buffers import make_replay_buffer
from kit.trainer.checkpoint import (
    Checkpoints,
    CorruptCheckpointError,
    _write_checksums,
    check_whole,
)
from kit.trainer.chunked_state import LARGE, PIECE, _here
from tests.errors import raises_setting
from tests.test_checkpoint import Part

ROWS = LARGE // 1024
"""Rows of 1,024 bytes that make a large tensor."""


def large(dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A large tensor of rows that differ."""
    numbers = torch.arange(ROWS * 256, dtype=torch.int32).reshape(ROWS, 256).view(torch.uint8)
    return numbers[: ROWS // dtype.itemsize].to(dtype)


def pieces(checkpoint: Path) -> dict[str, os.stat_result]:
    """Files with pieces of tensors, by name."""
    found = checkpoint.glob("components/*/*")
    return {f.name: f.stat() for f in found if f.suffix == "" and f.name != "state.pt"}


def written(checkpoint: Path) -> int:
    """Bytes of pieces that no other checkpoint has."""
    return sum(one.st_size for one in pieces(checkpoint).values() if one.st_nlink == 1)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.int64]
)
def test_large_tensors_round_trip_bitwise(dtype, tmp_path):
    value = {"rows": [large(dtype), (large(dtype).t(), torch.ones(3))], "empty": torch.empty(0, 4)}
    part, other = Part(value), Part()
    path = Checkpoints(tmp_path, {"part": part}).save(1, {})
    assert pieces(path)
    Checkpoints(tmp_path, {"part": other}).load(path)
    rows, (turned, ones) = other.value["rows"]
    assert rows.dtype == dtype
    assert torch.equal(rows, value["rows"][0])
    assert torch.equal(turned, value["rows"][1][0])
    assert torch.equal(ones, torch.ones(3))
    assert other.value["empty"].shape == (0, 4)


def test_save_writes_small_tensors_to_one_file(tmp_path):
    path = Checkpoints(tmp_path, {"part": Part(large()[:-1])}).save(1, {})
    assert not pieces(path)


def test_save_writes_slice_without_rest_of_tensor(tmp_path):
    whole, sparse = torch.arange(1_000_000), torch.eye(3).to_sparse()
    part = Part({"first": whole[:10], "sparse": sparse})
    path = Checkpoints(tmp_path, {"part": part}).save(1, {})
    assert sum(file.stat().st_size for file in path.glob("components/*/*")) < 10_000
    other = Part()
    Checkpoints(tmp_path, {"part": other}).load(path)
    assert torch.equal(other.value["first"], whole[:10])
    assert torch.equal(other.value["sparse"].to_dense(), torch.eye(3))


def test_save_rewrites_only_changed_pieces(tmp_path):
    part = Part(large().clone())
    checkpoints = Checkpoints(tmp_path, {"part": part})
    first = checkpoints.save(1, {})
    assert written(first) == LARGE
    part.value[5:9] = 0
    second = checkpoints.save(2, {})
    assert written(second) == PIECE
    part.value = torch.cat([part.value, part.value[:7]])  # a buffer that is not full yet
    third = checkpoints.save(3, {})
    assert written(third) == 7 * 1024
    for path in (second, third):  # the first one is gone
        check_whole(path)
    assert not first.exists()
    other = Part()
    Checkpoints(tmp_path, {"part": other}).load(third)
    assert torch.equal(other.value, part.value)


def test_resumed_run_shares_pieces_with_loaded_checkpoint(tmp_path):
    part = Part(large().clone())
    last = Checkpoints(tmp_path, {"part": part}).save(1, {})
    resumed = Checkpoints(tmp_path, {"part": part}, last=last).save(2, {})
    assert written(resumed) == 0


def test_save_writes_all_pieces_without_hard_links(tmp_path, monkeypatch):
    def no_links(*args: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    checkpoints = Checkpoints(tmp_path, {"part": Part(large())})
    assert [written(checkpoints.save(number, {})) for number in (1, 2)] == [LARGE, LARGE]


def test_integrity_check_detects_bit_flip_in_piece(tmp_path):
    path = Checkpoints(tmp_path, {"part": Part(large())}).save(1, {})
    (piece, *_) = path.glob("components/*/" + next(iter(pieces(path))))
    data = bytearray(piece.read_bytes())
    data[PIECE // 2] ^= 4
    piece.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=piece.name):
        check_whole(path)


def test_save_rewrites_damaged_piece(tmp_path):
    part = Part(large())
    checkpoints = Checkpoints(tmp_path, {"part": part})
    first = checkpoints.save(1, {})
    (piece, *_) = first.glob("components/*/" + next(iter(pieces(first))))
    piece.write_bytes(b"x" + piece.read_bytes()[1:])
    second = checkpoints.save(2, {})
    assert written(second) == PIECE
    other = Part()
    Checkpoints(tmp_path, {"part": other}).load(second)
    assert torch.equal(other.value, part.value)


def test_load_rejects_truncated_piece(tmp_path):
    path = Checkpoints(tmp_path, {"part": Part(large())}).save(1, {})
    (piece, *_) = path.glob("components/*/" + next(iter(pieces(path))))
    piece.write_bytes(piece.read_bytes()[:-1])
    _write_checksums(path)
    with raises_setting("checkpoint"):
        Checkpoints(tmp_path, {"part": Part()}).load(path)


def test_tensor_of_missing_gpu_loads_on_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    read = {where: _here("memory", where) for where in ("cpu", "cuda", "cuda:0", "cuda:1")}
    assert read == {"cpu": None, "cuda": None, "cuda:0": None, "cuda:1": "memory"}


def test_replay_buffer_rewrites_only_added_pieces(tmp_path):
    def filled(steps: int) -> Any:
        rows = torch.randint(256, (1, steps, 4096), dtype=torch.uint8)
        after = TensorDict({"observation": rows, "done": torch.zeros(1, steps, 1) > 0}, [1, steps])
        return TensorDict({"observation": rows, "next": after}, [1, steps])

    buffer = make_replay_buffer(12_000, 4)
    checkpoints = Checkpoints(tmp_path, {"buffer": buffer})
    buffer.extend(filled(9_000))
    whole = written(checkpoints.save(1, {}))
    buffer.extend(filled(10))
    assert whole == 9_000 * 4096  # both observations are the same here, and so are their pieces
    assert written(checkpoints.save(2, {})) <= PIECE
    again = make_replay_buffer(12_000, 4)
    Checkpoints(tmp_path, {"buffer": again}).load(tmp_path / "checkpoint-000000000002")
    one, other = (b.buffer.storage.get(range(9_010)) for b in (buffer, again))
    assert (one == other).all()
