"""The folder of one rank: locked, checked against its manifest, and filled to its full size, or left as it was.

    <path>/<digest of the namespace>/rank-0-of-2/
        lock            locked as long as the process lives
        manifest.json   written last, so a folder without one is not ready and begins anew
        blocks          slots * slot_bytes, with room for all of it where the file system can: a full disk fails here
        records         slots * 128 bytes
        generations     see `generations.py`

Of another number of slots, what fits is kept. What was made for something else, or has lost its manifest or its
generations, begins anew: none of its records may be served.

A child of the process does not have the lock: it would keep it after the parent's end.
"""

import contextlib
import fcntl
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cpu_prefix_cache.messages.errors import ConfigurationError, TierUnavailable
from cpu_prefix_cache.slab import generations, manifest, records
from cpu_prefix_cache.slab.allocation import allocate
from cpu_prefix_cache.slab.durable import NEW, remove_durably
from cpu_prefix_cache.slab.generations import Generations, KeptGenerations, read_generations
from cpu_prefix_cache.slab.manifest import Manifest
from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.slab.private import open_file, open_folder, open_path
from cpu_prefix_cache.slab.room import LOCK, make_room
from cpu_prefix_cache.slab.sizing import bytes_of
from cpu_prefix_cache.slab.tier import RankPart

if TYPE_CHECKING:
    from cpu_prefix_cache.slab.settings import FileTier

logger = logging.getLogger(__name__)

OWN = manifest.NAME, generations.NAME, generations.MARK
FILES = (*OWN, *(name + NEW for name in OWN), "records", "blocks")


