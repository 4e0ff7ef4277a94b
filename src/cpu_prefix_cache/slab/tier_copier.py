"""Copies between host blocks and what lies below them, in threads of its own.

    submit   checks all ids, cuts the transfer into slices, and returns
    threads  each takes a slice: some MiB, so that loads get their turn
    end      when all slices have ended; a transfer has failed if one of them raised, and a load that may be given up
             if no slice of any load has been read for some seconds, whatever its threads do (landing.py), or if no
             thread is left for loads

A transfer goes in the order of its slots, so that a slice has adjacent ones.
Of a store, what lies behind a piece in its host blocks, in each of their lanes, is zeroed first: bytes of an earlier
piece, which may be another tenant's, are not written to a file. A rank that lacks a group (a pipeline stage) has pieces
of no bytes there: its host blocks are written as zeros, so what any rank has says which chunks are whole.
"""

import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.events import Event, Passed, raise_failure
from cpu_prefix_cache.copier.ids import check_range
from cpu_prefix_cache.copier.job_thread import begin_jobs
from cpu_prefix_cache.memory.ending import end_outside_of
from cpu_prefix_cache.messages.errors import ConfigurationError, MisuseError
from cpu_prefix_cache.messages.plan import Direction, GroupCopy, Label
from cpu_prefix_cache.messages.stats import TierStatistics
from cpu_prefix_cache.messages.tier import READ_BYTES
from cpu_prefix_cache.model.planner import Piece
from cpu_prefix_cache.slab.below import Below, address_of
from cpu_prefix_cache.slab.jobs import Jobs
from cpu_prefix_cache.slab.landing import Landing
from cpu_prefix_cache.slab.meter import RateMeter
from cpu_prefix_cache.slab.records import check_label

if TYPE_CHECKING:
    import torch

# As fast as 8 at 2 MiB; beside a busy engine a step takes 1.25 times as long, and 1.39 with 8 (docs/tiers.md).
THREADS = 4
STORING = 2  # threads, so that reads need not wait for writes
SLICE_BYTES = READ_BYTES // THREADS  # at most
STALL_LOOK_SECONDS = 0.25  # between two looks of who waits for an end


class Entry(NamedTuple):
    """One host block of a transfer. `slot` is the number by which the decider knows what lies below it."""

    slot: int
    block: int
    label: Label


class SlotStatistics(NamedTuple):
    """Since the tier was opened. Seconds are those in which a transfer of that direction was under way."""

    bytes_read: int
    bytes_written: int
    read_seconds: float
    write_seconds: float
    refused: int  # slots
    kept: int = 0  # of the refused slots, values with wrong bytes that were not deleted from a store

    def added_to(self, tier: TierStatistics) -> TierStatistics:
        """The statistics of the deciding half, with what its one rank alone has seen."""
        return replace(tier, read_seconds=self.read_seconds, write_seconds=self.write_seconds, kept=self.kept)


