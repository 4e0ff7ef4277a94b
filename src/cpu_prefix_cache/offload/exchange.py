"""Exchange: what a load overwrites on the device goes into the host blocks that it reads.

    device    [ x ][ y ][ z ]       load a, b, c there       [ a ][ b ][ c ]
    host      [ a ][ b ][ c ][ w ]  and save x, y, z         [ y ][ z ][ c ][ x ]       w leaves

Else a load holds its chunks twice while it moves, and what the policy evicts leaves in their place. A host block is
free for a save once the load has read it, and must be written before the load overwrites what is saved. So a save goes
into a block that is read `lag` chunks before, and load and saves go in portions (`copier/exchange.py`). The saves of
the first chunks find no such block.
"""

from collections import deque
from collections.abc import Mapping, Sequence

LAGS = 16  # of a load: so much of it is held twice, and portions are half as large


def partners(
    saved: Mapping[bytes, Sequence[int]], filled: Sequence[int], read: Sequence[int | None]
) -> dict[bytes, int]:
    """The host chunks whose blocks saved chunks can take, by the keys of these.

    `saved` gives the device blocks of each chunk. `filled` are those that the load fills, chunk after chunk, and `read`
    the host chunks of the load in the same order, None where one stays.
    """
    lag = -(-len(read) // LAGS)
    left = deque((at, chunk) for at, chunk in enumerate(read) if chunk is not None)
    if not left:
        return {}
    keys = {block: key for key, blocks in saved.items() for block in blocks}
    overwritten: dict[bytes, int] = {}  # by the chunk of the load that does so first
    for at, block in enumerate(filled):
        if block in keys:
            overwritten.setdefault(keys[block], at * len(read) // len(filled))
    found: dict[bytes, int] = {}
    for key, at in overwritten.items():
        if left and left[0][0] + lag <= at:
            found[key] = left.popleft()[1]
    return found
