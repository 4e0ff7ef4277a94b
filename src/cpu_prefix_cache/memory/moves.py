"""What crosses the link: moves, as few as there can be.

A move is some bytes that lie together on both sides. They are worked out in two ways that give the same (a test holds
them together). `few_moves` is a loop: 1 us for each, and it begins at once, for the first slice of a transfer, which
the link waits for. For the rest, thousands perhaps, there are operations on whole tables: 100 us however many they are.

A table of moves is int64 [4, moves] in host memory:

    DEVICE   where they begin there
    HOST     where they begin in the host region, in bytes
    SIZE     how many they are
    SLICE    which slice of the transfer they belong to, from 0 up without gaps
"""

import ctypes
from array import array
from collections.abc import Iterable, Iterator, Sequence

import torch

# No move crosses a multiple of this in the host region: CUDA refuses a copy from two registrations at once, and
# registers the region in slices of this size (`registration.py`).
SEAM_BYTES = 16 * 1024 * 1024

DEVICE, HOST, SIZE, SLICE = range(4)


class Moves:
    """Those of one slice, by their addresses: arrays of `count` int64 each at `device`, `host` and `size`.

    They lie in `memory`, whatever it is, which lives as long.
    """

    __slots__ = ("_memory", "count", "device", "host", "size")

    def __init__(self, memory: object, address: int, count: int, row_bytes: int) -> None:
        self._memory = memory
        self.count = count
        self.device, self.host, self.size = address, address + row_bytes, address + 2 * row_bytes

    def listed(self) -> list[tuple[int, int, int]]:
        """As numbers: where each begins there and here, and its size."""
        read = ctypes.c_int64 * self.count
        rows = (read.from_address(row) for row in (self.device, self.host, self.size))
        return list(zip(*rows, strict=True))


Place = tuple[int, int, int, int]  # which block of a piece, the byte in it, the byte of the range, how many


def columns(first_byte: int, num_bytes: int, host_block_bytes: int) -> Iterator[Place]:
    """Bytes [first_byte, first_byte + num_bytes) of a piece, host block by host block of it.

    >>> list(columns(90, 30, 100))
    [(0, 90, 0, 10), (1, 0, 10, 20)]
    """
    done = 0
    while done < num_bytes:
        column, within = divmod(first_byte + done, host_block_bytes)
        size = min(num_bytes - done, host_block_bytes - within)
        yield column, within, done, size
        done += size


def few_moves(
    pieces: Iterable[tuple[int, Sequence[int]]],
    places: Sequence[Place],
    block_bytes: int,
    base: int = 0,
    seam: int = SEAM_BYTES,
) -> Moves:
    """The moves of `pieces`, each given as where it begins there and its host blocks, whose bytes lie at `places`.

    The host region begins at `base`.

    >>> few_moves([(0, [3]), (50, [4])], [(0, 0, 0, 50)], block_bytes=50, base=1000, seam=220).listed()
    [(0, 1150, 70), (70, 1220, 30)]
    """
    device: list[int] = []
    host: list[int] = []
    size: list[int] = []
    end_there = end_here = -1
    for begin, blocks in pieces:
        for column, within, done, left in places:
            there, here = begin + done, blocks[column] * block_bytes + within
            while left:
                part = min(left, seam - here % seam)
                if there == end_there and here == end_here and here % seam:
                    size[-1] += part
                else:
                    device.append(there)
                    host.append(base + here)
                    size.append(part)
                there, here, left = there + part, here + part, left - part
                end_there, end_here = there, here
    memory = array("q", device + host + size)
    return Moves(memory, memory.buffer_info()[0], len(size), len(size) * memory.itemsize)


def joined(table: torch.Tensor) -> torch.Tensor:
    """The same bytes in fewer moves: neighbours on both sides become one, within a slice.

    >>> joined(torch.tensor([[0, 100, 200], [300, 400, 700], [100, 100, 100], [0, 0, 0]])).tolist()
    [[0, 200], [300, 700], [200, 100], [0, 0]]
    """
    ends = table[: HOST + 1] + table[SIZE]
    together = (table[: HOST + 1, 1:] == ends[:, :-1]).all(0) & (table[SLICE, 1:] == table[SLICE, :-1])
    if not together.any():
        return table
    edge = torch.zeros(1, dtype=torch.bool)
    fewer = table[:, torch.cat([edge, together]).logical_not_()]
    fewer[SIZE] = ends[HOST, torch.cat([together, edge]).logical_not_()] - fewer[HOST]
    return fewer


def cut_at_seams(table: torch.Tensor, seam: int = SEAM_BYTES) -> torch.Tensor:
    """The same bytes in moves that cross no multiple of `seam` on the host. Few do: those are cut one by one.

    >>> cut_at_seams(torch.tensor([[0], [70], [50], [0]]), seam=100).tolist()
    [[0, 30], [70, 100], [30, 20], [0, 0]]
    """
    crossing = (table[HOST] // seam != (table[HOST] + table[SIZE] - 1) // seam).nonzero().flatten()
    if not len(crossing):
        return table
    firsts = seam - table[HOST, crossing] % seam
    rest = [
        (device + done, host + done, min(seam, size - done), slice_)
        for (device, host, size, slice_), first in zip(table[:, crossing].t().tolist(), firsts.tolist(), strict=True)
        for done in range(first, size, seam)
    ]
    table[SIZE, crossing] = firsts
    table = torch.cat([table, torch.tensor(rest).t()], dim=1)
    return table[:, table[SLICE].sort(stable=True).indices]


def by_slice(table: torch.Tensor) -> Iterator[Moves]:
    """The moves of each slice, in their order. HOST and DEVICE are addresses by now."""
    row_bytes, begin = table.stride(0) * table.itemsize, table.data_ptr()
    for count in torch.bincount(table[SLICE]).tolist():
        yield Moves(table, begin, count, row_bytes)
        begin += count * table.itemsize
