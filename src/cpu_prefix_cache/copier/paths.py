"""How the pieces of one group cross the link: through the slots of a ring, or directly.

Coded pieces go through the ring, whose kernels code them. Both paths touch device blocks only after the event `after`.
They work slice by slice, and compute what a slice moves just before it is submitted, while the link is busy with the
slice before.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

import torch

from cpu_prefix_cache.copier.binding import BoundGroup
from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.copier.link import HostRegion
from cpu_prefix_cache.copier.ring import Ring
from cpu_prefix_cache.copier.triton_coding import CodingLauncher, coding_launchers
from cpu_prefix_cache.copier.triton_staging import LARGEST_WORD, Launcher, Tiling, launchers
from cpu_prefix_cache.memory.moves import Span, columns, pieces, whole_blocks
from cpu_prefix_cache.memory.span_tables import SpanPlace, SpanTables
from cpu_prefix_cache.messages.plan import Direction, GroupCopy

# The first slice is small, because the copies of one call of the driver begin when the call ends. The others are as
# large as a slot, or as this without slots, because a slice costs the host 50 us.
FIRST_SLICE_BYTES = 8 * 1024 * 1024
DIRECT_SLICE_BYTES = 32 * 1024 * 1024

# A small transfer is cut into so many slices of at least so many bytes, because the link is idle while the first slice
# of a store is gathered, and the last of a load scattered.
FEWEST_SLICES = 4
SMALLEST_SLICE_BYTES = 4 * 1024 * 1024

# Fewer spans are listed sooner by a loop, which joins neighbours, too: the operations of a table take some 100 us.
FEWEST_IN_TABLE = 160

# The most blocks of a slice through the ring: 64 KiB of ids. Blocks of 4 KiB or more fill a slot with fewer.
SLOT_IDS = 8192


def _slices(count: int, num_bytes: int, most: int, is_part: bool) -> Iterator[tuple[int, int]]:
    """`count` pieces of `num_bytes` bytes each, in slices [begin, end) of at most `most` pieces; of a part as large as
    they may be, because the link is busy with the part before."""
    if is_part:
        return pairwise([*range(0, count, most), count])
    least = -(-SMALLEST_SLICE_BYTES // num_bytes)
    first = min(count, most, max(least, min(FIRST_SLICE_BYTES // num_bytes, -(-count // FEWEST_SLICES))))
    step = min(most, max(first, -(-(count - first) // (FEWEST_SLICES - 1))))
    return pairwise([0, *range(first, count, step), count])


NO_FLAGS = torch.zeros(0, dtype=torch.int32, device="cpu")


Misfits = Callable[[], list[int]]  # once a store has passed: the first host block of each piece that did not fit


def _flagged(flags: torch.Tensor, host_blocks: Sequence[int]) -> list[int]:
    return [host_blocks[at] for at in flags.nonzero().flatten().tolist()]


def without_ring(group: BoundGroup, direct_bytes: int) -> BoundGroup | None:
    """The group as it crosses directly, with parts joined that are neighbours in every block; None if a block has less
    than `direct_bytes` bytes in some part even then, or is coded."""
    whole = group.joined()
    return None if group.is_coded or min(part.shape[1] for part in whole.parts) < direct_bytes else whole


class Slice(NamedTuple):
    """The spans of one call of the driver, and their bytes."""

    num_bytes: int
    spans: Iterable[Span]


class _DirectRun:
    """Parts of a group that cross together, in slices of at most `most` pieces."""

    def __init__(self, run: BoundGroup, region: HostRegion) -> None:
        self._piece, self._block_bytes = run.piece, region.block_bytes
        self._num_bytes = run.offsets[-1] - run.offsets[0]
        self.most = max(1, DIRECT_SLICE_BYTES // self._num_bytes)
        self._parts = [
            (part, which, list(columns(offset + which * part.shape[1], part.shape[1], region.block_bytes)))
            for part, offset in zip(run.parts, run.offsets, strict=False)
            for which in range(run.piece.device_blocks)
        ]
        self._tables: SpanTables | None = None  # a piece of several host blocks may have neighbours, which loops join
        if run.piece.host_blocks == 1 and len(self._parts) > 1:
            span = [
                SpanPlace(part.data_ptr(), part.stride(0), which, within, size)
                for part, which, [(_, within, _, size)] in self._parts
            ]
            if max(each.size for each in span) <= region.seam_bytes:
                self._tables = SpanTables(span, run.piece.device_blocks, region.block_bytes, region.seam_bytes)

    def slices(self, copy: GroupCopy, is_part: bool) -> Iterator[Slice]:
        count = len(copy.device_blocks) // self._piece.device_blocks
        cuts = list(_slices(count, self._num_bytes, self.most, is_part))
        tables = self._tables if count * len(self._parts) >= FEWEST_IN_TABLE else None
        spans: Iterator[Iterable[Span]]
        spans = tables.spans(copy, cuts) if tables else (self._spans(copy, begin, end) for begin, end in cuts)
        for (begin, end), each in zip(cuts, spans, strict=True):
            yield Slice((end - begin) * self._num_bytes, each)

    def _spans(self, copy: GroupCopy, begin: int, end: int) -> Iterator[Span]:
        host, device = self._piece.host_blocks, self._piece.device_blocks
        host_blocks = copy.host_blocks[begin * host : end * host]
        for part, which, places in self._parts:
            address, stride = part.data_ptr(), part.stride(0)
            blocks = copy.device_blocks[begin * device + which : end * device : device]
            begins = [address + each * stride for each in blocks]
            yield from pieces(begins, host_blocks, host, places, self._block_bytes)


class Direct:
    """How the large blocks of a group cross without a slot."""

    def __init__(self, group: BoundGroup, region: HostRegion) -> None:
        self._runs = [_DirectRun(run, region) for run in _cuts(group, DIRECT_SLICE_BYTES)]
        self.slice_pieces = min(run.most for run in self._runs)

    def slices(self, copy: GroupCopy, is_part: bool) -> Iterator[Iterator[Slice]]:
        """Slices of each run of parts."""
        return (run.slices(copy, is_part) for run in self._runs)


def past_ring(
    direction: Direction,
    copies: Iterable[tuple[Direct, GroupCopy]],
    ring: Ring,
    region: HostRegion,
    after: Event,
    is_part: bool,
) -> None:
    """Copy without a slot. A slice has blocks of several groups if they are few: each costs the engine's process
    Python's lock several times, however little it copies."""
    runs = [run for path, copy in copies for run in path.slices(copy, is_part)]
    if runs:
        ring.streams.copies.wait(after)
    for num_bytes, spans in _joined(runs):
        with ring.turn():
            ring.past(num_bytes, region.crossing(direction, spans))


