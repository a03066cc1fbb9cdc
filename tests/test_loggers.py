"""Rows of metrics arrive whole, once and in order, wherever they are written."""

from __future__ import annotations

import csv
import errno
import json
import struct
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from kit.experiment import EnvConfig
from kit.hooks import StopWhen
from kit.logging.csv_file import read_rows
from kit.logging.loggers import (
    CsvLogger,
    LoggerError,
    RowLogger,
    TensorBoardLogger,
    TorchRLLogger,
    WandbLogger,
    make_loggers,
)
from kit.logging.metrics_recorder import MetricsRecorder
from kit.runs.saved_runs import read_config
from kit.steps import StepLedger
from kit.steps.settings import OnPolicySteps
from recipes.ppo import Config, build
from tests.errors import raises_setting
from tests.tiny import Rows, on_policy_plan, ppo_trainer
from tests.waiting import wait_until

AXES = ["policy_steps", "env_steps", "gradient_steps", "time/seconds"]


# ---------------------------------------------------------------------- CSV
def test_csv_logger_writes_one_line_per_row_with_exact_values(tmp_path):
    logger = CsvLogger(tmp_path)
    logger.start()
    logger.log_row({"policy_steps": 8, "train/loss": 0.1, "time/seconds": 2.5})
    logger.log_row({"policy_steps": 16, "train/loss": 1 / 3, "time/seconds": 5.0})
    assert (tmp_path / "metrics.csv").read_text() == (
        "policy_steps,train/loss\n8,0.1\n16,0.3333333333333333\n"
    )
    assert (tmp_path / "times.csv").read_text() == "policy_steps,time/seconds\n8,2.5\n16,5.0\n"


def test_csv_logger_adds_column_for_new_name(tmp_path):
    logger = CsvLogger(tmp_path)
    logger.start()
    logger.log_row({"policy_steps": 8, "a": 1})
    logger.log_row({"policy_steps": 16, "b": float("nan"), "c": float("inf")})
    logger.log_row({"policy_steps": 24, "a": 2})
    assert (tmp_path / "metrics.csv").read_text() == (
        "policy_steps,a,b,c\n8,1,,\n16,,nan,inf\n24,2,,\n"
    )


def test_csv_logger_escapes_commas_and_quotes_in_names(tmp_path):
    logger = CsvLogger(tmp_path)
    logger.start()
    logger.log_row({'a "b", c': 1})
    with (tmp_path / "metrics.csv").open() as file:
        assert list(csv.DictReader(file)) == [{'a "b", c': "1"}]


def test_csv_logger_drops_rows_after_loaded_checkpoint(tmp_path):
    logger = CsvLogger(tmp_path)
    logger.start()
    logger.log_row({"policy_steps": 8, "a": 1})
    state = logger.state_dict()
    logger.log_row({"policy_steps": 16, "b": 2})
    again = CsvLogger(tmp_path)
    again.load_state_dict(state)
    assert (tmp_path / "metrics.csv").read_text() == "policy_steps,a\n8,1\n"
    again.log_row({"policy_steps": 16, "a": 3})
    assert (tmp_path / "metrics.csv").read_text() == "policy_steps,a\n8,1\n16,3\n"


# ---------------------------------------------------------------------- a folder that has rows
def trainer_in(where: Path, **parts: Any) -> Any:
    return ppo_trainer(logger=CsvLogger(where), log_every=16, **parts)


@pytest.mark.parametrize("left", ["metrics.csv", "times.csv"])
def test_run_rejects_folder_with_rows_of_earlier_run(left, tmp_path):
    trainer_in(tmp_path).run()
    for path in tmp_path.iterdir():
        if path.name != left:
            path.unlink()
    before = (tmp_path / left).read_bytes()
    with raises_setting("folder"):
        trainer_in(tmp_path).run()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {left: before}


