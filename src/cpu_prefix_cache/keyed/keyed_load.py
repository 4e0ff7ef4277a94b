"""KeyedLoad: one load of blocks by keys, from its call until it has begun.

waits     the tier below reads what the host lacks --> begun, or gone
begun     `transfers` are under way
gone      some of it is not here any more, or was not read in time: nothing is loaded
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cpu_prefix_cache.keyed.given import Given
from cpu_prefix_cache.offload.transfers import LoadTransfer
from cpu_prefix_cache.pool.block_pool import Pin


@dataclass(slots=True, eq=False)
class KeyedLoad:
    """A load into `blocks` of the last of these keys. While it waits, `pin` keeps what the host has of it."""

    keys: Sequence[bytes]
    blocks: Given
    transfers: list[LoadTransfer] = field(default_factory=list)
    waits: bool = False
    is_gone: bool = False
    pin: Pin | None = None
    deadline: float = 0.0
    host_blocks: int = 0  # that were ready when it was last read for
