"""A checkpoint is there completely or not at all, runs no code, and brings everything back."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.hooks import NaNGuard, NotFinite
from kit.logging.files import NotSaved, append, write_whole
from kit.steps import SettingError
from kit.trainer.checkpoint import Checkpoints
from tests.tiny import (
    assert_equal,
    off_policy_plan,
    on_policy_plan,
    ppo_trainer,
    sac_trainer,
    weights,
)


class Part:
    """Something with a state."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.value, Exception):
            raise self.value
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------------- one folder of them
def test_what_was_saved_comes_back(tmp_path):
    values = {
        "tensors": torch.arange(6.0).reshape(2, 3),
        "nested": {"list": [1, 2.5, None, "text", True], "tensor": torch.tensor(7)},
        "large": 10**15 + 1,
    }
    path = Checkpoints(tmp_path, {"part": Part(values)}).save(8, {"counters": {"a": 1}})
    part = Part()
    assert Checkpoints(tmp_path, {"part": part}).load(path) == {"counters": {"a": 1}}
    assert torch.equal(part.value["tensors"], values["tensors"])
    assert part.value["nested"]["list"] == values["nested"]["list"]
    assert part.value["large"] == values["large"]


def test_the_newest_two_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, {"part": Part()})
    for steps in (8, 16, 24, 1_000):
        checkpoints.save(steps, {})
    assert names(tmp_path) == ["checkpoint-000000000024", "checkpoint-000000001000"]
    assert Checkpoints.latest(tmp_path) == tmp_path / "checkpoint-000000001000"


def test_as_many_are_kept_as_asked(tmp_path):
    checkpoints = Checkpoints(tmp_path, {"part": Part()}, keep=1)
    for steps in (8, 16):
        checkpoints.save(steps, {})
    assert names(tmp_path) == ["checkpoint-000000000016"]


def test_there_is_none_at_first(tmp_path):
    assert Checkpoints.latest(tmp_path) is None
    assert Checkpoints.latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_one_that_fails_half_way_is_not_there_and_the_one_before_is(tmp_path, error, monkeypatch):
    first, second = Part(1), Part(1)
    checkpoints = Checkpoints(tmp_path, {"a": first, "b": second})
    before = checkpoints.save(8, {})
    saved, save = [], torch.save

    def fails(state: Any, *args: Any, **kwargs: Any) -> None:
        saved.append(state)
        if len(saved) == 2:
            raise error
        save(state, *args, **kwargs)

    first.value = 2
    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises((NotSaved, KeyboardInterrupt)):
        checkpoints.save(16, {})
    assert len(saved) == 2
    assert Checkpoints.latest(tmp_path) == before
    checkpoints.load(before)
    assert first.value == 1
    monkeypatch.undo()
    assert checkpoints.save(16, {}) == Checkpoints.latest(tmp_path)
    assert names(tmp_path) == ["checkpoint-000000000008", "checkpoint-000000000016"]


def test_a_folder_that_a_kill_has_left_incomplete_is_passed_over(tmp_path):
    checkpoints = Checkpoints(tmp_path, {"part": Part()})
    whole = checkpoints.save(8, {})
    incomplete = tmp_path / "checkpoint-000000000016"
    (incomplete / "components").mkdir(parents=True)
    (tmp_path / ".checkpoint-000000000024.tmp").mkdir()
    assert Checkpoints.latest(tmp_path) == whole


def test_an_error_of_a_part_is_not_taken_for_a_full_disk(tmp_path):
    with pytest.raises(Exception, match="weights are gone") as raised:
        Checkpoints(tmp_path, {"part": Part(RuntimeError("weights are gone"))}).save(8, {})
    assert not isinstance(raised.value, NotSaved)
    assert Checkpoints.latest(tmp_path) is None


# ---------------------------------------------------------------------- what is not trusted
class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "executed")


def test_code_in_a_checkpoint_is_never_executed(tmp_path):
    trainer = ppo_trainer(on_policy_plan(), folder=tmp_path)
    trainer.run()
    checkpoint = Checkpoints.latest(tmp_path / "checkpoints")
    assert checkpoint is not None
    files = sorted(checkpoint.glob("components/*/*"))
    assert len(files) >= 6
    trap = tmp_path / "trap"
    torch.save({"value": Malicious(trap)}, tmp_path / "works.pt")
    torch.load(tmp_path / "works.pt", weights_only=False)
    assert trap.read_text() == "executed"  # the trap works, where code is allowed
    trap.unlink()
    for path in files:
        before = path.read_bytes()
        for plant in (torch.save, lambda bad, to: to.write_bytes(pickle.dumps(bad))):
            plant({"value": Malicious(trap)}, path)
            with pytest.raises(SettingError, match="cannot be loaded"):
                ppo_trainer(on_policy_plan(), resume_from=checkpoint)
            assert not trap.exists(), path
        path.write_bytes(before)
    ppo_trainer(on_policy_plan(), resume_from=checkpoint)


