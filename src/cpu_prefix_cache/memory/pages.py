"""Taking the pages of a region from the system, in several threads, ahead of registration.

Registration would take them too, ten times slower, and kernel launches would wait for it. A page belongs to the NUMA
node of the thread that takes it. So the threads of a private region run on processors near the device. Those of a
region that processes share take turns on all nodes: which slot is written next is what leaves next, wherever it lies,
so parts for each node would be no nearer to who writes. Where the system has no more memory the region ends.
"""

import contextlib
import ctypes
import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence, Set
from itertools import cycle, islice
from pathlib import Path

import torch

from cpu_prefix_cache.memory.moves import SEAM_BYTES

logger = logging.getLogger(__name__)

POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
THREADS = 8  # 48 GiB in 3 to 6 s (one H200's host)
PCI_DEVICES = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")
_LIBC = ctypes.CDLL(None, use_errno=True)


def processors_near(pci_address: str) -> set[int]:
    """The processors of a device's NUMA node, or all of them; none where the system does not list them."""
    return _listed(PCI_DEVICES / pci_address / "local_cpus")


def processors_of_nodes() -> list[set[int]]:
    """The processors of each NUMA node that has some; no node where the system does not list them."""
    nodes = sorted(NODES.glob("node[0-9]*/cpumap"))
    return [processors for processors in map(_listed, nodes) if processors]


def _listed(file: Path) -> set[int]:
    """The numbers in a mask, such as "00000000,0000ff00"; none without the file."""
    mask = int(file.read_text().replace(",", ""), 16) if file.exists() else 0
    return {number for number in range(mask.bit_length()) if mask >> number & 1}


class Pages:
    """Takes the pages of `region`, uint8 [bytes], slice by slice from its first byte on. Its threads run on the
    processors of each of `near` in turn. Calls `count` with the bytes that it has not taken, each time that these are
    fewer.
    """

    def __init__(
        self,
        region: torch.Tensor,
        near: Sequence[Set[int]] = (),
        slice_bytes: int = SEAM_BYTES,
        count: Callable[[int], None] = lambda not_taken: None,
    ) -> None:
        self._region, self._slice_bytes, self._count = region, slice_bytes, count
        self._end = region.numel()
        slices = range(0, self._end, slice_bytes)
        self._next, self._missing = iter(slices), set(slices)
        self._changed = threading.Condition()
        workers = min(THREADS, len(os.sched_getaffinity(0)))
        self.threads = [
            threading.Thread(target=self._run, args=[processors], daemon=True, name="take-pages")
            for processors in islice(cycle(near or [frozenset[int]()]), workers)
        ]
        try:
            for thread in self.threads:
                thread.start()
        except RuntimeError:  # the system has no more threads: those that have started end
            self._shorten(0)
            raise

    def wait_for(self, first: int) -> bool:
        """Wait until the slice from byte `first` on has its pages. False: it will not get them."""
        with self._changed:
            self._changed.wait_for(lambda: first >= self._end or first not in self._missing)
            return first < self._end

    def close(self) -> None:
        """Take no more pages, and end the threads."""
        self._shorten(0)
        for thread in self.threads:
            thread.join()

    def _run(self, near: Set[int]) -> None:
        if near := near & os.sched_getaffinity(0):
            with contextlib.suppress(OSError):  # a container may forbid it
                os.sched_setaffinity(0, near)  # of this thread
        for first in self._next:  # all threads share it, so a slice is taken by one of them
            if first >= self._end:
                break
            error = _populate(self._region, first, self._slice_bytes)
            if error:
                logger.error("the system gave no more host memory after %.2f GB: error %d", first / 1e9, error)
                self._shorten(first)
            with self._changed:
                self._missing.discard(first)
                self._notify()

    def _shorten(self, end: int) -> None:
        """Nobody takes pages from byte `end` on any more."""
        with self._changed:
            self._end = min(self._end, end)
            self._missing = {first for first in self._missing if first < end}
            self._notify()

    def _notify(self) -> None:
        """Notify all that wait or count that fewer slices are missing. Called with the lock held."""
        self._count(min(len(self._missing) * self._slice_bytes, self._region.numel()))
        self._changed.notify_all()


def _populate(region: torch.Tensor, first: int, num_bytes: int) -> int:
    """The error number, or 0. Older kernels do not know the call: there pages are taken when they are first written."""
    address, length = region.data_ptr() + first, min(num_bytes, region.numel() - first)
    if not _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), POPULATE_WRITE):
        return 0
    error = ctypes.get_errno()
    return 0 if error == errno.EINVAL else error
