"""How fast a tier reads and writes a file, with checksums, beside plain calls to the system on the same file.

    verified   SlabCopier over a Slab: a record and a checksum to each slot
    plain      os.preadv and os.pwritev of one slot each, in as many threads, with O_DIRECT if the slab has it

They take turns. All slots are moved once in a run, in a random order, some transfers at a time. The first writes of a
new file are slower than later ones and are not counted.
"""

import os
import random
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from cpu_prefix_cache.copier.streams import Event
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.messages.errors import PrefixCacheError
from cpu_prefix_cache.messages.plan import CHUNK, Direction, GroupCopy, Label
from cpu_prefix_cache.model.groups import Group, GroupKind
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.slab.namespace import namespace_of
from cpu_prefix_cache.slab.slab import Slab
from cpu_prefix_cache.slab.slab_copier import THREADS, SlabCopier

TRANSFER_BYTES = 32 << 20
IN_FLIGHT = 8
REPEATS = 5
VERIFIED, PLAIN = "verified", "plain"


class FileRate(NamedTuple):
    """One way to move slots. GB are 1e9 bytes; `cpu_ms_per_gb` is processor time of all threads."""

    method: str
    slot_bytes: int
    direction: str  # "read" or "write"
    gb_per_s: float
    cpu_ms_per_gb: float


class Run(NamedTuple):
    seconds: float
    cpu_seconds: float


class FileUnderTest:
    """A slab of `num_bytes` in slots of `slot_bytes` under the folder `path`, and host memory for some transfers.

    Raises ConfigurationError when the path or the disk does not have what it needs.
    """

    def __init__(self, path: str, num_bytes: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes = max(1, num_bytes // slot_bytes), slot_bytes
        block = Group(name="measured", kind=GroupKind.PREFIX, block_tokens=1, block_bytes=slot_bytes)
        planner = HybridChunkPlanner([block], max_model_len=1 << 30)
        named = namespace_of(planner, model="bench", revision="", dtype="", hash="sha256", ranks=1)
        self._slab = Slab(path, named, rank=0, ranks=1, slots=self.slots, slot_bytes=slot_bytes, nbytes=num_bytes)
        self._at_once = max(1, TRANSFER_BYTES // slot_bytes)
        self._arena = HostArena(self._at_once * IN_FLIGHT, slot_bytes)
        self.region = self._arena.blocks
        self.region.copy_(torch.randint(256, (1, slot_bytes), dtype=torch.uint8))  # and takes all pages
        self.copier = SlabCopier(self._slab, self.region, planner.pieces)
        self._random = random.Random(0)
        self._generation = self._slab.next_generation
        self._labels: list[Label | None] = [None] * self.slots

    @property
    def blocks_file(self) -> str:
        return str(Path(self._slab.folder) / "blocks")

    @property
    def is_direct(self) -> bool:
        return self._slab.is_direct

    @property
    def moved_bytes(self) -> int:
        """In one run."""
        return self.slots * self.slot_bytes

    def write(self) -> Run:
        return self._timed(lambda: self._run(Direction.STORE))

    def read(self) -> Run:
        """Every slot must be as it was written."""
        before = self.copier.statistics().refused
        run = self._timed(lambda: self._run(Direction.LOAD))
        refused = self.copier.statistics().refused - before
        if refused:
            raise PrefixCacheError(f"{refused} of {self.slots} slots in {self.blocks_file} are not what was written")
        return run

    def plain_write(self) -> Run:
        """What the slots hold afterwards, no record says."""
        return self._plain(os.pwritev)

    def plain_read(self) -> Run:
        return self._plain(os.preadv)

    def close(self) -> None:
        self.copier.close()
        self._slab.close()
        self._arena.close()

    def remove(self) -> None:
        """After `close`: delete what was made."""
        shutil.rmtree(Path(self.blocks_file).parents[1])

    def _run(self, direction: Direction) -> None:
        under_way: deque[Event] = deque()
        order = self._order()
        for at in range(-(-self.slots // self._at_once)):
            slots = tuple(order[at * self._at_once : (at + 1) * self._at_once])
            if len(under_way) == IN_FLIGHT:  # whose blocks are the ones this transfer takes
                under_way.popleft().until_passed()
            first = at % IN_FLIGHT * self._at_once
            labels = tuple(self._label(slot, is_new=direction is Direction.STORE) for slot in slots)
            copy = GroupCopy(0, slots, tuple(range(first, first + len(slots))), labels)
            under_way.append(self.copier.submit(direction, [copy], self.copier.here()))
        for event in under_way:
            event.until_passed()

    def _label(self, slot: int, *, is_new: bool) -> Label:
        label = self._labels[slot]
        if is_new or label is None:
            label = self._labels[slot] = Label(slot.to_bytes(32, "little"), b"", 0, 0, CHUNK, self._generation)
            self._generation += 1
        return label

    def _plain(self, call: Callable[[int, list[memoryview], int], int]) -> Run:
        flags = os.O_RDWR | (os.O_DIRECT if self.is_direct else 0)
        file = os.open(self.blocks_file, flags)
        try:
            return self._timed(lambda: self._in_threads(call, file))
        finally:
            os.close(file)

    def _in_threads(self, call: Callable[[int, list[memoryview], int], int], file: int) -> None:
        order = self._order()
        errors: list[OSError] = []

        def run(number: int) -> None:
            view = self.region[number % len(self.region)].numpy().data
            try:
                for slot in order[number::THREADS]:
                    call(file, [view], slot * self.slot_bytes)
            except OSError as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise PrefixCacheError(f"{self.blocks_file}: {errors[0].strerror}")

    def _order(self) -> list[int]:
        return self._random.sample(range(self.slots), self.slots)

    def _timed(self, act: Callable[[], object]) -> Run:
        """A file that goes through the system's cache is on the disk at the end of a write, and not in the cache."""
        began, cpu = time.perf_counter(), time.process_time()
        act()
        if not self.is_direct:
            self._leave_cache()
        return Run(time.perf_counter() - began, time.process_time() - cpu)

    def _leave_cache(self) -> None:
        file = os.open(self.blocks_file, os.O_RDWR)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def measure_file(file: FileUnderTest, repeats: int = REPEATS) -> Iterator[FileRate]:
    """The medians of `repeats` runs of each way, in turn."""
    ways: dict[tuple[str, str], Callable[[], Run]] = {
        (VERIFIED, "write"): file.write,
        (VERIFIED, "read"): file.read,
        (PLAIN, "read"): file.plain_read,
        (PLAIN, "write"): file.plain_write,
    }
    runs: dict[tuple[str, str], list[Run]] = {way: [] for way in ways}
    file.write()
    for _ in range(repeats):
        for way, run in ways.items():
            runs[way].append(run())
    for (method, direction), some in runs.items():
        yield rate(method, file, direction, some)


def rate(method: str, file: FileUnderTest, direction: str, runs: Sequence[Run]) -> FileRate:
    size = file.moved_bytes / 1e9
    seconds, cpu = median(run.seconds for run in runs), median(run.cpu_seconds for run in runs)
    return FileRate(method, file.slot_bytes, direction, size / seconds, 1e3 * cpu / size)