def _joined(runs: Iterable[Iterable[Slice]]) -> Iterator[Slice]:
    """The slices of these runs, the last of one with the first of the next if that is not too much."""
    held: Slice | None = None
    for run in runs:
        for at, new in enumerate(run):
            if held is None:
                held = new
            elif at == 0 and held.num_bytes + new.num_bytes <= DIRECT_SLICE_BYTES:
                held = Slice(held.num_bytes + new.num_bytes, chain(held.spans, new.spans))
            else:
                yield held
                held = new
    if held is not None:
        yield held


class _SlotRun:
    """Parts of a group that fit a slot: all of them, unless the piece is large. A slot holds at most `most` pieces,
    `_pitch` bytes apart."""

    def __init__(self, run: BoundGroup, region: HostRegion, slot_bytes: int, tiling: Tiling) -> None:
        begin, num_bytes = run.offsets[0], run.offsets[-1] - run.offsets[0]
        offsets, device_blocks = [offset - begin for offset in run.offsets[:-1]], run.piece.device_blocks
        self._launchers: Sequence[Launcher | CodingLauncher]
        if run.is_coded:
            self._launchers = coding_launchers(run.parts, offsets, device_blocks=device_blocks)
        else:
            self._launchers = launchers(run.parts, offsets, device_blocks=device_blocks, tiling=tiling)
        self._piece, self._region, self._num_bytes = run.piece, region, num_bytes
        self._pitch = round_up(num_bytes, max(each.alignment for each in self._launchers))
        self.most = max(1, min(slot_bytes // self._pitch, SLOT_IDS // device_blocks))
        self._places = list(columns(begin, num_bytes, region.block_bytes))
        # each piece is one whole host block, and nothing is between pieces in a slot
        whole = run.piece.host_blocks == 1 and self._places == [(0, 0, 0, region.block_bytes)]
        self._is_one_block = whole and self._pitch == num_bytes

    def submit(
        self, direction: Direction, copy: GroupCopy, ring: Ring, after: Event, unfit: torch.Tensor, is_part: bool
    ) -> None:
        host, device = self._piece.host_blocks, self._piece.device_blocks
        for begin, end in _slices(len(copy.device_blocks) // device, self._num_bytes, self.most, is_part):
            ids = copy.device_blocks[begin * device : end * device]
            kernel = partial(self._launch, direction, unfit[begin:end])
            with ring.turn():
                spans = self._spans(ring.next_slot.address, copy.host_blocks[begin * host : end * host])
                ring.through(ids, kernel, self._region.crossing(direction, spans), after)

    def _spans(self, slot: int, host_blocks: Sequence[int]) -> Iterator[Span]:
        """The pieces of these host blocks, in a slot from address `slot` on."""
        width, block_bytes = self._piece.host_blocks, self._region.block_bytes
        if self._is_one_block:
            return whole_blocks(slot, host_blocks, block_bytes)
        begins = range(slot, slot + len(host_blocks) // width * self._pitch, self._pitch)
        return pieces(begins, host_blocks, width, self._places, block_bytes)

    def _launch(
        self, direction: Direction, unfit: torch.Tensor, memory: torch.Tensor, ids: torch.Tensor, stream: int
    ) -> None:
        """Gather the blocks with these ids into `memory`, or scatter it to them."""
        for launcher in self._launchers:
            launcher.launch(direction, self._pitch, memory, ids, stream, unfit)


class ThroughRing:
    """Copies fragments through the slots of a ring."""

    def __init__(self, group: BoundGroup, region: HostRegion, slot_bytes: int, tiling: Tiling) -> None:
        self._runs = [_SlotRun(run, region, slot_bytes, tiling) for run in _cuts(group, slot_bytes)]
        self._group, self._is_pinned = group, group.parts[0].device.type == "cuda"
        self.slice_pieces = min(run.most for run in self._runs)

    def submit(self, direction: Direction, copy: GroupCopy, ring: Ring, after: Event, is_part: bool) -> Misfits | None:
        flags, unfit = NO_FLAGS, None
        if self._group.is_coded and direction is Direction.STORE:
            firsts = copy.host_blocks[:: self._group.piece.host_blocks]
            flags = torch.zeros(len(firsts), dtype=torch.int32, device="cpu", pin_memory=self._is_pinned)
            unfit = partial(_flagged, flags, firsts)
        for run in self._runs:
            run.submit(direction, copy, ring, after, flags, is_part)
        return unfit


def _cuts(group: BoundGroup, slot_bytes: int) -> Iterator[BoundGroup]:
    """Its parts in as few runs that fit a slot as possible."""
    first = 0
    for last, end in enumerate(group.offsets[2:], 1):
        if round_up(end - group.offsets[first], LARGEST_WORD) > slot_bytes:
            yield group.run(first, last)
            first = last
    yield group.run(first, len(group.parts))


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
