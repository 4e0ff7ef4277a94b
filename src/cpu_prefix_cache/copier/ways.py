"""How the pieces of one group cross: through the slots of a ring, or directly.

Both go slice by slice. What does not change from copy to copy is worked out when they are built, and what is left for a
slice is a few operations on whole arrays: the link waits for the first slice, and the host must stay ahead of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch

from cpu_prefix_cache.copier import triton_staging
from cpu_prefix_cache.copier.binding import BoundGroup, CheckedCopy
from cpu_prefix_cache.copier.calibration import Thresholds
from cpu_prefix_cache.copier.link import Link
from cpu_prefix_cache.copier.queues import Mark, Queue
from cpu_prefix_cache.copier.ring import Ring, Slot
from cpu_prefix_cache.copier.triton_staging import LARGEST_WORD, Tiling
from cpu_prefix_cache.memory.layout import PieceLayout
from cpu_prefix_cache.memory.moves import HOST, SEAM_BYTES, Moves, by_slice, columns, cut_at_seams, few_moves, joined
from cpu_prefix_cache.memory.parts import side_by_side
from cpu_prefix_cache.plan import Direction

# What crosses directly is handed over in slices of this size: the host and the link work at the same time, and one call
# of 4,096 copies is slower than 128 of 32 (92 % of the link instead of 98, 256 KiB copies on one H200).
DIRECT_SLICE_BYTES = 8 * 1024 * 1024

# A transfer that does not fill the ring goes through it in this many slices at least, none smaller than that many
# bytes: the last slice of a load is scattered, and the first of a store gathered, while the link has nothing to do.
FEWEST_SLICES = 4
SMALLEST_SLICE_BYTES = 4 * 1024 * 1024


class Way(Protocol):
    def submit(self, direction: Direction, copy: CheckedCopy, ring: Ring, after: Mark) -> None:
        """Have the ring's queues carry out `copy`. Device blocks are touched only once `after` is passed."""


class Region:
    """The host region as both ways see it: where it begins, how large its blocks are, and the link there."""

    def __init__(self, blocks: torch.Tensor, link: Link, seam_bytes: int = SEAM_BYTES) -> None:
        self.block_bytes = blocks.shape[1]
        self.link = link
        self._base = blocks.data_ptr()
        self._seam_bytes = seam_bytes

    def few_moves(self, pieces: Iterable[tuple[int, Sequence[int]]], places: "Places") -> Moves:
        """Of one slice, by addresses here: see `memory/moves.py`."""
        moves = few_moves(pieces, places.listed, self.block_bytes, self._seam_bytes)
        return moves._replace(host=moves.host + self._base)

    def moves(
        self, device: torch.Tensor, host: torch.Tensor, size: torch.Tensor, slice_: torch.Tensor
    ) -> Iterator[Moves]:
        """Slice by slice, by addresses here. All are int64 of one shape."""
        table = joined(torch.stack([each.flatten() for each in (device, host, size, slice_)]))
        table = cut_at_seams(table, self._seam_bytes)
        table[HOST] += self._base
        return by_slice(table)


class Places:
    """Bytes [first_byte, first_byte + num_bytes) of a piece, in the host blocks it takes: int64 [places] each.

    `column` is which block of the piece, `within` the byte of it, `done` the byte of the range.
    """

    def __init__(self, group: "StagedGroup", first_byte: int, num_bytes: int) -> None:
        self.listed = list(columns(first_byte, num_bytes, group.region.block_bytes))
        self.column, self.within, self.done, self.size = torch.tensor(self.listed, dtype=torch.int64).t().contiguous()
        self._block_bytes = group.region.block_bytes

    def on_host(self, host_ids: torch.Tensor) -> torch.Tensor:
        """Bytes of the region, int64 [pieces, places]."""
        return torch.add(self.within, host_ids[:, self.column], alpha=self._block_bytes)


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
            _DirectPart(group, part, offset, which)
            for part, offset in zip(group.parts, group.layout.offsets, strict=True)
            for which in range(group.device_blocks)
        ]

    def submit(self, direction: Direction, copy: CheckedCopy, ring: Ring, after: Mark) -> None:
        ring.lane.copies.wait(after)
        for part in self._parts:
            for moves in part.slices(copy):
                ring.past(partial(self._region.link.cross, direction, moves))


