"""Small files that are whole after whatever ends the process or the machine. `folder` is an open one."""

import contextlib
import os

NEW = ".new"


def write_durably(folder: int, name: str, data: bytes) -> None:
    """The file has its old content or `data`, and `data` once this has returned."""
    new, flags = name + NEW, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(new, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new, dir_fd=folder)
        raise
    os.fsync(folder)


def remove_durably(folder: int, name: str) -> None:
    """The file is gone once this has returned, and does not come back. It may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    os.fsync(folder)
