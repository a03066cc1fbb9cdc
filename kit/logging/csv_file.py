"""The CSV files of a run: its rows are written to them, and read from them."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.logging.files import append, as_folder, write_whole
from kit.steps import SettingError

Row = Mapping[str, float | int]

FILES = ("metrics", "times")
"""Names of the files: times differ from run to run, all else does not."""


def read_rows(folder: Path | str) -> list[dict[str, float | int]]:
    """Return the rows in a run folder, with their times.

    Raises:
        SettingError: if there are none.
    """
    files = [CsvFile(as_folder(folder) / f"{name}.csv") for name in FILES]
    rows = joined(*(file.all_rows() for file in files))
    if not rows:
        raise SettingError("folder", str(folder), "has no rows", "give the folder of a run")
    return rows


def joined(
    metrics: Sequence[dict[str, float | int]], times: Sequence[dict[str, float | int]]
) -> list[dict[str, float | int]]:
    """Rows with their times, where each has its own."""
    if len(times) != len(metrics):
        times = [{} for _ in metrics]
    return [row | spent for row, spent in zip(metrics, times)]


class CsvFile:
    """A CSV file of growing columns.

    Args:
        path: path of the file, which is written with the first row.

    Attributes:
        columns: names of the columns, in order of their first value.
        rows: number of rows, including those before a resume.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self.rows = 0

    def refuse_earlier_rows(self) -> None:
        """Raise SettingError if the file has rows of another run, which would be lost."""
        if self._read():
            why = f"has the rows of an earlier run ({self.path.name}), which would be lost"
            works = "give another folder, or resume that run"
            raise SettingError("folder", str(self.path.parent), why, works)

    def append(self, row: Row) -> None:
        """Add a row; names not seen before become new columns."""
        if new := [name for name in row if name not in self.columns]:
            before = self._read()[: self.rows]
            self.columns += new
            write_whole(self.path, as_csv(self.columns, before))
        append(self.path, as_csv(self.columns, [row], header=False))
        self.rows += 1

    def all_rows(self) -> list[dict[str, float | int]]:
        """The rows in the file, whoever wrote them."""
        return [{name: _number(text) for name, text in row.items() if text} for row in self._read()]

    def _read(self) -> list[dict[str, str]]:
        """The rows in the file as texts, without a line that is not written to its end yet."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        return list(csv.DictReader(io.StringIO(whole, newline="")))

    def state_dict(self) -> dict[str, Any]:
        """Columns and number of rows."""
        return {"columns": list(self.columns), "rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`, dropping the rows written later."""
        self.columns, self.rows = list(state_dict["columns"]), int(state_dict["rows"])
        if self.columns:  # in a file of its own: the present one may have another name elsewhere
            write_whole(self.path, as_csv(self.columns, self._read()[: self.rows]))


def as_csv(
    columns: Sequence[str], rows: Sequence[Mapping[str, Any]], *, header: bool = True
) -> str:
    """Return rows as the text of a CSV file; missing values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _number(text: str) -> float | int:
    """An integer as an integer, anything else as a float."""
    return int(text) if text.lstrip("-").isdecimal() else float(text)
