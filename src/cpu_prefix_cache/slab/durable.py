"""Small files that are whole after whatever ends the process or the machine."""

import contextlib
import os
from pathlib import Path

NEW = ".new"


def write_durably(path: Path, data: bytes) -> None:
    """The file has its old content or `data`, and `data` once this has returned."""
    new = path.with_name(path.name + NEW)
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def remove_durably(path: Path) -> None:
    """The file is gone once this has returned, and does not come back. It may be gone already."""
    path.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
