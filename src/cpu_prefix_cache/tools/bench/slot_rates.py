"""How fast a tier reads and writes its slots, with checksums, beside plain calls to what holds them.

    verified   the tier's own copier: a record or frame and a checksum to each
    plain      calls of one slot each, in as many threads

They take turns. All slots are moved once in a run, in a random order, some transfers at a time. The first writes are
slower than later ones and are not counted.
"""

import random
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import torch

from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.messages.errors import PrefixCacheError
from cpu_prefix_cache.messages.plan import CHUNK, Direction, GroupCopy, Label
from cpu_prefix_cache.messages.tier import READ_BYTES
from cpu_prefix_cache.model.groups import PrefixGroup
from cpu_prefix_cache.model.planner import HybridChunkPlanner, Piece
from cpu_prefix_cache.slab.tier_copier import THREADS, TierCopier

IN_FLIGHT = 8
REPEATS = 5
VERIFIED, PLAIN = "verified", "plain"

CopierOf = Callable[[torch.Tensor, Sequence[Piece]], TierCopier]  # of host memory, and the pieces in it


class SlotRate(NamedTuple):
    """One way to move slots. GB are 1e9 bytes; `cpu_ms_per_gb` is processor time of all threads."""

    method: str
    slot_bytes: int
    direction: str  # "read" or "write"
    gb_per_s: float
    cpu_ms_per_gb: float


class TimedRun(NamedTuple):
    seconds: float
    cpu_seconds: float


def planner_for(slot_bytes: int) -> HybridChunkPlanner:
    """Planner of a model whose chunks are one slot."""
    block = PrefixGroup(name="measured", block_tokens=1, block_bytes=slot_bytes)
    return HybridChunkPlanner([block], max_model_len=1 << 30)


class SlotsUnderTest(ABC):
    """So many slots of `slot_bytes` bytes, or values, at `where`, and host memory for some transfers, of which `make`
    makes their copier.
    """

    def __init__(self, slots: int, slot_bytes: int, make: CopierOf, where: str) -> None:
        self.slots, self.slot_bytes, self.where = slots, slot_bytes, where
        self._at_once = max(1, READ_BYTES // self.slot_bytes)
        self._arena = HostArena(self._at_once * IN_FLIGHT, self.slot_bytes)
        self.region = self._arena.blocks
        self.region.copy_(torch.randint(256, (1, self.slot_bytes), dtype=torch.uint8))  # and takes all pages
        self.copier = make(self.region, planner_for(slot_bytes).pieces)
        self._random = random.Random(0)
        self._generation = self.copier.below.next_generation
        self._labels: list[Label | None] = [None] * self.slots

    @property
    def moved_bytes(self) -> int:
        """In one run."""
        return self.slots * self.slot_bytes

    def write(self) -> TimedRun:
        return self._timed(lambda: self._run(Direction.STORE))

    def read(self) -> TimedRun:
        """Every slot must be as it was written."""
        before = self.copier.statistics().refused
        run = self._timed(lambda: self._run(Direction.LOAD))
        refused = self.copier.statistics().refused - before
        if refused:
            raise PrefixCacheError(f"{refused} of {self.slots} slots in {self.where} are not what was written")
        return run

    @abstractmethod
    def plain_write(self) -> TimedRun:
        """Write without records. Slot contents are undefined afterwards."""

    @abstractmethod
    def plain_read(self) -> TimedRun: ...

    @abstractmethod
    def remove(self) -> None:
        """After `close`: delete what was made."""

    def close(self) -> None:
        self.copier.close()
        self._arena.close()

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
            label = self._labels[slot] = Label(key_of(slot), b"", 0, 0, CHUNK, self._generation)
            self._generation += 1
        return label

    def _in_threads(self, call: Callable[[int, memoryview], object]) -> None:
        """Call with each slot once, and with host memory that no other thread uses."""
        order = self._order()
        errors: list[OSError] = []

        def run(number: int) -> None:
            view = self.region[number % len(self.region)].numpy().data
            try:
                for slot in order[number::THREADS]:
                    call(slot, view)
            except OSError as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise PrefixCacheError(f"{self.where}: {errors[0].strerror or errors[0]}")

    def _order(self) -> list[int]:
        return self._random.sample(range(self.slots), self.slots)

    def _timed(self, act: Callable[[], object]) -> TimedRun:
        began, cpu = time.perf_counter(), time.process_time()
        act()
        return TimedRun(time.perf_counter() - began, time.process_time() - cpu)


def key_of(slot: int) -> bytes:
    return slot.to_bytes(32, "little")


def measure_slots(slots: SlotsUnderTest, repeats: int = REPEATS) -> Iterator[SlotRate]:
    """The medians of `repeats` runs of each way, in turn."""
    ways: dict[tuple[str, str], Callable[[], TimedRun]] = {
        (VERIFIED, "write"): slots.write,
        (VERIFIED, "read"): slots.read,
        (PLAIN, "write"): slots.plain_write,
        (PLAIN, "read"): slots.plain_read,
    }
    runs: dict[tuple[str, str], list[TimedRun]] = {way: [] for way in ways}
    slots.write()
    for _ in range(repeats):
        for way, run in ways.items():
            runs[way].append(run())
    for (method, direction), some in runs.items():
        yield rate(method, slots, direction, some)


def rate(method: str, slots: SlotsUnderTest, direction: str, runs: Sequence[TimedRun]) -> SlotRate:
    size = slots.moved_bytes / 1e9
    seconds, cpu = median(run.seconds for run in runs), median(run.cpu_seconds for run in runs)
    return SlotRate(method, slots.slot_bytes, direction, size / seconds, 1e3 * cpu / size)
