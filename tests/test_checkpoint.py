"""A checkpoint is there completely or not at all, runs no code, and brings everything back."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import json
import math
import os
import pickle
import random
import re
import shutil
import warnings
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.checkpoint import StateDictCheckpointAdapter
from torchrl.modules import EGreedyModule, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers import LRSchedulerHook

from kit.advantages import GAE
from kit.config.plain import from_plain
from kit.envs import make_env
from kit.hooks import AnnealLearningRate, Evaluator, Hook, NaNGuard, NonFiniteError, StopWhen
from kit.logging.files import WriteError, append, write_whole
from kit.modules import Categorical
from kit.steps import SettingError, StepPlan
from kit.trainer import Trainer
from kit.trainer.checkpoint import (
    Checkpoints,
    CorruptCheckpointError,
    _views_of_parameters,
    _write_checksums,
    check_whole,
    make_parts_when_loaded,
)
from kit.trainer.rng import IsolatedRNG
from kit.trainer.stages import HookError
from kit.update import Update
from tests.errors import raises_setting
from tests.fuzz.random_configs import small_config
from tests.losses import LOSSES, make_loss, minibatch_for
from tests.tiny import (
    assert_equal,
    assert_same,
    collector_of,
    off_policy_plan,
    on_policy_plan,
    ppo_parts,
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
def test_load_restores_saved_state(tmp_path):
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


@pytest.mark.parametrize(("settings", "kept"), [({}, [24, 1_000]), ({"keep": 1}, [1_000])])
def test_checkpoints_keep_newest_two_or_requested_number(settings, kept, tmp_path):
    checkpoints = Checkpoints(tmp_path, {"part": Part()}, **settings)
    for steps in (8, 16, 24, 1_000):
        checkpoints.save(steps, {})
    assert names(tmp_path) == [f"checkpoint-{steps:012}" for steps in kept]
    assert Checkpoints.latest(tmp_path) == tmp_path / "checkpoint-000000001000"


def test_latest_is_none_without_checkpoints(tmp_path):
    assert Checkpoints.latest(tmp_path) is None
    assert Checkpoints.latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_save_leaves_previous_checkpoint(tmp_path, error, monkeypatch):
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
    with pytest.raises((WriteError, KeyboardInterrupt)):
        checkpoints.save(16, {})
    assert len(saved) == 2
    assert Checkpoints.latest(tmp_path) == before
    checkpoints.load(before)
    assert first.value == 1
    monkeypatch.undo()
    assert checkpoints.save(16, {}) == Checkpoints.latest(tmp_path)
    assert names(tmp_path) == ["checkpoint-000000000008", "checkpoint-000000000016"]


def test_latest_skips_incomplete_folder(tmp_path):
    checkpoints = Checkpoints(tmp_path, {"part": Part()})
    whole = checkpoints.save(8, {})
    incomplete = tmp_path / "checkpoint-000000000016"
    (incomplete / "components").mkdir(parents=True)
    (tmp_path / ".checkpoint-000000000024.tmp").mkdir()
    with pytest.warns(
        UserWarning, match=r"^checkpoint-000000000016 is damaged: its file checksums"
    ):
        assert Checkpoints.latest(tmp_path) == whole


def test_error_of_part_is_not_reported_as_write_error(tmp_path):
    with pytest.raises(Exception, match="weights are gone") as raised:
        Checkpoints(tmp_path, {"part": Part(RuntimeError("weights are gone"))}).save(8, {})
    assert not isinstance(raised.value, WriteError)
    assert Checkpoints.latest(tmp_path) is None


# ---------------------------------------------------------------------- what is not trusted
class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "executed")


def planted(folder: Path, trap: Path) -> dict[str, Callable[[], None]]:
    """Ways to bring code into the folder of a part whose file is ``state.pt``."""
    file, bad = folder / "state.pt", {"value": Malicious(trap)}

    def in_a_folder_of_tensordict() -> None:
        nested = TensorDict({"a": torch.zeros(1), "b": NonTensorData(Malicious(trap))}, [])
        nested.memmap(folder / "state")
        (folder / "state.json").write_text('{"kind": "dict", "items": []}')
        file.unlink()
        trap.unlink(missing_ok=True)

    def behind_a_link() -> None:
        torch.save(bad, trap.with_name("outside.pt"))
        file.unlink()
        file.symlink_to(trap.with_name("outside.pt"))

    return {
        "pickled by torch": lambda: torch.save(bad, file),
        "pickled by torch, as long ago": lambda: torch.save(
            bad, file, _use_new_zipfile_serialization=False
        ),
        "pickled": lambda: file.write_bytes(pickle.dumps(bad)) and None,
        "in a folder of tensordict": in_a_folder_of_tensordict,
        "behind a link": behind_a_link,
    }


WAYS = list(planted(Path(), Path()))


@pytest.mark.parametrize("way", WAYS)
def test_load_never_executes_code(way, tmp_path):
    """Checksums are no protection: who writes the code writes them as well."""
    trap = tmp_path / "trap"
    torch.save({"value": Malicious(trap)}, tmp_path / "works.pt")
    torch.load(tmp_path / "works.pt", weights_only=False)
    assert trap.read_text() == "executed"  # the trap works, where code is allowed
    trap.unlink()
    trainer = ppo_trainer(on_policy_plan(), folder=tmp_path)
    trainer.run()
    checkpoint = Checkpoints.latest(tmp_path / "checkpoints")
    folders = sorted((checkpoint / "components").iterdir())
    assert len(folders) >= 6
    for folder in folders:
        copy = tmp_path / "copy" / folder.name / checkpoint.name
        shutil.copytree(checkpoint, copy)
        planted(copy / "components" / folder.name, trap)[way]()
        _write_checksums(copy)
        with raises_setting("checkpoint"):
            ppo_trainer(on_policy_plan(), resume_from=copy)
        assert not trap.exists(), folder
    ppo_trainer(on_policy_plan(), resume_from=checkpoint)


@pytest.mark.filterwarnings("ignore:TensorDict.load_memmap:FutureWarning")
def test_load_rejects_folder_that_torchrl_would_unpickle(tmp_path):
    trap, part = tmp_path / "trap", Part()
    path = Checkpoints(tmp_path, {"part": part}).save(8, {})
    (folder,) = path.glob("components/*-part")
    planted(folder, trap)["in a folder of tensordict"]()
    arguments = {"map_location": None, "tensor_load_kwargs": {}, "args": (), "kwargs": {}}
    with contextlib.suppress(KeyError):  # code ran before it finds no value
        StateDictCheckpointAdapter("torch").load(part, folder, **arguments)
    assert trap.read_text() == "executed"
    trap.unlink()
    _write_checksums(path)
    with raises_setting("checkpoint"):
        Checkpoints(tmp_path, {"part": part}).load(path)
    assert not trap.exists()


# ---------------------------------------------------------------------- what is damaged
def flip(file: Path, bit: int) -> None:
    """Change one bit of a file."""
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


@pytest.mark.parametrize("recipe", ["ppo", "sac", "dreamerv3"])
def test_integrity_check_detects_bit_flip_in_any_file(recipe, tmp_path):
    module = importlib.import_module(f"recipes.{recipe}")
    values = {**small_config(module.Config), "log_dir": str(tmp_path)}
    trainer = module.build(from_plain(module.Config, values))
    trainer.run()
    checkpoint = trainer.last_checkpoint
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    parts = {file.parent.name[5:] for file in files}  # without their numbers
    assert {"batches", "buffer", "loss_module", "random_numbers", "update"} <= parts
    rng, noticed, trials = np.random.default_rng(0), 0, max(100, 3 * len(files))
    for trial in range(trials):
        file = files[trial % len(files)]
        bit = int(rng.integers(8 * file.stat().st_size))
        flip(file, bit)
        with pytest.raises(CorruptCheckpointError) as raised:
            check_whole(checkpoint)
        noticed += f"its file {file.relative_to(checkpoint)} " in str(raised.value)
        flip(file, bit)
    assert noticed == trials
    check_whole(checkpoint)


def test_integrity_check_detects_bit_flip_in_checksums(tmp_path):
    path = Checkpoints(tmp_path, {"part": Part()}).save(8, {})
    sums = path / "checksums.txt"
    for bit in range(8 * sums.stat().st_size):
        flip(sums, bit)
        with pytest.raises(CorruptCheckpointError, match=re.escape("its file checksums.txt is")):
            check_whole(path)
        flip(sums, bit)
    check_whole(path)


def shortened(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def linked(file: Path) -> None:
    there = file.rename(file.parents[4] / "elsewhere.pt")
    file.symlink_to(there)


DAMAGES = {
    "has changed": shortened,
    "is missing": Path.unlink,
    "was added later": linked,
}


@pytest.mark.parametrize("what", list(DAMAGES))
def test_latest_names_damaged_file_and_uses_previous_checkpoint(what, tmp_path):
    part = Part(1)
    checkpoints = Checkpoints(tmp_path / "run", {"part": part})
    before = checkpoints.save(8, {})
    part.value = 2
    path = checkpoints.save(16, {})
    (file,) = path.glob("components/*-part/state.pt")
    DAMAGES[what](file)
    name = file.relative_to(path)
    advice = "Use another checkpoint or start a new run; this folder can be removed."
    with pytest.raises(CorruptCheckpointError) as raised:
        checkpoints.load(path)
    why = f"is damaged: its file {name} {what}"
    assert str(raised.value) == f"checkpoint='{path}' {why}. {advice}"
    assert part.value == 2  # nothing was read
    with pytest.warns(UserWarning, match=f"^{path.name} {why}; using {before.name} instead"):
        assert Checkpoints.latest(tmp_path / "run") == before
    checkpoints.load(before)
    assert part.value == 1
    # The run goes on from there: what is damaged is dropped before what is whole.
    assert checkpoints.save(12, {}) == Checkpoints.latest(tmp_path / "run")
    assert names(tmp_path / "run") == [before.name, "checkpoint-000000000012"]


def test_latest_names_newest_when_all_are_damaged(tmp_path):
    checkpoints = Checkpoints(tmp_path, {"part": Part()})
    for steps in (8, 16):
        shortened(checkpoints.save(steps, {}) / "manifest.json")
    why = r"checkpoint-000000000016' is damaged: its file manifest.json has changed"
    with pytest.raises(CorruptCheckpointError, match=why):
        Checkpoints.latest(tmp_path)


@pytest.mark.parametrize("name", ["more.pt", "components/0000-part/state.json", "state/meta.json"])
def test_error_names_added_file(name, tmp_path):
    path = Checkpoints(tmp_path, {"part": Part()}).save(8, {})
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text("{}")
    with pytest.raises(CorruptCheckpointError, match=f"its file {name} was added later"):
        Checkpoints(tmp_path, {"part": Part()}).load(path)


@pytest.mark.parametrize("what", ["a file", "the list of checksums", "the folder of checkpoints"])
def test_unreadable_file_is_not_reported_as_damaged(what, tmp_path, monkeypatch):
    path = Checkpoints(tmp_path, {"part": Part()}).save(8, {})
    (file,) = path.glob("components/*-part/state.pt")
    forbidden = {"a file": file, "the list of checksums": path / "checksums.txt"}.get(
        what, tmp_path
    )
    open_file, list_folder = io.open, os.listdir

    def refusing(call):
        def instead(name, *rest, **kwargs):
            if Path(name) == forbidden:
                raise PermissionError(errno.EACCES, "Permission denied", str(name))
            return call(name, *rest, **kwargs)

        return instead

    monkeypatch.setattr(io, "open", refusing(open_file))
    monkeypatch.setattr(os, "listdir", refusing(list_folder))
    with raises_setting("checkpoint") as refused:
        Checkpoints.latest(tmp_path)
    assert not isinstance(refused.value, CorruptCheckpointError)
    assert f"Make {forbidden} readable" in str(refused.value)
    assert "remove" not in str(refused.value)


def test_integrity_check_reads_large_file_completely(tmp_path):
    path = Checkpoints(tmp_path, {"part": Part(torch.zeros(700_000))}).save(8, {})
    (file,) = path.glob("components/*-part/state.pt")
    bits = 8 * file.stat().st_size
    assert bits > 2 * 8 * 2**20  # is read in several blocks
    for bit in (0, bits // 2, bits - 1):
        flip(file, bit)
        with pytest.raises(CorruptCheckpointError, match="has changed"):
            check_whole(path)
        flip(file, bit)
    check_whole(path)


def test_load_raises_error_of_part_unchanged(tmp_path):
    class Full(Part):
        def load_state_dict(self, state):
            raise WriteError("rows.csv cannot be written: No space left on device")

    path = Checkpoints(tmp_path, {"part": Part()}).save(8, {})
    with pytest.raises(WriteError, match=r"^rows.csv cannot be written: No space left on device$"):
        Checkpoints(tmp_path, {"part": Full()}).load(path)


def test_save_removes_leftover_folders(tmp_path):
    checkpoints = Checkpoints(tmp_path, {"part": Part()})
    path = checkpoints.save(8, {})
    path.rename(tmp_path / f".{path.name}")
    checkpoints.save(16, {})
    assert names(tmp_path) == ["checkpoint-000000000016"]


def test_load_rejects_checkpoint_of_different_parts(tmp_path):
    path = Checkpoints(tmp_path, {"part": Part()}).save(8, {})
    with raises_setting("checkpoint"):
        Checkpoints(tmp_path, {"another": Part()}).load(path)
    trainer = ppo_trainer(on_policy_plan(), folder=tmp_path / "run")
    trainer.run()
    larger = ppo_trainer(on_policy_plan()).loss_module
    for number in range(100):
        larger.register_buffer(f"more_{number}", torch.zeros(1))
    with raises_setting("checkpoint") as refused:
        Checkpoints(tmp_path, {"loss_module": larger}).load(trainer.last_checkpoint)
    assert len(refused.value.why) < 300  # PyTorch names them all


def test_load_rejects_folder_that_is_no_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, {"part": Part()})
    dropped, _, path = [checkpoints.save(steps, {}) for steps in (8, 16, 24)]
    for wrong in (tmp_path, folder, dropped):
        with raises_setting("checkpoint"):
            checkpoints.load(wrong)
    with raises_setting("checkpoint"):
        checkpoints.load(tmp_path / "elsewhere" / "nothing")
    checkpoints.load(shutil.copytree(path, tmp_path / "under another name"))


def test_manifest_records_versions_and_load_accepts_others(tmp_path):
    path = Checkpoints(tmp_path, {"part": Part(5)}).save(8, {})
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["versions"]["torch"] == str(torch.__version__)
    manifest["versions"]["torch"] = "2.0.0"
    (path / "manifest.json").write_text(json.dumps(manifest))
    _write_checksums(path)
    part = Part()
    Checkpoints(tmp_path, {"part": part}).load(path)
    assert part.value == 5


# ---------------------------------------------------------------------- of a trainer
def test_resume_rejects_trainer_without_saved_part(tmp_path):
    plan = on_policy_plan()
    parts = ppo_parts(plan)
    normalised = make_env("CartPole-v1", plan.num_envs, normalize_observation=True)
    parts["collector"] = collector_of(plan, normalised, parts["collector"].policy)
    before = Trainer(plan, **parts, folder=tmp_path)
    before.run()
    with raises_setting("checkpoint"):
        ppo_trainer(plan, resume_from=before.last_checkpoint)


def test_new_run_rejects_folder_with_checkpoints(tmp_path):
    ppo_trainer(on_policy_plan(), folder=tmp_path).run()
    before = names(tmp_path / "checkpoints")
    with raises_setting("folder"):
        ppo_trainer(on_policy_plan(), folder=tmp_path).run()
    assert names(tmp_path / "checkpoints") == before


def test_resume_warns_about_missing_hook(tmp_path):
    stop = StopWhen("policy_steps", reached=32)
    before = ppo_trainer(hooks=[stop], folder=tmp_path, log_every=16)
    before.run()
    assert before.policy_steps == 32
    with pytest.warns(UserWarning, match="this trainer has no hook stop_when"):
        again = ppo_trainer(resume_from=before.last_checkpoint)
    assert again.run().policy_steps == 64


def test_hook_added_after_resume_restores_its_state(tmp_path):
    def scheduled(**how):
        trainer = ppo_trainer(log_every=16, **how)
        rate = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda n: 1 + n)
        return trainer.add(LRSchedulerHook(rate))

    whole = scheduled(folder=tmp_path, checkpoint_every=16)
    whole.run()
    (before, _) = sorted((tmp_path / "checkpoints").iterdir())
    with pytest.warns(UserWarning, match=r"no hook lr_scheduler.*Add the hook before"):
        resumed = scheduled(resume_from=before)
    assert resumed.optimizer.param_groups[0]["lr"] == 1e-3 * (1 + resumed.ledger.iterations)
    resumed.run()
    assert_same(resumed.loss_module.state_dict(), whole.loss_module.state_dict())


class Learns(Hook):
    """Trains a network of its own."""

    def register(self, trainer, name=None):
        self.network = nn.Linear(4, 1)
        self.optimizer = torch.optim.Adam(self.network.parameters())
        super().register(trainer, name)


class Keeps(Learns):
    """The same, in checkpoints."""

    def state_dict(self):
        return {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}


def test_trainer_warns_once_about_unsaved_hook_optimizer(tmp_path):
    def said(hook, folder):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ppo_trainer(hooks=[hook], folder=folder).run()
        return [text for one in told if "resets the optimiser" in (text := str(one.message))]

    (text,) = said(Learns(), tmp_path)
    assert text.startswith("Hook Learns has an optimiser, but its state_dict() is empty")
    trainer = ppo_trainer()
    annealed = AnnealLearningRate(trainer.optimizer, "linear")  # of the update
    assert said(Keeps(), tmp_path / "2") == said(Learns(), None) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.add(annealed)
        trainer.folder = tmp_path / "3"
        trainer.save()


@pytest.mark.parametrize("stage", ["batch_process", "pre_epoch", "post_optim", "post_epoch"])
def test_save_within_iteration_raises_error_with_advice(stage, tmp_path):
    trainer = ppo_trainer(folder=tmp_path, checkpoint_every=16)

    def save(*_):
        if trainer.ledger.iterations == 1:
            trainer.save()

    trainer.register_op(stage, save)
    with pytest.raises(HookError, match=r"iteration=2 has begun .*trainer\.request_checkpoint\(\)"):
        trainer.run()
    last = ppo_trainer(resume_from=trainer.last_checkpoint)
    assert last.ledger.iterations == 1


@pytest.mark.parametrize("stage", ["setup", "post_steps", "log_row", "shutdown"])
def test_a_hook_saves_between_iterations(stage, tmp_path):
    trainer = ppo_trainer(folder=tmp_path)
    saved = []
    trainer.register_op(stage, lambda *_: saved.append(trainer.save()))
    trainer.run()
    assert saved
    assert ppo_trainer(resume_from=trainer.last_checkpoint).ledger.iterations == 4


def lazy_trainer(plan: StepPlan, **parts: Any) -> Trainer:
    """PPO whose networks know their sizes from the first batch on."""
    torch.manual_seed(0)
    env = make_env("CartPole-v1", plan.num_envs, seed=0)
    logits = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(2))
    actor = ProbabilisticActor(
        TensorDictModule(logits, ["observation"], ["logits"]), ["logits"], ["action"],
        distribution_class=Categorical, return_log_prob=True,
    )  # fmt: skip
    critic = ValueOperator(nn.LazyLinear(1), in_keys=["observation"])
    loss = ClipPPOLoss(actor, critic)
    made = {
        "collector": collector_of(plan, env, actor, seed=0), "progress": False,
        "advantage": GAE(gamma=0.99, value_network=critic),
        "update": Update(loss, torch.optim.Adam(loss.parameters(), lr=1e-3)),
    }  # fmt: skip
    return Trainer(plan, **{**made, **parts})


@pytest.mark.parametrize("trainer_of", [ppo_trainer, sac_trainer, lazy_trainer])
def test_saving_preserves_run_and_loading_restores_it(trainer_of, tmp_path):
    plan = off_policy_plan() if trainer_of is sac_trainer else on_policy_plan()
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
    played = trainer_of(plan)
    played.load_policy(last)
    assert_equal(weights(plain), weights(played))
    ended = trainer_of(plan, resume_from=last)
    assert ended.run().counters() == saving.ledger.counters()  # there was nothing left to do
    assert_equal(weights(plain), weights(ended))


class Shift(nn.Module):
    """A part of a policy that no loss trains: a weight, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.version = nn.Parameter(torch.zeros(())), 0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return (observation + self.weight)[..., 0].long().clamp(0, 1)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": self.version}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.version = state["version"]

    @property
    def now(self) -> tuple[float, int]:
        return self.weight.item(), self.version


