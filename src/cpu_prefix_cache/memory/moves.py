"""What crosses the link: moves, as few as there can be.

A *span* is some bytes that lie together on both sides: from where there, from which byte of the host region, how many.
Spans follow from block ids (`whole_blocks`, `pieces`). `moves_of` joins those that are neighbours on both sides, cuts
them where the region has a seam, and puts what is left into arrays, as the driver wants them.

All this is a loop of Python, 0.1 to 0.5 us for each block, run for one slice of a transfer while the link is busy with
the one before. Operations on whole tensors took no less in all, and the link waited for them.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence

# No move crosses a multiple of this in the host region: CUDA refuses a copy from two registrations at once, and
# registers the region in slices of this size (`registration.py`).
SEAM_BYTES = 16 * 1024 * 1024

Span = tuple[int, int, int]
Place = tuple[int, int, int, int]  # which block of a piece, the byte in it, the byte of the range, how many


class Moves:
    """Those of one slice, by their addresses: arrays of `count` int64 each at `device`, `host` and `size`."""

    __slots__ = ("_rows", "count", "device", "host", "size")

    def __init__(self, device: list[int], host: list[int], size: list[int]) -> None:
        self._rows = array("q", device + host + size)  # the arrays are in it
        self.count = len(size)
        row_bytes = self.count * self._rows.itemsize
        self.device = self._rows.buffer_info()[0]
        self.host, self.size = self.device + row_bytes, self.device + 2 * row_bytes

    def listed(self) -> list[tuple[int, int, int]]:
        """Where each begins there and here, and its size."""
        rows = (self._rows[row * self.count : (row + 1) * self.count] for row in range(3))
        return list(zip(*rows, strict=True))


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


def whole_blocks(begin: int, blocks: Sequence[int], block_bytes: int) -> Iterator[Span]:
    """Host blocks that lie one after another there, from `begin` on: a span for each run of neighbours.

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
    """Pieces that begin there at `begins`, and whose bytes lie at `places` in the `width` host blocks of each.

    >>> list(pieces([1000], [7, 3], 2, list(columns(5, 10, 10)), block_bytes=10))
    [(1000, 75, 5), (1005, 30, 5)]
    """
    for number, begin in enumerate(begins):
        for column, within, done, size in places:
            yield begin + done, host_blocks[number * width + column] * block_bytes + within, size


def moves_of(spans: Iterable[Span], base: int = 0, seam: int = SEAM_BYTES) -> Moves:
    """The moves of a slice. The host region begins at address `base`.

    >>> moves_of([(0, 150, 50), (50, 200, 50)], base=1000, seam=220).listed()
    [(0, 1150, 70), (70, 1220, 30)]
    """
    device: list[int] = []
    host: list[int] = []
    sizes: list[int] = []
    end_there = end_here = -1
    for there, here, size in spans:
        if there == end_there and here == end_here and here % seam:
            there, here, size = device.pop(), host.pop() - base, size + sizes.pop()
        end_there, end_here = there + size, here + size
        while (room := seam - here % seam) < size:
            device.append(there)
            host.append(base + here)
            sizes.append(room)
            there, here, size = there + room, here + room, size - room
        device.append(there)
        host.append(base + here)
        sizes.append(size)
    return Moves(device, host, sizes)
