"""The spans of pieces that have many each, by operations on whole tensors: .07 us a span, in the loops of moves.py 1.0.

Pages of an engine that keeps each layer by itself have two spans a layer, and cross in 2.4 us each (128 KiB). In loops
they would hold Python's lock for a third of the time on the link, and the thread of the engine's scheduler waits for
it. A table has the spans of thousands, because each operation costs some us, and slices take parts of it.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from cpu_prefix_cache.memory.moves import Moves, Span
from cpu_prefix_cache.messages.plan import GroupCopy

TABLE_SPANS = 8192  # their table is made in as much time as 32 MiB take on the link


class SpanPlace(NamedTuple):
    """A span of each piece: in number `which` of its device blocks, of which block 0 is at `address` and each next one
    `stride` bytes further; in its host block from byte `within` on; `size` bytes."""

    address: int
    stride: int
    which: int
    within: int
    size: int


class SpanTables:
    """Spans of pieces of so many device blocks and one host block, which have one at each of these places, none longer
    than from one `seam` to the next."""

    def __init__(self, places: Sequence[SpanPlace], device_blocks: int, block_bytes: int, seam: int) -> None:
        columns = torch.tensor(places, dtype=torch.int64, device="cpu").unbind(1)  # whatever the default device is
        self._address, self._stride, self._which, self._within, self._size = columns
        self._device_blocks, self._block_bytes, self._seam = device_blocks, block_bytes, seam
        self._pieces = max(1, TABLE_SPANS // len(places))  # of a table

    def spans(self, copy: GroupCopy, slices: Iterable[tuple[int, int]]) -> Iterator["SpanTable"]:
        """The spans of the pieces [begin, end) of each of these slices, in turn, each when it is asked for."""
        first = last = 0
        for begin, end in slices:
            if end > last:
                first, last = begin, max(end, begin + self._pieces)
                table = self._table(copy, first, last)
            yield table.part(begin - first, end - first)

    def _table(self, copy: GroupCopy, first: int, last: int) -> "SpanTable":
        width = self._device_blocks
        device = _numbers(copy.device_blocks[first * width : last * width]).view(-1, width)[:, self._which]
        host = _numbers(copy.host_blocks[first:last])[:, None] * self._block_bytes + self._within
        size = self._size.expand_as(host).contiguous()
        seam = self._seam if bool((host % self._seam + size > self._seam).any()) else None
        return SpanTable(device * self._stride + self._address, host, size, seam)


class SpanTable:
    """Spans, int64 [pieces, spans of a piece] each: where on the device, from which byte of the host region, how many
    bytes. Multiples of `seam` in the region cut some of them; None: no one."""

    __slots__ = ("_rows", "_seam")

    def __init__(self, device: torch.Tensor, host: torch.Tensor, size: torch.Tensor, seam: int | None) -> None:
        self._rows, self._seam = (device, host, size), seam

    def part(self, begin: int, end: int) -> "SpanTable":
        """The spans of the pieces [begin, end)."""
        device, host, size = (row[begin:end] for row in self._rows)
        return SpanTable(device, host, size, self._seam)

    def __iter__(self) -> Iterator[Span]:
        return zip(*(row.flatten().tolist() for row in self._rows), strict=True)

    def moves(self, base: int) -> Moves:
        """The moves of these spans. The host region begins at address `base`."""
        device, host, size = self._rows if self._seam is None else self._cut(self._seam)
        return Moves.of_tensors(device, host + base, size)

    def _cut(self, seam: int) -> list[torch.Tensor]:
        """The spans up to the seam in each, and behind them the rests."""
        device, host, size = (row.flatten() for row in self._rows)
        room = seam - host % seam
        over = (size > room).nonzero()[:, 0]
        begins = torch.stack([device, host])
        rest = begins[:, over] + room[over]
        return [*torch.cat([begins, rest], 1), torch.cat([torch.minimum(size, room), (size - room)[over]])]


def _numbers(blocks: Sequence[int]) -> torch.Tensor:
    return torch.frombuffer(array("q", blocks), dtype=torch.int64)