class Folder:
    """The folder of one owner of a tier, which has this part of it, in slots of `slot_bytes` bytes each. Folders of
    other namespaces beside it give up their room unless the tier has them kept.

    `blocks` and `records` are file descriptors, `opened` is that of the folder.

    Raises TierUnavailable, and leaves the files as they are, when another process uses them, they are another user's,
    or the path or the disk does not have what they need.
    """

    lock: int
    blocks: int
    records: int
    opened: int
    generations: Generations

    def __init__(self, tier: "FileTier", namespace: Namespace, part: RankPart, slot_bytes: int) -> None:
        slots, rank, ranks = part.slots, part.number, part.owners
        if slots < 1 or slot_bytes < 1 or not 0 <= rank < ranks:
            raise ConfigurationError(
                f"a slab has slots of some bytes, got {slots} of {slot_bytes} for rank {rank} of {ranks}"
            )
        self.slots, self.slot_bytes = slots, slot_bytes
        self.seed = records.seed_of(namespace.digest, rank, ranks)
        wanted = manifest.manifest_of(namespace, part, slot_bytes, tier.bytes)
        names = *tier.folders, namespace.folder, f"rank-{rank}-of-{ranks}"
        self.path = Path(tier.path, *names)
        with ExitStack() as undo:
            try:
                folders = _folders(tier.path, names, undo)
                self.opened = folders[-1]
                self.lock = _locked(self.opened, self.path, undo)
                there = self._usable(manifest.read_manifest(self.opened, self.path), wanted, undo)
                self.records = _kept(open_file(self.opened, "records", self.path), undo)
                if there is None:
                    os.ftruncate(self.records, 0)  # a disk may keep its name
                self.blocks = _kept(open_file(self.opened, "blocks", self.path), undo)
                if not tier.keep_others:
                    with _one_rank_at_a_time(folders[-2]):  # the others find it made
                        self._make_room(folders[-3], namespace.folder, wanted)
                self._fill(there, wanted, undo)
            except TierUnavailable:
                raise
            except OSError as error:
                raise TierUnavailable(f"{self.path} cannot be used ({error}); give another path") from error
            undo.pop_all()
        _close_all(folders[:-1])
        _held.add(self)
        self._closing = weakref.finalize(self, _close_all, [self.lock, self.blocks, self.records, self.opened])

    def close(self) -> None:
        """Unlock the folder. Nothing may use its files any more."""
        if self.lock >= 0:
            fcntl.flock(self.lock, fcntl.LOCK_UN)  # also for a child that has it for a moment
        self._closing()
        self.lock = self.blocks = self.records = self.opened = -1  # the numbers may soon be others' files

    def forget_lock(self) -> None:
        """Called in a child: the lock stays with its parent."""
        os.close(self.lock)
        self.lock = -1
        self._closing.detach()

    def _usable(self, there: Manifest | None, wanted: Manifest, undo: ExitStack) -> Manifest | None:
        """The manifest of a folder whose files may be used. None: it begins anew."""
        if there is not None:
            reason = manifest.difference(there, wanted) or self._lost_generations()
            if not reason:
                return there
            logger.warning("%s begins anew, and what it held is gone: %s", self.path, reason)
        remove_durably(self.opened, manifest.NAME)  # first: from here on it is not ready
        self._clear()
        undo.callback(self._clear, LOCK)
        return None

    def _lost_generations(self) -> str:
        kept = read_generations(self.opened, self.path)
        return "" if kept is not None else f"{generations.NAME} does not say which records may be served"

    def _make_room(self, others: int, own: str, wanted: Manifest) -> None:
        """Let folders of others go until there is room for what this one needs still."""
        sizes = wanted["slots"], wanted["slot_bytes"], wanted["ranks"]
        has_room = partial(_has_room, (self.records, self.blocks), bytes_of(*sizes[:2], 1))
        allowed = wanted["nbytes"] - bytes_of(*sizes)
        make_room(others, self.path.parents[1], own, allowed=allowed, has_room=has_room)

    def _fill(self, there: Manifest | None, wanted: Manifest, undo: ExitStack) -> None:
        slots = wanted["slots"]
        sizes = {"records": (self.records, records.SIZE), "blocks": (self.blocks, wanted["slot_bytes"])}
        for name, (file, each) in sizes.items():
            undo.callback(_quietly, partial(os.ftruncate, file, min(os.fstat(file).st_size, slots * each)))
            is_reserved = allocate(file, slots * each, self.path / name)
        if not is_reserved:
            logger.warning("the files in %s are sparse: their file system reserves no room, so keep it free", self.path)
        kept = None if there is None else read_generations(self.opened, self.path)
        self.generations = Generations(self.opened, kept or KeptGenerations())
        if self.generations.was_reset:
            logger.warning(
                "%s begins anew: it was reset, and nothing tells which weights wrote to it since then", self.path
            )
        if there is not None and there.get("slots") != slots:
            logger.warning("%s had %s slots and has %d: what fits is kept", self.path, there.get("slots"), slots)
        if there != wanted:
            manifest.write_manifest(self.opened, wanted)

    def _clear(self, *more: str) -> None:
        for name in (*FILES, *more):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self.opened)


def _folders(path: str, names: Sequence[str], undo: ExitStack) -> list[int]:
    """The path and the folders below it, each in the one before, and made if it is not there."""
    folders, where = [_kept(open_path(path), undo)], Path(path)
    for name in names:
        where = where / name
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=folders[-1])
            undo.callback(_quietly, partial(os.rmdir, name, dir_fd=folders[-1]))
        folders.append(_kept(open_folder(folders[-1], name, where), undo))
    return folders


@contextlib.contextmanager
def _one_rank_at_a_time(folder: int) -> Iterator[None]:
    """Folders of others in this one."""
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)  # also for a child that has it for a moment


def _kept(opened: int, until: ExitStack) -> int:
    until.callback(os.close, opened)
    return opened


def _locked(folder: int, where: Path, undo: ExitStack) -> int:
    while True:
        lock = open_file(folder, LOCK, where)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise TierUnavailable(
                f"another process uses {where}; give each engine a path of its own, or end the other"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(LOCK, dir_fd=folder, follow_symlinks=False).st_ino == os.fstat(lock).st_ino:
                return _kept(lock, undo)
        os.close(lock)  # of a folder that another process has just given up


def _has_room(files: Sequence[int], num_bytes: int) -> bool:
    """Whether the disk of these files has room for what they lack of so many bytes."""
    disk = os.fstatvfs(files[0])
    return num_bytes - sum(os.fstat(file).st_blocks * 512 for file in files) <= disk.f_bavail * disk.f_frsize


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
