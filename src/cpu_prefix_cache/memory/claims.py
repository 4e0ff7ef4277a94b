"""Claims of host memory: what engines of this machine have been given and have not taken yet.

The pages of a region are taken while its engine works, so for a while the system calls memory available that is
promised already. Each region has a file in a folder of this user, which its process keeps locked. The file says how
large the region is and where; how much of it has been taken, the kernel says of its process, or of the file without a
name that several processes map. Of a process in another namespace of pids it does not say that. There the file counts,
in which the owner of a region that is taken ahead keeps what it has not taken yet. What takes pages when they are first
written has no such number, and nothing counts as promised to it there: what it has taken counts as used already, and
would count twice as long as it lives.

    alive    the file is locked. The kernel unlocks it when the process ends, however it ends
    dead     whoever reads it next removes it

Seen are processes of the same user that have the same /dev/shm: not other users, nor containers with a /dev/shm of
their own. Without a folder that is safely ours nothing is claimed or seen, with one line in the log.
"""

import fcntl
import json
import logging
import mmap
import os
import secrets
import stat
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import addressof, c_char
from functools import cache
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

SHARED = Path("/dev/shm")
LOCK = "lock"
LOCK_SECONDS = 5.0  # for others to check and to claim, which takes them milliseconds
CLAIM_BYTES = 1 << 16  # of a file, at most
NUMBER = b"%020d\n"  # of bytes that have not been taken, as long for all
_held: set[int] = set()  # files of this process, which a forked child must not keep locked
_files: MutableMapping[mmap.mmap, int] = weakref.WeakKeyDictionary()  # the claim of each region


class Claim(NamedTuple):
    """A region of a process `pid` of a namespace of pids, which the control groups `groups` limit: its addresses, and
    the descriptor there of the file that it is, or -1. `not_taken` are bytes, as its owner counts them where it takes
    pages ahead, and else 0.
    """

    pid: int
    namespace: int
    groups: tuple[str, ...]
    region: range
    file: int
    not_taken: int


def promises() -> list[list[Claim]]:
    """The claims of each living process, this one too: what it has been given and has not taken yet."""
    claims = defaultdict[tuple[int, int], list[Claim]](list)  # by process
    folder = _folder()
    for name in [] if folder is None else os.listdir(folder):
        if folder is not None and name != LOCK and (claim := _read(folder, name)) is not None:
            claims[claim.pid, claim.namespace].append(claim)
    return list(claims.values())


@contextmanager
def turn() -> Iterator[None]:
    """One process at a time checks what is left, and claims it. None waits for ever for one that is frozen."""
    folder = _folder()
    if folder is None:
        yield
        return
    try:
        file = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as failed:
        _warn(failed)
        yield
        return
    try:
        end = time.monotonic() + LOCK_SECONDS
        while not _lock(file, fcntl.LOCK_EX) and time.monotonic() < end:
            time.sleep(0.01)
        yield
    finally:
        os.close(file)


def claim(region: mmap.mmap, groups: Sequence[str], shared: int = -1, *, taken_ahead: bool = False) -> None:
    """Claim what a region has not taken yet, until it ends. `groups` are the control groups that limit it, and `shared`
    is the descriptor of the file that it is, if it is one. Whoever makes one that is `taken_ahead` calls `count`.
    """
    folder = _folder()
    if folder is None:
        return
    name = secrets.token_hex(16)
    begin = addressof(c_char.from_buffer(region))
    files: list[int] = []
    try:
        files += [] if shared < 0 else [os.dup(shared)]
        values = begin, len(region), os.getpid(), _pid_namespace(), list(groups), files[0] if files else -1
        number = NUMBER % (len(region) if taken_ahead else 0)
        files.append(_put(folder, name, number + json.dumps(values).encode()))
    except OSError as failed:
        _close(files)
        _warn(failed)
        return
    _held.update(files)
    _files[region] = files[-1]
    weakref.finalize(region, _end, os.getpid(), folder, name, files)


