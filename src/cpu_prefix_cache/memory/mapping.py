"""The addresses of a host region: private to this process, or a file in shared memory that all ranks of a node map."""

import contextlib
import mmap
import os
import sys
from pathlib import Path

from cpu_prefix_cache.memory import claims
from cpu_prefix_cache.memory.limits import check_fits, groups
from cpu_prefix_cache.messages.errors import ConfigurationError

SHARED = Path("/dev/shm")
MADV_WIPEONFORK = 18  # Linux 4.14; Python has no name for it


def private(num_bytes: int) -> mmap.mmap:
    """Raises ConfigurationError like `check_fits`."""
    with claims.turn():
        check_fits(num_bytes)
        region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        claims.claim(region, groups())
    if sys.platform == "linux":
        # A page that a forked child shares is copied when either writes to it, and the pinned page may be the child's
        # then. So the child gets zeros at these addresses, or nothing at all from an older kernel.
        try:
            region.madvise(MADV_WIPEONFORK)
        except OSError:
            region.madvise(mmap.MADV_DONTFORK)
    return _with_huge_pages(region)


def shared(name: str, num_bytes: int) -> mmap.mmap:
    """The region of that name, made by the first process that asks for it.

    Raises ConfigurationError for a bad name, another size, a system without /dev/shm, and like `check_fits`.
    """
    path = _path(name)
    if not SHARED.is_dir():
        raise ConfigurationError(f"this system has no shared memory at {SHARED}; give each process a region of its own")
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        file, is_new = os.open(path, flags | os.O_EXCL, 0o600), True
    except FileExistsError:
        file, is_new = os.open(path, flags, 0o600), False
    try:
        there = os.fstat(file).st_size
        if there not in (0, num_bytes):
            raise ConfigurationError(
                f"the shared region {name!r} has {there} bytes, but {num_bytes} were asked for; "
                f"all ranks ask for the same, and a name is used once"
            )
        if not there:  # later processes take no more memory
            check_fits(num_bytes, file)
        os.ftruncate(file, num_bytes)
        return _with_huge_pages(mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED))
    except BaseException:
        if is_new:
            path.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def forget(name: str) -> None:
    """Remove the name. The region ends with the last process that has mapped it, however that ends."""
    _path(name).unlink(missing_ok=True)


def _path(name: str) -> Path:
    if not name or "/" in name or name in (".", ".."):
        raise ConfigurationError(f"a shared region has a plain name without slashes, got {name!r}")
    return SHARED / name


def _with_huge_pages(region: mmap.mmap) -> mmap.mmap:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # without huge pages there are small ones
            region.madvise(mmap.MADV_HUGEPAGE)
    return region
