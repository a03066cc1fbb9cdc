"""Writing files so that a full disk loses nothing that was written before."""

from __future__ import annotations

import os
from pathlib import Path


class WriteError(RuntimeError):
    """A file of a run could not be written; files written before are untouched."""

    stops_the_run = True


def not_written(path: Path, error: OSError) -> WriteError:
    """The error to raise where ``path`` could not be written."""
    what = f"{path} cannot be written: {error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        return WriteError(f"{what}; its folder was removed, and nothing more is saved")
    return WriteError(
        f"{what}; all that was written before is "
        "untouched. Make room or choose another folder with log_dir=..."
    )


def as_folder(folder: Path | str) -> Path:
    """The path of a folder given by name or path, which is the same wherever the process goes."""
    return Path(folder).absolute()


def from_here(path: Path) -> Path:
    """A path as it is written in the working directory, if that is above it."""
    try:
        return path.relative_to(Path.cwd())
    except (ValueError, OSError):  # elsewhere; or the working directory was removed
        return path


def half_written(path: Path) -> Path:
    """The file in which the content of ``path`` is until it is complete."""
    return path.with_name(f"{path.name}.new")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically; text is written as UTF-8.

    Raises:
        WriteError: if it cannot be written; an existing file is untouched.
    """
    temporary = half_written(path)
    try:
        temporary.unlink(missing_ok=True)  # a link there leads elsewhere
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise not_written(path, error) from error


def append(path: Path, text: str) -> None:
    """Add ``text`` to the end of a file, completely or not at all.

    Raises:
        WriteError: if it cannot be written; the file is as it was before.
    """
    size = None
    try:
        with path.open("a", newline="", encoding="utf-8") as file:
            size = file.tell()
            file.write(text)
    except OSError as error:
        if size is not None:
            os.truncate(path, size)
        raise not_written(path, error) from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it.

    Raises:
        WriteError: if that is not possible.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_written(path, error) from error