def count(region: mmap.mmap, not_taken: int) -> None:
    """Keep in its claim how many bytes of a region have not been taken yet, if it is claimed."""
    if region in _files:
        with suppress(OSError):  # a region does without its claim
            os.pwrite(_files[region], NUMBER % not_taken, 0)


def _put(folder: int, name: str, content: bytes) -> int:
    """A file that has its content, and is locked, before it has a name."""
    file = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        _lock(file, fcntl.LOCK_EX)
        os.write(file, content)
        os.link(f"/proc/self/fd/{file}", name, dst_dir_fd=folder, follow_symlinks=True)
    except BaseException:
        os.close(file)
        raise
    return file


def _end(pid: int, folder: int, name: str, files: Sequence[int]) -> None:
    if os.getpid() == pid:  # a forked child has closed them already
        _held.difference_update(files)
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
        _close(files)


def _close(files: Iterable[int]) -> None:
    for file in files:
        with suppress(OSError):
            os.close(file)


def _read(folder: int, name: str) -> Claim | None:
    """None if its process has ended, or it is no claim."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    try:
        if _lock(file, fcntl.LOCK_SH):  # shared, so that others who look at this moment do not take it for alive
            os.unlink(name, dir_fd=folder)
            return None
        not_taken, _, values = os.read(file, CLAIM_BYTES).partition(b"\n")
        begin, num_bytes, pid, namespace, groups, shared = json.loads(values)
        region = range(int(begin), int(begin) + int(num_bytes))
        return Claim(int(pid), int(namespace), tuple(groups), region, int(shared), int(not_taken))
    except (OSError, ValueError, TypeError):
        return None
    finally:
        os.close(file)


def _lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@cache
def _folder() -> int | None:
    """The folder of this user, opened."""
    path = SHARED / f"cpu-prefix-cache-{os.geteuid()}"
    if sys.platform != "linux" or not SHARED.is_dir():
        return None
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as failed:
        _warn(failed)
        return None
    status = os.fstat(folder)
    if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077:
        return folder
    os.close(folder)
    _warn(f"{path} belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):o}, which is not 700")
    return None


def _warn(why: object) -> None:
    logger.warning("engines that start together on this machine do not see each other's claims of memory: %s", why)


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def most(own: Sequence[Claim]) -> int:
    """Bytes of one process, if none of them has been taken."""
    return sum(len(each.region) for each in own)


def not_taken(own: Sequence[Claim]) -> int:
    """Bytes of one process not taken, by its own count where the kernel has none. The kernel goes through all that the
    process has mapped: 25 ms where that is much.
    """
    if own[0].namespace != _pid_namespace():
        return sum(each.not_taken for each in own)
    private = [each.region for each in own if each.file < 0]
    try:
        of_files = sum(_not_in_file(each) for each in own if each.file >= 0)
        lines = Path(f"/proc/{own[0].pid}/smaps").read_text().splitlines() if private else []
    except OSError:
        return 0
    return of_files + max(0, sum(map(len, private)) - _resident_bytes(lines, private))


def _not_in_file(claim: Claim) -> int:
    """Whichever of the processes that map it has taken the rest."""
    status = os.stat(f"/proc/{claim.pid}/fd/{claim.file}")
    return max(0, len(claim.region) - 512 * status.st_blocks)


def _resident_bytes(smaps: Sequence[str], regions: Sequence[range]) -> int:
    """Resident bytes of disjoint regions. The kernel may show neighbours as one, with what is between them."""
    resident = inside = 0
    for line in smaps:
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            low, _, high = first.partition("-")
            begin, end = int(low, 16), int(high, 16)
            inside = sum(max(0, min(end, each.stop) - max(begin, each.start)) for each in regions)
        elif inside and first == "Rss:":
            resident += min(inside, 1024 * int(rest.split()[0]))
    return resident


def _forget_in_child() -> None:
    """A child has no part in the regions of its parent, and does not keep them claimed."""
    _close(_held)
    _held.clear()
    _files.clear()


os.register_at_fork(after_in_child=_forget_in_child)
