"""The fast copier: fragments are gathered on the device into a ring of slots, and whole pieces cross the link.

An engine's block is many small fragments, one in each layer; the copy engines reach the link's speed only from some
hundred KiB at a time. So a transfer is cut into slices that fit a slot, and each slice takes two steps:

    store   kernels   wait for the slot, gather fragments into it   |   copies    wait for that, slot to host blocks
    load    copies    wait for the slot, host blocks into it        |   kernels   wait for that, scatter to fragments

While one slot crosses the link the next is gathered, so the link is always busy. Stores and loads have a ring and two
queues each. Blocks that are large in every part cross the link as they are.

The gather of a store waits for all that compute had been given when the copy was asked for, so for what wrote the
blocks. So does the scatter of a load: for the last reader of the blocks, and for whoever zeroes them (rule 12). `copy`
returns when all has run; nobody who uses the blocks then needs to wait for anything.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

import torch

from cpu_prefix_cache.copier import triton_staging
from cpu_prefix_cache.copier.binding import Binding, BoundGroup, Shapes
from cpu_prefix_cache.copier.queues import Lane, Mark, Queue, Queues, drained, queues_for
from cpu_prefix_cache.copier.ring import SLOT_ALIGNMENT, Ring
from cpu_prefix_cache.copier.triton_staging import LARGEST_WORD, PartTable, Tiling
from cpu_prefix_cache.errors import ConfigurationError
from cpu_prefix_cache.memory.layout import Extent, PieceLayout, extents, join
from cpu_prefix_cache.memory.parts import side_by_side, span
from cpu_prefix_cache.plan import Direction, GroupCopy

# Both rings together. In steps of 8 MiB a load of 32 MiB takes 1.05 times one large copy, and one of 256 MiB 1.016
# times (one H200, prototype).
RING_BYTES = 128 * 1024 * 1024
SLOTS = 8  # of each ring, unless a part is larger than such a slot

# Blocks of a lone part cross as they are from this size on: staged they would be no larger. Of several parts, each from
# LARGE_BYTES on: then stores to random addresses reach 95 % of the link, and loads 98 % (one H200).
DIRECT_BYTES = 192 * 1024
LARGE_BYTES = 1024 * 1024


class StagedCopier:
    """Copies through two staging rings of `ring_bytes` bytes of device memory together. On CPU tensors, in Triton's
    interpreter, it is for tests. `host` is contiguous, and pinned for CUDA tensors (`HostArena(..., pinned=True)`).

    Arguments and errors are otherwise those of Binding; ConfigurationError also when the rings are too small for the
    largest part, or Triton does not fit the device. `queues` and `tiling` are for tests and measurements.
    """

    def __init__(
        self,
        shapes: Shapes,
        tensors: Sequence[Sequence[torch.Tensor]],
        host: torch.Tensor,
        *,
        null_block: int | None = None,
        ring_bytes: int = RING_BYTES,
        queues: Queues | None = None,
        tiling: Tiling | None = None,
    ) -> None:
        self._binding = Binding(shapes, tensors, host, null_block)
        _check_machine(self._binding.device, host)
        self._queues = queues_for(self._binding.device) if queues is None else queues
        groups = [_StagedGroup(group, host) for group in self._binding.groups]
        slot_bytes = _slot_bytes(groups, ring_bytes // 2)
        self._rings = {
            Direction.STORE: self._ring(Direction.STORE, self._queues.stores, ring_bytes // 2, slot_bytes),
            Direction.LOAD: self._ring(Direction.LOAD, self._queues.loads, ring_bytes // 2, slot_bytes),
        }
        tiling = triton_staging.default_tiling() if tiling is None else tiling
        kernels = self._queues.stores.kernels
        self._ways: list[_Way] = [
            _Direct(group) if group.is_direct else _ThroughRing(group, slot_bytes, tiling, kernels) for group in groups
        ]

    def copy(self, direction: Direction, copies: Sequence[GroupCopy]) -> None:
        self._binding.check(direction, copies)
        ring = self._rings[direction]
        with drained(ring.lane.kernels, ring.lane.copies):
            ready = self._queues.compute.mark()
            ring.lane.kernels.wait(ready)
            for copy in copies:
                self._ways[copy.group].submit(direction, copy, ring, ready)

    def _ring(self, direction: Direction, lane: Lane, num_bytes: int, slot_bytes: int) -> Ring:
        slots = num_bytes // slot_bytes if slot_bytes else 0
        return Ring(direction, lane, slots, slot_bytes, self._binding.device, self._queues.compute.mark())


def _check_machine(device: torch.device, host: torch.Tensor) -> None:
    if host.device.type != "cpu" or not host.is_contiguous():
        raise ConfigurationError("the host region must be one contiguous tensor in host memory")
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"staged copies need CUDA tensors, got {device}; the reference copier takes any")
    if device.type == "cuda" and triton_staging.INTERPRETED:
        raise ConfigurationError("TRITON_INTERPRET=1 runs kernels on the CPU; unset it for CUDA tensors")
    if device.type == "cuda" and not host.is_pinned():
        raise ConfigurationError("the host region is not pinned; make it with HostArena(..., pinned=True)")
    if device.type == "cpu" and not triton_staging.INTERPRETED:
        raise ConfigurationError(
            "on CPU tensors the staged copier runs in Triton's interpreter only; set TRITON_INTERPRET=1 before the "
            "kernels are imported, or take the reference copier"
        )


class _StagedGroup:
    """One group as staged copies see it: direct or not, and if so with neighbouring parts joined."""

    def __init__(self, group: BoundGroup, host: torch.Tensor) -> None:
        self.device_blocks = group.piece.device_blocks
        joined = side_by_side(group.parts) if self.device_blocks == 1 else list(group.parts)
        enough = DIRECT_BYTES if len(joined) == 1 else LARGE_BYTES
        self.is_direct = all(part.shape[1] >= enough for part in joined)
        self.parts = joined if self.is_direct else list(group.parts)
        self.layout = PieceLayout([part.shape[1] for part in self.parts], self.device_blocks)
        self.host = host.view(-1)
        self._host_blocks = group.piece.host_blocks
        self._host_block_bytes = host.shape[1]

    @property
    def largest_part(self) -> int:
        """What a piece has of the part that it has most of, in bytes."""
        return self.device_blocks * max(part.shape[1] for part in self.parts)

    def pieces_in(self, copy: GroupCopy) -> int:
        return len(copy.host_blocks) // self._host_blocks

    def extents(self, copy: GroupCopy, piece: int, *, first_byte: int, num_bytes: int, device: int) -> Iterator[Extent]:
        """Where bytes of one piece of `copy` lie on the host. On the device they lie together, from `device` on."""
        blocks = copy.host_blocks[piece * self._host_blocks : (piece + 1) * self._host_blocks]
        return extents(blocks, self._host_block_bytes, first_byte=first_byte, num_bytes=num_bytes, device=device)


class _Way(Protocol):
    """How the pieces of one group cross."""

    def submit(self, direction: Direction, copy: GroupCopy, ring: Ring, ready: Mark) -> None:
        """Have the ring's queues carry out `copy`. Device blocks are touched only once `ready` is passed."""