class TierCopier(Copier):
    """Between `region`, uint8 [host blocks, bytes] in host memory, which is a tensor or a view, and what is `below`,
    whose slots are as large as host blocks. `pieces` are the planner's.

    Ended by `close`, or when it is collected, or when the process ends. A load is given up when no slice has been read
    whole for `stall_seconds`, longer in proportion where a host block has more bytes than a slice; None: never. So
    reads of READ_BYTES in `stall_seconds` are waited for.

    Raises ConfigurationError when the region does not fit.
    """

    def __init__(
        self,
        below: Below,
        region: "torch.Tensor | memoryview",
        pieces: Sequence[Piece],
        stall_seconds: float | None = None,
    ) -> None:
        self._region, self.block_bytes = _Region(region), below.slot_bytes
        if self._region.block_bytes != self.block_bytes:
            raise ConfigurationError(
                f"{self.block_bytes} bytes below are those of a host block, which has {self._region.block_bytes} bytes"
            )
        for piece in pieces:
            if not 0 <= piece.num_bytes * piece.lanes <= piece.host_blocks * self.block_bytes:
                raise ConfigurationError(
                    f"a piece of group {piece.group.name!r} has {piece.num_bytes} bytes, more than its host blocks"
                )
        below.bind(self._region.all_bytes)
        self.below, self._pieces = below, tuple(pieces)
        self._num_refused = 0
        most = max(SLICE_BYTES, self.block_bytes)  # of a slice
        self._landing = None if stall_seconds is None else Landing(most, stall_seconds * most / SLICE_BYTES, THREADS)
        self._meters = {direction: RateMeter() for direction in Direction}
        self._jobs = Jobs()
        threads = [
            begin_jobs(f"slab-{at}", partial(self._jobs.take, directions))
            for at, directions in enumerate(_directions(may_hang=stall_seconds is not None))
        ]
        self._end = weakref.finalize(self, end_outside_of, threads, os.getpid(), partial(_end, self._jobs, threads))

    def here(self) -> Event:
        return Passed()

    def submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Event) -> Event:
        entries = self.check(direction, copies)
        if not entries:
            return Passed()
        count = self._slice_blocks(direction, len(entries))
        slices = [entries[at : at + count] for at in range(0, len(entries), count)]
        meter = self._meters[direction]
        undo = partial(self.below.forget, [entry.slot for entry in entries]) if direction is Direction.STORE else None
        act = self._store if direction is Direction.STORE else self._load
        landing = self._landing if direction is Direction.LOAD else None
        transfer = _Transfer(len(slices), after, meter, undo, landing)
        work = [partial(act, transfer, part) for part in slices]
        meter.begin()
        try:
            self._jobs.put(direction, [partial(transfer.run, each) for each in work])
        except BaseException:
            meter.end()
            raise
        return transfer

    def check(self, direction: Direction, copies: Iterable[GroupCopy]) -> list[Entry]:
        """Host blocks of a transfer, by slot. Raises MisuseError for copies that are not allowed."""
        entries = sorted((entry for copy in copies for entry in self._entries(copy)), key=attrgetter("slot"))
        what, place = ("host block", "block") if direction is Direction.LOAD else ("slot", "slot")
        if len(set(map(attrgetter(place), entries))) != len(entries):
            raise MisuseError(f"a {direction.value} writes a {what} twice")
        return entries

    def keep_floor(self) -> None:
        """A thread lets later processes know the floor, which was raised."""
        self._jobs.put(Direction.STORE, [partial(_keep, self.below)])

    @property
    def read_bytes_per_second(self) -> float | None:
        return self._meters[Direction.LOAD].bytes_per_second

    def statistics(self) -> SlotStatistics:
        loads, stores = self._meters[Direction.LOAD], self._meters[Direction.STORE]
        moved = loads.num_bytes, stores.num_bytes, loads.seconds, stores.seconds
        return SlotStatistics(*moved, self._num_refused, self.below.kept)

    def close(self) -> None:
        """Wait until all transfers have ended, and end the threads. May be called again."""
        self._end()

    def _entries(self, copy: GroupCopy) -> Iterator[Entry]:
        if not 0 <= copy.group < len(self._pieces):
            raise MisuseError(f"there are {len(self._pieces)} groups, numbered from 0; got group {copy.group}")
        slots, blocks, labels = copy.host_blocks, copy.device_blocks, copy.labels
        if not len(slots) == len(blocks) == len(labels):
            raise MisuseError(f"{len(slots)} slots, {len(blocks)} host blocks, {len(labels)} labels: not one for each")
        check_range("host blocks", blocks, self._region.num_blocks)
        check_range("slots", slots, self.below.slots)
        places = self._pieces[copy.group].host_blocks
        for label in labels:
            check_label(label)
            if label.group != copy.group or label.place >= places:
                raise MisuseError(f"{label} is none of group {copy.group}, whose pieces take {places} host blocks")
        return map(Entry, slots, blocks, labels)

    def _slice_blocks(self, direction: Direction, blocks: int) -> int:
        """Host blocks to a slice: all threads have one, or each is as large as may be."""
        threads = STORING if direction is Direction.STORE else THREADS
        return max(1, min(-(-blocks // threads), SLICE_BYTES // self.block_bytes))

    def _store(self, transfer: "_Transfer", entries: Sequence[Entry]) -> int:
        for block, begin, end in self._tails(entries):
            self._region.zero(block, begin, end)
        self.below.write(*self._columns(entries))
        return len(entries) * self.block_bytes

    def _load(self, transfer: "_Transfer", entries: Sequence[Entry]) -> int:
        slots, views, labels = self._columns(entries)
        if self._landing is None:
            lost = set(self.below.read(slots, views, labels))
        else:
            landed = self._landing.views(len(entries), self.block_bytes)
            with self._landing.under_way(transfer.ended):
                lost = set(self.below.read(slots, landed, labels))
            transfer.land(landed, views)
        refused = [entry.slot for entry in entries if entry.slot in lost]
        transfer.refused += refused
        self._num_refused += len(refused)
        return (len(entries) - len(refused)) * self.block_bytes

    def _columns(self, entries: Sequence[Entry]) -> tuple[list[int], list[memoryview], list[Label]]:
        slots, blocks, labels = map(list, zip(*entries, strict=True))
        return slots, list(map(self._region.view, blocks)), labels

    def _tails(self, entries: Iterable[Entry]) -> list[tuple[int, int, int]]:
        """Bytes [begin, end) of which host blocks lie behind the last one of a piece in its lane."""
        tails = []
        for _, block, label in entries:
            piece = self._pieces[label.group]
            lane = self.block_bytes // piece.lanes
            used = max(0, piece.num_bytes - label.place * lane)
            if used < lane:
                tails += [(block, end - lane + used, end) for end in range(lane, self.block_bytes + 1, lane)]
        return tails


class _Transfer(Event):
    """Ended when `slices` slices have. What one of them raises keeps the others from beginning; `undo` follows.

    A load has ended when reads of its `landing` stall, too. From then on it does not write to host memory. `refused`
    are the slots whose bytes did not match its labels.
    """

    def __init__(
        self,
        slices: int,
        after: Event,
        meter: RateMeter,
        undo: Callable[[], object] | None,
        landing: Landing | None,
    ) -> None:
        self._left, self._after, self._meter, self._undo = slices, after, meter, undo
        self._landing, self._since = landing, time.monotonic()
        self._lock, self.ended = threading.Lock(), threading.Event()
        self._error: BaseException | None = None
        self.refused: list[int] = []

    def run(self, work: Callable[[], int]) -> None:
        """Called once for each slice, by any thread. `work` returns how many bytes it moved."""
        try:
            if self._error is None:
                self._after.until_passed()
                self._meter.moved(work())
                if self._landing is not None:
                    self._landing.moved()
        except BaseException as error:
            self._error = self._error or error
            if not isinstance(error, Exception):
                raise
        finally:
            with self._lock:
                self._left -= 1
                is_last = not self._left
            if is_last:
                self._finish()

    def land(self, landed: Sequence[memoryview], views: Sequence[memoryview]) -> None:
        """Copy what a slice has read to host memory. Raises OSError if nobody waits for it any more."""
        with self._lock:
            if self._error is not None:
                raise self._error
            for source, target in zip(landed, views, strict=True):
                ctypes.memmove(address_of(target), address_of(source), len(source))

    def passed(self) -> bool:
        if self._landing is not None and not self.ended.is_set() and self._landing.stall(self._since):
            self._give_up()
        if not self.ended.is_set():
            return False
        raise_failure(self._error)
        return True

    def until_passed(self) -> None:
        while not self.passed():
            self.ended.wait(STALL_LOOK_SECONDS)

    def unfit(self) -> Sequence[int]:
        return sorted(self.refused)  # threads have added them slice by slice

    def _give_up(self) -> None:
        with self._lock:
            self._error = self._error or OSError("no load has read a slice in time, or no thread is left for it")
        self.ended.set()

    def _finish(self) -> None:
        try:
            self._meter.end()
            if self._error is not None and self._undo is not None:
                self._undo()
        finally:
            self.ended.set()


class _Region:
    """Host blocks as views of bytes."""

    def __init__(self, region: "torch.Tensor | memoryview") -> None:
        self._memory = region  # keeps the bytes
        self.all_bytes = region.cast("B") if isinstance(region, memoryview) else _bytes_of(region)
        shape = tuple(region.shape or ())
        self.num_blocks, self.block_bytes = shape if len(shape) == 2 else (0, 0)
        if not self.num_blocks * self.block_bytes == len(self.all_bytes) > 0:
            raise ConfigurationError(f"host memory is uint8 [host blocks, bytes], got {shape}")
        self.address = address_of(self.all_bytes)

    def view(self, block: int) -> memoryview:
        return self.all_bytes[block * self.block_bytes : (block + 1) * self.block_bytes]

    def zero(self, block: int, begin: int, end: int) -> None:
        """Bytes [begin, end) of a block."""
        ctypes.memset(self.address + block * self.block_bytes + begin, 0, end - begin)


def _bytes_of(region: "torch.Tensor") -> memoryview:
    if str(region.dtype) != "torch.uint8" or not region.is_contiguous():
        raise ConfigurationError(
            f"host memory is uint8 [host blocks, bytes], without gaps, got {region.dtype} {tuple(region.shape)}"
        )
    if region.device.type != "cpu":
        raise ConfigurationError(f"a tier is below host memory, got a tensor on {region.device}")
    return memoryview((ctypes.c_ubyte * region.numel()).from_address(region.data_ptr())).cast("B")


def _directions(may_hang: bool) -> Sequence[Sequence[Direction]]:
    """Directions of each thread. If a read may keep its thread for good, one thread is for stores alone."""
    loads, stores = [Direction.LOAD], [Direction.STORE]
    alone = [stores] if may_hang else []
    both = [loads + stores] * (STORING - len(alone))
    return [*both, *[loads] * (THREADS - len(both)), *alone]


def _keep(below: Below) -> None:
    with contextlib.suppress(OSError):  # which has been logged, and every write meets it again
        below.keep()


def _end(jobs: Jobs, threads: Sequence[threading.Thread]) -> None:
    jobs.close()
    for thread in threads:
        thread.join()
