"""The folder of one rank: locked, checked against its manifest, and filled to its full size, or left as it was.

    <path>/<digest of the namespace>/rank-0-of-2/
        lock            locked as long as the process lives
        manifest.json   written last, so a folder without one is not ready and begins anew
        blocks          slots * slot_bytes, all of it allocated: a disk without room says so here
        records         slots * 128 bytes
        generations     see `generations.py`

A child of the process does not have the lock: it would keep it after the parent's end.
"""

import contextlib
import errno
import fcntl
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.slab import manifest, records
from cpu_prefix_cache.slab.durable import NEW
from cpu_prefix_cache.slab.generations import Generations
from cpu_prefix_cache.slab.namespace import Namespace

FILES = (manifest.NAME, "blocks", "records", "generations", manifest.NAME + NEW, "generations" + NEW)
OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


def rank_folder(path: str, namespace: Namespace, rank: int, ranks: int) -> Path:
    return Path(path) / namespace.folder / f"rank-{rank}-of-{ranks}"


def check_path(path: str) -> None:
    """Raise ConfigurationError unless `path` is a folder that this process may write to."""
    if not Path(path).is_dir():
        what = "is not a folder" if os.path.lexists(path) else "does not exist"
        raise ConfigurationError(f"the path of the tier, {path}, {what}; make the folder first")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigurationError(f"this process may not write to {path}; let it, or give another path")


class Folder:
    """`blocks` and `records` are file descriptors. The arguments are those of Slab. Raises ConfigurationError."""

    lock: int
    blocks: int
    records: int
    generations: Generations

    def __init__(
        self, path: str, namespace: Namespace, *, rank: int, ranks: int, slots: int, slot_bytes: int, nbytes: int
    ) -> None:
        check_path(path)
        sizes = {"slots": slots, "slot_bytes": slot_bytes, "nbytes": nbytes}
        wanted = manifest.manifest_of(namespace, rank=rank, ranks=ranks, **sizes)
        self.path = rank_folder(path, namespace, rank, ranks)
        with ExitStack() as undo:
            try:
                self._open(undo, wanted)
            except OSError as error:
                raise ConfigurationError(f"{self.path} cannot be used ({error}); give another path") from error
            undo.pop_all()
        _held.add(self)
        self._closing = weakref.finalize(self, _close_all, [self.lock, self.blocks, self.records])

    def close(self) -> None:
        """Unlock the folder. Nothing may use its files any more."""
        if self.lock >= 0:
            fcntl.flock(self.lock, fcntl.LOCK_UN)  # also for a child that has it for a moment
        self._closing()
        self.lock = self.blocks = self.records = -1  # the numbers may soon be others' files

    def forget_lock(self) -> None:
        """Called in a child: the lock stays with its parent."""
        os.close(self.lock)
        self.lock = -1
        self._closing.detach()

    def _open(self, undo: ExitStack, wanted: dict[str, Any]) -> None:
        for folder in (self.path.parent, self.path):
            _make_private(folder, undo)
        self.lock = _locked(self.path / "lock", undo)
        there = manifest.read_manifest(self.path)
        if there is None:
            self._clear()
            undo.callback(self._clear, "lock")
        else:
            manifest.check_same(self.path, there, wanted)
        slots, slot_bytes = wanted["slots"], wanted["slot_bytes"]
        self.records = _file_of(self.path / "records", slots * records.SIZE, undo)
        self.blocks = _file_of(self.path / "blocks", slots * slot_bytes, undo)
        self.generations = Generations(self.path / "generations", is_new=there is None)
        if there is None:
            manifest.write_manifest(self.path, wanted)

    def _clear(self, *more: str) -> None:
        for name in (*FILES, *more):
            with contextlib.suppress(OSError):
                (self.path / name).unlink(missing_ok=True)


def _make_private(folder: Path, undo: ExitStack) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
        undo.callback(_quietly, folder.rmdir)
    if folder.stat().st_mode & 0o022:  # a checksum keeps nobody out
        raise ConfigurationError(f"others may write to {folder}, and so to what is served from it; chmod it to 700")


def _locked(path: Path, undo: ExitStack) -> int:
    while True:
        lock = os.open(path, OPEN, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigurationError(
                f"another process uses {path.parent}; give each engine a path of its own, or end the other"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(lock).st_ino:
                undo.callback(os.close, lock)
                return lock
        os.close(lock)  # of a folder that another process has just given up


def _file_of(path: Path, num_bytes: int, undo: ExitStack) -> int:
    """A file with all of its bytes allocated. A shorter one is filled with zeros, which no checksum fits."""
    file = os.open(path, OPEN, 0o600)
    undo.callback(os.close, file)
    status = os.fstat(file)
    if status.st_size > num_bytes:
        raise ConfigurationError(
            f"{path} has {status.st_size} bytes, and is to have {num_bytes}; delete the folder {path.parent}"
        )
    disk = os.fstatvfs(file)
    missing, room = num_bytes - status.st_blocks * 512, disk.f_bavail * disk.f_frsize
    if status.st_size < num_bytes and missing > room:  # a file system that compresses needs fewer for a full one
        raise _no_room(path, missing, room)
    undo.callback(_quietly, lambda: os.ftruncate(file, status.st_size))
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise _no_room(path, missing, room) from error
    return file


def _no_room(path: Path, missing: int, room: int) -> ConfigurationError:
    return ConfigurationError(
        f"{path} needs {missing / 1e9:.2f} GB more, and the disk has or allows less ({room / 1e9:.2f} GB are free); "
        "free some, or give the tier fewer bytes"
    )


def _quietly(action: Callable[[], object]) -> None:
    with contextlib.suppress(OSError):
        action()


def _close_all(files: list[int]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)


_held: "weakref.WeakSet[Folder]" = weakref.WeakSet()


def _forget_locks() -> None:
    for folder in list(_held):
        if folder.lock >= 0:
            folder.forget_lock()


os.register_at_fork(after_in_child=_forget_locks)
