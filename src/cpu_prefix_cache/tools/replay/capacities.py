"""Round capacities to replay, where none were given: memory is bought in powers of two.

>>> round_capacity(1372, None), round_capacity(43_924, None)
(1400, 44000)
>>> round_capacity(1372, 64 << 20) * 64 // 1024  # GiB
64
"""

import math

# Of the different blocks of a trace.
DEFAULT_PARTS = (32, 16, 8, 4, 2)


def round_capacity(blocks: int, block_bytes: int | None) -> int:
    """Near `blocks`: the blocks of a power of two of bytes, or two digits and zeros if the bytes are not known."""
    blocks = max(1, blocks)
    if block_bytes is not None:
        return max(1, (1 << round(math.log2(blocks * block_bytes))) // block_bytes)
    return round(blocks, 2 - len(str(blocks))) if blocks >= 100 else blocks
