"""A driver of a device that is not there. Its memory is host memory, and its streams are simulated ones.

It does what a real one does. Where a real one refuses, or its behaviour is not documented, it raises AssertionError
with a sentence, so that a test fails: DriverError would be taken for a refusal that the library can handle. It
raises DriverError itself where a right call may be refused: `refuses_after` so many registrations, and for a device
that it has not.
"""

import ctypes
import threading
from contextlib import contextmanager

import torch

from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.driver import DriverError
from tests.support.simulated_streams import SimulatedStreams

CUDA = torch.device("cuda", 0)
SLICE = 1 << 16


class _Thread(threading.local):
    """State of the driver for each thread. A new one has no device."""

    device, is_relaxed = None, False


class SimulatedDriver:
    """`registered` has the bytes pinned from each address on, `order` all that were ever, in turn; `asked` each call of
    a copy: "one" or how many, and the stream. A registration waits until `gate` lets it through."""

    name = "simulated"

    def __init__(self, streams=None, *, has_batches=True, longest_batch=1 << 16, devices=1):
        self.streams = streams or SimulatedStreams()
        self.has_batches = has_batches
        self.longest_batch = longest_batch
        self.registered = {}
        self.order = []
        self.asked = []
        self.under_way = []
        self.gate = threading.Semaphore(1 << 30)
        self.refuses_after = None
        self.devices = range(devices)
        self.here = _Thread()
        self.is_capturing = False
        self._lock = self.streams.lock

    def use(self, device):
        """This thread works with a device from now on, as torch does: not relaxed."""
        self.here.device = device

    @contextmanager
    def working_in(self, device):
        before = self.here.device, self.here.is_relaxed
        self._check_device(device)
        self.here.device, self.here.is_relaxed = before[0] if device is None else device, True
        try:
            yield
        finally:
            self.here.device, self.here.is_relaxed = before

    @contextmanager
    def capturing(self):
        """A graph is captured meanwhile."""
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    def register(self, address, num_bytes):
        self._check_thread("memory is pinned", beside_captures=False)
        if not self.gate.acquire(timeout=10):
            raise AssertionError("nobody lets this registration through")
        with self._lock:
            if self.refuses_after is not None and len(self.order) >= self.refuses_after:
                raise DriverError("pin host memory", 2)
            if self._overlapping(address, num_bytes):
                raise AssertionError("memory is pinned that is pinned already")
            self.registered[address] = num_bytes
            self.order.append(address)

    def unregister(self, address):
        self._check_thread("memory is unpinned", beside_captures=False)
        with self._lock:
            if address not in self.registered:
                raise AssertionError("memory is unpinned that is not pinned from there on")
            end = address + self.registered[address]
            if any(at < end and address < at + size for *both, size in self.under_way for at in both):
                raise AssertionError("memory is unpinned while copies of it are under way")
            del self.registered[address]

    def copy(self, destination, source, num_bytes, stream, pinned=False):
        self._check_thread("a copy is asked for")
        self.asked.append(("one", stream))
        self._put(stream, [(destination, source, num_bytes)], pinned)

    def copy_batch(self, destinations, sources, sizes, count, stream):
        """The arrays are read now. The copies of a batch are made in no defined order."""
        self._check_thread("a batch is asked for")
        if not self.has_batches:
            raise AssertionError("a batch is asked for where there are none")
        if not 0 < count <= self.longest_batch:
            raise AssertionError(f"a batch of {count} copies is asked for, and 1 to {self.longest_batch} may be")
        self.asked.append((count, stream))
        read = ctypes.c_int64 * count
        moves = list(zip(*(read.from_address(row) for row in (destinations, sources, sizes)), strict=True))
        self.streams.rng.shuffle(moves)
        self._put(stream, moves, pinned=True)

    def pci_address(self, device):
        self._check_device(device)
        return f"0000:{device:02x}:00.0"

    def _put(self, stream, moves, pinned):
        with self._lock:
            for destination, source, size in moves:
                is_pinned = [self._is_pinned(address, size) for address in (destination, source)]
                if pinned and not any(is_pinned):
                    raise AssertionError("a copy of memory that is not pinned is asked for as if it were")
            if stream not in self.streams.by_handle:
                raise AssertionError(f"a copy is asked for in {stream:#x}, which is no stream")
            self.under_way += moves
            self.streams.by_handle[stream].put(lambda: self._carry_out(moves))

    def _carry_out(self, moves):
        for destination, source, size in moves:
            ctypes.memmove(destination, source, size)
            self.under_way.remove((destination, source, size))

    def _overlapping(self, address, num_bytes):
        end = address + num_bytes
        return [(at, size) for at, size in self.registered.items() if at < end and address < at + size]

    def _is_pinned(self, address, num_bytes):
        """Whether all of it is, or none."""
        found = self._overlapping(address, num_bytes)
        if len(found) > 1:
            raise AssertionError("a copy lies over two registrations")
        if any(address < at or address + num_bytes > at + size for at, size in found):
            raise AssertionError("a copy lies in a registration in part")
        return bool(found)

    def _check_device(self, device):
        if device is not None and device not in self.devices:
            raise DriverError(f"work with device {device}", 101)

    def _check_thread(self, what, beside_captures=True):
        if self.here.device is None:
            raise AssertionError(f"{what} in a thread that works with no device")
        if self.is_capturing and not (beside_captures or self.here.is_relaxed):
            raise AssertionError(f"{what} while a graph is captured, which ends the capture")


def pins_host_caches(monkeypatch, driver):
    """From now on the region of each host cache is one that this driver pins, from the first call on."""

    class PinnedArena(HostArena):
        def __init__(self, *sizes, pinned_for, region=None):
            super().__init__(*sizes, pinned_for=CUDA, region=region, driver=driver, slice_bytes=SLICE)

    monkeypatch.setattr("cpu_prefix_cache.memory.arena.HostArena", PinnedArena)


def pinned_arena(driver, num_blocks=10, block_bytes=30_000, region=None):
    """A host region that this driver pins, in slices of SLICE bytes."""
    return HostArena(num_blocks, block_bytes, pinned_for=CUDA, region=region, driver=driver, slice_bytes=SLICE)