class _Direct:
    """Block by block over the link, part after part: for large blocks."""

    def __init__(self, group: _StagedGroup) -> None:
        self._group = group

    def submit(self, direction: Direction, copy: GroupCopy, ring: Ring, ready: Mark) -> None:
        ring.lane.copies.wait(ready)
        for part, offset in zip(self._group.parts, self._group.layout.offsets, strict=True):
            moves = list(join(chain.from_iterable(self._extents(copy, part, offset))))
            memory = part.as_strided((span(part),), (1,))
            ring.lane.copies.submit(partial(_cross, direction, memory, self._group.host, moves))

    def _extents(self, copy: GroupCopy, part: torch.Tensor, offset: int) -> Iterator[Iterator[Extent]]:
        size, stride = part.shape[1], part.stride(0)
        for at, block in enumerate(copy.device_blocks):
            piece, within = divmod(at, self._group.device_blocks)
            first_byte = offset + within * size
            yield self._group.extents(copy, piece, first_byte=first_byte, num_bytes=size, device=block * stride)


@dataclass(frozen=True, slots=True, eq=False)
class _Section:
    """Parts that follow each other in a piece and fit a slot together: all of them, unless the piece is large.

    `num_bytes` bytes from `first_byte` of the piece on. In a slot, pieces are `pitch` bytes apart.
    """

    first_byte: int
    num_bytes: int
    pitch: int
    tables: list[PartTable]


