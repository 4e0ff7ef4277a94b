"""The copies of a slice over the link, as few as possible.

A *span* is bytes that lie together on both sides: where on the device, from which byte of the host region, how many.
Spans follow from block ids (`whole_blocks`, `pieces`). `moves_of` joins neighbours, cuts at the seams of the region,
and fills the arrays that the driver takes.

These loops take 0.1 to 0.9 us for each span, for one slice while the link is busy with the one before. Where pieces
have many spans each, there is a table (span_tables.py).
"""

import ctypes
from array import array
from collections.abc import Iterable, Iterator, Sequence

import torch

# No move crosses a multiple of this in the host region: CUDA refuses a copy from two registrations, and the region is
# registered in slices of this size (`registration.py`).
SEAM_BYTES = 16 * 1024 * 1024

Span = tuple[int, int, int]
Place = tuple[int, int, int, int]  # number of the host block of a piece, byte in it, byte of the range, how many bytes


class Moves:
    """The moves of one slice: at the addresses `device`, `host` and `size` are arrays of `count` int64."""

    __slots__ = ("_rows", "count", "device", "host", "size")

    def __init__(self, device: list[int], host: list[int], size: list[int]) -> None:
        rows = array("q", device + host + size)
        begin, row_bytes = rows.buffer_info()[0], len(size) * rows.itemsize
        self._hold(rows, [begin, begin + row_bytes, begin + 2 * row_bytes], len(size))

    @classmethod
    def of_tensors(cls, *rows: torch.Tensor) -> "Moves":
        """As of three lists, three contiguous int64 tensors."""
        moves = cls.__new__(cls)
        moves._hold(rows, [row.data_ptr() for row in rows], rows[0].numel())
        return moves

    def _hold(self, rows: object, addresses: list[int], count: int) -> None:
        self._rows, self.count = rows, count  # the rows hold the arrays
        self.device, self.host, self.size = addresses

    def listed(self) -> list[tuple[int, int, int]]:
        """Device address, host address and size of each move."""
        rows = ((ctypes.c_int64 * self.count).from_address(row) for row in (self.device, self.host, self.size))
        return list(zip(*rows, strict=True))


def columns(first_byte: int, num_bytes: int, host_block_bytes: int) -> Iterator[Place]:
    """Bytes [first_byte, first_byte + num_bytes) of a piece, host block by host block.

    >>> list(columns(90, 30, 100))
    [(0, 90, 0, 10), (1, 0, 10, 20)]
    """
    done = 0
    while done < num_bytes:
        column, within = divmod(first_byte + done, host_block_bytes)
        size = min(num_bytes - done, host_block_bytes - within)
        yield column, within, done, size
        done += size


def whole_blocks(begin: int, blocks: Sequence[int], block_bytes: int) -> Iterator[Span]:
    """Host blocks that lie one after another on the device, from `begin` on: a span for each run of neighbours.

    >>> list(whole_blocks(1000, [7, 8, 3], block_bytes=10))
    [(1000, 70, 20), (1020, 30, 10)]
    """
    first = last = blocks[0]
    for block in blocks[1:]:
        if block == last + 1:
            last = block
            continue
        size = (last - first + 1) * block_bytes
        yield begin, first * block_bytes, size
        begin += size
        first = last = block
    yield begin, first * block_bytes, (last - first + 1) * block_bytes


def pieces(
    begins: Iterable[int], host_blocks: Sequence[int], width: int, places: Sequence[Place], block_bytes: int
) -> Iterator[Span]:
    """Pieces that begin at `begins` on the device, and lie at `places` in the `width` host blocks of each.

    >>> list(pieces([1000], [7, 3], 2, list(columns(5, 10, 10)), block_bytes=10))
    [(1000, 75, 5), (1005, 30, 5)]
    """
    for number, begin in enumerate(begins):
        for column, within, done, size in places:
            yield begin + done, host_blocks[number * width + column] * block_bytes + within, size


def moves_of(spans: Iterable[Span], base: int = 0, seam: int = SEAM_BYTES) -> Moves:
    """The moves of one slice. The host region begins at address `base`.

    >>> moves_of([(0, 150, 50), (50, 200, 50)], base=1000, seam=220).listed()
    [(0, 1150, 70), (70, 1220, 30)]
    """
    devices: list[int] = []
    hosts: list[int] = []
    sizes: list[int] = []
    device_end = host_end = -1
    for device, host, size in spans:
        if device == device_end and host == host_end and host % seam:
            device, host, size = devices.pop(), hosts.pop() - base, size + sizes.pop()
        device_end, host_end = device + size, host + size
        while (room := seam - host % seam) < size:
            devices.append(device)
            hosts.append(base + host)
            sizes.append(room)
            device, host, size = device + room, host + room, size - room
        devices.append(device)
        hosts.append(base + host)
        sizes.append(size)
    return Moves(devices, hosts, sizes)