def test_run_accepts_folder_with_header_but_no_rows(tmp_path):
    (tmp_path / "metrics.csv").write_text("policy_steps,loss\n")
    trainer_in(tmp_path).run()
    assert [row["policy_steps"] for row in read_rows(tmp_path)] == [16, 32, 48, 64]


def test_finished_run_keeps_rows_when_run_again(tmp_path):
    trainer = trainer_in(tmp_path)
    trainer.run()
    trainer.run()
    assert [row["policy_steps"] for row in read_rows(tmp_path)] == [16, 32, 48, 64]


def test_run_resumed_before_first_row_drops_existing_rows(tmp_path):
    first = trainer_in(tmp_path, folder=tmp_path, checkpoint_every=64)
    saved = first.save()
    first.run()
    trainer_in(tmp_path, folder=tmp_path, checkpoint_every=64, resume_from=saved).run()
    assert [row["policy_steps"] for row in read_rows(tmp_path)] == [16, 32, 48, 64]


# ---------------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        ("csv", [CsvLogger]),
        ("none", [CsvLogger]),
        ("wandb", [CsvLogger, WandbLogger]),
        ("tensorboard, wandb", [CsvLogger, TensorBoardLogger, WandbLogger]),
        (["csv", "tensorboard"], [CsvLogger, TensorBoardLogger]),
        ("wandb,tensorboard,wandb", [CsvLogger, WandbLogger, TensorBoardLogger]),
    ],
)
def test_make_loggers_resolves_names_and_always_adds_csv(names, kinds, tmp_path):
    assert [type(logger) for logger in make_loggers(names, tmp_path)] == kinds
    assert not list(tmp_path.iterdir())  # nothing is written before the run begins


def test_make_loggers_rejects_unknown_name(tmp_path):
    with raises_setting("logger"):
        make_loggers("csv,tensorbord", tmp_path)


