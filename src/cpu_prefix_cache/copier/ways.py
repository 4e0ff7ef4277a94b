"""How the pieces of one group cross: through the slots of a ring, or directly.

Both go slice by slice. What does not change from copy to copy is worked out when they are built, and what is left for a
slice is a few operations on whole arrays: the link waits for the first slice, and the host must stay ahead of it.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice, pairwise
from typing import Protocol

import torch

from cpu_prefix_cache.copier import triton_staging
from cpu_prefix_cache.copier.binding import BoundGroup, CheckedCopy
from cpu_prefix_cache.copier.calibration import Thresholds
from cpu_prefix_cache.copier.link import Link
from cpu_prefix_cache.copier.queues import Mark
from cpu_prefix_cache.copier.ring import Ring
from cpu_prefix_cache.copier.triton_staging import LARGEST_WORD, Launcher, Tiling
from cpu_prefix_cache.memory.layout import PieceLayout
from cpu_prefix_cache.memory.moves import HOST, SEAM_BYTES, Moves, by_slice, columns, cut_at_seams, few_moves, joined
from cpu_prefix_cache.memory.parts import side_by_side
from cpu_prefix_cache.plan import Direction

# The first slice is small, so that the link begins soon: a call of the driver has all of its copies go at once, at its
# end. The others are as large as a slot, or this, where there is none: a slice costs the host 50 us.
FIRST_SLICE_BYTES = 8 * 1024 * 1024
DIRECT_SLICE_BYTES = 64 * 1024 * 1024

# A small transfer goes in this many slices all the same, if none is smaller than that: the last slice of a load is
# scattered, and the first of a store gathered, while the link has nothing to do.
FEWEST_SLICES = 4
SMALLEST_SLICE_BYTES = 4 * 1024 * 1024

# The moves of larger slices are worked out together, while the link is busy with the first two.
FEW_MOVES = 32


class Way(Protocol):
    def submit(self, direction: Direction, copy: CheckedCopy, ring: Ring, after: Mark) -> None:
        """Have the ring's queues carry out `copy`. Device blocks are touched only once `after` is passed."""