def test_a_damaged_file_is_named_with_what_to_do(tmp_path):
    path = Checkpoints(tmp_path, {"part": Part()}).save(8, {})
    (file,) = path.glob("components/*-part/state.pt")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(SettingError) as raised:
        Checkpoints(tmp_path, {"part": Part()}).load(path)
    assert str(raised.value).startswith(f"checkpoint='{path}' cannot be loaded: ")
    assert "'part'" in str(raised.value)
    advice = "remove this folder to continue from the checkpoint before it, if there is one."
    assert str(raised.value).endswith(advice)


def test_a_checkpoint_of_other_parts_is_refused(tmp_path):
    path = Checkpoints(tmp_path, {"part": Part()}).save(8, {})
    with pytest.raises(SettingError, match="cannot be loaded"):
        Checkpoints(tmp_path, {"another": Part()}).load(path)
    trainer = ppo_trainer(on_policy_plan(), folder=tmp_path / "run")
    trainer.run()
    larger = ppo_trainer(on_policy_plan()).loss_module
    larger.register_buffer("more", torch.zeros(1))
    with pytest.raises(SettingError, match="loss_module"):
        Checkpoints(tmp_path, {"loss_module": larger}).load(trainer.last_checkpoint)


def test_versions_are_noted_and_another_one_is_loaded(tmp_path):
    path = Checkpoints(tmp_path, {"part": Part(5)}).save(8, {})
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["versions"]["torch"] == str(torch.__version__)
    manifest["versions"]["torch"] = "2.0.0"
    (path / "manifest.json").write_text(json.dumps(manifest))
    part = Part()
    Checkpoints(tmp_path, {"part": part}).load(path)
    assert part.value == 5


# ---------------------------------------------------------------------- of a trainer
@pytest.mark.parametrize("trainer_of", [ppo_trainer, sac_trainer])
def test_saving_changes_nothing_and_loading_brings_everything_back(trainer_of, tmp_path):
    plan = on_policy_plan() if trainer_of is ppo_trainer else off_policy_plan()
    plain = trainer_of(plan)
    plain.run()
    saving = trainer_of(plan, folder=tmp_path, checkpoint_every=8)
    saving.run()
    assert_equal(weights(plain), weights(saving))
    first, last = sorted((tmp_path / "checkpoints").iterdir())
    again = trainer_of(plan, resume_from=first)
    assert again.policy_steps < plan.total_policy_steps
    again.run()
    assert_equal(weights(plain), weights(again))
    ended = trainer_of(plan, resume_from=last)
    assert ended.run().counters() == saving.ledger.counters()  # there was nothing left to do
    assert_equal(weights(plain), weights(ended))


def test_random_numbers_go_on_where_they_were(tmp_path):
    torch.rand(3)
    checkpoints = Checkpoints(tmp_path, {"part": Part()})
    path = checkpoints.save(8, {})
    expected = torch.rand(3)
    torch.manual_seed(99)
    checkpoints.load(path)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_and_the_last_good_checkpoint_stays(tmp_path, bad):
    trainer = ppo_trainer(
        on_policy_plan(), folder=tmp_path, checkpoint_every=16, hooks=[NaNGuard()]
    )

    def spoil(_, losses):
        return losses.set("loss_objective", losses["loss_objective"] * bad)

    def later():
        if trainer.policy_steps == 32:
            trainer.register_op("process_loss", spoil)

    trainer.register_op("post_steps", later)
    with pytest.raises(NotFinite) as raised:
        trainer.run()
    good = tmp_path / "checkpoints" / "checkpoint-000000000032"
    assert "loss_objective is nan" in str(raised.value) or math.isinf(bad)
    assert f"the last good checkpoint is {good}" in str(raised.value)
    assert str(raised.value).startswith("after 12 gradient steps loss_")
    assert Checkpoints.latest(tmp_path / "checkpoints") == good
    assert not all(value.isfinite().all() for value in weights(trainer).values())
    restored = ppo_trainer(on_policy_plan(), resume_from=good)
    assert all(value.isfinite().all() for value in weights(restored).values())


# ---------------------------------------------------------------------- files
def test_a_file_is_written_completely_or_not_at_all(tmp_path):
    path = tmp_path / "file.txt"
    write_whole(path, "before")
    write_whole(path, "after")
    assert path.read_text() == "after"
    assert names(tmp_path) == ["file.txt"]
    with pytest.raises(NotSaved, match=r"nowhere/file\.txt cannot be written: No such file"):
        write_whole(tmp_path / "nowhere" / "file.txt", "")


def test_a_line_that_does_not_fit_is_not_there_at_all(tmp_path, monkeypatch):
    import io

    path = tmp_path / "rows.csv"
    append(path, "1,2\n")

    class Full(io.TextIOWrapper):
        def write(self, text: str) -> int:
            super().write(text[:2])
            self.flush()
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        Path, "open", lambda self, mode, **_: Full(io.FileIO(str(self), mode), newline="")
    )
    with pytest.raises(NotSaved, match=r"rows.csv cannot be written: No space left on device"):
        append(path, "3,4\n")
    monkeypatch.undo()
    assert path.read_text() == "1,2\n"
