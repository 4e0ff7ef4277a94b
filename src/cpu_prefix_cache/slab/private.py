"""Folders and files that are this user's own, opened in a way that nobody else can turn elsewhere.

The path that the operator gave is followed, wherever it leads, once. Everything below it is opened by the descriptor of
the folder that it is in, and never through a symbolic link; it belongs to this user, no one else may write to it, and
files are regular ones. Else who may write to the path could make the names beforehand, which anybody can know, and have
a service write to files of his choice, or read what it writes.
"""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from cpu_prefix_cache.messages.errors import TierUnavailable

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
OTHERS_WRITE = 0o022
OTHER_KIND = errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO
MOST_BYTES = 1 << 20  # of a small file


def open_path(path: str) -> int:
    """The folder that the operator has named. Raises TierUnavailable: what is missing may be a disk."""
    if not Path(path).is_dir():
        what = "is not a folder" if os.path.lexists(path) else "does not exist"
        raise TierUnavailable(f"the path of the tier, {path}, {what}; mount the disk, or make the folder")
    if not os.access(path, os.W_OK | os.X_OK):
        raise TierUnavailable(f"this process may not write to {path}; let it, or give another path")
    return os.open(path, FOLDER)


def open_folder(parent: int, name: str, where: Path) -> int:
    """The folder `name` in `parent`, which is `where` for people. Raises TierUnavailable if it is not ours alone."""
    return _opened(name, FOLDER, parent, where, stat.S_ISDIR)


def open_file(folder: int, name: str, where: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """The file `name` in `folder`, which is `where` for people. Raises TierUnavailable if it is not ours alone."""
    return _opened(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, folder, where / name, stat.S_ISREG)


def read_small(folder: int, name: str, where: Path) -> bytes | None:
    """Contents of a small file; of a larger one its beginning. None: there is none."""
    try:
        file = open_file(folder, name, where, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with os.fdopen(file, "rb") as opened:
        return opened.read(MOST_BYTES)


def _opened(name: str, flags: int, parent: int, where: Path, is_kind: Callable[[int], bool]) -> int:
    try:
        opened = os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=parent)
    except OSError as error:
        if error.errno not in OTHER_KIND:
            raise
        raise _not_ours(where, "is a link, or of another kind than it should be") from error
    status = os.fstat(opened)
    problem = ""
    if not is_kind(status.st_mode):
        problem = "is of another kind than it should be"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, and this process to {os.geteuid()}"
    elif status.st_mode & OTHERS_WRITE:  # a checksum keeps nobody out
        problem = f"may be written by others ({stat.filemode(status.st_mode)}), and so what is served from it"
    if problem:
        os.close(opened)
        raise _not_ours(where, problem)
    return opened


def _not_ours(where: Path, problem: str) -> TierUnavailable:
    return TierUnavailable(f"{where} {problem}: delete it, or give the tier another path")