class _DirectPart:
    """One part of a group that crosses directly, and of each piece the block number `which`."""

    def __init__(self, group: StagedGroup, part: torch.Tensor, offset: int, which: int) -> None:
        self._region, self._which = group.region, which
        self._address, self._stride, size = part.data_ptr(), part.stride(0), part.shape[1]
        self._step = max(1, DIRECT_SLICE_BYTES // size)
        self._places = Places(group, offset + which * size, size)

    def slices(self, copy: CheckedCopy) -> Iterator[Moves]:
        step, host_ids, device = self._step, copy.host, copy.device[:, self._which] * self._stride + self._address
        first = zip(device[:step].tolist(), host_ids[:step].tolist(), strict=True)
        yield self._region.few_moves(first, self._places)
        if len(host_ids) > step:
            host = self._places.on_host(host_ids[step:])
            slice_ = torch.arange(len(host)) // step
            there = device[step:].unsqueeze(1) + self._places.done
            yield from self._region.moves(there, host, *_alike(host, self._places.size, slice_.unsqueeze(1)))


def _alike(like: torch.Tensor, *tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    return (tensor.expand_as(like) for tensor in tensors)


class _Section:
    """Parts that follow each other in a piece and fit a slot together: all of them, unless the piece is large.

    In a slot, pieces are `pitch` bytes apart.
    """

    def __init__(self, group: StagedGroup, first: int, last: int, slot_bytes: int) -> None:
        begin = group.layout.offsets[first]
        num_bytes = [*group.layout.offsets, group.layout.num_bytes][last] - begin
        offsets = [offset - begin for offset in group.layout.offsets[first:last]]
        self.tables = triton_staging.part_tables(group.parts[first:last], offsets)
        self.pitch = round_up(num_bytes, max(table.alignment for table in self.tables))
        self._region = group.region
        self._slot_pieces = slot_bytes // self.pitch
        self._places = Places(group, begin, num_bytes)

    def slices(self, host_ids: torch.Tensor) -> Iterator[tuple[int, Moves]]:
        """Of how many pieces each is, and its moves: between the host and the beginning of a slot."""
        least = -(-SMALLEST_SLICE_BYTES // self.pitch)
        step = min(self._slot_pieces, max(least, -(-len(host_ids) // FEWEST_SLICES)))
        first = zip(range(0, step * self.pitch, self.pitch), host_ids[:step].tolist(), strict=False)
        yield min(step, len(host_ids)), self._region.few_moves(first, self._places)
        if len(host_ids) > step:
            host = self._places.on_host(host_ids[step:])
            piece = torch.arange(len(host)).unsqueeze(1)
            device = piece % step * self.pitch + self._places.done
            slices = self._region.moves(device, host, *_alike(host, self._places.size, piece // step))
            for number, moves in enumerate(slices):
                yield min(step, len(host) - number * step), moves


class ThroughRing:
    """Slice by slice through the slots: for fragments."""

    def __init__(self, group: StagedGroup, slot_bytes: int, tiling: Tiling, queue: Queue) -> None:
        self._device_blocks, self._region, self._tiling = group.device_blocks, group.region, tiling
        self._sections = [_Section(group, *run, slot_bytes) for run in _cuts(group, slot_bytes)]
        tables = [table for section in self._sections for table in section.tables]
        queue.submit(lambda _: triton_staging.compile_for(tables, tiling))  # now, when a second harms nobody
        queue.drain()

    def submit(self, direction: Direction, copy: CheckedCopy, ring: Ring, after: Mark) -> None:
        kernels = ring.lane.kernels
        kernels.wait(after)
        page, count = ring.board.page_for(copy.device.flatten()), copy.device.numel()
        ids = page.there[:count]
        kernels.submit(lambda _: ids.copy_(page.here[:count], non_blocking=True))
        for section in self._sections:
            self._submit_section(direction, section, copy.host, ids, ring)
        page.free = kernels.mark()

    def _submit_section(
        self, direction: Direction, section: _Section, host_ids: torch.Tensor, ids: torch.Tensor, ring: Ring
    ) -> None:
        first = 0
        for pieces, moves in section.slices(host_ids):
            slot = ring.take()
            last = first + pieces * self._device_blocks
            kernel = partial(self._launch, direction, section, slot, ids[first:last])
            link = partial(self._region.link.cross, direction, moves._replace(device=moves.device + slot.address))
            ring.through(slot, kernel, link)
            first = last

    def _launch(self, direction: Direction, section: _Section, slot: Slot, ids: torch.Tensor, stream: int) -> None:
        move = triton_staging.gather if direction is Direction.STORE else triton_staging.scatter
        for table in section.tables:
            move(slot.memory, table, ids, device_blocks=self._device_blocks, pitch=section.pitch, tiling=self._tiling)


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
