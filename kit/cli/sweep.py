"""A sweep: settings of all runs checked before the first begins, and a table at its end."""

from __future__ import annotations

import csv
import io
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.buffers.datasets import check_metadata, folder_of
from kit.config import OfflineConfig, RunConfig, checks
from kit.config.plain import from_plain
from kit.config.plan import make_plan
from kit.dialects.base import Dialect
from kit.logging.files import from_here, write_whole
from kit.runs.saved_runs import SWEEP_TABLE
from kit.steps import SettingError
from kit.steps.table import measured, text_table

_COLUMNS = {"episode/return": "return", "evaluation/return": "evaluation"}
"""Columns of the last row that are shown, and their names here."""


def said(overrides: Sequence[str]) -> str:
    """What a run of a sweep was told, besides its seed, for its title."""
    told = map(_told, overrides)
    return ", ".join(f"{name}={value}" for name, value in told if name != "seed")


def _told(override: str) -> tuple[str, str]:
    """The name and the value of an override, without the signs that Hydra needs."""
    name, _, value = override.partition("=")
    return name.lstrip("+"), re.sub(r"\\(.)", r"\1", value)


def check_settings(
    config_class: type[RunConfig],
    values: Mapping[str, Any],
    number: int,
    overrides: Sequence[str],
    *,
    here: bool = False,
) -> None:
    """Check the settings of a run of a sweep, without making anything.

    Of what depends on the machine, only whether data sets are there, if the run is ``here``. The
    plan is made where it is told in the kit's own words: what others say depends on the algorithm,
    which ``build`` knows.

    Raises:
        SettingError: naming the run.
    """
    try:
        cfg: Any = from_plain(config_class, values)
        checks.rows_of_normalization(cfg)
        if here and isinstance(cfg, OfflineConfig):
            for name in cfg.dataset:
                check_metadata(folder_of(name))
        if hasattr(cfg, "steps") and not isinstance(cfg.steps, Dialect):
            make_plan(cfg, "")
    except SettingError as error:
        run = f"in run {number} of the sweep, {', '.join(overrides)}; none was begun"
        hint = "; ".join(filter(None, [error.hint, run]))
        raise SettingError(error.field, error.value, error.why, error.works, hint) from None


def note(
    sweep: Path, number: int, overrides: Sequence[str], trainer: Any, error: Exception | None = None
) -> None:
    """Keep what a run was told and what it reached, until all have ended; in any process.

    Args:
        sweep: folder of the sweep.
        number: of the run.
        overrides: what it was told.
        trainer: of the run; ``None`` if none was built.
        error: by which it ended.
    """
    latest: Mapping[str, Any] = {} if trainer is None else trainer.journal.latest
    reached = {name: latest[column] for column, name in _COLUMNS.items() if column in latest}
    row = {"run": number, **dict(map(_told, overrides)), **reached}
    if error is not None:
        row["error"] = " ".join(str(error).split())
    folder = getattr(trainer, "folder", None)
    row["folder"] = "" if folder is None else str(from_here(folder))
    sweep.mkdir(parents=True, exist_ok=True)
    write_whole(sweep / f"run-{number}.json", json.dumps(row))


def summary(sweep: Path) -> str:
    """The table of the runs that have ended, with the settings that differ, and errors, if any.

    It is written to ``sweep.csv``, too.
    """
    notes = sorted(sweep.glob("run-*.json"))
    rows = sorted((json.loads(path.read_text()) for path in notes), key=lambda row: row["run"])
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    names.append(names.pop(names.index("folder")))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(sweep / SWEEP_TABLE, text.getvalue())
    for path in notes:
        path.unlink()
    values = {name: {str(row.get(name, "")) for row in rows} for name in names}
    always = {*_COLUMNS.values(), "error"}
    shown = [name for name in names if len(values[name]) > 1 or name in always]
    for row in rows:
        row["error"] = textwrap.shorten(row.get("error", ""), 60, placeholder=" ...")
    lines = [tuple(_text(row.get(name, "")) for name in shown) for row in rows]
    return f"{text_table(tuple(shown), lines)}\n\nsweep: {sweep / SWEEP_TABLE}"


def _text(value: Any) -> str:
    return measured(value) if isinstance(value, float) else str(value)
