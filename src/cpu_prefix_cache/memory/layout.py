"""Where the bytes of a piece lie: on the device in the engine's own tensors, on the host one after another.

An engine keeps the KV of a group in *parts* (`parts.py`), such as the K of one layer. A piece of the group, d device
blocks, is these bytes, in the canonical order that LAYOUT_VERSION names (rule 16):

    device   layer 0 K   [ . ][b1][ . ][b0] ...          piece of blocks b0, b1 (d = 2)
             layer 0 V   [ . ][b1][ . ][b0] ...
    host     | 0 K b0 | 0 K b1 | 0 V b0 | 0 V b1 | 1 K b0 | ...  padding to whole host blocks |

Padding belongs to nobody: no copy reads or writes it, on either side.

>>> layout = PieceLayout(block_bytes=[64, 32], device_blocks=2)
>>> layout.num_bytes, layout.offsets
(192, (0, 128))
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

LAYOUT_VERSION = 1  # for whoever keeps pieces longer than the process that wrote them


class PieceLayout:
    """Byte offsets of the parts within a piece.

    `block_bytes[i]` is what one device block weighs in part i; the parts come in canonical order, layer by layer.
    From `offsets[i]` on lie the bytes of part i, device block after device block.
    """

    def __init__(self, block_bytes: Sequence[int], device_blocks: int) -> None:
        *offsets, self.num_bytes = accumulate((size * device_blocks for size in block_bytes), initial=0)
        self.offsets = tuple(offsets)


class Extent(NamedTuple):
    """`num_bytes` bytes that lie together on both sides: from byte `device` on there, from byte `host` on here."""

    device: int
    host: int
    num_bytes: int


def extents(
    host_blocks: Sequence[int], host_block_bytes: int, *, first_byte: int, num_bytes: int, device: int
) -> Iterator[Extent]:
    """Where bytes [first_byte, first_byte + num_bytes) of one piece lie in the host region, block by block.

    `host_blocks` are the piece's; on the device the bytes lie together, from byte `device` on.

    >>> list(extents([7, 2], 100, first_byte=90, num_bytes=30, device=0))
    [Extent(device=0, host=790, num_bytes=10), Extent(device=10, host=200, num_bytes=20)]
    """
    done = 0
    while done < num_bytes:
        column, within = divmod(first_byte + done, host_block_bytes)
        size = min(num_bytes - done, host_block_bytes - within)
        yield Extent(device + done, host_blocks[column] * host_block_bytes + within, size)
        done += size


def join(pieces: Iterable[Extent]) -> Iterator[Extent]:
    """The same bytes in fewer extents: neighbours on both sides become one.

    >>> list(join([Extent(0, 300, 100), Extent(100, 400, 100), Extent(200, 700, 100)]))
    [Extent(device=0, host=300, num_bytes=200), Extent(device=200, host=700, num_bytes=100)]
    """
    last = Extent(0, 0, 0)
    for each in pieces:
        if each.device == last.device + last.num_bytes and each.host == last.host + last.num_bytes:
            last = Extent(last.device, last.host, last.num_bytes + each.num_bytes)
            continue
        if last.num_bytes:
            yield last
        last = each
    if last.num_bytes:
        yield last
