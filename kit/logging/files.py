"""File writing that never damages existing content, even if the disk is full."""

from __future__ import annotations

import os
from pathlib import Path


class WriteError(RuntimeError):
    """Raised when one of a run's files cannot be written. Existing files are left unchanged."""

    stops_the_run = True


def not_written(path: Path, error: OSError) -> WriteError:
    """Create the error for a file that cannot be written."""
    what = f"{path} cannot be written: {error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        return WriteError(f"{what}. Its folder does not exist, so nothing can be saved.")
    hint = "Free disk space, or choose another folder with log_dir=..."
    return WriteError(f"{what}. Existing files are unchanged. {hint}")


def as_folder(folder: Path | str) -> Path:
    """Return an absolute path, which does not depend on later changes of the working directory."""
    return Path(folder).absolute()


def from_here(path: Path) -> Path:
    """Return a path relative to the working directory, or unchanged if it is outside."""
    try:
        return path.relative_to(Path.cwd())
    except (ValueError, OSError):  # outside the working directory, which may have been removed
        return path


def half_written(path: Path) -> Path:
    """Return the path of the temporary file for ``path``."""
    return path.with_name(f"{path.name}.new")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically. Text is encoded as UTF-8.

    Raises:
        WriteError: if the file cannot be written. An existing file is left unchanged.
    """
    temporary = half_written(path)
    try:
        temporary.unlink(missing_ok=True)  # never write through a link
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise not_written(path, error) from error


def append(path: Path, text: str) -> None:
    """Append text to a file atomically.

    Raises:
        WriteError: if the text cannot be written. The file is left unchanged.
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
    """Create a folder and its parents.

    Raises:
        WriteError: if the folder cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_written(path, error) from error