class _ThroughRing:
    """Slice by slice through the slots: for fragments."""

    def __init__(self, group: _StagedGroup, slot_bytes: int, tiling: Tiling, queue: Queue) -> None:
        self._group = group
        self._tiling = tiling
        self._sections = [_section(group, first, last) for first, last in _cuts(group, slot_bytes)]
        tables = [table for section in self._sections for table in section.tables]
        queue.submit(lambda: triton_staging.compile_for(tables, tiling))  # now, when a second harms nobody
        queue.drain()

    def submit(self, direction: Direction, copy: GroupCopy, ring: Ring, ready: Mark) -> None:
        ids = _upload(copy.device_blocks, self._group.parts[0].device, ring.lane.kernels)
        count = self._group.pieces_in(copy)
        for section in self._sections:
            step = ring.slot_bytes // section.pitch
            for first in range(0, count, step):
                self._submit_slice(direction, copy, ids, section, range(first, min(first + step, count)), ring)

    def _submit_slice(
        self, direction: Direction, copy: GroupCopy, ids: torch.Tensor, section: _Section, pieces: range, ring: Ring
    ) -> None:
        slot = ring.take()
        move = triton_staging.gather if direction is Direction.STORE else triton_staging.scatter
        blocks = self._group.device_blocks
        some = ids[pieces.start * blocks : pieces.stop * blocks]
        moves = list(join(chain.from_iterable(self._extents(copy, section, pieces))))

        def kernel() -> None:
            for table in section.tables:
                move(slot.memory, table, some, device_blocks=blocks, pitch=section.pitch, tiling=self._tiling)

        ring.through(slot, kernel, partial(_cross, direction, slot.memory, self._group.host, moves))

    def _extents(self, copy: GroupCopy, section: _Section, pieces: range) -> Iterator[Iterator[Extent]]:
        for at, piece in enumerate(pieces):
            yield self._group.extents(
                copy, piece, first_byte=section.first_byte, num_bytes=section.num_bytes, device=at * section.pitch
            )


def _cross(direction: Direction, device: torch.Tensor, host: torch.Tensor, moves: Sequence[Extent]) -> None:
    """Copy each extent between device memory and the host region, both uint8 [bytes], with one ordinary copy each."""
    for move in moves:
        there = device[move.device : move.device + move.num_bytes]
        here = host[move.host : move.host + move.num_bytes]
        if direction is Direction.STORE:
            here.copy_(there, non_blocking=True)
        else:
            there.copy_(here, non_blocking=True)


def _upload(blocks: Sequence[int], device: torch.device, queue: Queue) -> torch.Tensor:
    """Block ids on the device, int64, for whoever comes later in `queue`."""
    here = torch.tensor(blocks, dtype=torch.int64, pin_memory=device.type == "cuda")
    there = torch.empty(len(blocks), dtype=torch.int64, device=device)
    queue.submit(lambda: there.copy_(here, non_blocking=True))
    return there


def _slot_bytes(groups: Sequence[_StagedGroup], ring_bytes: int) -> int:
    """How large the slots of a ring are: a share of it, or what the largest part of a piece needs. 0: none needed."""
    largest = max((group.largest_part for group in groups if not group.is_direct), default=0)
    if not largest:
        return 0
    needed = _round_up(largest, SLOT_ALIGNMENT)
    if ring_bytes < 2 * needed:
        raise ConfigurationError(
            f"staging rings of {2 * ring_bytes} bytes together are too small for a part of {largest} bytes; "
            f"ring_bytes={4 * needed} works"
        )
    return max(needed, ring_bytes // SLOTS // SLOT_ALIGNMENT * SLOT_ALIGNMENT)


def _cuts(group: _StagedGroup, slot_bytes: int) -> Iterator[tuple[int, int]]:
    """The parts of a piece in runs [first, last) that fit a slot, as few as there can be."""
    ends = [*group.layout.offsets[1:], group.layout.num_bytes]
    first = 0
    for last in range(1, len(ends) + 1):
        begin = group.layout.offsets[first]
        if last == len(ends) or _round_up(ends[last] - begin, LARGEST_WORD) > slot_bytes:
            yield first, last
            first = last


def _section(group: _StagedGroup, first: int, last: int) -> _Section:
    begin = group.layout.offsets[first]
    end = [*group.layout.offsets, group.layout.num_bytes][last]
    tables = triton_staging.part_tables(
        group.parts[first:last], [offset - begin for offset in group.layout.offsets[first:last]]
    )
    alignment = max(table.alignment for table in tables)
    return _Section(begin, end - begin, _round_up(end - begin, alignment), tables)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
