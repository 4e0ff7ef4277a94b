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

from collections.abc import Sequence
from itertools import accumulate

LAYOUT_VERSION = 1  # for whoever keeps pieces longer than the process that wrote them


class PieceLayout:
    """Byte offsets of the parts within a piece.

    `block_bytes[i]` is what one device block weighs in part i; the parts come in canonical order, layer by layer.
    From `offsets[i]` on lie the bytes of part i, device block after device block.
    """

    def __init__(self, block_bytes: Sequence[int], device_blocks: int) -> None:
        *offsets, self.num_bytes = accumulate((size * device_blocks for size in block_bytes), initial=0)
        self.offsets = tuple(offsets)
