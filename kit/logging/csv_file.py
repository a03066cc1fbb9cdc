"""CSV files of metrics, to which new columns can be added."""

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
"""Names of the CSV files. Only ``times`` differs between identical runs."""


def read_rows(folder: Path | str) -> list[dict[str, float | int]]:
    """Return the rows of metrics and times in a run folder.

    Raises:
        SettingError: if the folder contains no rows.
    """
    files = [CsvFile(as_folder(folder) / f"{name}.csv") for name in FILES]
    rows = joined(*(file.all_rows() for file in files))
    if not rows:
        raise SettingError(
            "folder", str(folder), "contains no rows of metrics", "pass a run folder"
        )
    return rows


def joined(
    metrics: Sequence[dict[str, float | int]], times: Sequence[dict[str, float | int]]
) -> list[dict[str, float | int]]:
    """Merge rows of metrics with rows of times. Omit the times if the row counts differ."""
    if len(times) != len(metrics):
        times = [{} for _ in metrics]
    return [row | spent for row, spent in zip(metrics, times)]


class CsvFile:
    """A CSV file to which columns can be added.

    Args:
        path: path of the file, which is created with the first row.

    Attributes:
        columns: names of the columns in order of first appearance.
        rows: number of rows, including rows before a resume.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self.rows = 0

    def reject_earlier_rows(self) -> None:
        """Raise SettingError if the file contains rows from another run."""
        if self._read():
            reason = (
                f"contains rows from an earlier run ({self.path.name}), which would be overwritten"
            )
            hint = "use another folder, or resume that run"
            raise SettingError("folder", str(self.path.parent), reason, hint)

    def append(self, row: Row) -> None:
        """Append a row. New names become new columns."""
        if new := [name for name in row if name not in self.columns]:
            before = self._read()[: self.rows]
            self.columns += new
            write_whole(self.path, as_csv(self.columns, before))
        append(self.path, as_csv(self.columns, [row], header=False))
        self.rows += 1

    def all_rows(self) -> list[dict[str, float | int]]:
        """Return all rows in the file, including rows from other runs."""
        return [{name: _number(text) for name, text in row.items() if text} for row in self._read()]

    def _read(self) -> list[dict[str, str]]:
        """Return the rows in the file as strings, ignoring an incomplete last line."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        return list(csv.DictReader(io.StringIO(whole, newline="")))

    def state_dict(self) -> dict[str, Any]:
        """Return the columns and the number of rows."""
        return {"columns": list(self.columns), "rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`, and drop later rows."""
        self.columns, self.rows = list(state_dict["columns"]), int(state_dict["rows"])
        if self.columns:  # replace the file, because the old one may be hard-linked elsewhere
            write_whole(self.path, as_csv(self.columns, self._read()[: self.rows]))


def as_csv(
    columns: Sequence[str], rows: Sequence[Mapping[str, Any]], *, header: bool = True
) -> str:
    """Return rows as CSV text. Missing values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _number(text: str) -> float | int:
    """Parse a number as an int if it is an integer, else as a float."""
    return int(text) if text.lstrip("-").isdecimal() else float(text)
