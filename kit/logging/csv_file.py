"""The CSV files of a run: its rows are written to them, and read from them."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.logging.files import NotSaved, append, as_folder, write_whole
from kit.steps import SettingError

Row = Mapping[str, float | int]

FILES = ("metrics", "times")
"""Names of the files: times differ from run to run, all else does not."""


def read_rows(folder: Path | str) -> list[dict[str, float | int]]:
    """The rows that a run has logged to its folder, with their times.

    Args:
        folder: of the run, with ``metrics.csv``.

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
    """A CSV file of growing columns, whose damages by others are noticed.

    Args:
        path: of the file; it is written with the first row.

    Attributes:
        columns: names, in the order in which they came.
        rows: number of them, those before a resume included.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self.rows = 0
        self._last: tuple[float, ...] = ()  # position in the run of the last row
        self._size = 0  # bytes of the file

    def refuse_earlier_rows(self) -> None:
        """Refuse to write where rows of another run are: they would be lost.

        Raises:
            SettingError: if there are any.
        """
        if self._read():
            why = f"has the rows of an earlier run ({self.path.name}), which would be lost"
            works = "give another folder, or resume that run"
            raise SettingError("folder", str(self.path.parent), why, works)

    def append(self, row: Row) -> None:
        """Add a row; names not seen before become new columns."""
        new = [name for name in row if name not in self.columns]
        changed = self.rows and _size(self.path) != self._size
        if new or changed:
            before = self._rows_left() if self.rows else []
            self.columns += new
            self._rewrite(before)
        append(self.path, self._lines([row]))
        self.rows, self._last = self.rows + 1, _position(row)
        self._size = _size(self.path)

    def all_rows(self) -> list[dict[str, float | int]]:
        """The rows in the file, whoever wrote them; not those with a torn number."""
        rows = []
        for row in self._read():
            with contextlib.suppress(ValueError):
                rows.append({name: _number(text) for name, text in row.items() if text})
        return rows

    def own_rows(self) -> list[dict[str, float | int]]:
        """The rows that were appended here, or before a resume."""
        return self.all_rows()[: self.rows]

    def _rows_left(self) -> list[dict[str, str]]:
        """The rows written so far; a warning says how many are lost."""
        rows = [row for row in self._read() if _position(row) <= self._last][: self.rows]
        if len(rows) < self.rows:
            what = f"{self.path} was damaged: {len(rows)} of {self.rows} rows are left"
            warnings.warn(f"{what}; the run goes on with these", stacklevel=6)
        self.rows = len(rows)
        return rows

    def _read(self) -> list[dict[str, str]]:
        """The rows that can be read, also where the header is lost or lines are torn.

        Raises:
            NotSaved: if the system does not let us read them, or it is no file.
        """
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        except OSError as error:
            what = f"{self.path} cannot be read: {error.strerror}"
            raise NotSaved(f"{what}; it is left as it is") from error
        lines: list[list[str]] = []
        with contextlib.suppress(csv.Error):  # of a quote that nothing closes, far behind it
            lines.extend(csv.reader(io.StringIO(text.replace("\0", ""), newline="")))
        header = self.columns
        if lines and lines[0][: len(header)] == header:
            header = lines.pop(0)
        return [dict(zip(header, line)) for line in lines if len(line) == len(header)]

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write header and rows to a new file that takes the place of the old one."""
        header = dict(zip(self.columns, self.columns))
        write_whole(self.path, self._lines([header, *rows]))

    def _lines(self, rows: Sequence[Mapping[str, Any]]) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n")
        writer.writerows(rows)
        return text.getvalue()

    def state_dict(self) -> dict[str, Any]:
        """Columns, number of rows, and where in the run the last one is."""
        return {"columns": list(self.columns), "rows": self.rows, "last": list(self._last)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`, dropping the rows written later."""
        self.columns, self.rows = list(state_dict["columns"]), int(state_dict["rows"])
        self._last = tuple(state_dict["last"])
        if self.columns:  # in a file of its own: the present one may have another name elsewhere
            self._rewrite(self._rows_left())
            self._size = _size(self.path)


_POSITION = ("policy_steps", "gradient_steps", "time/seconds")


def _position(row: Mapping[str, Any]) -> tuple[float, ...]:
    """Position in the run of a row; an unreadable one is beyond all."""
    try:
        return tuple(float(row[name]) for name in _POSITION if row.get(name) not in (None, ""))
    except ValueError:
        return (math.inf,)


def _number(text: str) -> float | int:
    """An integer as an integer, anything else as a float."""
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _size(path: Path) -> int:
    """Bytes of a file; -1 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1