def shifting(**parts: Any) -> tuple[Trainer, list[Shift], EGreedyModule]:
    """A run that trains nothing, with parts of the policies that act and are measured; noise."""
    plan = off_policy_plan(learning_starts=0, replay_ratio=None)
    env, shifts = make_env("CartPole-v1", 1), [Shift(), Shift()]
    acts, measured = (TensorDictModule(one, ["observation"], ["action"]) for one in shifts)
    noise = EGreedyModule(env.action_spec, eps_init=0.5, eps_end=0.1)
    trainer = Trainer(
        plan, collector=collector_of(plan, env, TensorDictSequential(acts, noise)),
        evaluate=Evaluator(make_env("CartPole-v1", 1), measured), loss_module=nn.Module(),
        progress=False, **parts,
    )  # fmt: skip
    return trainer, shifts, noise


def changed(folder: Path) -> Trainer:
    """Such a run, in which something has changed all of these."""
    trainer, shifts, noise = shifting(folder=folder)
    for number, shift in enumerate(shifts, 1):
        shift.weight.data.fill_(number)
        shift.version = 10 * number
    noise.eps.fill_(0.25)
    trainer.run()
    return trainer


def test_resume_restores_untrained_policy_parts(tmp_path):
    checkpoint = changed(tmp_path).last_checkpoint
    _, shifts, noise = shifting(resume_from=checkpoint)
    assert [shift.now for shift in shifts] == [(1.0, 10), (2.0, 20)]
    assert float(noise.eps) == 0.25


