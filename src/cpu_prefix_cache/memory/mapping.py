"""The addresses of a host region: private to this process, or a file without a name that all ranks of a node map."""

import contextlib
import mmap
import os
import sys

from cpu_prefix_cache.memory import claims, shared_file
from cpu_prefix_cache.memory.limits import check_fits, groups
from cpu_prefix_cache.messages.errors import ConfigurationError

MADV_WIPEONFORK = 18  # Linux 4.14; Python has no name for it


def private(num_bytes: int, *, taken_ahead: bool = False) -> mmap.mmap:
    """Raises ConfigurationError like `check_fits`. `taken_ahead` is as for `claims.claim`."""
    with claims.turn():
        check_fits(num_bytes)
        region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        claims.claim(region, groups(), taken_ahead=taken_ahead)
    if sys.platform == "linux":
        # A page that a forked child shares is copied when either writes to it, and the pinned page may be the child's
        # then. So the child gets zeros at these addresses, or nothing at all from an older kernel.
        try:
            region.madvise(MADV_WIPEONFORK)
        except OSError:
            region.madvise(mmap.MADV_DONTFORK)
    return _with_huge_pages(region)


def make_shared(num_bytes: int, *, taken_ahead: bool = False, taken_here: bool = True) -> tuple[int, mmap.mmap]:
    """The descriptor of a file without a name, to be handed to others and closed, and the region that it is here.
    `taken_ahead` is as for `claims.claim`. `taken_here`: this process takes pages of it, so its control groups limit
    it.

    Raises ConfigurationError like `check_fits`, and on a system that has no such files.
    """
    with claims.turn():
        check_fits(num_bytes, taken_here=taken_here)
        file = shared_file.make(num_bytes)
        try:
            region = map_shared(file, num_bytes)
        except BaseException:
            os.close(file)
            raise
        claims.claim(region, groups() if taken_here else (), file, taken_ahead=taken_ahead)
    return file, region


def map_shared(file: int, num_bytes: int) -> mmap.mmap:
    """The region that another process has made. Raises ConfigurationError if it has another size."""
    there = os.fstat(file).st_size
    if there != num_bytes:
        raise ConfigurationError(
            f"the shared region has {there} bytes, but {num_bytes} were asked for; all ranks ask for the same"
        )
    return _with_huge_pages(mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED))


def _with_huge_pages(region: mmap.mmap) -> mmap.mmap:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # without huge pages there are small ones
            region.madvise(mmap.MADV_HUGEPAGE)
    return region
