"""Room on the disk: folders of namespaces that no process has locked give up theirs, the oldest first.

Another model, another revision, another release of the engine has a folder of its own, and finds nothing in this one:
bytes that nobody may ever use again. A folder that a process has locked keeps its room, and is not counted.
"""

import fcntl
import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from cpu_prefix_cache.slab import manifest
from cpu_prefix_cache.slab.private import open_file, open_folder

logger = logging.getLogger(__name__)

LOCK = "lock"
NAMESPACE, RANK = re.compile("[0-9a-f]{32}"), re.compile(r"rank-\d+-of-\d+")


class _Other(NamedTuple):
    """The folder of a namespace, whose locks we have."""

    changed: float  # when it was last written to, in seconds since 1970
    name: str
    folder: int
    ranks: dict[str, int]
    num_bytes: int
    of: str


def make_room(folder: int, where: Path, own: str, *, allowed: int, has_room: Callable[[], bool]) -> None:
    """Remove folders of namespaces in `folder` other than `own`, which is `where` for people, until those that are left
    have at most `allowed` bytes, and `has_room`.
    """
    with ExitStack() as held:
        names = [name for name in os.listdir(folder) if NAMESPACE.fullmatch(name) and name != own]
        others = sorted(other for name in names if (other := _idle(folder, where, name, held)) is not None)
        taken = sum(other.num_bytes for other in others)
        for other in others:
            if taken <= allowed and has_room():
                return
            try:
                _remove(folder, other)
            except OSError as error:
                logger.warning("%s is to make room, and cannot be removed: %s", where / other.name, error)
                continue
            taken -= other.num_bytes
            logger.warning(
                "%s was removed to make room: %.2f GB%s, last used %s. With keep_others such folders stay",
                where / other.name,
                other.num_bytes / 1e9,
                other.of,
                time.strftime("%Y-%m-%d", time.localtime(other.changed)),
            )


def _idle(folder: int, where: Path, name: str, held: ExitStack) -> _Other | None:
    """None: a process has it, or it is not ours. Locks and descriptors are `held`."""
    ranks, num_bytes, changed, of = dict[str, int](), 0, 0.0, ""
    try:
        own = open_folder(folder, name, where / name)
        held.callback(os.close, own)
        for rank in filter(RANK.fullmatch, os.listdir(own)):
            ranks[rank] = open_folder(own, rank, where / name / rank)
            held.callback(os.close, ranks[rank])
            lock = open_file(ranks[rank], LOCK, where / name / rank)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            of = of or _model(manifest.read_manifest(ranks[rank], where / name / rank))
            for file in os.listdir(ranks[rank]):
                status = os.stat(file, dir_fd=ranks[rank], follow_symlinks=False)
                num_bytes += status.st_blocks * 512
                changed = max(changed, status.st_mtime if file != LOCK else 0.0)
    except OSError:  # also that of a lock which another process has
        return None
    return _Other(changed, name, own, ranks, num_bytes, of) if ranks else None


def _remove(folder: int, other: _Other) -> None:
    for rank, inside in other.ranks.items():
        for file in sorted(os.listdir(inside), key=lambda name: (name == LOCK, name)):
            os.unlink(file, dir_fd=inside)
        os.rmdir(rank, dir_fd=other.folder)
    os.rmdir(other.name, dir_fd=folder)


def _model(made_for: manifest.Manifest | None) -> str:
    spelled = made_for.get("namespace") if made_for else None
    return f" of {spelled.get('model')!r}, revision {spelled.get('revision')!r}" if isinstance(spelled, dict) else ""