def _steps(count: int, num_bytes: int, most: int) -> tuple[int, int]:
    """How many pieces the first slice is of, and every later one. A piece has `num_bytes`."""
    least = -(-SMALLEST_SLICE_BYTES // num_bytes)
    first = min(count, most, max(least, min(FIRST_SLICE_BYTES // num_bytes, -(-count // FEWEST_SLICES))))
    return first, min(most, max(first, -(-(count - first) // (FEWEST_SLICES - 1))))


class Region:
    """The host region as both ways see it: where it begins, how large its blocks are, and the link there."""

    def __init__(self, blocks: torch.Tensor, link: Link, seam_bytes: int = SEAM_BYTES) -> None:
        self.block_bytes = blocks.shape[1]
        self.link = link
        self._base = blocks.data_ptr()
        self._seam_bytes = seam_bytes

    def slices(self, pieces: "Pieces", most: int) -> Iterator[tuple[int, Moves]]:
        """Of how many pieces each slice is, at most `most`, and its moves."""
        first, step = _steps(len(pieces), pieces.places.num_bytes, most)
        begins = [0, *range(first, len(pieces), step), len(pieces)]
        few = 2 if step * len(pieces.places.listed) > FEW_MOVES else len(begins)
        for begin, end in pairwise(begins[: few + 1]):
            yield end - begin, self._few_moves(pieces, begin, end)
        if few + 1 < len(begins):
            counts = (end - begin for begin, end in pairwise(begins[few:]))
            yield from zip(counts, self._moves(pieces, begins[few], step), strict=True)

    def _few_moves(self, pieces: "Pieces", begin: int, end: int) -> Moves:
        some = zip(pieces.few_begins(begin, end), pieces.host_ids[begin:end].tolist(), strict=True)
        return few_moves(some, pieces.places.listed, self.block_bytes, self._base, self._seam_bytes)

    def _moves(self, pieces: "Pieces", begin: int, step: int) -> Iterator[Moves]:
        """Of all pieces from number `begin` on, in slices of `step`."""
        places, host_ids = pieces.places, pieces.host_ids[begin:]
        slice_ = torch.arange(len(host_ids)) // step
        device = pieces.begins(begin, slice_, step).unsqueeze(1) + places.done
        host = torch.add(places.within, host_ids[:, places.column], alpha=self.block_bytes)
        rows = device, host, places.size.expand_as(host), slice_.unsqueeze(1).expand_as(host)
        table = cut_at_seams(joined(torch.stack([row.flatten() for row in rows])), self._seam_bytes)
        table[HOST] += self._base
        return by_slice(table)


class Places:
    """Where bytes [first_byte, first_byte + num_bytes) of a piece lie in the host blocks it takes.

    Listed place by place, and as int64 [places] each: which block of the piece it is in, the byte within that, the byte
    of the range, and the size.
    """

    def __init__(self, first_byte: int, num_bytes: int, block_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.listed = list(columns(first_byte, num_bytes, block_bytes))
        self.column, self.within, self.done, self.size = torch.tensor(self.listed, dtype=torch.int64).t().contiguous()


class Pieces(Protocol):
    """The same range of some pieces: `places` in the host blocks `host_ids`, int64 [pieces, host blocks of a piece]."""

    places: Places
    host_ids: torch.Tensor

    def __len__(self) -> int: ...

    def few_begins(self, begin: int, end: int) -> Iterable[int]:
        """The addresses where pieces [begin, end), the next slice, begin on the device."""

    def begins(self, begin: int, slice_: torch.Tensor, step: int) -> torch.Tensor:
        """The same of all pieces from `begin` on, which are in these slices of `step` pieces: int64 [pieces]."""


class InBlocks:
    """Pieces, or blocks of pieces, that begin at addresses of their own, `device`, int64 [pieces]."""

    def __init__(self, places: Places, host_ids: torch.Tensor, device: torch.Tensor) -> None:
        self.places, self.host_ids, self._device = places, host_ids, device

    def __len__(self) -> int:
        return len(self.host_ids)

    def few_begins(self, begin: int, end: int) -> Iterable[int]:
        return self._device[begin:end].tolist()

    def begins(self, begin: int, slice_: torch.Tensor, step: int) -> torch.Tensor:
        return self._device[begin:]


class InSlots:
    """Pieces that lie `pitch` apart in slots, which begin at the addresses that come from `slots`."""

    def __init__(self, places: Places, host_ids: torch.Tensor, pitch: int, slots: Iterator[int]) -> None:
        self.places, self.host_ids, self._pitch, self._slots = places, host_ids, pitch, slots

    def __len__(self) -> int:
        return len(self.host_ids)

    def few_begins(self, begin: int, end: int) -> Iterable[int]:
        first = next(self._slots)
        return range(first, first + (end - begin) * self._pitch, self._pitch)

    def begins(self, begin: int, slice_: torch.Tensor, step: int) -> torch.Tensor:
        slots = torch.tensor(list(islice(self._slots, int(slice_[-1]) + 1)))
        within = torch.arange(len(slice_)) - slice_ * step
        return slots[slice_] + within * self._pitch


class StagedGroup:
    """One group: how it would cross directly, with neighbouring parts joined, and whether that is as good."""

    def __init__(self, group: BoundGroup, region: Region, thresholds: Thresholds) -> None:
        self.region = region
        self.name = group.piece.group.name
        self.device_blocks = group.piece.device_blocks
        together = side_by_side(group.parts) if self.device_blocks == 1 else list(group.parts)
        enough = thresholds.lone_part_bytes if len(together) == 1 else thresholds.each_part_bytes
        self.is_direct = all(part.shape[1] >= enough for part in together)
        self.parts = together if self.is_direct else list(group.parts)
        self.layout = PieceLayout([part.shape[1] for part in self.parts], self.device_blocks)

    @property
    def largest_part(self) -> int:
        """What a piece has of the part that it has most of, in bytes."""
        return self.device_blocks * max(part.shape[1] for part in self.parts)


class Direct:
    """Block by block over the link, part after part: for large blocks."""

    def __init__(self, group: StagedGroup) -> None:
        self._region = group.region
        self._parts = [
            (part, which, Places(offset + which * part.shape[1], part.shape[1], group.region.block_bytes))
            for part, offset in zip(group.parts, group.layout.offsets, strict=True)
            for which in range(group.device_blocks)
        ]

    def submit(self, direction: Direction, copy: CheckedCopy, ring: Ring, after: Mark) -> None:
        ring.lane.copies.wait(after)
        for part, which, places in self._parts:
            device = copy.device[:, which] * part.stride(0) + part.data_ptr()
            most = max(1, DIRECT_SLICE_BYTES // places.num_bytes)
            for _, moves in self._region.slices(InBlocks(places, copy.host, device), most):
                ring.past(partial(self._region.link.cross, direction, moves))


class _Section:
    """Parts that follow each other in a piece and fit a slot together: all of them, unless the piece is large.

    In a slot, pieces are `pitch` bytes apart, and at most `most` of them.
    """

    def __init__(self, group: StagedGroup, first: int, last: int, slot_bytes: int, tiling: Tiling) -> None:
        begin = group.layout.offsets[first]
        num_bytes = [*group.layout.offsets, group.layout.num_bytes][last] - begin
        offsets = [offset - begin for offset in group.layout.offsets[first:last]]
        tables = triton_staging.part_tables(group.parts[first:last], offsets)
        self.pitch = round_up(num_bytes, max(table.alignment for table in tables))
        self.most = slot_bytes // self.pitch
        self.places = Places(begin, num_bytes, group.region.block_bytes)
        self._launchers = [
            Launcher(table, device_blocks=group.device_blocks, pitch=self.pitch, tiling=tiling) for table in tables
        ]

    def launch(self, direction: Direction, ids: torch.Tensor, memory: torch.Tensor, stream: int) -> None:
        """Gather the blocks with these ids into `memory`, or scatter it to them."""
        for launcher in self._launchers:
            (launcher.gather if direction is Direction.STORE else launcher.scatter)(memory, ids, stream)


class ThroughRing:
    """Slice by slice through the slots: for fragments."""

    def __init__(self, group: StagedGroup, slot_bytes: int, tiling: Tiling) -> None:
        self._device_blocks, self._region = group.device_blocks, group.region
        self._sections = [_Section(group, *run, slot_bytes, tiling) for run in _cuts(group, slot_bytes)]

    def submit(self, direction: Direction, copy: CheckedCopy, ring: Ring, after: Mark) -> None:
        ring.lane.kernels.wait(after)
        step = ring.board.page_ids // self._device_blocks
        for host_ids, device_ids in zip(copy.host.split(step), copy.device.split(step), strict=True):
            page = ring.board.take()
            ids = page.there[: device_ids.numel()]
            ring.lane.kernels.submit(partial(page.upload, device_ids.flatten()))
            for section in self._sections:
                self._submit_section(direction, section, host_ids, ids, ring)
            page.free = ring.lane.kernels.mark()

    def _submit_section(
        self, direction: Direction, section: _Section, host_ids: torch.Tensor, ids: torch.Tensor, ring: Ring
    ) -> None:
        first = 0
        pieces = InSlots(section.places, host_ids, section.pitch, ring.coming())
        for count, moves in self._region.slices(pieces, section.most):
            last = first + count * self._device_blocks
            kernel = partial(section.launch, direction, ids[first:last])
            ring.through(kernel, partial(self._region.link.cross, direction, moves))
            first = last


def _cuts(group: StagedGroup, slot_bytes: int) -> Iterator[tuple[int, int]]:
    """The parts of a piece in runs [first, last) that fit a slot, as few as there can be."""
    ends = [*group.layout.offsets[1:], group.layout.num_bytes]
    first = 0
    for last in range(1, len(ends) + 1):
        begin = group.layout.offsets[first]
        if last == len(ends) or round_up(ends[last] - begin, LARGEST_WORD) > slot_bytes:
            yield first, last
            first = last


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