@pytest.mark.parametrize("alone", [True, False])
def test_saved_policy_includes_untrained_parts_without_noise(alone, tmp_path):
    saved = changed(tmp_path)
    checkpoint = saved.save_policy(tmp_path / "policy") if alone else saved.last_checkpoint
    trainer, shifts, noise = shifting()
    trainer.load_policy(checkpoint)
    assert [shift.now for shift in shifts] == [(1.0, 10), (2.0, 20)]
    assert float(noise.eps) == 0.5
    trainer.shutdown()


def test_load_restores_rng_state(tmp_path):
    numbers = IsolatedRNG()
    checkpoints = Checkpoints(tmp_path, {"random_numbers": numbers})

    def draw() -> list[float]:
        return [*torch.rand(2).tolist(), *np.random.random(2), random.random()]

    with numbers:
        draw()
        path = checkpoints.save(8, {})
        expected = draw()
        checkpoints.load(path)
        assert draw() == expected
    checkpoints.load(path)
    outside = torch.get_rng_state()
    with numbers, numbers:  # as a stage within a run
        assert draw() == expected
    assert torch.equal(torch.get_rng_state(), outside)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_loss_stops_run_with_last_good_checkpoint(tmp_path, bad):
    trainer = ppo_trainer(
        on_policy_plan(), folder=tmp_path, checkpoint_every=16, hooks=[NaNGuard()]
    )

    def spoil(_, losses):
        return losses.set("loss_objective", losses["loss_objective"] * bad)

    def later():
        if trainer.policy_steps == 32:
            trainer.register_op("process_loss", spoil)

    trainer.register_op("post_steps", later)
    with pytest.raises(NonFiniteError) as raised:
        trainer.run()
    good = tmp_path / "checkpoints" / "checkpoint-000000000032"
    assert "loss_objective is nan" in str(raised.value) or math.isinf(bad)
    assert f"The last good checkpoint is {good}" in str(raised.value)
    assert str(raised.value).startswith("after 12 gradient steps loss_")
    assert Checkpoints.latest(tmp_path / "checkpoints") == good
    assert not all(value.isfinite().all() for value in weights(trainer).values())
    restored = ppo_trainer(on_policy_plan(), resume_from=good)
    assert all(value.isfinite().all() for value in weights(restored).values())