# ---------------------------------------------------------------------- a whole run
@pytest.fixture
def nobody(tmp_path, monkeypatch):
    """Nobody is logged in to W&B, and whoever asks fails."""

    def asked(*_: Any) -> str:
        raise AssertionError("it asked")

    for name in (
        "WANDB_API_KEY",
        "WANDB_MODE",
        "WANDB_PROJECT",
        "WANDB_NAME",
        "WANDB_DIR",
        "NETRC",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr("getpass.getpass", asked)


def records(run: Path) -> list[tuple[str, Any]]:
    """What W&B has written for its server, once its own process has written all of it."""
    *_, path = sorted((run / "wandb").glob("offline-run-*/*.wandb"))  # named after the time
    wait_until(lambda: [kind for kind, _ in parsed(path)][-1:] == ["exit"], "W&B finishes its log")
    return parsed(path)


def parsed(path: Path) -> list[tuple[str, Any]]:
    """Read a log in LevelDB's format of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    raw, place, whole, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(raw):
        left = 32_768 - place % 32_768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, place)
        if place + 7 + length > len(raw):
            break
        whole += raw[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record.FromString(whole)
            name = record.WhichOneof("record_type")
            found.append((name, getattr(record, name)))
            whole = b""
    return found


def items(update: Any) -> dict[str, Any]:
    """Names and values of a history row, a summary or a configuration."""
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in update}


def rows_in(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def config(tmp_path: Path, **changes: Any) -> Config:
    steps = OnPolicySteps(
        total_policy_steps=64, steps_per_env=8, update_epochs=1, minibatch_size=8,
        evaluation_every=32, evaluation_episodes=1,
    )  # fmt: skip
    return Config(
        env=EnvConfig(num_envs=2), steps=steps, hidden_sizes=[8], log_dir=str(tmp_path / "runs"),
        progress=False, log_every=16, checkpoint_every=32, **changes,
    )  # fmt: skip


@pytest.mark.usefixtures("nobody")
def test_csv_wandb_and_tensorboard_log_complete_run(tmp_path):
    trainer = build(config(tmp_path, logger="wandb,tensorboard"))
    ledger = trainer.run()
    run = trainer.folder
    written = rows_in(run / "metrics.csv")
    assert [row["policy_steps"] for row in written] == ["16", "32", "48", "64"]
    assert set(StepLedger().counters()) <= set(written[0])

    found = records(run)
    history = [items(record.item) for name, record in found if name == "history"]
    timed = rows_in(run / "times.csv")
    for row, times, logged in zip(written, timed, history, strict=True):
        expected = {name: float(value) for name, value in {**row, **times}.items() if value}
        mine = {name: value for name, value in logged.items() if not name.startswith("_")}
        assert mine == expected

    metrics = [record for name, record in found if name == "metric"]
    named = [metric for metric in metrics if metric.name]
    assert [metric.name for metric in named[: len(AXES)]] == AXES
    assert {metric.step_metric for metric in named[len(AXES) :]} <= {"policy_steps"}  # of old W&B
    (others,) = [metric for metric in metrics if metric.glob_name]
    assert (others.glob_name, others.step_metric) == ("*", "policy_steps")
    assert set(AXES) <= set(history[0])  # so that any of them can be the axis

    settings: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for name, record in found:
        if name == "config":
            settings |= items(record.update)
        if name == "summary":
            summary |= items(record.update)
    assert {name: settings[name] for name in read_config(run)} == read_config(run)
    assert summary["plan"] == trainer.plan.table()
    assert summary["ledger"] == trainer.plan.table(ledger)
    files = {entry.path for name, record in found if name == "files" for entry in record.files}
    assert {"plan.txt", "ledger.txt"} <= files

    scalars = tensorboard_scalars(run)
    assert set(scalars) == {name for row in history for name in row if name[0] != "_"}
    assert scalars["policy_steps"] == [(n, float(n)) for n in (16, 32, 48, 64)]
    assert [step for step, _ in scalars["evaluation/return"]] == [32, 64]
    texts = {name: textwrap.dedent(text) for name, text in tensorboard_texts(run).items()}
    assert texts == {"plan": trainer.plan.table(), "ledger": trainer.plan.table(ledger)}


def tensorboard_events(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Hyperparameters have a folder of their own below.
    folder = min((path.parent for path in run.rglob("events.out.*")), key=lambda p: len(p.parts))
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def tensorboard_texts(run: Path) -> dict[str, str]:
    events = tensorboard_events(run)
    shown = {tag: events.Tensors(tag)[-1].tensor_proto for tag in events.Tags()["tensors"]}
    return {tag.removesuffix("/text_summary"): t.string_val[0].decode() for tag, t in shown.items()}


def tensorboard_scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = tensorboard_events(run)
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


class Stops:
    """Raises in an iteration after a checkpoint."""

    def __init__(self, policy_steps=48):
        self.policy_steps = policy_steps

    def register(self, trainer, name="stops"):
        trainer.register_op("batch_process", lambda _: self.look(trainer))

    def look(self, trainer):
        if trainer.policy_steps == self.policy_steps:
            raise OSError("a power cut")


@pytest.mark.usefixtures("nobody")
def test_wandb_logs_videos_at_their_steps(tmp_path):
    pytest.importorskip("pygame")
    pytest.importorskip("moviepy")
    trainer = build(config(tmp_path, logger="wandb", video_every=32))
    trainer.run()
    history = [items(row.item) for kind, row in records(trainer.folder) if kind == "history"]
    shown = [row for row in history if "evaluation/video/path" in row]
    assert [row["policy_steps"] for row in shown] == [32, 64]
    for row in shown:
        (media,) = trainer.folder.glob(f"wandb/offline-run-*/files/{row['evaluation/video/path']}")
        video = trainer.folder / "videos" / f"{row['policy_steps']}.mp4"
        assert media.read_bytes() == video.read_bytes()


@pytest.mark.usefixtures("nobody")
def test_wandb_logs_policy_as_model_artifact(tmp_path):
    trainer = build(config(tmp_path, logger="wandb", save_policy=True))
    trainer.run()
    found = records(trainer.folder)
    (run,) = [record for kind, record in found if kind == "run"][:1]
    requests = [record for kind, record in found if kind == "request"]
    logged = [r.log_artifact.artifact for r in requests if r.HasField("log_artifact")]
    logged += [record for kind, record in found if kind == "artifact"]
    (model,) = logged
    assert (model.type, model.name) == ("model", f"policy-{run.run_id}")
    counts = json.loads(model.metadata)
    assert {name: counts[name] for name in trainer.ledger.counters()} == trainer.ledger.counters()
    folder = trainer.folder / "policy"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {entry.path for entry in model.manifest.contents} == files >= {"config.yaml"}


@pytest.mark.usefixtures("nobody")
def test_resumed_run_continues_same_wandb_run(tmp_path, monkeypatch):
    begun: list[dict[str, Any]] = []
    import wandb

    init = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **given: begun.append(given) or init(**given))
    first = build(config(tmp_path, logger="wandb"), hooks=[Stops()])
    with pytest.raises(RuntimeError, match="a power cut"):
        first.run()
    build(config(tmp_path, logger="wandb", resume=str(first.folder))).run()
    assert [given["mode"] for given in begun] == ["offline", "offline"]
    assert begun[0]["id"] == begun[1]["id"]
    assert {given["resume"] for given in begun} <= {"allow", "must", None}
    assert begun[1]["resume"] in ("allow", "must")
    assert begun[0]["name"] == "ppo CartPole-v1 s0"
    written = records(first.folder)  # the newest log is whole
    steps = [items(row.item)["policy_steps"] for kind, row in written if kind == "history"]
    assert steps == [16, 32, 48, 64]


@pytest.mark.usefixtures("nobody")
def test_logger_added_on_resume_receives_earlier_rows(tmp_path):
    first = build(config(tmp_path), hooks=[Stops()])
    with pytest.raises(RuntimeError, match="a power cut"):
        first.run()
    again = build(config(tmp_path, logger="wandb", resume=str(first.folder)))
    again.run()
    found = [items(row.item) for kind, row in records(first.folder) if kind == "history"]
    saved = rows_in(first.folder / "metrics.csv")
    assert len(found) == len(saved) == 4
    for row, line in zip(found, saved):
        assert {name: float(row[name]) for name, text in line.items() if text} == {
            name: float(text) for name, text in line.items() if text
        }
        assert row["time/seconds"] > 0


def test_logger_that_mutates_row_does_not_affect_others():
    class Greedy(RowLogger):
        def log_row(self, row):
            row.clear()

    after, seen = Rows(), []
    trainer = ppo_trainer(logger=[Greedy(), after])
    trainer.register_op("log_row", lambda row: seen.append(dict(row)))
    trainer.run()
    assert after.rows == seen
    assert [row["policy_steps"] for row in seen][-1] == 64


def test_logger_added_on_resume_receives_settings_and_plan(tmp_path):
    before, new = MetricsRecorder([CsvLogger(tmp_path)]), Rows()
    before.start(0, {"lr": 1}, "a plan")
    resumed = MetricsRecorder([CsvLogger(tmp_path), new])
    resumed.load_state_dict(before.state_dict())
    resumed.start(8, {"lr": 1}, "a plan")
    assert (new.config, new.texts) == ({"lr": 1}, {"plan": "a plan"})


# ---------------------------------------------------------------------- W&B
@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize("logged_in", [True, False, "raises"])
def test_wandb_is_online_only_when_logged_in(logged_in, monkeypatch, tmp_path):
    import wandb

    given: dict[str, Any] = {}

    def login(*, prompt: bool) -> bool:
        assert prompt is False
        if logged_in == "raises":
            raise wandb.errors.AuthenticationError("the key has expired")
        return bool(logged_in)

    class Run:
        id = "1234"

        def define_metric(self, *args: Any, **kwargs: Any) -> None:
            pass

    monkeypatch.setattr(wandb, "login", login)
    monkeypatch.setattr(wandb, "init", lambda **settings: given.update(settings) or Run())
    WandbLogger(tmp_path / "run").start()
    assert given.get("mode") == (None if logged_in is True else "offline")


@pytest.mark.usefixtures("nobody")
def test_wandb_uses_recorder_step_counter_as_step_metric(tmp_path):
    logger = WandbLogger(tmp_path)
    MetricsRecorder([logger], "gradient_steps").start(0, {}, "")
    logger.close()
    metrics = [record for name, record in records(tmp_path) if name == "metric"]
    (others,) = [metric for metric in metrics if metric.glob_name]
    assert (others.glob_name, others.step_metric) == ("*", "gradient_steps")


# ---------------------------------------------------------------------- TensorBoard
def test_tensorboard_shows_rows_once_after_resume(tmp_path):
    first = build(config(tmp_path, logger="tensorboard"), hooks=[Stops(64)])
    with pytest.raises(RuntimeError, match="a power cut"):
        first.run()  # with a row of 48 policy steps, after the checkpoint of 32
    time.sleep(1.1)  # names of event files have seconds
    build(config(tmp_path, logger="tensorboard", resume=str(first.folder))).run()
    scalars = tensorboard_scalars(first.folder)
    assert [step for step, _ in scalars["policy_steps"]] == [16, 32, 48, 64]


def test_tensorboard_shows_rows_once_after_resume_without_it(tmp_path):
    stop = {"metric": "policy_steps"}
    hooks = [StopWhen(reached=16, **stop)], [StopWhen(reached=48, **stop)], []
    resume = None
    for logger, hook in zip(("tensorboard", "csv", "tensorboard"), hooks):
        trainer = build(config(tmp_path, logger=logger, resume=resume), hooks=hook)
        trainer.run()
        resume = str(trainer.folder)
        time.sleep(1.1)  # names of event files have seconds
    scalars = tensorboard_scalars(trainer.folder)
    assert [step for step, _ in scalars["policy_steps"]] == [16, 32, 48, 64]


# ---------------------------------------------------------------------- errors
class Broken(RowLogger):
    def __init__(self, call):
        self.call = call

    def log_row(self, row):
        if self.call == "log_row":
            raise ValueError("no such table")

    def close(self):
        if self.call == "close":
            raise ValueError("no such table")


@pytest.mark.parametrize("call", ["log_row", "close"])
def test_error_names_logger_that_raises(call):
    why = r"^logger Broken raised ValueError: no such table \(test_loggers.py, line \d+\)$"
    with pytest.raises(LoggerError, match=why):
        ppo_trainer(logger=[Rows(), Broken(call), Rows()]).run()


# ---------------------------------------------------------------------- TorchRL's
def test_torchrl_logger_receives_rows(tmp_path):
    from torchrl.record.loggers.csv import CSVLogger as TorchRLCsv

    theirs = TorchRLCsv("here", log_dir=str(tmp_path))
    ppo_trainer(on_policy_plan(), logger=TorchRLLogger(theirs), log_every=16).run()
    logged = (tmp_path / "here" / "scalars" / "gradient_steps.csv").read_text().split()
    assert logged == ["16,4.0", "32,8.0", "48,12.0", "64,16.0"]


def test_tensorboard_raises_logger_error_when_disk_is_full(tmp_path):
    """Its thread's error, raised again in each later call, must not be chained to itself."""
    logger = TensorBoardLogger(tmp_path)
    journal = MetricsRecorder([logger])
    journal.start(0, {}, "plan")
    error = OSError(errno.ENOSPC, "No space left on device")
    logger.logger.experiment.file_writer.event_writer._async_writer._worker.exception = error
    with pytest.raises(LoggerError, match=r"TensorboardLogger raised OSError: .*No space left"):
        journal.write_row({"policy_steps": 8}, [])
    with pytest.raises(LoggerError, match=r"TensorboardLogger raised OSError: .*No space left"):
        journal.close("ledger")