# ---------------------------------------------------------------------- files
def test_atomic_write_replaces_file(tmp_path):
    path = tmp_path / "file.txt"
    write_whole(path, "before")
    write_whole(path, "after")
    assert path.read_text() == "after"
    assert names(tmp_path) == ["file.txt"]
    with pytest.raises(WriteError, match=r"nowhere/file\.txt cannot be written: No such file"):
        write_whole(tmp_path / "nowhere" / "file.txt", "")


def test_atomic_write_keeps_old_file_when_disk_is_full(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    write_whole(path, "before")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(WriteError, match="No space left on device"):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert names(tmp_path) == ["file.txt"]


def test_append_leaves_no_partial_line_when_disk_is_full(tmp_path, monkeypatch):
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
    with pytest.raises(WriteError, match=r"rows.csv cannot be written: No space left on device"):
        append(path, "3,4\n")
    monkeypatch.undo()
    assert path.read_text() == "1,2\n"


class Remembers:
    """A hook with a state, whatever it is."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def register(self, trainer: Any, name: str = "remembers") -> None:
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


@pytest.mark.parametrize(
    "value",
    [np.float32(1.5), np.arange(3), [{"best": np.int64(3)}], deque([1]), object(), lambda: 0],
)
def test_save_rejects_state_that_cannot_be_loaded(tmp_path, value):
    trainer = ppo_trainer(hooks=[Remembers(value)], folder=tmp_path)
    with pytest.raises(
        SettingError, match=r"state of hook remembers\.value.*which checkpoints cannot load"
    ):
        trainer.run()
    assert trainer.policy_steps == 0
    assert Checkpoints.latest(tmp_path / "checkpoints") is None


@pytest.mark.parametrize("value", [1.5, {3: {"a"}}, Counter("aab"), torch.Size([3]), torch.int8])
def test_checkpoint_restores_plain_values_of_hook(tmp_path, value):
    trainer = ppo_trainer(hooks=[Remembers(value)], folder=tmp_path)
    trainer.run()
    again = Remembers()
    ppo_trainer(hooks=[again], folder=tmp_path, resume_from=trainer.last_checkpoint)
    assert (type(again.value), again.value) == (type(value), value)


def test_checkpoint_restores_tensordicts_of_hook(tmp_path):
    inner = TensorDict({"b": torch.ones(3, 2, dtype=torch.bool)}, [3, 2])
    value = {
        "rows": [TensorDict({"a": torch.arange(3.0), "inner": inner}, [3])],
        "empty": TensorDict(),
    }
    trainer = ppo_trainer(hooks=[Remembers(value)], folder=tmp_path)
    trainer.run()
    again = Remembers()
    ppo_trainer(hooks=[again], folder=tmp_path, resume_from=trainer.last_checkpoint)
    assert_same(again.value, value)
    assert again.value["rows"][0].batch_size == (3,)
    assert again.value["rows"][0]["inner"].batch_size == (3, 2)


class Stateless(Remembers):
    """Cannot give its state."""

    def state_dict(self) -> dict[str, Any]:
        raise KeyError("best")


def test_trainer_checks_hook_state_before_first_iteration(tmp_path):
    trainer = ppo_trainer(hooks=[Stateless()], folder=tmp_path)
    with pytest.raises(KeyError, match="best"):
        trainer.run()
    assert trainer.policy_steps == 0


@pytest.mark.parametrize("name", LOSSES)
def test_loss_loads_state_of_called_loss(name):
    called, other = make_loss(name), make_loss(name)
    called(minibatch_for(name))
    make_parts_when_loaded(other)  # as a trainer does
    other.load_state_dict(called.state_dict())
    assert_same(other.state_dict(), called.state_dict())


def test_only_expanded_buffers_are_views_of_parameters():
    loss = nn.Module()
    loss.scale = nn.Parameter(torch.ones(()))
    loss.weight = nn.Parameter(torch.ones(3))
    loss.register_buffer("expanded", loss.scale.detach().expand(2))
    loss.register_buffer("alike", loss.weight.detach())
    assert _views_of_parameters(loss) == ["expanded"]
